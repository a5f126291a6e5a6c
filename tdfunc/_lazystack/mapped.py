"""How vmap and lazy stacks agree on what a dimension is, and the error where they do not."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tdfunc.core.collection import iter_leaves
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.pytree import Context
from tdfunc.core.vmapped import Layout, came_to, layout_of

# torch.vmap maps a dimension of the *leaves*, and those lack the dimension of the stack: in_dims=1 of a stack along
# dimension 0 would map what the stack calls dimension 2. Where the stack's dimension comes later the two agree.


def check_mapped(children: Sequence[Any], context: Context, dim: int, ndim: int) -> None:
    """Raise if vmap has just taken from, or given to, the leaves another dimension than the stack was asked for."""
    if ndim == len(context.batch_size):
        return
    if is_compiling():
        # dynamo cannot ask a tensor which of its dimensions is mapped.
        if dim < len(context.batch_size) - 1:
            raise _not_mapped("a compiled function changes the number of batch dimensions", dim)
        return
    if not in_functorch():
        return
    leaves = [leaf for child in children for _, leaf in iter_leaves(child)]
    before = context.probe or [Layout()] * len(leaves)
    for leaf, old in zip(leaves, before, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        now = layout_of(leaf)
        if now.level > old.level and now.mapped is not None and now.mapped >= dim:
            raise _not_mapped(f"in_dims={now.mapped}", dim)
        if now.level < old.level and not any(came_to(old, now, place) for place in range(dim + 1)):
            raise _not_mapped("out_dims", dim)


def _not_mapped(what: str, dim: int) -> BatchSizeError:
    return BatchSizeError(
        f"vmap: {what} would be another dimension of the leaves than of the lazy stack.",
        expected=f"a dimension before {dim}, along which the trees lie",
        got=what,
        hint="permute() the stack so that its own dimension comes last (no copy); to map over the trees, write "
        "dense() or pad() first, or [fn(tree) for tree in lazy].",
    )
