"""`__torch_function__`: torch's own functions on trees."""

from collections.abc import Callable
from typing import Any

import torch

from tdfunc._collection import LeafOp, TensorCollection
from tdfunc._errors import explain
from tdfunc.ops import cast, index, join, shape
from tdfunc.ops._generate import BINARY, BINARY_LEAFWISE, UNARY, UNARY_LEAFWISE
from tdfunc.ops.pointwise_base import binary, reversed_binary, unary
from tdfunc.ops.reduce import reduce, truth


def _like(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tree, *args, **kwargs: tree._map(LeafOp(fn.__name__, lambda x: fn(x, *args, **kwargs)))


def _unary(name: str) -> Callable[..., Any]:
    kernel = f"_foreach_{name}" if name in UNARY else None
    return lambda tree, *args, **kwargs: unary(tree, name, kernel, *args, **kwargs)


def _binary(name: str) -> Callable[..., Any]:
    kernel = f"_foreach_{name}" if name in BINARY else None

    def call(a: Any, b: Any, **kwargs: Any) -> Any:
        return binary(a, b, name, kernel, **kwargs) if isinstance(a, TensorCollection) else reversed_binary(b, a, name)

    return call


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(a, TensorCollection):
        return index.where(~condition, b, a)
    return index.where(condition, a, b)


def _to_tuple(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tree, *shape: fn(tree, tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: lambda tensors, dim=0: join.stack(tensors, dim),
    torch.cat: lambda tensors, dim=0: join.cat(tensors, dim),
    torch.concat: lambda tensors, dim=0: join.cat(tensors, dim),
    torch.unbind: lambda tree, dim=0: index.unbind(tree, dim),
    torch.split: lambda tree, split_size_or_sections, dim=0: shape.split(tree, split_size_or_sections, dim),
    torch.chunk: lambda tree, chunks, dim=0: shape.chunk(tree, chunks, dim),
    torch.gather: lambda tree, dim, index_: index.gather(tree, dim, index_),
    torch.masked_select: lambda tree, mask: index.masked_select(tree, mask),
    torch.where: _where,
    torch.reshape: _to_tuple(shape.reshape),
    torch.permute: _to_tuple(shape.permute),
    torch.transpose: lambda tree, dim0, dim1: shape.transpose(tree, dim0, dim1),
    torch.squeeze: lambda tree, dim=None: shape.squeeze(tree, dim),
    torch.unsqueeze: lambda tree, dim: shape.unsqueeze(tree, dim),
    torch.flatten: lambda tree, start_dim=0, end_dim=-1: shape.flatten(tree, start_dim, end_dim),
    torch.unflatten: lambda tree, dim, sizes: shape.unflatten(tree, dim, sizes),
    torch.clone: lambda tree, **_: cast.clone(tree, True),
    torch.all: lambda tree, dim=None: truth(tree, dim, torch.all, all),
    torch.any: lambda tree, dim=None: truth(tree, dim, torch.any, any),
}
for _fn in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like):
    FUNCTIONS[_fn] = _like(_fn)
for _name in UNARY | UNARY_LEAFWISE:
    FUNCTIONS[getattr(torch, _name)] = _unary(_name)
for _name in BINARY | BINARY_LEAFWISE:
    FUNCTIONS[getattr(torch, _name)] = _binary(_name)
for _name in ("sum", "mean", "prod", "amax", "amin", "std", "var"):
    FUNCTIONS[getattr(torch, _name)] = lambda tree, dim=None, keepdim=False, name=_name, **kw: reduce(tree, name, dim, keepdim, None, **kw)


class DispatchMethods(TensorCollection):
    """The hook that torch calls when a function of its own is given a tree."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        # Operators with a tensor on the left arrive as the tensor's method, and Python then asks the tree.
        if handler is None:
            if func in _TENSOR_METHODS:
                return NotImplemented
            name = getattr(func, "__name__", repr(func))
            raise TypeError(
                explain(f"torch.{name} is not defined on trees.", hint=f"td.apply(lambda x: torch.{name}(x, ...)) calls it on every leaf.")
            )
        return handler(*args, **(kwargs or {}))


_TENSOR_METHODS = {
    value for key in dir(torch.Tensor) if key.startswith("__") and callable(value := getattr(torch.Tensor, key)) and getattr(value, "__hash__", None)
}
for _key, _name in {"__rsub__": "sub", "__rtruediv__": "div"}.items():
    _TENSOR_METHODS.discard(getattr(torch.Tensor, _key))
