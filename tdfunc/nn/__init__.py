"""Modules on trees: `nn.Module`s that hold or run them."""

from tdfunc.nn.ensemble import EnsembleModule as EnsembleModule
