"""tdfunc: immutable trees of tensors, and pure functions over them."""

import importlib
import typing

from tdfunc import averaging, calibration, distributed, lora, metrics, optim, plots, random, sweep, weights
from tdfunc._jit import jit
from tdfunc._lazystack import LazyStack, lazy_stack, pad_sequence
from tdfunc._tensorclass import TensorClass, tensorclass
from tdfunc._tensordict import TensorDict
from tdfunc.control import cond, scan, while_loop
from tdfunc.control import map as map
from tdfunc.core.errors import (
    BatchSizeError,
    CaptureError,
    ConcurrencyError,
    CorruptCheckpointError,
    FilterError,
    ImmutableError,
    LeafMismatchError,
    LeakError,
    MissingKeyError,
    PeerError,
    RemoteError,
    TieError,
    TreeStructureError,
    UnsupportedError,
    WorkerError,
)
from tdfunc.core.keys import Filter, of_type
from tdfunc.core.nontensor import NonTensorData, NonTensorStack
from tdfunc.core.types import Kind
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.mc_dropout import MCDropout
from tdfunc.ensemble.stack import init_ensemble, stack_modules, unstack
from tdfunc.gradient import grad, value_and_grad
from tdfunc.modules.checkpoint import checkpoint
from tdfunc.modules.extract import from_module, split
from tdfunc.modules.functional import Apply, functional
from tdfunc.ops.abstract import eval_shape
from tdfunc.ops.batch.join import cat, stack
from tdfunc.ops.batch.lengths import pad_to
from tdfunc.ops.batch.rearrange import pad
from tdfunc.ops.edits.structure import combine, in_dims, partition
from tdfunc.ops.interop import collate, scalars
from tdfunc.ops.jax import from_jax, to_jax
from tdfunc.ops.math.compare import assert_close, tree_equal
from tdfunc.ops.math.vector import ravel
from tdfunc.parallel.pool import WorkerPool
from tdfunc.parallel.ray import RayExecutor
from tdfunc.storage.api import load, save
from tdfunc.storage.manager.background import AsyncSaver, PendingSave
from tdfunc.storage.manager.manager import CheckpointManager
from tdfunc.storage.rng import get_rng_state, set_rng_state
from tdfunc.storage.safetensors.saved import SavedTree
from tdfunc.storage.safetensors.saved import open as open

# Without `map` and `open`: `from tdfunc import *` leaves Python's own as they are.
__all__ = [
    "Apply",
    "AsyncSaver",
    "BatchSizeError",
    "CaptureError",
    "CheckpointManager",
    "ConcurrencyError",
    "CorruptCheckpointError",
    "Ensemble",
    "Filter",
    "FilterError",
    "ImmutableError",
    "Kind",
    "LazyStack",
    "LeafMismatchError",
    "LeakError",
    "MCDropout",
    "MissingKeyError",
    "NonTensorData",
    "NonTensorStack",
    "PeerError",
    "PendingSave",
    "RayExecutor",
    "RemoteError",
    "SavedTree",
    "TensorClass",
    "TensorDict",
    "TieError",
    "TreeStructureError",
    "UnsupportedError",
    "WorkerError",
    "WorkerPool",
    "assert_close",
    "averaging",
    "calibration",
    "cat",
    "checkpoint",
    "collate",
    "combine",
    "cond",
    "distributed",
    "eval_shape",
    "from_jax",
    "from_module",
    "functional",
    "get_rng_state",
    "grad",
    "in_dims",
    "init_ensemble",
    "jit",
    "lazy_stack",
    "load",
    "lora",
    "metrics",
    "of_type",
    "optim",
    "pad",
    "pad_sequence",
    "pad_to",
    "partition",
    "plots",
    "random",
    "ravel",
    "save",
    "scalars",
    "scan",
    "set_rng_state",
    "split",
    "stack",
    "stack_modules",
    "sweep",
    "tensorclass",
    "to_jax",
    "tree_equal",
    "unstack",
    "value_and_grad",
    "weights",
    "while_loop",
]

__version__ = "0.3.0"

# Imported when they are first used.
_LAZY = ("llm", "nn", "sklearn", "spec")

if typing.TYPE_CHECKING:
    from tdfunc import llm as llm
    from tdfunc import nn as nn
    from tdfunc import sklearn as sklearn
    from tdfunc import spec as spec
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return importlib.import_module(f"tdfunc.{name}")
        raise AttributeError(f"module 'tdfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "map", "open", *_LAZY, "__version__"]
