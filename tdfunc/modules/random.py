"""Random numbers for one call: every draw of a forward comes from a key.

A `TorchFunctionMode` is active for the call alone, so nothing process-wide changes. Draw n of a forward is a function
of the key and n by plain tensor operations: the same in a loop, under `vmap` and `grad`, in a replay, when
compiled, and when `torch.utils.checkpoint` runs a part of forward again. A draw by key refuses the arguments that
torch's function refuses. Draws inside torch take no key; `apply(..., rng=)` notices and refuses them.
"""

import functools
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from tdfunc import random
from tdfunc.core.context import is_compiling, is_known, outside, require_values
from tdfunc.modules.batching import recurrent
from tdfunc.modules.batching.fold import is_batched
from tdfunc.modules.batching.pooling import RANDOM_POOLS
from tdfunc.modules.batching.rule import by_body
from tdfunc.random import splitmix
from tdfunc.random.draws import standard_normal, unit

Server: TypeAlias = Callable[..., Any]
# Returns the numbers of keys (*B, 2), as (*B, *shape): called with the keys, a shape and a dtype.
Standard: TypeAlias = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
Size: TypeAlias = tuple[int, ...]
_CHECKPOINT: Any = vars(checkpoint)
# A draw of up to so many numbers is made for several members, and so many numbers at a time.
_FEW_NUMBERS = 1 << 14
_MANY_NUMBERS = 1 << 20


