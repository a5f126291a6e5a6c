"""Lion."""

from functools import partial

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def lion(
    lr: Hyper = 1e-4, betas: tuple[Hyper, Hyper] = (0.9, 0.99), weight_decay: Hyper = 1e-3, *, maximize: bool = False
) -> Optimizer:
    """Return Lion: steps by the sign of a running average of the gradient.

    Steps are larger than the steps of `adamw`. Usual are a third to a tenth of its learning rate, and a weight decay
    that is larger by the same factor.

    Args:
        lr: Step size.
        betas: Weight of the running average in the step, and its decay.
        weight_decay: `lr` times this is the part of the parameters that is taken away at each step.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.

    Source:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", program 1; `optax.lion`.

    Examples:
        >>> params = TensorDict({"w": torch.tensor([1.0, 1.0])})
        >>> opt = tdf.optim.lion(lr=0.1, weight_decay=0.0)
        >>> grads = TensorDict({"w": torch.tensor([5.0, -0.01])})
        >>> opt.update(params, grads, opt.init(params))[0]["w"]
        tensor([0.9000, 1.1000])
    """
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
    return make_optimizer(Rule("lion", ("exp_avg",), partial(_step, maximize=maximize)), hyper)


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    params, grads = decay(ops, work, values, decoupled=True, maximize=maximize)
    average = work.slots["exp_avg"]
    signs = ops.run("sign", ops.run("lerp", average, grads, 1 - values["beta1"], keep=True))
    work.params = ops.add(params, signs, -values["lr"])
    work.slots["exp_avg"] = ops.run("lerp", average, grads, 1 - values["beta2"])
