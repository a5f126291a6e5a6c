"""Functions of numbers, and order statistics, by the formulas of torch's kernels."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching.fold import is_batched, where_batched
from tdfunc.modules.batching.rule import Rule, by_body

_special: Any = torch.special
_ROUND = {"nearest": torch.round, "lower": torch.floor, "higher": torch.ceil}


def _log_ndtr(input: Tensor) -> Tensor:
    """The logarithm of the normal distribution function; each branch gets numbers at which it is finite."""
    low = input.clamp(max=-1.0) * math.sqrt(0.5)
    high = input.clamp(min=-1.0) * math.sqrt(0.5)
    return torch.where(
        input < -1.0,
        torch.log(_special.erfcx(-low) / 2) - low * low,
        torch.log1p(-torch.erfc(high) / 2),
    )


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if not isinstance(elements, Tensor) or not isinstance(test_elements, Tensor):
        return NotImplemented
    found = (elements.unsqueeze(-1) == test_elements.flatten()).any(-1)
    return ~found if invert else found


def _isclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if input.dtype != other.dtype or not input.is_floating_point() or rtol < 0 or atol < 0:
        return NotImplemented
    errors = (input - other).abs()
    close = (input == other) | (errors.isfinite() & (errors <= atol + (rtol * other).abs()))
    if equal_nan:
        close = close | (input.isnan() & other.isnan())
    return close


def _glu(mode: TorchFunctionMode, func: Any, /, input: Tensor, dim: int = -1) -> Tensor:
    # torch batches it except in forward mode.
    if not is_batched(input) or not _in_forward_mode() or input.shape[dim] % 2:
        return func(input, dim)
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def _rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """The mean slope in evaluation mode; in training mode the mode of the key draws the slopes."""
    if training:
        return NotImplemented
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _dropout(input: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Nothing is dropped in evaluation mode, where torch compares a rate of each member; the key's mode draws masks."""
    if training or not is_batched(p):
        return NotImplemented
    return input


def _alpha_dropout(input: Tensor, p: float | Tensor = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _dropout(input, p, training, inplace)


def _in_forward_mode() -> bool:
    levels: Any = _functorch.get_interpreter_stack()
    return any([level.key() == _functorch.TransformType.Jvp for level in levels])


def _quantile(
    input: Tensor, q: Tensor | float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    return _of_sorted(input, q, dim, keepdim, interpolation, skips_nan=False)


def _nanquantile(
    input: Tensor, q: Tensor | float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    return _of_sorted(input, q, dim, keepdim, interpolation, skips_nan=True)


def _of_sorted(
    input: Tensor, q: Tensor | float, dim: int | None, keepdim: bool, interpolation: str, *, skips_nan: bool
) -> Any:
    """Return the quantiles: the numbers at some places of a sorted tensor, and between them."""
    if not isinstance(q, Tensor):
        q = torch.tensor(q, dtype=input.dtype, device=input.device)
    # torch reads the fractions to check them.
    known = interpolation in _ROUND or interpolation in ("linear", "midpoint")
    if not known or q.dim() > 1 or q.dtype != input.dtype or is_batched(q) or not input.numel() or not input.dim():
        return NotImplemented
    rows = input.flatten() if dim is None else input.movedim(dim, -1)
    quantiles = _at(rows.sort(-1).values, _places(rows, q.reshape(-1), skips_nan), interpolation).movedim(-1, 0)
    if keepdim and dim is None:
        quantiles = quantiles.reshape(-1, *[1] * input.dim())
    elif keepdim and dim is not None:
        quantiles = quantiles.unsqueeze(dim % input.dim() + 1)
    return quantiles if q.dim() else quantiles.squeeze(0)


def _places(rows: Tensor, fractions: Tensor, skips_nan: bool) -> Tensor:
    """Return the places of the quantiles (*S, Q) in sorted rows (*S, n), where NaN comes last."""
    is_nan = rows.detach().isnan()
    if skips_nan:
        counts = (~is_nan).sum(-1, keepdim=True)
        return fractions * (counts - 1).clamp(min=0)
    last = rows.shape[-1] - 1
    return (fractions * last).expand(*rows.shape[:-1], -1).masked_fill(is_nan.any(-1, keepdim=True), last)


def _at(ordered: Tensor, places: Tensor, interpolation: str) -> Tensor:
    """Return the numbers of sorted rows at places; a place between two numbers is interpolated."""
    if interpolation in _ROUND:
        return ordered.gather(-1, _ROUND[interpolation](places).long())
    below = ordered.gather(-1, places.long())
    above = ordered.gather(-1, places.ceil().long())
    if interpolation == "midpoint":
        return torch.lerp(below, above, 0.5)
    return torch.lerp(below, above, places - places.floor())


RULES: dict[Any, Rule] = {
    F.glu: _glu,
    # The key's mode runs its body as well, below this one: only here do its writes in place come to rules.
    F.gumbel_softmax: by_body(F.gumbel_softmax),
    F.rrelu: where_batched(_rrelu),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), where_batched(_dropout)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), where_batched(_alpha_dropout)),
    torch.isin: where_batched(_isin),
    **dict.fromkeys((torch.isclose, Tensor.isclose), where_batched(_isclose)),
    _special.log_ndtr: where_batched(_log_ndtr),
    torch.quantile: where_batched(_quantile),
    Tensor.quantile: where_batched(_quantile),
    torch.nanquantile: where_batched(_nanquantile),
    Tensor.nanquantile: where_batched(_nanquantile),
}
