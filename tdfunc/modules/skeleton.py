"""Private skeletons: copies of a module that share nothing writable with it and hold poison where weights belong.

A skeleton runs one call at a time. Between calls its slots are empty, so a forward that reaches an original weight
in some other way (a closure, a cached reference) meets a poison tensor and raises instead of computing with it.
"""

import copy
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tdfunc._errors import LeakError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._types import Path
from tdfunc.modules.slots import Slot, walk

aten = torch.ops.aten
# What torch itself asks of a tensor that it only lists: `state_dict` detaches, `parameters` reads metadata.
_HARMLESS = {aten.detach.default}
# The hook tables of nn.Module itself; `__dict__` restores need not look into them.
_OWN_TABLES = frozenset(nn.Module().__dict__)


class Poison(Tensor):
    """A tensor with the shape, dtype and device of a weight, no storage, and no operation that does not raise."""

    path: Path

    @staticmethod
    def of(weight: Tensor, path: Path) -> "Poison":
        """Return the poison for one weight."""
        poison = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            Poison, weight.shape, dtype=weight.dtype, device=weight.device, requires_grad=False
        )
        poison.path = path
        # nn.Module accepts it in a parameter slot.
        poison._is_param = isinstance(weight, nn.Parameter)
        return poison

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            return args[0]
        leaked = [a for a in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(a, Poison)]
        _leak(leaked[0].path, str(func))

    def __deepcopy__(self, memo: Any) -> "Poison":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _poison_from, (tuple(self.shape), self.dtype, str(self.device), self.path)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Poison({dotted(self.path)}, shape={tuple(self.shape)})"


def _poison_from(shape: tuple[int, ...], dtype: torch.dtype, device: str, path: Path) -> Poison:
    return Poison.of(torch.empty(shape, dtype=dtype, device="meta"), path) if device == "meta" else Poison.of(
        torch.empty(1, dtype=dtype, device=device).expand(shape), path
    )


def _leak(path: Path, func: str) -> NoReturn:
    raise LeakError(
        explain(
            f"apply: forward used the weight {dotted(path)!r} that was not given to it ({func}).",
            expected="weights read from their module at each call, as self.weight",
            got="a reference kept elsewhere (a closure, a cache, another object), or a buffer that was not passed",
            hint="read the weight inside forward, or register it as a buffer.",
        )
    )


def make_template(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which every reference to one of its weights is poison.

    Raises:
        UnsupportedError: An attribute can neither be copied nor shared.
    """
    memo: dict[int, Any] = {}
    keep: list[Any] = []
    for slot in walk(module, "functional"):
        if slot.store is not None and id(slot.value) not in memo:
            memo[id(slot.value)] = Poison.of(slot.value, slot.path)
            keep.append(slot.value)
    for sub in module.modules():
        for value in _nearby(sub):
            # Plain tensor attributes are constants of the module: shared, not copied.
            if isinstance(value, (Tensor, torch.Generator)):
                memo.setdefault(id(value), value)
    return _copy(module, memo)


def _nearby(module: nn.Module) -> list[Any]:
    """Return the values in a module's `__dict__` and one level inside lists and dicts."""
    found: list[Any] = []
    for value in module.__dict__.values():
        found.append(value)
        if isinstance(value, dict):
            found.extend(value.values())
        elif isinstance(value, (list, tuple)):
            found.extend(value)
    return found


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, dict(memo))
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        pass
    # Locks, handles and the like refuse to be copied: share those, and only those.
    for sub in module.modules():
        for value in _nearby(sub):
            if id(value) in memo or isinstance(value, nn.Module):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001 - an object's own __deepcopy__ may raise anything
                if not isinstance(value, (dict, list, tuple)):
                    memo[id(value)] = value
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception as err:
        raise UnsupportedError(
            explain(f"functional: {type(module).__name__} cannot be copied.", got=str(err), hint="give the offending attribute a __deepcopy__, or make it in forward.")
        ) from err


class Skeleton:
    """One runnable copy: where each leaf goes, and how to leave it as it was before the call."""

    __slots__ = ("_containers", "_dicts", "buffer_slots", "module", "poison", "targets")

    def __init__(self, template: nn.Module, order: dict[Path, int], tied: Callable[[Path], Path]) -> None:
        self.module = copy.deepcopy(template)
        slots = [slot for slot in walk_poisoned(self.module)]
        # Each target is (store, name); leaves are given in the order of `order`, tied targets share a leaf.
        ordered = sorted(slots, key=lambda slot: order[tied(slot.path)])
        self.targets = [(slot.store, slot.name, order[tied(slot.path)]) for slot in ordered]
        self.poison = [(slot.store, slot.name, slot.store[slot.name]) for slot in ordered]  # pyright: ignore
        custom = [m for m in self.module.modules() if not _stateless(m)]
        self._dicts = [(m.__dict__, dict(m.__dict__), tuple(m.__dict__.values())) for m in custom]
        self._containers = [(c, copy.copy(c)) for m in custom for key, c in m.__dict__.items() if key not in _OWN_TABLES and isinstance(c, (list, dict, set))]

    def reset(self) -> None:
        """Empty the slots and put back the attributes that forward wrote on its modules."""
        for now, before, values in self._dicts:
            # Identity, not equality: comparing tensors would compute.
            if len(now) != len(values) or not all(map(operator.is_, now.values(), values)):
                now.clear()
                now.update(before)
        for container, before in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
        for store, name, poison in self.poison:
            store[name] = poison


def walk_poisoned(module: nn.Module) -> list[Slot]:
    """Return the tensor slots of a skeleton."""
    return [slot for slot in walk(module, "functional") if slot.store is not None]


def _stateless(module: nn.Module) -> bool:
    """Whether a module's class is torch's own and writes nothing on itself in forward (RNNs keep `_flat_weights`)."""
    return type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, nn.RNNBase)
