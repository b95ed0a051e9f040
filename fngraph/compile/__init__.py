"""Pieces compiled ahead of time, each range of sizes once; called as one opaque op."""
