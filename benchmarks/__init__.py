"""Measures tdfunc against what it is compared with, and writes docs/benchmarks.md: `python -m benchmarks`."""
