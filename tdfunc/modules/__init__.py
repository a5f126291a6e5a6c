"""Modules as pure functions: trees out of modules, trees into modules, and `functional`."""
