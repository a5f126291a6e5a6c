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


def order(grads: Leaves, like: Leaves) -> Leaves:
    """Return gradients in the order of their parameters' elements.

    The gradient of a stacked linear layer is turned. A replay computes it in this order (`_jit/replay/products.py`).
    """
    ordered: Leaves = []
    for grad, param in zip(grads, like, strict=True):
        is_turned = grad.layout is torch.strided and param.is_contiguous() and not grad.is_contiguous()
        ordered.append(grad.contiguous() if is_turned else grad)
    return ordered


def restore_members(leaves: Leaves, reads: Leaves) -> None:
    """Overwrite the rows of inactive members; reads a bool for each member, and then the leaves with the old rows."""
    active, *old = reads
    if active.all():
        return
    stopped = ~active
    for leaf, before in zip(leaves, old, strict=True):
        leaf[stopped] = before[stopped]


def select_members(active: Tensor, new: Leaves, old: Leaves) -> Leaves:
    """Return the new leaves where a member is active, else the old ones."""
    masks = spread(active, new, dtype=torch.bool)
    return [torch.where(mask, x, y) for mask, x, y in zip(masks, new, old, strict=True)]
