"""Primitives: opaque ops at which graphs are cut, each with several backends."""

from fngraph.ops.paged_attention import (
    ATTENTION as ATTENTION,
    AttentionConfig as AttentionConfig,
    AttentionMeta as AttentionMeta,
    attention as attention,
)
from fngraph.ops.primitive import (
    PRIMITIVES as PRIMITIVES,
    Backend as Backend,
    Primitive as Primitive,
    primitive as primitive,
)
