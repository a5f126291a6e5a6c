"""Non-tensor data: one value for the whole batch, or a numpy object array with one value per element.

Both answer to the tensor methods that shape and index operations call, so that those need not ask what they got.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size
from torch.utils import _pytree as torch_pytree

import optree
from tdfunc._errors import explain
from tdfunc._shapes import as_size, index_size, normalize_index


class NonTensorBase:
    """What `NonTensorData` and `NonTensorStack` share: a numpy object array seen through tensor methods."""

    __slots__ = ("_array",)
    _array: np.ndarray[Any, Any]

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(explain(f"{type(self).__name__} is immutable: {name} cannot be assigned.", hint="make a new one."))

    @classmethod
    def _wrap(cls, array: np.ndarray[Any, Any]) -> Any:
        new = object.__new__(cls)
        object.__setattr__(new, "_array", array)
        return new

    @property
    def shape(self) -> Size:
        return Size(self._array.shape)

    @property
    def batch_size(self) -> Size:
        return Size(self._array.shape)

    @property
    def device(self) -> None:
        return None

    @property
    def ndim(self) -> int:
        return self._array.ndim

    def dim(self) -> int:
        return self._array.ndim

    def numel(self) -> int:
        return self._array.size

    def clone(self) -> Any:
        return self

    def _shaped(self, fn: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Any:
        return self._wrap(fn(self._array))

    def reshape(self, *shape: Any) -> Any:
        size = _sizes(shape)
        return self._shaped(lambda a: a.reshape(size))

    view = reshape

    def expand(self, *shape: Any) -> Any:
        size = _sizes(shape)
        lead = len(size) - self._array.ndim
        # torch spells "keep this dimension" -1, numpy does not know it.
        full = tuple(self._array.shape[i - lead] if s == -1 else s for i, s in enumerate(size))
        return self._shaped(lambda a: np.broadcast_to(a, full))

    def permute(self, *dims: Any) -> Any:
        order = _sizes(dims)
        return self._shaped(lambda a: a.transpose(order))

    def transpose(self, dim0: int, dim1: int) -> Any:
        return self._shaped(lambda a: a.swapaxes(dim0, dim1))

    def unsqueeze(self, dim: int) -> Any:
        return self._shaped(lambda a: np.expand_dims(a, dim))

    def squeeze(self, dim: int | None = None) -> Any:
        if dim is not None and self._array.shape[dim] != 1:
            return self
        return self._shaped(lambda a: a.squeeze(dim))

    def narrow(self, dim: int, start: int, length: int) -> Any:
        return self[(slice(None),) * (dim % self.ndim) + (slice(start, start + length),)]

    def index_select(self, dim: int, index: torch.Tensor) -> Any:
        return self[(slice(None),) * (dim % self.ndim) + (index,)]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        lead = (slice(None),) * (dim % self.ndim)
        return tuple(self[(*lead, i)] for i in range(self.shape[dim]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        total = self.shape[dim]
        parts = [min(sizes, total - i) for i in range(0, total, sizes)] if isinstance(sizes, int) else list(sizes)
        starts = np.cumsum([0, *parts])[:-1].tolist()
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, parts, strict=True))

    def __getitem__(self, index: Any) -> Any:
        parts = normalize_index(index, self.shape)
        index = tuple((i.cpu().numpy() if i.dim() else int(i)) if isinstance(i, torch.Tensor) else i for i in parts)
        return self._shaped(lambda a: _numpy_index(a, index))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTIONS.get(func)
        return NotImplemented if handler is None else handler(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Return the values as a nested list (one value for a batch of no dimensions)."""
        return self._array.tolist() if self._array.ndim else self._array[()]

    def __reduce__(self) -> Any:
        return type(self)._wrap, (self._array,)

    def __copy__(self) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and same_values(self._array, other._array)  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._array.shape))


