"""A tree back into a module: `to_module`, for good or for the length of a `with` block.

`Match` pairs each leaf with its slot and checks everything before the first write; `ModuleHandle` writes the leaves
and puts back the module's own tensors.
"""

import copy
import itertools
import threading
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_transform, is_compiling, make_lock
from tdfunc.core.errors import ConcurrencyError, LeafMismatchError, TreeStructureError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path
from tdfunc.modules.extract import (
    EXTRA_STATE,
    from_module,
    has_extra_state,
    is_one_tensor,
    is_renormed,
    unwrap,
)
from tdfunc.modules.plan import FLAT, tie_error
from tdfunc.ops.base.reading import iter_items

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

# (table, name, the module's tensor, the leaf, whether it is a parameter, path of the module). A plain tuple for speed:
# one is made for each leaf.
Entry: TypeAlias = tuple[dict[str, Any], str, Any, Any, bool, Path]
_OWNER = "_tdfunc_owner"


class Match:
    """The leaves of a tree and the slots of a module, paired, with the module's own tensors.

    Raises:
        TreeStructureError: A path exists on one side only.
        LeafMismatchError: A leaf's shape or dtype differs from its slot's.
        TieError: Two paths of one tied slot have different leaves.
        UnsupportedError: The module's weights cannot be replaced.
    """

    __slots__ = ("_absent", "_extra", "_seen", "_tied", "entries", "modules", "states")

    def __init__(self, tree: TensorCollection, module: nn.Module, strict: bool) -> None:
        self.entries: list[Entry] = []
        # (module, its extra state, the tree's extra state).
        self.states: list[tuple[nn.Module, Any, Any]] = []
        self._seen: dict[nn.Module, None] = {}
        # Slots without a leaf, and whether they need one; paths of leaves without a slot.
        self._absent: list[tuple[Entry, bool]] = []
        self._extra: list[Path] = []
        self._pair(module, tree, (), strict)
        self.modules: list[nn.Module] = list(self._seen)
        # The module's tensors.
        tensors = {id(entry[2]) for entry in self.entries}
        self._tied = len(tensors) != len(self.entries)
        absent = []
        if self._absent or self._tied:
            absent = self._resolve_ties()
        if absent or self._extra:
            raise _structure_error(module, absent, list(map(dotted, self._extra)))

    def _pair(self, module: nn.Module, tree: Any, at: Path, strict: bool) -> None:
        """Collect the pairs of a module and its node, and the slots and leaves without a partner."""
        # One function for speed: a large model has hundreds of modules.
        module = unwrap(module, "to_module")
        self._seen[module] = None
        if tree is not None and not isinstance(tree, TensorCollection):
            self._extra.append(at)
            tree = None
        data = {}
        if tree is not None:
            data = tree._data
        # The number of entries of the node without a partner.
        left = len(data)
        hidden = module._non_persistent_buffers_set
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, old in table.items():
                if old is None:
                    continue
                leaf = data.get(name)
                entry = (table, name, old, leaf, is_parameter, at)
                if leaf is None:
                    # A state dict has no non-persistent buffers, so a tree made from one has none either.
                    self._absent.append((entry, strict and name not in hidden))
                    continue
                if not isinstance(leaf, Tensor) or leaf.shape != old.shape or leaf.dtype is not old.dtype:
                    raise _leaf_error(module, (*at, name), old, leaf)
                self.entries.append(entry)
                left -= 1
        if has_extra_state(module):
            state = data.get(EXTRA_STATE)
            self._pair_state(module, state, at, strict)
            left -= state is not None
        for name, child in module._modules.items():
            if child is not None:
                node = data.get(name)
                left -= node is not None
                self._pair(child, node, (*at, name), strict)
        if left and tree is not None:
            known = _names_of_slots(module)
            self._extra += [(*at, *path) for path, _ in iter_items(tree, True, True) if path[0] not in known]

    def _pair_state(self, module: nn.Module, state: Any, at: Path, strict: bool) -> None:
        # A module may hand out, and update in place, the very object that it keeps.
        old = copy.deepcopy(module.get_extra_state())
        if state is None:
            self._absent.append((({}, EXTRA_STATE, old, None, False, at), strict))
            return
        if isinstance(state, NonTensorBase):
            state = state.value
        self.states.append((module, old, state))

    def _resolve_ties(self) -> list[str]:
        """Check the leaves of tied slots, and give them to slots that the tree has under another path.

        Files often keep one name of a tied weight. Returns the slots that need a leaf and have none.
        """
        # The first entry of each tensor of the module.
        first: dict[int, Entry] = {}
        for entry in self.entries:
            _, name, old, leaf, _, at = entry
            _, first_name, _, first_leaf, _, first_at = first.setdefault(id(old), entry)
            if not is_one_tensor(first_leaf, leaf):
                raise tie_error("to_module", (*first_at, first_name), (*at, name))
        absent: list[str] = []
        for (table, name, old, _, is_parameter, at), needed in self._absent:
            if id(old) in first:
                leaf = first[id(old)][3]
                self.entries.append((table, name, old, leaf, is_parameter, at))
                self._tied = True
            elif needed:
                absent.append(dotted((*at, name)))
        return absent

    def write(self, *, permanent: bool) -> None:
        """Put the leaves in: as Parameters that share storage, or (in a block) as they are."""
        for owner, _, state in self.states:
            owner.set_extra_state(state)
        # A table with max_norm writes the rows that it looks up.
        tables = {id(m._parameters) for m in self.modules if is_renormed(m)}
        # One Parameter for each tied slot, or the tie would be broken.
        made: dict[int, Any] = {}
        for table, name, old, leaf, is_parameter, _ in self.entries:
            new = None
            if self._tied:
                new = made.get(id(old))
            if new is None:
                if permanent:
                    new = _stored(old, leaf, is_parameter)
                elif is_parameter and id(table) not in tables:
                    new = leaf
                else:
                    # BatchNorm writes its buffers in place, tables their rows; a clone keeps the tree as it is.
                    new = leaf.clone()
                made[id(old)] = new
            # Assigning to an existing key keeps the order of the slots.
            table[name] = new

    def restore(self) -> None:
        """Put back the tensors and extra state that the module had when the match was made."""
        for owner, state, _ in self.states:
            owner.set_extra_state(state)
        for table, name, old, *_ in self.entries:
            table[name] = old


