"""Models as points: merging methods, distances, the losses between models, and the order of their neurons."""

from tdfunc.weights.averages.karcher import karcher
from tdfunc.weights.averages.linear import linear
from tdfunc.weights.averages.model_stock import model_stock
from tdfunc.weights.averages.multislerp import multislerp
from tdfunc.weights.averages.nuslerp import nuslerp
from tdfunc.weights.averages.slerp import slerp
from tdfunc.weights.method import Method, PerModel, method
from tdfunc.weights.methods import METHODS, table
from tdfunc.weights.space.barriers import barrier, barriers, line_losses
from tdfunc.weights.space.distances import cosine, distance
from tdfunc.weights.space.matching import channel_groups, permute_channels, weight_matching
from tdfunc.weights.swaps.arcee_fusion import arcee_fusion
from tdfunc.weights.swaps.nearswap import nearswap
from tdfunc.weights.swaps.passthrough import passthrough
from tdfunc.weights.swaps.stack_layers import stack_layers
from tdfunc.weights.tasks.breadcrumbs import breadcrumbs, breadcrumbs_ties
from tdfunc.weights.tasks.dare import dare_linear, dare_ties
from tdfunc.weights.tasks.della import della, della_linear
from tdfunc.weights.tasks.ram import ram, ramplus_tl
from tdfunc.weights.tasks.sce import sce
from tdfunc.weights.tasks.task_arithmetic import task_arithmetic
from tdfunc.weights.tasks.ties import ties

__all__ = [
    "METHODS",
    "Method",
    "PerModel",
    "arcee_fusion",
    "barrier",
    "barriers",
    "breadcrumbs",
    "breadcrumbs_ties",
    "channel_groups",
    "cosine",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "distance",
    "karcher",
    "line_losses",
    "linear",
    "method",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "passthrough",
    "permute_channels",
    "ram",
    "ramplus_tl",
    "sce",
    "slerp",
    "stack_layers",
    "table",
    "task_arithmetic",
    "ties",
    "weight_matching",
]


def __dir__() -> list[str]:
    return list(__all__)
