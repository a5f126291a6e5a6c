"""Attention: one call of torch's kernel for all members, which join the batch.

The kernel computes each head of each example by itself, so a member gets the same bits as in a call of one model. The
kernel has no second derivatives and no forward mode; both come from the formula.

B is the batch, H the number of heads, L the number of queries, S the number of keys.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.core.context import outside
from tdfunc.modules.batching.fold import fold, is_batched, takes_gradient, unfold
from tdfunc.modules.batching.rule import Rule, by_body

# Shape, dtype and stride of the last dimension.
Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, int]
_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_choose: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
_unfused = torch.ops.aten._scaled_dot_product_attention_math
_FLASH = 1


class Options(NamedTuple):
    """The arguments of the kernel that are not tensors."""

    is_causal: bool
    scale: float | None


class _FusedAttention(torch.autograd.Function):
    """torch's fused attention for CPUs: `(query, key, value, mask, options)` to the output and logsumexp."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        return _FORWARD(query, key, value, 0.0, options.is_causal, attn_mask=mask, scale=options.scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, options = inputs
        ctx.options = options
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, mask, *output)
        ctx.save_for_forward(query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, mask, out, logsumexp = ctx.saved_tensors
        return *_FusedBackward.apply(grads[0], query, key, value, mask, out, logsumexp, ctx.options), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        query, key, value, mask = ctx.saved_tensors
        attend = functools.partial(_attend, mask=mask, options=ctx.options)
        return _push(attend, (query, key, value), tangents[:3]), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        members = info.batch_size
        query, key, value, mask, options = args
        folded = [fold(x, dim, members) for x, dim in zip((query, key, value), in_dims[:3], strict=True)]
        mask = _fold_mask(mask, in_dims[3], members, len(folded[0]) // members)
        out, logsumexp = _FusedAttention.apply(*folded, mask, options)
        return (unfold(out, members), unfold(logsumexp, members)), (0, 0)


class _FusedBackward(torch.autograd.Function):
    """The kernel of the gradients, as a function of what it reads: to the gradients of query, key and value."""

    @staticmethod
    def forward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        causal = options.is_causal
        return _BACKWARD(grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=options.scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, query, key, value, mask, _, _, options = inputs
        ctx.options = options
        ctx.save_for_backward(grad, query, key, value, mask)
        ctx.save_for_forward(grad, query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        # The kernel reads out and logsumexp, which are functions of query and key: the formula has their part.
        grad, query, key, value, mask = ctx.saved_tensors
        gradients = functools.partial(_gradients, mask=mask, options=ctx.options)
        pull = torch.func.vjp(gradients, grad, query, key, value)[1]
        return *pull(cotangents), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        grad, query, key, value, mask = ctx.saved_tensors
        gradients = functools.partial(_gradients, mask=mask, options=ctx.options)
        return _push(gradients, (grad, query, key, value), tangents[:4])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        members = info.batch_size
        grad, query, key, value, mask, out, logsumexp, options = args
        heads = [fold(x, dim, members) for x, dim in zip((grad, query, key, value), in_dims[:4], strict=True)]
        after = [fold(x, dim, members) for x, dim in zip((out, logsumexp), in_dims[5:7], strict=True)]
        mask = _fold_mask(mask, in_dims[4], members, len(heads[0]) // members)
        folded = _FusedBackward.apply(*heads, mask, *after, options)
        return tuple([unfold(x, members) for x in folded]), (0, 0, 0)


def _fold_mask(mask: Tensor | None, dim: int | None, members: int, batch: int) -> Tensor | None:
    """Return the mask of E * B examples; one that all examples share stays as it is."""
    if mask is None:
        return None
    if dim is None:
        if mask.dim() == 2 or mask.shape[0] == 1:
            return mask
        return fold(mask, None, members)
    mask = mask.movedim(dim, 0)
    if mask.dim() == 3:
        mask = mask[:, None, None]
    return mask.expand(members, batch, *mask.shape[2:]).flatten(0, 1)


# -- the formula ------------------------------------------------------------------------------------------------------


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Return the weights (B, H, L, S) of the values."""
    scores = (query @ key.mT) * _scale(query, options)
    if options.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _scale(query: Tensor, options: Options) -> float:
    if options.scale is None:
        return query.shape[-1] ** -0.5
    return options.scale


def _to_heads(shared: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values that several heads of queries share."""
    if shared.shape[1] == heads:
        return shared
    return shared.repeat_interleave(heads // shared.shape[1], 1)


def _of_groups(grad: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the heads that share a key or value."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, -1)).sum(2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, options: Options) -> Tensor:
    heads = query.shape[1]
    return _weights(query, _to_heads(key, heads), mask, options) @ _to_heads(value, heads)


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the gradient of the output."""
    heads = query.shape[1]
    keys = _to_heads(key, heads)
    weights = _weights(query, keys, mask, options)
    of_weights = grad @ _to_heads(value, heads).mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * _scale(query, options)
    of_key = _of_groups(of_scores.mT @ query, key.shape[1])
    of_value = _of_groups(weights.mT @ grad, value.shape[1])
    return of_scores @ keys, of_key, of_value


def _push(fn: Any, primals: tuple[Tensor, ...], tangents: tuple[Tensor | None, ...]) -> Any:
    """Return the tangents of the results of a function; a tangent that is None is zero."""
    full = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
    return torch.func.jvp(fn, primals, tuple(full))[1]


# -- the rule ---------------------------------------------------------------------------------------------------------


def _attention(
    mode: TorchFunctionMode, func: Any, /, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    mask = attn_mask
    # The rate may be a tensor, for the mode of a key.
    drops = isinstance(dropout_p, Tensor) or dropout_p != 0
    if not drops and mask is not None and is_batched(query, key, value, mask) and takes_gradient(mask):
        # The fused kernel has no gradient for a mask. torch takes the other one for a mask that is trained, but does
        # not see that where the gradient is taken outside of the vmap.
        return _unfused(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if drops or not _is_fused(query, key, value, mask, is_causal, enable_gqa):
        return func(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    return _FusedAttention.apply(query, key, value, mask, Options(is_causal, scale))[0]


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: bool) -> bool:
    """Return True if torch would call its fused kernel for a member alone."""
    if query.device.type != "cpu" or not is_batched(query, key, value, mask) or _has_symbols(query, key):
        return False
    # The kernel has no gradient of a mask.
    if mask is not None and takes_gradient(mask):
        return False
    kinds = [None if x is None else _kind(x) for x in (query, key, value, mask)]
    return _takes_flash(*kinds, *options, torch.backends.cuda.flash_sdp_enabled())


def _has_symbols(*tensors: Tensor) -> bool:
    """Return True if a size is a symbol of a trace: another size may lead to another kernel."""
    return any([not isinstance(size, int) for tensor in tensors for size in tensor.shape])


def _kind(tensor: Tensor) -> Kind:
    last = 1
    if tensor.dim():
        last = tensor.stride(-1)
    return tuple(tensor.shape), tensor.dtype, last


@functools.lru_cache(256)
def _takes_flash(query: Kind, key: Kind, value: Kind, mask: Kind | None, *options: bool) -> bool:
    """Return True if torch takes its fused kernel for tensors of these kinds: it reads no values to choose."""
    is_causal, enable_gqa, _ = options
    if any([len(kind[0]) != 4 for kind in (query, key, value)]) or (mask is not None and len(mask[0]) < 2):
        return False
    with outside():
        tensors = [None if kind is None else _stand_in(*kind) for kind in (query, key, value, mask)]
        chosen = _choose(*tensors, 0.0, is_causal, enable_gqa=enable_gqa)
    return chosen == _FLASH


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, last: int) -> Tensor:
    """Return a tensor of a kind that has little memory: all its rows are one."""
    strides = (*[0] * (len(shape) - 1), last)
    size = 1 + max(shape[-1] - 1, 0) * last
    return torch.zeros(size, dtype=dtype).as_strided(shape, strides)


RULES: dict[Any, Rule] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: by_body(F.multi_head_attention_forward),
}
