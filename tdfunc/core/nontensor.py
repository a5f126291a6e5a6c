"""Non-tensor data: one value for the whole batch, or a numpy object array with one value per element.

Both have the tensor methods that shape and index operations call, so that those treat them as tensors.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Size
from torch.utils import _pytree as torch_pytree

from tdfunc.core.context import has_values
from tdfunc.core.errors import BatchSizeError, ImmutableError, LeafMismatchError, error
from tdfunc.core.shapes import as_size, dim_index, index_size, normalize_index


class NonTensorBase:
    """The base of `NonTensorData` and `NonTensorStack`: values behind tensor methods."""

    __slots__ = ()
    # Of a stack that is not laid out along the batch of its tree, the number of dimensions that its array has after the
    # batch along which it is; `_LOST` where that is not known. None for data that are laid out along the batch.
    _features: int | None = None
    # The values as an object array of the batch's size.
    _array: np.ndarray[Any, Any]

    def __setattr__(self, name: str, value: object) -> None:
        raise ImmutableError(f"{type(self).__name__} is immutable: .{name} = value.", hint="make a new one.")

    @property
    def shape(self) -> Size:
        raise NotImplementedError

    @property
    def batch_size(self) -> Size:
        return self.shape

    def dim(self) -> int:
        return len(self.shape)

    def check_batch(self, size: Size, key: str) -> None:
        """Raise unless the values are laid out along this batch; inside vmap the values of a stack are not."""
        if self._features is not None or self.shape[: len(size)] != size:
            raise BatchSizeError(
                f"{key!r}: the values are not laid out along the batch of their tree.",
                expected=f"shape {list(size)} + (...)",
                got=f"shape {list(self.shape)}",
                hint=_HINT,
            )

    def resized(self, size: Size, key: str) -> Any:
        """Follow an operation on the leaves that changes the batch size and cannot be done to values."""
        new = self.rebatch(size)
        if new.shape != size:
            raise LeafMismatchError(
                f"{key!r} has a value for each row, which the operation would merge.",
                expected=f"shape {list(size)}",
                got=f"shape {list(new.shape)}",
                hint=f"leave it out first: td.exclude({key!r}).",
            )
        return new

    def rebatch(self, size: Size) -> Any:
        """Return the data with another batch size, where they can have it; never raises."""
        raise NotImplementedError

    def follow(self, old: Size, size: Size) -> Any:
        """Return the data of a tree whose batch size was `old` and is now `size`; never raises."""
        raise NotImplementedError

    @property
    def value(self) -> Any:
        """Return the value of `td[key]`."""
        raise NotImplementedError

    def equal(self, other: Any) -> torch.Tensor:
        """Return the tensor of bools of `self == other`, value by value, where both have one shape."""
        if self.shape != other.shape:
            return torch.zeros(self.shape, dtype=torch.bool)
        if isinstance(self, NonTensorData) and isinstance(other, NonTensorData):
            return torch.tensor(same_value(self.data, other.data)).expand(self.shape)
        pairs = zip(self._array.flat, other._array.flat, strict=True)
        return torch.tensor([same_value(a, b) for a, b in pairs], dtype=torch.bool).reshape(self.shape)

    def where(self, condition: torch.Tensor, other: Any) -> Any:
        # The same on both sides: the condition may be a tensor without values (inside vmap, or a compiler).
        if self == other:
            return self
        return NonTensorStack._wrap(np.where(as_array(condition), self._array, other._array))

    def index_select(self, dim: int, index: torch.Tensor) -> Any:
        return self[(slice(None),) * dim_index(dim, self.dim(), "index_select") + (index,)]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        lead = (slice(None),) * dim_index(dim, self.dim(), "unbind")
        return tuple(self[(*lead, i)] for i in range(self.shape[dim]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        lead = (slice(None),) * dim_index(dim, self.dim(), "split")
        total = self.shape[dim]
        # As torch: a dimension of size 0 is one part.
        if isinstance(sizes, int):
            parts = [min(sizes, total - i) for i in range(0, total or 1, sizes)]
        else:
            parts = list(sizes)
        ends = zip(accumulate(parts), parts, strict=True)
        return tuple(self[(*lead, slice(end - part, end))] for end, part in ends)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is None:
            return NotImplemented
        return handler(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Return the values as a nested list (one value for a batch of no dimensions)."""
        if self._array.ndim:
            return self._array.tolist()
        return self._array[()]

    def __copy__(self) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NonTensorBase) and self.shape == other.shape and _same_nodes(self, other)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.shape))