class seeded(TorchFunctionMode):
    """Serve the random functions called inside from a key.

    `seeded(mode.key, mode.count)` continues another mode from its present count, for code that computes a part of
    forward again.

    Args:
        key: The key.
        count: The number of draws made before.
        strict: Have `apply` refuse draws from torch's default generators, which nobody has seeded.
    """

    def __init__(self, key: Tensor, count: int = 0, *, strict: bool = False) -> None:
        super().__init__()
        self.key = key
        self.count: int = count
        self.strict = strict
        self._checkpoints = 0 if is_compiling() else len(_checkpoint_frames())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        server = _SERVERS.get(func)
        if server is None:
            # Dynamo of torch 2.13 cannot call the method for a mode, since it uses `super()`; attention calls it.
            func = torch.unflatten if func is Tensor.unflatten else func
            if kwargs:
                return func(*args, **kwargs)
            return func(*args)
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        return server(self, func, *args, **kwargs)

    def draw(self, draw: "Draw", device: torch.device) -> Tensor:
        """Return the numbers that the key of the next draw gives."""
        return draw.numbers(self.draw_key(device))

    def draw_key(self, device: torch.device) -> Tensor:
        """Return the key of the next draw."""
        return random.fold_in(self.key, self._next()).to(device)

    def draw_mask(self, shape: Size, p: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return 1 / p with probability p, and 0 elsewhere, from the key of the next draw."""
        key = self.key.to(device)
        number = self._next()
        if isinstance(p, Tensor):
            return splitmix.mask_by(key, shape, p, dtype, number=number)
        return splitmix.mask(key, shape, p, dtype, number=number)

    def _next(self) -> int:
        """Return the number of the next draw."""
        if not is_compiling():
            self._follow_checkpoints()
        self.count += 1
        return self.count - 1

    def _follow_checkpoints(self) -> None:
        """Have the checkpoints that are being called repeat their draws when backward runs them again.

        Nothing else shows that torch.utils.checkpoint is being called. Each is found at its first draw, so no draw was
        counted since its entry.
        """
        frames = _checkpoint_frames()
        for frame in frames[: len(frames) - self._checkpoints]:
            if "gen" in frame.f_locals:
                holder = frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")
                name = "recompute_fn"
            else:
                holder = frame.f_locals.get("ctx")
                name = "run_function"
            run = getattr(holder, name, None)
            if run is not None and not isinstance(run, _Resumed):
                setattr(holder, name, _Resumed(run, self.key, self.count))


class Draw(NamedTuple):
    """Numbers of some distribution, times a factor, plus a number."""

    standard: Standard
    shape: Size
    dtype: torch.dtype
    factor: float | Tensor = 1.0
    shift: float | Tensor = 0.0

    def numbers(self, keys: Tensor) -> Tensor:
        """Return the numbers of keys (*B, 2), as (*B, *shape)."""
        if self.dtype.is_complex:
            drawn = torch.view_as_complex(self.standard(keys, (*self.shape, 2), self.dtype.to_real()))
            # A normal variable has a variance of 1, half of it in each part.
            if self.standard is standard_normal:
                drawn = drawn * math.sqrt(0.5)
        else:
            drawn = self.standard(keys, self.shape, self.dtype)
        if isinstance(self.factor, Tensor) or isinstance(self.shift, Tensor):
            return (drawn * self.factor + self.shift).to(self.dtype)
        if (self.factor, self.shift) == (1.0, 0.0):
            return drawn
        return drawn.mul_(self.factor).add_(self.shift)


class Members:
    """The draws of members that each have a key: one call makes a draw of the first member for many of the others.

    Args:
        keys: A key (E, 2) for each.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        # By number: the draws of the first member, and, for the members from one on, their numbers.
        self.asked: dict[int, Draw] = {}
        self.rows: dict[int, Tensor] = {}
        self.first = self._end = 0

    def enter(self, member: int) -> seeded:
        """Return the mode that serves the draws of a member; members come in order."""
        if member >= self._end and self.asked and self._keys.is_cpu:
            self._make_rows(member)
        return _Member(self._keys[member], self, member)

    def _make_rows(self, member: int) -> None:
        sizes = {n: math.prod(draw.shape) for n, draw in self.asked.items()}
        numbers = [n for n, size in sizes.items() if size <= _FEW_NUMBERS]
        total = sum([sizes[n] for n in numbers])
        self.first: int = member
        self._end: int = min(len(self._keys), member + max(1, _MANY_NUMBERS // max(total, 1)))
        keys = splitmix.derive(self._keys[self.first : self._end, None], torch.tensor(numbers), splitmix.FOLD)
        drawn = zip(numbers, keys.unbind(1), strict=True)
        self.rows = {n: self.asked[n].numbers(each.contiguous()) for n, each in drawn}


class _Member(seeded):
    """The draws of one member among others."""

    def __init__(self, key: Tensor, members: Members, member: int) -> None:
        super().__init__(key)
        self._members = members
        self._member = member

    def draw(self, draw: Draw, device: torch.device) -> Tensor:
        members = self._members
        if not self._member:
            members.asked[self.count] = draw
        rows = None
        if device.type == "cpu":
            rows = members.rows.get(self.count)
        if rows is None or members.asked[self.count] != draw:
            return super().draw(draw, device)
        self._next()
        # The numbers of several members share memory.
        return rows[self._member - members.first].clone()


class _Resumed:
    """A function that runs under a key, from one count of draws on."""

    def __init__(self, run: Callable[..., Any], key: Tensor, count: int) -> None:
        self._run = run
        self._key = key
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with seeded(self._key, self._count):
            return self._run(*args, **kwargs)


def _checkpoint_frames() -> list[types.FrameType]:
    """Return the frames of functions of `torch.utils.checkpoint`, the innermost first."""
    frame = sys._getframe()
    found = []
    while frame is not None:
        if frame.f_globals is _CHECKPOINT:
            found.append(frame)
        frame = frame.f_back
    return found


def _compiled_checkpoint(mode: seeded, func: Any, /, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve a checkpoint that dynamo captures: eagerly the function is not handed to modes.

    The captured part may not write to objects outside of it, so it has its own mode, whose count is a result.
    """
    key = mode.key
    count = mode.count

    def counted(*args: Any, **kwargs: Any) -> tuple[Any, int]:
        inner = seeded(key, count)
        with inner:
            out = run(*args, **kwargs)
        return out, inner.count

    out, mode.count = func(counted, *args, **kwargs)
    return out


# -- outputs and checks ---------------------------------------------------------------------------------------------


def _out(drawn: Tensor, out: Any) -> Tensor:
    if out is None:
        return drawn
    if out.dtype != drawn.dtype:
        raise RuntimeError(f"dtype {drawn.dtype} does not match dtype of out parameter ({out.dtype})")
    # As torch does; `copy_` would broadcast.
    return (out if out.shape == drawn.shape else out.resize_(drawn.shape)).copy_(drawn)


def _check(func: Any, like: Tensor | None, *args: Any, **kwargs: Any) -> None:
    """Have torch check the arguments of a draw, and the dtype of the tensor that it fills or reads.

    Numbers that are tensors without values here are checked for each member, or at each replay.
    """
    if is_compiling():
        return
    if any([isinstance(x, Tensor) for x in (*args, *kwargs.values())]):
        if func in _LIMITS:
            fits = torch.as_tensor(_LIMITS[func](*args))
            require_values(fits, lambda: RuntimeError(f"{func.__name__}: a number is out of its range."))
        return
    _try(func, None if like is None else ((1,) * like.dim(), like.dtype), *args, **kwargs)


# Of torch's kernels, for the numbers of a draw in place.
_LIMITS: dict[Any, Callable[..., Any]] = {
    Tensor.uniform_: lambda low, high: low <= high,
    Tensor.normal_: lambda mean, std: std >= 0,
    Tensor.log_normal_: lambda mean, std: std > 0,
    Tensor.exponential_: lambda lambd: lambd > 0,
    Tensor.cauchy_: lambda median, sigma: sigma > 0,
    Tensor.geometric_: lambda p: (p > 0) & (p < 1),
}


# Any: numbers of Python and numpy, and tensors of one number.
def _number(value: Any) -> Any:
    """Return a number as torch takes it: of a tensor without dimensions its value, if there is one to read.

    Under vmap and in a trace it stays a tensor, in float64 as Python's numbers are.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() or value.requires_grad:
        kind = "that requires grad; detach() it"
        if value.dim():
            kind = f"of shape {list(value.shape)}"
        raise TypeError(f"a draw takes numbers and tensors of one number, and not a tensor {kind}.")
    if not is_compiling() and is_known(value):
        return value.item()
    if value.is_floating_point():
        return value.double()
    return value


def _count(value: Any) -> Any:
    """Return an integer of Python, numpy or a tensor without dimensions as Python's; others as they are."""
    if isinstance(value, (int, torch.SymInt)) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def _shape(sizes: Any) -> Size:
    """Return a shape whose sizes are integers of any kind."""
    return tuple([_count(size) for size in sizes])


# 1 and 1.0 are not the same to torch.
@functools.lru_cache(maxsize=1000, typed=True)
def _try(func: Any, like: tuple[Size, torch.dtype] | None, *args: Any, **kwargs: Any) -> None:
    """Draw few numbers, which nobody uses."""
    with outside():
        given = ()
        if like is not None:
            given = (torch.ones(like[0], dtype=like[1]),)
        func(*given, *args, generator=torch.Generator(), **kwargs)


# -- dropout and attention ------------------------------------------------------------------------------------------


def _dropout(
    mode: seeded, func: Any, /, input: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training:
        return input
    # Members may have their own rates, so that a rate that is a tensor takes its draw also where it is 0.
    may_skip = not isinstance(p, Tensor)
    p = _number(p)
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


def _keep_variance(mode: seeded, input: Tensor, p: float | Tensor, shape: Size) -> Tensor:
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
    mode: seeded, func: Any, /, input: Tensor, p: float = 0.5, training: bool = False, *rest: Any, **kw: Any
) -> Tensor:
    return _dropout(mode, func, input, p, training, *rest, **kw)


def _rrelu(
    mode: seeded, func: Any, /, input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training or lower > upper:
        return func(input, lower, upper, training, inplace)
    slopes = mode.draw(Draw(unit, tuple(input.shape), input.dtype, upper - lower, lower), input.device)
    out = torch.where(input > 0, input, input * slopes)
    return input.copy_(out) if inplace else out


def _attention(
    mode: seeded, func: Any, /, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    dropout_p = _number(dropout_p)
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


# -- factories ------------------------------------------------------------------------------------------------------


def _factory(standard: Standard) -> Server:
    """Return the server of `torch.rand` or `torch.randn`."""

    def serve(
        mode: seeded, func: Any, /, *sizes: Any, size: Any = None, dtype: Any = None, device: Any = None,
        requires_grad: bool = False, out: Any = None, **kw: Any,
    ) -> Tensor:  # fmt: skip
        if size is None:
            if sizes and isinstance(sizes[0], (tuple, list)):
                size = sizes[0]
            else:
                size = sizes
        draw = Draw(standard, _shape(size), _dtype(dtype, out, torch.get_default_dtype()))
        return _finish(mode.draw(draw, _device(device)), requires_grad, out)

    return serve


def _like(server: Server) -> Server:
    """Return the server of `torch.rand_like` and its kin, by the server of the function that takes a size."""

    def serve(
        mode: seeded, func: Any, /, input: Tensor, *bounds: int, dtype: Any = None, device: Any = None, **options: Any
    ) -> Tensor:
        options |= {"size": input.shape, "dtype": dtype or input.dtype}
        return server(mode, func, *bounds, device=input.device if device is None else device, **options)

    return serve


def _device(device: Any) -> torch.device:
    # Dynamo of torch 2.13 cannot call torch.get_default_device.
    if device is None:
        return torch.empty(0).device
    return torch.device(device)


def _dtype(given: Any, out: Any, default: torch.dtype) -> torch.dtype:
    return given or (default if out is None else out.dtype)


def _finish(drawn: Tensor, requires_grad: bool, out: Any = None) -> Tensor:
    drawn = _out(drawn, out)
    if requires_grad:
        return drawn.requires_grad_()
    return drawn


def _bounds(bounds: tuple[int, ...], low: int | None, high: int | None) -> tuple[int, int]:
    if high is not None:
        bounds = (*bounds, high)
    low = 0 if low is None else low
    if len(bounds) == 1:
        return (low, bounds[0])
    return (bounds[0], bounds[1])


def _randint(
    mode: seeded, func: Any, /, *args: Any, low: Any = None, high: Any = None, size: Any = None,
    dtype: Any = None, device: Any = None, requires_grad: bool = False, out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    *bounds, size = args if size is None else (*args, size)
    low, high = map(_number, _bounds(tuple(bounds), low, high))
    dtype = _dtype(dtype, out, torch.int64)
    _check(torch.randint, None, low, high, (0,), dtype=dtype)
    drawn = random.randint(mode.draw_key(_device(device)), _shape(size), low, high)
    return _finish(drawn.to(dtype), requires_grad, out)


def _randperm(
    mode: seeded, func: Any, /, n: int, *, dtype: Any = None, device: Any = None, requires_grad: bool = False,
    out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    n = _count(n)
    dtype = _dtype(dtype, out, torch.int64)
    _check(torch.randperm, None, n, dtype=dtype)
    drawn = random.permutation(mode.draw_key(_device(device)), n)
    return _finish(drawn.to(dtype), requires_grad, out)


# -- draws by tensors of parameters ---------------------------------------------------------------------------------


def _bernoulli(mode: seeded, func: Any, /, input: Tensor, p: float | None = None, *, out: Any = None) -> Tensor:
    p = _number(p)
    _check(torch.bernoulli, input, *() if p is None else (p,))
    key = mode.draw_key(input.device)
    if p is None:
        drawn = random.bernoulli(key, input)
    else:
        drawn = random.bernoulli(key, p, tuple(input.shape))
    return _out(drawn.to(_dtype(None, out, input.dtype)), out)


def _multinomial(
    mode: seeded, func: Any, /, input: Tensor, num_samples: int, replacement: bool = False, *, out: Any = None
) -> Tensor:
    num_samples = _count(num_samples)
    if not is_compiling():
        row = ((1,) * (input.dim() - 1) + tuple(input.shape[-1:]), input.dtype)
        _try(torch.multinomial, row, num_samples, replacement)
    fits = ((input >= 0) & (input < math.inf)).all(-1) & (input.sum(-1) > 0)
    require_values(fits, lambda: RuntimeError("multinomial: weights must be finite, >= 0, and not all 0 in a row."))
    logits = input.to(torch.promote_types(input.dtype, torch.float32)).log()
    key = mode.draw_key(input.device)
    if replacement:
        drawn = random.categorical(key, logits, shape=(num_samples, *input.shape[:-1])).movedim(0, -1)
    else:
        # The k largest of log w + Gumbel noise (Kool et al., Stochastic Beams and Where to Find Them, 2019).
        noise = random.gumbel(key, tuple(input.shape), dtype=logits.dtype)
        drawn = (logits + noise).topk(num_samples, -1).indices
    return _out(drawn, out)


def _normal_of(
    mode: seeded, func: Any, /, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None,
    requires_grad: bool = False, out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    if size is not None:
        shape = _shape(size)
        # With a size both are numbers.
        mean = _number(mean)
        std = _number(std)
    else:
        like = mean if isinstance(mean, Tensor) else std
        if not isinstance(like, Tensor):
            # torch's error.
            return func(mean, std)
        shape = tuple(torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ())))
        dtype = like.dtype
        device = like.device
    if isinstance(std, Tensor):
        require_values(std >= 0, lambda: RuntimeError("normal: all elements of std must be at least 0."))
    else:
        _check(torch.normal, None, 0.0, std, (0,))
    noise = mode.draw(Draw(standard_normal, shape, dtype or torch.get_default_dtype()), _device(device))
    return _finish((mean + std * noise).to(noise.dtype), requires_grad, out)


# -- in place -------------------------------------------------------------------------------------------------------


def _empty(mode: seeded, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    """Give each member separate memory, which a draw by its key can fill.

    torch makes one tensor for all members of a `vmap`, and refuses to write into it what differs by member.
    """
    made = func(*args, **kwargs)
    if is_compiling() or not is_batched(mode.key) or kwargs.get("out") is not None:
        return made
    # Numbers that Python may read, such as indices, stay shared.
    plain = made.is_floating_point() and made.is_contiguous() and made.layout == torch.strided
    if is_batched(made) or made.requires_grad or not plain:
        return made
    return mode.key.new_empty(made.shape, dtype=made.dtype, device=made.device)


def _new(mode: seeded, func: Any, /, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Serve `tensor.new(sizes)`; called with data, it has the numbers of that."""
    if all([isinstance(x, (int, torch.Size)) for x in args]):
        return _empty(mode, func, self, *args, **kwargs)
    return func(self, *args, **kwargs)


def _uniform_(mode: seeded, func: Any, /, self: Tensor, a: float = 0, b: float = 1, **kw: float) -> Tensor:
    low = _number(kw.get("from", a))
    high = _number(kw.get("to", b))
    _check(func, self, low, high)
    return self.copy_(mode.draw(Draw(unit, tuple(self.shape), self.dtype, high - low, low), self.device))


def _normal_(mode: seeded, func: Any, /, self: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    mean = _number(mean)
    std = _number(std)
    _check(func, self, mean, std)
    return self.copy_(mode.draw(Draw(standard_normal, tuple(self.shape), self.dtype, std, mean), self.device))


def _log_normal_(mode: seeded, func: Any, /, self: Tensor, mean: float = 1, std: float = 2) -> Tensor:
    mean = _number(mean)
    std = _number(std)
    _check(func, self, mean, std)
    # The exponential of a number rounded to 16 bits is wrong by more than it is rounded itself.
    dtype = torch.promote_types(self.dtype, torch.float32)
    return self.copy_(mode.draw(Draw(standard_normal, tuple(self.shape), dtype, std, mean), self.device).exp())


def _exponential_(mode: seeded, func: Any, /, self: Tensor, lambd: float = 1) -> Tensor:
    lambd = _number(lambd)
    _check(func, self, lambd)
    return self.copy_(random.exponential(mode.draw_key(self.device), tuple(self.shape), dtype=self.dtype) / lambd)


def _cauchy_(mode: seeded, func: Any, /, self: Tensor, median: float = 0, sigma: float = 1) -> Tensor:
    median = _number(median)
    sigma = _number(sigma)
    _check(func, self, median, sigma)
    # The quotient of two normal variables.
    above, below = mode.draw(Draw(standard_normal, (2, *self.shape), self.dtype), self.device)
    return self.copy_(above / below * sigma + median)


def _geometric_(mode: seeded, func: Any, /, self: Tensor, p: float | Tensor) -> Tensor:
    p = _number(p)
    _check(func, self, p)
    # The first success, in whole trials, of a process whose waiting time is exponential.
    waits = random.exponential(mode.draw_key(self.device), tuple(self.shape), dtype=torch.float64)
    scale = -(torch.log1p(-p) if isinstance(p, Tensor) else math.log1p(-p))
    return self.copy_((waits / scale).ceil())


def _random_(mode: seeded, func: Any, /, self: Tensor, *bounds: int, **kw: int) -> Tensor:
    bounds = tuple(map(_number, bounds))
    kw = {name: _number(value) for name, value in kw.items()}
    _check(func, self, *bounds, **kw)
    if bounds or kw:
        low, high = _bounds(bounds, kw.get("from"), kw.get("to"))
    elif self.is_floating_point():
        # All integers up to the largest from which on some are left out.
        low = 0
        high = int(2 / torch.finfo(self.dtype).eps) + 1
    else:
        low = 0
        high = 2
        if self.dtype != torch.bool:
            high = torch.iinfo(self.dtype).max + 1
    return self.copy_(random.randint(mode.draw_key(self.device), tuple(self.shape), low, high))


def _bernoulli_(mode: seeded, func: Any, /, self: Tensor, p: Any = 0.5) -> Tensor:
    # A tensor without dimensions is a probability for each element, as tensors of other shapes are.
    _check(func, self, p)
    if isinstance(p, Tensor):
        _check(torch.bernoulli, p)
    if isinstance(p, Tensor):
        p = p.expand(self.shape)
    return self.copy_(random.bernoulli(mode.draw_key(self.device), p, tuple(self.shape)))


_SERVERS: dict[Any, Server] = {
    checkpoint.checkpoint: _compiled_checkpoint,
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    **dict.fromkeys(_ALPHA, _alpha_dropout),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), recurrent.by_layers),
    F.rrelu: _rrelu,
    **RANDOM_POOLS,
    torch.rand: _factory(unit),
    torch.randn: _factory(standard_normal),
    torch.rand_like: _like(_factory(unit)),
    torch.randn_like: _like(_factory(standard_normal)),
    torch.randint: _randint,
    torch.randint_like: _like(_randint),
    torch.randperm: _randperm,
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
    torch.normal: _normal_of,
    **dict.fromkeys((torch.empty, torch.empty_like, Tensor.new_empty), _empty),
    Tensor.new: _new,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.log_normal_: _log_normal_,
    Tensor.exponential_: _exponential_,
    Tensor.cauchy_: _cauchy_,
    Tensor.geometric_: _geometric_,
    Tensor.random_: _random_,
    Tensor.bernoulli_: _bernoulli_,
}


def _kaiming_uniform_(
    mode: seeded, func: Any, /, tensor: Tensor, a: float = 0, *, nonlinearity: Any = "leaky_relu", **options: Any
) -> Tensor:
    """Draw as torch's own function, which calls ten methods of the tensor that each come to the mode."""
    if not tensor.numel():
        # It warns.
        return func(tensor, a, nonlinearity=nonlinearity, **options)
    fan = init._calculate_correct_fan(tensor, options.get("mode", "fan_in"))
    bound = math.sqrt(3.0) * (init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    return _SERVERS[init.uniform_](mode, func, tensor, -bound, bound)


def _without_grad(method: Any) -> Server:
    """Serve a function of `torch.nn.init` by the method of tensors that it calls."""

    def serve(mode: seeded, func: Any, /, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return _SERVERS[method](mode, method, tensor, *args, **kwargs)

    return serve


_SERVERS.update({func: by_body(func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)})
_SERVERS[init.kaiming_uniform_] = _kaiming_uniform_
_SERVERS.update({getattr(init, name): _without_grad(getattr(Tensor, name)) for name in ("uniform_", "normal_")})
