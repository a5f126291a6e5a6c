"""Optimizers as pairs of pure functions over trees, for one model or a stack of members."""

from tdfunc.optim import schedules as schedules
from tdfunc.optim._adam import adam as adam
from tdfunc.optim._adam import adamw as adamw
from tdfunc.optim._base import AbstractOptimizer as AbstractOptimizer
from tdfunc.optim._base import Hyper as Hyper
from tdfunc.optim._base import Optimizer as Optimizer
from tdfunc.optim._base import Schedule as Schedule
from tdfunc.optim._clip import GradientMap as GradientMap
from tdfunc.optim._clip import check_finite as check_finite
from tdfunc.optim._clip import clip_by_global_norm as clip_by_global_norm
from tdfunc.optim._clip import clip_by_member_norm as clip_by_member_norm
from tdfunc.optim._combine import Chain as Chain
from tdfunc.optim._combine import Masked as Masked
from tdfunc.optim._combine import Multi as Multi
from tdfunc.optim._combine import chain as chain
from tdfunc.optim._combine import masked as masked
from tdfunc.optim._combine import multi as multi
from tdfunc.optim._sgd import sgd as sgd
