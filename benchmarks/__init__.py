"""Measures tdfunc against what it is compared with, and writes docs/benchmarks.md: `python -m benchmarks`."""

import os

# As it is before tensordict writes its settings there, which another version of it does not understand.
ENVIRON = dict(os.environ)
