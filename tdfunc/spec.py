"""Specs: the required keys, shapes and dtypes of a tree, without its values.

`-1` is a dimension of any length. `tdfunc.load(like=)` takes a spec, and `default_spec` of the classes in `tdfunc.llm`
returns one.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Size, Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, brief, error
from tdfunc.core.keys import by_head, missing, unravel
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import NestedKey
from tdfunc.ops.base.cast import as_device

__all__ = [
    "Composite",
    "NonTensor",
    "Unbounded",
]


def _size(shape: Any) -> Size:
    return Size((shape,) if isinstance(shape, int) else tuple(shape))


def _fits(shape: Any, expected: Size) -> bool:
    if len(shape) != len(expected):
        return False
    return all(want < 0 or size < 0 or size == want for size, want in zip(shape, expected, strict=True))


def _filled(shape: Size) -> Size:
    return Size([1 if n < 0 else n for n in shape])


@final
class Unbounded:
    """The spec of a tensor of any values.

    Args:
        shape: Its shape.
        device: Its device; None for any.
        dtype: Its dtype; None for any.

    Examples:
        >>> from tdfunc.spec import Unbounded
        >>> spec = Unbounded((-1, 2), dtype=torch.float32)
        >>> spec.is_in(torch.zeros(5, 2)), spec.is_in(torch.zeros(5, 3)), spec.zero().shape
        (True, False, torch.Size([1, 2]))
    """

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: Any = (), device: Any = None, dtype: torch.dtype | None = None) -> None:
        self.shape: Size = _size(shape)
        self.device: torch.device | None = as_device(device)
        self.dtype: torch.dtype | None = dtype

    def zero(self) -> Tensor:
        """Return a tensor of zeros, of size 1 in dimensions of any length."""
        return torch.zeros(_filled(self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: Any) -> bool:
        """Return True if a value is a tensor of this shape, dtype and device."""
        if not isinstance(value, Tensor) or not _fits(value.shape, self.shape):
            return False
        return self.dtype in (None, value.dtype) and self.device in (None, value.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unbounded) and _parts(self) == _parts(other)

    def __hash__(self) -> int:
        return hash(_parts(self))

    def __repr__(self) -> str:
        return _text("Unbounded", {"shape": self.shape, "device": self.device, "dtype": self.dtype})


@final
class NonTensor:
    """The spec of non-tensor data.

    Args:
        shape: Their shape.
        example_data: The value that `zero` returns.
        device: Not used: the data have no device.
        dtype: Not used: the data have no dtype.

    Examples:
        >>> from tdfunc.spec import NonTensor
        >>> spec = NonTensor((2,), example_data="foo")
        >>> spec.is_in(NonTensorData("bar", [2])), spec.zero().data
        (True, 'foo')
    """

    __slots__ = ("device", "dtype", "example_data", "shape")
    # As tensordict marks it; `load(like=)` compares no shape of such data.
    _is_non_tensor: ClassVar[bool] = True

    def __init__(self, shape: Any = (), example_data: Any = None, device: Any = None, dtype: Any = None) -> None:
        self.shape: Size = _size(shape)
        # Any: data of any type.
        self.example_data: Any = example_data
        self.device: torch.device | None = as_device(device)
        # Any: kept as it is given.
        self.dtype: Any = dtype

    def zero(self) -> NonTensorData:
        """Return the example, of size 1 in dimensions of any length."""
        return NonTensorData(self.example_data, _filled(self.shape))

    def is_in(self, value: Any) -> bool:
        """Return True if a value is non-tensor data of this shape."""
        return isinstance(value, NonTensorBase) and _fits(value.shape, self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NonTensor) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        texts = {"shape": self.shape, "space": None, "device": self.device, "dtype": self.dtype, "domain": None}
        return _text("NonTensor", {**texts, "example_data": self.example_data})


Spec = Any  # an Unbounded, a NonTensor or a Composite


@final
class Composite:
    """The spec of a tree: a spec for each key.

    Args:
        specs: Specs by key; a nested key makes composites.
        shape: The batch size.
        device: The tree's device.
        data_cls: The class of the tree, by default `TensorDict`.

    Raises:
        BatchSizeError: A spec does not start with the batch size.
        TypeError: An entry is not a spec.

    Examples:
        >>> from tdfunc.spec import Composite, Unbounded
        >>> spec = Composite({"obs": Unbounded((-1, 3))}, shape=(-1,))
        >>> spec.is_in(TensorDict({"obs": torch.zeros(4, 3)}, [4])), spec.zero()["obs"].shape
        (True, torch.Size([1, 3]))
    """

    __slots__ = ("_specs", "data_cls", "device", "shape")

    def __init__(
        self, specs: Mapping[Any, Spec] | None = None, shape: Any = (), device: Any = None, *, data_cls: Any = None
    ) -> None:
        self.shape: Size = _size(shape)
        self.device: torch.device | None = as_device(device)
        # Any: a class of trees, of any library.
        self.data_cls: Any = data_cls
        self._specs: dict[str, Spec]
        self._specs, nested = by_head((specs or {}).items())
        for key, inner in nested.items():
            self._specs[key] = {**self._specs.get(key, {}), **inner}
        for key, spec in self._specs.items():
            if isinstance(spec, Mapping):
                self._specs[key] = Composite(spec, self.shape, device)
        for key, spec in self._specs.items():
            if not isinstance(spec, (Unbounded, NonTensor, Composite)):
                raise error(TypeError, f"Composite: {key!r} is not a spec.", got=brief(spec))
            if spec.shape[: len(self.shape)] != self.shape:
                raise BatchSizeError(
                    f"Composite: the spec of {key!r} does not start with the batch size.",
                    expected=str(list(self.shape)),
                    got=str(list(spec.shape)),
                )

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._specs)

    def items(self) -> Iterator[tuple[str, Spec]]:
        """Return pairs of key and spec."""
        return iter(self._specs.items())

    def __getitem__(self, key: NestedKey) -> Spec:
        """Return the spec of a (nested) key."""
        path = unravel(key)
        node: Any = self
        for part in path:
            if not isinstance(node, Composite) or part not in node._specs:
                raise missing(path, self.keys(), "Composite")
            node = node._specs[part]
        return node

    def __contains__(self, key: object) -> bool:
        return key in self._specs

    def zero(self) -> Any:
        """Return a tree of zeros and examples, of size 1 in dimensions of any length."""
        values = {key: spec.zero() for key, spec in self._specs.items()}
        if self.data_cls is None:
            return TensorDict(values, _filled(self.shape), self.device)
        return self.data_cls(**values, batch_size=_filled(self.shape), device=self.device)

    def is_in(self, value: Any) -> bool:
        """Return True if a value is a tree with these keys, of this class, batch size and device; it may have more."""
        if not isinstance(value, self.data_cls or TensorCollection) or not _fits(value._batch_size, self.shape):
            return False
        if self.device not in (None, value._device):
            return False
        if value._is_lazy:
            rest = _without(self, value._dim)
            return all(rest.is_in(tree) for tree in value._trees)
        keys = value._keys()
        return all(key in keys and spec.is_in(value._get(key)) for key, spec in self._specs.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and all([getattr(self, k) == getattr(other, k) for k in self.__slots__])

    def __hash__(self) -> int:
        return hash((self.shape, tuple(sorted(self._specs))))

    def __repr__(self) -> str:
        return _text("Composite", {**self._specs, "device": self.device, "shape": self.shape}, keys=self.keys())


def _parts(spec: Any) -> tuple[Any, ...]:
    return spec.shape, spec.device, spec.dtype


def _drop(shape: Size, dim: int) -> Size:
    return Size((*shape[:dim], *shape[dim + 1 :]))


def _without(spec: Any, dim: int) -> Any:
    """Return a spec without a batch dimension."""
    shape = _drop(spec.shape, dim)
    if isinstance(spec, Composite):
        inner = {key: _without(each, dim) for key, each in spec.items()}
        return Composite(inner, shape, spec.device, data_cls=spec.data_cls)
    if isinstance(spec, NonTensor):
        return NonTensor(shape, spec.example_data)
    return Unbounded(shape, *_parts(spec)[1:])


def _text(name: str, entries: Mapping[str, Any], keys: Any = ()) -> str:
    lines: list[str] = []
    for key, value in entries.items():
        separator = ": " if key in keys else "="
        lines.append(f"    {key}{separator}{value}".replace("\n", "\n    "))
    inner = ",\n".join(lines)
    return f"{name}(\n{inner})"


def __dir__() -> list[str]:
    return list(__all__)
