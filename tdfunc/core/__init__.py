"""The base of every tree: errors, keys, shapes, ties, context, memory, the collection, pytrees and walks."""
