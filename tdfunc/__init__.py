"""tdfunc: immutable trees of tensors, and pure functions over them."""

from tdfunc import optim as optim
from tdfunc._control import associative_scan as associative_scan
from tdfunc._control import cond as cond
from tdfunc._control import map as map
from tdfunc._control import scan as scan
from tdfunc._control import while_loop as while_loop
from tdfunc._errors import BatchSizeError as BatchSizeError
from tdfunc._errors import CaptureError as CaptureError
from tdfunc._errors import ConcurrencyError as ConcurrencyError
from tdfunc._errors import CorruptCheckpointError as CorruptCheckpointError
from tdfunc._errors import FilterError as FilterError
from tdfunc._errors import ImmutableError as ImmutableError
from tdfunc._errors import LeafMismatchError as LeafMismatchError
from tdfunc._errors import LeakError as LeakError
from tdfunc._errors import MissingKeyError as MissingKeyError
from tdfunc._errors import TieError as TieError
from tdfunc._errors import TreeStructureError as TreeStructureError
from tdfunc._errors import UnsupportedError as UnsupportedError
from tdfunc._errors import WorkerError as WorkerError
from tdfunc._jit import jit as jit
from tdfunc._keys import Filter as Filter
from tdfunc._keys import of_type as of_type
from tdfunc._lazystack import LazyStack as LazyStack
from tdfunc._lazystack import lazy_stack as lazy_stack
from tdfunc._lazystack import pad_sequence as pad_sequence
from tdfunc._nontensor import NonTensorData as NonTensorData
from tdfunc._nontensor import NonTensorStack as NonTensorStack
from tdfunc._tensorclass import TensorClass as TensorClass
from tdfunc._tensorclass import tensorclass as tensorclass
from tdfunc._tensordict import TensorDict as TensorDict
from tdfunc._types import Kind as Kind
from tdfunc.ensemble.ensemble import Ensemble as Ensemble
from tdfunc.ensemble.stack import init_ensemble as init_ensemble
from tdfunc.ensemble.stack import stack_modules as stack_modules
from tdfunc.ensemble.stack import unstack as unstack
from tdfunc.ensemble.uncertainty import brier as brier
from tdfunc.ensemble.uncertainty import ece as ece
from tdfunc.ensemble.uncertainty import nll as nll
from tdfunc.ensemble.uncertainty import reliability_curve as reliability_curve
from tdfunc.ensemble.uncertainty import uncertainty as uncertainty
from tdfunc.modules.extract import from_module as from_module
from tdfunc.modules.extract import split as split
from tdfunc.modules.functional import Apply as Apply
from tdfunc.modules.functional import functional as functional
from tdfunc.ops.collate import collate as collate
from tdfunc.ops.compare import assert_close as assert_close
from tdfunc.ops.join import cat as cat
from tdfunc.ops.join import stack as stack
from tdfunc.ops.rearrange import pad as pad
from tdfunc.ops.structure import combine as combine
from tdfunc.ops.structure import in_dims as in_dims
from tdfunc.ops.structure import partition as partition
from tdfunc.storage.async_save import AsyncSaver as AsyncSaver
from tdfunc.storage.background import PendingSave as PendingSave
from tdfunc.storage.checkpoint import load as load
from tdfunc.storage.checkpoint import save as save
from tdfunc.storage.manager import CheckpointManager as CheckpointManager
from tdfunc.storage.open import LazyTree as LazyTree
from tdfunc.storage.open import open as open
from tdfunc.storage.pool import WorkerPool as WorkerPool
from tdfunc.storage.ray import RayExecutor as RayExecutor
from tdfunc.storage.rng import get_rng_state as get_rng_state
from tdfunc.storage.rng import set_rng_state as set_rng_state

__version__ = "0.1.0"

# `from tdfunc import *` leaves Python's own `map` alone.
__all__ = [name for name in globals() if not name.startswith("_") and name != "map"]  # pyright: ignore[reportUnsupportedDunderAll]
