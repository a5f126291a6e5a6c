"""Methods of a tensor and functions of `torch.nn.init` that fill it with random numbers, by a key."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from tdfunc import random
from tdfunc.core.context import is_compiling
from tdfunc.modules.batching.fold import is_batched
from tdfunc.modules.draws.arguments import as_number, check
from tdfunc.modules.draws.draw import Draw, Server, Source
from tdfunc.modules.draws.factories import bounds_of
from tdfunc.random.draws import standard_normal, unit


def _empty(mode: Source, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
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


def _new(mode: Source, func: Any, /, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Serve `tensor.new(sizes)`; called with data, it has the numbers of that."""
    if all([isinstance(x, (int, torch.Size)) for x in args]):
        return _empty(mode, func, self, *args, **kwargs)
    return func(self, *args, **kwargs)


def _uniform_(mode: Source, func: Any, /, self: Tensor, a: float = 0, b: float = 1, **kw: float) -> Tensor:
    low = as_number(kw.get("from", a))
    high = as_number(kw.get("to", b))
    check(func, self, low, high)
    return self.copy_(mode.draw(Draw(unit, tuple(self.shape), self.dtype, high - low, low), self.device))


def _normal_(mode: Source, func: Any, /, self: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    mean = as_number(mean)
    std = as_number(std)
    check(func, self, mean, std)
    return self.copy_(mode.draw(Draw(standard_normal, tuple(self.shape), self.dtype, std, mean), self.device))


def _log_normal_(mode: Source, func: Any, /, self: Tensor, mean: float = 1, std: float = 2) -> Tensor:
    mean = as_number(mean)
    std = as_number(std)
    check(func, self, mean, std)
    # The exponential of a number rounded to 16 bits is wrong by more than it is rounded itself.
    dtype = torch.promote_types(self.dtype, torch.float32)
    return self.copy_(mode.draw(Draw(standard_normal, tuple(self.shape), dtype, std, mean), self.device).exp())


def _exponential_(mode: Source, func: Any, /, self: Tensor, lambd: float = 1) -> Tensor:
    lambd = as_number(lambd)
    check(func, self, lambd)
    return self.copy_(random.exponential(mode.draw_key(self.device), tuple(self.shape), dtype=self.dtype) / lambd)


def _cauchy_(mode: Source, func: Any, /, self: Tensor, median: float = 0, sigma: float = 1) -> Tensor:
    median = as_number(median)
    sigma = as_number(sigma)
    check(func, self, median, sigma)
    # The quotient of two normal variables.
    above, below = mode.draw(Draw(standard_normal, (2, *self.shape), self.dtype), self.device)
    return self.copy_(above / below * sigma + median)


def _geometric_(mode: Source, func: Any, /, self: Tensor, p: float | Tensor) -> Tensor:
    p = as_number(p)
    check(func, self, p)
    # The first success, in whole trials, of a process whose waiting time is exponential.
    waits = random.exponential(mode.draw_key(self.device), tuple(self.shape), dtype=torch.float64)
    scale = -(torch.log1p(-p) if isinstance(p, Tensor) else math.log1p(-p))
    return self.copy_((waits / scale).ceil())


def _random_(mode: Source, func: Any, /, self: Tensor, *bounds: int, **kw: int) -> Tensor:
    bounds = tuple(map(as_number, bounds))
    kw = {name: as_number(value) for name, value in kw.items()}
    check(func, self, *bounds, **kw)
    if bounds or kw:
        low, high = bounds_of(bounds, kw.get("from"), kw.get("to"))
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


def _bernoulli_(mode: Source, func: Any, /, self: Tensor, p: Any = 0.5) -> Tensor:
    # A tensor without dimensions is a probability for each element, as tensors of other shapes are.
    check(func, self, p)
    if isinstance(p, Tensor):
        check(torch.bernoulli, p)
    if isinstance(p, Tensor):
        p = p.expand(self.shape)
    return self.copy_(random.bernoulli(mode.draw_key(self.device), p, tuple(self.shape)))


def _without_grad(method: Any, server: Server) -> Server:
    """Return the server of a function of `torch.nn.init`, by the server of the method of tensors that it calls."""

    def serve(mode: Source, _: Any, /, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return server(mode, method, tensor, *args, **kwargs)

    return serve


_fill_uniform = _without_grad(Tensor.uniform_, _uniform_)


def _kaiming_uniform_(
    mode: Source, func: Any, /, tensor: Tensor, a: float = 0, *, nonlinearity: Any = "leaky_relu", **options: Any
) -> Tensor:
    """Draw as torch's own function, which calls ten methods of the tensor that each come to the mode."""
    if not tensor.numel():
        # It warns.
        return func(tensor, a, nonlinearity=nonlinearity, **options)
    fan = init._calculate_correct_fan(tensor, options.get("mode", "fan_in"))
    bound = math.sqrt(3.0) * (init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    return _fill_uniform(mode, func, tensor, -bound, bound)


SERVERS: dict[Any, Server] = {
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
    init.kaiming_uniform_: _kaiming_uniform_,
    init.uniform_: _fill_uniform,
    init.normal_: _without_grad(Tensor.normal_, _normal_),
}
