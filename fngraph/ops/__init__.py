"""Primitives: opaque ops at which graphs are cut, each with several backends."""

from fngraph.ops import (
    attention_backends as attention_backends,
    recurrent_backends as recurrent_backends,
)
from fngraph.ops.attention_config import (
    AttentionConfig as AttentionConfig,
    AttentionMeta as AttentionMeta,
)
from fngraph.ops.backend import Backend as Backend
from fngraph.ops.cascade_attention import CASCADE as CASCADE, cascade as cascade
from fngraph.ops.choice import Hybrid as Hybrid
from fngraph.ops.convolution import CAUSAL_CONV as CAUSAL_CONV, causal_conv as causal_conv
from fngraph.ops.delta_rule import GATED_DELTA as GATED_DELTA, gated_delta as gated_delta
from fngraph.ops.latent_attention import MLA as MLA, mla as mla
from fngraph.ops.paged_attention import ATTENTION as ATTENTION, attention as attention
from fngraph.ops.plan import Plan as Plan
from fngraph.ops.primitive import (
    PRIMITIVES as PRIMITIVES,
    Primitive as Primitive,
    primitive as primitive,
)
from fngraph.ops.recurrent import StateMeta as StateMeta
from fngraph.ops.state_space import SSD as SSD, ssd as ssd
