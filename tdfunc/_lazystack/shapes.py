"""Indices and shape operations of a lazy stack: the part for its own dimension moves trees, the rest goes to each tree.

docs/ragged.md lists the operations; all others need one tensor for each leaf, and raise.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Size, Tensor

from tdfunc._lazystack.ragged import check_alike
from tdfunc.core.collection import LeafOp, TensorCollection, no_one_shape
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.walk import Difference, zip_trees
from tdfunc.ops.batch import index, join, shape
from tdfunc.ops.edits import at


def _split_index(stack: Any, parts: Sequence[Any], call: str) -> tuple[Any, tuple[Any, ...], int]:
    """Return the part of an index for the stack's own dimension, the parts for its trees, and the place of the rows."""
    dim = stack._dim
    named = sum([part is not None and not isinstance(part, bool) for part in parts])
    parts = (*parts, *[slice(None)] * (len(stack._batch_size) - named))
    place = [i for i, part in enumerate(parts) if part is not None and not isinstance(part, bool)][dim]
    here = parts[place]
    many = [i for i, part in enumerate(parts) if isinstance(part, bool) or (isinstance(part, Tensor) and part.dim())]
    before = parts[:place]
    if many:
        # torch moves the rows of index tensors that are apart to the front, and numbers them together.
        alone = many == [place] or isinstance(here, int) or (isinstance(here, Tensor) and here.dim() == 0)
        is_one_block = many == list(range(many[0], many[-1] + 1))
        if any([isinstance(part, bool) for part in parts]) or not (alone or (isinstance(here, slice) and is_one_block)):
            raise no_one_shape(f"{call} with index tensors across the trees", stack)
    rows = [part.dim() for part in before if isinstance(part, Tensor) and part.dim()]
    kept = sum([part is None or isinstance(part, slice) for part in before])
    rest = (*before, *parts[place + 1 :])
    return here, rest, kept + max(rows, default=0)


def _indexed(tree: Any, parts: tuple[Any, ...]) -> Any:
    if _is_whole(parts):
        return tree
    return tree._index(parts)


def _is_whole(parts: tuple[Any, ...]) -> bool:
    return all([isinstance(part, slice) and part == slice(None) for part in parts])


def pick(stack: Any, parts: Sequence[Any]) -> Any:
    """Index a lazy stack."""
    here, rest, dim = _split_index(stack, parts, "index")
    if not isinstance(here, slice) and not (isinstance(here, Tensor) and here.dim()):
        return _indexed(stack._tree_at(int(here)), rest)
    trees = stack._trees
    if isinstance(here, Tensor):
        done = [_indexed(trees[number], rest) for number in here.flatten().tolist()]
        return nest(stack, done, here.shape, dim)
    done = [_indexed(tree, rest) for tree in trees[here]]
    return nest(stack, done, (len(done),), dim)