def _stored(old: Tensor, leaf: Tensor, is_parameter: bool) -> Tensor:
    if not is_parameter:
        if type(leaf) is Tensor and not leaf.requires_grad:
            return leaf
        return leaf.detach()
    if isinstance(leaf, nn.Parameter):
        return leaf
    return nn.Parameter(leaf, requires_grad=old.requires_grad)


def _names_of_slots(module: nn.Module) -> set[str]:
    """Return the names of a module's own slots and submodules."""
    names: set[str] = set()
    for table in (module._parameters, module._buffers, module._modules):
        names |= {name for name, value in table.items() if value is not None}
    if has_extra_state(module):
        names.add(EXTRA_STATE)
    return names


def _structure_error(module: nn.Module, absent: list[str], extra: list[str]) -> TreeStructureError:
    """Return the error for paths that are in the module alone (absent) or in the tree alone (extra)."""
    expected = "no other leaves than the module's"
    if absent:
        expected = f"leaves {brief(absent)}"
    got = "a tree without them"
    hint = "pass strict=False to bind a part and leave the rest of the module as it is."
    if extra:
        got = f"leaves that the module does not have: {brief(extra)}"
        hint = "a part of a module binds with strict=False, a sub-tree to its submodule: params['0'].to_module(m[0])."
    if set(extra) & set(absent):
        hint = FLAT
    return TreeStructureError(
        f"to_module: the tree does not fit {type(module).__name__}, which was not touched.",
        expected=expected,
        got=got,
        hint=hint,
    )


