"""Numbers and layers that are taken from one model."""
