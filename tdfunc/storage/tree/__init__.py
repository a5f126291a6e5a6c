"""The description of a tree as JSON, and the tree that it describes."""
