"""Reads and writes by index or mask, windows, and writes in place, by functions that torch can batch."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching import linear
from tdfunc.modules.batching.fold import by_decomposition, is_batched, takes_gradient, where_batched
from tdfunc.modules.batching.rule import Rule


def _take(input: Tensor, index: Tensor) -> Any:
    if index.dtype != torch.long:
        return NotImplemented
    return input.flatten()[index]


def _put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
    if index.dtype != torch.long or source.dtype != input.dtype:
        return NotImplemented
    flat = input.flatten().index_put((index.flatten(),), source.flatten(), accumulate)
    return flat.reshape(input.shape)


def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Fill the places of a mask with the numbers of a source, in order: place n + 1 of the mask has number n."""
    if mask.dtype != torch.bool or source.dtype != input.dtype or not source.numel():
        return NotImplemented
    mask, input = torch.broadcast_tensors(mask, input)
    places = mask.flatten().cumsum(0) - 1
    filled = source.flatten()[places.clamp(min=0)].reshape(input.shape)
    return torch.where(mask, filled, input)


def _masked_select(input: Tensor, mask: Tensor) -> Any:
    # The number of places that a mask of each member selects may differ.
    if mask.dtype != torch.bool or is_batched(mask):
        return NotImplemented
    mask, input = torch.broadcast_tensors(mask, input)
    return input[mask]


def _index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    # The rule of torch 2.13 takes an index without dimensions for one of another shape.
    if index.dim() or source.dim() != input.dim():
        return NotImplemented
    return input.index_copy(dim, index.reshape(1), source)


def _index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if index.dim() != 1 or source.dim() != input.dim() or source.shape[dim] != len(index):
        return NotImplemented
    places = index.long().reshape([-1 if i == dim % input.dim() else 1 for i in range(input.dim())])
    return input.scatter_reduce(dim, places.expand(source.shape), source, reduce, include_self=include_self)


def _set_item(mode: TorchFunctionMode, func: Any, /, input: Tensor, index: Any, value: Any) -> None:
    """Write one number where a mask of each member says so; torch looks the places up, whose number may differ."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and is_batched(index)
    if not is_mask or index.shape != input.shape[: index.dim()] or (isinstance(value, Tensor) and value.dim()):
        func(input, index, value)
        return
    mask = index.reshape(*index.shape, *[1] * (input.dim() - index.dim()))
    if isinstance(value, Tensor):
        input.copy_(torch.where(mask, value.to(input.dtype), input))
    else:
        input.masked_fill_(mask, value)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(len(input)), r)), dtype=torch.long, device=input.device)
    return input[places.reshape(-1, r)]


def _unfold(mode: TorchFunctionMode, func: Any, /, input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    # torch batches the windows, but not their gradient.
    if not is_batched(input) or not takes_gradient(input) or not input.dim():
        return func(input, dimension, size, step)
    dimension = dimension % input.dim()
    count = (input.shape[dimension] - size) // step + 1
    if size < 1 or count < 1:
        return func(input, dimension, size, step)
    if size == step:
        windows = input.narrow(dimension, 0, count * size).unflatten(dimension, (count, size))
        return windows.movedim(dimension + 1, -1)
    starts = torch.arange(count, device=input.device) * step
    places = starts[:, None] + torch.arange(size, device=input.device)
    windows = input.index_select(dimension, places.flatten()).unflatten(dimension, (count, size))
    return windows.movedim(dimension + 1, -1)


def _pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    longest = max([len(x) for x in sequences])
    padded: list[Tensor] = []
    for x in sequences:
        missing = longest - len(x)
        before, after = (0, missing) if padding_side == "right" else (missing, 0)
        padded.append(F.pad(x, (0, 0) * (x.dim() - 1) + (before, after), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


# -- methods that write in place: torch batches those that return a new tensor ----------------------------------------

# By name, without the underscore.
_METHODS = (
    *("addcdiv", "addcmul", "addmm", "addr", "lerp", "renorm", "tril", "triu"),
    *("clamp", "clip", "cumprod", "cumsum", "conj_physical", "fix", "negative", "square", "subtract"),
    *("floor_divide", "fmod", "remainder", "heaviside", "hypot", "ldexp", "nextafter", "xlogy"),
    *("igamma", "igammac", "polygamma", "float_power"),
    *("eq", "ne", "ge", "gt", "le", "lt"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("index_copy", "index_reduce", "masked_scatter", "put", "scatter"),
)


def _in_place(method: Any) -> Rule:
    """Return the rule of a method that writes in place, by the one that returns a new tensor."""

    def run(mode: TorchFunctionMode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_batched(input, args, kwargs):
            return func(input, *args, **kwargs)
        # The derivative may need the numbers that are written over.
        before = input.clone() if takes_gradient(input) else input
        rule = RULES.get(method, linear.RULES.get(method))
        if rule is None:
            result = method(before, *args, **kwargs)
        else:
            result = rule(mode, method, before, *args, **kwargs)
        # torch refuses to write into a tensor of another shape, or numbers that it cannot hold.
        if result.shape != input.shape or not torch.can_cast(result.dtype, input.dtype):
            return func(input, *args, **kwargs)
        return input.copy_(result)

    return run


def _fill_diagonal_(
    mode: TorchFunctionMode, func: Any, /, input: Tensor, fill_value: float, wrap: bool = False
) -> Tensor:
    if not is_batched(input) or input.dim() != 2 or wrap:
        return func(input, fill_value, wrap)
    return input.masked_fill_(torch.eye(*input.shape, dtype=torch.bool, device=input.device), fill_value)


RULES: dict[Any, Rule] = {
    torch.take: where_batched(_take),
    Tensor.take: where_batched(_take),
    torch.put: where_batched(_put),
    Tensor.put: where_batched(_put),
    torch.masked_scatter: where_batched(_masked_scatter),
    Tensor.masked_scatter: where_batched(_masked_scatter),
    torch.masked_select: where_batched(_masked_select),
    Tensor.masked_select: where_batched(_masked_select),
    torch.index_copy: where_batched(_index_copy),
    Tensor.index_copy: where_batched(_index_copy),
    torch.index_reduce: where_batched(_index_reduce),
    Tensor.index_reduce: where_batched(_index_reduce),
    Tensor.__setitem__: _set_item,
    torch.combinations: where_batched(_combinations),
    Tensor.unfold: _unfold,
    vars(torch._C)["_nn"].pad_sequence: where_batched(_pad_sequence),
    torch.column_stack: by_decomposition(torch.ops.aten.column_stack.default),
    **dict.fromkeys((torch.moveaxis, Tensor.moveaxis), where_batched(torch.movedim)),
    **dict.fromkeys((torch.diagflat, Tensor.diagflat), by_decomposition(torch.ops.aten.diagflat.default)),
    **{getattr(Tensor, f"{name}_"): _in_place(getattr(Tensor, name)) for name in _METHODS},
    torch.clamp_: _in_place(torch.clamp),
    torch.square_: _in_place(torch.square),
    Tensor.__ifloordiv__: _in_place(Tensor.floor_divide),
    Tensor.__imod__: _in_place(Tensor.remainder),
    Tensor.fill_diagonal_: _fill_diagonal_,
}
