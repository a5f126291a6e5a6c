"""Averaged stochastic gradient descent."""

from functools import partial

import torch
from torch import Tensor

from tdfunc.optim.lists import Coefficient, Lists, rounded
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def asgd(
    lr: Hyper = 1e-2,
    lambd: Hyper = 1e-4,
    alpha: Hyper = 0.75,
    t0: Hyper = 1e6,
    weight_decay: Hyper = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return averaged stochastic gradient descent; `state["ax"]` is the average of the parameters.

    Args:
        lr: Step size at the first step. A schedule acts at its own step; in torch one step later.
        lambd: Decay of the parameters, and of the step size.
        alpha: Power by which the step size falls.
        t0: The step at which averaging begins.
        weight_decay: Factor of the parameters that are added to the gradient.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging"; `torch.optim.ASGD`.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
    return make_optimizer(Rule("asgd", ("ax",), partial(_step, maximize=maximize)), hyper)


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor ASGD in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    lambd = values["lambd"]
    done = work.step - 1
    rate = rounded(values["lr"] / ((1 + lambd * values["lr"] * done) ** values["alpha"]))
    work.params = params = ops.add(ops.run("mul", params, 1 - lambd * rate), grads, -rate)
    share = rounded(1 / _at_least_one(done - values["t0"]))
    if not isinstance(share, Tensor) and share == 1:
        work.slots["ax"] = ops.each(torch.clone, params)
    else:
        steps = ops.run("mul", ops.run("sub", params, work.slots["ax"], keep=True), share)
        work.slots["ax"] = ops.run("add", work.slots["ax"], steps)


def _at_least_one(count: Coefficient) -> Coefficient:
    if isinstance(count, Tensor):
        return count.clamp(min=1)
    return max(1, count)