class NonTensorData(NonTensorBase):
    """One non-tensor value, broadcast to the batch at no cost.

    Args:
        data: Any object but None.
        batch_size: The shape that it is seen with.

    Examples:
        >>> from tdfunc import NonTensorData, TensorDict
        >>> TensorDict({"n": NonTensorData(3)}, [2])["n"]
        3
    """

    __slots__ = ()

    def __init__(self, data: Any, batch_size: Any = None) -> None:
        cell = np.empty((), dtype=object)
        cell[()] = data.data if isinstance(data, NonTensorData) else data
        object.__setattr__(self, "_array", np.broadcast_to(cell, as_size(batch_size)))

    @property
    def data(self) -> Any:
        """The value."""
        array = self._array
        return array.base[()] if array.size == 0 and array.base is not None else array.flat[0]

    @property
    def value(self) -> Any:
        """What `td[key]` returns."""
        return self.data

    # Every shape operation keeps one value: only the shape is computed, on an array that holds nothing.
    def _shaped(self, fn: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Any:
        return NonTensorData(self.data, fn(np.broadcast_to(np.False_, self._array.shape)).shape)

    def __getitem__(self, index: Any) -> Any:
        return NonTensorData(self.data, index_size(normalize_index(index, self.shape), self.shape))

    def rebatch(self, size: Size) -> Any:
        return NonTensorData(self.data, size)

    def __repr__(self) -> str:
        return f"NonTensorData(data={self.data}, batch_size={self.shape}, device=None)"


class NonTensorStack(NonTensorBase):
    """One non-tensor value for each element of the batch.

    Args:
        *values: The values along the first dimension; nested lists give more dimensions with `from_nested`.
    """

    __slots__ = ()

    def __init__(self, *values: Any) -> None:
        array = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            array[i] = value.data if isinstance(value, NonTensorData) else value
        object.__setattr__(self, "_array", array)

    @classmethod
    def from_nested(cls, values: Any, ndim: int) -> "NonTensorStack":
        """Read the outer `ndim` levels of nested lists as dimensions; what is inside them is a value."""
        size: list[int] = []
        level = values
        for _ in range(ndim):
            size.append(len(level))
            level = level[0] if len(level) else []
        array = np.empty(tuple(size), dtype=object)
        for place in np.ndindex(*size):
            item = values
            for i in place:
                item = item[i]
            array[place] = item
        return cls._wrap(array)

    @property
    def value(self) -> Any:
        """What `td[key]` returns: always a nested list."""
        return self.tolist()

    def rebatch(self, size: Size) -> Any:
        """Keep the values; an operation along a dimension checks that they still fit."""
        return self

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        # A full index leaves one value: it is data of an empty batch, not a stack.
        return NonTensorData(result._array[()]) if result.ndim == 0 else result

    def __repr__(self) -> str:
        return f"NonTensorStack({self.tolist()}, batch_size={self.shape}, device=None)"


class StaticValues(NamedTuple):
    """Non-tensor values as pytree context: compared by value, hashed by their repr when they cannot be."""

    node: NonTensorBase

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValues) and _same_nodes(self.node, other.node)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        values = self.node._array.ravel()[:1] if isinstance(self.node, NonTensorData) else self.node._array.ravel()
        try:
            return hash(tuple(values))
        except TypeError:
            return hash(repr(values))


def same_values(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two object arrays have one shape and equal values; values that cannot be compared differ."""
    if a.shape != b.shape:
        return False
    try:
        return all(x is y or bool(x == y) for x, y in zip(a.flat, b.flat, strict=True))
    except (ValueError, TypeError, RuntimeError):
        return False


def _same_nodes(a: NonTensorBase, b: NonTensorBase) -> bool:
    # The batch of one broadcast value is not compared, as it is not for trees.
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return same_values(np.array([a.data, None], dtype=object)[:1], np.array([b.data, None], dtype=object)[:1])
    return type(a) is type(b) and same_values(a._array, b._array)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape


def _numpy_index(array: np.ndarray[Any, Any], index: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    # torch selects with ints first, numpy counts them among the advanced indices. The Ellipsis keeps an array an array.
    taking = [item for item in index if item is not None and not isinstance(item, bool)]
    array = array[(*(item if isinstance(item, int) else slice(None) for item in taking), ...)]
    return array[(*(item for item in index if not isinstance(item, int) or isinstance(item, bool)), ...)]


def _stack(nodes: Sequence[Any], dim: int = 0) -> Any:
    return NonTensorStack._wrap(np.stack([n._array for n in nodes], axis=dim))


def _cat(nodes: Sequence[Any], dim: int = 0) -> Any:
    if all(isinstance(n, NonTensorData) for n in nodes) and all(_same_nodes(nodes[0], n) for n in nodes[1:]):
        size = list(nodes[0].shape)
        size[dim] = sum(n.shape[dim] for n in nodes)
        return NonTensorData(nodes[0].data, size)
    return NonTensorStack._wrap(np.concatenate([n._array for n in nodes], axis=dim))


def _where(condition: torch.Tensor, a: Any, b: Any) -> Any:
    return NonTensorStack._wrap(np.where(condition.cpu().numpy(), a._array, b._array))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.where: _where,
    torch.unbind: lambda node, dim=0: node.unbind(dim),
    torch.split: lambda node, sizes, dim=0: node.split(sizes, dim),
}


def _flatten(node: Any) -> tuple[tuple[()], StaticValues]:
    return (), StaticValues(node)


def _unflatten(context: StaticValues, _: Any) -> Any:
    return context.node


def _dump(context: StaticValues) -> Any:
    node = context.node
    if isinstance(node, NonTensorData):
        return {"data": node.data, "batch_size": list(node.shape)}
    return {"stack": node.tolist(), "ndim": node.ndim}


def _restore(dumped: Any) -> StaticValues:
    if "stack" in dumped:
        return StaticValues(NonTensorStack.from_nested(dumped["stack"], dumped["ndim"]))
    return StaticValues(NonTensorData(dumped["data"], dumped["batch_size"]))


# Python mangles a name with two leading underscores inside a class body only, so this works at module level.
GLOBAL_NAMESPACE = optree.registry.__GLOBAL_NAMESPACE  # pyright: ignore

for _cls in (NonTensorData, NonTensorStack):
    torch_pytree.register_pytree_node(
        _cls,
        _flatten,
        lambda children, context: _unflatten(context, children),
        serialized_type_name=f"tdfunc.{_cls.__name__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_restore,
        flatten_with_keys_fn=lambda node: ((), StaticValues(node)),  # pyright: ignore[reportArgumentType]
    )
    optree.register_pytree_node(_cls, _flatten, _unflatten, namespace=GLOBAL_NAMESPACE)  # pyright: ignore[reportUnknownMemberType]
