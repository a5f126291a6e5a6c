"""Keys, and draws from them: each draw is a function of a key and a shape."""

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc.core.context import has_values, require_values
from tdfunc.core.errors import UnsupportedError, as_count, brief, error
from tdfunc.core.shapes import int_or_ints
from tdfunc.core.types import wide_default_dtype
from tdfunc.random import splitmix
from tdfunc.random.splitmix import shift, signed

Shape: TypeAlias = int | Sequence[int]
KeyLike: TypeAlias = Tensor | int | torch.Generator


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """Return the key of a seed.

    Args:
        seed: An integer, of which 64 bits count, or an integer tensor.
        device: The device of the key and of the numbers drawn from it; by default the device of `seed`.

    Raises:
        TypeError: `seed` is not an integer.

    Shapes:
        The key is (2,), int64; seeds of shape (*S) give keys (*S, 2).

    Examples:
        >>> params = normal(key(0), (3, 4))
        >>> keys = key(torch.arange(16))  # a key for each member
        >>> torch.vmap(lambda k: normal(k, (3,)))(keys).shape
        torch.Size([16, 3])
    """
    number = _as_number(seed, "key: seed")
    if device is None and isinstance(number, Tensor):
        device = number.device
    root = torch.tensor([signed(splitmix.SEED), 1], device=device)
    return splitmix.derive(root, _on(number, device), splitmix.SEED)


def key_of(given: KeyLike) -> Tensor:
    """Return the key that an argument called `key` or `rng` stands for.

    Args:
        given: A key, a seed, or a generator, which gives another key each time.

    Raises:
        TypeError: `given` is not a key, an integer or a generator.
        UnsupportedError: A generator is drawn from inside a transform, a trace or a compiled region.

    Examples:
        >>> torch.equal(key_of(3), key(3))
        True
    """
    if isinstance(given, Tensor) and given.dtype == torch.int64 and given.shape == (2,):
        return given
    # After tensors, of which torch 2.14's compiler refuses to ask it.
    if isinstance(given, torch.Generator):
        if not has_values():
            raise UnsupportedError(
                "rng: a torch.Generator cannot be drawn from inside a transform, a trace or a compiled function.",
                expected="a key",
                got="a torch.Generator",
                hint="pass key = tdfunc.random.key(seed) to the function as an argument, and give it as rng=; "
                "tdfunc.random.fold_in(key, step) is the key of a step.",
            )
        return key(torch.randint(-(2**63), 2**63 - 1, (), generator=given, device=given.device))
    if isinstance(given, bool | Tensor) or not hasattr(given, "__index__"):
        raise error(
            TypeError,
            "rng, or key, is not a random key, a seed or a torch.Generator.",
            expected="one key: int64 of shape (2,)",
            got=f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else brief(given),
            hint="tdfunc.random.key(seed) makes a key; tdfunc.Ensemble gives each member its own of one key.",
        )
    return key(operator.index(given))


def split(key: Tensor, num: Shape = 2) -> Tensor:
    """Return new keys, which share no draws with one another, with `key`, or with keys that are folded in.

    Args:
        key: The key, which must not be used again.
        num: The number of keys, or a shape of keys.

    Shapes:
        (2,) becomes (num, 2), or (*num, 2).

    Examples:
        >>> first, second = split(key(0))
    """
    _check_key(key, "split")
    size = _size(num)
    return splitmix.derive(key, torch.arange(math.prod(size), device=key.device).reshape(size), splitmix.SPLIT)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Return the key of a key and a number: a step, a member, a layer.

    Args:
        key: The key; it can also be folded with other numbers.
        data: An integer, of which 64 bits count, or an integer tensor.

    Raises:
        TypeError: `data` is not an integer.

    Shapes:
        (2,) stays (2,); data of shape (*S) give keys (*S, 2).

    Examples:
        >>> run = key(0)
        >>> step_keys = [fold_in(run, step) for step in range(3)]
    """
    _check_key(key, "fold_in")
    return splitmix.derive(key, _on(_as_number(data, "fold_in: data"), key.device), splitmix.FOLD)


def bits(key: Tensor, shape: Shape = (), *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return integers all of whose bits are random.

    Args:
        key: The key.
        shape: The shape of the result.
        dtype: int64 or int32; the sign is one of the bits.

    Raises:
        TypeError: `dtype` is neither of the two.
    """
    _check_key(key, "bits")
    if dtype not in (torch.int64, torch.int32):
        raise error(TypeError, "bits: dtype must be int64 or int32.", got=dtype)
    size = _size(shape)
    if dtype == torch.int64:
        return _words(key, size)
    return splitmix.half_words(key, size)


