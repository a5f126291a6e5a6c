"""A look at the first call: operations that read a weight of the original module, which no skeleton can poison.

A closure or an attribute is poisoned where the module is copied. A global variable or another object's attribute is
not, so the first call of an `apply` runs under a dispatch mode that knows the original weights' memory.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tdfunc._types import Path
from tdfunc.modules.skeleton import HARMLESS, leak, storage_of
from tdfunc.modules.slots import walk


class Originals:
    """The weights that a module had when its function was made, held weakly."""

    __slots__ = ("_refs",)

    def __init__(self, module: nn.Module) -> None:
        slots = [slot for slot in walk(module, "functional") if slot.store is not None]
        self._refs: list[tuple[weakref.ref[Tensor], Path]] = [(weakref.ref(slot.value), slot.path) for slot in slots]

    def watch(self, given: Iterable[Any]) -> "Watch":
        """Return the mode for one call.

        Args:
            given: The leaves and inputs of the call: their memory may be read.
        """
        alive = [(ref(), path) for ref, path in self._refs]
        storages = {storage_of(weight): path for weight, path in reversed(alive) if weight is not None}
        for value in given:
            if isinstance(value, Tensor):
                storages.pop(storage_of(_unwrapped(value)), None)
        storages.pop(None, None)
        return Watch(storages)


class Watch(TorchDispatchMode):
    """Raises when an operation reads memory of an original weight."""

    # Seen and passed on, like every other operation.
    supports_higher_order_operators = True

    def __init__(self, storages: dict[Any, Path]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    path = self._storages.get(storage_of(value))
                    if path is not None:
                        leak(path, str(func))
        return func(*args, **(kwargs or {}))


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside those of grad, jvp and vmap levels."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
