"""Modules on trees: `nn.Module`s that hold or run them."""

from tdfunc.core.surface import surface as _surface
from tdfunc.nn._batch_ensemble import BatchEnsembleConv2d as BatchEnsembleConv2d
from tdfunc.nn._batch_ensemble import BatchEnsembleLinear as BatchEnsembleLinear
from tdfunc.nn._batch_ensemble import EnsembleLinear as EnsembleLinear
from tdfunc.nn._batch_ensemble import TabM as TabM
from tdfunc.nn._batch_ensemble import batch_ensemble as batch_ensemble
from tdfunc.nn.base import TensorDictModuleBase as TensorDictModuleBase
from tdfunc.nn.base import dispatch as dispatch
from tdfunc.nn.ensemble import EnsembleModule as EnsembleModule
from tdfunc.nn.interaction import InteractionType as InteractionType
from tdfunc.nn.module import TensorDictModule as TensorDictModule
from tdfunc.nn.module import as_tensordict_module as as_tensordict_module
from tdfunc.nn.probabilistic import ProbabilisticTensorDictModule as ProbabilisticTensorDictModule
from tdfunc.nn.probabilistic import ProbabilisticTensorDictSequential as ProbabilisticTensorDictSequential
from tdfunc.nn.sequential import TensorDictSequential as TensorDictSequential
from tdfunc.nn.typed import TensorClassModuleBase as TensorClassModuleBase

_surface(globals())
