"""Several trees into one: `stack` and `cat`, which check keys, shapes, dtypes, kinds and ties and name what differs."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Size, Tensor

from tdfunc._collection import LeafOp, TensorCollection, iter_leaves
from tdfunc._errors import LeafMismatchError, TieError, TreeStructureError, explain
from tdfunc._keys import dotted
from tdfunc._shapes import dim_index

T = TypeVar("T", bound=TensorCollection)


def stack(trees: Sequence[T], dim: int = 0) -> T:
    """Stack trees of one structure along a new batch dimension.

    The result is a copy; gradients flow back to every input leaf. A group of tied leaves stays one leaf.

    Args:
        trees: Trees with equal batch sizes, key paths, shapes and dtypes.
        dim: Where the new dimension goes among the batch dimensions.

    Returns:
        A tree with the key paths of `trees[0]`.

    Shapes:
        E trees of batch size (*B) become one of (E, *B), for `dim` 0.

    Raises:
        ValueError: There are no trees.
        TreeStructureError: Key paths differ; the message lists the difference.
        LeafMismatchError: A leaf differs in shape or dtype; the message names it with both.

    Examples:
        >>> from tdfunc import TensorDict, stack
        >>> stack([TensorDict({"w": torch.zeros(3)}), TensorDict({"w": torch.ones(3)})])["w"].shape
        torch.Size([2, 3])
    """
    first, others = _first(trees, "stack")
    size = first._batch_size
    dim = dim_index(dim, len(size) + 1, "stack")
    for tree in others:
        if tree._batch_size != size:
            raise LeafMismatchError(explain("stack: the batch sizes differ.", expected=str(list(size)), got=str(list(tree._batch_size)), hint="pad or index them to one size first."))
    count = len(trees)

    def leaf(*leaves: Any) -> Any:
        return torch.stack(leaves, dim)

    op = LeafOp(
        "stack", leaf, lambda old: old[:dim] + Size((count,)) + old[dim:], lambda names: (*names[:dim], None, *names[dim:]), True, (dim,),
    )  # fmt: skip
    return _joined(op, first, others)


def cat(trees: Sequence[T], dim: int = 0) -> T:
    """Concatenate trees of one structure along a batch dimension.

    Args:
        trees: Trees whose batch sizes agree but for `dim`, with equal key paths and dtypes.
        dim: The batch dimension.

    Raises:
        ValueError: There are no trees.
        TreeStructureError: Key paths differ.
        LeafMismatchError: A leaf differs in shape (but for `dim`) or dtype.
    """
    first, others = _first(trees, "cat")
    size = first._batch_size
    dim = dim_index(dim, len(size), "cat")
    for tree in others:
        mine = tree._batch_size
        if mine[:dim] + mine[dim + 1 :] != size[:dim] + size[dim + 1 :] or len(mine) != len(size):
            raise LeafMismatchError(explain(f"cat: the batch sizes differ in more than dimension {dim}.", expected=str(list(size)), got=str(list(mine))))
    total = sum(tree._batch_size[dim] for tree in trees)
    op = LeafOp(
        "cat", lambda *leaves: torch.cat(leaves, dim), lambda old: old[:dim] + Size((total,)) + old[dim + 1 :], lambda names: names, True, (dim,),
    )  # fmt: skip
    return _joined(op, first, others)


def _first(trees: Sequence[T], call: str) -> tuple[T, Sequence[T]]:
    trees = list(trees)
    if not trees:
        raise ValueError(explain(f"{call}: no trees were given."))
    for tree in trees:
        if not isinstance(tree, TensorCollection):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(explain(f"{call}: all must be trees.", got=type(tree).__name__))
    return trees[0], trees[1:]


def _joined(op: LeafOp, first: T, others: Sequence[T]) -> T:
    check_joinable(op.name, first, others)
    try:
        return first._shape(op, *others)
    except (RuntimeError, TypeError, TreeStructureError) as err:
        _explain_join(op, first, others, err)


def check_joinable(name: str, first: TensorCollection, others: Sequence[TensorCollection]) -> None:
    """Raise unless dtypes, kinds and ties agree (torch would promote or untie in silence)."""
    for other in others:
        if type(other) is not type(first):
            raise TreeStructureError(explain(f"{name}: the trees are of different classes.", expected=type(first).__name__, got=type(other).__name__))
        _check_nodes(name, first, other, ())
        if other._ties != first._ties:
            raise TieError(explain(f"{name}: the trees tie different paths.", expected=str(first._ties), got=str(other._ties), hint="untie() the paths that are tied in only one of them."))


def _check_nodes(name: str, first: TensorCollection, other: TensorCollection, at: tuple[str, ...]) -> None:
    mine, theirs = first._data, other._data
    if mine.keys() != theirs.keys():
        raise TreeStructureError(
            explain(
                f"{name}: the trees have different keys{f' under {dotted(at)!r}' if at else ''}.",
                expected=f"{sorted(mine)}",
                got=f"{sorted(theirs)}",
                hint="select() the common keys, or set() the missing ones.",
            )
        )
    for key, node in mine.items():
        twin = theirs[key]
        if isinstance(node, Tensor):
            if not isinstance(twin, Tensor) or node.dtype is not twin.dtype:
                got = str(twin.dtype) if isinstance(twin, Tensor) else type(twin).__name__
                raise LeafMismatchError(explain(f"{name}: leaf {dotted((*at, key))!r} differs.", expected=str(node.dtype), got=got, hint="cast one of them first: td.apply(lambda x: x.to(dtype))."))
        elif isinstance(node, TensorCollection):
            if not isinstance(twin, TensorCollection):
                raise TreeStructureError(explain(f"{name}: {dotted((*at, key))!r} is a tree in one and a leaf in the other."))
            _check_nodes(name, node, twin, (*at, key))
    if first._kinds != other._kinds and first._kinds and other._kinds:
        differing = next(k for k in mine if first._kinds.get(k) != other._kinds.get(k))
        raise LeafMismatchError(
            explain(f"{name}: leaf {dotted((*at, differing))!r} is of different kinds.", expected=str(first._kinds.get(differing)), got=str(other._kinds.get(differing)))
        )


def _explain_join(op: LeafOp, first: TensorCollection, others: Sequence[TensorCollection], err: Exception) -> NoReturn:
    """Find the leaf that torch refused, and name it with both shapes."""
    skip = op.args[0] if op.name == "cat" else None
    mine = dict(iter_leaves(first))
    for other in others:
        for path, leaf in iter_leaves(other):
            a, b = list(mine[path].shape), list(leaf.shape)
            same = a == b if skip is None else a[:skip] + a[skip + 1 :] == b[:skip] + b[skip + 1 :]
            if not same:
                raise LeafMismatchError(
                    explain(
                        f"{op.name}: leaf {dotted(path)!r} differs.",
                        expected=f"shape {a}",
                        got=f"shape {b}",
                        hint="pad them to one shape, or keep them ragged with lazy_stack.",
                    )
                ) from err
    raise err