def uniform(
    key: Tensor,
    shape: Shape = (),
    *,
    dtype: torch.dtype | None = None,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Return numbers that are uniform in [minval, maxval).

    They are multiples of 2^-24 of the interval in float32, of 2^-53 in float64, 2^-11 in float16, 2^-8 in bfloat16.

    Args:
        key: The key.
        shape: The shape of the result.
        dtype: A floating-point dtype, by default torch's default one.
        minval: The least value; a tensor broadcasts to `shape`.
        maxval: The bound; rounding of `minval + u * (maxval - minval)` can reach it.

    Raises:
        ValueError: `maxval` is below `minval`, their distance is not finite in the dtype, or they do not broadcast to
            `shape`.

    Examples:
        >>> uniform(key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    _check_key(key, "uniform")
    dtype = _floating(dtype, "uniform")
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor):
        _check_width("uniform: maxval must not be below minval", maxval - minval, torch.finfo(dtype).max)
        drawn = unit(key, shape, dtype)
        if (minval, maxval) == (0.0, 1.0):
            return drawn
        return drawn * (maxval - minval) + minval
    low, high = (torch.as_tensor(x, device=key.device).to(dtype) for x in (minval, maxval))
    _check_fit("uniform", _size(shape), low, high)
    width = high - low
    _check_width("uniform: maxval must not be below minval", width, torch.finfo(dtype).max)
    return unit(key, shape, dtype) * width + low


def normal(key: Tensor, shape: Shape = (), *, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the standard normal distribution, by its inverse function.

    Examples:
        >>> keys = split(key(0), 4)
        >>> torch.vmap(lambda k: normal(k, (3,)))(keys).shape
        torch.Size([4, 3])
    """
    _check_key(key, "normal")
    return standard_normal(key, shape, dtype)


def standard_normal(key: Tensor, shape: Shape, dtype: torch.dtype | None) -> Tensor:
    """Return the numbers of `normal`, of keys (*B, 2) as (*B, *shape)."""
    dtype, wide = _wide(dtype, "normal")
    count = _PRECISION[wide]
    # Uniform in (-1, 1), with each number its negative.
    unit = _integers(key, shape, wide, count).add_(0.5).mul_(2.0 ** (1 - count))
    return unit.erfinv_().mul_(math.sqrt(2.0)).to(dtype)


def truncated_normal(
    key: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    shape: Shape = (),
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return numbers of the standard normal distribution between two bounds.

    Args:
        key: The key.
        lower: The least value; a tensor broadcasts to `shape`.
        upper: The greatest value.
        shape: The shape of the result.
        dtype: A floating-point dtype, by default torch's default one.

    Raises:
        ValueError: `upper` is below `lower`, or they do not broadcast to `shape`.
    """
    _check_key(key, "truncated_normal")
    dtype = _floating(dtype, "truncated_normal")
    low, high = (torch.as_tensor(x, dtype=torch.float64, device=key.device) for x in (lower, upper))
    _check_fit("truncated_normal", _size(shape), low, high)
    is_tensor = isinstance(lower, Tensor) or isinstance(upper, Tensor)
    if is_tensor:
        width = high - low
    else:
        width = upper - lower
    _check_width("truncated_normal: upper must not be below lower", width, math.inf)
    # Probabilities are exact in the lower tail, so an interval above 0 is drawn from its mirror image.
    sign = 1 - 2 * (low > 0).to(torch.float64)
    lowest = torch.minimum(sign * low, sign * high)
    highest = torch.maximum(sign * low, sign * high)
    # torch.special.ndtr of torch 2.13 is 0 in the tail, where erfc is exact.
    start, stop = (torch.erfc(-x / math.sqrt(2.0)) / 2 for x in (lowest, highest))
    unit = _open_unit(key, shape, torch.float64)
    drawn = torch.special.ndtri(start + unit * (stop - start))
    if is_tensor or upper < _TAIL or lower > -_TAIL:
        drawn = torch.where(highest < _TAIL, _tail(unit, lowest, highest), drawn)
    return torch.clamp(sign * drawn, low, high).to(dtype)


# Beyond it probabilities underflow.
_TAIL = -37.0


def _tail(unit: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the number between two bounds in the lower tail that has a share of the probability there below it."""
    # Without a derivative of the branch that is not taken.
    low, high = (torch.where(high < _TAIL, x, _TAIL) for x in (low, high))

    def log_share(x: Tensor) -> Tensor:
        """Return the logarithm of the probability below x, as a share of that below `high`."""
        scaled, unscaled = (torch.special.erfcx(-y / math.sqrt(2.0)) for y in (x, high))
        return (high - x) * (high + x) / 2 + (scaled / unscaled).log()

    share = (unit + (1 - unit) * log_share(low).exp()).log()
    # As of the density |x| exp(-x^2 / 2), and one step of Newton's method, by the slope -x.
    x = high * (1 - 2 * share / high.square()).sqrt()
    return x + (log_share(x) - share) / x


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """Return bools that are True with a probability, to within 2^-24.

    Args:
        key: The key.
        p: The probability; a tensor broadcasts to `shape`.
        shape: The shape of the result, by default the shape of `p`.

    Raises:
        ValueError: `p` is not between 0 and 1, or does not broadcast to `shape`.

    Examples:
        >>> keep = bernoulli(key(0), 0.9, (2, 3))
    """
    _check_key(key, "bernoulli")
    what = "bernoulli: p must be a probability."
    expected = "0 <= p <= 1"
    if isinstance(p, Tensor):
        size = p.shape if shape is None else _size(shape)
        _check_fit("bernoulli", size, p)
        require_values((p >= 0) & (p <= 1), lambda: error(ValueError, what, expected=expected))
        return unit(key, size, torch.float32) < p
    if not 0.0 <= p <= 1.0:
        raise error(ValueError, what, expected=expected, got=p)
    words = splitmix.half_words(key, () if shape is None else _size(shape))
    # u < p for u a multiple of 2^-24, as `uniform` makes it from the same bits, without making it.
    bound = splitmix.half_bound(p)
    if bound < 2**31:
        return words < bound
    return torch.ones_like(words, dtype=torch.bool)


def randint(
    key: Tensor,
    shape: Shape,
    minval: int | Tensor,
    maxval: int | Tensor,
    *,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return integers that are uniform in [minval, maxval).

    A number's probability differs from 1 / (maxval - minval) by at most 2^-64.

    Args:
        key: The key.
        shape: The shape of the result.
        minval: The least value; a tensor broadcasts to `shape`.
        maxval: One more than the greatest value.
        dtype: An integer dtype.

    Raises:
        ValueError: `maxval` is not above `minval`, the dtype does not hold the numbers, or the bounds do not broadcast
            to `shape`.
        TypeError: A bound is not an integer.

    Source:
        Lemire, "Fast random integer generation in an interval" (2019), without the rejection.
    """
    _check_key(key, "randint")
    limits = torch.iinfo(dtype)
    size = _size(shape)
    what = "randint: maxval must be above minval, and the numbers in the dtype."
    if isinstance(minval, int):
        expected = f"above {minval}, from {limits.min} to {limits.max}"
    else:
        expected = f"in {dtype}"
    if isinstance(minval, int) and isinstance(maxval, int):
        if not limits.min <= minval < maxval <= limits.max + 1 or dtype is torch.uint64:
            raise error(ValueError, what, expected=expected, got=maxval)
        words = _words(key, size)
        span = maxval - minval
        # All numbers of int64: a span of 2^64 does not fit a word.
        if span == 2**64:
            drawn = words
        else:
            drawn = _high_product(words, torch.tensor(signed(span), device=key.device))
        return (drawn + minval).to(dtype)
    # In int64 before any arithmetic: a span of int8 does not fit int8.
    low = _as_bound(minval, key)
    if isinstance(maxval, Tensor):
        last = _as_bound(maxval, key) - 1
        # One below the least number is the greatest one.
        fits = (low <= last) & (last < 2**63 - 1)
    else:
        last = _as_bound(maxval - 1, key)
        fits = low <= last
    _check_fit("randint", size, low, last)
    fits &= (low >= limits.min) & (last <= min(limits.max, 2**63 - 1))
    require_values(fits, lambda: error(ValueError, what, expected=expected))
    words = _words(key, size)
    span = last - low + 1
    return (torch.where(span == 0, words, _high_product(words, span)) + low).to(dtype)


def exponential(key: Tensor, shape: Shape = (), *, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the exponential distribution of rate 1, none of which is 0."""
    _check_key(key, "exponential")
    dtype, wide = _wide(dtype, "exponential")
    return _open_unit(key, shape, wide).log_().neg_().to(dtype)


def gumbel(key: Tensor, shape: Shape = (), *, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the standard Gumbel distribution."""
    _check_key(key, "gumbel")
    dtype, wide = _wide(dtype, "gumbel")
    return _open_unit(key, shape, wide).log_().neg_().log_().neg_().to(dtype)


def categorical(key: Tensor, logits: Tensor, *, dim: int = -1, shape: Shape | None = None) -> Tensor:
    """Return indices, each with the probability softmax(logits).

    Args:
        key: The key.
        logits: Log-probabilities, up to a constant; -inf is never drawn, unless all of a row are.
        dim: The dimension of the classes.
        shape: The shape of the result, which ends in the dimensions of `logits` without `dim`.

    Raises:
        ValueError: A logit is nan or inf, or `logits` without `dim` do not broadcast to `shape`.

    Shapes:
        (*B, C) gives (*B), or `shape`, (*S, *B).

    Source:
        The Gumbel-max trick.

    Examples:
        >>> categorical(key(0), torch.zeros(4, 10), shape=(3, 4)).shape
        torch.Size([3, 4])
    """
    rows = logits.movedim(dim, -1)
    # Noise of 16 bits has ties, and its sum with the logits is rounded: some classes would be drawn too often.
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if shape is None:
        size = rows.shape[:-1]
    else:
        size = _size(shape)
    _check_fit("categorical", size, rows[..., 0])
    what = "categorical: logits must be numbers below inf, or -inf."
    require_values(rows < math.inf, lambda: error(ValueError, what))
    return (gumbel(key, (*size, rows.shape[-1]), dtype=rows.dtype) + rows).argmax(-1)


def permutation(key: Tensor, x: int | Tensor, *, dim: int = 0) -> Tensor:
    """Return a random order of the numbers below x, or of a tensor along a dimension.

    Examples:
        >>> permutation(key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    if isinstance(x, Tensor) and x.dim() > 0:
        return x.index_select(dim, bits(key, (x.shape[dim],)).argsort())
    return bits(key, (as_count("permutation: x", x, 0),)).argsort()


def choice(key: Tensor, a: int | Tensor, shape: Shape = (), *, replace: bool = True, p: Tensor | None = None) -> Tensor:
    """Return random rows of a tensor, or random numbers below an int.

    Args:
        key: The key.
        a: The tensor, whose first dimension is drawn from, or the number of choices.
        shape: The shape of the result.
        replace: Allow a choice to be drawn twice.
        p: A weight for each choice, in any scale; uniform by default.

    Shapes:
        `a` of shape (N, *F) gives (*shape, *F); `p` is (N,).

    Raises:
        ValueError: Without replacement more choices are drawn than exist, or `p` is not a weight for each choice.

    Source:
        With replacement, the inverse of the distribution function of `p`. Weighted draws without replacement are the
        largest log p + Gumbel noise (Kool et al., "Stochastic beams and where to find them", 2019).
    """
    size = _size(shape)
    if isinstance(a, Tensor) and a.dim() > 0:
        count = a.shape[0]
    else:
        count = a = as_count("choice: a", a, 0)
    number = math.prod(size)
    if not replace and number > count:
        raise error(
            ValueError,
            f"choice: {number} draws without replacement are more than the {count} choices.",
            expected=f"at most {count}",
            got=number,
            hint="replace=True.",
        )
    if p is not None:
        _check_weights(p, count, 1 if replace else number)
        drawn = _choose_weighted(key, p, size, replace)
    elif replace:
        drawn = randint(key, size, 0, count)
    else:
        drawn = permutation(key, count)[:number].reshape(size)
    if isinstance(a, int):
        return drawn
    return a[drawn]


def _check_weights(p: Tensor, count: int, least: int) -> None:
    """Raise unless there is a weight for each choice, and `least` of them are above 0."""
    if p.shape != (count,):
        raise error(ValueError, "choice: p does not have a weight for each choice.", expected=count, got=list(p.shape))
    fits = (p >= 0).all() & p.isfinite().all() & ((p > 0).sum() >= least)
    what = "choice: p must be finite and at least 0, and above 0 for as many choices as are drawn."
    require_values(fits, lambda: error(ValueError, what, expected=f"{least} or more above 0"))


def _choose_weighted(key: Tensor, p: Tensor, size: tuple[int, ...], replace: bool) -> Tensor:
    """Return the numbers of choices that are drawn by their weights."""
    if replace:
        # A number of at most 1 - 2^-53 times the last sum stays below it, also when it is rounded.
        sums = p.to(torch.float64).cumsum(0)
        return torch.searchsorted(sums, unit(key, size, torch.float64) * sums[-1], right=True)
    # As the noise: the logarithm of 16 bits has a few digits.
    weights = p.to(torch.promote_types(p.dtype, torch.float32))
    # Noise of 16 bits would have ties.
    noise = gumbel(key, (len(p),), dtype=wide_default_dtype())
    return (noise + weights.log()).topk(math.prod(size)).indices.reshape(size)


# -- words ----------------------------------------------------------------------------------------------------------


_LOW = (1 << 32) - 1


def _check_key(key: Tensor, call: str) -> None:
    # Any: a seed, for which no type checker warns in a notebook.
    given: Any = key
    if not isinstance(given, Tensor):
        raise error(
            TypeError,
            f"{call}: the key is not a random key.",
            expected="a tensor from tdfunc.random.key",
            got=brief(given),
            hint=f"tdfunc.random.key({given!r}) makes one of a seed." if isinstance(given, int) else None,
        )
    if key.dtype == torch.int64 and key.shape == (2,):
        return
    raise error(
        TypeError,
        f"{call}: the key is not one random key.",
        expected="int64 of shape (2,)",
        got=f"{str(key.dtype).removeprefix('torch.')} of shape {tuple(key.shape)}",
        hint="tdfunc.random.key(seed) makes one; torch.vmap maps a function of one key over many.",
    )


def _check_width(what: str, width: float | Tensor, limit: float) -> None:
    fits = (width >= 0) & (width <= limit)
    if isinstance(fits, Tensor):
        require_values(fits, lambda: error(ValueError, f"{what}.", expected=f"a distance from 0 to {limit}"))
    elif not fits:
        raise error(ValueError, f"{what}.", expected=f"a distance from 0 to {limit}", got=width)


def _check_fit(call: str, size: tuple[int, ...], *parameters: Tensor) -> None:
    """Raise unless parameters broadcast to the shape of a draw: else several results would have one number."""
    shapes = [x.shape for x in parameters]
    # broadcast_shapes takes longer than a draw of few numbers.
    if all([shape == size[len(size) - len(shape) :] for shape in shapes]):
        return
    if torch.broadcast_shapes(size, *shapes) != torch.Size(size):
        raise error(
            ValueError,
            f"{call}: the parameters do not broadcast to shape.",
            expected=f"a shape that ends in {list(torch.broadcast_shapes(*shapes))}",
            got=f"shape {list(size)}",
        )


def _as_number(number: int | Tensor, what: str) -> int | Tensor:
    """Return an integer, or an integer tensor as int64."""
    if isinstance(number, Tensor) and not number.is_floating_point() and not number.is_complex():
        return number.to(torch.int64)
    if not isinstance(number, Tensor) and hasattr(number, "__index__"):
        return operator.index(number)
    raise error(TypeError, f"{what} must be an integer.", got=brief(number), hint="torch.tensor(step) is one.")


def _as_bound(number: int | Tensor, key: Tensor) -> Tensor:
    return torch.as_tensor(_as_number(number, "randint: a bound"), device=key.device)


def _on(number: int | Tensor, device: torch.device | str | None) -> int | Tensor:
    if isinstance(number, Tensor):
        return number.to(device)
    return number


def _size(shape: Shape) -> tuple[int, ...]:
    given = int_or_ints(shape)
    if isinstance(given, int):
        size = (given,)
    else:
        size = tuple(given)
    if any([n < 0 for n in size]):
        raise error(ValueError, "shape: a dimension is negative.", got=list(size))
    return size


def _words(key: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return 64 random bits for each number, of keys (*B, 2) as (*B, *size)."""
    return splitmix.words(key, math.prod(size)).reshape((*key.shape[:-1], *size))


def _high_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the upper 64 bits of the 128-bit products of unsigned words (Warren, section 8-2)."""
    a_high = shift(a, 32)
    a_low = a & _LOW
    b_high = shift(b, 32)
    b_low = b & _LOW
    middle = a_high * b_low + shift(a_low * b_low, 32)
    return a_high * b_high + shift(middle, 32) + shift(a_low * b_high + (middle & _LOW), 32)


_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _integers(key: Tensor, shape: Shape, dtype: torch.dtype, count: int) -> Tensor:
    """Return uniform integers in [-2^(count-1), 2^(count-1)) as floats that hold them exactly."""
    size = _size(shape)
    if count > 32:
        integers = _words(key, size) >> (64 - count)
    else:
        integers = splitmix.half_words(key, size) >> (32 - count)
    return integers.to(dtype)


def _floating(dtype: torch.dtype | None, call: str) -> torch.dtype:
    dtype = dtype or torch.get_default_dtype()
    if dtype in _PRECISION:
        return dtype
    names = ", ".join(str(d).removeprefix("torch.") for d in _PRECISION)
    raise error(TypeError, f"{call}: dtype must be a floating-point one.", expected=names, got=dtype)


def _wide(dtype: torch.dtype | None, call: str) -> tuple[torch.dtype, torch.dtype]:
    """Return a dtype and the one that functions of uniform numbers are computed in."""
    dtype = _floating(dtype, call)
    return dtype, torch.promote_types(dtype, torch.float32)


def unit(key: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), of keys (*B, 2) as (*B, *shape)."""
    count = _PRECISION[_floating(dtype, "uniform")]
    return _integers(key, shape, dtype, count).add_(2.0 ** (count - 1)).mul_(2.0**-count)


def _open_unit(key: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in (0, 1): odd multiples, so that neither bound is met by rounding."""
    count = _PRECISION[dtype] - 1
    return _integers(key, shape, dtype, count).add_(2.0 ** (count - 1) + 0.5).mul_(2.0**-count)
