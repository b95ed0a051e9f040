"""What is known of torch beyond its documentation: below fx, ops and graphs, above nothing.

`names` and `tracing` hold every private name of torch that the library touches, once, with what it
is for; where two versions differ, the difference stays in there. `schemas` and `memory` hold what
ops and tensors say of themselves.
"""
