"""Adam for sparse gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc.optim.lists import Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work


def sparse_adam(
    lr: Hyper = 1e-3, betas: tuple[Hyper, Hyper] = (0.9, 0.999), eps: float = 1e-8, *, maximize: bool = False
) -> Optimizer:
    """Return Adam for sparse gradients, which leaves all entries without a gradient as they are, moments included.

    `nn.Embedding(sparse=True)` has such gradients after `backward()`; transforms of torch.func, `tdfunc.jit` and
    `torch.compile` take none.

    Args:
        lr: Step size.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        maximize: Go up the gradient.

    Raises:
        ValueError: A hyperparameter is out of range or nan.
        LeafMismatchError: In `init`, a leaf is complex.

    Source:
        `torch.optim.SparseAdam`.

    Examples:
        >>> params = TensorDict({"emb": torch.ones(3, 2)})
        >>> grad = torch.sparse_coo_tensor([[1]], [[1.0, -1.0]], (3, 2), check_invariants=True)
        >>> opt = tdf.optim.sparse_adam(lr=0.5)
        >>> opt.update(params, TensorDict({"emb": grad}), opt.init(params))[0]["emb"]
        tensor([[1.0000, 1.0000],
                [0.5000, 1.5000],
                [1.0000, 1.0000]])
    """
    hyper: dict[str, Hyper] = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps}
    step = partial(_step, maximize=maximize)
    slots = ("exp_avg", "exp_avg_sq")
    return make_optimizer(Rule("sparse_adam", slots, step, layout=torch.sparse_coo, only_real=True), hyper)


def _step(ops: Lists, work: Work, values: Values, *, maximize: bool) -> None:
    slots = work.slots
    beta1 = values["beta1"]
    beta2 = values["beta2"]
    rate = values["lr"] * (1 - beta2**work.step) ** 0.5 / (1 - beta1**work.step)
    numbers = [-rate, 1 - beta1, 1 - beta2, values["eps"]]
    step = partial(_step_leaf, maximize=maximize)
    rows = ops.each(step, work.params, work.grads, slots["exp_avg"], slots["exp_avg_sq"], *numbers)
    work.params, slots["exp_avg"], slots["exp_avg_sq"] = map(list, zip(*rows, strict=True))


# Any: floats, or tensors spread over the leaf.
def _step_leaf(
    param: Tensor, grad: Tensor, average: Tensor, square: Tensor, *numbers: Any, maximize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Steps are not linear, so that an index must occur once.
    grad = grad.coalesce()
    rows = tuple(grad.indices())
    if maximize:
        values = -grad.values()
    else:
        values = grad.values()
    rate, new, new_square, eps = [x.expand(param.shape)[rows] if isinstance(x, Tensor) else x for x in numbers]
    first = average[rows]
    second = square[rows]
    first = (values - first) * new + first
    second = (values.pow(2) - second) * new_square + second
    step = rate * (first / (second.sqrt() + eps))
    return (
        param.index_put(rows, param[rows] + step),
        average.index_put(rows, first),
        square.index_put(rows, second),
    )
