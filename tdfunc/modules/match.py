"""Which leaf goes into which slot of a module: everything that `to_module` checks before its first write."""

import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TreeStructureError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.types import Kind, Path
from tdfunc.modules.plan import tie_error
from tdfunc.modules.slots import Slot, is_one_tensor, is_renormed, keeps_own_state, walk
from tdfunc.ops.structure import iter_items

# (table, name, what is there, the leaf, whether it is a parameter). A plain tuple: one is made for each leaf.
Entry: TypeAlias = tuple[dict[str, Any], str, Any, Any, bool]
# (module, its extra state, that of the tree).
State: TypeAlias = tuple[nn.Module, Any, Any]

_STACKED = "the tree is stacked: bind one member, stacked[i].to_module(m), or use Ensemble."
# Deeper than any module that is not a cycle.
_DEEPEST = 100


class Match:
    """The leaves of a tree and the slots of a module, paired; what is there is remembered."""

    __slots__ = ("_tied", "entries", "modules", "states")

    def __init__(self, entries: list[Entry], states: list[State], modules: list[nn.Module]) -> None:
        self.entries, self.states, self.modules = entries, states, modules
        self._tied = len({id(entry[2]) for entry in entries}) != len(entries)

    def is_tied_alike(self) -> bool:
        """Whether slots that hold one tensor get one leaf."""
        if not self._tied:
            return True
        first: dict[int, Any] = {}
        return all([first.setdefault(id(old), leaf) is leaf for _, _, old, leaf, _ in self.entries])

    def write(self, *, permanent: bool) -> None:
        """Put the leaves in: as Parameters that share storage, or (in a block) as they are."""
        for owner, _, state in self.states:
            owner.set_extra_state(state)
        make = _stored if permanent else _borrowed
        # A table with max_norm writes the rows that it looks up.
        tables = () if permanent else {id(m._parameters) for m in self.modules if is_renormed(m)}
        # One Parameter for each tied slot, or the tie would be broken.
        made: dict[int, Any] = {}
        for table, name, old, leaf, is_parameter in self.entries:
            new = made.get(id(old)) if self._tied else None
            if new is None:
                new = made[id(old)] = make(old, leaf, is_parameter and id(table) not in tables)
            # Assigning to an existing key keeps the order of the slots.
            table[name] = new

    def restore(self) -> None:
        """Put back what was there when the match was made."""
        for owner, state, _ in self.states:
            owner.set_extra_state(state)
        for table, name, old, _, _ in self.entries:
            table[name] = old


def _stored(old: Tensor, leaf: Tensor, is_parameter: bool) -> Tensor:
    if not is_parameter:
        return leaf if type(leaf) is Tensor and not leaf.requires_grad else leaf.detach()
    if isinstance(leaf, nn.Parameter):
        return leaf
    return nn.Parameter(leaf, requires_grad=old.requires_grad)


def _borrowed(old: Tensor, leaf: Tensor, is_parameter: bool) -> Tensor:
    # BatchNorm writes its buffers in place, tables their rows; a clone keeps those of the tree as they are.
    return leaf if is_parameter else leaf.clone()


def match(tree: TensorCollection, module: nn.Module, strict: bool) -> Match:
    """Pair every leaf with its slot, or raise; nothing is written.

    Raises:
        TreeStructureError: A path exists on one side only.
        LeafMismatchError: A leaf's shape or dtype differs from its slot's.
        TieError: Two paths of one tied slot have different leaves.
        UnsupportedError: The module's weights cannot be replaced.
    """
    entries: list[Entry] = []
    modules: dict[nn.Module, None] = {}
    try:
        # A part may hold one path of a tied slot, whose other paths need it too.
        fits = strict and _fits(module, tree, strict, entries, modules, 0)
    # Uninitialised parameters, trees of another representation.
    except (RuntimeError, AttributeError):
        fits = False
    if fits:
        found = Match(entries, [], list(modules))
        if found.is_tied_alike():
            return found
    return _match_by_path(tree, module, strict)


def _fits(
    module: nn.Module, tree: Any, strict: bool, entries: list[Entry], modules: dict[nn.Module, None], depth: int
) -> bool:
    """Collect the pairs in one walk; False where only the match by path knows what to do or to say."""
    if isinstance(module, torch.jit.ScriptModule) or depth > _DEEPEST:
        return False
    if keeps_own_state(module) or "_orig_mod" in module._modules:
        return False
    modules[module] = None
    data = tree._data if tree is not None else {}
    left = len(data)
    for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for name, old in table.items():
            if old is None:
                continue
            leaf = data.get(name)
            if leaf is None:
                if strict and (is_parameter or name not in module._non_persistent_buffers_set):
                    return False
                continue
            if not isinstance(leaf, Tensor) or leaf.shape != old.shape or leaf.dtype is not old.dtype:
                return False
            entries.append((table, name, old, leaf, is_parameter))
            left -= 1
    for name, child in module._modules.items():
        if child is not None:
            node = data.get(name)
            if node is not None:
                if not isinstance(node, TensorCollection):
                    return False
                left -= 1
            if not _fits(child, node, strict, entries, modules, depth + 1):
                return False
    return left == 0