class NonTensorData(NonTensorBase):
    """One non-tensor value, broadcast to the batch at no cost.

    Args:
        data: Any object but None.
        batch_size: The shape that it is seen with.

    Examples:
        >>> TensorDict({"n": NonTensorData(3)}, [2])["n"]
        3
    """

    __slots__ = ("_size", "_value")
    _size: Size
    _value: Any

    def __init__(self, data: Any, batch_size: Any = None) -> None:
        object.__setattr__(self, "_value", data.data if isinstance(data, NonTensorData) else data)
        object.__setattr__(self, "_size", as_size(batch_size))

    @classmethod
    def _wrap(cls, value: Any, size: Size) -> "NonTensorData":
        """Make one without checks: a compiler's code for it has -1 for sizes that are not known yet."""
        new = object.__new__(cls)
        object.__setattr__(new, "_value", value)
        object.__setattr__(new, "_size", size)
        return new

    @property
    def data(self) -> Any:
        """The value."""
        return self._value

    @property
    def value(self) -> Any:
        """Return the value of `td[key]`."""
        return self._value

    @property
    def shape(self) -> Size:
        return self._size

    @property
    def _array(self) -> np.ndarray[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        cell = np.empty((), dtype=object)
        cell[()] = self._value
        return np.broadcast_to(cell, self._size)

    # A shape operation keeps the value: torch works out the shape, on a tensor that holds nothing.
    def _shaped(self, method: str, *args: Any) -> Any:
        made = getattr(torch.empty(self._size, device="meta"), method)(*args)
        return NonTensorData(self._value, made.shape)

    def reshape(self, *shape: Any) -> Any:
        return self._shaped("reshape", _sizes(shape))

    view = reshape

    def expand(self, *shape: Any) -> Any:
        return self._shaped("expand", _sizes(shape))

    def permute(self, *dims: Any) -> Any:
        return self._shaped("permute", _sizes(dims))

    def transpose(self, dim0: int, dim1: int) -> Any:
        return self._shaped("transpose", dim0, dim1)

    def unsqueeze(self, dim: int) -> Any:
        return self._shaped("unsqueeze", dim)

    def squeeze(self, *dim: int) -> Any:
        return self._shaped("squeeze", *dim)

    def __getitem__(self, index: Any) -> Any:
        return NonTensorData(self._value, index_size(normalize_index(index, self._size), self._size))

    def rebatch(self, size: Size) -> Any:
        """Return the value seen with another batch size."""
        return NonTensorData(self._value, size)

    def follow(self, old: Size, size: Size) -> Any:
        """Return the value seen with the new batch size, and with the dimensions it had after the old one."""
        return NonTensorData(self._value, size + self._size[len(old) :])

    def __reduce__(self) -> Any:
        return NonTensorData, (self._value, tuple(self._size))

    def __repr__(self) -> str:
        return f"NonTensorData(data={_cut(str(self._value))}, batch_size={self._size}, device=None)"


class NonTensorStack(NonTensorBase):
    """One non-tensor value for each element of the batch.

    Args:
        *values: The values along the first dimension; nested lists give more dimensions with `from_nested`.

    Examples:
        >>> td = TensorDict({"s": ["a", "b", "c"]}, [3])
        >>> td[1:]["s"], td[0]["s"]
        (['b', 'c'], 'a')
    """

    __slots__ = ("_array", "_features")

    def __init__(self, *values: Any) -> None:
        array = _objects([value.data if isinstance(value, NonTensorData) else value for value in values])
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_features", None)

    @classmethod
    def _wrap(cls, array: np.ndarray[Any, Any], features: int | None = None) -> "NonTensorStack":
        new = object.__new__(cls)
        object.__setattr__(new, "_array", array)
        object.__setattr__(new, "_features", features)
        return new

    @classmethod
    def _of_values(cls, values: Sequence[Any], size: Size) -> "NonTensorStack":
        """Return the stack of a size whose values are given row by row."""
        return cls._wrap(_objects(values).reshape(size))

    @property
    def shape(self) -> Size:
        return Size(self._array.shape)

    def reshape(self, *shape: Any) -> Any:
        return self._wrap(self._array.reshape(_sizes(shape)))

    view = reshape

    def expand(self, *shape: Any) -> Any:
        size = _sizes(shape)
        # -1 keeps a dimension in torch; numpy has no such size.
        full = torch.empty(self._array.shape, device="meta").expand(size).shape
        return self._wrap(np.broadcast_to(self._array, full))

    def permute(self, *dims: Any) -> Any:
        return self._wrap(self._array.transpose(_sizes(dims)))

    def transpose(self, dim0: int, dim1: int) -> Any:
        return self._wrap(self._array.swapaxes(dim0, dim1))

    def unsqueeze(self, dim: int) -> Any:
        return self._wrap(np.expand_dims(self._array, dim))

    def squeeze(self, dim: int | None = None) -> Any:
        if dim is not None and self._array.shape[dim] != 1:
            return self
        return self._wrap(self._array.squeeze(dim))

    @classmethod
    def from_nested(cls, values: Any, ndim: int) -> "NonTensorStack":
        """Read the outer `ndim` levels of nested lists as dimensions; the items inside them are values.

        Raises:
            ValueError: The lists of one level differ in length.
        """
        size: list[int] = []
        flat = [values]
        for _ in range(ndim):
            length = 0
            if flat and isinstance(flat[0], (list, tuple)):
                length = len(flat[0])
            size.append(length)
            for part in flat:
                if not isinstance(part, (list, tuple)) or len(part) != length:
                    raise error(
                        ValueError,
                        "NonTensorStack: the list is ragged.",
                        expected=f"lists of {length}",
                        got=f"{part!r}",
                    )
            flat = [item for part in flat for item in part]
        return cls._wrap(_objects(flat).reshape(size))

    @property
    def value(self) -> Any:
        """Return the value of `td[key]`: always a nested list."""
        return self.tolist()

    def rebatch(self, size: Size) -> Any:
        """Keep the values; an operation along a dimension checks that they still fit."""
        return self

    def follow(self, old: Size, size: Size) -> Any:
        """Keep the values, and mark them while vmap maps their rows: then they are not laid out along the batch."""
        if self._features is None:
            features = self.dim() - len(old)
        else:
            features = self._features
        if features == _LOST or not _only_in_front(old, size):
            return self._wrap(self._array, _LOST)
        is_whole = self._array.shape[: self.dim() - features] == size
        return self._wrap(self._array, None if is_whole else features)

    def __getitem__(self, index: Any) -> Any:
        parts = normalize_index(index, self.shape)
        size = index_size(parts, self.shape)
        # numpy checks positions that no element needs.
        if size.numel() == 0:
            return self._wrap(np.empty(size, dtype=object))
        taken = [_numpy_item(part) for part in parts]
        # torch selects with ints first, numpy counts them among the advanced indices: so two steps.
        # The Ellipsis keeps an array an array.
        ints = [item if _is_number(item) else slice(None) for item in taken if _takes_dim(item)]
        rest = [item for item in taken if not _is_number(item)]
        array = self._array[(*ints, ...)][(*rest, ...)]
        # A full index leaves one value: it is data of an empty batch, not a stack.
        if array.ndim == 0:
            return NonTensorData(array[()])
        return self._wrap(array)

    def __reduce__(self) -> Any:
        # A list, for `torch.load(weights_only=True)` refuses arrays of objects.
        return _stack_of, (self._array.reshape(-1).tolist(), self._array.shape)

    def __repr__(self) -> str:
        whole = self._array.size <= _WHOLE
        if whole:
            text = str(self.tolist())
        else:
            text = _first_values(self._array)
        return f"NonTensorStack({_cut(text)}, batch_size={self.shape}, device=None)"


def _numpy_item(part: Any) -> Any:
    """Return one part of a normalized index as numpy takes it."""
    if not isinstance(part, torch.Tensor):
        return part
    if part.dim():
        return as_array(part)
    return int(part)


def _takes_dim(part: Any) -> bool:
    return part is not None and not isinstance(part, bool)


def _is_number(part: Any) -> bool:
    """Return True for an int; a bool is an index of another kind, to numpy as to torch."""
    return isinstance(part, int) and not isinstance(part, bool)


# A stack of more values shows the first of each dimension in its repr.
_WHOLE = 100
_FIRST = 10
_MAX_CHARACTERS = 2_000


def _first_values(array: np.ndarray[Any, Any]) -> str:
    """Return the first values along each dimension, as nested lists."""
    if not array.ndim:
        return repr(array[()])
    parts = [_first_values(array[i, ...]) for i in range(min(len(array), _FIRST))]
    if len(array) > _FIRST:
        parts.append("...")
    return f"[{', '.join(parts)}]"


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({len(text):,} characters)"


_LOST = -1
_HINT = "vmap keeps the values of rows with in_dims=0 and out_dims=0 only: exclude() them before vmap or tree_map."


def as_array(index: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return positions or a mask as an array; raise under vmap and in a trace, where they have no values."""
    if has_values():
        return index.cpu().numpy()
    # Torch reads a list through derivatives, and raises in its own words elsewhere.
    return np.array(index.tolist(), dtype=bool if index.dtype is torch.bool else int).reshape(index.shape)


def _only_in_front(old: Size, size: Size) -> bool:
    """Return True if batch dimensions can have come or gone in front only, as with in_dims=0 and out_dims=0.

    Where another dimension of the same size could be the one that moved, the answer is False.
    """
    short, long = sorted((old, size), key=len)
    added = len(long) - len(short)
    if not added or not short:
        return True
    lead = long[:added]
    rest = long[added:]
    return rest == short and short[0] not in lead


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return an array of objects of one dimension."""
    array = np.empty(len(values), dtype=object)
    # One at a time: numpy would take lists apart.
    for i, value in enumerate(values):
        array[i] = value
    return array


def _stack_of(values: list[Any], shape: tuple[int, ...]) -> NonTensorStack:
    return NonTensorStack._of_values(values, Size(shape))


class StaticValues(NamedTuple):
    """Non-tensor values as pytree context, compared by value."""

    node: NonTensorBase

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValues) and _same_nodes(self.node, other.node)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # The values may be lists or dicts, and the batch of one broadcast value is not compared.
        return hash(type(self.node))


def same_value(a: Any, b: Any) -> bool:
    """Return True if two values are equal: arrays in all elements, and never values that cannot be compared."""
    if a is b:
        return True
    try:
        equal = a == b
        if hasattr(equal, "all"):
            return bool(equal.all()) and np.shape(a) == np.shape(b)
        return bool(equal)
    except (ValueError, TypeError, RuntimeError):
        return False


def _same_nodes(a: NonTensorBase, b: NonTensorBase) -> bool:
    # The batch of one broadcast value is not compared, as it is not for trees.
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return same_value(a.data, b.data)
    if type(a) is not type(b) or a._array.shape != b._array.shape:
        return False
    return all(same_value(x, y) for x, y in zip(a._array.flat, b._array.flat, strict=True))


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int):
        return tuple(shape[0])
    return shape


