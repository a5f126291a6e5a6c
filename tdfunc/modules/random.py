"""Random numbers for one call: seeds and generators served to the random functions that a forward calls.

A `TorchFunctionMode` is active for the call alone, so nothing process-wide changes. Under `vmap` each member draws
from its own generator, outside the transform, so that it equals a loop over the members.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

Seed: TypeAlias = "int | torch.Generator | Sequence[torch.Generator] | None"
_FACTORIES = {torch.rand, torch.randn, torch.randint, torch.randperm}
_LIKE = {torch.rand_like: "rand", torch.randn_like: "randn", torch.randint_like: "randint"}
_FROM_INPUT = {torch.bernoulli, torch.multinomial, torch.normal}
_FEATURE_DROPOUT = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_IN_PLACE = {
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.exponential_, Tensor.random_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
}  # fmt: skip


class seeded(TorchFunctionMode):  # noqa: N801 - used as a function: `with seeded(0):`
    """Serve the random functions called inside from one generator, or from one for each member of a vmap.

    Args:
        rng: A seed, a generator, or a generator for each member.
        level: The vmap level over the members, when there are several generators.
    """

    def __init__(self, rng: Any, level: int | None = None) -> None:
        super().__init__()
        self._generators: list[torch.Generator] = [_generator(rng)] if isinstance(rng, (int, torch.Generator)) else list(rng)
        self._level = level
        self.draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        server = _SERVERS.get(func)
        if server is None and getattr(func, "__module__", None) == "torch.nn.init" and self._level is None:
            return _initialise(self, func, *args, **kwargs)
        if server is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        return server(self, func, *args, **kwargs)

    def draw(self, make: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Return one draw for a call, or one for each member as a batched tensor."""
        self.draws += 1
        if self._level is None:
            with torch.no_grad():
                return make(self._generators[0])
        with temporarily_clear_interpreter_stack(), torch.no_grad():
            stacked = torch.stack([make(generator) for generator in self._generators])
        return _functorch._add_batch_dim(stacked, 0, self._level)  # pyright: ignore


def _generator(rng: "int | torch.Generator") -> torch.Generator:
    if isinstance(rng, torch.Generator):
        return rng
    return torch.Generator().manual_seed(rng)


def member_generators(seed: int, stop: int, start: int = 0) -> list[torch.Generator]:
    """Return generators for members start to stop, each seeded by (seed, i) alone: how many there are changes none."""
    return [torch.Generator().manual_seed(member_seed(seed, i)) for i in range(start, stop)]


def member_seed(seed: int, member: int) -> int:
    """Mix a seed and a member's number into one 63-bit seed (splitmix64 of Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    z = ((seed & mask) * 0x9E3779B97F4A7C15 + (member + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _on(x: Tensor) -> dict[str, Any]:
    return {"device": x.device}


def _uniform(mode: seeded, shape: Sequence[int], x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Draw uniform numbers of a shape on the device of x (generators are on the CPU unless given otherwise)."""
    dtype = dtype or (x.dtype if x.dtype.is_floating_point else torch.float32)
    return mode.draw(lambda g: torch.rand(tuple(shape), generator=g, device=g.device, dtype=dtype).to(x.device))


def _dropout(mode: seeded, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    return _masked(mode, input, tuple(input.shape), p, inplace)


def _feature_dropout(mode: seeded, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    features = _FEATURE_DROPOUT[func]
    shape = tuple(input.shape)
    # Whole channels are dropped: one draw for each, broadcast over the trailing dimensions.
    lead = len(shape) - features
    return _masked(mode, input, (*shape[:lead], *[1] * features), p, inplace)


def _masked(mode: seeded, input: Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> Tensor:
    if p == 1.0:
        return input * 0
    keep = (_uniform(mode, shape, input, torch.float32) >= p).to(input.dtype) / (1.0 - p)
    return input.mul_(keep) if inplace else input * keep


def _alpha_dropout(mode: seeded, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    # Klambauer et al., Self-Normalizing Neural Networks (2017), section 3: dropped units take the value alpha'.
    alpha = -1.7580993408473766
    shape = tuple(input.shape) if func is F.alpha_dropout else (*input.shape[:2], *[1] * (input.dim() - 2))
    a = ((1 - p) * (1 + p * alpha**2)) ** -0.5
    keep = _uniform(mode, shape, input, torch.float32) >= p
    out = a * torch.where(keep, input, torch.full_like(input, alpha)) - a * alpha * p
    return input.copy_(out) if inplace else out


def _factory(mode: seeded, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    device = kwargs.pop("device", None)
    out = mode.draw(lambda g: func(*args, generator=g, device=g.device, **kwargs))
    return out if device is None else out.to(device)


def _like(mode: seeded, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype = kwargs.pop("dtype", None) or input.dtype
    device = kwargs.pop("device", None) or input.device
    kwargs.pop("memory_format", None)
    base = getattr(torch, _LIKE[func])
    shape = tuple(input.shape)
    return mode.draw(lambda g: base(*args, shape, generator=g, device=g.device, dtype=dtype, **kwargs).to(device))


def _bernoulli(mode: seeded, func: Any, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    level = input if p is None else torch.full_like(input, p)
    return (_uniform(mode, input.shape, input, torch.float32) < level).to(input.dtype)


def _multinomial(mode: seeded, func: Any, input: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    shape = (*input.shape[:-1], num_samples, input.shape[-1]) if replacement else input.shape
    noise = _uniform(mode, shape, input, torch.float32).clamp_min(1e-38)
    weights = input.unsqueeze(-2) if replacement else input
    # The largest of log w + Gumbel noise has the probability w; the k largest are k draws without replacement
    # (Kool et al., Stochastic Beams and Where to Find Them, 2019).
    scores = weights.log() - noise.log().neg().log()
    return scores.argmax(-1) if replacement else scores.topk(num_samples, -1).indices


def _normal(mode: seeded, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if size is not None:
        return mode.draw(lambda g: torch.normal(mean, std, size, generator=g, device=g.device))
    like = mean if isinstance(mean, Tensor) else std
    noise = mode.draw(lambda g: torch.randn(tuple(torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))), generator=g, device=g.device, dtype=like.dtype))
    return mean + std * noise.to(like.device)


def _initialise(mode: seeded, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    # torch calls its own initialisers outside the mode, so what they draw cannot be served; they take a generator.
    generator = mode._generators[0]
    if "generator" in inspect.signature(func).parameters and kwargs.get("generator") is None and generator.device == args_device(args, kwargs):
        kwargs["generator"] = generator
        mode.draws += 1
    return func(*args, **kwargs)


def args_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of the first tensor of a call."""
    return next((a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def _in_place(mode: seeded, func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shape, dtype = tuple(self.shape), self.dtype
    return self.copy_(mode.draw(lambda g: func(torch.empty(shape, dtype=dtype, device=g.device), *args, generator=g, **kwargs)))


_SERVERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda mode, func, input, p, train: _dropout(mode, func, input, p, train),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _alpha_dropout,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    torch.normal: _normal,
    **dict.fromkeys(_FEATURE_DROPOUT, _feature_dropout),
    **dict.fromkeys(_FACTORIES, _factory),
    **dict.fromkeys(_LIKE, _like),
    **dict.fromkeys(_IN_PLACE, _in_place),
}
