"""Optimizers as pairs of pure functions over trees, for one model or a stack of members."""

from tdfunc.optim import schedules
from tdfunc.optim._base import AbstractOptimizer
from tdfunc.optim._combine import Chain, Masked, Multi, chain, masked, multi
from tdfunc.optim._maps import (
    GradientMap,
    adaptive_grad_clip,
    add_decayed_weights,
    clip_by_global_norm,
    clip_by_member_norm,
)
from tdfunc.optim._optimizer import Hyper, Optimizer, Schedule
from tdfunc.optim._rules.adadelta import adadelta
from tdfunc.optim._rules.adafactor import adafactor
from tdfunc.optim._rules.adagrad import adagrad
from tdfunc.optim._rules.adam import adam, adamax, adamw
from tdfunc.optim._rules.asgd import asgd
from tdfunc.optim._rules.lion import lion
from tdfunc.optim._rules.muon import muon
from tdfunc.optim._rules.nadam import nadam
from tdfunc.optim._rules.radam import radam
from tdfunc.optim._rules.rmsprop import rmsprop
from tdfunc.optim._rules.rprop import rprop
from tdfunc.optim._rules.sgd import sgd
from tdfunc.optim._rules.sparse_adam import sparse_adam
from tdfunc.optim._sam import sam
from tdfunc.optim._wrappers.accumulate import Accumulate, accumulate
from tdfunc.optim._wrappers.ema import Ema, ema
from tdfunc.optim._wrappers.finite import ApplyIfFinite, apply_if_finite
from tdfunc.optim._wrappers.lookahead import Lookahead, lookahead
from tdfunc.optim._wrappers.masters import Masters, masters
from tdfunc.optim._wrappers.schedule_free import ScheduleFree, schedule_free

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
