"""Modules on trees: `nn.Module`s that hold or run them."""

from tdfunc.nn._batch_ensemble import BatchEnsembleConv2d, BatchEnsembleLinear, EnsembleLinear, TabM, batch_ensemble
from tdfunc.nn.base import TensorDictModuleBase, dispatch
from tdfunc.nn.dropout import with_dropout_rates
from tdfunc.nn.ensemble import EnsembleModule
from tdfunc.nn.interaction import InteractionType
from tdfunc.nn.module import TensorDictModule, as_tensordict_module
from tdfunc.nn.probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tdfunc.nn.sequential import TensorDictSequential
from tdfunc.nn.typed import TensorClassModuleBase

__all__ = [
    "BatchEnsembleConv2d",
    "BatchEnsembleLinear",
    "EnsembleLinear",
    "EnsembleModule",
    "InteractionType",
    "ProbabilisticTensorDictModule",
    "ProbabilisticTensorDictSequential",
    "TabM",
    "TensorClassModuleBase",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictSequential",
    "as_tensordict_module",
    "batch_ensemble",
    "dispatch",
    "with_dropout_rates",
]


def __dir__() -> list[str]:
    return list(__all__)
