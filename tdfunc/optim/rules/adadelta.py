"""Adadelta."""

from functools import partial

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def adadelta(
    lr: Hyper = 1.0, rho: Hyper = 0.9, eps: float = 1e-6, weight_decay: Hyper = 0.0, *, maximize: bool = False
) -> Optimizer:
    """Return Adadelta, which scales steps by running averages of squared steps and squared gradients.

    Args:
        lr: Step size.
        rho: Decay of both averages.
        eps: Added under the roots.
        weight_decay: Factor of the parameters that are added to the gradient.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Zeiler, "ADADELTA: An Adaptive Learning Rate Method"; `torch.optim.Adadelta`.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
    rule = Rule("adadelta", ("square_avg", "acc_delta"), partial(_step, maximize=maximize))
    return make_optimizer(rule, hyper, rho=(0.0, 1.0))


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor Adadelta in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    rho = values["rho"]
    eps = values["eps"]
    slots = work.slots
    slots["square_avg"] = ops.addcmul(ops.run("mul", slots["square_avg"], rho), grads, grads, 1 - rho)
    root = ops.sqrt(ops.run("add", slots["square_avg"], eps, keep=True))
    steps = ops.run("div", ops.sqrt(ops.run("add", slots["acc_delta"], eps, keep=True)), root)
    steps = ops.run("mul", steps, grads)
    slots["acc_delta"] = ops.addcmul(ops.run("mul", slots["acc_delta"], rho), steps, steps, 1 - rho)
    work.params = ops.add(params, steps, -values["lr"])
