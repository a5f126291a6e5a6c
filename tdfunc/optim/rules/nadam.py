"""NAdam."""

from functools import partial

from tdfunc.optim.lists import Lists, rounded
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def nadam(
    lr: Hyper = 2e-3,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Hyper = 0.0,
    momentum_decay: Hyper = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Return NAdam: Adam that looks ahead along the running average of the gradient.

    Args:
        lr: Step size.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Factor of the parameters that are added to the gradient.
        momentum_decay: Rate at which the first beta grows to its full size.
        decoupled_weight_decay: Shrink the parameters instead, as `adamw` does.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Dozat, "Incorporating Nesterov Momentum into Adam"; `torch.optim.NAdam`.
    """
    beta1, beta2 = betas
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    hyper["momentum_decay"] = momentum_decay
    step = partial(_step, decoupled=decoupled_weight_decay, maximize=maximize)
    return make_optimizer(Rule("nadam", ("exp_avg", "exp_avg_sq"), step, scalars=("mu_product",)), hyper)


def _step(ops: Lists, work: Work, values: Values, *, decoupled: bool, maximize: bool) -> None:
    """The operations of torch's single-tensor NAdam in their order, so that numbers agree to the last bit."""
    params, grads = decay(ops, work, values, decoupled=decoupled, maximize=maximize)
    lr = values["lr"]
    beta1 = values["beta1"]
    beta2 = values["beta2"]
    slots = work.slots
    step = work.step
    mu, ahead = [beta1 * (1.0 - 0.5 * (0.96 ** (at * values["momentum_decay"]))) for at in (step, step + 1)]
    product = work.scalars["mu_product"] = rounded(work.scalars["mu_product"] * rounded(mu))
    slots["exp_avg"] = ops.run("lerp", slots["exp_avg"], grads, 1 - beta1)
    slots["exp_avg_sq"] = ops.addcmul(ops.run("mul", slots["exp_avg_sq"], beta2), grads, grads, 1 - beta2)
    root = ops.sqrt(ops.run("div", slots["exp_avg_sq"], 1 - beta2**step, keep=True))
    root = ops.run("add", root, values["eps"])
    params = ops.addcdiv(params, grads, root, -lr * (1.0 - mu) / (1.0 - product))
    work.params = ops.addcdiv(params, slots["exp_avg"], root, (-lr * ahead) / (1.0 - product * ahead))
