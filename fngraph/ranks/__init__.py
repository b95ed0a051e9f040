"""Many processes that run one function: a mesh of them, and what they tell each other."""

from fngraph.ranks import norms as norms, rows as rows  # ops that passes put into graphs
from fngraph.ranks.collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    reduce_scatter as reduce_scatter,
)
from fngraph.ranks.mesh import Axis as Axis, Mesh as Mesh, make_mesh as make_mesh
