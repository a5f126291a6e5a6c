"""Ensembles: many members in one stacked tree, and one call for all of them."""
