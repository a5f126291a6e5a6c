"""The parts of other operations: reading nodes, converting values, casts, foreach kernels."""
