"""Rprop."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work


def rprop(
    lr: Hyper = 1e-2,
    etas: tuple[Hyper, Hyper] = (0.5, 1.2),
    step_sizes: tuple[Hyper, Hyper] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return Rprop: steps by the sign of the gradient, each element's as long as its signs let it grow.

    Args:
        lr: The size of the first step, which fills the state; later it has no effect.
        etas: Factors of a step's size where the sign has changed, and where it has not.
        step_sizes: The least and the greatest size.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm";
        `torch.optim.Rprop`.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "eta_minus": etas[0], "eta_plus": etas[1]}
    hyper |= {"step_size_min": step_sizes[0], "step_size_max": step_sizes[1]}
    rule = Rule("rprop", ("prev", "step_size"), partial(_step, maximize=maximize), fill={"step_size": "lr"})
    return make_optimizer(rule, hyper, eta_minus=(0.0, 1.0), eta_plus=(1.0, torch.inf))


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    grads = ops.run("neg", work.grads, keep=True) if maximize else work.grads
    names = ("eta_minus", "eta_plus", "step_size_min", "step_size_max")
    slots = work.slots
    limits = [values[name] for name in names]
    rows = ops.each(_step_leaf, work.params, grads, slots["prev"], slots["step_size"], *limits)
    work.params, slots["prev"], slots["step_size"] = map(list, zip(*rows, strict=True))


# Any: a float, or a tensor that is spread over the leaf.
def _step_leaf(
    param: Tensor, grad: Tensor, prev: Tensor, size: Tensor, minus: Any, plus: Any, least: Any, most: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sign = grad * prev
    factor = torch.where(sign > 0, plus, torch.where(sign < 0, minus, torch.ones_like(sign)))
    size = (size * factor).clamp(min=least).clamp(max=most)
    # A step back over a minimum is not taken, and the next gradient counts as of no sign.
    grad = torch.where(sign < 0, 0.0, grad)
    return param - grad.sign() * size, grad, size
