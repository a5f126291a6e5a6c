"""Several trees into one: `stack` and `cat`, which name the first difference in keys, shapes, dtypes, kinds or ties."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import LeafMismatchError, TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import dim_index, put_first, shape_of
from tdfunc.core.types import Names, Path
from tdfunc.core.walk import Difference, describe, gather, refill
from tdfunc.ops.base.foreach import check_ties
from tdfunc.ops.base.reading import check_trees

T = TypeVar("T", bound=TensorCollection)
_DTYPE = attrgetter("dtype")


def stack(trees: Iterable[T], dim: int = 0) -> T:
    """Stack trees of one structure along a new batch dimension.

    The result is a copy; gradients flow back to every input leaf. A group of tied leaves stays one leaf.

    Args:
        trees: Trees with equal batch sizes, key paths, shapes and dtypes, in any iterable.
        dim: The place of the new dimension among the batch dimensions.

    Returns:
        A tree with the key paths of `trees[0]`.

    Shapes:
        E trees of batch size (*B) become one of (E, *B), for `dim` 0.

    Raises:
        TypeError: An item of `trees` is not a tree.
        ValueError: `trees` is empty.
        TreeStructureError: Key paths differ; the message lists the difference.
        LeafMismatchError: A leaf differs in shape or dtype; the message names it with both.

    Examples:
        >>> tdf.stack([TensorDict({"w": torch.zeros(3)}), TensorDict({"w": torch.ones(3)})])["w"].shape
        torch.Size([2, 3])
    """
    given = as_trees(trees, "stack")
    first = given[0]
    others = given[1:]
    size = first._batch_size
    dim = dim_index(dim, len(size) + 1, "stack")
    for tree in others:
        if not _agree(tree, first):
            raise LeafMismatchError(
                "stack: the batch sizes differ.",
                expected=str(list(size)),
                got=str(list(tree._batch_size)),
                hint="index or pad them to one size first.",
            )
    new = Size((*size[:dim], len(given), *size[dim:]))
    return _join(_join_op("stack", torch.stack, dim, new, len(size)), first, others)


def cat(trees: Iterable[T], dim: int = 0) -> T:
    """Concatenate trees of one structure along a batch dimension.

    Args:
        trees: Trees whose batch sizes agree except in `dim`, with equal key paths and dtypes, in any iterable.
        dim: The batch dimension.

    Raises:
        TypeError: An item of `trees` is not a tree.
        ValueError: `trees` is empty.
        TreeStructureError: Key paths differ.
        LeafMismatchError: A leaf differs in shape (except in `dim`) or dtype.
    """
    given = as_trees(trees, "cat")
    first = given[0]
    others = given[1:]
    size = first._batch_size
    dim = dim_index(dim, len(size), "cat")
    for tree in others:
        if not _agree(tree, first, dim):
            raise LeafMismatchError(
                f"cat: the batch sizes differ in more than dimension {dim}.",
                expected=str(list(size)),
                got=str(list(tree._batch_size)),
            )
    total = sum([tree._batch_size[dim] for tree in given])
    new = Size((*size[:dim], total, *size[dim + 1 :]))
    return _join(_join_op("cat", torch.cat, dim, new, len(size)), first, others)


def _join_op(name: str, join: Callable[..., Any], dim: int, new: Size, n: int) -> LeafOp:
    def names(old: Names) -> Names:
        if name == "cat":
            return old
        return (*old[:dim], None, *old[dim:])

    leaf = join if dim == 0 else partial(join, dim=dim)
    return LeafOp(name, leaf, put_first(new, n), names, True, (dim,), False, True)


def _agree(first: TensorCollection, second: TensorCollection, but: int | None = None) -> bool:
    """Return True if two trees have one batch size, but for a dimension; a ragged one agrees with any size."""
    if first._batch_size == second._batch_size:
        return True
    if len(first._batch_size) != len(second._batch_size):
        return False
    pairs = list(zip(_sizes(first), _sizes(second), strict=True))
    return all([a == b or -1 in (a, b) for dim, (a, b) in enumerate(pairs) if dim != but])


# Any: a lazy stack has its own dimension.
def _sizes(tree: Any) -> Sequence[int]:
    """Return the batch size with -1 where a lazy stack may be ragged: also where the lengths of its trees agree."""
    if not tree._is_lazy:
        return tree._batch_size
    return [size if dim == tree._dim else -1 for dim, size in enumerate(tree._batch_size)]


def as_trees(trees: Iterable[T], call: str) -> list[T]:
    """Return the trees as a list; an iterator can be read only once, and a tree is an iterable of its rows."""
    given = list(trees)
    if not given:
        raise error(ValueError, f"{call}: there is no tree.")
    check_trees(call, *given)
    return given


def _join(op: LeafOp, first: T, others: Sequence[T]) -> T:
    # The leaves of all nodes together, so that checking and joining them is one call in C each.
    columns = None
    if not is_compiling():
        columns = gather((first, *others))
    if columns is not None:
        dtypes = list(map(_DTYPE, columns[0]))
        if all([list(map(_DTYPE, column)) == dtypes for column in columns[1:]]):
            (dim,) = op.args
            fn = torch.stack if op.name == "stack" else torch.cat
            rows = zip(*columns, strict=True)
            # The checks below name a leaf whose shapes differ.
            with suppress(RuntimeError):
                joined = map(fn, rows, repeat(dim)) if dim else map(fn, rows)
                return refill(first, joined, op)
    # torch would silently promote or untie.
    for other in others:
        _check_nodes(op, first, other, ())
        check_ties(first, other, op.name)
    return first._shape(op, *others)


def _check_nodes(op: LeafOp, first: TensorCollection, other: TensorCollection, at: Path) -> None:
    """Raise unless classes, keys, shapes, dtypes and kinds agree."""
    name = op.name
    if type(other) is not type(first):
        raise _other_class(name, first, other, at)
    # A lazy stack may join others of another number of trees: its own `_shape` checks them.
    if first._is_lazy:
        return
    mine = first._data
    theirs = other._data
    if mine.keys() != theirs.keys():
        raise Difference(at, "keys", first, other).error(name)
    for key, node in mine.items():
        twin = theirs[key]
        path = (*at, key)
        if isinstance(node, TensorCollection) and isinstance(twin, TensorCollection):
            _check_nodes(op, node, twin, path)
        elif not any([isinstance(node, kind) and isinstance(twin, kind) for kind in (Tensor, NonTensorBase)]):
            raise Difference(path, "kind", node, twin).error(name)
        elif _joined(op, node) != _joined(op, twin):
            raise LeafMismatchError(
                f"{name}: leaf {dotted(path)!r} differs.",
                expected=describe(node),
                got=describe(twin),
                hint="cast or pad them first: td.apply(lambda x: x.to(dtype)), or keep them ragged with lazy_stack.",
            )
    _check_kinds(name, first, other, at)


def _other_class(name: str, first: TensorCollection, other: TensorCollection, at: Path) -> TreeStructureError:
    hint = defined_twice(type(first), type(other))
    if first._is_lazy != other._is_lazy:
        hint = "dense() makes one tree of a lazy stack, lazy_stack(tree.unbind(dim), dim) the other way round."
    where = f" under {dotted(at)!r}" if at else ""
    return TreeStructureError(
        f"{name}: the trees are of different classes{where}.",
        expected=type(first).__name__,
        got=type(other).__name__,
        hint=hint,
    )


def _check_kinds(name: str, first: TensorCollection, other: TensorCollection, at: Path) -> None:
    """Raise unless the leaves of two nodes have the same kinds, where both nodes record kinds."""
    mine = first._kinds
    theirs = other._kinds
    if not mine or not theirs or mine == theirs:
        return
    key = next(key for key in first._data if mine.get(key) != theirs.get(key))
    raise LeafMismatchError(
        f"{name}: leaf {dotted((*at, key))!r} is of different kinds.",
        expected=str(mine.get(key)),
        got=str(theirs.get(key)),
    )


def _joined(op: LeafOp, node: Any) -> tuple[Any, ...]:
    """Return what must agree in nodes that are joined: the dtype, and the shape except along the dimension of `cat`."""
    if isinstance(node, NonTensorBase):
        dtype = None
        shape = node.shape
    else:
        dtype = node.dtype
        shape = shape_of(node)
    if op.name == "cat" and shape:
        (dim,) = op.args
        shape = shape[:dim] + shape[dim + 1 :]
    return dtype, shape


# Any: the class of a lazy stack of typed trees has the class of these.
def defined_twice(first: Any, other: Any) -> str | None:
    """Return the hint about two classes of trees with one name, which look alike in a message; else None."""
    first = getattr(first, "_stacked", first)
    other = getattr(other, "_stacked", other)
    if first is other or first.__name__ != other.__name__ or not issubclass(first, TensorCollection):
        return None
    name = first.__name__
    if first.__module__ != other.__module__:
        return f"two classes are called {name}, one of {first.__module__} and one of {other.__module__}."
    convert = f"{name}.from_tensordict(old.to_tensordict())"
    return f"{name} was defined twice, as by a notebook cell that ran again; {convert} makes old instances new ones."
