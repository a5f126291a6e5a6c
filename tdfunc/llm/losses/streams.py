"""Streams: a value for each token, with a mask; and the sums, means and ratios that losses and corrections use.

Where the mask is False, a value may be anything, including NaN. *B any batch dimensions, T positions.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tdfunc.core.errors import LeafMismatchError, check_choice, error
from tdfunc.mixture import widen

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Normalize: TypeAlias = Literal["token", "sequence"] | float | Tensor

# Ratios stay within exp(20), about 5e8: finite in float32, and so are their squares.
MAX_LOG_RATIO = 20.0


def clean(what: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return a stream (*B, T) in float32 at least, 0 where the mask is False.

    Raises:
        LeafMismatchError: The shape differs from the shape of the mask.
    """
    if not isinstance(values, Tensor):
        raise LeafMismatchError(
            f"{what} must be a tensor.",
            got=type(values).__name__,
            hint="scores.log_probs of Scores; log_probs.full or .response of LogProbs.",
        )
    if values.shape != mask.shape:
        raise LeafMismatchError(
            f"{what} and the mask differ in shape.", expected=list(mask.shape), got=list(values.shape)
        )
    return torch.where(mask.bool(), widen(values), 0)


def spread(what: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return values of rows (*B) or of tokens (*B, T) as a stream.

    Raises:
        LeafMismatchError: The values have neither shape.
    """
    if values.shape == mask.shape[:-1]:
        values = values.unsqueeze(-1).expand(mask.shape)
    elif values.shape != mask.shape:
        raise LeafMismatchError(
            f"{what} must have a value for each row, or for each token.",
            expected=f"{list(mask.shape[:-1])} or {list(mask.shape)}",
            got=list(values.shape),
        )
    return torch.where(mask.bool(), widen(values), 0)


def row_sums(values: Tensor, mask: Tensor, *, average: bool) -> Tensor:
    """Return the sum of each row of a clean stream, or its mean, (*B); 0 for rows without tokens."""
    total = values.sum(-1)
    if average:
        return total / mask.bool().sum(-1).clamp(min=1)
    return total


def mean(values: Tensor, mask: Tensor, normalize: Normalize = "token") -> Tensor:
    """Return the mean of a clean stream over tokens, the mean of the rows' means, or the sum divided by a number.

    Raises:
        ValueError: `normalize` is an unknown string, a bool, or a number that is not above 0.
    """
    if normalize == "token":
        return values.sum() / mask.bool().sum().clamp(min=1)
    if normalize == "sequence":
        return row_mean(row_sums(values, mask, average=True))
    # As a number, True would be 1: a sum over all tokens.
    if isinstance(normalize, str | bool):
        raise error(ValueError, "normalize must be 'token', 'sequence' or a divisor of the sum.", got=repr(normalize))
    if not isinstance(normalize, Tensor) and not normalize > 0:
        # A negative one would train the opposite.
        raise error(ValueError, "normalize must be above 0, if it is a divisor of the sum.", got=normalize)
    return values.sum() / normalize


def row_mean(rows: Tensor) -> Tensor:
    """Return the mean over rows (*B); 0 if there are none."""
    return rows.sum() / max(rows.numel(), 1)


def log_ratio(new: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return log-ratios of two clean streams: of tokens (*B, T), or of rows (*B, 1).

    Raises:
        ValueError: `level` is unknown.
    """
    gap = new - old
    if level == "token":
        return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    check_choice("the level of a ratio", level, ("token", "sequence", "geometric"))
    rows = row_sums(gap, mask, average=level == "geometric").unsqueeze(-1)
    return rows.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """Return Kish's effective sample size of a clean stream of weights, as a part of its tokens; 0 without tokens."""
    squares = weights.square().sum() * mask.bool().sum()
    return weights.sum().square() / squares.clamp(min=torch.finfo(weights.dtype).tiny)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, which is taken to be at least one unit in the last place of 1 below it.

    Source:
        Mächler, "Accurately Computing log(1 - exp(-|a|))" (2012).
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.where(x < -0.693147, (-x.exp()).log1p(), (-x.expm1()).log())
