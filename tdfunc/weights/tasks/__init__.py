"""Sums of task vectors, the differences between models and their base: made sparse, elected by sign, added up."""
