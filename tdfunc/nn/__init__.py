"""Modules on trees: `nn.Module`s that hold or run them."""

from tdfunc.nn.batch_ensemble import BatchEnsembleConv2d as BatchEnsembleConv2d
from tdfunc.nn.batch_ensemble import BatchEnsembleLinear as BatchEnsembleLinear
from tdfunc.nn.batch_ensemble import EnsembleLinear as EnsembleLinear
from tdfunc.nn.batch_ensemble import TabM as TabM
from tdfunc.nn.batch_ensemble import batch_ensemble as batch_ensemble
from tdfunc.nn.ensemble import EnsembleModule as EnsembleModule
