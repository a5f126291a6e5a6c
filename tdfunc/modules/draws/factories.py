"""New tensors of random numbers by a key: `torch.rand`, `torch.randint` and their kin."""

from typing import Any

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.modules.draws.arguments import as_integer, as_number, as_out, as_shape, check
from tdfunc.modules.draws.draw import Draw, Server, Source, Standard
from tdfunc.random.draws import standard_normal, unit


def _factory(standard: Standard) -> Server:
    """Return the server of `torch.rand` or `torch.randn`."""

    def serve(
        mode: Source, func: Any, /, *sizes: Any, size: Any = None, dtype: Any = None, device: Any = None,
        requires_grad: bool = False, out: Any = None, **kw: Any,
    ) -> Tensor:  # fmt: skip
        if size is None:
            if sizes and isinstance(sizes[0], (tuple, list)):
                size = sizes[0]
            else:
                size = sizes
        draw = Draw(standard, as_shape(size), dtype_of(dtype, out, torch.get_default_dtype()))
        return finish(mode.draw(draw, device_of(device)), requires_grad, out)

    return serve


def _like(server: Server) -> Server:
    """Return the server of `torch.rand_like` and its kin, by the server of the function that takes a size."""

    def serve(
        mode: Source, func: Any, /, input: Tensor, *bounds: int, dtype: Any = None, device: Any = None, **options: Any
    ) -> Tensor:
        options |= {"size": input.shape, "dtype": dtype or input.dtype}
        return server(mode, func, *bounds, device=input.device if device is None else device, **options)

    return serve


def device_of(device: Any) -> torch.device:
    """Return the device of a new tensor; None is torch's default."""
    # Dynamo of torch 2.13 cannot call torch.get_default_device.
    if device is None:
        return torch.empty(0).device
    return torch.device(device)


def dtype_of(given: Any, out: Any, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a new tensor: the one that is given, or the one of `out`."""
    return given or (default if out is None else out.dtype)


def finish(drawn: Tensor, requires_grad: bool, out: Any = None) -> Tensor:
    """Return a new tensor, in `out` if it is given, that requires grad as asked."""
    drawn = as_out(drawn, out)
    if requires_grad:
        return drawn.requires_grad_()
    return drawn


def bounds_of(bounds: tuple[int, ...], low: int | None, high: int | None) -> tuple[int, int]:
    """Return the lowest integer and the end of a range whose ends are given by place or by name."""
    if high is not None:
        bounds = (*bounds, high)
    low = 0 if low is None else low
    if len(bounds) == 1:
        return (low, bounds[0])
    return (bounds[0], bounds[1])


def _randint(
    mode: Source, func: Any, /, *args: Any, low: Any = None, high: Any = None, size: Any = None,
    dtype: Any = None, device: Any = None, requires_grad: bool = False, out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    *bounds, size = args if size is None else (*args, size)
    low, high = map(as_number, bounds_of(tuple(bounds), low, high))
    dtype = dtype_of(dtype, out, torch.int64)
    check(torch.randint, None, low, high, (0,), dtype=dtype)
    drawn = random.randint(mode.draw_key(device_of(device)), as_shape(size), low, high)
    return finish(drawn.to(dtype), requires_grad, out)


def _randperm(
    mode: Source, func: Any, /, n: int, *, dtype: Any = None, device: Any = None, requires_grad: bool = False,
    out: Any = None, **kw: Any,
) -> Tensor:  # fmt: skip
    n = as_integer(n)
    dtype = dtype_of(dtype, out, torch.int64)
    check(torch.randperm, None, n, dtype=dtype)
    drawn = random.permutation(mode.draw_key(device_of(device)), n)
    return finish(drawn.to(dtype), requires_grad, out)


SERVERS: dict[Any, Server] = {
    torch.rand: _factory(unit),
    torch.randn: _factory(standard_normal),
    torch.rand_like: _like(_factory(unit)),
    torch.randn_like: _like(_factory(standard_normal)),
    torch.randint: _randint,
    torch.randint_like: _like(_randint),
    torch.randperm: _randperm,
}
