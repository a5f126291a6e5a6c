"""Adagrad."""

from functools import partial
from typing import Any

import torch

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def adagrad(
    lr: Hyper = 1e-2,
    lr_decay: Hyper = 0.0,
    weight_decay: Hyper = 0.0,
    initial_accumulator_value: Hyper = 0.0,
    eps: float = 1e-10,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return Adagrad, which divides by the root of the sum of all squared gradients.

    Args:
        lr: Step size.
        lr_decay: Number that is added to the divisor of `lr` at each step.
        weight_decay: Factor of the parameters that are added to the gradient.
        initial_accumulator_value: The sum before the first step.
        eps: Added to the root.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization";
        `torch.optim.Adagrad`, whose kernels it calls.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
    hyper["initial_accumulator_value"] = initial_accumulator_value
    step = partial(_step, maximize=maximize)
    fused = partial(_fused, maximize=maximize)
    fill = {"sum": "initial_accumulator_value"}
    return make_optimizer(Rule("adagrad", ("sum",), step, fused, fill=fill), hyper)


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor Adagrad in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    rate = values["lr"] / (1 + (work.step - 1) * values["lr_decay"])
    work.slots["sum"] = ops.addcmul(work.slots["sum"], grads, grads, 1.0)
    work.params = ops.addcdiv(params, grads, ops.run("add", ops.sqrt(work.slots["sum"]), values["eps"]), -rate)


# Any: every value is a float here.
def _fused(work: Work, values: Any, *, maximize: bool) -> bool:
    # torch has this kernel for the CPU alone.
    if work.params[0].device.type != "cpu":
        return False
    steps = [torch.as_tensor(work.step, dtype=torch.float32)] * len(work.params)
    options = {name: value for name, value in values.items() if name != "initial_accumulator_value"}
    lists = work.params, work.grads, work.slots["sum"], steps
    torch._fused_adagrad_(*lists, **options, maximize=maximize)  # pyright: ignore[reportPrivateImportUsage]
    return True
