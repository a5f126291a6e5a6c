"""Numbers of leaves: pointwise functions, reductions, comparisons, a tree as one vector."""
