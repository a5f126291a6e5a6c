"""RAdam."""

from functools import partial

import torch
from torch import Tensor

from tdfunc.optim.lists import Lists, choose
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def radam(
    lr: Hyper = 1e-3,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return RAdam: Adam that divides by the root of squares as far as these are known, and not in the first steps.

    Args:
        lr: Step size.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Factor of the parameters that are added to the gradient.
        decoupled_weight_decay: Shrink the parameters instead, as `adamw` does.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond"; `torch.optim.RAdam`.
    """
    beta1, beta2 = betas
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    step = partial(_step, decoupled=decoupled_weight_decay, maximize=maximize)
    return make_optimizer(Rule("radam", ("exp_avg", "exp_avg_sq"), step), hyper)


def _step(ops: Lists, work: Work, values: Values, *, decoupled: bool, maximize: bool) -> None:
    """The operations of torch's single-tensor RAdam in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, decoupled=decoupled, maximize=maximize)
    beta1 = values["beta1"]
    beta2 = values["beta2"]
    slots = work.slots
    step = work.step
    slots["exp_avg"] = ops.run("lerp", slots["exp_avg"], grads, 1 - beta1)
    slots["exp_avg_sq"] = ops.addcmul(ops.run("mul", slots["exp_avg_sq"], beta2), grads, grads, 1 - beta2)
    bias2 = 1 - beta2**step
    steps = ops.run("mul", ops.run("div", slots["exp_avg"], 1 - beta1**step, keep=True), values["lr"])
    # Rho is the length of the simple average that holds as much as the running one.
    longest = 2 / (1 - beta2) - 1
    rho = longest - 2 * step * (beta2**step) / bias2
    known = rho > 5.0
    if isinstance(known, Tensor) or known:
        square = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
        # Where it is not used, its root must be finite, also for the derivative.
        rect = choose(known, square, rho * 0.0 + 1.0) ** 0.5
        scale = ops.run("reciprocal", ops.run("add", ops.sqrt(slots["exp_avg_sq"]), values["eps"]))
        scaled = ops.run("mul", ops.run("mul", steps, ops.run("mul", scale, bias2**0.5), keep=True), rect)
        if isinstance(known, Tensor):
            steps = ops.each(_where, scaled, steps, known.double())
        else:
            steps = scaled
    work.params = ops.add(params, steps, -1.0)


def _where(value: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, value, other)
