"""Indices and shape operations of a lazy stack: the part for its own dimension moves trees, the rest goes to each tree.

docs/ragged.md lists the operations; all others need one tensor for each leaf, and raise.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeGuard

from torch import Size, Tensor

from tdfunc._lazystack.ragged import check_alike
from tdfunc.core.collection import LeafOp, TensorCollection, no_one_shape
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.walk import Difference, zip_trees
from tdfunc.ops.batch import index, join, shape
from tdfunc.ops.edits import at


class _Split(NamedTuple):
    """An index of a lazy stack, divided."""

    # The part for the stack's own dimension.
    own: Any
    # The parts for its trees.
    inner: tuple[Any, ...]
    # The place of the rows of the own dimension in the result.
    dim: int


def _takes_dim(part: Any) -> bool:
    """Return True if a part of a normalized index takes a batch dimension: None and bools add one."""
    return part is not None and not isinstance(part, bool)


def _has_rows(part: Any) -> TypeGuard[Tensor]:
    """Return True if a part of an index is a tensor of positions that has dimensions."""
    return isinstance(part, Tensor) and part.dim() > 0


def _split_index(stack: Any, parts: Sequence[Any], call: str) -> _Split:
    """Divide a normalized index between the stack's own dimension and its trees."""
    used = len([part for part in parts if _takes_dim(part)])
    full = (*parts, *[slice(None)] * (len(stack._batch_size) - used))
    taking = [place for place, part in enumerate(full) if _takes_dim(part)]
    place = taking[stack._dim]
    _check_advanced(stack, full, place, call)
    before = full[:place]
    inner = (*before, *full[place + 1 :])
    # The dimensions in front of the own one: index tensors broadcast together to the dimensions of the largest.
    kept = len([part for part in before if part is None or isinstance(part, slice)])
    rows = max([part.dim() for part in before if _has_rows(part)], default=0)
    return _Split(full[place], inner, kept + rows)


def _check_advanced(stack: Any, parts: tuple[Any, ...], place: int, call: str) -> None:
    """Raise if index tensors or bools would number rows of several trees together.

    torch moves the rows of index tensors that are apart to the front, and numbers them together.
    """
    advanced = [i for i, part in enumerate(parts) if isinstance(part, bool) or _has_rows(part)]
    if not advanced:
        return
    own = parts[place]
    is_number = isinstance(own, int) or (isinstance(own, Tensor) and own.dim() == 0)
    is_one_block = advanced == list(range(advanced[0], advanced[-1] + 1))
    is_separate = advanced == [place] or is_number or (isinstance(own, slice) and is_one_block)
    has_bool = any([isinstance(part, bool) for part in parts])
    if has_bool or not is_separate:
        raise no_one_shape(f"{call} with index tensors across the trees", stack)


def _indexed(tree: Any, parts: tuple[Any, ...]) -> Any:
    if _is_whole(parts):
        return tree
    return tree._index(parts)


def _is_whole(parts: tuple[Any, ...]) -> bool:
    return all([isinstance(part, slice) and part == slice(None) for part in parts])


def pick(stack: Any, parts: Sequence[Any]) -> Any:
    """Index a lazy stack."""
    own, inner, dim = _split_index(stack, parts, "index")
    if isinstance(own, slice):
        numbers = range(*own.indices(stack._batch_size[stack._dim]))
        done = [_indexed(tree, inner) for tree in stack._trees_at(numbers)]
        return nest(stack, done, (len(done),), dim)
    if _has_rows(own):
        done = [_indexed(tree, inner) for tree in stack._trees_at(own.flatten().tolist())]
        return nest(stack, done, own.shape, dim)
    return _indexed(stack._tree_at(int(own)), inner)


