"""Random numbers for one call: every draw of a forward comes from a key.

A `TorchFunctionMode` is active for the call alone, so nothing process-wide changes. Draw n of a forward is a function
of the key and n by plain tensor operations: the same in a loop, under `vmap` and `grad`, in a replay, when
compiled, and when `torch.utils.checkpoint` runs a part of forward again. A draw by key refuses the arguments that
torch's function refuses. Draws inside torch take no key; `apply(..., rng=)` notices and refuses them.
"""

import math
import sys
import types
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from tdfunc import random
from tdfunc.core.context import is_compiling
from tdfunc.modules.batching.rule import by_code, called_by_torch
from tdfunc.modules.draws.draw import Draw, Size
from tdfunc.modules.draws.table import SERVERS
from tdfunc.random import splitmix

_CHECKPOINT: Any = vars(checkpoint)
_BODIES = by_code(SERVERS)
# A draw of up to so many numbers is made for several members, and so many numbers at a time.
_FEW_NUMBERS = 1 << 14
_MANY_NUMBERS = 1 << 20


class seeded(TorchFunctionMode):
    """Serve the random functions called inside from a key.

    `seeded(mode.key, mode.count)` continues another mode from its present count, for code that computes a part of
    forward again.

    Args:
        key: The key.
        count: The number of draws made before.
        strict: Have `apply` refuse draws from torch's default generators, which nobody has seeded.
    """

    def __init__(self, key: Tensor, count: int = 0, *, strict: bool = False) -> None:
        super().__init__()
        self.key = key
        self.count: int = count
        self.strict = strict
        self._checkpoints = 0 if is_compiling() else len(_checkpoint_frames())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is FunctionType and func not in _SERVERS and not is_compiling():
            func = called_by_torch(func, _BODIES)
        server = _SERVERS.get(func)
        if server is None:
            # Dynamo of torch 2.13 cannot call the method for a mode, since it uses `super()`; attention calls it.
            func = torch.unflatten if func is Tensor.unflatten else func
            if kwargs:
                return func(*args, **kwargs)
            return func(*args)
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        return server(self, func, *args, **kwargs)

    def draw(self, draw: Draw, device: torch.device) -> Tensor:
        """Return the numbers that the key of the next draw gives."""
        return draw.numbers(self.draw_key(device))

    def draw_key(self, device: torch.device) -> Tensor:
        """Return the key of the next draw."""
        return random.fold_in(self.key, self._next()).to(device)

    def draw_mask(self, shape: Size, p: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return 1 / p with probability p, and 0 elsewhere, from the key of the next draw."""
        key = self.key.to(device)
        number = self._next()
        if isinstance(p, Tensor):
            return splitmix.mask_by(key, shape, p, dtype, number=number)
        return splitmix.mask(key, shape, p, dtype, number=number)

    def _next(self) -> int:
        """Return the number of the next draw."""
        if not is_compiling():
            self._follow_checkpoints()
        self.count += 1
        return self.count - 1

    def _follow_checkpoints(self) -> None:
        """Have the checkpoints that are being called repeat their draws when backward runs them again.

        Nothing else shows that torch.utils.checkpoint is being called. Each is found at its first draw, so no draw was
        counted since its entry.
        """
        frames = _checkpoint_frames()
        for frame in frames[: len(frames) - self._checkpoints]:
            if "gen" in frame.f_locals:
                holder = frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")
                name = "recompute_fn"
            else:
                holder = frame.f_locals.get("ctx")
                name = "run_function"
            run = getattr(holder, name, None)
            if run is not None and not isinstance(run, _Resumed):
                setattr(holder, name, _Resumed(run, self.key, self.count))


class Members:
    """The draws of members that each have a key: one call makes a draw of the first member for many of the others.

    Args:
        keys: A key (E, 2) for each.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        # By number: the draws of the first member, and, for the members from one on, their numbers.
        self.asked: dict[int, Draw] = {}
        self.rows: dict[int, Tensor] = {}
        self.first = self._end = 0

    def enter(self, member: int) -> seeded:
        """Return the mode that serves the draws of a member; members come in order."""
        if member >= self._end and self.asked and self._keys.is_cpu:
            self._make_rows(member)
        return _Member(self._keys[member], self, member)

    def _make_rows(self, member: int) -> None:
        sizes = {n: math.prod(draw.shape) for n, draw in self.asked.items()}
        numbers = [n for n, size in sizes.items() if size <= _FEW_NUMBERS]
        total = sum([sizes[n] for n in numbers])
        self.first: int = member
        self._end: int = min(len(self._keys), member + max(1, _MANY_NUMBERS // max(total, 1)))
        keys = splitmix.derive(self._keys[self.first : self._end, None], torch.tensor(numbers), splitmix.FOLD)
        drawn = zip(numbers, keys.unbind(1), strict=True)
        self.rows = {n: self.asked[n].numbers(each.contiguous()) for n, each in drawn}


class _Member(seeded):
    """The draws of one member among others."""

    def __init__(self, key: Tensor, members: Members, member: int) -> None:
        super().__init__(key)
        self._members = members
        self._member = member

    def draw(self, draw: Draw, device: torch.device) -> Tensor:
        members = self._members
        if not self._member:
            members.asked[self.count] = draw
        rows = None
        if device.type == "cpu":
            rows = members.rows.get(self.count)
        if rows is None or members.asked[self.count] != draw:
            return super().draw(draw, device)
        self._next()
        # The numbers of several members share memory.
        return rows[self._member - members.first].clone()


class _Resumed:
    """A function that runs under a key, from one count of draws on."""

    def __init__(self, run: Callable[..., Any], key: Tensor, count: int) -> None:
        self._run = run
        self._key = key
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with seeded(self._key, self._count):
            return self._run(*args, **kwargs)


def _checkpoint_frames() -> list[types.FrameType]:
    """Return the frames of functions of `torch.utils.checkpoint`, the innermost first."""
    frame = sys._getframe()
    found = []
    while frame is not None:
        if frame.f_globals is _CHECKPOINT:
            found.append(frame)
        frame = frame.f_back
    return found


def _compiled_checkpoint(mode: seeded, func: Any, /, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve a checkpoint that dynamo captures: eagerly the function is not handed to modes.

    The captured part may not write to objects outside of it, so it has its own mode, whose count is a result.
    """
    key = mode.key
    count = mode.count

    def counted(*args: Any, **kwargs: Any) -> tuple[Any, int]:
        inner = seeded(key, count)
        with inner:
            out = run(*args, **kwargs)
        return out, inner.count

    out, mode.count = func(counted, *args, **kwargs)
    return out


# With the checkpoints that dynamo captures.
_SERVERS = {**SERVERS, checkpoint.checkpoint: _compiled_checkpoint}
