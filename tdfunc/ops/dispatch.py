"""`__torch_function__`: torch's own functions on trees."""

from collections.abc import Callable
from typing import Any

import torch

from tdfunc._collection import LeafOp, TensorCollection
from tdfunc._errors import UnsupportedError, explain
from tdfunc.ops import arithmetic, cast, index, join, rearrange, shape
from tdfunc.ops._generate import (
    BINARY,
    BINARY_LEAFWISE,
    COMMUTATIVE,
    OPERATORS,
    REVERSED,
    UNARY,
    UNARY_LEAFWISE,
)
from tdfunc.ops.pointwise_base import binary, reversed_binary, unary
from tdfunc.ops.reduce import extreme, extremes, reduce, truth

REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "std", "var", "nansum", "nanmean", "logsumexp")
# Parameters are called as torch calls them, since both positions and names may be used.
Handler = Callable[..., Any]


def _like(fn: Handler) -> Handler:
    def call(input: TensorCollection, *args: Any, **kwargs: Any) -> Any:
        return input._map(LeafOp(fn.__name__, lambda x: fn(x, *args, **kwargs)))

    return call


def _unary(name: str) -> Handler:
    kernel = f"_foreach_{name}" if name in UNARY else None

    def call(input: TensorCollection, **kwargs: Any) -> Any:
        return unary(input, name, kernel, **kwargs)

    return call


def _binary(name: str) -> Handler:
    kernel = f"_foreach_{name}" if name in BINARY else None

    def call(input: Any, other: Any, **kwargs: Any) -> Any:
        if isinstance(input, TensorCollection):
            return binary(input, other, name, kernel, **kwargs)
        return reversed_binary(other, input, name)

    return call


def _swapped(handler: Handler) -> Handler:
    def call(input: Any, other: Any) -> Any:
        return handler(other, input)

    return call


def _where(condition: Any, input: Any, other: Any) -> Any:
    if isinstance(input, TensorCollection):
        return index.where(condition, input, other)
    return index.where(~condition, other, input)


def _all(input: TensorCollection, dim: Any = None) -> Any:
    return truth(input, dim, "all")


def _any(input: TensorCollection, dim: Any = None) -> Any:
    return truth(input, dim, "any")


