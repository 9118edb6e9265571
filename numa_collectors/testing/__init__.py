"""Suites and tools to prove that a ring, a snapshot or a placement keeps its contract."""
