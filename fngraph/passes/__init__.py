"""Passes: pure functions over traced graphs, in a list that is printed. See docs/compile.md."""

from fngraph.passes.pattern import (
    Found as Found,
    call as call,
    dtype_of as dtype_of,
    either as either,
    insert as insert,
    is_dense as is_dense,
    item as item,
    match as match,
    name as name,
    put as put,
    replace as replace,
    sizes as sizes,
    strides as strides,
)
from fngraph.passes.running.checks import Rewritten as Rewritten
from fngraph.passes.running.frame import Applied as Applied, Pass as Pass
from fngraph.passes.running.nearest import why_not as why_not
from fngraph.passes.shipped import DEFAULTS as DEFAULTS, PASSES as PASSES
