"""The check that a function treats each member by itself, by calls for a few members with other values.

It calculates in float64 where the function can: what is left of a difference is then not due to rounding.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils import _pytree as torch_pytree

from tdfunc._jit.call import Jitted
from tdfunc._jit.chunked.split import Split
from tdfunc.core.errors import BatchSizeError, UnsupportedError

# A product of one member is another kernel than a batched one, so a chunk has at least two.
LEAST = 2
# Of the norm of a result, by which it may differ for another number of members: in float64, and in the dtype of the
# call, where an optimizer may follow the sign of a gradient that is 0 but for rounding.
_NEAR_WIDE = 1e-9
_NEAR = 0.1
# Of the largest norm of all results: what is smaller is rounding.
_NOISE = 1e-6
_WIDE_BYTES = 8


class Trial:
    """A jitted function of members, called for a few of them."""

    def __init__(self, jitted: Jitted[..., Any], split: Split, kwargs: dict[str, Any]) -> None:
        self._jitted = jitted
        self._split = split
        self._kwargs = kwargs
        self._wide = _to_wide(split)
        self._least = min(LEAST, split.members)
        try:
            with _quiet():
                self._own = self._call(self._least)
        except BatchSizeError:
            raise
        # Functions that fix a dtype raise what they like. If they raise again the error is about the call.
        except Exception:
            self._wide = None
            self._own = self._call(self._least)

    def activation_bytes(self) -> float:
        """Return the bytes that the largest activation of one member takes."""
        found = self._jitted.activation_bytes(*self._args(self._least), **self._kwargs) / self._least
        if self._wide is None:
            return found
        return found * _item_bytes(self._split) / _WIDE_BYTES

    def draws(self) -> bool:
        """Return whether the function draws from torch's default generator."""
        return self._jitted.draws(*self._args(self._least), **self._kwargs)

    def check(self, size: int) -> None:
        """Raise if the results of one member depend on other members, on how many there are, or on its place."""
        for change in (lambda x: x * -3 + 1, lambda x: x + 1e4):
            found = self._call(self._least, change)
            changed = [name for name, value in self._own.items() if not _is_equal(value, found[name])]
            self._refuse(changed, "the values of other members")
        # A draw by one key for all is another number at each place.
        found = self._call(self._least, place=self._least - 1)
        self._refuse(self._list_unlike(found), "its place among the members")
        other = self._least + 1 if self._split.members > self._least else min(size, 1)
        found = self._call(other)
        self._refuse(self._list_unlike(found), "the number of other members")

    def _call(self, members: int, change: Callable[[Tensor], Tensor] | None = None, place: int = 0) -> dict[str, Any]:
        """Return the results of member 0, which is at some place among others."""
        args = self._args(members, change, place)
        return _results_of_one(self._jitted(*args, **self._kwargs), members, place)

    def _args(self, members: int, change: Callable[[Tensor], Tensor] | None = None, place: int = 0) -> tuple[Any, ...]:
        split = self._split if self._wide is None else self._wide
        return split.take_copies(members, change, place)

    def _list_unlike(self, found: dict[str, Any]) -> list[str]:
        """Return the names of the results that differ by more than the rounding of another kernel."""
        near = _NEAR if self._wide is None else _NEAR_WIDE
        largest = max(map(_norm, self._own.values()), default=0.0)
        unlike: list[str] = []
        for name, value in self._own.items():
            if not _is_number(value):
                same = _is_equal(value, found[name])
            else:
                same = _distance(value, found[name]) <= near * max(_norm(value), _NOISE * largest)
            if not same:
                unlike.append(name)
        return unlike

    def _refuse(self, unlike: list[str], what: str) -> None:
        if unlike:
            raise UnsupportedError(
                f"jit: {unlike[0]} for one member depends on {what}.",
                expected="a function that treats each member by itself, as torch.vmap does, where chunk_size is given",
                got=f"{len(unlike)} of {len(self._own)} results that do not",
                hint="take norms, sums and means of each member by itself; draw by a key of each member, "
                "tdf.random.fold_in(key, torch.arange(members)) with in_dims 0; or leave chunk_size out.",
            )


@contextmanager
def _quiet() -> Generator[None]:
    """Keep what this thread's fake tensors would log about an operation that fails: the attempt is not the user's."""
    thread = threading.get_ident()
    log = logging.getLogger(fake_tensor.__name__)

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def check_rows(leaf: Tensor, size: int, name: str) -> None:
    """Raise if a result does not have the members of a chunk along its first dimension."""
    if leaf.dim() == 0 or leaf.shape[0] != size:
        raise BatchSizeError(
            f"jit: {name} of a function with chunk_size does not have the members along its first dimension.",
            expected=f"{size} members in a chunk",
            got=f"shape {list(leaf.shape)}",
            hint="return a value for each member, and take means over members outside.",
        )


def _results_of_one(result: Any, members: int, place: int) -> dict[str, Any]:
    """Return the part of each tensor of a result at one place, and all else, by path."""
    found: dict[str, Any] = {}
    for path, leaf in torch_pytree.tree_flatten_with_path(result)[0]:
        name = f"result{torch_pytree.keystr(path)}"
        if isinstance(leaf, Tensor):
            check_rows(leaf, members, name)
            found[name] = leaf.detach()[place].clone()
        else:
            found[name] = leaf
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two results of one member are the same to the last bit."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    return torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _norm(value: Any) -> float:
    """Return the norm of the finite numbers of a result."""
    if not _is_number(value):
        return 0.0
    return float(torch.where(value.isfinite(), value, 0).to(_wide_dtype(value)).norm())


def _distance(a: Tensor, b: Tensor) -> float:
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return _norm(a.to(_wide_dtype(a)) - b.to(_wide_dtype(b)))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _to_wide(split: Split) -> Split | None:
    """Return the arguments of a few members in float64; None where the device has none, or nothing is to be widened."""
    if any([leaf.device.type == "mps" for leaf in _numbers(split.args)]) or not _numbers(split.args):
        return None
    few = split.take_rows(0, LEAST + 1)
    wide = torch_pytree.tree_map(lambda x: x.to(_wide_dtype(x)) if _is_number(x) else x, few)
    return split._replace(args=wide)


def _numbers(args: Any) -> list[Tensor]:
    return [leaf for leaf in torch_pytree.tree_leaves(args) if _is_number(leaf)]


def _item_bytes(split: Split) -> int:
    return max([torch.finfo(leaf.dtype).bits // 8 for leaf in _numbers(split.args)])
