"""How a list of passes runs: each on a copy of the graph, checked afterwards."""
