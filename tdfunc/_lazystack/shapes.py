"""Operations that move or join the trees of a lazy stack, reduce them, or would need one shape."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Size, Tensor

from tdfunc._lazystack.pick import nest, pick, write
from tdfunc._lazystack.ragged import check_alike, same_keys, without
from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, same_value
from tdfunc.core.types import Names, Node, Path
from tdfunc.ops import index, join, shape
from tdfunc.ops.reduce import reduced_size

REDUCTIONS = frozenset(
    ("sum", "mean", "prod", "amax", "amin", "std", "var", "nansum", "nanmean", "logsumexp", "norm", "quantile")
)


def one_shape(stack: Any, name: str) -> LeafMismatchError:
    """Build the error of an operation for which the trees would have to be one tensor for each leaf."""
    return LeafMismatchError(
        f"{name}: a lazy stack has no one shape for each leaf.",
        expected="an operation on each of its trees, or one that only moves them",
        got=f"batch size {list(stack._batch_size)}, stacked along dimension {stack._dim}",
        hint="write lazy.pad() first (lazy.dense() where the trees have one shape), or do it to each of .trees.",
    )


def _on_index(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    return pick(stack, op.args[0])


def _on_stack(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    _check_joined(stack, others, "stack")
    return stack._of([stack, *others], op.args[0])


def _on_cat(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    _check_joined(stack, others, "cat")
    dim, mine = op.args[0], stack._dim
    if dim == mine:
        return stack._like([tree for part in (stack, *others) for tree in part._trees])
    if any(len(other._data) != len(stack._data) for other in others):
        raise LeafMismatchError(
            "cat: the lazy stacks hold different numbers of trees.",
            expected=f"{len(stack._data)} trees",
            got=f"{[len(other._data) for other in others]}",
        )
    rows = zip(*[part._trees for part in (stack, *others)], strict=True)
    return stack._like([join.cat(row, dim - (dim > mine)) for row in rows])


def _check_joined(stack: Any, others: Sequence[Any], call: str) -> None:
    for other in others:
        if type(other) is not type(stack) or other._dim != stack._dim:
            got = f"a {type(other).__name__}"
            got += f" along dimension {other._dim}" if isinstance(other, TensorCollection._lazy) else ""
            raise TreeStructureError(
                f"{call}: not lazy stacks of one kind.",
                expected=f"a {type(stack).__name__} along dimension {stack._dim}",
                got=got,
                hint="lazy_stack(tree.unbind(dim), dim) makes one of a dense tree; permute() moves the dimension.",
            )
        if len(other._batch_size) != len(stack._batch_size):
            raise LeafMismatchError(
                f"{call}: the batch sizes have different numbers of dimensions.",
                expected=str(list(stack._batch_size)),
                got=str(list(other._batch_size)),
            )
    check_alike([tree for part in (stack, *others) for tree in part._trees], ())


def _on_permute(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    order, dim, n = op.args[0], stack._dim, len(stack._batch_size)
    full = (*order, *range(len(order), n))
    inner = tuple([d - (d > dim) for d in full if d != dim])
    return stack._like([shape.permute(tree, inner) for tree in stack._trees], full.index(dim))


def _on_unsqueeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    new, dim = op.args[0], stack._dim
    before = new <= dim
    trees = [shape.unsqueeze(tree, new if before else new - 1) for tree in stack._trees]
    return stack._like(trees, dim + before)


def _on_squeeze(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    gone, dim = op.args[0], stack._dim
    if gone == dim:
        return stack._trees[0]
    before = gone < dim
    return stack._like([shape.squeeze(tree, gone if before else gone - 1) for tree in stack._trees], dim - before)


def _on_expand(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    resize: Any = op.size
    new, old = resize(stack._batch_size), stack._batch_size
    lead = len(new) - len(old)
    dim = stack._dim + lead
    target = without(new, dim)

    def grown(tree: Any) -> Any:
        # A ragged dimension stays what it is in each tree.
        sizes = [tree._batch_size[i - lead] if size < 0 else size for i, size in enumerate(target)]
        return shape.expand(tree, tuple(sizes))

    trees = [grown(tree) for tree in stack._trees]
    return stack._like(trees * new[dim] if len(trees) == 1 else trees, dim)


def _on_reshape(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    """Reshape what leaves the trees whole: dimensions in front of them, or the one along which they lie."""
    resize: Any = op.size
    old, dim, trees = stack._batch_size, stack._dim, stack._trees
    new = Size(resize(old))
    n = len(old) - len(new) + len(op.args[0])
    if dim >= n:
        return stack._like([tree._shape(op) for tree in trees], dim + len(new) - len(old))
    lead, tail = old[:dim], old[dim + 1 :]
    middle = new[dim : len(new) - len(tail)]
    keeps = new[:dim] == lead and len(new) >= dim + len(tail) and new[len(new) - len(tail) :] == tail
    if keeps and middle and prod(middle) == len(trees) and min(middle) > 0:
        return nest(stack, trees, tuple(middle), dim)
    if all(isinstance(tree, TensorCollection._lazy) and tree._dim == dim for tree in trees):
        inner = [each for tree in trees for each in tree._trees]
        # The product of the sizes, also of a ragged one, which is what `flatten` asks for.
        fits = len(new) > dim and new[:dim] == lead and new[dim + 1 :] == old[dim + 2 :]
        if fits and new[dim] in (len(inner), old[dim] * old[dim + 1]):
            return stack._of(inner, dim)
    if -1 in old or 0 in old or not new:
        raise one_shape(stack, op.name)
    return _regroup(stack, new, op.args[1])


def _regroup(stack: Any, new: Size, method: str) -> Any:
    """Reshape the rows along the stack's own dimension together with the dimensions that it merges with."""
    old, dim = stack._batch_size, stack._dim
    (start, stop), (begin, end) = _group(old, new, dim)
    target = (*new[:begin], *new[end:])
    rows: list[Any] = []
    for at in product(*map(range, old[start:stop])):
        inner = [number for i, number in enumerate(at, start) if i != dim]
        row = stack._trees[at[dim - start]]
        row = row._index((slice(None),) * start + tuple(inner)) if inner else row
        rows.append(shape.reshape(row, target, method))
    return nest(stack, rows, tuple(new[begin:end]), begin)


