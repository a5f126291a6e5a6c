"""How vmap and lazy stacks agree on what a dimension is, and the error where they do not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdfunc._collection import iter_leaves
from tdfunc._errors import BatchSizeError, explain
from tdfunc._pytree import Context

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

# torch.vmap maps a dimension of the *leaves*, and those lack the dimension of the stack: in_dims=1 of a stack along
# dimension 0 would map what the stack calls dimension 2. Where the stack's dimension comes later the two agree.


def in_transform() -> bool:
    """Whether a transform of torch.func is running."""
    return _functorch.peek_interpreter_stack() is not None


def wrapping(leaf: Any) -> tuple[int, Any]:
    """Return the vmap level of a leaf (-1 for none) and, with a level, the memory layout under the wrapper."""
    if not isinstance(leaf, Tensor) or not _functorch.is_batchedtensor(leaf):
        return -1, None
    inside = _functorch.get_unwrapped(leaf)
    return _functorch.maybe_get_level(leaf), (_functorch.maybe_get_bdim(leaf), inside.shape, inside.stride())


def check_mapped(children: Sequence[Any], context: Context, dim: int, ndim: int) -> None:
    """Raise if vmap has just taken from, or given to, the leaves another dimension than the stack was asked for."""
    if ndim == len(context.batch_size):
        return
    if torch.compiler.is_compiling():
        # dynamo cannot ask a tensor which of its dimensions is mapped.
        if dim < len(context.batch_size) - 1:
            raise _not_mapped("a compiled function changes the number of batch dimensions", dim)
        return
    if not in_transform():
        return
    leaves = [leaf for child in children for _, leaf in iter_leaves(child)]
    before = context.probe or [(-1, None)] * len(leaves)
    for leaf, (level, layout) in zip(leaves, before, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        now = _functorch.maybe_get_level(leaf) if _functorch.is_batchedtensor(leaf) else -1
        if now > level and (mapped := _functorch.maybe_get_bdim(leaf)) >= dim:
            raise _not_mapped(f"in_dims={mapped}", dim)
        if now < level and not any(_came_to(layout, leaf, place) for place in range(dim + 1)):
            raise _not_mapped("out_dims", dim)


def _came_to(layout: Any, leaf: Tensor, place: int) -> bool:
    """Whether the mapped dimension of a leaf with this layout has become dimension `place`."""
    mapped, sizes, strides = layout
    order = [d for d in range(len(sizes)) if d != mapped]
    order.insert(place, mapped)
    return [sizes[d] for d in order] == list(leaf.shape) and [strides[d] for d in order] == list(leaf.stride())


def _not_mapped(what: str, dim: int) -> BatchSizeError:
    return BatchSizeError(
        explain(
            f"vmap: {what} would be another dimension of the leaves than of the lazy stack.",
            expected=f"a dimension before {dim}, along which the trees lie",
            got=what,
            hint="permute() the stack so that its own dimension comes last (no copy); to map over the trees, write "
            "dense() or pad() first, or [fn(tree) for tree in lazy].",
        )
    )
