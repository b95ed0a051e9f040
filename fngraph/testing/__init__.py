"""What tests assert: of a captured key's graphs, and of a backend of attention."""

from fngraph.testing.conformance import Checked as Checked, check_backend as check_backend
from fngraph.testing.graph import assert_graph as assert_graph
