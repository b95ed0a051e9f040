"""The stages between a function and its graphs, each an immutable value with the next verb.

    Traced --split--> Split --lower--> Lowered --compile--> Compiled --capture--> Captured

Every stage prints (`repr`, `as_text()`), and runs without a GPU; `Captured` does on the tape.
"""

from fngraph.options import Options as Options
from fngraph.stages.compiled import Compiled as Compiled
from fngraph.stages.lowered import Lowered as Lowered
from fngraph.stages.split import Split as Split
from fngraph.stages.traced import Traced as Traced, like as like, trace_function as trace_function
