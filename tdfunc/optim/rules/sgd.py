"""Stochastic gradient descent."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.errors import error
from tdfunc.optim.lists import Coefficient, Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def sgd(
    lr: Hyper = 1e-3,
    momentum: Hyper = 0.0,
    dampening: float = 0.0,
    weight_decay: Hyper = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return stochastic gradient descent, with momentum if it is not 0.

    `lr`, `momentum` and `weight_decay` are numbers, tensors with a value for each member of a stack, or functions of
    the number of steps done so far (schedules); see `Optimizer`.

    Args:
        lr: Step size.
        momentum: Decay of the sum of past gradients.
        dampening: Part of each gradient but the first that is not added to the sum.
        weight_decay: Factor of the parameters that are added to the gradient.
        nesterov: Look ahead along the sum.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan, or `nesterov` lacks momentum or has dampening.

    Source:
        Sutskever et al., "On the importance of initialization and momentum in deep learning"; `torch.optim.SGD`.

    Examples:
        >>> params = TensorDict({"w": torch.ones(3)})
        >>> opt = tdf.optim.sgd(lr=0.5)
        >>> params, state = opt.update(params, params, opt.init(params))
        >>> params["w"]
        tensor([0.5000, 0.5000, 0.5000])
    """
    hyper: dict[str, Hyper] = {"lr": lr, "weight_decay": weight_decay}
    moving = not isinstance(momentum, float | int) or momentum != 0.0
    if moving:
        hyper |= {"momentum": momentum, "dampening": dampening}
    has_dampening = not isinstance(dampening, float | int) or dampening != 0.0
    if nesterov and (not moving or has_dampening):
        raise error(
            ValueError,
            "sgd: nesterov is set without momentum, or with dampening.",
            expected="momentum > 0, dampening = 0",
            got=f"momentum = {momentum}, dampening = {dampening}",
        )
    flags = {"nesterov": nesterov, "maximize": maximize}
    slots = ()
    if moving:
        slots = ("momentum_buffer",)
    rule = Rule("sgd", slots, partial(_step, **flags), partial(_fused, **flags) if moving else None)
    return make_optimizer(rule, hyper, dampening=(-torch.inf, torch.inf))


def _step(ops: Lists, work: Work, values: Values, *, nesterov: bool, maximize: bool) -> None:
    """The operations of torch's single-tensor SGD in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    if "momentum" in values:
        momentum = values["momentum"]
        dampening = values["dampening"]
        step = work.step
        weight: Coefficient = 1.0
        # The first gradient is not dampened.
        if isinstance(dampening, Tensor) or dampening != 0.0:
            if isinstance(step, Tensor):
                weight = torch.where(step == 1, torch.ones_like(step), 1 - dampening)
            elif step != 1:
                weight = 1 - dampening
        buffers = ops.add(ops.run("mul", work.slots["momentum_buffer"], momentum), grads, weight)
        work.slots["momentum_buffer"] = buffers
        grads = ops.add(grads, buffers, momentum, keep=True) if nesterov else buffers
    work.params = ops.add(params, grads, -values["lr"])


# Any: every value is a float here.
def _fused(work: Work, values: Any, *, nesterov: bool, maximize: bool) -> bool:
    # Without momentum the kernel takes no buffers, which a momentum that was or will be another needs.
    if values["momentum"] == 0.0:
        return False
    dampened = values["dampening"] != 0.0
    if dampened and isinstance(work.step, Tensor):
        return False
    # The buffers begin as zeros, so that the first step is special only if the others are dampened.
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        work.params, work.grads, work.slots["momentum_buffer"], **values,
        nesterov=nesterov, maximize=maximize, is_first_step=dampened and work.step == 1,
    )  # fmt: skip
    return True