def _reduction(name: str) -> Handler:
    def call(input: TensorCollection, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return reduce(input, name, dim, keepdim, None, **kwargs)

    return call


def _along(name: str) -> Handler:
    return lambda input, dim, **kwargs: arithmetic.along(input, name, dim, **kwargs)


def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    return shape.split(tensor, split_size_or_sections, dim)


def _repeat_interleave(input: Any, repeats: Any, dim: Any = None, *, output_size: int | None = None) -> Any:
    return rearrange.repeat_interleave(input, repeats, dim, output_size)


def _functions() -> dict[Any, Handler]:
    table: dict[Any, Handler] = {
        torch.stack: lambda tensors, dim=0: join.stack(tensors, dim),
        torch.unbind: lambda input, dim=0: index.unbind(input, dim),
        torch.split: _split,
        torch.chunk: lambda input, chunks, dim=0: shape.chunk(input, chunks, dim),
        torch.gather: lambda input, dim, index: _gather(input, dim, index),
        torch.masked_select: lambda input, mask: index.masked_select(input, mask),
        torch.where: _where,
        torch.reshape: lambda input, shape: _reshape(input, shape),
        torch.permute: lambda input, dims: shape.permute(input, tuple(dims)),
        torch.transpose: lambda input, dim0, dim1: shape.transpose(input, dim0, dim1),
        torch.squeeze: lambda input, dim=None: shape.squeeze(input, dim),
        torch.unsqueeze: lambda input, dim: shape.unsqueeze(input, dim),
        torch.flatten: lambda input, start_dim=0, end_dim=-1: shape.flatten(input, start_dim, end_dim),
        torch.unflatten: lambda input, dim, sizes: shape.unflatten(input, dim, sizes),
        torch.broadcast_to: lambda input, size: shape.expand(input, tuple(size)),
        torch.narrow: lambda input, dim, start, length: rearrange.narrow(input, dim, start, length),
        torch.tensor_split: lambda input, sections, dim=0: rearrange.tensor_split(input, sections, dim),
        torch.flip: lambda input, dims: rearrange.flip(input, dims),
        torch.fliplr: lambda input: rearrange.flip(input, 1),
        torch.flipud: lambda input: rearrange.flip(input, 0),
        torch.roll: lambda input, shifts, dims=None: rearrange.roll(input, shifts, dims),
        torch.rot90: lambda input, k=1, dims=(0, 1): rearrange.rot90(input, k, dims),
        torch.tile: lambda input, dims: rearrange.tile(input, tuple(dims)),
        torch.repeat_interleave: _repeat_interleave,
        torch.movedim: lambda input, source, destination: rearrange.movedim(input, source, destination),
        torch.moveaxis: lambda input, source, destination: rearrange.movedim(input, source, destination),
        torch.swapaxes: lambda input, axis0, axis1: shape.transpose(input, axis0, axis1),
        torch.swapdims: lambda input, dim0, dim1: shape.transpose(input, dim0, dim1),
        torch.clone: lambda input: cast.clone(input, True),
        torch.detach: lambda input: cast.detach(input),
        torch.all: _all,
        torch.any: _any,
    }
    for fn in (torch.cat, torch.concat, torch.concatenate):
        table[fn] = lambda tensors, dim=0: join.cat(tensors, dim)
    for fn in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like):
        table[fn] = _like(fn)
    for fn in (torch.rand_like, torch.randn_like, torch.randint_like):
        table[fn] = _like(fn)
    table |= {getattr(torch, name): _unary(name) for name in UNARY | UNARY_LEAFWISE}
    table |= {getattr(torch, name): _binary(name) for name in BINARY | BINARY_LEAFWISE}
    table |= {getattr(torch, name): _along(name) for name in ("softmax", "cumsum", "cumprod")}
    table |= {
        torch.clamp: lambda input, min=None, max=None: arithmetic.clamp(input, min, max),
        torch.lerp: lambda input, end, weight: arithmetic.combined(input, "lerp", torch.lerp, (end, weight)),
        torch.masked_fill: lambda input, mask, value: arithmetic.masked_fill(input, mask, value),
        torch.nan_to_num: _like(torch.nan_to_num),
        torch.max: lambda input, dim=None, keepdim=False: extreme(input, "max", dim, keepdim, None, True),
        torch.min: lambda input, dim=None, keepdim=False: extreme(input, "min", dim, keepdim, None, True),
        torch.argmax: lambda input, dim=None, keepdim=False: extremes(input, "argmax", dim, keepdim),
        torch.argmin: lambda input, dim=None, keepdim=False: extremes(input, "argmin", dim, keepdim),
    }
    table |= {getattr(torch, name): _reduction(name) for name in REDUCTIONS}
    return table


def _gather(tree: Any, dim: int, positions: Any) -> Any:
    return index.gather(tree, dim, positions)


def _reshape(tree: Any, size: Any) -> Any:
    return shape.reshape(tree, tuple(size))


def _methods() -> dict[str, Handler]:
    named = ("add", "sub", "mul", "div", "pow", "remainder", "eq", "ne", "lt", "le", "gt", "ge")
    table = {name: _binary(name) for name in named} | {m: _binary(name) for m, name in OPERATORS.items()}
    table |= {"__eq__": _binary("eq"), "__ne__": _binary("ne"), "__rdiv__": _swapped(_binary("div"))}
    return table | {m: _swapped(_binary(name)) for m, name in (REVERSED | COMMUTATIVE).items()}


FUNCTIONS = _functions()
# An operator with a tensor on one side arrives as the tensor's method. By name, as dynamo has objects of its own
# for the methods that torch writes in Python.
METHODS = _methods()


class DispatchMethods(TensorCollection):
    """The hook that torch calls when a function of its own is given a tree."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        name = getattr(func, "__name__", repr(func))
        if handler is None and getattr(torch.Tensor, name, None) is func:
            handler = METHODS.get(name)
            # Python then asks the tree.
            if handler is None:
                return NotImplemented
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        hint = f"td.apply(lambda x: torch.{name}(x, ...)) calls it on every leaf."
        raise UnsupportedError(explain(f"torch.{name} is not defined on trees.", hint=hint))
