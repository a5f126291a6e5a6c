"""A tree back into a module: `to_module`, for good or for the length of a `with` block."""

import copy
import itertools
import threading
import warnings
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc._collection import TensorCollection
from tdfunc._errors import ConcurrencyError, LeafMismatchError, TreeStructureError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorBase, NonTensorStack
from tdfunc._types import Kind, Path
from tdfunc.modules.extract import from_module
from tdfunc.modules.plan import tie_error
from tdfunc.modules.slots import Slot, in_transform, is_one_tensor, unwrap, walk
from tdfunc.ops.structure import iter_items

_OWNER = "_tdfunc_owner"
_STACKED = "the tree is stacked: bind one member, stacked[i].to_module(m), or use Ensemble."


class Binding(NamedTuple):
    """A slot and the leaf that goes into it."""

    slot: Slot
    leaf: Any


def match(tree: TensorCollection, module: nn.Module, strict: bool) -> list[Binding]:
    """Pair every leaf with its slot, or raise; nothing is written.

    Raises:
        TreeStructureError: A path exists on one side only.
        LeafMismatchError: A leaf's shape or dtype differs from its slot's.
        TieError: Two paths of one tied slot have different leaves.
    """
    slots = {slot.path: slot for slot in walk(module, "to_module")}
    leaves = dict(iter_items(tree, True, True))
    extra = [path for path in leaves if path not in slots]
    # A state dict has no non-persistent buffers, so a tree made from one has none either.
    absent = (
        [p for p, slot in slots.items() if p not in leaves and slot.kind is not Kind.NON_PERSISTENT] if strict else []
    )
    if extra or absent:
        raise _structure_error(module, extra, absent)
    bindings = [Binding(slots[path], leaf) for path, leaf in leaves.items()]
    for slot, leaf in bindings:
        _check_leaf(slot, leaf)
    _check_ties(bindings)
    return bindings


