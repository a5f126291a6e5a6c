"""One call of an ensemble, prepared: the dimensions of the data, a member's arguments, the join of the outputs."""

import copy
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import _broadcast_to_and_flatten, tree_flatten, tree_leaves, tree_map, tree_unflatten

from tdfunc import random
from tdfunc.core.collection import PLAIN, TensorCollection
from tdfunc.core.context import in_transform, is_compiling
from tdfunc.core.errors import BatchSizeError, UnsupportedError, brief, error
from tdfunc.core.keys import Filter
from tdfunc.core.objects import open_objects
from tdfunc.core.types import Path
from tdfunc.ops.base.reading import entries
from tdfunc.random import key_of

# A forward may return these besides tensors and containers: values that hold no tensor.
_SCALARS = (bool, int, float, complex, str, bytes, type(None), Enum)
_PLAIN = (*_SCALARS, type, np.ndarray, np.generic, torch.dtype, torch.device)


class Call(NamedTuple):
    """Leaves in plan order, the data, and the members' keys.

    `lead` has 0 for each stacked leaf and None for each that the members share; `dims` has an entry for each leaf of
    `args`; `keys` is (E, 2).
    """

    leaves: list[Any]
    lead: list[int | None]
    members: int
    args: tuple[Any, ...]
    dims: tuple[int | None, ...]
    kwargs: dict[str, Any]
    keys: Tensor | None
    keep: bool

    # Any: the values are what the caller passed.
    def kind(self) -> Hashable:
        """Return the parts of a call that decide whether a way can run it: all except the shapes."""
        return self.keep, self.dims, tuple([_static(x) for x in _data(self.args, self.kwargs)])

    def autocast(self) -> bool:
        """Return whether autocast is on for a device of the call."""
        if not torch._C._is_any_autocast_enabled():  # pyright: ignore[reportAttributeAccessIssue]
            return False
        tensors = [x for x in (*self.leaves, *_data(self.args, self.kwargs)) if isinstance(x, Tensor)]
        return any(map(torch.is_autocast_enabled, {x.device.type for x in tensors} - {"meta"}))

    def counted(self) -> list[Tensor] | None:
        """Return the tensors among the data, or None if not all of them count the writes to them."""
        found = [x for x in _data(self.args, self.kwargs) if isinstance(x, Tensor)]
        if is_compiling() or in_transform() or any([x.is_inference() for x in found]):
            return None
        return found

    def shared(self) -> list[Tensor] | None:
        """Return the tensors that all members get, or None as `counted` does."""
        found = self.counted()
        if found is None or not any([dim is not None for dim in self.dims]):
            return found
        pairs = zip_longest(_data(self.args, self.kwargs), self.dims)
        return [x for x, dim in pairs if dim is None and isinstance(x, Tensor)]

    def with_copies(self) -> "Call":
        """Return the call with copies of its data, which a forward may write to."""
        args, kwargs = tree_map(_clone, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def with_containers(self) -> "Call":
        """Return the call with its own containers and other objects, which a forward may fill."""
        if _is_plain(self.args, self.kwargs) or is_compiling():
            return self
        args, kwargs = tree_map(_copy, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def args_of(self, member: int) -> tuple[Any, ...]:
        """Return the arguments of one member's forward."""
        return self._mapped(lambda x, dim: x.select(dim, member))

    def rows(self, start: int, stop: int) -> "Call":
        """Return the call of some members alone."""
        args = self._mapped(lambda x, dim: x.narrow(dim, start, stop - start))
        pairs = zip(self.leaves, self.lead, strict=True)
        leaves = [leaf if dim is None else leaf[start:stop] for leaf, dim in pairs]
        keys = None
        if self.keys is not None:
            keys = self.keys[start:stop]
        return self._replace(leaves=leaves, members=stop - start, args=args, keys=keys)

    def _mapped(self, fn: Any) -> tuple[Any, ...]:
        if not any([dim is not None for dim in self.dims]):
            return self.args
        flat, spec = tree_flatten(self.args)
        mapped = [x if dim is None else fn(x, dim) for x, dim in zip(flat, self.dims, strict=True)]
        return tree_unflatten(mapped, spec)


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether there are only plain tensors, which need no walk: every call takes several."""
    return not kwargs and PLAIN.issuperset(map(type, args))


def _data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    if _is_plain(args, kwargs):
        return args
    return tree_leaves((args, kwargs))


def _copy(x: Any) -> Any:
    """Return a copy of an argument that forward may change, and others as they are."""
    if isinstance(x, (Tensor, torch.Generator, *_SCALARS)) or callable(x):
        return x
    return copy.deepcopy(x)


def _clone(x: Any) -> Any:
    """Return a copy of an argument that forward may change or write to, and others as they are."""
    if isinstance(x, Tensor):
        return x.clone()
    return _copy(x)


def _static(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.dtype, x.device
    try:
        hash(x)
    except TypeError:
        return type(x)
    # 1 == 1.0 == True.
    return type(x), x


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has been written to."""
    return [x._version for x in tensors]


def check_unwritten(tensors: Sequence[Tensor], before: list[int], cause: Exception | None = None) -> None:
    """Raise if forward has written to data that another member is still to read."""
    now = versions(tensors)
    if now == before:
        return
    shape = next(list(x.shape) for x, old, new in zip(tensors, before, now, strict=True) if old != new)
    raise UnsupportedError(
        "Ensemble: forward writes to its argument, which other members share.",
        expected="arguments that forward only reads",
        got=f"a write to the argument of shape {shape}",
        hint="x = x - mean instead of x -= mean, inplace=False in the first layer; or x.clone() in forward.",
    ) from cause


def members_of(params: Any) -> int:
    """Return how many members a tree stacks.

    Raises:
        BatchSizeError: It is not a stacked tree, or has no members.
    """
    got = type(params).__name__
    if isinstance(params, TensorCollection):
        size = params._batch_size
        if size and size[0] > 0:
            return size[0]
        got = f"batch size {list(size)}"
    hint = "tdfunc.stack_modules(modules), tdfunc.init_ensemble(make, members) or torch.stack(trees) make one."
    if isinstance(params, Mapping):
        hint = 'TensorDict(d, [E]).unflatten_keys(".") makes one of the dict of torch.func.stack_module_state.'
    raise BatchSizeError(
        "Ensemble: params is not a stacked tree.", expected="batch size [E], E > 0", got=got, hint=hint
    )


def find_shared(shared: Filter, params: Any, buffers: Any) -> tuple[int, set[Path]]:
    """Return how many members the trees stack, and the paths of the leaves that they share.

    Raises:
        BatchSizeError: The members share all leaves.
    """
    found = [entry for tree in (params, buffers) if isinstance(tree, TensorCollection) for entry in entries(tree)]
    sizes: list[int] = []
    paths: set[Path] = set()
    for entry, is_shared in zip(found, shared.mask(found), strict=True):
        if is_shared:
            paths.update(entry.paths)
        elif entry.leaf.dim():
            sizes.append(entry.leaf.shape[0])
    if not sizes:
        raise BatchSizeError(
            f"Ensemble: {shared} leaves no leaf to the members.",
            expected="leaves of shape (E, ...) that it does not match",
            got=f"{len(found)} shared leaves",
        )
    return sizes[0], paths


def flat_dims(in_dims: Any, args: tuple[Any, ...], members: int) -> tuple[int | None, ...]:
    """Return the mapped dimension of each leaf of `args`, checked against the number of members.

    Raises:
        ValueError: The structure does not fit, or a dimension does not have one entry for each member.
    """
    if in_dims is None:
        return (None,) * len(_data(args, {}))
    flat, spec = tree_flatten(args)
    dims = _broadcast_to_and_flatten(in_dims, spec)
    if dims is None:
        expected = "a number, None or a tuple of them"
        if isinstance(in_dims, tuple):
            expected = f"{len(args)} entries"
        raise error(
            ValueError,
            "Ensemble: in_dims does not fit the arguments of forward.",
            expected=expected,
            got=brief(in_dims),
            hint="give each positional argument a dimension or None.",
        )
    found: list[int | None] = []
    for x, dim in zip(flat, dims, strict=True):
        if dim is None or not isinstance(x, Tensor):
            found.append(None)
            continue
        found.append(dim)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != members:
            raise error(
                ValueError,
                f"Ensemble: dimension {dim} of an argument does not count the members.",
                expected=f"one entry for each of {members} members there",
                got=f"shape {tuple(x.shape)}",
                hint="use in_dims=None for data that all members share.",
            )
    return tuple(found)


def member_keys(rng: Any, members: int) -> Tensor | None:
    """Return the keys of the members, (E, 2): how many there are changes none."""
    if rng is None:
        return None
    if isinstance(rng, Tensor) and rng.shape == (members, 2):
        return rng
    key = key_of(rng)
    return random.fold_in(key, torch.arange(members, device=key.device))


def check_output(flat: list[Any]) -> None:
    """Raise for outputs whose tensors could not be found: objects that torch's pytree does not know.

    Raises:
        UnsupportedError: An output is such an object.
    """
    for x in flat:
        if not isinstance(x, (Tensor, *_PLAIN)) and not callable(x):
            raise UnsupportedError(
                f"Ensemble: forward returned a {type(x).__name__}, whose tensors cannot be stacked.",
                expected="tensors, trees, plain values, and containers known to torch's pytree",
                got=f"{type(x).__module__}.{type(x).__qualname__}",
                hint="return its tensors, or register its class as a pytree.",
            )


def stack_outputs(outputs: Sequence[Any]) -> Any:
    """Stack the members' outputs; values other than tensors must agree.

    Raises:
        UnsupportedError: Structures or values differ, or an output cannot be stacked.
    """
    flats, specs = zip(*[tree_flatten(open_objects(out)) for out in outputs], strict=True)
    check_output(flats[0])
    for member, (flat, spec) in enumerate(zip(flats, specs, strict=True)):
        if spec != specs[0]:
            raise _unlike(member, "outputs of another structure than", specs[0], spec)
        for first, value in zip(flats[0], flat, strict=True):
            if not isinstance(first, Tensor) and not _is_same(first, value):
                raise _unlike(member, "another value than", brief(first), brief(value))
    columns = zip(*flats, strict=True)
    leaves = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return tree_unflatten(leaves, specs[0])


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and np.array_equal(a, b, equal_nan=isinstance(a, float))


def _unlike(member: int, difference: str, expected: object, got: object) -> UnsupportedError:
    return UnsupportedError(
        f"Ensemble: member {member} returned {difference} member 0.",
        expected=expected,
        got=got,
        hint="return values that differ between members as tensors of one shape.",
    )


def join_chunks(outputs: Sequence[Any]) -> Any:
    """Join the stacked outputs of consecutive members."""
    return tree_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0], *outputs)
