"""Counts what was tested, and how, for docs/reliability.md: `python -m benchmarks.trust`."""
