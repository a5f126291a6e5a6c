"""Optimizers, one rule a file: hyperparameters and the arithmetic of a step."""
