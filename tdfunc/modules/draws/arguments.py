"""The arguments of random functions: read as torch reads them, and refused where torch refuses them."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.context import is_compiling, is_known, outside, require_values
from tdfunc.modules.draws.draw import Size


def as_out(drawn: Tensor, out: Any) -> Tensor:
    """Return random numbers, in the tensor of `out=` if there is one."""
    if out is None:
        return drawn
    if out.dtype != drawn.dtype:
        raise RuntimeError(f"dtype {drawn.dtype} does not match dtype of out parameter ({out.dtype})")
    # As torch does; `copy_` would broadcast.
    return (out if out.shape == drawn.shape else out.resize_(drawn.shape)).copy_(drawn)


def check(func: Any, like: Tensor | None, *args: Any, **kwargs: Any) -> None:
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
    try_draw(func, None if like is None else ((1,) * like.dim(), like.dtype), *args, **kwargs)


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
def as_number(value: Any) -> Any:
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


def as_integer(value: Any) -> Any:
    """Return an integer of Python, numpy or a tensor without dimensions as Python's; others as they are."""
    if isinstance(value, (int, torch.SymInt)) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def as_shape(sizes: Any) -> Size:
    """Return a shape whose sizes are integers of any kind."""
    return tuple([as_integer(size) for size in sizes])


# 1 and 1.0 are not the same to torch.
@functools.lru_cache(maxsize=1000, typed=True)
def try_draw(func: Any, like: tuple[Size, torch.dtype] | None, *args: Any, **kwargs: Any) -> None:
    """Draw few numbers, which nobody uses."""
    with outside():
        given = ()
        if like is not None:
            given = (torch.ones(like[0], dtype=like[1]),)
        func(*given, *args, generator=torch.Generator(), **kwargs)