def _group(old: Size, new: Size, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the fewest old dimensions around one, and the new ones that hold the same elements."""
    start = stop = begin = end = 0
    while True:
        before, after = old[stop], new[end]
        stop, end = stop + 1, end + 1
        while before != after:
            if before < after:
                before, stop = before * old[stop], stop + 1
            else:
                after, end = after * new[end], end + 1
        # What is left on one side only has one element.
        stop, end = (len(old) if end == len(new) else stop), (len(new) if stop == len(old) else end)
        if dim < stop:
            return (start, stop), (begin, end)
        start, begin = stop, end


def _on_gather(stack: Any, op: LeafOp, _: Sequence[Any]) -> Any:
    along, rows = op.args
    dim, size, trees = stack._dim, stack._batch_size, stack._trees
    if dim >= rows.dim():
        return stack._like([tree._shape(op) for tree in trees])
    if any(0 <= size[i] < count for i, count in enumerate(rows.shape) if i != along):
        raise error(
            IndexError,
            "gather: the index reaches further than the batch.",
            expected=f"at most {list(size)}, but along dimension {along}",
            got=f"shape {list(rows.shape)}",
        )
    if along != dim:
        parts, inner = rows.unbind(dim), along - (along > dim)
        done = [tree._shape(index.gather_op(inner, part)) for tree, part in zip(trees, parts, strict=False)]
        return nest(stack, done, (len(done),), dim)
    for number in rows.unique().tolist():
        if not 0 <= number < len(trees):
            raise error(
                IndexError,
                f"gather: {number} is out of range for batch dimension {dim}, along which the trees lie.",
                expected=f"0 <= index < {len(trees)}",
            )
    grid = torch.meshgrid(*[torch.arange(count, device=rows.device) for count in rows.shape], indexing="ij")
    return pick(stack, tuple([rows if i == dim else numbers for i, numbers in enumerate(grid)]))


def reduce_dims(stack: Any, op: LeafOp) -> Any:
    """Reduce batch dimensions of each tree."""
    dims, keepdim = op.args
    dim = stack._dim
    if dim in dims or op.bind is None:
        raise one_shape(stack, op.name)
    inner = tuple([d - (d > dim) for d in dims])

    def names(given: Names) -> Names:
        return tuple([name for i, name in enumerate(given) if keepdim or i not in inner])

    size = partial(reduced_size, dims=inner, keepdim=keepdim)
    each = op._replace(leaf=op.bind(inner, keepdim), args=(inner, keepdim), size=size, names=names, plain=None)
    gone = 0 if keepdim else sum(d < dim for d in inner)
    return stack._like([tree._map(each) for tree in stack._trees], dim - gone)


def run_along(stack: Any, op: LeafOp) -> Any:
    """Apply an operation along a batch dimension of each tree, which keeps the shape."""
    (along,) = op.args
    dim = stack._dim
    if along == dim or op.bind is None:
        raise one_shape(stack, op.name)
    inner = along - (along > dim)
    each = op._replace(leaf=op.bind(inner), args=(inner,), plain=None)
    return stack._like([tree._map(each) for tree in stack._trees])


def reduce_all(stack: Any, op: LeafOp, at: Path) -> Any:
    """Reduce each leaf to one value over all trees."""
    size: Any = op.size
    if size(Size((1,))):
        raise one_shape(stack, f"{op.name}(keepdim=True)")
    data: dict[str, Node] = {}
    trees = _innermost(stack)
    for key, nodes in same_keys(trees, op.name, at):
        if isinstance(nodes[0], TensorCollection):
            data[key] = reduce_all(stack._like(nodes), op, (*at, key))
        elif isinstance(nodes[0], NonTensorBase):
            data[key] = _shared_value(nodes, op.name, (*at, key))
        else:
            data[key] = op.leaf(torch.cat([_leaf_row(node) for node in nodes]))
    return type(trees[0])._make(data, Size(()), stack._device)


def _innermost(stack: Any) -> list[Any]:
    """Return the trees of a stack, of stacks of stacks too, that hold leaves."""
    if not isinstance(stack, TensorCollection._lazy):
        return [stack]
    return [tree for part in stack._trees for tree in _innermost(part)]


def _shared_value(nodes: Sequence[Any], call: str, at: Path) -> NonTensorData:
    first = nodes[0]
    if all(isinstance(node, NonTensorData) and same_value(node.data, first.data) for node in nodes):
        return NonTensorData(first.data)
    raise LeafMismatchError(
        f"{call}: {dotted(at)!r} has other values in other rows, which the reduction would merge.",
        expected="one value for all",
        got="several",
        hint=f"leave it out first: lazy.exclude({at!r}).",
    )


def _leaf_row(leaf: Tensor) -> Tensor:
    return leaf.reshape(-1)


HANDLERS: dict[str, Callable[[Any, LeafOp, Sequence[Any]], Any]] = {
    "index": _on_index,
    "stack": _on_stack,
    "cat": _on_cat,
    "permute": _on_permute,
    "unsqueeze": _on_unsqueeze,
    "squeeze": _on_squeeze,
    "expand": _on_expand,
    "reshape": _on_reshape,
    "gather": _on_gather,
    "write_rows": write,
}
