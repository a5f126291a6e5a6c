"""The numbers of leaves, piece by piece: statistics, what differs between two, what a dtype cannot hold, means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc.ops.display.text import count_text

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


def wide(values: Tensor) -> Tensor:
    """Return values in the dtype in which all of them can be computed with."""
    if values.dtype is _FLOAT4:
        # torch has no conversions of it: these are its pairs of bits.
        return values.view(torch.uint8).to(torch.float64)
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def has_values(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype mean what they say here."""
    return dtype is not _FLOAT4


def all_finite(values: Tensor) -> bool:
    """Whether real numbers, which torch can compare, are all finite; a tenth of the time of `isfinite`."""
    # NaN is passed on by both.
    return not values.numel() or all(math.isfinite(float(extreme)) for extreme in values.aminmax())


@dataclass
class Stats:
    """Statistics over the finite values that were added; of complex ones, over their absolute values."""

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
        self.count += values.numel()
        self.zeros += values.numel() - int(values.count_nonzero())
        finite = values
        if not all_finite(values):
            self.nans += int(values.isnan().sum())
            self.infs += int(values.isinf().sum())
            finite = values[values.isfinite()]
        if not finite.numel():
            return
        # Means of parts put together (Chan et al. 1979): sums of squares would lose digits.
        count, mean = finite.numel(), float(finite.mean())
        distances = (finite - mean).flatten()
        total, delta = self.finite + count, mean - self.mean
        self._squares += float(distances.dot(distances)) + delta * delta * self.finite * count / total
        self.mean += delta * count / total
        self.finite = total
        least, greatest = map(float, finite.aminmax())
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)

    @property
    def std(self) -> float:
        """The standard deviation, as torch.std: NaN for a single value."""
        return math.sqrt(self._squares / (self.finite - 1)) if self.finite > 1 else math.nan

    def summary(self) -> dict[str, float | None]:
        """Return them by name; None where there is no value to compute them from."""
        has, share = self.finite > 0, max(self.count, 1)
        return {
            "min": self.least if has else None,
            "max": self.greatest if has else None,
            "mean": self.mean if has else None,
            "std": self.std if self.finite > 1 else None,
            "nan": self.nans / share,
            "inf": self.infs / share,
            "zero": self.zeros / share,
        }


class Tolerance(NamedTuple):
    """How far apart values may be: `atol + rtol * |b|`."""

    rtol: float = 0.0
    atol: float = 0.0

    def exceeded(self, apart: Tensor, size: Tensor) -> int:
        """Count the distances that are larger, or infinite."""
        if not self.rtol:
            return int((apart > self.atol).count_nonzero())
        # Of an infinite size any part is infinite; what is infinitely far apart is larger.
        largest = size.mul(self.rtol).add_(self.atol).nan_to_num_()
        return int((apart > largest).count_nonzero())


