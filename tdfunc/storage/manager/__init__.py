"""The checkpoints of a run, and saves in the background."""
