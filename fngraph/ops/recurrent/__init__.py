"""Primitives over recurrent state: a state a request, updated token by token."""
