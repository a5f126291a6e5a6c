"""torch's default generators around one member's forward: watched for draws that no seed serves, or seeded.

Attention and LSTM dropout draw from the default generator inside torch, where no generator can be given to them.
"""

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tdfunc.core.context import is_random

T = TypeVar("T")
# Reentrant: an ensemble may run inside a member of another.
_SEEDING = threading.RLock()


def default_generators(leaves: Sequence[Any]) -> list[Generator]:
    """Return the default generators of the CPU and of the devices that hold some tensors."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    return [torch.default_generator, *[torch.cuda.default_generators[d.index] for d in sorted(devices, key=str)]]


def run_seeded(generators: Sequence[Generator], seed: int, run: Callable[[], T]) -> T:
    """Return what `run` returns under a seed, alone among threads that do the same; the states are put back."""
    with _SEEDING:
        # One call of C code puts them back: Ctrl-C, which comes between calls, cannot cut it short.
        put_back = partial(list, map(Generator.set_state, generators, [g.get_state() for g in generators]))
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return run()
        finally:
            put_back()


def watch(generators: Sequence[Generator], run: Callable[[], T]) -> tuple[T, bool]:
    """Return what `run` returns and whether it drew from a default generator."""
    before = [generator.get_state() for generator in generators]
    result = run()
    if all([torch.equal(a, g.get_state()) for a, g in zip(before, generators, strict=True)]):
        return result, False
    # They moved, but another thread may have done it: look at the operations of a second run.
    witness = _Witness()
    with witness:
        run()
    return result, witness.drew


# Any: numpy's state is a tuple of several types.
def foreign_states() -> Any:
    """Return the states of Python's and numpy's global generators, which no seed of a member reaches."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), rest


class _Witness(TorchDispatchMode):
    """Sees operations that draw without a generator of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    # Any: the signature is torch's.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = any(isinstance(x, Generator) for x in (*args, *kwargs.values()))
        self.drew |= is_random(func, args, kwargs) and not given
        return func(*args, **kwargs)