def _leaf_error(owner: nn.Module, path: Path, old: Tensor, leaf: Any) -> LeafMismatchError:
    if isinstance(leaf, Tensor):
        got = f"shape {tuple(leaf.shape)}, {leaf.dtype}"
        hint = _hint_for(owner, old, leaf)
    else:
        got = type(leaf).__name__
        hint = "give it a tensor: params.set(path, tensor)."
    return LeafMismatchError(
        f"to_module: leaf {dotted(path)!r} does not fit {type(owner).__name__}.{path[-1]}.",
        expected=f"shape {tuple(old.shape)}, {old.dtype}",
        got=got,
        hint=hint,
    )


def _hint_for(owner: nn.Module, old: Tensor, leaf: Tensor) -> str:
    if leaf.shape == old.shape and leaf.itemsize == 1 and leaf.dtype is not torch.bool:
        return (
            "if the leaf has codes of a quantized weight, tdf.load(path, dequantize=True) makes numbers of FP8 codes."
        )
    if leaf.shape == old.shape:
        return "cast the tree (params.to(dtype)) or the module first."
    if leaf.shape[1:] == old.shape:
        return "the tree is stacked: bind one member, stacked[i].to_module(m), or use Ensemble."
    if isinstance(owner, nn.Linear) and leaf.dim() == 2 and leaf.shape == old.shape[::-1]:
        return "nn.Linear stores (out_features, in_features); transpose the leaf first."
    return "the tree belongs to another architecture."


class _Owner:
    """Left on a submodule while blocks are open on it: the thread that entered, and the blocks in order."""

    __slots__ = ("blocks", "thread")

    def __init__(self) -> None:
        self.thread = 0
        self.blocks = list[ModuleHandle]()

    # A copy of the module, made or pickled inside a block, is not in that block.
    def __reduce__(self) -> Any:
        return _Owner, ()


# Held while blocks are entered and left; reentrant, since collecting a generator may leave its block at any moment.
_CLAIMS = make_lock()
_SERIAL = itertools.count()
_LOADED = "loaded"
_UNBOUND = "unbound"
_OPEN = "open"
_CLOSED = "closed"


