"""RMSprop."""

from functools import partial

from tdfunc.optim._lists import Lists
from tdfunc.optim._optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim._run import Rule, Values, Work, decay


def rmsprop(
    lr: Hyper = 1e-2,
    alpha: Hyper = 0.99,
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    momentum: Hyper = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return RMSprop, which divides by the root of a running average of squared gradients.

    Args:
        lr: Step size.
        alpha: Decay of the running average.
        eps: Added to the root.
        weight_decay: Factor of the parameters that are added to the gradient.
        momentum: Decay of the sum of past steps.
        centered: Divide by the standard deviation of the gradients, not the root of their squares.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Hinton, "Neural Networks for Machine Learning", lecture 6; Graves, "Generating Sequences With Recurrent Neural
        Networks" for the centered one; `torch.optim.RMSprop`.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
    moving = not isinstance(momentum, float | int) or momentum != 0.0
    slots = ("square_avg", *(("grad_avg",) if centered else ()), *(("momentum_buffer",) if moving else ()))
    rule = Rule("rmsprop", slots, partial(_step, maximize=maximize))
    return make_optimizer(rule, hyper | ({"momentum": momentum} if moving else {}))


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor RMSprop in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    lr, alpha, slots = values["lr"], values["alpha"], work.slots
    average = ops.addcmul(ops.run("mul", slots["square_avg"], alpha), grads, grads, 1 - alpha)
    slots["square_avg"] = average
    if "grad_avg" in slots:
        slots["grad_avg"] = mean = ops.run("lerp", slots["grad_avg"], grads, 1 - alpha)
        average = ops.run("addcmul", average, mean, mean, keep=True, value=-1)
    root = ops.run("add", ops.sqrt(average), values["eps"])
    if "momentum" in values:
        moved = ops.run("mul", slots["momentum_buffer"], values["momentum"])
        slots["momentum_buffer"] = moved = ops.addcdiv(moved, grads, root, 1.0)
        work.params = ops.add(params, moved, -lr)
    else:
        work.params = ops.addcdiv(params, grads, root, -lr)
