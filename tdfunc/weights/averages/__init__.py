"""Means of models: of the weights themselves, and of their directions."""
