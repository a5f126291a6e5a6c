"""Optimizers as pairs of pure functions over trees, for one model or a stack of members."""

from tdfunc.optim import schedules
from tdfunc.optim._sam import sam
from tdfunc.optim.base import AbstractOptimizer
from tdfunc.optim.combine import Chain, Masked, Multi, chain, masked, multi
from tdfunc.optim.gradient_maps import (
    GradientMap,
    adaptive_grad_clip,
    add_decayed_weights,
    clip_by_global_norm,
    clip_by_member_norm,
)
from tdfunc.optim.optimizer import Hyper, Optimizer, Schedule
from tdfunc.optim.rules.adadelta import adadelta
from tdfunc.optim.rules.adafactor import adafactor
from tdfunc.optim.rules.adagrad import adagrad
from tdfunc.optim.rules.adam import adam, adamax, adamw
from tdfunc.optim.rules.asgd import asgd
from tdfunc.optim.rules.lion import lion
from tdfunc.optim.rules.muon import muon
from tdfunc.optim.rules.nadam import nadam
from tdfunc.optim.rules.radam import radam
from tdfunc.optim.rules.rmsprop import rmsprop
from tdfunc.optim.rules.rprop import rprop
from tdfunc.optim.rules.sgd import sgd
from tdfunc.optim.rules.sparse_adam import sparse_adam
from tdfunc.optim.wrappers.accumulate import Accumulate, accumulate
from tdfunc.optim.wrappers.ema import Ema, ema
from tdfunc.optim.wrappers.finite import ApplyIfFinite, apply_if_finite
from tdfunc.optim.wrappers.lookahead import Lookahead, lookahead
from tdfunc.optim.wrappers.masters import Masters, masters
from tdfunc.optim.wrappers.schedule_free import ScheduleFree, schedule_free

__all__ = [
    "AbstractOptimizer",
    "Accumulate",
    "ApplyIfFinite",
    "Chain",
    "Ema",
    "GradientMap",
    "Hyper",
    "Lookahead",
    "Masked",
    "Masters",
    "Multi",
    "Optimizer",
    "Schedule",
    "ScheduleFree",
    "accumulate",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "apply_if_finite",
    "asgd",
    "chain",
    "clip_by_global_norm",
    "clip_by_member_norm",
    "ema",
    "lion",
    "lookahead",
    "masked",
    "masters",
    "multi",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sam",
    "schedule_free",
    "schedules",
    "sgd",
    "sparse_adam",
]


def __dir__() -> list[str]:
    return list(__all__)
