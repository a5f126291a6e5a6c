"""Sweeps: hyperparameters of many members as a tree, folds and bootstraps, early stopping, the best members, results.

E is the number of members and N the number of examples. A member of a sweep is one index of stacked trees: parameters,
optimizer state and hyperparameters have the same index, and a member equals its own separate run.
"""

from tdfunc.sweep.blocks import train_blocks
from tdfunc.sweep.choose import EarlyStopping, Results, best, elites, keep_best, rank, successive_halving
from tdfunc.sweep.space import bootstrap, grid, kfold, log_uniform, random_search, uniform, weights_of

__all__ = [
    "EarlyStopping",
    "Results",
    "best",
    "bootstrap",
    "elites",
    "grid",
    "keep_best",
    "kfold",
    "log_uniform",
    "random_search",
    "rank",
    "successive_halving",
    "train_blocks",
    "uniform",
    "weights_of",
]


def __dir__() -> list[str]:
    return list(__all__)
