"""The base of every tree: errors, keys, shapes, ties, non-tensor data, the collection and its pytree registration."""
