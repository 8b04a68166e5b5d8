"""Benchmarks: ours against the straightforward way, on the same work, in one process."""
