"""The members of a vmap in a dimension that a kernel takes anyway: shared steps of the rules.

E is the number of members. In its `vmap`, a rule's Function gets tensors whose member dimension is anywhere or missing.
"""

from typing import Any

from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_batched(*args: Any) -> bool:
    """Return True if an argument is a tensor that differs by member, at any level of `vmap`."""
    return any([_is_batched(x) for x in args if isinstance(x, Tensor)])


def _is_batched(tensor: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def takes_gradient(tensor: Tensor) -> bool:
    """Return True if a tensor requires a gradient, at any level of `grad`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def to_front(tensor: Tensor, dim: int | None, members: int) -> Tensor:
    """Return a tensor as (E, ...), expanded if the members share it."""
    if dim is None:
        return tensor.unsqueeze(0).expand(members, *tensor.shape)
    return tensor.movedim(dim, 0)


def fold(tensor: Tensor, dim: int | None, members: int, into: int = 0) -> Tensor:
    """Return a tensor with the members in front of one of a member's dimensions: (..., E * B, ...)."""
    stacked = to_front(tensor, dim, members)
    return stacked.movedim(0, into).flatten(into, into + 1)


def unfold(tensor: Tensor, members: int, dim: int = 0) -> Tensor:
    """Return a folded result as (E, ...)."""
    return tensor.unflatten(dim, (members, tensor.shape[dim] // members)).movedim(dim, 0)
