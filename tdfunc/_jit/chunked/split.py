"""The members of a call: which arguments hold them, how many there are, and the arguments of some of them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError

InDims: TypeAlias = tuple[Literal[0] | None, ...]


class Split(NamedTuple):
    """The arguments of a call: those with members along their first dimension, and the number of members."""

    args: tuple[Any, ...]
    members: int
    dims: InDims

    def take_rows(self, begin: int, end: int) -> tuple[Any, ...]:
        """Return the arguments of some members, as views."""
        return self.map_members(lambda x: x[begin:end])

    def take_copies(
        self, members: int, change: Callable[[Tensor], Tensor] | None = None, place: int = 0
    ) -> tuple[Any, ...]:
        """Return copies of the arguments of the first members, of whom member 0 is at a place of them.

        Args:
            members: How many.
            change: Gives other numbers to all but member 0.
            place: The place that member 0 changes with the member there.
        """

        def copy(x: Tensor) -> Tensor:
            new = x[:members].clone()
            if change is not None and (x.is_floating_point() or x.is_complex()):
                new[1:] = change(new[1:])
            if place:
                new[place] = new[0]
                new[0] = x[place]
            return new

        return self.map_members(lambda x: torch_pytree.tree_map_only(Tensor, copy, x))

    def map_members(self, fn: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Apply a function to the trees and tensors that have members; others are passed as they are."""
        taken: list[Any] = []
        for arg, dim in zip(self.args, self.dims, strict=True):
            taken.append(arg if dim is None else _map_trees(fn, arg))
        return tuple(taken)


def split_members(args: tuple[Any, ...], in_dims: InDims) -> Split:
    """Return the arguments with the number of members in them."""
    if len(in_dims) != len(args):
        raise BatchSizeError(
            "jit: in_dims has another number of entries than the call has arguments.",
            expected=f"{len(in_dims)} positional arguments",
            got=str(len(args)),
            hint="give in_dims one 0 or None for each positional argument, as for torch.vmap.",
        )
    # An argument with each number of members.
    counts: dict[int, int] = {}
    for number, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if dim == 0:
            counts |= dict.fromkeys(_list_counts(arg, number), number)
    if len(counts) != 1:
        raise BatchSizeError(
            "jit: the arguments with in_dims 0 do not have one number of members.",
            expected="trees and tensors with one size of their first dimension",
            got=", ".join([f"{count} in argument {number}" for count, number in counts.items()]) or "no tensor",
            hint="pass None in in_dims for what all members share.",
        )
    split = Split(args, next(iter(counts)), in_dims)
    if any([_is_expanded(leaf) for leaf in torch_pytree.tree_leaves(args)]):
        return split._replace(args=split.map_members(_densify))
    return split


def _list_counts(arg: Any, number: int) -> list[int]:
    """Return the sizes of the first dimension of what an argument holds."""
    counts: list[int] = []
    for part in torch_pytree.tree_leaves(arg, is_leaf=_is_tree):
        if isinstance(part, TensorCollection):
            if not part._batch_size or part._is_lazy:
                kind = "a lazy stack" if part._is_lazy else "a tree without batch dimensions"
                raise _no_members(number, kind, "batch size [E, ...], E members; a lazy stack by dense() or pad()")
            counts.append(part._batch_size[0])
        elif isinstance(part, Tensor):
            if part.layout is not torch.strided:
                raise _no_members(number, f"a tensor of layout {part.layout}", str(torch.strided))
            if part.dim() == 0:
                raise _no_members(number, "a tensor without dimensions", "members along the first dimension")
            counts.append(part.shape[0])
    return counts


def _no_members(number: int, what: str, expected: str) -> BatchSizeError:
    return BatchSizeError(
        f"jit: argument {number} has in_dims 0 and holds {what}.",
        expected=expected,
        got=what,
        hint="pass None in in_dims for what all members share.",
    )


def _is_expanded(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.stride(0) == 0 and leaf.shape[0] > 1


def _densify(arg: Any) -> Any:
    """Return an argument in which each member has its own numbers, as in results: the next call has the same layout."""
    return torch_pytree.tree_map(lambda leaf: leaf.contiguous() if _is_expanded(leaf) else leaf, arg)


def _map_trees(fn: Callable[[Any], Any], arg: Any) -> Any:
    """Apply a function to the trees and tensors of an argument."""

    def apply(value: Any) -> Any:
        return fn(value) if isinstance(value, (Tensor, TensorCollection)) else value

    return torch_pytree.tree_map(apply, arg, is_leaf=_is_tree)


def _is_tree(value: Any) -> bool:
    return isinstance(value, TensorCollection)
