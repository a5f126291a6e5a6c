"""Poison tensors, and the watch over a first call: how a weight that a call was not given is found.

A copy of a module has poison in place of every reference to a weight in the module: an operation on poison raises. A
global variable or another program's object is out of reach, so the first call of an `apply` runs under `Watch`, a
dispatch mode that compares memory with the memory of the original weights. It also notes the bound leaves that forward
writes, which later calls copy.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Size, Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tdfunc.core.errors import LeakError
from tdfunc.core.keys import dotted
from tdfunc.core.memory import storage_id
from tdfunc.core.types import Path
from tdfunc.modules.extract import walk

Originals: TypeAlias = Sequence[tuple["weakref.ref[Tensor]", Path]]
# `state_dict` detaches, and reads no values.
_HARMLESS = {torch.ops.aten.detach.default}


class Poison(Tensor):
    """A tensor with the shape, dtype and device of a weight, no storage, and no operation that does not raise."""

    path: Path
    leak: Callable[[Path, Any], NoReturn]

    # Reading metadata must not go through Python dispatch; every operation still reaches `__torch_dispatch__`.
    # Any: the signature of torch.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(weight: Tensor, path: Path, leak: "Callable[[Path, Any], NoReturn] | None" = None) -> "Poison":
        """Return the poison for one weight; an operation on it calls `leak`, which raises."""
        strides = None
        if weight.layout is torch.strided and not weight.is_nested:
            strides = weight.stride()
        is_param = isinstance(weight, nn.Parameter) or hasattr(weight, "_is_param")
        poison = _poison(weight.shape, strides, weight.dtype, weight.device, path, is_param)
        poison.leak = leak or _leak
        return poison

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            return args[0]
        leaked = [a for a in tree_leaves((args, kwargs or {})) if isinstance(a, Poison)]
        return leaked[0].leak(leaked[0].path, func)

    def __deepcopy__(self, memo: Any) -> "Poison":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _poison, (self.shape, self.stride(), self.dtype, self.device, self.path, hasattr(self, "_is_param"))

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Poison({dotted(self.path)}, shape={tuple(self.shape)})"


def _poison(shape: Size, strides: Any, dtype: torch.dtype, device: torch.device, path: Path, is_param: bool) -> Poison:
    make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
    poison = make(Poison, shape, strides, dtype=dtype, device=device, requires_grad=False)
    poison.path = path
    poison.leak = _leak
    if is_param:
        # nn.Module accepts it in a parameter slot.
        poison._is_param = True
    return poison


def _leak(path: Path, func: Any) -> NoReturn:
    raise LeakError(
        f"apply: forward used the weight {dotted(path)!r} that was not given to it ({func}).",
        expected="weights read from their module at each call, as self.weight",
        got="a reference kept elsewhere (a closure, a cache, another object), or a buffer that was not passed",
        hint="read the weight inside forward, or register it as a buffer.",
    )


def storage_of(tensor: Tensor) -> Any:
    """Return a key that identifies a tensor's memory, or None if it has no memory."""
    try:
        pointer = tensor.untyped_storage().data_ptr()
    # Wrapper subclasses, sparse and fake tensors.
    except (RuntimeError, NotImplementedError):
        return None
    if pointer:
        return (pointer, tensor.device)
    return None


def weak_weights(module: nn.Module) -> Originals:
    """Return the weights that a module has now, held weakly, with their paths."""
    slots = [slot for slot in walk(module, "functional") if slot.store is not None]
    return [(weakref.ref(slot.value), slot.path) for slot in slots]


