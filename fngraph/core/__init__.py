"""Pure decisions: specs, modes, sizes, dispatch. Imports no torch.

The list below is the table of contents, grouped by file. What is not in it: text.py (tables as
text) and where.py (the user's own line).
"""

# ruff: noqa: I001 - grouped by file in reading order, not by the alphabet

# modes.py: the five modes, support levels
from fngraph.core.modes import Mode, Support, runtime_modes

# spec.py: what arrives, and the padded key
from fngraph.core.spec import BatchDescriptor, BatchSpec, HostBounds, Key, KeyBounds

# limits.py: bounds of every step
from fngraph.core.limits import Limits

# covering.py: descriptor fields, and the rules by which a key's value covers a batch's
from fngraph.core.covering import AtLeast, Equal, Field, RoundedTo, Rule

# sizes.py: capture sizes and ladders
from fngraph.core.sizes import Ladders, check_sizes, default_sizes, ladders

# resolution.py: which modes the backends allow
from fngraph.core.resolution import Resolution, resolve

# compiling.py: levels of compilation, and the ranges that compiled code serves
from fngraph.core.compiling import Range, Span

# table.py: every key, as one value
from fngraph.core.table import DispatchTable

# build.py: the keys that are captured
from fngraph.core.build import adapter_counts, build_table

# lookup.py: the table arranged for a step, and its answer
from fngraph.core.lookup import Dispatch

# dispatching.py: the decision, and its definition
from fngraph.core.dispatching import dispatch, dispatch_by_definition

# explanation.py: the decision with everything decided against
from fngraph.core.explanation import Candidate, Explanation, explain

# agreement.py: ranks that must run alike
from fngraph.core.agreement import Decision, Proposal, agree, propose, settle

# encoders/plans.py: encoder graphs
from fngraph.core.encoders.plans import EncoderPlan, Path, fit, plan_encoder, token_budgets

# encoders/items.py: items packed into them
from fngraph.core.encoders.items import Balance, Item, Packed, Run, balance, item_of, pack

# costs/planner.py: sizes from measured traffic
from fngraph.core.costs.planner import plan_sizes, planned_cost

# costs/roofline.py: what one op takes, by measured constants
from fngraph.core.costs.roofline import Constants, Curve, DeviceConstants, Grid, HostConstants, Work

# costs/launch.py: what a step takes in each mode, predicted
from fngraph.core.costs.launch import LaunchModel, Part, StepTime, crossing, predict

# stats.py: counts of what ran
from fngraph.core.stats import Stats

# flights/flight.py: recorded specs, replayed offline
from fngraph.core.flights.flight import Flight, Replayed

# flights/log.py: what the steps of a run were
from fngraph.core.flights.log import Flown, KeyLog, KeyPart, Log

# memory.py: what keys cost
from fngraph.core.memory import Bytes, KeyMemory, MemoryTable

# buffers.py: symbolic dims, and the plan of what to allocate
from fngraph.core.buffers import Buffer, BufferPlan, Dim, PlannedBuffer, Sizes, buffer, key_sizes
from fngraph.core.buffers import plan_buffers

# trees.py: pytrees, through optree
from fngraph.core import trees  # noqa: F401 - reached as fg.core.trees

# structs.py: batches as pytrees whose fields say their role
from fngraph.core.structs import buffers_of, check_declared, host, host_field, static, struct

# program.py: a straight line of instructions, and how a mode groups it into graphs
from fngraph.core.program import Instruction, Program

__all__ = [
    "AtLeast",
    "Balance",
    "BatchDescriptor",
    "BatchSpec",
    "Buffer",
    "BufferPlan",
    "Bytes",
    "Candidate",
    "Constants",
    "Curve",
    "Decision",
    "DeviceConstants",
    "Dim",
    "Dispatch",
    "DispatchTable",
    "EncoderPlan",
    "Equal",
    "Explanation",
    "Field",
    "Flight",
    "Flown",
    "Grid",
    "HostBounds",
    "HostConstants",
    "Instruction",
    "Item",
    "Key",
    "KeyBounds",
    "KeyLog",
    "KeyMemory",
    "KeyPart",
    "Ladders",
    "LaunchModel",
    "Limits",
    "Log",
    "MemoryTable",
    "Mode",
    "Packed",
    "Part",
    "Path",
    "PlannedBuffer",
    "Program",
    "Proposal",
    "Range",
    "Replayed",
    "Resolution",
    "RoundedTo",
    "Rule",
    "Run",
    "Sizes",
    "Span",
    "Stats",
    "StepTime",
    "Support",
    "Work",
    "adapter_counts",
    "agree",
    "balance",
    "buffer",
    "buffers_of",
    "build_table",
    "check_declared",
    "check_sizes",
    "crossing",
    "default_sizes",
    "dispatch",
    "dispatch_by_definition",
    "explain",
    "fit",
    "host",
    "host_field",
    "item_of",
    "key_sizes",
    "ladders",
    "pack",
    "plan_buffers",
    "plan_encoder",
    "plan_sizes",
    "planned_cost",
    "predict",
    "propose",
    "resolve",
    "runtime_modes",
    "settle",
    "static",
    "struct",
    "token_budgets",
]
