"""Dropout, randomized leaky ReLU and attention with dropout by a key."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc import random
from tdfunc.core.context import require_values
from tdfunc.modules.draws.arguments import as_number
from tdfunc.modules.draws.draw import Draw, Server, Size, Source
from tdfunc.random.draws import unit


def _dropout(
    mode: Source, func: Any, /, input: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training:
        return input
    # Members may have their own rates, so that a rate that is a tensor takes its draw also where it is 0.
    may_skip = not isinstance(p, Tensor)
    p = as_number(p)
    # torch checks p only after the dispatch that leads here.
    if isinstance(p, Tensor):
        require_values((p >= 0) & (p <= 1), lambda: ValueError("dropout probability has to be between 0 and 1."))
    elif not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    elif p == 0.0 and may_skip:
        return input
    shape = tuple(input.shape)
    if func is not F.dropout and func is not F.alpha_dropout:
        # Whole channels are dropped: one draw for each, broadcast over the trailing dimensions. Without a batch
        # dimension the channels come first, except for dropout2d, which reads three dimensions as (N, C, L).
        lead = 1 if (func, input.dim()) in _UNBATCHED else 2
        shape = (*shape[:lead], *[1] * (input.dim() - lead))
    if func in _ALPHA and (isinstance(p, Tensor) or p < 1.0):
        out = _keep_variance(mode, input, p, shape)
        if inplace:
            return input.copy_(out)
        return out
    scale = mode.draw_mask(shape, 1.0 - p, input.dtype, input.device)
    if inplace:
        return input.mul_(scale)
    return input * scale


def _keep_variance(mode: Source, input: Tensor, p: float | Tensor, shape: Size) -> Tensor:
    """Drop units to the value alpha' (Klambauer et al., Self-Normalizing Neural Networks, 2017, section 3)."""
    alpha = -1.7580993408473766
    # Without any unit left the result is 0, and its factor is not used.
    if isinstance(p, Tensor):
        rest = torch.where(p < 1.0, 1.0 - p, 1.0)
    else:
        rest = 1.0 - p
    a = (rest * (1 + (1.0 - rest) * alpha**2)) ** -0.5
    kept = random.bernoulli(mode.draw_key(input.device), 1.0 - p, shape)
    out = a * torch.where(kept, input, torch.full_like(input, alpha)) - a * alpha * (1.0 - rest)
    if isinstance(p, Tensor):
        return torch.where(p < 1.0, out, 0.0).to(input.dtype)
    return out


_UNBATCHED = {(F.dropout1d, 2), (F.dropout3d, 4)}
_ALPHA = {F.alpha_dropout, F.feature_alpha_dropout}


def _alpha_dropout(
    mode: Source, func: Any, /, input: Tensor, p: float = 0.5, training: bool = False, *rest: Any, **kw: Any
) -> Tensor:
    return _dropout(mode, func, input, p, training, *rest, **kw)


def _rrelu(
    mode: Source, func: Any, /, input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training or lower > upper:
        return func(input, lower, upper, training, inplace)
    slopes = mode.draw(Draw(unit, tuple(input.shape), input.dtype, upper - lower, lower), input.device)
    out = torch.where(input > 0, input, input * slopes)
    return input.copy_(out) if inplace else out


def _attention(
    mode: Source, func: Any, /, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    dropout_p = as_number(dropout_p)
    if not isinstance(dropout_p, Tensor) and dropout_p == 0.0:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    # No fused kernel takes a key: the weights come from torch's own unfused attention to values without features.
    unfused = torch.ops.aten._scaled_dot_product_attention_math
    weights = unfused(query, key, value[..., :0], attn_mask, 0.0, is_causal, **options)[1]
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return _dropout(mode, F.dropout, weights, dropout_p) @ value


SERVERS: dict[Any, Server] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    **dict.fromkeys(_ALPHA, _alpha_dropout),
    F.scaled_dot_product_attention: _attention,
    F.rrelu: _rrelu,
}
