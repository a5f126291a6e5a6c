"""Muon."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, as_count, check_choice
from tdfunc.optim.checks import path_of
from tdfunc.optim.lists import Leaves, Lists
from tdfunc.optim.optimizer import Hyper, Optimizer, make_optimizer
from tdfunc.optim.rule import Rule, Values, Work, decay


def muon(
    lr: Hyper = 1e-3,
    weight_decay: Hyper = 0.1,
    momentum: Hyper = 0.95,
    nesterov: bool = True,
    *,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
) -> Optimizer:
    """Return Muon: steps whose singular values are all about 1, for the matrices and 2-d convolutions of hidden layers.

    The weight of a convolution, of shape (out, in, height, width), is a matrix of `out` rows. The members of a stack
    are orthogonalized in one batch. `multi` gives the other leaves to another rule.

    Args:
        lr: Step size.
        weight_decay: `lr` times this is the part of the parameters that is taken away at each step.
        momentum: Decay of the running average of the gradient.
        nesterov: Look ahead along the average.
        ns_coefficients: The coefficients of the polynomial that brings singular values near 1.
        ns_steps: The number of times that the polynomial is applied.
        eps: The smallest norm of a gradient that is a divisor.
        adjust_lr_fn: The growth of `lr` with the size of a matrix: `original`, by the root of rows per column if there
            are more rows; or `match_rms_adamw`, so that steps have the size of the steps of `adamw`.

    Raises:
        ValueError: A hyperparameter is out of range or nan, or `adjust_lr_fn` is not one of the two.
        LeafMismatchError: In `init`, a member's leaf has not two or four dimensions, or is complex; the message
            names it.

    Source:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks"; Liu et al., "Muon is Scalable for LLM
        Training" for `match_rms_adamw`; `torch.optim.Muon`, which refuses convolutions.
        `adjust_lr_fn` reads rows and columns of the matrix; some versions of the authors' code read height and width.

    Examples:
        >>> params = TensorDict({"weight": torch.ones(4, 3, 2), "bias": torch.ones(4, 3)}, [4])
        >>> is_matrix = tdf.Filter(lambda path, leaf: leaf.dim() == 3)
        >>> opt = tdf.optim.multi({is_matrix: tdf.optim.muon(0.02), "*": tdf.optim.adamw()})
        >>> opt.init(params)["0", "momentum_buffer"].paths()
        [('weight',)]
    """
    ns_steps = as_count("muon: ns_steps", ns_steps, 0)
    check_choice("muon: adjust_lr_fn", adjust_lr_fn, ("original", "match_rms_adamw"))
    hyper: dict[str, Hyper] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
    options = {"nesterov": nesterov, "coefficients": ns_coefficients, "steps": ns_steps, "adjust": adjust_lr_fn}
    step = partial(_step, **options)
    rule = Rule("muon", ("momentum_buffer",), step, shape=_shape, check=_check_matrices, only_real=True)
    return make_optimizer(rule, hyper, momentum=(0.0, 1.0))


def _shape(slot: str, shape: torch.Size, dims: int) -> torch.Size:
    return shape


def _check_matrices(params: TensorCollection, leaves: Leaves) -> None:
    for i, leaf in enumerate(leaves):
        if leaf.dim() - len(params._batch_size) not in (2, 4):
            raise LeafMismatchError(
                f"muon: the leaf {path_of(params, i)!r} of params is not a matrix or a 2-d convolution.",
                expected=f"shape {[*params._batch_size, 'rows', 'columns']}, or four dimensions after the batch",
                got=f"shape {list(leaf.shape)}",
                hint='multi({"layers.*.weight": muon(), "*": adamw()}) gives the other leaves to adamw.',
            )


def _step(
    ops: Lists,
    work: Work,
    values: Values,
    *,
    nesterov: bool,
    coefficients: tuple[float, float, float],
    steps: int,
    adjust: str,
) -> None:
    momentum = values["momentum"]
    grads = work.grads
    work.slots["momentum_buffer"] = average = ops.run("lerp", work.slots["momentum_buffer"], grads, 1 - momentum)
    updates = ops.run("lerp", grads, average, momentum, keep=True) if nesterov else average
    updates = ops.each(_as_matrix, updates, work.dims)
    shapes = [update.shape[-2:] for update in updates]
    updates = ops.each(partial(_orthogonalize, coefficients, steps), updates, values["eps"])
    params, _ = decay(ops, work, values, decoupled=True)
    new: Leaves = []
    for param, update, shape in zip(params, updates, shapes, strict=True):
        # The rate depends on the shape.
        rate = -values["lr"] * _scale(adjust, *shape)
        new += ops.add([param], [update.reshape(param.shape)], rate)
    work.params = new


def _as_matrix(leaf: Tensor, dims: int) -> Tensor:
    """Return a leaf whose members are matrices; the rows of a convolution are its outputs."""
    if leaf.dim() - dims == 2:
        return leaf
    return leaf.flatten(dims + 1)


def _scale(adjust: str, rows: int, columns: int) -> float:
    if adjust == "original":
        return max(1, rows / max(columns, 1)) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


def _orthogonalize(coefficients: tuple[float, float, float], steps: int, grad: Tensor, eps: float | Tensor) -> Tensor:
    """Bring the singular values of the last two dimensions near 1, in bfloat16 as torch does."""
    a, b, c = coefficients
    rows, columns = grad.shape[-2:]
    tall = rows > columns
    if tall:
        x = grad.mT.bfloat16()
    else:
        x = grad.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    shape = x.shape
    add_product = torch.addmm
    if x.dim() > 2:
        x = x.flatten(0, -3)
        add_product = torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    x = x.reshape(shape)
    return (x.mT if tall else x).to(grad.dtype)
