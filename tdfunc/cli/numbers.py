"""The numbers of leaves, piece by piece: statistics, differences, values out of a dtype's range, means."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


def has_values(dtype: torch.dtype) -> bool:
    """Return whether torch can compute with numbers of a dtype."""
    return dtype is not _FLOAT4


def wide(values: Tensor) -> Tensor:
    """Return values in float64 or complex128; pairs of 4-bit numbers as their bytes."""
    if not has_values(values.dtype):
        values = values.view(torch.uint8)
    if values.is_complex():
        return values.to(torch.complex128)
    return values.to(torch.float64)


@dataclass
class Stats:
    """Statistics over the finite values that were added, or over the absolute values of complex ones."""

    count: int = 0
    finite: int = 0
    nans: int = 0
    infs: int = 0
    zeros: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    mean: float = 0.0
    # The sum of squared distances from the mean.
    _squares: float = 0.0

    def add(self, piece: Tensor) -> None:
        """Count one more piece."""
        values = wide(piece)
        if values.is_complex():
            values = values.abs()
        finite = values[values.isfinite()]
        self.count += values.numel()
        self.nans += int(values.isnan().sum())
        self.infs += int(values.isinf().sum())
        self.zeros += int((values == 0).sum())
        if not finite.numel():
            return
        # Means of parts put together (Chan et al. 1979): sums of squares would lose digits.
        count = finite.numel()
        mean = float(finite.mean())
        total = self.finite + count
        delta = mean - self.mean
        squares = float((finite - mean).square().sum())
        self._squares += squares + delta * delta * self.finite * count / total
        self.mean += delta * count / total
        self.finite = total
        self.least = min(self.least, float(finite.min()))
        self.greatest = max(self.greatest, float(finite.max()))

    def summary(self) -> dict[str, float | None]:
        """Return the statistics by name; None without values to compute one from."""
        found: dict[str, float | None] = dict.fromkeys(("min", "max", "mean", "std"))
        if self.finite > 0:
            found |= {"min": self.least, "max": self.greatest, "mean": self.mean}
        if self.finite > 1:
            found["std"] = math.sqrt(self._squares / (self.finite - 1))
        count = max(self.count, 1)
        return {**found, "nan": self.nans / count, "inf": self.infs / count, "zero": self.zeros / count}


class Tolerance(NamedTuple):
    """The largest difference between equal values: `atol + rtol * |b|`."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass
class Difference:
    """The differences between two leaves of one shape, beyond a tolerance."""

    tolerance: Tolerance = Tolerance()
    count: int = 0
    differing: int = 0
    # Over all elements, also within the tolerance; infinite if one of two is NaN.
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Compare one more pair of pieces: NaN equals NaN, 0.0 equals -0.0."""
        self.count += a.numel()
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        x = wide(a)
        y = wide(b)
        dtype = torch.promote_types(x.dtype, y.dtype)
        x = x.to(dtype)
        y = y.to(dtype)
        is_integer = not a.is_floating_point() and not a.is_complex()
        # float64 has not all 64-bit integers.
        is_exact = a.dtype == b.dtype and is_integer and a.element_size() == 8
        if is_exact:
            unequal = a.view(torch.int64) != b.view(torch.int64)
        else:
            unequal = ~((x == y) | (x.isnan() & y.isnan()))
        if not bool(unequal.any()):
            return
        x = x[unequal]
        y = y[unequal]
        apart = _no_nan((x - y).abs())
        if is_exact:
            apart = apart.clamp(min=1)
        rtol, atol = self.tolerance
        self.differing += apart.numel()
        if rtol or atol:
            self.differing -= int(torch.isclose(x, y, rtol, atol).sum())
        self.max_abs = max(self.max_abs, float(apart.max()))
        self.max_rel = max(self.max_rel, float(_no_nan(apart / y.abs()).max()))


def _no_nan(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=math.inf, posinf=math.inf)


class NotFinite(NamedTuple):
    """The numbers of values that are NaN, and infinite."""

    nans: int = 0
    infs: int = 0

    def __add__(self, other: tuple[Any, ...]) -> "NotFinite":
        """Return the counts of two pieces together."""
        nans, infs = other
        return NotFinite(self.nans + nans, self.infs + infs)

    def __str__(self) -> str:
        """Return the counts in words."""
        parts: list[str] = []
        if self.nans:
            parts.append(f"{self.nans:,} NaN")
        if self.infs:
            parts.append(f"{self.infs:,} infinite")
        return " and ".join(parts)


FINITE = NotFinite()


def not_finite(values: Tensor) -> NotFinite:
    """Count the values that are not finite."""
    if not has_values(values.dtype) or not (values.is_floating_point() or values.is_complex()):
        return FINITE
    if values.element_size() == 1:
        values = values.float()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    # One sum is much faster than a mask; it is finite only if all values are.
    if math.isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))):
        return FINITE
    return NotFinite(int(values.isnan().sum()), int(values.isinf().sum()))


def count_lost(before: Tensor, after: Tensor) -> int:
    """Count the values that a cast altered by more than rounding: infinities, signs, zeros, values out of range."""
    facts = torch.finfo(after.dtype)
    x = wide(before)
    y = wide(after)
    if x.is_complex():
        x = torch.view_as_real(x)
        y = torch.view_as_real(y)
    is_beyond = (x.isinf() != y.isinf()) | (x.isfinite() & (x.abs() > facts.max))
    lost = y.isnan() | is_beyond | ((x.sign() != y.sign()) & (y != 0))
    return int((lost & ~x.isnan()).sum())


def cast(values: Tensor, leaf: Tensor, lost: Counter[int]) -> Tensor:
    """Return values in the dtype of a leaf, and add the number of lost ones."""
    made = values.to(leaf.dtype)
    if made is not values:
        lost[id(leaf)] += count_lost(values, made)
    return made


def average(pieces: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of pieces in float64; pieces of weight 0 do not count, even if they contain NaN."""
    terms = [wide(piece) * weight for piece, weight in zip(pieces, weights, strict=True) if weight]
    return torch.stack(terms).sum(0) / sum(weights)