class Watch(TorchDispatchMode):
    """Raises when an operation reads memory of an original weight; notes which bound tensors are written."""

    # Seen and passed on, like every other operation.
    supports_higher_order_operators = True

    def __init__(self, originals: Originals, given: Iterable[Any], leaves: list[Tensor], bound: list[Tensor]) -> None:
        super().__init__()
        alive = [(ref(), path) for ref, path in originals]
        self._originals = {storage_of(weight): path for weight, path in reversed(alive) if weight is not None}
        # The memory of leaves and inputs may be read; None stands for all tensors without memory.
        self._originals.pop(None, None)
        for value in (*given, *leaves, *bound):
            if isinstance(value, Tensor):
                self._originals.pop(_memory(value), None)
        self._leaves = leaves
        self.bound = bound
        self._before = list(map(_state, bound))
        self._writes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS and self._originals:
            self._refuse_originals(func, (args, kwargs))
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        return func(*args, **kwargs)

    def _refuse_originals(self, func: Any, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                path = self._originals.get(storage_of(value))
                if path is not None:
                    _leak(path, func)

    def _note_writes(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Note the memory that an operation writes, by its schema."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            for value in tree_leaves(given):
                if isinstance(value, Tensor):
                    self._writes.add(storage_of(value))

    def written(self, changed: set[int]) -> set[int] | None:
        """Return the places of the bound tensors that were written; None if that cannot be known.

        Args:
            changed: The result of `changed`.

        Assigning `.data` or `requires_grad` is not an operation: it shows on the tensor. Writes of other libraries
        (numpy) show in the values.
        """
        states = list(zip(self._before, self.bound, strict=True))
        if any(tensor.is_meta or _hides_writes(before, tensor) for before, tensor in states):
            return None
        moved = {i for i, (before, tensor) in enumerate(states) if _state(tensor) != before}
        return moved | changed

    def changed(self) -> set[int]:
        """Return the places of the bound tensors that an operation wrote, or that have other values.

        A tensor with another `requires_grad`, or the same values in other memory (weights of a GRU that are made
        contiguous), is not among them.
        """
        # None stands for all tensors without memory.
        self._writes.discard(None)
        places: set[int] = set()
        for i, (before, tensor) in enumerate(zip(self._before, self.bound, strict=True)):
            if before.memory in self._writes or _state(tensor).version != before.version:
                places.add(i)
        for i, (leaf, tensor) in enumerate(zip(self._leaves, self.bound, strict=True)):
            if not _has_values_of(_unwrap(leaf), _unwrap(tensor)):
                places.add(i)
        return places

    def differing(self, others: Mapping[int, Tensor]) -> set[int]:
        """Return the places at which other tensors do not have the values of the bound ones."""
        return {i for i, other in others.items() if not _has_values_of(_unwrap(other), _unwrap(self.bound[i]))}


def places_of(storages: Iterable[int], bound: list[Tensor]) -> set[int]:
    """Return the places of the bound tensors that use one of these storages."""
    found = set(storages)
    if not found:
        return set()
    places: set[int] = set()
    for i, tensor in enumerate(bound):
        plain = _unwrap(tensor)
        # Sparse tensors have no storage.
        if plain.layout is torch.strided and storage_id(plain) in found:
            places.add(i)
    return places


class _State(NamedTuple):
    """The parts of a tensor that show a write without an operation, or to a tensor without one memory (sparse)."""

    memory: Any
    requires_grad: bool
    # 0 where the memory shows the writes, and in inference mode, which counts none.
    version: int


def _state(tensor: Tensor) -> _State:
    memory = _memory(tensor)
    version = 0
    if memory is None and not tensor.is_inference():
        version = tensor._version
    return _State(memory, tensor.requires_grad, version)


def _hides_writes(before: _State, tensor: Tensor) -> bool:
    return before.memory is None and tensor.numel() > 0 and tensor.is_inference()


def _memory(tensor: Tensor) -> Any:
    return storage_of(_unwrap(tensor))


def _unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of grad, jvp and vmap levels."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal values; True where torch cannot compare them (sparse, nested, meta)."""
    try:
        return torch.equal(a, b)
    except RuntimeError:
        return True


def _has_values_of(a: Tensor, b: Tensor) -> bool:
    """`is_equal`, where NaN is equal to NaN."""
    if is_equal(a, b):
        return True
    if a.shape != b.shape:
        return False
    try:
        return bool(((a == b) | ((a != a) & (b != b))).all())
    except RuntimeError:
        return False