def nest(stack: Any, trees: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """Return trees in row-major order as a lazy stack (of lazy stacks), whose dimensions start at `dim`."""
    if 0 in sizes:
        raise error(IndexError, "index: no tree of the lazy stack is left.", got="an index of none")
    if len(sizes) > 1:
        count = prod(sizes[1:])
        groups = [trees[i : i + count] for i in range(0, len(trees), count)]
        trees = [nest(stack, group, sizes[1:], dim) for group in groups]
    return stack._of(trees, dim)


def _on_write_rows(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    """Write rows, given as a tree, into the trees that an index takes."""
    parts, call = op.args
    (value,) = others
    own, inner, dim = _split_index(stack, parts, f"at[...].{call}")
    trees = stack._trees
    if isinstance(own, Tensor):
        own = own.tolist()
    if isinstance(own, int):
        numbers: list[Any] = [own]
        values = [value]
    else:
        numbers = list(range(len(trees)))[own] if isinstance(own, slice) else own
        if any([isinstance(number, list) for number in numbers]):
            raise no_one_shape(f"at[...].{call} with an index of several dimensions", stack)
        if value._batch_size[dim : dim + 1] != (len(numbers),):
            raise BatchSizeError(
                f"at[...].{call}: the rows do not have the batch size of the index.",
                expected=f"{len(numbers)} at dimension {dim}",
                got=f"batch size {list(value._batch_size)}",
            )
        values = index.unbind(value, dim)
    for number, rows in zip(numbers, values, strict=True):
        trees[number] = _written(trees[number], inner, rows, call)
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
            raise LeafMismatchError(
                f"at[...].set: the rows for {dotted(path)!r} have another dtype.",
                expected=str(old.dtype),
                got=str(new.dtype),
            )
    return rows


def _on_join(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    for other in others:
        if other._dim != stack._dim or len(other._batch_size) != len(stack._batch_size):
            raise TreeStructureError(
                f"{op.name}: the lazy stacks hold their trees along different dimensions.",
                expected=f"batch size {list(stack._batch_size)} along dimension {stack._dim}",
                got=f"batch size {list(other._batch_size)} along dimension {other._dim}",
                hint="permute() moves the dimension of a stack.",
            )
    stacks = [stack, *others]
    all_trees = [tree for each in stacks for tree in each._trees]
    check_alike(all_trees, ())
    dim = op.args[0]
    own = stack._dim
    if op.name == "stack":
        return stack._of(stacks, dim)
    if dim == own:
        return stack._of(all_trees, own)
    rows = zip(*[each._trees for each in stacks], strict=True)
    return stack._of([join.cat(row, _inner_dim(dim, own)) for row in rows], own)


def _inner_dim(dim: int, own: int) -> int:
    """Return the dimension of the trees that is dimension `dim` of their stack along dimension `own`."""
    return dim - 1 if dim > own else dim


def _on_permute(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    own = stack._dim
    order = op.args[0]
    order = (*order, *range(len(order), len(stack._batch_size)))
    inner = tuple([_inner_dim(dim, own) for dim in order if dim != own])
    return stack._of([shape.permute(tree, inner) for tree in stack._trees], order.index(own))


def _on_unsqueeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    new = op.args[0]
    own = stack._dim
    if new <= own:
        return stack._of([shape.unsqueeze(tree, new) for tree in stack._trees], own + 1)
    return stack._of([shape.unsqueeze(tree, new - 1) for tree in stack._trees], own)


def _on_squeeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    gone = op.args[0]
    own = stack._dim
    if gone == own:
        return stack._trees[0]
    trees = [shape.squeeze(tree, _inner_dim(gone, own)) for tree in stack._trees]
    return stack._of(trees, _inner_dim(own, gone))


def _on_expand(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    resize: Any = op.size
    old = stack._batch_size
    new = resize(old)
    lead = len(new) - len(old)
    own = stack._dim + lead
    target = (*new[:own], *new[own + 1 :])
    trees: list[Any] = []
    for tree in stack._trees:
        # A ragged dimension keeps its size in each tree.
        size = tuple([tree._batch_size[i - lead] if n < 0 else n for i, n in enumerate(target)])
        trees.append(shape.expand(tree, size))
    if len(trees) == 1:
        trees = trees * new[own]
    return stack._of(trees, own)


def _on_reshape(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    """Split the stack's dimension, merge it with others behind it, or reshape the trees' dimensions on one side."""
    resize: Any = op.size
    method = op.args[1]
    old = stack._batch_size
    own = stack._dim
    trees = stack._trees
    new = Size(resize(old))
    place = len(new) - len(old[own:])
    if place >= 0 and new[place:] == old[own:]:
        done = [shape.reshape(tree, (*new[:place], *tree._batch_size[own:]), method) for tree in trees]
        return stack._of(done, place)
    if new[: own + 1] == old[: own + 1]:
        # `flatten` gives a ragged dimension the product of its sizes, one of which is -1.
        size = tuple([max(n, -1) for n in (*new[:own], *new[own + 1 :])])
        return stack._of([shape.reshape(tree, size, method) for tree in trees], own)
    return _split_or_merge(stack, new, op.name)


def _split_or_merge(stack: Any, new: Size, call: str) -> Any:
    """Reshape the stack's own dimension, merged with ever more of those behind it, to some of the new dimensions."""
    old = stack._batch_size
    own = stack._dim
    trees = stack._trees
    # The dimensions from `own` to `merged` of the old size are one list of trees.
    for merged in range(own + 1, len(old) + 1):
        tail = old[merged:]
        end = len(new) - len(tail)
        if own < end and new[:own] == old[:own] and new[end:] == tail:
            if new[own:end] == (old[own:merged].numel(),):
                return nest(stack, trees, (len(trees),), own)
            if prod(new[own:end]) == len(trees):
                return nest(stack, trees, new[own:end], own)
        is_nested = all([tree._is_lazy and tree._dim == own for tree in trees])
        if merged == len(old) or (old[merged] < 0 and not is_nested):
            break
        trees = [row for tree in trees for row in index.unbind(tree, own)]
    raise no_one_shape(call, stack)


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