@dataclass
class Difference:
    """What differs between two leaves of one shape, beyond a tolerance."""

    tolerance: Tolerance = Tolerance()
    count: int = 0
    differing: int = 0
    # Over all elements, those within the tolerance too; infinite where only one is NaN.
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Compare one more pair of pieces: NaN equals NaN, 0.0 equals -0.0."""
        self.count += a.numel()
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        # float64 has not all 64-bit integers.
        is_exact = a.dtype == b.dtype and not a.is_floating_point() and not a.is_complex()
        x, y = wide(a), wide(b)
        if x.is_complex() or y.is_complex():
            x, y = x.to(torch.complex128), y.to(torch.complex128)
        apart = (x - y).abs()
        if not is_exact and all_finite(apart):
            self._enter(apart, y.abs())
            return
        same = (a.view(torch.int64) == b.view(torch.int64)) if is_exact and a.element_size() == 8 else x == y
        unequal = ~(same | (x.isnan() & y.isnan()))
        if not bool(unequal.any()):
            return
        x, y = x[unequal], y[unequal]
        apart = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if is_exact:
            # Where float64 rounds the difference away.
            apart = apart.clamp(min=1)
        self._enter(apart, y.abs())

    def _enter(self, apart: Tensor, size: Tensor) -> None:
        self.differing += self.tolerance.exceeded(apart, size)
        self.max_abs = max(self.max_abs, float(apart.max()))
        # 0 / 0 is no difference; what is infinitely far apart is so relative to anything.
        rel = apart.div_(size).nan_to_num_(nan=0.0, posinf=math.inf)
        self.max_rel = max(self.max_rel, float(rel.max())) if self.max_abs < math.inf else math.inf


def _comparable(values: Tensor) -> Tensor:
    # float8 has few operations of its own.
    return values.to(torch.float32) if values.element_size() == 1 else values


class Lost:
    """The values that a dtype cannot hold, counted by what became of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        facts = torch.finfo(dtype)
        # What is larger does not round to the largest number.
        self._limit = facts.max + facts.eps * 2.0 ** (math.frexp(facts.max)[1] - 1) / 2
        self._is_signed = facts.min < 0
        self._has_infinity = bool(wide(torch.tensor(math.inf).to(dtype)).isinf())
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, piece: Tensor, cast: Tensor) -> None:
        """Count one more piece, and what it became."""
        # Where there are infinities, what is out of range becomes one.
        if all_finite(_comparable(cast)) and (self._has_infinity or self._holds(_comparable(piece))):
            return
        before, after = wide(piece), wide(cast)
        is_finite, large = before.isfinite(), before.abs() > self._limit
        signless = [] if self._is_signed else [
            ("negative value", "lost the sign, which the new dtype does not have", (before < 0) & (after > 0)),
            ("zero", "became the least number, as the new dtype has no zero", (before == 0) & (after != 0)),
        ]  # fmt: skip
        for noun, fate, found in (
            ("value", "too large for the new dtype became infinite or NaN", is_finite & ~after.isfinite()),
            ("value", "too large for the new dtype became the largest number", is_finite & large & after.isfinite()),
            ("infinite value", "became NaN", before.isinf() & after.isnan()),
            ("infinite value", "became the largest number", before.isinf() & after.isfinite()),
            *signless,
        ):
            if count := int(found.count_nonzero()):
                self._counts[noun, fate] = self._counts.get((noun, fate), 0) + count

    def lines(self) -> list[str]:
        """Say how many values became what."""
        return [f"{count_text(count, noun)} {fate}" for (noun, fate), count in self._counts.items()]

    def _holds(self, values: Tensor) -> bool:
        """Whether all values are in the range of the dtype, NaN and infinities not counted as such."""
        if not values.numel():
            return True
        least, greatest = map(float, values.aminmax())
        return max(-least, greatest) <= self._limit and (self._is_signed or least > 0)


# Where the largest weight is scaled to: such weights, and those that are 2**52 times smaller, are no factors below 1,
# which would cost the least numbers of float64 bits.
_WEIGHT_BITS = 53


def scaled(weights: Sequence[float]) -> list[float]:
    """Return weights with the same ratios whose sum is finite: a power of two times each, which changes no mean."""
    exponent = _WEIGHT_BITS - math.frexp(max(map(abs, weights)))[1]
    return [math.ldexp(weight, exponent) for weight in weights]


def average(pieces: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of pieces, computed in float64 and rounded once; weights are those of `scaled`.

    Pieces of weight 0 do not count, whatever is in them.
    """
    # 0 times infinite is NaN.
    used = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
    pieces, weights = [piece for piece, _ in used], [weight for _, weight in used]
    mean = _mean(pieces, weights)
    if not all_finite(torch.view_as_real(mean) if mean.is_complex() else mean):
        # A sum of large values overflows, but not if their absolute weights sum up to less than 1/2.
        exponent = math.frexp(sum(map(abs, weights)))[1] + 1
        smaller = _mean(pieces, [math.ldexp(weight, -exponent) for weight in weights])
        mean = torch.where(mean.isfinite(), mean, smaller)
    return mean.to(pieces[0].dtype)


def _mean(pieces: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    result: Tensor | None = None
    for piece, weight in zip(pieces, weights, strict=True):
        values = wide(piece)
        # New memory costs more than computing in what is there, which may be the piece itself.
        term = values.mul(weight) if values is piece else values.mul_(weight)
        result = term if result is None else result.add_(term)
    assert result is not None
    return result.div_(sum(weights))


def overflows(pieces: Sequence[Tensor], mean: Tensor, weights: Sequence[float]) -> int:
    """Count the means of finite values that are not finite: a weight below 0 leads out of the range of the values."""
    if min(weights) >= 0:
        return 0
    lost = ~wide(mean).isfinite()
    for piece, weight in zip(pieces, weights, strict=True):
        if weight:
            lost &= wide(piece).isfinite()
    return int(lost.count_nonzero())
