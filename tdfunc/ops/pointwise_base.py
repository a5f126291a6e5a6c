"""How pointwise operations run: foreach kernels where they are legal, leaf by leaf elsewhere; broadcasting rules."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch

from tdfunc._collection import LeafOp, TensorCollection, iter_leaves
from tdfunc._errors import BatchSizeError, TieError, TreeStructureError, explain
from tdfunc._keys import dotted

T = TypeVar("T", bound=TensorCollection)
_NUMBERS = (bool, int, float, complex)
_peek: Callable[[], Any] = _functorch.peek_interpreter_stack  # pyright: ignore


def can_foreach() -> bool:
    """Whether `torch._foreach_*` may be called: it has no vmap rule, and a grad inside a vmap hides the vmap."""
    return not torch.compiler.is_compiling() and _peek() is None


def flat_leaves(tree: TensorCollection) -> list[Tensor] | None:
    """Return the leaves of an untied tree of tensors in insertion order, or None if it is anything else."""
    if tree._static is not None and tree._static.ties:
        return None
    leaves: list[Tensor] = []
    return leaves if _collect(tree, leaves) and leaves else None


def _collect(tree: TensorCollection, leaves: list[Tensor]) -> bool:
    for node in tree._data.values():
        if isinstance(node, Tensor):
            leaves.append(node)
        elif not isinstance(node, TensorCollection) or not _collect(node, leaves):
            return False
    return True


def refill(tree: T, leaves: Any) -> T:
    """Return the tree around new leaves in insertion order."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        data[key] = next(leaves) if isinstance(node, Tensor) else refill(node, leaves)
    return tree._make(data, tree._batch_size, tree._device, tree._names, tree._static)


def foreach_leaves(tree: T, name: str, *args: Any) -> T | None:
    """Run one foreach kernel over all leaves, or return None where it does not apply."""
    if not can_foreach():
        return None
    leaves = flat_leaves(tree)
    if leaves is None:
        return None
    try:
        return refill(tree, iter(getattr(torch, name)(leaves, *args)))
    # A kernel that lacks a dtype or layout; the leaf-by-leaf path then says what torch says.
    except RuntimeError:
        return None


def unary(tree: T, name: str, foreach: str | None, *args: Any, **kwargs: Any) -> T:
    """Apply `torch.<name>` to every leaf."""
    if foreach is not None and not args and not kwargs:
        done = foreach_leaves(tree, foreach)
        if done is not None:
            return done
    fn = getattr(torch, name)
    return tree._map(LeafOp(name, lambda x: fn(x, *args, **kwargs)))


def binary(tree: T, other: Any, name: str, foreach: str | None, **kwargs: Any) -> T:
    """Apply `torch.<name>(leaf, other)`: other is a number, a tensor over the batch, or a tree with the same keys."""
    fn = getattr(torch, name)
    if isinstance(other, TensorCollection):
        check_same(tree, other, name)
        if foreach is not None and not kwargs and can_foreach():
            mine, theirs = flat_leaves(tree), flat_leaves(_ordered_as(other, tree))
            if mine is not None and theirs is not None and len(mine) == len(theirs):
                try:
                    return refill(tree, iter(getattr(torch, foreach)(mine, theirs)))
                except RuntimeError:
                    pass
        return tree._map(LeafOp(name, lambda x, y: fn(x, y, **kwargs)), other)
    if isinstance(other, _NUMBERS):
        if foreach is not None and not kwargs:
            done = foreach_leaves(tree, foreach, other)
            if done is not None:
                return done
        return tree._map(LeafOp(name, lambda x: fn(x, other, **kwargs)))
    if isinstance(other, Tensor):
        check_operand(tree, other, name)
        if other.dim() == 0:
            return tree._map(LeafOp(name, lambda x: fn(x, other, **kwargs)))
        lead = other.reshape(*[1] * (len(tree._batch_size) - other.dim()), *other.shape)
        return tree._map(LeafOp(name, lambda x: fn(x, lead.reshape(*lead.shape, *[1] * (x.dim() - lead.dim())), **kwargs)))
    raise TypeError(explain(f"{name}: cannot combine a tree with this.", expected="a tree, number or tensor", got=type(other).__name__))


def reversed_binary(tree: T, other: Any, name: str) -> T:
    """Apply `torch.<name>(other, leaf)`, for operators with the tree on the right."""
    fn = getattr(torch, name)
    if isinstance(other, _NUMBERS):
        return tree._map(LeafOp(name, lambda x: fn(torch.as_tensor(other, device=x.device), x)))
    check_operand(tree, other, name)
    n = len(tree._batch_size)
    lead = other if other.dim() == 0 else other.reshape(*[1] * (n - other.dim()), *other.shape)
    return tree._map(LeafOp(name, lambda x: fn(lead.reshape(*lead.shape, *[1] * (x.dim() - lead.dim())) if lead.dim() else lead, x)))


def _ordered_as(tree: TensorCollection, model: TensorCollection) -> TensorCollection:
    if list(tree._data) == list(model._data) and not any(isinstance(n, TensorCollection) for n in tree._data.values()):
        return tree
    data = {
        key: _ordered_as(tree._data[key], node) if isinstance(node, TensorCollection) else tree._data[key]
        for key, node in model._data.items()
    }
    return tree._make(data, tree._batch_size)


def check_same(tree: TensorCollection, other: TensorCollection, name: str) -> None:
    """Raise unless two trees have the same paths and ties; the message lists the difference."""
    if tree._data.keys() == other._data.keys() and tree._static is other._static is None and not _nested(tree):
        return
    mine, theirs = {p for p, _ in iter_leaves(tree)}, {p for p, _ in iter_leaves(other)}
    if mine != theirs:
        raise TreeStructureError(
            explain(
                f"{name}: the trees have different keys.",
                expected=f"only in the first: {sorted(map(dotted, mine - theirs))}",
                got=f"only in the second: {sorted(map(dotted, theirs - mine))}",
                hint="select() the common keys first.",
            )
        )
    if tree._ties and other._ties != tree._ties:
        raise TieError(explain(f"{name}: the trees tie different paths.", expected=str(tree._ties), got=str(other._ties)))


def _nested(tree: TensorCollection) -> bool:
    return any(isinstance(node, TensorCollection) for node in tree._data.values())


def check_operand(tree: TensorCollection, other: Tensor, name: str) -> None:
    """Raise unless a tensor operand broadcasts to the batch size."""
    size = tree._batch_size
    try:
        fits = torch.broadcast_shapes(other.shape, size) == size
    except RuntimeError:
        fits = False
    if not fits:
        raise BatchSizeError(
            explain(
                f"{name}: a tensor operand is broadcast against the batch dimensions, not those of the leaves.",
                expected=f"a shape that broadcasts to {list(size)}",
                got=f"shape {list(other.shape)}",
                hint=f"for each leaf's own dimensions write td.apply(lambda x: torch.{name}(x, other)).",
            )
        )
