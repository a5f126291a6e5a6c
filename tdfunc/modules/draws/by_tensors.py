"""Draws whose parameters are tensors, by a key: `torch.bernoulli`, `torch.multinomial`, `torch.normal`."""

import math
from typing import Any

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.core.context import is_compiling, require_values
from tdfunc.modules.draws.arguments import as_integer, as_number, as_out, as_shape, check, try_draw
from tdfunc.modules.draws.draw import Draw, Server, Source
from tdfunc.modules.draws.factories import device_of, dtype_of, finish
from tdfunc.random.draws import standard_normal


def _bernoulli(mode: Source, func: Any, /, input: Tensor, p: float | None = None, *, out: Any = None) -> Tensor:
    p = as_number(p)
    check(torch.bernoulli, input, *() if p is None else (p,))
    key = mode.draw_key(input.device)
    if p is None:
        drawn = random.bernoulli(key, input)
    else:
        drawn = random.bernoulli(key, p, tuple(input.shape))
    return as_out(drawn.to(dtype_of(None, out, input.dtype)), out)


def _multinomial(
    mode: Source, func: Any, /, input: Tensor, num_samples: int, replacement: bool = False, *, out: Any = None
) -> Tensor:
    num_samples = as_integer(num_samples)
    if not is_compiling():
        row = ((1,) * (input.dim() - 1) + tuple(input.shape[-1:]), input.dtype)
        try_draw(torch.multinomial, row, num_samples, replacement)
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
    return as_out(drawn, out)


def _normal_of(
    mode: Source, func: Any, /, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None,
    requires_grad: bool = False, out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    if size is not None:
        shape = as_shape(size)
        # With a size both are numbers.
        mean = as_number(mean)
        std = as_number(std)
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
        check(torch.normal, None, 0.0, std, (0,))
    noise = mode.draw(Draw(standard_normal, shape, dtype or torch.get_default_dtype()), device_of(device))
    return finish((mean + std * noise).to(noise.dtype), requires_grad, out)


SERVERS: dict[Any, Server] = {
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
    torch.normal: _normal_of,
}
