"""Folders of transformers: models as trees, and trees as folders."""
