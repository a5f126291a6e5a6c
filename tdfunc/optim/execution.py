"""How a step runs: by kernels that write or by functions for transforms, recorded by autograd or not."""

import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc._jit.recording.tracing import recorder
from tdfunc.core.context import has_values, in_functorch, is_compiling
from tdfunc.optim.lists import Leaves, Lists, spread


def takes_kernels(leaves: Leaves) -> bool:
    """Return whether kernels may write to copies of these: real tensors, or tensors of a trace, at each replay."""
    if is_compiling() or in_functorch():
        return False
    if recorder() is not None:
        return True
    return has_values() and all([type(x) in (Tensor, Parameter) and x.device.type != "meta" for x in leaves])


def free_lists(leaves: Leaves) -> Lists:
    """Return list arithmetic for these leaves, of which every operation must be called with `keep=True`."""
    return Lists(inplace=bool(leaves) and takes_kernels(leaves) and recorder() is None)


def carry_graph(params: Leaves, grads: Leaves) -> bool:
    """Return whether autograd has recorded how these came about: gradients with a derivative, and results of steps.

    A parameter that requires grad is an input of a loss, and not of its training.
    """
    if any([grad.requires_grad for grad in grads]):
        return True
    return any([param.requires_grad and not param.is_leaf for param in params])


def grads_of(params: Leaves, grads: Leaves | None = None) -> "torch.set_grad_enabled":
    """Return a context that records derivatives where a transform takes them, or where the leaves carry them."""
    followed = is_compiling() or in_functorch() or carry_graph(params, grads or [])
    return torch.set_grad_enabled(torch.is_grad_enabled() and followed)


def select_members(active: Tensor, new: Leaves, old: Leaves) -> Leaves:
    """Return the new leaves where a member is active, else the old ones."""
    masks = spread(active, new, dtype=torch.bool)
    return [torch.where(mask, x, y) for mask, x, y in zip(masks, new, old, strict=True)]
