"""A tree as one vector, and back: `ravel`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_unflatten

from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.pytree import flatten_with_paths


def ravel(tree: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the leaves of a tree as one vector, and a function that turns such a vector back into a tree.

    Args:
        tree: A tree, or a tuple, list or dict of trees and tensors.

    Returns:
        The vector and the function. The vector contains each tied leaf once, in the order of `torch.utils._pytree`,
        and has the dtype to which the dtypes of the leaves promote. The function gives each leaf its shape and dtype
        and takes vectors of this length and dtype; `torch.vmap` of it takes a matrix.

    Raises:
        TypeError: A leaf is not a tensor.
        LeafMismatchError: The common dtype would round a leaf, as float32 rounds int64; or the vector given to the
            function has another length or dtype.

    Source:
        `jax.flatten_util.ravel_pytree`.

    Examples:
        >>> vector, unravel = tdf.ravel(TensorDict({"a": torch.zeros(2, 2), "b": torch.ones(1)}))
        >>> vector, unravel(vector + 1)["b"]
        (tensor([0., 0., 0., 0., 1.]), tensor([2.]))
    """
    found, spec = flatten_with_paths(tree)
    leaves: list[Tensor] = []
    dtype: torch.dtype | None = None
    for path, leaf in found:
        if not isinstance(leaf, Tensor):
            raise error(TypeError, f"ravel: the leaf {keystr(path)} is not a tensor.", got=type(leaf).__name__)
        leaves.append(leaf)
        dtype = leaf.dtype if dtype is None else torch.promote_types(dtype, leaf.dtype)
    dtype = dtype or torch.get_default_dtype()
    for path, leaf in found:
        if not _is_exact(leaf.dtype, dtype):
            raise LeafMismatchError(
                f"ravel: the vector would round the leaf {keystr(path)}.",
                expected=f"a dtype whose values {dtype} holds",
                got=str(leaf.dtype),
                hint="leave it out (partition(tree, dtype), split(tree)), or cast the others: td.double().",
            )
    # Of no leaves torch makes no vector.
    if leaves:
        vector = torch.cat([leaf.reshape(-1).to(dtype) for leaf in leaves])
    else:
        vector = torch.zeros(0, dtype=dtype)
    return vector, _Unravel(spec, [leaf.shape for leaf in leaves], [leaf.dtype for leaf in leaves], dtype)


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a dtype holds every value of one that promotes to it."""
    is_whole = not (source.is_floating_point or source.is_complex or source is torch.bool)
    # A floating-point dtype holds whole numbers up to 2 / eps.
    rounds = is_whole and (target.is_floating_point or target.is_complex)
    return not rounds or torch.iinfo(source).max <= 2 / torch.finfo(target).eps


class _Unravel(NamedTuple):
    """The function that makes a tree of a vector."""

    spec: TreeSpec
    shapes: list[Size]
    dtypes: list[torch.dtype]
    dtype: torch.dtype

    def __call__(self, vector: Tensor) -> Any:
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + shape.numel())
        if vector.shape != (ends[-1],) or vector.dtype != self.dtype:
            hint = None
            if vector.dim() == 2:
                hint = "torch.vmap(unravel)(matrix) makes a stacked tree of its rows."
            raise LeafMismatchError(
                "unravel: the vector does not fit the tree.",
                expected=f"shape ({ends[-1]},), {self.dtype}",
                got=f"shape {tuple(vector.shape)}, {vector.dtype}",
                hint=hint,
            )
        leaves: list[Tensor] = []
        for (start, end), shape, dtype in zip(pairwise(ends), self.shapes, self.dtypes, strict=True):
            part = vector[start:end]
            if not dtype.is_complex:
                # torch warns of a cast that drops imaginary parts.
                part = part.real
            leaves.append(part.reshape(shape).to(dtype))
        return tree_unflatten(leaves, self.spec)
