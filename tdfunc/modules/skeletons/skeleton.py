"""Skeletons: private copies of a module whose slots are filled for one call.

A skeleton runs one call at a time. Between calls its slots are empty, so a forward that reaches an original weight
in some other way (a closure, a cached reference) meets a poison tensor and raises instead of computing with it.
`copies.make_template` copies a module, `Skeleton` is one runnable copy of that template.

One rule keeps calls apart. A skeleton runs another call only if nothing outside of it holds a part of it (a function
that forward returned, a cache keyed by `self`), and if every change to its parts shows. Otherwise the next call gets a
new copy.
"""

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from tdfunc.core.types import Path
from tdfunc.modules.extract import Slot, is_renormed, unwrap, walk
from tdfunc.modules.plan import Straight, make_filler
from tdfunc.modules.skeletons.copies import duplicate
from tdfunc.modules.skeletons.kept import (
    Objects,
    Tables,
    is_stateless,
    own_attributes,
    refill,
    remove_others,
    restore_all,
    stores_of,
)
from tdfunc.modules.skeletons.parts import leads_to

# They write their statistics in training mode only, and nothing else ever.
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm} | {
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
}  # fmt: skip


class Target(NamedTuple):
    """A slot of a copy, and the place of the leaf that fills it."""

    store: dict[str, Any]
    name: str
    place: int


class _ModuleBefore(NamedTuple):
    """A module of a copy as it is before a call, for compiled regions."""

    module: nn.Module
    # The names in its `__dict__`.
    names: set[str]
    submodules: dict[str, Any]
    submodules_before: dict[str, Any]
    # (name, value) of the attributes that forward may assign.
    attributes: list[tuple[str, Any]]


def _state_before(module: nn.Module) -> _ModuleBefore:
    submodules = module._modules
    attributes = [("training", module.training), *own_attributes(module)]
    return _ModuleBefore(module, set(module.__dict__), submodules, dict(submodules), attributes)