def _stack(nodes: Sequence[Any], dim: int = 0) -> Any:
    _check_shapes("stack", nodes, [node.shape for node in nodes])
    return NonTensorStack._wrap(np.stack([n._array for n in nodes], axis=dim))


def _check_shapes(call: str, nodes: Sequence[Any], kept: Sequence[Size]) -> None:
    """Raise unless the kept parts of the shapes agree, as torch would: `join` adds the path."""
    for node, part in zip(nodes, kept, strict=True):
        if node._features is not None:
            raise BatchSizeError(
                f"{call}: non-tensor data are not laid out along the batch of their tree.",
                expected=f"shape {list(node.shape)}",
                got=f"shape {list(node._array.shape)}",
                hint=_HINT,
            )
        if part != kept[0]:
            raise error(
                RuntimeError,
                f"{call}: the non-tensor data have different shapes.",
                expected=str(list(nodes[0].shape)),
                got=str(list(node.shape)),
            )


def _cat(nodes: Sequence[Any], dim: int = 0) -> Any:
    shapes = [node.shape for node in nodes]
    dim = dim_index(dim, len(shapes[0]), "cat")
    _check_shapes("cat", nodes, [shape[:dim] + shape[dim + 1 :] for shape in shapes])
    first = nodes[0]
    is_one_value = all(isinstance(node, NonTensorData) and _same_nodes(first, node) for node in nodes)
    if is_one_value:
        total = sum(shape[dim] for shape in shapes)
        return NonTensorData(first.data, (*shapes[0][:dim], total, *shapes[0][dim + 1 :]))
    return NonTensorStack._wrap(np.concatenate([node._array for node in nodes], axis=dim))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.unbind: lambda node, dim=0: node.unbind(dim),
    torch.split: lambda node, sizes, dim=0: node.split(sizes, dim),
}


