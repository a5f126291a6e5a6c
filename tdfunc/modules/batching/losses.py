"""Losses that torch computes in one kernel, by their formulas; CTC by one call of the kernel for all members.

T is the number of steps, N the number of sequences, C the number of classes.
"""

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from tdfunc.core.context import is_recording, require_values
from tdfunc.core.errors import UnsupportedError
from tdfunc.modules.batching.fold import by_decomposition, fold, reduce, to_front, unfold, where_batched
from tdfunc.modules.batching.rule import Rule, by_body
from tdfunc.modules.operators import define

Lengths: TypeAlias = Tensor | tuple[int, ...]
_ATEN: Any = torch.ops.aten
_NN: Any = vars(torch._C)["_nn"]


# -- connectionist temporal classification ----------------------------------------------------------------------------


def _losses(*args: Any) -> Tensor:
    return _ATEN._ctc_loss.Tensor(*args)[0]


def _gradient(grad: Tensor, *args: Any) -> Tensor:
    losses, notes = _ATEN._ctc_loss.Tensor(*args)
    *kernel_args, blank, zero_infinity = args
    return _ATEN._ctc_loss_backward.Tensor(grad, *kernel_args, losses, notes, blank, zero_infinity)


def _like_losses(log_probs: Tensor, *args: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _like_gradient(grad: Tensor, log_probs: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(log_probs)


# A trace has no values, by which torch's kernels size the notes: it records these operations, which make no notes.
_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero"
_own_losses = define(f"ctc_loss({_ARGUMENTS}) -> Tensor", _losses, _like_losses)
_own_gradient = define(f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor", _gradient, _like_gradient)


def _recorded(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments of the recorded operations, which take lengths as tensors."""
    *lengths, blank, zero_infinity = rest
    return log_probs, targets, *map(torch.as_tensor, lengths), blank, zero_infinity


class _CTC(torch.autograd.Function):
    """torch's kernel: `(log_probs (T, N, C), targets, input and target lengths, blank, zero_infinity)`.

    Returns the loss of each sequence, and the kernel's notes for its gradient.
    """

    @staticmethod
    def forward(log_probs: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        if is_recording():
            return _own_losses(*_recorded(log_probs, *args)), log_probs.new_empty(0)
        return _ATEN._ctc_loss(log_probs, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        log_probs, targets, in_lengths, target_lengths, blank, zero_infinity = inputs
        ctx.options = (blank, zero_infinity)
        ctx.fixed = [None if isinstance(x, Tensor) else x for x in (in_lengths, target_lengths)]
        ctx.mark_non_differentiable(output[1])
        lengths = [x if isinstance(x, Tensor) else None for x in (in_lengths, target_lengths)]
        ctx.save_for_backward(log_probs, targets, *lengths, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        log_probs, targets, *lengths, losses, notes = ctx.saved_tensors
        lengths = [saved if fixed is None else fixed for saved, fixed in zip(lengths, ctx.fixed, strict=True)]
        grad = _CTCBackward.apply(grads[0], log_probs, targets, *lengths, losses, notes, *ctx.options)
        return grad, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        members = info.batch_size
        log_probs, targets, in_lengths, target_lengths, *options = args
        log_probs = fold(log_probs, in_dims[0], members, into=1)
        targets = _fold_targets(targets, in_dims[1], members)
        lengths = [
            _fold_lengths(x, dim, members) for x, dim in ((in_lengths, in_dims[2]), (target_lengths, in_dims[3]))
        ]
        losses, notes = _CTC.apply(log_probs, targets, *lengths, *options)
        return (unfold(losses, members), unfold(notes, members)), (0, 0)


class _CTCBackward(torch.autograd.Function):
    """The kernel of the gradient, which has none itself."""

    @staticmethod
    def forward(grad: Tensor, *args: Any) -> Tensor:
        if is_recording():
            *given, _, _, blank, zero_infinity = args
            return _own_gradient(grad, *_recorded(*given, blank, zero_infinity))
        return _ATEN._ctc_loss_backward(grad, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "F.ctc_loss: the gradient is differentiated again.",
            expected="first derivatives",
            got="derivative for aten::_ctc_loss_backward is not implemented (by torch)",
            hint="detach the gradient first.",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        members = info.batch_size
        grad, log_probs, targets, in_lengths, target_lengths, losses, notes, *options = args
        grad, losses, notes = [
            fold(x, dim, members) for x, dim in ((grad, in_dims[0]), (losses, in_dims[5]), (notes, in_dims[6]))
        ]
        log_probs = fold(log_probs, in_dims[1], members, into=1)
        targets = _fold_targets(targets, in_dims[2], members)
        lengths = [
            _fold_lengths(x, dim, members) for x, dim in ((in_lengths, in_dims[3]), (target_lengths, in_dims[4]))
        ]
        folded = _CTCBackward.apply(grad, log_probs, targets, *lengths, losses, notes, *options)
        return unfold(folded, members, 1), 0


def _fold_targets(targets: Tensor, dim: int | None, members: int) -> Tensor:
    """Fold targets that are a matrix (N, S), or all of them in one list."""
    return to_front(targets, dim, members).flatten(0, 1)


def _fold_lengths(lengths: Lengths, dim: Any, members: int) -> Lengths:
    if isinstance(lengths, tuple):
        return lengths * members
    return to_front(lengths, dim, members).flatten()


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int | str = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    if log_probs.device.type != "cpu" or log_probs.dim() not in (2, 3):
        return NotImplemented
    number = _reduction.get_enum(reduction) if isinstance(reduction, str) else reduction
    one = log_probs.dim() == 2
    if one:
        log_probs = log_probs.unsqueeze(1)
    lengths = [_as_lengths(x) for x in (input_lengths, target_lengths)]
    if isinstance(lengths[0], Tensor) != isinstance(lengths[1], Tensor):
        lengths = [torch.as_tensor(x) for x in lengths]
    losses = _CTC.apply(log_probs, targets.long(), *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if number == _reduction.get_enum("mean"):
        sizes = torch.as_tensor(lengths[1], device=losses.device).to(losses.dtype)
        return (losses / sizes.clamp(min=1.0)).mean()
    if one and number == _reduction.get_enum("none"):
        return losses.squeeze(0)
    return reduce(losses, number)


def _as_lengths(lengths: Any) -> Lengths:
    if isinstance(lengths, Tensor):
        return lengths.reshape(-1).long()
    return tuple(lengths)


# -- margins ----------------------------------------------------------------------------------------------------------


def _multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Any:
    rows = input
    numbers = target
    if input.dim() == 1:
        rows = input.unsqueeze(0)
        numbers = target.reshape(1)
    if p not in (1, 2) or rows.dim() != 2 or numbers.shape != rows.shape[:1]:
        return NotImplemented
    numbers = numbers.unsqueeze(1)
    excess = (margin - rows.gather(1, numbers) + rows).clamp(min=0.0) ** p
    if weight is not None:
        excess = excess * weight[numbers]
    losses = excess.scatter(1, numbers, 0.0).sum(1) / rows.shape[1]
    if input.dim() == 1:
        return losses.squeeze(0)
    return reduce(losses, reduction)


def _multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Any:
    if input.shape != target.shape or input.dim() not in (1, 2):
        return NotImplemented
    # The labels of an example end at the first -1.
    is_label = (target >= 0).long().cumprod(-1).bool()
    labels = torch.where(is_label, target, 0)
    is_target = torch.zeros_like(target).scatter_add(-1, labels, is_label.long()) > 0
    margins = 1 - input.gather(-1, labels)[..., :, None] + input[..., None, :]
    counts = is_label[..., :, None] & ~is_target[..., None, :]
    losses = margins.clamp(min=0.0).masked_fill(~counts, 0.0).sum((-2, -1)) / input.shape[-1]
    return reduce(losses, reduction)


def _soft_margin_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return reduce(torch.log1p(torch.exp(-target * input)), reduction)


# -- distributions ----------------------------------------------------------------------------------------------------


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """The body of torch's function, which branches on a value."""
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    require_values(var >= 0, lambda: ValueError("var has negative entry/entries"))
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.dim() != input.dim() or any([n not in (1, size) for n, size in zip(var.shape, input.shape, strict=True)]):
        return NotImplemented
    # The gradient of a variance below the limit passes.
    limited = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (torch.log(limited) + (input - target) ** 2 / limited)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return reduce(losses, _reduction.get_enum(reduction))


RULES: dict[Any, Rule] = {
    F.ctc_loss: where_batched(_ctc_loss),
    torch.ctc_loss: where_batched(_ctc_loss),
    F.multi_margin_loss: by_body(F.multi_margin_loss),
    _NN.multi_margin_loss: where_batched(_multi_margin_loss),
    F.multilabel_margin_loss: by_body(F.multilabel_margin_loss),
    _NN.multilabel_margin_loss: where_batched(_multilabel_margin_loss),
    F.soft_margin_loss: by_body(F.soft_margin_loss),
    _NN.soft_margin_loss: where_batched(_soft_margin_loss),
    F.gaussian_nll_loss: where_batched(_gaussian_nll_loss),
    F.kl_div: by_body(F.kl_div),
    torch.kl_div: by_decomposition(_ATEN.kl_div.default),
    F.margin_ranking_loss: by_body(F.margin_ranking_loss),
    torch.margin_ranking_loss: by_decomposition(_ATEN.margin_ranking_loss.default),
    F.triplet_margin_loss: by_body(F.triplet_margin_loss),
    torch.triplet_margin_loss: by_decomposition(_ATEN.triplet_margin_loss.default),
}
