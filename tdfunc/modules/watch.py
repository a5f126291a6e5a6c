"""A look at the first call: operations that read a weight of the original module, or write one that was given.

A closure or an attribute is poisoned where the module is copied. A global variable or another object's attribute is
not, so the first call of an `apply` runs under a dispatch mode that knows the original weights' memory. The same mode
sees which parameters forward writes, for which later calls need copies.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tdfunc.core.types import Path
from tdfunc.modules.skeleton import HARMLESS, leak, storage_of
from tdfunc.modules.slots import walk


class Originals:
    """The weights that a module had when its function was made, held weakly."""

    __slots__ = ("_refs",)

    def __init__(self, module: nn.Module) -> None:
        slots = [slot for slot in walk(module, "functional") if slot.store is not None]
        self._refs: list[tuple[weakref.ref[Tensor], Path]] = [(weakref.ref(slot.value), slot.path) for slot in slots]

    def storages(self, given: Iterable[Any]) -> dict[Any, Path]:
        """Return the path of each original weight by its memory.

        Args:
            given: The leaves and inputs of a call: their memory may be read.
        """
        alive = [(ref(), path) for ref, path in self._refs]
        storages = {storage_of(weight): path for weight, path in reversed(alive) if weight is not None}
        for value in given:
            if isinstance(value, Tensor):
                storages.pop(_memory(value), None)
        storages.pop(None, None)
        return storages


class Watch(TorchDispatchMode):
    """Raises when an operation reads memory of an original weight; notes which bound tensors are written."""

    # Seen and passed on, like every other operation.
    supports_higher_order_operators = True

    def __init__(self, originals: dict[Any, Path], bound: list[Tensor]) -> None:
        super().__init__()
        self._originals, self._bound = originals, bound
        self._before = list(map(_state, bound))
        self._writes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS and self._originals:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    path = self._originals.get(storage_of(value))
                    if path is not None:
                        leak(path, str(func))
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Remember the memory that an operation is about to write."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for value in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    if isinstance(value, Tensor):
                        self._writes.add(storage_of(value))
        # Shared by all tensors without memory of their own.
        self._writes.discard(None)

    def written(self) -> tuple[int, ...] | None:
        """Return the places of the bound tensors that were written; None if that cannot be known.

        Assigning `.data` or `requires_grad` is no operation: it shows on the tensor.
        """
        for memory, tensor in zip([state[0] for state in self._before], self._bound, strict=True):
            if tensor.is_meta or (memory is None and tensor.numel() and tensor.is_inference()):
                return None
        return tuple(
            i
            for i, (before, tensor) in enumerate(zip(self._before, self._bound, strict=True))
            if before[0] in self._writes or _state(tensor) != before
        )


def _state(tensor: Tensor) -> tuple[Any, bool, int]:
    """Return what differs after a write that is no operation, or to a tensor without memory of its own (sparse)."""
    memory = _memory(tensor)
    return memory, tensor.requires_grad, tensor._version if memory is None and not tensor.is_inference() else 0


def _memory(tensor: Tensor) -> Any:
    return storage_of(_unwrapped(tensor))


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside those of grad, jvp and vmap levels."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