class Skeleton:
    """One runnable copy: where each leaf goes, and how to leave it as it was before the call."""

    __slots__ = (
        "__weakref__", "_filler", "_modules_before", "_objects", "_places", "_poison", "_registered", "_stores",
        "_tables", "_vacant", "is_ready", "lent", "module", "owners", "renormed", "targets",
    )  # fmt: skip

    def __init__(
        self, template: nn.Module, order: dict[Path, int], first: dict[Path, Path], fillers: dict[Hashable, Straight]
    ) -> None:
        memo: dict[int, Any] = {}
        self.module: nn.Module = duplicate(template, memo)
        slots = walk(self.module, "functional")
        # Where extra state goes.
        self.owners: dict[Path, nn.Module] = {slot.path: slot.owner for slot in slots if slot.store is None}
        # In the order of the leaves, so that they fill the slots as they come.
        self.targets: list[Target] = _find_targets(slots, order, first)
        self._poison = [target.store[target.name] for target in self.targets]
        # None where the leaves fill the slots as they come, without ties.
        self._places: list[int] | None = [target.place for target in self.targets]
        if self._places == list(range(len(order))):
            self._places = None
        # The tables that hold the slots, each once.
        self._stores = list({id(target.store): target.store for target in self.targets}.values())
        self._filler: Straight = _find_filler(self.targets, self._stores, fillers)

        modules = [unwrap(m, "functional") for m in self.module.modules()]
        # Embeddings with max_norm write the rows that they look up.
        self.renormed: set[int] = self._places_in([m._parameters for m in modules if is_renormed(m)])
        self.lent: set[int] = self._places_in([m._buffers for m in modules if _is_idle_norm(m)])
        self._note_state(modules, memo)
        # Whether no call, and no caller who got a constant, has written one. Every call of apply asks, so that a method
        # in between would cost each of them a call.
        self.is_ready: Callable[[], bool] = self._objects.is_unwritten

    def _note_state(self, modules: list[nn.Module], memo: dict[int, Any]) -> None:
        """Note the state that each call starts from; `memo` has the objects that were copied."""
        # A slot that is None may be filled by forward: a cache registered in advance.
        stores = stores_of(modules)
        self._vacant: list[tuple[dict[str, Any], str]] = []
        for store in stores:
            self._vacant += [(store, name) for name, value in store.items() if value is None]
        self._tables = Tables(modules)
        copied = {id(new) for old, new in memo.items() if id(new) != old}
        self._objects = Objects(modules, copied)
        # For compiled regions.
        self._registered = [(store, set(store)) for store in stores]
        self._modules_before = list(map(_state_before, modules))

    def _places_in(self, stores: list[dict[str, Any]]) -> set[int]:
        """Return the places of the leaves that fill slots of some tables."""
        ids = set(map(id, stores))
        return {target.place for target in self.targets if id(target.store) in ids}

    def bind(self, leaves: list[Any]) -> None:
        """Put the leaves, in plan order, into their slots."""
        if not self._objects.count:
            self._objects.mark()
        if self._places is not None:
            leaves = [leaves[i] for i in self._places]
        self._filler.run(self._stores, leaves)

    def bind_traced(self, leaves: list[Any]) -> None:
        """`bind` in a compiled region, which cannot compile code."""
        for store, name, place in self.targets:
            store[name] = leaves[place]

    def has_hidden_writes(self) -> bool:
        """Return whether a call wrote attributes of torch's own modules, or constants past their version counters."""
        return self._tables.has_hidden_writes() or self._objects.has_hidden_writes()

    def constants(self) -> list[Tensor]:
        """Return the tensors in attributes, other than leaves."""
        return self._objects.list_tensors()

    def find_made_parameter(self) -> str | None:
        """Return the name of a trainable parameter that forward registered where no leaf goes, or None."""
        known = {(id(target.store), target.name) for target in self.targets}
        for path, module in self.module.named_modules():
            for name, value in module._parameters.items():
                is_new = (id(module._parameters), name) not in known
                if is_new and isinstance(value, nn.Parameter) and value.requires_grad:
                    return f"{path}.{name}".lstrip(".")
        return None

    def find_replaced(self, bound: list[Any]) -> dict[int, Tensor]:
        """Return the tensors that forward put in place of the leaves that were bound, by the places of the leaves."""
        replaced: dict[int, Tensor] = {}
        for store, name, place in self.targets:
            now = store.get(name)
            if now is not None and now is not bound[place]:
                replaced[place] = now
        return replaced

    def find_lost(self) -> list[str]:
        """Return the names of what forward wrote and no call returns: attributes, their contents, and empty buffers.

        Attributes of a module with extra state are not among them.
        """
        written = self._objects.find_written()
        stateful = set(map(id, self.owners.values()))
        filled = {(id(store), name) for store, name in self._vacant if store[name] is not None}
        lost: list[str] = []
        for path, module in self.module.named_modules():
            names = {name for name in module._buffers if (id(module._buffers), name) in filled}
            if id(module) not in stateful:
                names.update(self._tables.find_assigned(module))
                if written:
                    names.update([name for name, value in own_attributes(module) if leads_to(value, written)])
            lost += [f"{path}.{name}".lstrip(".") for name in sorted(names)]
        return lost

    def reset(self) -> bool:
        """Empty the slots and undo the writes of forward to its modules and to the objects that they hold.

        Returns:
            Whether the skeleton can run another call.
        """
        self._filler.run(self._stores, self._poison)
        for store, name in self._vacant:
            store[name] = None
        self._tables.restore()
        return self._objects.restore()

    def reset_traced(self) -> None:
        """`reset` in a compiled region, where writes to a module show in `module.__dict__` alone."""
        for (store, name, _), nothing in zip(self.targets, self._poison, strict=True):
            store[name] = nothing
        for store, name in self._vacant:
            store[name] = None
        for store, names in self._registered:
            remove_others(store, names)
        for before in self._modules_before:
            own = before.module.__dict__
            remove_others(own, before.names)
            for name, value in before.attributes:
                if own.get(name) is not value:
                    own[name] = value
            if list(before.submodules.values()) != list(before.submodules_before.values()):
                refill(before.submodules, before.submodules_before)
        restore_all(self._objects.containers)


def _is_idle_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of torch's in evaluation mode, which writes nothing."""
    return type(module) in _NORMS and not module.training and is_stateless(module)


def _find_targets(slots: list[Slot], order: dict[Path, int], first: dict[Path, Path]) -> list[Target]:
    """Return the slots that leaves fill, in the order of the leaves.

    Tied slots share the leaf of their first path; a shared submodule has its slots once.
    """
    targets: dict[tuple[int, str], Target] = {}
    for path, owner, store, _ in slots:
        if store is not None:
            place = order[first.get(path, path)]
            targets.setdefault((id(owner), path[-1]), Target(store, path[-1], place))
    return sorted(targets.values(), key=attrgetter("place"))


def _find_filler(targets: list[Target], stores: list[dict[str, Any]], fillers: dict[Hashable, Straight]) -> Straight:
    """Return the code that fills the targets: the code of an earlier skeleton of these slots, if there is one."""
    numbers = {id(store): number for number, store in enumerate(stores)}
    slots = tuple([(numbers[id(target.store)], target.name) for target in targets])
    return fillers.setdefault(slots, make_filler(slots))