def _match_by_path(tree: TensorCollection, module: nn.Module, strict: bool) -> Match:
    slots = {slot.path: slot for slot in walk(module, "to_module")}
    leaves = dict(iter_items(tree, True, True))
    extra = [path for path in leaves if path not in slots]
    tied = _tied_to(slots, leaves)
    # A state dict has no non-persistent buffers, so a tree made from one has none either.
    absent = [
        path
        for path, slot in slots.items()
        if strict and path not in leaves and path not in tied and slot.kind is not Kind.NON_PERSISTENT
    ]
    if extra or absent:
        raise _structure_error(module, extra, absent)
    first: dict[int, tuple[Path, Any]] = {}
    entries: list[Entry] = []
    states: list[State] = []
    for path, leaf in (leaves | tied).items():
        slot = slots[path]
        _check_leaf(slot, leaf)
        if slot.store is None:
            # A module may hand out, and update in place, the very object that it keeps.
            new = leaf.value if isinstance(leaf, NonTensorBase) else leaf  # pyright: ignore[reportAttributeAccessIssue]
            states.append((slot.owner, copy.deepcopy(slot.value), new))
            continue
        known, leaf_there = first.setdefault(id(slot.value), (path, leaf))
        if not is_one_tensor(leaf_there, leaf):
            raise tie_error("to_module", known, path)
        entries.append((slot.store, path[-1], slot.value, leaf, slot.kind is Kind.PARAMETER))
    return Match(entries, states, list(module.modules()))


def _tied_to(slots: dict[Path, Slot], leaves: dict[Path, Any]) -> dict[Path, Any]:
    """Return the leaves of paths that the tree lacks, but whose slots hold one tensor with a path that it has.

    Files often keep one name of a tied weight.
    """
    given = {id(slots[path].value): leaf for path, leaf in leaves.items() if path in slots and slots[path].store}
    return {
        path: given[id(slot.value)]
        for path, slot in slots.items()
        if path not in leaves and slot.store and id(slot.value) in given
    }


def _structure_error(module: nn.Module, extra: list[Path], absent: list[Path]) -> TreeStructureError:
    hint = "a part of a module binds with strict=False, a sub-tree to its submodule: params['0'].to_module(m[0])."
    if absent and not extra:
        hint = "pass strict=False to bind a part and leave the rest of the module as it is."
    return TreeStructureError(
        f"to_module: the tree does not fit {type(module).__name__}; it was not touched.",
        expected=f"leaves {[dotted(p) for p in absent]}" if absent else "no other leaves than the module's",
        got=f"leaves the module lacks: {[dotted(p) for p in extra]}" if extra else "a tree without them",
        hint=hint,
    )


def _check_leaf(slot: Slot, leaf: Any) -> None:
    if slot.store is None:
        if isinstance(leaf, NonTensorStack):
            raise _mismatch(slot, "one value", f"values of batch size {list(leaf.shape)}", _STACKED)
        return
    value: Tensor = slot.value
    expected = f"shape {tuple(value.shape)}, {value.dtype}"
    if not isinstance(leaf, Tensor):
        raise _mismatch(slot, expected, type(leaf).__name__, "give it a tensor: params.set(path, tensor).")
    if leaf.shape == value.shape and leaf.dtype == value.dtype:
        return
    hint = "cast the tree (params.to(dtype)) or the module first."
    if leaf.shape != value.shape:
        hint = "the tree belongs to another architecture."
        if leaf.shape[1:] == value.shape:
            hint = _STACKED
        elif leaf.dim() == 2 and leaf.shape == value.shape[::-1] and isinstance(slot.owner, nn.Linear):
            hint = "nn.Linear stores (out_features, in_features); transpose the leaf first."
    raise _mismatch(slot, expected, f"shape {tuple(leaf.shape)}, {leaf.dtype}", hint)


def _mismatch(slot: Slot, expected: str, got: str, hint: str) -> LeafMismatchError:
    return LeafMismatchError(
        f"to_module: leaf {dotted(slot.path)!r} does not fit {slot.title}.", expected=expected, got=got, hint=hint
    )
