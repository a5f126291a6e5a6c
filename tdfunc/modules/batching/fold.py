"""The members of a vmap in a dimension that a kernel takes anyway: shared steps of the rules.

E is the number of members. In its `vmap`, a rule's Function gets tensors whose member dimension is anywhere or missing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tdfunc.modules.batching.rule import Rule


def is_batched(*args: Any) -> bool:
    """Return True if an argument is a tensor that differs by member, at any level of `vmap`."""
    return any([_is_batched(x) for x in tree_leaves(args) if isinstance(x, Tensor)])


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


def where_batched(formula: Callable[..., Any]) -> Rule:
    """Return the rule that computes by a formula (of the arguments of torch's function) where members differ.

    A formula that returns NotImplemented leaves the call to torch.
    """

    @functools.wraps(formula)
    def run(mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_batched(args, kwargs):
            return func(*args, **kwargs)
        result = formula(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return result

    return run


def by_decomposition(operator: Any) -> Rule:
    """Return the rule that runs the parts of an operator that torch composes of others, but batches as a whole."""

    def run(mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_batched(args, kwargs):
            return func(*args, **kwargs)
        # A mode below would be given the operator, and call it as a whole.
        with torch._C.DisableTorchFunction():
            return operator.decompose(*args, **kwargs)

    return run


def reduce(losses: Tensor, reduction: int) -> Tensor:
    """Reduce losses by torch's number of a reduction."""
    if reduction == _reduction.get_enum("mean"):
        return losses.mean()
    if reduction == _reduction.get_enum("sum"):
        return losses.sum()
    return losses
