"""Adamax."""

from functools import partial

from tdfunc.optim._lists import Lists
from tdfunc.optim._optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim._run import Rule, Values, Work, decay


def adamax(
    lr: Hyper = 2e-3,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return Adamax: Adam with the largest decayed gradient so far in place of the root of their squares.

    Args:
        lr: Step size.
        betas: Decay of the running average of the gradient and of the largest one.
        eps: Added to the size of each gradient.
        weight_decay: Factor of the parameters that are added to the gradient.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", section 7.1; `torch.optim.Adamax`.
    """
    beta1, beta2 = betas
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return make_optimizer(Rule("adamax", ("exp_avg", "exp_inf"), partial(_step, maximize=maximize)), hyper)


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor Adamax in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    beta1, slots = values["beta1"], work.slots
    slots["exp_avg"] = ops.run("lerp", slots["exp_avg"], grads, 1 - beta1)
    sizes = ops.run("add", ops.run("abs", grads, keep=True), values["eps"])
    slots["exp_inf"] = ops.run("maximum", ops.run("mul", slots["exp_inf"], values["beta2"]), sizes)
    work.params = ops.addcdiv(params, slots["exp_avg"], slots["exp_inf"], -values["lr"] / (1 - beta1**work.step))
