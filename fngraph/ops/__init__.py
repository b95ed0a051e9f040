"""Primitives: opaque ops at which graphs are cut, each with several backends."""

from fngraph.ops import attention_backends as attention_backends
from fngraph.ops.attention_config import (
    AttentionConfig as AttentionConfig,
    AttentionMeta as AttentionMeta,
)
from fngraph.ops.choice import Hybrid as Hybrid
from fngraph.ops.paged_attention import ATTENTION as ATTENTION, attention as attention
from fngraph.ops.plan import Plan as Plan
from fngraph.ops.primitive import (
    PRIMITIVES as PRIMITIVES,
    Backend as Backend,
    Primitive as Primitive,
    primitive as primitive,
)
