"""Ensembles: stacked trees, one call for all members, and how sure they are."""
