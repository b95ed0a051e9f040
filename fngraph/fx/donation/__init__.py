"""Donation: each donated leaf's new value ends up in its own buffer."""
