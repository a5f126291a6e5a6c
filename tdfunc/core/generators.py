"""Generators of the process: torch's default ones, numpy's and Python's, and whether code draws from them.

No key and no seed of a member reaches numpy's and Python's, and a replay has the numbers of its trace.
"""

import random
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tdfunc.core.context import is_fake, is_random, is_recording, outside
from tdfunc.core.errors import UnsupportedError, user_line


def default_generators(leaves: Iterable[Any]) -> list[torch.Generator]:
    """Return the default generators of the CPU and of the devices that hold some tensors."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    on_cuda = [torch.cuda.default_generators[device.index] for device in sorted(devices, key=str)]
    return [torch.default_generator, *on_cuda]


# Any: values of every type.
def foreign_states(named: Iterable[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Return the states of numpy's and Python's global generators, and of their generators among named values."""
    readers: dict[str, Callable[[], Any]] = {"numpy's": np.random.get_state, "Python's": random.getstate}
    for name, value in named:
        if isinstance(value, random.Random):
            readers[repr(name)] = value.getstate
        elif isinstance(value, np.random.RandomState):
            readers[repr(name)] = value.get_state
        elif isinstance(value, np.random.Generator):
            readers[repr(name)] = lambda bits=value.bit_generator: bits.state
    return {name: _frozen(read()) for name, read in readers.items()}


# Any: the state of a generator.
def _frozen(state: Any) -> Any:
    """Return a state with bytes in place of arrays, so that two can be compared."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        state = tuple(state.items())
    # The state of Python's generator holds 625 numbers, which need no call each.
    if isinstance(state, tuple) and len(state) < 9:
        return tuple(map(_frozen, state))
    return state


class Witness(TorchDispatchMode):
    """Notes the operations that draw without an explicit generator."""

    def __init__(self) -> None:
        super().__init__()
        self.drew: list[str] = []

    # Any: the signature is torch's.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
        if not given and is_random(func, args, kwargs):
            self.drew.append(f"{func} at {user_line()}")
        return func(*args, **kwargs)


@contextmanager
def refuse_draws(
    what: str, hint: str, generators: Sequence[torch.Generator] = (), named: Iterable[tuple[str, Any]] = ()
) -> Generator[None]:
    """Raise if the code inside draws from numpy's or Python's generators, or from these of torch.

    Operations show draws from torch's where tensors are fake, and where other threads may draw meanwhile.

    Args:
        what: The sentence of the error that names the call.
        hint: The way out.
        generators: The generators of torch that must not move.
        named: Further values, by the name that the error gives them; generators of numpy and Python among them count.
    """
    named = list(named)
    foreign = foreign_states(named)
    before = [generator.get_state() for generator in generators]
    witness = Witness()
    with witness if generators else nullcontext():
        yield
    found: list[str] = []
    for name, state in foreign_states(named).items():
        if state != foreign[name]:
            found.append(f"a draw from {name} generator")
    if _has_drawn(witness, generators, before):
        operation = witness.drew[0] if witness.drew else "an operation"
        found.append(f"a draw from torch's default generator by {operation}")
    if found:
        raise UnsupportedError(
            what,
            expected="draws by torch's Python functions: F.dropout, torch.rand, ...",
            got="; ".join(found),
            hint=hint,
        )


def _has_drawn(witness: Witness, generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> bool:
    """Return True if torch's generators moved, and the code inside moved them.

    An operation is proof where tensors are fake, which move no generator; a generator alone, where no other thread
    may have moved it.
    """
    with outside():
        pairs = zip(before, generators, strict=True)
        has_moved = any([not torch.equal(state, generator.get_state()) for state, generator in pairs])
    if witness.drew:
        return has_moved or is_recording() or is_fake(None)
    return has_moved and threading.active_count() == 1
