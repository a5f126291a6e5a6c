"""Adafactor."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc.optim.lists import Lists, choose
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def adafactor(
    lr: Hyper = 1e-2,
    beta2_decay: Hyper = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: Hyper = 1.0,
    weight_decay: Hyper = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return Adafactor: Adam without a first moment, and with the second kept as sums of rows and of columns.

    The last two dimensions of a member's leaf are factored; in the state, `row_var` and `col_var` hold the sums, and
    `variance` holds the moments of vectors and numbers; the others have an empty tensor for the leaf.

    Args:
        lr: The largest step, as a part of the size of the parameters.
        beta2_decay: Power of the step count by which the weight of a new gradient falls.
        eps: The smallest root of the second moment, by default the `eps` of the dtype; and the smallest size of
            parameters in the computation.
        d: The largest size of a step before it is scaled.
        weight_decay: `lr` times this is the part of the parameters that is taken away at each step.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.
        LeafMismatchError: In `init`, a leaf is complex.

    Source:
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"; `torch.optim.Adafactor`.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "beta2_decay": beta2_decay, "eps2": eps[1], "d": d}
    hyper |= {"weight_decay": weight_decay} | ({} if eps[0] is None else {"eps1": eps[0]})
    slots = ("row_var", "col_var", "variance")
    rule = Rule("adafactor", slots, partial(_step, maximize=maximize), shape=_shape, only_real=True)
    return make_optimizer(rule, hyper, beta2_decay=(-torch.inf, 2.0**-1074), d=(1.0, torch.inf))


def _shape(slot: str, shape: torch.Size, dims: int) -> torch.Size:
    inner = len(shape) - dims
    if (inner > 1) == (slot == "variance"):
        # Of the same number of dimensions: a tree counts its batch dimensions by its leaves.
        return torch.Size((*shape[:dims], *[0] * inner))
    ends = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:]), "variance": shape}
    return torch.Size(ends[slot])


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    slots = work.slots
    dims = work.dims
    # Of the parameters before their decay.
    sizes = ops.each(partial(_root_mean_square, dims=dims), work.params)
    params, grads = decay(ops, work, values, decoupled=True, maximize=maximize)
    rate = choose(values["lr"] < work.step**-0.5, values["lr"], work.step**-0.5)
    numbers = [work.step ** values["beta2_decay"], rate, values["eps2"], values["d"], values.get("eps1", 0.0)]
    lists = [slots["row_var"], slots["col_var"], slots["variance"], sizes]
    rows = ops.each(partial(_step_leaf, dims=dims), params, grads, *lists, *numbers)
    work.params, slots["row_var"], slots["col_var"], slots["variance"] = map(list, zip(*rows, strict=True))


# Any: floats, or tensors spread over the leaf.
def _step_leaf(
    param: Tensor, grad: Tensor, row: Tensor, col: Tensor, square: Tensor, size: Tensor, *numbers: Any, dims: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, rate, eps2, d, eps1 = numbers
    if isinstance(eps1, Tensor) or eps1 > 0:
        least = eps1
    else:
        least = torch.finfo(param.dtype).eps
    if grad.dim() - dims > 1:
        row = torch.lerp(row, torch.linalg.vector_norm(grad, dim=-1, keepdim=True).square() / grad.shape[-1], weight)
        col = torch.lerp(col, torch.linalg.vector_norm(grad, dim=-2, keepdim=True).square() / grad.shape[-2], weight)
        moment = (row @ col) / row.mean(dim=-2, keepdim=True).clamp(min=least)
    else:
        moment = square = torch.lerp(square, grad * grad, weight)
    step = moment.clamp(min=least * least).rsqrt() * grad
    rate = rate * size.clamp(min=eps2) / (_root_mean_square(step, dims=dims) / d).clamp(min=1.0)
    return param - step * rate, row, col, square


def _root_mean_square(leaf: Tensor, *, dims: int) -> Tensor:
    """Return the root mean square of each member, with as many dimensions as the leaf."""
    inner = list(range(dims, leaf.dim()))
    # A list of no dimensions would mean all of them.
    if inner:
        norm = torch.linalg.vector_norm(leaf, dim=inner, keepdim=True)
    else:
        norm = leaf.abs()
    return norm / leaf.shape[dims:].numel() ** 0.5
