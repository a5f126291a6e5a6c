"""Functions of torch, and of libraries, that a trace cannot record as they are: what is recorded in their place."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from tdfunc.core.context import in_functorch, require_values
from tdfunc.core.errors import UnsupportedError, user_line
from tdfunc.modules.batching import grouped
from tdfunc.modules.batching.fold import takes_gradient

_FALLBACK = "transformers.grouped_mm_fallback"


def find(func: Any) -> Callable[..., Any] | None:
    """Return what serves a function, called with the function and the arguments of the call."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        # The library that defines it need not be there.
        return _experts if str(func) == _FALLBACK else None
    return _SERVED.get(func)


def _one_hot(func: Any, /, input: Tensor, num_classes: int = -1) -> Tensor:
    """Return `F.one_hot` without a look at values, with torch's check of them at each replay.

    torch leaves its check out for tensors without values, and inside vmap. Inside a gradient it reads the values of a
    tensor that has none.
    """
    if not in_functorch() or num_classes < 0 or input.dtype != torch.int64:
        # Also torch's errors, of another dtype and of a number of classes that only the values give.
        out = func(input, num_classes)
    else:
        numbers = torch.arange(num_classes, dtype=input.dtype, device=input.device)
        out = (input.unsqueeze(-1) == numbers).to(torch.int64)
    while _functorch.is_gradtrackingtensor(input):
        input = _functorch.get_unwrapped(input)
    if not _functorch.is_batchedtensor(input):
        inside = ((input >= 0) & (input < out.shape[-1])).all()
        torch.ops.aten._assert_async.msg(inside, "one_hot: classes must be at least 0 and below num_classes.")
    return out


def _products(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return the products of groups of rows, which torch can trace in bfloat16 alone."""
    if args[0].dtype not in grouped.UNTRACED:
        return func(*args, **kwargs)
    out = grouped.products(*args, **kwargs)
    return func(*args, **kwargs) if out is NotImplemented else out


def _experts(func: Any, /, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return the products of experts by the kernel that they use outside of a trace; their own has no derivative."""
    sizes = [size * input.element_size() for size in weight.shape[1:]]
    # What the kernel takes; in a trace, the library uses its own operation for everything.
    if input.dtype in grouped.UNTRACED and not any([size % 16 for size in sizes]):
        return grouped.products(input, weight, offs)
    if in_functorch() and (takes_gradient(input) or takes_gradient(weight)):
        raise UnsupportedError(
            "jit: these experts have no gradient in a record.",
            expected="weights of float32 or float16, and sizes of whole 16 bytes",
            got=f"{input.dtype}, {list(weight.shape)}, in {user_line()}",
            hint='load the model with experts_implementation="batched_mm", '
            'or call model.set_experts_implementation("batched_mm").',
        )
    return func(input, weight, offs)


def _is_all_true(func: Any, /, holds: Tensor) -> Any:
    """Return True for the checks of torch.distributions, which each replay makes anew."""
    if not _is_check(sys._getframe(1)):
        return func(holds)
    message = "torch.distributions: an argument or a value is outside of its constraint or support."
    require_values(holds, lambda: ValueError(message))
    return True


def _is_check(frame: FrameType | None) -> bool:
    """Return whether code of torch.distributions called torch, below frames of modes."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("tdfunc."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributions.distribution"


_SERVED: dict[Any, Callable[..., Any]] = {
    F.one_hot: _one_hot,
    F.grouped_mm: _products,
    vars(torch)["_grouped_mm"]: _products,
    vars(torch)["_is_all_true"]: _is_all_true,
}