def _flatten(node: Any) -> tuple[Any, StaticValues]:
    return (), StaticValues(node)


def _unflatten(context: Any, _: Any) -> Any:
    return context.node


def _dump(context: Any) -> Any:
    node = context.node
    if isinstance(node, NonTensorData):
        return {"data": node.data, "batch_size": list(node.shape)}
    return {"stack": node._array.ravel().tolist(), "shape": list(node.shape)}


def _restore(dumped: Any) -> StaticValues:
    if "stack" in dumped:
        return StaticValues(NonTensorStack(*dumped["stack"]).reshape(dumped["shape"]))
    return StaticValues(NonTensorData(dumped["data"], dumped["batch_size"]))


# Python mangles a name with two leading underscores inside a class body only, so this works at module level.
GLOBAL_NAMESPACE: Any = optree.registry.__GLOBAL_NAMESPACE  # pyright: ignore[reportAttributeAccessIssue]
# Its stub asks for a Collection, which a class that is not sized or iterable can never be.
register_in_optree: Any = optree.register_pytree_node

for _cls in (NonTensorData, NonTensorStack):
    torch_pytree.register_pytree_node(
        _cls,
        _flatten,  # pyright: ignore[reportArgumentType]
        lambda children, context: _unflatten(context, children),
        serialized_type_name=f"tdfunc.{_cls.__name__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_restore,
        flatten_with_keys_fn=_flatten,  # pyright: ignore[reportArgumentType]
    )
    register_in_optree(_cls, _flatten, _unflatten, namespace=GLOBAL_NAMESPACE)
