"""Pure decisions: specs, modes, sizes, dispatch. Imports no torch.

The list below is the table of contents, grouped by file.
"""

# ruff: noqa: I001 - grouped by file in reading order, not by the alphabet

# modes.py: the five modes, support levels
from fngraph.core.modes import Mode as Mode
from fngraph.core.modes import Support as Support
from fngraph.core.modes import runtime_modes as runtime_modes

# spec.py: what arrives, and the padded key
from fngraph.core.spec import BatchDescriptor as BatchDescriptor
from fngraph.core.spec import BatchSpec as BatchSpec
from fngraph.core.spec import HostBounds as HostBounds

# limits.py: bounds of every step
from fngraph.core.limits import Limits as Limits

# fields.py: descriptor fields and their covering rules
from fngraph.core.fields import AtLeast as AtLeast
from fngraph.core.fields import Equal as Equal
from fngraph.core.fields import Field as Field
from fngraph.core.fields import RoundedTo as RoundedTo

# sizes.py: capture sizes and ladders
from fngraph.core.sizes import Ladders as Ladders
from fngraph.core.sizes import check_sizes as check_sizes
from fngraph.core.sizes import default_sizes as default_sizes
from fngraph.core.sizes import ladders as ladders

# resolve.py: which modes the backends allow
from fngraph.core.resolve import Resolution as Resolution
from fngraph.core.resolve import resolve as resolve

# table.py: every key
from fngraph.core.table import DispatchTable as DispatchTable
from fngraph.core.table import build_table as build_table

# dispatch.py: the decision
from fngraph.core.dispatch import Dispatch as Dispatch
from fngraph.core.dispatch import dispatch as dispatch
from fngraph.core.dispatch import dispatch_by_definition as dispatch_by_definition

# explain.py: the decision with everything decided against
from fngraph.core.explain import Candidate as Candidate
from fngraph.core.explain import Explanation as Explanation
from fngraph.core.explain import explain as explain

# stats.py: counts of what ran
from fngraph.core.stats import Stats as Stats

# struct.py, buffers.py: batches as static buffers
from fngraph.core.buffers import Buffer as Buffer
from fngraph.core.buffers import BufferPlan as BufferPlan
from fngraph.core.buffers import Dim as Dim
from fngraph.core.buffers import PlannedBuffer as PlannedBuffer
from fngraph.core.buffers import buffer as buffer
from fngraph.core.buffers import key_sizes as key_sizes
from fngraph.core.buffers import plan_buffers as plan_buffers
from fngraph.core.struct import buffers_of as buffers_of
from fngraph.core.struct import host as host
from fngraph.core.struct import host_field as host_field
from fngraph.core.struct import static as static
from fngraph.core.struct import struct as struct

# program.py: a straight line of steps, and how a mode groups it into graphs
from fngraph.core.program import Program as Program
from fngraph.core.program import Step as Step

__all__ = [
    "AtLeast",
    "BatchDescriptor",
    "BatchSpec",
    "Buffer",
    "BufferPlan",
    "Candidate",
    "Dim",
    "Dispatch",
    "DispatchTable",
    "Equal",
    "Explanation",
    "Field",
    "HostBounds",
    "Ladders",
    "Limits",
    "Mode",
    "PlannedBuffer",
    "Program",
    "Resolution",
    "RoundedTo",
    "Stats",
    "Step",
    "Support",
    "buffer",
    "buffers_of",
    "build_table",
    "check_sizes",
    "default_sizes",
    "dispatch",
    "dispatch_by_definition",
    "explain",
    "host",
    "host_field",
    "key_sizes",
    "ladders",
    "plan_buffers",
    "resolve",
    "runtime_modes",
    "static",
    "struct",
]
