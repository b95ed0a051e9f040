"""Primitives: opaque ops at which graphs are cut, each with several backends."""

from fngraph.ops import (
    fused as fused,
    fused_fp8 as fused_fp8,
    fused_linear as fused_linear,
    fused_linear_fp8 as fused_linear_fp8,
    grouped as grouped,
    paired_linears as paired_linears,
    row_max as row_max,
    shipped as shipped,
)
from fngraph.ops.backend import Backend as Backend, Plan as Plan
from fngraph.ops.choice import Hybrid as Hybrid
from fngraph.ops.fp8 import (
    quantize_fp8 as quantize_fp8,
    quantize_fp8_rows as quantize_fp8_rows,
    scaled_linear as scaled_linear,
)
from fngraph.ops.listed import listed_levels as listed_levels
from fngraph.ops.paged.cascades import (
    CASCADE as CASCADE,
    CascadeArgs as CascadeArgs,
    cascade as cascade,
)
from fngraph.ops.paged.config import (
    AttentionArgs as AttentionArgs,
    AttentionConfig as AttentionConfig,
    AttentionMeta as AttentionMeta,
)
from fngraph.ops.paged.latent import (
    MLA as MLA,
    MLAArgs as MLAArgs,
    MLAConfig as MLAConfig,
    mla as mla,
)
from fngraph.ops.paged.multi_head import ATTENTION as ATTENTION, attention as attention
from fngraph.ops.primitives import (
    PRIMITIVES as PRIMITIVES,
    Pages as Pages,
    Primitive as Primitive,
    define as define,
    primitive as primitive,
)
from fngraph.ops.recurrent.convolution import (
    CAUSAL_CONV as CAUSAL_CONV,
    CausalConvArgs as CausalConvArgs,
    CausalConvConfig as CausalConvConfig,
    causal_conv as causal_conv,
)
from fngraph.ops.recurrent.delta_rule import (
    GATED_DELTA as GATED_DELTA,
    GatedDeltaArgs as GatedDeltaArgs,
    GatedDeltaConfig as GatedDeltaConfig,
    gated_delta as gated_delta,
)
from fngraph.ops.recurrent.requests import StateMeta as StateMeta
from fngraph.ops.recurrent.state_space import (
    SSD as SSD,
    SSDArgs as SSDArgs,
    SSDConfig as SSDConfig,
    ssd as ssd,
)
from fngraph.ops.side_by_side import lay_side_by_side as lay_side_by_side
from fngraph.ops.slots import write_cache as write_cache
from fngraph.ops.varlen import (
    VARLEN as VARLEN,
    VarlenArgs as VarlenArgs,
    VarlenConfig as VarlenConfig,
    varlen_attention as varlen_attention,
)
