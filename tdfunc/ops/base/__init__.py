"""What other operations are made of: reading nodes, converting values, casts, foreach kernels."""
