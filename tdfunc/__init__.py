"""tdfunc: immutable trees of tensors, and pure functions over them."""

import builtins
import importlib
import typing

from tdfunc import averaging as averaging
from tdfunc import calibration as calibration
from tdfunc import distributed as distributed
from tdfunc import lora as lora
from tdfunc import metrics as metrics
from tdfunc import optim as optim
from tdfunc import random as random
from tdfunc import sweep as sweep
from tdfunc import weights as weights
from tdfunc._control import cond as cond
from tdfunc._control import map as map
from tdfunc._control import scan as scan
from tdfunc._control import while_loop as while_loop
from tdfunc._gradient import grad as grad
from tdfunc._gradient import value_and_grad as value_and_grad
from tdfunc._jit import jit as jit
from tdfunc._lazystack import LazyStack as LazyStack
from tdfunc._lazystack import lazy_stack as lazy_stack
from tdfunc._lazystack import pad_sequence as pad_sequence
from tdfunc._tensorclass import TensorClass as TensorClass
from tdfunc._tensorclass import tensorclass as tensorclass
from tdfunc._tensordict import TensorDict as TensorDict
from tdfunc.core.errors import BatchSizeError as BatchSizeError
from tdfunc.core.errors import CaptureError as CaptureError
from tdfunc.core.errors import ConcurrencyError as ConcurrencyError
from tdfunc.core.errors import CorruptCheckpointError as CorruptCheckpointError
from tdfunc.core.errors import FilterError as FilterError
from tdfunc.core.errors import ImmutableError as ImmutableError
from tdfunc.core.errors import LeafMismatchError as LeafMismatchError
from tdfunc.core.errors import LeakError as LeakError
from tdfunc.core.errors import MissingKeyError as MissingKeyError
from tdfunc.core.errors import PeerError as PeerError
from tdfunc.core.errors import RemoteError as RemoteError
from tdfunc.core.errors import TieError as TieError
from tdfunc.core.errors import TreeStructureError as TreeStructureError
from tdfunc.core.errors import UnsupportedError as UnsupportedError
from tdfunc.core.errors import WorkerError as WorkerError
from tdfunc.core.keys import Filter as Filter
from tdfunc.core.keys import of_type as of_type
from tdfunc.core.nontensor import NonTensorData as NonTensorData
from tdfunc.core.nontensor import NonTensorStack as NonTensorStack
from tdfunc.core.surface import surface as _surface
from tdfunc.core.types import Kind as Kind
from tdfunc.ensemble.ensemble import Ensemble as Ensemble
from tdfunc.ensemble.mc_dropout import MCDropout as MCDropout
from tdfunc.ensemble.stack import init_ensemble as init_ensemble
from tdfunc.ensemble.stack import stack_modules as stack_modules
from tdfunc.ensemble.stack import unstack as unstack
from tdfunc.modules.checkpoint import checkpoint as checkpoint
from tdfunc.modules.extract import from_module as from_module
from tdfunc.modules.extract import split as split
from tdfunc.modules.functional import Apply as Apply
from tdfunc.modules.functional import functional as functional
from tdfunc.ops.abstract import eval_shape as eval_shape
from tdfunc.ops.batch.join import cat as cat
from tdfunc.ops.batch.join import stack as stack
from tdfunc.ops.batch.rearrange import pad as pad
from tdfunc.ops.edits.structure import combine as combine
from tdfunc.ops.edits.structure import in_dims as in_dims
from tdfunc.ops.edits.structure import partition as partition
from tdfunc.ops.interop import collate as collate
from tdfunc.ops.interop import scalars as scalars
from tdfunc.ops.math.compare import assert_close as assert_close
from tdfunc.ops.math.compare import tree_equal as tree_equal
from tdfunc.ops.math.vector import ravel as ravel
from tdfunc.parallel.pool import WorkerPool as WorkerPool
from tdfunc.parallel.ray import RayExecutor as RayExecutor
from tdfunc.storage.api import load as load
from tdfunc.storage.api import save as save
from tdfunc.storage.manager.background import AsyncSaver as AsyncSaver
from tdfunc.storage.manager.background import PendingSave as PendingSave
from tdfunc.storage.manager.manager import CheckpointManager as CheckpointManager
from tdfunc.storage.rng import get_rng_state as get_rng_state
from tdfunc.storage.rng import set_rng_state as set_rng_state
from tdfunc.storage.safetensors.saved import SavedTree as SavedTree
from tdfunc.storage.safetensors.saved import open as open

__version__ = "0.2.0"

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


_NAMES = _surface(
    globals(), "averaging", "calibration", "distributed", "lora", "metrics", "optim", "random", "sweep", "weights"
)
# `from tdfunc import *` leaves Python's own `map` and `open` as they are.
__all__ = [name for name in _NAMES if not hasattr(builtins, name)]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return [*_NAMES, *_LAZY, "__version__"]
