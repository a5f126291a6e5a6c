"""Adam, AdamW and Adamax."""

from functools import partial
from typing import Any

import torch

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def adam(
    lr: Hyper = 1e-3,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    eps_root: Hyper = 0.0,
) -> Optimizer:
    """Return the Adam optimizer; weight decay is added to the gradient.

    `lr`, the betas and `weight_decay` are numbers, tensors with a value for each member of a stack, or functions of the
    number of steps done so far (schedules); see `Optimizer`.

    Args:
        lr: Step size.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Factor of the parameters that are added to the gradient.
        amsgrad: Divide by the largest running average of the square so far.
        maximize: Go up the gradient.
        eps_root: Added to the average square under the root. Derivatives of a step, as in meta-learning, grow as the
            root gets small; where it is 0 its derivative counts as 0.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization"; `torch.optim.Adam`, whose kernels it calls.

    Examples:
        >>> params = TensorDict({"w": torch.ones(4, 3)}, [4])
        >>> opt = tdf.optim.adam(lr=torch.tensor([0.1, 0.2, 0.3, 0.4]))
        >>> state = opt.init(params)
        >>> params, state = opt.update(params, params, state)
        >>> params["w"][:, 0]
        tensor([0.9000, 0.8000, 0.7000, 0.6000])
    """
    return _make("adam", lr, betas, eps, weight_decay, eps_root, amsgrad=amsgrad, maximize=maximize)


def adamw(
    lr: Hyper = 1e-3,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Hyper = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    eps_root: Hyper = 0.0,
) -> Optimizer:
    """Return the AdamW optimizer; weight decay shrinks the parameters, apart from the gradient.

    Args:
        lr: Step size.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the root of the average square.
        weight_decay: Times `lr`, the part of the parameters that is taken away at each step.
        amsgrad: Divide by the largest average square so far.
        maximize: Go up the gradient.
        eps_root: Added under the root.

    Raises:
        ValueError: A value is out of its range.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; `torch.optim.AdamW`, whose kernels it calls.
    """
    return _make("adamw", lr, betas, eps, weight_decay, eps_root, amsgrad=amsgrad, maximize=maximize)


def _make(
    name: str, lr: Hyper, betas: tuple[Hyper, Hyper], eps: float, weight_decay: Hyper, eps_root: Hyper, **flags: bool
) -> Optimizer:
    beta1, beta2 = betas
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    # The values of a tensor are not looked at: they may be traced, or change later.
    has_root = not isinstance(eps_root, float | int) or eps_root != 0.0
    if has_root:
        hyper["eps_root"] = eps_root
    decoupled = name == "adamw"
    slots = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if flags["amsgrad"] else ()))
    step = partial(_step, decoupled=decoupled, **flags)
    # The kernel has no eps_root.
    fused = None
    if not has_root:
        fused = partial(_fused, decoupled=decoupled, **flags)
    return make_optimizer(Rule(name, slots, step, fused, decoupled=decoupled), hyper)


def _step(ops: Lists, work: Work, values: Values, *, decoupled: bool, amsgrad: bool, maximize: bool) -> None:
    """The operations of torch's single-tensor Adam in their order, so that numbers agree to the last bit."""
    lr = values["lr"]
    beta1 = values["beta1"]
    beta2 = values["beta2"]
    slots = work.slots
    params, grads = decay(ops, work, values, decoupled=decoupled, maximize=maximize)
    slots["exp_avg"] = ops.run("lerp", slots["exp_avg"], grads, 1 - beta1)
    average = ops.run("mul", slots["exp_avg_sq"], beta2)
    slots["exp_avg_sq"] = average = ops.addcmul(average, grads, grads, 1 - beta2)
    if amsgrad:
        slots["max_exp_avg_sq"] = average = ops.run("maximum", slots["max_exp_avg_sq"], average)
    bias1 = 1 - beta1**work.step
    bias2 = 1 - beta2**work.step
    if "eps_root" in values:
        root = ops.sqrt(ops.run("add", ops.run("div", average, bias2, keep=True), values["eps_root"]))
    else:
        root = ops.run("div", ops.sqrt(average), bias2**0.5)
    work.params = ops.addcdiv(params, slots["exp_avg"], ops.run("add", root, values["eps"]), -lr / bias1)


# Any: every value is a float here.
def _fused(work: Work, values: Any, *, decoupled: bool, amsgrad: bool, maximize: bool) -> bool:
    # The operator under torch.optim.adam.adam(fused=True), which would add 1 to a step tensor for each leaf.
    kernel = getattr(torch, "_fused_adamw_" if decoupled else "_fused_adam_")
    largest = []
    if amsgrad:
        largest = work.slots["max_exp_avg_sq"]
    steps = [torch.as_tensor(work.step, dtype=torch.float32, device=work.params[0].device)] * len(work.params)
    kernel(
        work.params, work.grads, work.slots["exp_avg"], work.slots["exp_avg_sq"], largest, steps,
        **values, amsgrad=amsgrad, maximize=maximize,
    )  # fmt: skip
    return True


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
    return make_optimizer(Rule("adamax", ("exp_avg", "exp_inf"), partial(_adamax_step, maximize=maximize)), hyper)


def _adamax_step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    """The operations of torch's single-tensor Adamax in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, maximize=maximize)
    beta1 = values["beta1"]
    slots = work.slots
    slots["exp_avg"] = ops.run("lerp", slots["exp_avg"], grads, 1 - beta1)
    sizes = ops.run("add", ops.run("abs", grads, keep=True), values["eps"])
    slots["exp_inf"] = ops.run("maximum", ops.run("mul", slots["exp_inf"], values["beta2"]), sizes)
    work.params = ops.addcdiv(params, slots["exp_avg"], slots["exp_inf"], -values["lr"] / (1 - beta1**work.step))