def nest(stack: Any, trees: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """Return trees in row-major order as a lazy stack (of lazy stacks), whose dimensions start at `dim`."""
    if 0 in sizes:
        raise error(IndexError, "index: a lazy stack must keep one tree at least.", got="an index of none")
    if len(sizes) > 1:
        step = prod(sizes[1:])
        trees = [nest(stack, trees[i : i + step], sizes[1:], dim) for i in range(0, len(trees), step)]
    return stack._of(trees, dim)


def _on_write_rows(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    """Write rows, given as a tree, into the trees that an index takes."""
    parts, call = op.args
    (value,) = others
    here, rest, dim = _split_index(stack, parts, f"at[...].{call}")
    trees = stack._trees
    numbers: list[Any] = list(range(len(trees)))
    if isinstance(here, Tensor):
        here = here.tolist()
    if isinstance(here, int):
        numbers = [here]
        values = [value]
    else:
        numbers = numbers[here] if isinstance(here, slice) else here
        if any([isinstance(number, list) for number in numbers]):
            raise no_one_shape(f"at[...].{call} with an index of several dimensions", stack)
        if value._batch_size[dim : dim + 1] != (len(numbers),):
            raise BatchSizeError(
                f"at[...].{call}: the rows must have the batch size of the index.",
                expected=f"{len(numbers)} at dimension {dim}",
                got=f"batch size {list(value._batch_size)}",
            )
        values = index.unbind(value, dim)
    for number, rows in zip(numbers, values, strict=True):
        trees[number] = _written(trees[number], rest, rows, call)
    return stack._of(trees, stack._dim)


def _written(tree: Any, parts: tuple[Any, ...], rows: Any, call: str) -> Any:
    if call != "set" or not _is_whole(parts) or rows._batch_size == tree._batch_size:
        return at.write_rows(tree, parts, rows, call)
    # A whole tree may give way to one of another length.
    pairs = zip_trees(tree, rows)
    if isinstance(pairs, Difference):
        raise pairs.error("at[...].set")
    for path, old, new in pairs:
        if isinstance(old, Tensor) and old.dtype is not new.dtype:
            where = f"at[...].set: the rows for {dotted(path)!r} must have its dtype."
            raise LeafMismatchError(where, expected=str(old.dtype), got=str(new.dtype))
    return rows


def _on_join(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    for other in others:
        if other._dim != stack._dim or len(other._batch_size) != len(stack._batch_size):
            raise TreeStructureError(
                f"{op.name}: all lazy stacks must hold their trees along one dimension.",
                expected=f"batch size {list(stack._batch_size)} along dimension {stack._dim}",
                got=f"batch size {list(other._batch_size)} along dimension {other._dim}",
                hint="permute() moves the dimension of a stack.",
            )
    check_alike([tree for part in (stack, *others) for tree in part._trees], ())
    dim = op.args[0]
    mine = stack._dim
    if op.name == "stack":
        return stack._of([stack, *others], dim)
    if dim == mine:
        return stack._of([tree for part in (stack, *others) for tree in part._trees], mine)
    rows = zip(*[part._trees for part in (stack, *others)], strict=True)
    return stack._of([join.cat(row, dim - (dim > mine)) for row in rows], mine)


def _on_permute(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    order = op.args[0]
    dim = stack._dim
    n = len(stack._batch_size)
    full = (*order, *range(len(order), n))
    inner = tuple([d - (d > dim) for d in full if d != dim])
    return stack._of([shape.permute(tree, inner) for tree in stack._trees], full.index(dim))


def _on_unsqueeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    new = op.args[0]
    dim = stack._dim
    before = new <= dim
    return stack._of([shape.unsqueeze(tree, new - (not before)) for tree in stack._trees], dim + before)


def _on_squeeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    gone = op.args[0]
    dim = stack._dim
    if gone == dim:
        return stack._trees[0]
    return stack._of([shape.squeeze(tree, gone - (gone > dim)) for tree in stack._trees], dim - (gone < dim))


def _on_expand(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    resize: Any = op.size
    new = resize(stack._batch_size)
    old = stack._batch_size
    lead = len(new) - len(old)
    dim = stack._dim + lead
    target = (*new[:dim], *new[dim + 1 :])
    # A ragged dimension keeps its size in each tree.
    trees = [
        shape.expand(tree, tuple([tree._batch_size[i - lead] if n < 0 else n for i, n in enumerate(target)]))
        for tree in stack._trees
    ]
    return stack._of(trees * new[dim] if len(trees) == 1 else trees, dim)


def _on_reshape(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    """Split the stack's dimension or merge it with those behind it, or reshape those of the trees on one side of it."""
    resize: Any = op.size
    old = stack._batch_size
    dim = stack._dim
    trees = stack._trees
    new = Size(resize(old))
    place = len(new) - len(old[dim:])
    if place >= 0 and new[place:] == old[dim:]:
        sizes = [(*new[:place], *tree._batch_size[dim:]) for tree in trees]
        return stack._of([shape.reshape(t, size, op.args[1]) for t, size in zip(trees, sizes, strict=True)], place)
    if new[: dim + 1] == old[: dim + 1]:
        # `flatten` gives a ragged dimension the product of its sizes, one of which is -1.
        size = tuple([max(n, -1) for n in (*new[:dim], *new[dim + 1 :])])
        return stack._of([shape.reshape(tree, size, op.args[1]) for tree in trees], dim)
    for merged in range(dim + 1, len(old) + 1):
        tail = old[merged:]
        end = len(new) - len(tail)
        if dim < end and new[:dim] == old[:dim] and new[end:] == tail:
            if new[dim:end] == (old[dim:merged].numel(),):
                return nest(stack, trees, (len(trees),), dim)
            if prod(new[dim:end]) == len(trees):
                return nest(stack, trees, new[dim:end], dim)
        is_nested = all([tree._is_lazy and tree._dim == dim for tree in trees])
        if merged == len(old) or (old[merged] < 0 and not is_nested):
            break
        trees = [row for tree in trees for row in index.unbind(tree, dim)]
    raise no_one_shape(op.name, stack)


HANDLERS: dict[str, Callable[[Any, LeafOp, Sequence[Any]], TensorCollection]] = {
    "index": lambda stack, op, _: pick(stack, op.args[0]),
    "stack": _on_join,
    "cat": _on_join,
    "permute": _on_permute,
    "unsqueeze": _on_unsqueeze,
    "squeeze": _on_squeeze,
    "expand": _on_expand,
    "reshape": _on_reshape,
    "write_rows": _on_write_rows,
}
