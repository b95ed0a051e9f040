"""Pure decisions: specs, modes, sizes, dispatch. Imports no torch.

The list below is the table of contents, grouped by file. What is not in it: text.py (tables as
text), trees.py (pytrees, through optree) and where.py (the user's own line).
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
from fngraph.core.spec import Key as Key
from fngraph.core.spec import KeyBounds as KeyBounds

# limits.py: bounds of every step
from fngraph.core.limits import Limits as Limits

# fields.py: descriptor fields and their covering rules
from fngraph.core.fields import AtLeast as AtLeast
from fngraph.core.fields import Equal as Equal
from fngraph.core.fields import Field as Field
from fngraph.core.fields import RoundedTo as RoundedTo
from fngraph.core.fields import Rule as Rule

# sizes.py: capture sizes and ladders
from fngraph.core.sizes import Ladders as Ladders
from fngraph.core.sizes import check_sizes as check_sizes
from fngraph.core.sizes import default_sizes as default_sizes
from fngraph.core.sizes import ladders as ladders

# resolution.py: which modes the backends allow
from fngraph.core.resolution import Resolution as Resolution
from fngraph.core.resolution import resolve as resolve

# table.py: every key, as one value
from fngraph.core.table import DispatchTable as DispatchTable

# build.py: the keys that are captured
from fngraph.core.build import adapter_counts as adapter_counts
from fngraph.core.build import build_table as build_table

# lookup.py: the table arranged for a step, and its answer
from fngraph.core.lookup import Dispatch as Dispatch

# dispatching.py: the decision, and its definition
from fngraph.core.dispatching import dispatch as dispatch
from fngraph.core.dispatching import dispatch_by_definition as dispatch_by_definition

# explanation.py: the decision with everything decided against
from fngraph.core.explanation import Candidate as Candidate
from fngraph.core.explanation import Explanation as Explanation
from fngraph.core.explanation import explain as explain

# agreement.py: ranks that must run alike
from fngraph.core.agreement import Decision as Decision
from fngraph.core.agreement import Proposal as Proposal
from fngraph.core.agreement import agree as agree
from fngraph.core.agreement import propose as propose
from fngraph.core.agreement import settle as settle

# encoder.py: encoder graphs, and items packed into them
from fngraph.core.encoder import Balance as Balance
from fngraph.core.encoder import EncoderPlan as EncoderPlan
from fngraph.core.encoder import Item as Item
from fngraph.core.encoder import Packed as Packed
from fngraph.core.encoder import Path as Path
from fngraph.core.encoder import Run as Run
from fngraph.core.encoder import balance as balance
from fngraph.core.encoder import fit as fit
from fngraph.core.encoder import pack as pack
from fngraph.core.encoder import plan_encoder as plan_encoder
from fngraph.core.encoder import token_budgets as token_budgets

# planner.py: sizes from measured traffic
from fngraph.core.planner import plan_sizes as plan_sizes
from fngraph.core.planner import planned_cost as planned_cost

# stats.py: counts of what ran
from fngraph.core.stats import Stats as Stats

# flight.py: recorded specs, replayed offline
from fngraph.core.flight import Flight as Flight
from fngraph.core.flight import Replayed as Replayed

# memory.py: what keys cost
from fngraph.core.memory import Bytes as Bytes
from fngraph.core.memory import KeyMemory as KeyMemory
from fngraph.core.memory import MemoryTable as MemoryTable

# buffers.py: symbolic dims, and the plan of what to allocate
from fngraph.core.buffers import Buffer as Buffer
from fngraph.core.buffers import BufferPlan as BufferPlan
from fngraph.core.buffers import Dim as Dim
from fngraph.core.buffers import PlannedBuffer as PlannedBuffer
from fngraph.core.buffers import Sizes as Sizes
from fngraph.core.buffers import buffer as buffer
from fngraph.core.buffers import key_sizes as key_sizes
from fngraph.core.buffers import plan_buffers as plan_buffers

# structs.py: batches as pytrees whose fields say their role
from fngraph.core.structs import buffers_of as buffers_of
from fngraph.core.structs import check_declared as check_declared
from fngraph.core.structs import host as host
from fngraph.core.structs import host_field as host_field
from fngraph.core.structs import static as static
from fngraph.core.structs import struct as struct

# program.py: a straight line of instructions, and how a mode groups it into graphs
from fngraph.core.program import Instruction as Instruction
from fngraph.core.program import Program as Program

__all__ = [
    "AtLeast",
    "Balance",
    "BatchDescriptor",
    "BatchSpec",
    "Buffer",
    "BufferPlan",
    "Bytes",
    "Candidate",
    "Decision",
    "Dim",
    "Dispatch",
    "DispatchTable",
    "EncoderPlan",
    "Equal",
    "Explanation",
    "Field",
    "Flight",
    "HostBounds",
    "Instruction",
    "Item",
    "Key",
    "KeyBounds",
    "KeyMemory",
    "Ladders",
    "Limits",
    "MemoryTable",
    "Mode",
    "Packed",
    "Path",
    "PlannedBuffer",
    "Program",
    "Proposal",
    "Replayed",
    "Resolution",
    "RoundedTo",
    "Rule",
    "Run",
    "Sizes",
    "Stats",
    "Support",
    "adapter_counts",
    "agree",
    "balance",
    "buffer",
    "buffers_of",
    "build_table",
    "check_declared",
    "check_sizes",
    "default_sizes",
    "dispatch",
    "dispatch_by_definition",
    "explain",
    "fit",
    "host",
    "host_field",
    "key_sizes",
    "ladders",
    "pack",
    "plan_buffers",
    "plan_encoder",
    "plan_sizes",
    "planned_cost",
    "propose",
    "resolve",
    "runtime_modes",
    "settle",
    "static",
    "struct",
    "token_budgets",
]
