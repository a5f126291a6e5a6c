"""Squares and their roots: the range of squares, which numbers leave early, and roots of sums that can be 0."""

import torch
from torch import Tensor


def square_scale(largest: Tensor) -> Tensor:
    """Return the power of two by which to divide numbers, so that the sum of their squares is in range.

    It is 1 unless the largest of them is very large or very small, so that ordinary results keep their bits.

    Args:
        largest: The largest absolute values.
    """
    facts = torch.finfo(largest.dtype)
    limit = facts.max**0.25
    size = largest.detach()
    is_ordinary = (size < limit) & (size > 1 / limit)
    # No power brings zeros, infinities and NaN into range.
    is_ordinary |= (size == 0) | ~size.isfinite()
    power = torch.where(is_ordinary, 1, size).clamp(min=facts.tiny).log2().floor()
    return torch.exp2(power)


def root(squares: Tensor) -> Tensor:
    """Return the square root of sums of squares, with the derivative 0 where the sum is 0.

    There the derivative of torch is infinite, which times the 0 of the squares would be NaN.
    """
    is_zero = squares == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squares).sqrt())
