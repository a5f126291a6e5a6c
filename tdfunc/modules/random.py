"""Random numbers for one call: seeds and generators served to the random functions that a forward calls.

A `TorchFunctionMode` is active for the call alone, so nothing process-wide changes. Numbers are drawn outside every
transform: under `vmap` each member draws from its own generator, so that it equals a loop over the members. Rare
functions that draw are not served; `apply(..., rng=)` refuses them.
"""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from tdfunc.core.context import is_compiling
from tdfunc.core.errors import UnsupportedError, error

Seed: TypeAlias = "int | torch.Generator | Sequence[torch.Generator] | None"
Server: TypeAlias = Callable[..., Any]
_CHECKPOINT: Any = vars(checkpoint)


class seeded(TorchFunctionMode):
    """Serve the random functions called inside from one generator, or from one for each member of a vmap.

    Args:
        rng: A seed, a generator, or a generator for each member.
        level: The vmap level over the members, when there are several generators.
        strict: Whether functions that cannot be given a generator raise, rather than draw from the default one.
    """

    def __init__(self, rng: Any, level: int | None = None, *, strict: bool = False) -> None:
        super().__init__()
        self._generators = _generators(rng)
        if level is None and len(self._generators) != 1:
            raise error(
                TypeError,
                "rng: one call draws from one generator.",
                expected="a seed or a torch.Generator",
                got=f"{len(self._generators)} generators",
                hint="tdfunc.Ensemble(apply)(stacked, x, rng=seed) gives each member its own.",
            )
        self._level, self._strict = level, strict
        self._checkpoints = 0 if is_compiling() else _count_checkpoints()
        self.draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._strict and func in _UNSERVED and _UNSERVED[func](*args, **kwargs):
            raise UnsupportedError(
                f"apply: {func.__name__} draws random numbers and cannot be given a generator.",
                expected="draws by F.dropout, torch.rand and the other functions that take one",
                hint='leave rng= out (torch\'s default generator), or use tdfunc.Ensemble(apply, how="loop").',
            )
        server = _SERVERS.get(func)
        if server is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        return server(self, func, *args, **kwargs)

    def draw(self, make: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Return one draw for a call, or one for each member as a batched tensor."""
        self.draws += 1
        if is_compiling():
            return make(self._generators[0])
        if _count_checkpoints() > self._checkpoints:
            raise UnsupportedError(
                "rng: a draw inside torch.utils.checkpoint cannot be repeated when backward runs it again.",
                expected="draws outside of the checkpointed part",
                got="a draw by a seed or a generator inside it",
                hint="leave rng= out (torch's default generator, which checkpoint puts back), or the checkpoint.",
            )
        with temporarily_clear_interpreter_stack(), torch.no_grad():
            if self._level is None:
                return make(self._generators[0])
            stacked = torch.stack([make(generator) for generator in self._generators])
        return _functorch._add_batch_dim(stacked, 0, self._level)


def _count_checkpoints() -> int:
    """Return how many functions of `torch.utils.checkpoint` are being called: nothing else shows that one is."""
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_globals is _CHECKPOINT
        frame = frame.f_back
    return count


def _generators(rng: Any) -> list[torch.Generator]:
    if isinstance(rng, torch.Generator):
        return [rng]
    if isinstance(rng, (list, tuple)) and all(isinstance(g, torch.Generator) for g in rng):
        return list(rng)
    if isinstance(rng, int) and not isinstance(rng, bool):
        if get_proxy_mode() is not None:
            raise UnsupportedError(
                "rng: a seed inside a traced function counts for its first call only.",
                expected="a generator that is an argument of the function",
                hint="pass a torch.Generator to the traced function, and give it as rng=.",
            )
        return [torch.Generator().manual_seed(rng)]
    raise error(TypeError, "rng must be a seed or a torch.Generator.", got=repr(rng))


def refuse_traced_members() -> None:
    """Raise while `jit` or `make_fx` records: generators of members are made by Python, and so once."""
    if get_proxy_mode() is not None:
        raise UnsupportedError(
            "rng: the generators of the members cannot be made inside a traced function.",
            expected="an ensemble outside of the trace, or no rng",
            got="rng for members, which are seeded at the first call only",
            hint='torch.vmap(fn, randomness="different") of the function of one model, without rng, draws anew in '
            "each replay; or leave tdfunc.jit out.",
        )


def member_generators(seed: int, stop: int, start: int = 0) -> list[torch.Generator]:
    """Return generators for members start to stop, each seeded by (seed, i) alone: how many there are changes none."""
    refuse_traced_members()
    return [torch.Generator().manual_seed(member_seed(seed, i)) for i in range(start, stop)]


def member_seed(seed: int, member: int) -> int:
    """Mix a seed and a member's number into one 63-bit seed (splitmix64 of Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    z = ((seed & mask) * 0x9E3779B97F4A7C15 + (member + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _uniform(mode: seeded, shape: Sequence[int], x: Tensor) -> Tensor:
    """Draw uniform float32 numbers of a shape on the device of x; generators are on the CPU unless given otherwise."""
    size, device = tuple(shape), x.device
    return mode.draw(lambda g: torch.rand(size, generator=g, device=g.device, dtype=torch.float32).to(device))


def _dropout(
    mode: seeded, func: Any, /, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # torch checks p only after the dispatch that leads here.
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    shape = tuple(input.shape)
    if func is not F.dropout and func is not F.alpha_dropout:
        # Whole channels are dropped: one draw for each, broadcast over the trailing dimensions. Without a batch
        # dimension the channels come first, except for dropout2d, which reads three dimensions as (N, C, L).
        lead = 1 if (func, input.dim()) in _UNBATCHED else 2
        shape = (*shape[:lead], *[1] * (input.dim() - lead))
    keep = _uniform(mode, shape, input) >= p
    if func in _ALPHA and p < 1.0:
        # Klambauer et al., Self-Normalizing Neural Networks (2017), section 3: dropped units take the value alpha'.
        alpha = -1.7580993408473766
        a = ((1 - p) * (1 + p * alpha**2)) ** -0.5
        out = a * torch.where(keep, input, torch.full_like(input, alpha)) - a * alpha * p
        return input.copy_(out) if inplace else out
    # With p = 1 nothing is kept, whatever the scale.
    scale = keep.to(input.dtype) / (1.0 - p or 1.0)
    return input.mul_(scale) if inplace else input * scale


_UNBATCHED = {(F.dropout1d, 2), (F.dropout3d, 4)}
_ALPHA = {F.alpha_dropout, F.feature_alpha_dropout}


def _alpha_dropout(
    mode: seeded, func: Any, /, input: Tensor, p: float = 0.5, training: bool = False, *rest: Any, **kw: Any
) -> Tensor:
    return _dropout(mode, func, input, p, training, *rest, **kw)


def _factory(
    mode: seeded, func: Any, /, *args: Any, device: Any = None, requires_grad: bool = False, **kw: Any
) -> Tensor:
    device = torch.get_default_device() if device is None else device
    out = mode.draw(lambda g: func(*args, generator=g, device=g.device, **kw)).to(device)
    return out.requires_grad_() if requires_grad else out


def _like(
    mode: seeded, func: Any, /, input: Tensor, *args: Any, dtype: Any = None, device: Any = None, layout: Any = None,
    requires_grad: bool = False, pin_memory: bool = False, memory_format: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    base, size = getattr(torch, func.__name__.removesuffix("_like")), tuple(input.shape)
    dtype, device = dtype or input.dtype, device or input.device
    out = mode.draw(lambda g: base(*args, size=size, generator=g, device=g.device, dtype=dtype, **kw).to(device))
    return out.requires_grad_() if requires_grad else out


def _bernoulli(mode: seeded, func: Any, /, input: Tensor, p: float | None = None, *, out: Any = None) -> Tensor:
    level = input if p is None else torch.full_like(input, p)
    drawn = (_uniform(mode, input.shape, input) < level).to(input.dtype)
    return drawn if out is None else out.copy_(drawn)


def _multinomial(
    mode: seeded, func: Any, /, input: Tensor, num_samples: int, replacement: bool = False, *, out: Any = None
) -> Tensor:
    shape = (*input.shape[:-1], num_samples, input.shape[-1]) if replacement else input.shape
    noise = _uniform(mode, shape, input).clamp_min(1e-38)
    weights = input.unsqueeze(-2) if replacement else input
    # The largest of log w + Gumbel noise has the probability w; the k largest are k draws without replacement
    # (Kool et al., Stochastic Beams and Where to Find Them, 2019).
    scores = weights.log() - noise.log().neg().log()
    drawn = scores.argmax(-1) if replacement else scores.topk(num_samples, -1).indices
    return drawn if out is None else out.copy_(drawn)


def _normal(mode: seeded, func: Any, /, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if size is not None:
        return mean + std * _factory(mode, torch.randn, size, **kwargs)
    like: Tensor = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))
    dtype, device = like.dtype, like.device
    noise = mode.draw(lambda g: torch.randn(tuple(shape), generator=g, device=g.device, dtype=dtype).to(device))
    return mean + std * noise


def _in_place(mode: seeded, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    """Serve `x.normal_()` and `nn.init.normal_(x)`: draw into an empty tensor, and copy."""
    name = "tensor" if "tensor" in kwargs else "self"
    target: Tensor = args[0] if args else kwargs[name]
    rest = {key: value for key, value in kwargs.items() if key != name}
    shape, dtype = tuple(target.shape), target.dtype
    drawn = mode.draw(lambda g: func(torch.empty(shape, dtype=dtype, device=g.device), *args[1:], generator=g, **rest))
    if isinstance(func, types.FunctionType):
        with torch.no_grad():
            return target.copy_(drawn)
    return target.copy_(drawn)


def _bernoulli_(mode: seeded, func: Any, /, self: Tensor, p: Any = 0.5) -> Tensor:
    level = p if isinstance(p, Tensor) else torch.full((), p, device=self.device)
    return self.copy_((_uniform(mode, self.shape, self) < level).to(self.dtype))


_INIT = [
    f
    for f in vars(init).values()
    if isinstance(f, types.FunctionType) and "generator" in inspect.signature(f).parameters
]
_SERVERS: dict[Any, Server] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    **dict.fromkeys(_ALPHA, _alpha_dropout),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
    torch.normal: _normal,
    **dict.fromkeys((torch.rand, torch.randn, torch.randint, torch.randperm), _factory),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _like),
    **dict.fromkeys(
        (Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_, Tensor.cauchy_, Tensor.log_normal_,
         Tensor.geometric_, *_INIT), _in_place,
    ),
    Tensor.bernoulli_: _bernoulli_,
}  # fmt: skip


def _recurs(*args: Any, **_: Any) -> bool:
    # (input, hx, weights, has_biases, num_layers, dropout, train, ...), or with batch_sizes before hx.
    numbers = [a for a in args if isinstance(a, (bool, int, float))]
    return len(numbers) > 3 and numbers[2] > 0.0 and bool(numbers[3])


# Functions whose draws cannot be served, and whether a call of them draws.
_UNSERVED: dict[Any, Callable[..., bool]] = {
    F.scaled_dot_product_attention: lambda *args, **kw: (args[4] if len(args) > 4 else kw.get("dropout_p", 0.0)) > 0.0,
    F.multi_head_attention_forward: lambda *args, training=True, **kw: training
    and (args[10] if len(args) > 10 else kw["dropout_p"]) > 0.0,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurs),
    **dict.fromkeys((F.rrelu, torch.rrelu), lambda input, lower=0, upper=0, training=False, inplace=False: training),
    **dict.fromkeys(
        [getattr(torch, f"{name}dropout{end}") for name in ("", "feature_", "alpha_", "feature_alpha_")
         for end in ("", "_")], lambda input, p, train: train and p > 0.0,
    ),
    **dict.fromkeys(
        (F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d,
         F.fractional_max_pool3d_with_indices, torch.poisson, torch.binomial,
         *[getattr(torch, name) for name in ("_standard_gamma", "_sample_dirichlet")]), lambda *_, **__: True,
    ),
}  # fmt: skip