class ModuleHandle:
    """The result of `to_module`: a context manager that binds for a block and puts back the module's own tensors."""

    __slots__ = ("_match", "_module", "_serial", "_state")

    def __init__(self, module: nn.Module, match: Match) -> None:
        self._state = _CLOSED
        self._module = module
        self._match = match
        self._serial = 0
        if in_transform():
            self._state = _UNBOUND
            return
        try:
            with _CLAIMS:
                self._refuse_other_thread()
                self._state = _LOADED
                match.write(permanent=True)
        except BaseException:
            if self._state is _LOADED:
                match.restore()
            raise

    def __enter__(self) -> nn.Module:
        if self._state not in (_LOADED, _UNBOUND):
            raise ConcurrencyError(
                f"to_module: this block on {type(self._module).__name__} was entered before.",
                expected="one `with` for each call of to_module",
                got=f"a handle that is {self._state}",
                hint="call params.to_module(m) again for another block.",
            )
        try:
            if is_compiling():
                self._state = _OPEN
                self._match.write(permanent=False)
            else:
                with _CLAIMS:
                    self._refuse_other_thread()
                    self._state = _OPEN
                    self._match.write(permanent=False)
                    self._claim()
        except ConcurrencyError:
            raise
        except BaseException:
            # Ctrl-C comes between any two lines, and Python leaves no block whose __enter__ did not return.
            self._leave()
            raise
        return self._module

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            in_order = self._leave()
        except BaseException:
            # Ctrl-C may have cut it short, and every step of it may be done twice.
            self._leave()
            raise
        # An error on its way through the block matters more than the order of exits; closing a generator does not.
        if not in_order and (kind is None or issubclass(kind, GeneratorExit)):
            raise ConcurrencyError(
                f"to_module: blocks on {type(self._module).__name__} were left out of order; "
                "its original weights are back.",
                expected="the block entered last to be left first",
                got="one left while a later one was open, or closed by such an exit",
                hint="two generators cannot hold one module: use apply of tdfunc.functional(m).",
            )

    def __del__(self) -> None:
        if getattr(self, "_state", None) is _UNBOUND:
            warnings.warn(
                "to_module: inside a transform or a compiled region the call alone binds nothing; "
                "write `with params.to_module(m):`.",
                stacklevel=2,
            )

    def _claim(self) -> None:
        self._serial = next(_SERIAL)
        for sub in self._match.modules:
            owner = sub.__dict__.setdefault(_OWNER, _Owner())
            owner.thread = threading.get_ident()
            owner.blocks.append(self)

    def _leave(self) -> bool:
        """Put back the module's own tensors and release it; return False where blocks are left out of order."""
        if self._state is _CLOSED:
            return False
        if is_compiling():
            self._match.restore()
            self._state = _CLOSED
            return True
        with _CLAIMS:
            # The blocks that are open on each submodule.
            stacks = [sub.__dict__[_OWNER].blocks for sub in self._match.modules if _OWNER in sub.__dict__]
            in_order = all([blocks[-1] is self for blocks in stacks if self in blocks])
            ending = {self}
            if not in_order:
                # All blocks on the same submodules end, the newest first.
                ending = ending.union(*stacks)
            for block in sorted(ending, key=lambda block: -block._serial):
                block._match.restore()
                block._release()
        return in_order

    def _release(self) -> None:
        for sub in self._match.modules:
            owner = sub.__dict__.get(_OWNER)
            if owner is None:
                continue
            if self in owner.blocks:
                owner.blocks.remove(self)
            if not owner.blocks:
                sub.__dict__.pop(_OWNER, None)
        self._state = _CLOSED

    def _refuse_other_thread(self) -> None:
        thread = threading.get_ident()
        for sub in self._match.modules:
            owner = sub.__dict__.get(_OWNER)
            if owner is not None and owner.blocks and owner.thread != thread:
                raise ConcurrencyError(
                    f"to_module: another thread is inside a block on {type(self._module).__name__} (or a part of it).",
                    expected="one thread in a module at a time",
                    got=f"thread {thread}, while thread {owner.thread} holds {type(sub).__name__}",
                    hint="apply, params, buffers = tdfunc.functional(m): apply(params, x) is thread-safe.",
                )


class ModuleMethods(TensorCollection):
    """To and from modules."""

    __slots__ = ()

    @classmethod
    def from_module(cls, module: nn.Module) -> "TensorDict":
        """Return a module's live parameters, buffers and extra state as a tree; see `tdfunc.from_module`."""
        return from_module(module)

    def to_module(self, module: nn.Module, *, strict: bool = True) -> ModuleHandle:
        """Load this tree into a module.

        The call loads at once and permanently. A leaf that is a Parameter becomes the module's; another leaf of a
        parameter slot becomes a new Parameter that shares its storage and has the slot's `requires_grad`.

        As a context manager (`with params.to_module(m) as m:`) the leaves are bound as they are, and buffers as
        clones, so that gradients and transforms reach them. Every exit puts back the module's own tensors.

        Everything is checked before the first write. Inside `vmap`, `grad`, a dual level or a compiled region
        only the `with` form binds.

        Args:
            module: The module; a sub-tree fits its submodule.
            strict: Require every path of the module in the tree, except non-persistent buffers.

        Returns:
            A handle that is a context manager.

        Raises:
            TreeStructureError: A path exists on one side only.
            LeafMismatchError: A leaf does not fit its slot's shape or dtype; the message names it.
            TieError: Two paths of one tied slot have different values.
            ConcurrencyError: Another thread is inside a block on the module, or blocks were left out of order.

        Examples:
            >>> model = nn.Linear(3, 2)
            >>> zeros = tdf.from_module(model).apply(torch.zeros_like)
            >>> with zeros.to_module(model):
            ...     model(torch.ones(3))
            tensor([0., 0.])
        """
        module = unwrap(module, "to_module")
        return ModuleHandle(module, Match(self, module, strict))
