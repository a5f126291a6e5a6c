"""RMSprop."""

from functools import partial
from typing import Any

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.optim.lists import Coefficient, Leaves, Lists, widen
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


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
        centered: Divide by the standard deviation of the gradients, not the root of their squares. The state has
            their `variance` in place of `square_avg`.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Hinton, "Neural Networks for Machine Learning", lecture 6; Graves, "Generating Sequences With Recurrent Neural
        Networks" for the centered one; `torch.optim.RMSprop`, which computes the variance as a difference of averages,
        which rounding makes negative.
    """
    hyper: dict[str, Hyper] = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
    moving = not isinstance(momentum, float | int) or momentum != 0.0
    if centered:
        squares = ("variance", "grad_avg")
    else:
        squares = ("square_avg",)
    slots = (*squares, *(("momentum_buffer",) if moving else ()))
    rule = Rule("rmsprop", slots, partial(_step, maximize=maximize), upgrade=_upgrade if centered else None)
    return make_optimizer(rule, hyper | ({"momentum": momentum} if moving else {}))


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor RMSprop in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    lr = values["lr"]
    alpha = values["alpha"]
    slots = work.slots
    if "variance" in slots:
        average = _add_to_variance(ops, slots["variance"], slots["grad_avg"], grads, alpha)
        slots["variance"] = average
        slots["grad_avg"] = ops.run("lerp", slots["grad_avg"], grads, 1 - alpha)
    else:
        average = ops.addcmul(ops.run("mul", slots["square_avg"], alpha), grads, grads, 1 - alpha)
        slots["square_avg"] = average
    root = ops.run("add", ops.sqrt(average), values["eps"])
    if "momentum" in values:
        moved = ops.run("mul", slots["momentum_buffer"], values["momentum"])
        slots["momentum_buffer"] = moved = ops.addcdiv(moved, grads, root, 1.0)
        work.params = ops.add(params, moved, -lr)
    else:
        work.params = ops.addcdiv(params, grads, root, -lr)


def _add_to_variance(ops: Lists, variance: Leaves, mean: Leaves, grads: Leaves, alpha: Coefficient) -> Leaves:
    """Return the mean of squares minus the squared mean after one more gradient, as a sum of squares.

    With m the mean before, a mean(g^2) + (1 - a) g^2 - (a m + (1 - a) g)^2 = a (mean(g^2) - m^2) + a (1 - a) (g - m)^2.
    """
    gaps = ops.run("sub", grads, mean, keep=True)
    return ops.addcmul(ops.run("mul", variance, alpha), gaps, gaps, alpha * (1 - alpha))


# Any: a state is checked afterwards.
def _upgrade(state: Any) -> Any:
    """Return the state of an older version, which kept the mean of squares, with the variance in its place."""
    if not isinstance(state, TensorCollection) or not {"square_avg", "grad_avg"} <= state._data.keys():
        return state
    squares = state._data["square_avg"]
    means = state._data["grad_avg"]
    rows = zip(widen(list_leaves(squares)), widen(list_leaves(means)), strict=True)
    variance = rebuild(squares, [_variance(square, mean) for square, mean in rows])
    data = {"variance": variance} | {key: node for key, node in state._data.items() if key != "square_avg"}
    return state._make(data, state._batch_size, state._device, state._names, state._static)


def _variance(square: Tensor, mean: Tensor) -> Tensor:
    return (square - mean.square()).clamp(min=0)