def _structure_error(module: nn.Module, extra: list[Path], absent: list[Path]) -> TreeStructureError:
    hint = "a part of a module binds with strict=False, a sub-tree to its submodule: params['0'].to_module(m[0])."
    if absent and not extra:
        hint = "pass strict=False to bind a part and leave the rest of the module as it is."
    return TreeStructureError(
        explain(
            f"to_module: the tree does not fit {type(module).__name__}; it was not touched.",
            expected=f"leaves {[dotted(p) for p in absent]}" if absent else "no other leaves than the module's",
            got=f"leaves the module lacks: {[dotted(p) for p in extra]}" if extra else "a tree without them",
            hint=hint,
        )
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
    what = f"to_module: leaf {dotted(slot.path)!r} does not fit {slot.title}."
    return LeafMismatchError(explain(what, expected=expected, got=got, hint=hint))


def _check_ties(bindings: list[Binding]) -> None:
    first: dict[int, Binding] = {}
    for binding in bindings:
        if binding.slot.store is not None:
            known = first.setdefault(id(binding.slot.value), binding)
            if not is_one_tensor(known.leaf, binding.leaf):
                raise tie_error("to_module", known.slot.path, binding.slot.path)


def bind(bindings: list[Binding], *, permanent: bool) -> None:
    """Write the leaves into their slots: as Parameters that share storage, or (in a block) as they are."""
    # One Parameter for each tied slot, or the tie would be broken.
    made: dict[int, Any] = {}
    for slot, leaf in bindings:
        if slot.store is not None and id(slot.value) not in made:
            made[id(slot.value)] = _stored(slot, leaf) if permanent else _borrowed(slot, leaf)
    # Read before the first write: afterwards a slot no longer says which tie it belonged to.
    new = [(slot, leaf, made[id(slot.value)] if slot.store is not None else None) for slot, leaf in bindings]
    for slot, leaf, value in new:
        if slot.store is None:
            slot.owner.set_extra_state(leaf.value if isinstance(leaf, NonTensorBase) else leaf)  # pyright: ignore
        else:
            # Assigning to an existing key keeps the order of the slots.
            slot.store[slot.path[-1]] = value


def _stored(slot: Slot, leaf: Tensor) -> Tensor:
    if slot.kind is not Kind.PARAMETER:
        return leaf.detach() if leaf.requires_grad or isinstance(leaf, nn.Parameter) else leaf
    if isinstance(leaf, nn.Parameter):
        return leaf
    return nn.Parameter(leaf.detach(), requires_grad=slot.value.requires_grad)


def _borrowed(slot: Slot, leaf: Tensor) -> Tensor:
    # BatchNorm writes its buffers in place; a clone keeps those of the tree as they are.
    return leaf if slot.kind is Kind.PARAMETER else leaf.clone()


class _Owner:
    """Left on a submodule while blocks are open on it: the thread that entered, and the blocks in order."""

    __slots__ = ("blocks", "thread")

    def __init__(self) -> None:
        self.thread, self.blocks = 0, list[ModuleHandle]()

    # A copy of the module, made or pickled inside a block, is not in that block.
    def __deepcopy__(self, memo: Any) -> "_Owner":
        return _Owner()

    def __reduce__(self) -> Any:
        return _Owner, ()


# Held while blocks are entered and left; reentrant, since collecting a generator may leave its block at any moment.
_CLAIMS = threading.RLock()
_SERIAL = itertools.count()
_LOADED, _UNBOUND, _OPEN, _CLOSED = "loaded", "unbound", "open", "closed"


class ModuleHandle:
    """What `to_module` returns: a context manager that binds for a block and puts back what was there."""

    __slots__ = ("_before", "_bindings", "_module", "_serial", "_state", "_subs")

    def __init__(self, module: nn.Module, bindings: list[Binding]) -> None:
        self._state = _CLOSED
        self._module, self._bindings = module, bindings
        self._subs: list[nn.Module] = []
        self._serial = 0
        self._before = [(slot, _kept(slot)) for slot, _ in bindings]
        if in_transform():
            self._state = _UNBOUND
            return
        with _CLAIMS:
            _refuse_other_thread(module)
            self._write(permanent=True)
        self._state = _LOADED

    def __enter__(self) -> nn.Module:
        if self._state not in (_LOADED, _UNBOUND):
            raise ConcurrencyError(
                explain(
                    f"to_module: this block on {type(self._module).__name__} was entered before.",
                    expected="one `with` for each call of to_module",
                    got=f"a handle that is {self._state}",
                    hint="call params.to_module(m) again for another block.",
                )
            )
        if torch.compiler.is_compiling():
            self._state = _OPEN
            bind(self._bindings, permanent=False)
            return self._module
        with _CLAIMS:
            _refuse_other_thread(self._module)
            self._state = _OPEN
            self._write(permanent=False)
            self._claim()
        return self._module

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            self._state = _CLOSED
            self._restore()
            return
        with _CLAIMS:
            in_order = self._state is _OPEN and all([_owner(sub).blocks[-1] is self for sub in self._subs])
            for block in [self] if in_order else _entangled(self):
                block._restore()
                block._release()
        # An error on its way through the block says more than the order of exits; closing a generator does not.
        if not in_order and (kind is None or issubclass(kind, GeneratorExit)):
            raise _out_of_order(self._module)

    def __del__(self) -> None:
        if getattr(self, "_state", None) is _UNBOUND:
            warnings.warn(
                "to_module: inside a transform or a compiled region the call alone binds nothing; "
                "write `with params.to_module(m):`.",
                stacklevel=2,
            )

    def _write(self, *, permanent: bool) -> None:
        try:
            bind(self._bindings, permanent=permanent)
        except BaseException:
            self._state = _CLOSED
            self._restore()
            raise

    def _claim(self) -> None:
        self._serial = next(_SERIAL)
        for sub in self._module.modules():
            owner = sub.__dict__.setdefault(_OWNER, _Owner())
            owner.thread = threading.get_ident()
            owner.blocks.append(self)
            self._subs.append(sub)

    def _release(self) -> None:
        self._state = _CLOSED
        for sub in self._subs:
            owner = _owner(sub)
            owner.blocks.remove(self)
            if not owner.blocks:
                sub.__dict__.pop(_OWNER, None)
        self._subs = []

    def _restore(self) -> None:
        for slot, value in self._before:
            if slot.store is None:
                slot.owner.set_extra_state(value)
            else:
                slot.store[slot.path[-1]] = value


def _kept(slot: Slot) -> Any:
    # A module may hand out, and update in place, the very object that it keeps.
    return copy.deepcopy(slot.value) if slot.store is None else slot.value


def _owner(module: nn.Module) -> _Owner:
    return module.__dict__[_OWNER]


def _refuse_other_thread(module: nn.Module) -> None:
    thread = threading.get_ident()
    for sub in module.modules():
        owner = sub.__dict__.get(_OWNER)
        if owner is not None and owner.blocks and owner.thread != thread:
            raise ConcurrencyError(
                explain(
                    f"to_module: another thread is inside a block on {type(module).__name__} (or a part of it).",
                    expected="one thread in a module at a time",
                    got=f"thread {thread}, while thread {owner.thread} holds {type(sub).__name__}",
                    hint="apply, params, buffers = tdfunc.functional(m): apply(params, x) is thread-safe.",
                )
            )


def _entangled(block: ModuleHandle) -> list[ModuleHandle]:
    """Return the block and all that are open on the same submodules, the newest first."""
    found = {id(other): other for sub in block._subs for other in _owner(sub).blocks}
    return sorted(found.values(), key=lambda other: -other._serial)


def _out_of_order(module: nn.Module) -> ConcurrencyError:
    return ConcurrencyError(
        explain(
            f"to_module: blocks on {type(module).__name__} were left out of order; its original weights are back.",
            expected="the block entered last to be left first",
            got="one left while a later one was open, or closed by such an exit",
            hint="two generators cannot hold one module: use apply of tdfunc.functional(m).",
        )
    )


def to_module(tree: TensorCollection, module: nn.Module, *, strict: bool = True) -> ModuleHandle:
    """Load a tree into a module for good, or for the length of a `with` block; see `TensorDict.to_module`."""
    module = unwrap(module, "to_module")
    return ModuleHandle(module, match(tree, module, strict))


class ModuleMethods(TensorCollection):
    """To and from modules."""

    __slots__ = ()

    @classmethod
    def from_module(cls, module: nn.Module) -> Any:
        """Return a module's live parameters, buffers and extra state as a tree; see `tdfunc.from_module`."""
        return from_module(module)

    def to_module(self, module: nn.Module, *, strict: bool = True) -> ModuleHandle:
        """Load this tree into a module.

        The call loads at once and for good: a leaf that is a Parameter goes in as itself, another leaf of a
        parameter slot as a new Parameter that shares its storage and has the slot's `requires_grad`. As a context
        manager (`with params.to_module(m) as m:`) the leaves are bound as they are, so that gradients and
        transforms reach them (buffers as clones), and on every exit what was there before is put back.

        Everything is checked before the first write. Inside `vmap`, `grad`, a dual level or a compiled region
        only the `with` form means anything.

        Args:
            module: The module; a sub-tree fits its submodule.
            strict: Whether every path of the module must be in the tree (non-persistent buffers may be absent).

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
        return to_module(self, module, strict=strict)
