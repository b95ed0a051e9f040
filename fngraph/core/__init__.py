"""Pure decisions: specs, modes, sizes, dispatch. Imports no torch.

The list below is the table of contents, grouped by file.
"""

# ruff: noqa: I001 - grouped by file in reading order, not by the alphabet

# modes.py: the five modes, support levels
from fngraph.core.modes import Mode as Mode
from fngraph.core.modes import Support as Support
from fngraph.core.modes import runtime_modes as runtime_modes

# spec.py, descriptor.py: what arrives, and the padded key
from fngraph.core.spec import BatchDescriptor as BatchDescriptor
from fngraph.core.spec import BatchSpec as BatchSpec
from fngraph.core.spec import HostBounds as HostBounds
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

# resolve.py: which modes the backends allow
from fngraph.core.resolution import Resolution as Resolution
from fngraph.core.resolution import resolve as resolve

# table.py, build.py: every key
from fngraph.core.table import DispatchTable as DispatchTable
from fngraph.core.build import build_table as build_table

# dispatch.py: the decision
from fngraph.core.dispatching import Dispatch as Dispatch
from fngraph.core.dispatching import dispatch as dispatch
from fngraph.core.dispatching import dispatch_by_definition as dispatch_by_definition

# explain.py: the decision with everything decided against
from fngraph.core.explanation import Candidate as Candidate
from fngraph.core.explanation import Explanation as Explanation
from fngraph.core.explanation import explain as explain

# adapters.py: adapter counts to capture
from fngraph.core.build import adapter_counts as adapter_counts

# agree.py: ranks that must run alike
from fngraph.core.agreement import Decision as Decision
from fngraph.core.agreement import Proposal as Proposal
from fngraph.core.agreement import agree as agree
from fngraph.core.agreement import propose as propose
from fngraph.core.agreement import settle as settle

# encoder.py, packing.py: encoder graphs, and items packed into them
from fngraph.core.encoder import EncoderPlan as EncoderPlan
from fngraph.core.encoder import Path as Path
from fngraph.core.encoder import fit as fit
from fngraph.core.encoder import plan_encoder as plan_encoder
from fngraph.core.encoder import token_budgets as token_budgets
from fngraph.core.encoder import Balance as Balance
from fngraph.core.encoder import Item as Item
from fngraph.core.encoder import Packed as Packed
from fngraph.core.encoder import Run as Run
from fngraph.core.encoder import balance as balance
from fngraph.core.encoder import pack as pack

# planner.py: sizes from measured traffic
from fngraph.core.planner import plan_sizes as plan_sizes
from fngraph.core.planner import planned_cost as planned_cost

# flight.py: recorded specs, replayed offline
from fngraph.core.flight import Flight as Flight
from fngraph.core.flight import Replayed as Replayed

# memory.py: what keys cost
from fngraph.core.memory import Bytes as Bytes
from fngraph.core.memory import KeyMemory as KeyMemory
from fngraph.core.memory import MemoryTable as MemoryTable

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
from fngraph.core.structs import buffers_of as buffers_of
from fngraph.core.structs import check_declared as check_declared
from fngraph.core.structs import host as host
from fngraph.core.structs import host_field as host_field
from fngraph.core.structs import static as static
from fngraph.core.structs import struct as struct

# program.py: a straight line of steps, and how a mode groups it into graphs
from fngraph.core.program import Program as Program
from fngraph.core.program import Instruction as Instruction

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
