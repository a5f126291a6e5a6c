"""Public reports of other projects, and what tdfunc does in the same situation: `python -m benchmarks.field`."""
