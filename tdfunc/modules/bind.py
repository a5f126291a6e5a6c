"""A tree back into a module: `to_module`, for good or for the length of a `with` block."""

import threading
import warnings
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch

from tdfunc._collection import TensorCollection
from tdfunc._errors import ConcurrencyError, LeafMismatchError, TieError, TreeStructureError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorBase
from tdfunc._types import Kind, Path
from tdfunc.modules.extract import from_module
from tdfunc.modules.slots import Slot, same_memory, unwrap, walk
from tdfunc.ops.structure import iter_items

_OWNER = "_tdfunc_owner"


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
    absent = [p for p, slot in slots.items() if p not in leaves and slot.kind is not Kind.NON_PERSISTENT] if strict else []
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
        return
    value: Tensor = slot.value
    if not isinstance(leaf, Tensor):
        raise LeafMismatchError(
            explain(f"to_module: leaf {dotted(slot.path)!r} is no tensor.", expected=f"shape {tuple(value.shape)}", got=type(leaf).__name__)
        )
    if leaf.shape == value.shape and leaf.dtype == value.dtype:
        return
    hint = "cast the tree (td.apply(lambda x: x.to(dtype))) or the module first."
    if leaf.shape != value.shape:
        hint = "the tree belongs to another architecture."
        if leaf.shape[1:] == value.shape:
            hint = "the tree is stacked: bind one member, stacked[i].to_module(m), or use Ensemble."
        elif leaf.dim() == 2 and leaf.shape == value.shape[::-1] and isinstance(slot.owner, nn.Linear):
            hint = "nn.Linear stores (out_features, in_features); transpose the leaf first."
    raise LeafMismatchError(
        explain(
            f"to_module: leaf {dotted(slot.path)!r} does not fit {slot.title}.",
            expected=f"shape {tuple(value.shape)}, {value.dtype}",
            got=f"shape {tuple(leaf.shape)}, {leaf.dtype}",
            hint=hint,
        )
    )


def _check_ties(bindings: list[Binding]) -> None:
    first: dict[int, Binding] = {}
    for binding in bindings:
        if binding.slot.store is None:
            continue
        known = first.setdefault(id(binding.slot.value), binding)
        if same_memory(known.leaf, binding.leaf) or _equal(known.leaf, binding.leaf):
            continue
        raise TieError(
            explain(
                f"to_module: {dotted(known.slot.path)!r} and {dotted(binding.slot.path)!r} are one tensor in the module.",
                expected="the same values for both",
                got="two tensors that differ",
                hint="set one of the paths to the other's leaf, or untie the module.",
            )
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    if in_transform() or a.is_meta or b.is_meta:
        return False
    return torch.equal(a, b)


def in_transform() -> bool:
    """Whether values cannot outlive the code that runs now: a functorch level, a dual level, a compiled region."""
    return torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None or _dual_level() >= 0


def _dual_level() -> int:
    return torch.autograd.forward_ad._current_level


def bind(bindings: list[Binding], *, permanent: bool) -> None:
    """Write the leaves into their slots: as Parameters that share storage, or (in a block) as they are."""
    # One Parameter for each tied slot, or the tie would be broken.
    made: dict[int, Any] = {}
    old = [(binding, id(binding.slot.value)) for binding in bindings if binding.slot.store is not None]
    for (slot, leaf), tied in old:
        if tied not in made:
            made[tied] = _stored(slot, leaf) if permanent else _borrowed(slot, leaf)
        # Assigning to an existing key keeps the order of the slots.
        slot.store[slot.name] = made[tied]  # pyright: ignore[reportOptionalSubscript]
    for slot, leaf in bindings:
        if slot.store is None:
            slot.owner.set_extra_state(leaf.value if isinstance(leaf, NonTensorBase) else leaf)  # pyright: ignore


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

    def __init__(self, thread: int) -> None:
        self.thread, self.blocks = thread, list[ModuleHandle]()

    def __deepcopy__(self, memo: Any) -> "_Owner":
        return self


class ModuleHandle:
    """What `to_module` returns: a context manager that binds for a block and puts back what was there."""

    __slots__ = ("_bindings", "_before", "_entered", "_loaded", "_module", "_owners", "_subs")

    def __init__(self, module: nn.Module, bindings: list[Binding]) -> None:
        self._module, self._bindings = module, bindings
        self._before = [(slot, slot.value) for slot, _ in bindings]
        self._owners: list[tuple[nn.Module, _Owner]] = []
        self._entered = False
        self._loaded = not in_transform()
        if self._loaded:
            self._refuse_other_thread()
            bind(bindings, permanent=True)

    def __enter__(self) -> nn.Module:
        if self._entered:
            raise ConcurrencyError(explain("to_module: this block was entered before.", hint="call params.to_module(m) again for another block."))
        self._entered = True
        if not torch.compiler.is_compiling():
            self._claim()
        bind(self._bindings, permanent=False)
        return self._module

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if torch.compiler.is_compiling():
            self._restore()
            return
        if not self._owners:
            raise _out_of_order(self._module)
        in_order = all(owner.blocks and owner.blocks[-1] is self for _, owner in self._owners)
        if in_order:
            self._restore()
            self._release()
            return
        self._restore_originals()
        raise _out_of_order(self._module)

    def __del__(self) -> None:
        if not self._loaded and not self._entered:
            warnings.warn(
                "to_module: inside a transform or a compiled region the call alone binds nothing; write `with params.to_module(m):`.",
                stacklevel=2,
            )

    def _refuse_other_thread(self) -> None:
        thread = threading.get_ident()
        for sub in self._module.modules():
            owner = sub.__dict__.get(_OWNER)
            if owner is not None and owner.thread != thread:
                raise _second_thread(self._module)

    def _claim(self) -> None:
        thread = threading.get_ident()
        for sub in self._module.modules():
            owner = sub.__dict__.setdefault(_OWNER, _Owner(thread))
            if owner.thread != thread:
                self._release()
                raise _second_thread(self._module)
            owner.blocks.append(self)
            self._owners.append((sub, owner))

    def _release(self) -> None:
        for sub, owner in self._owners:
            if self in owner.blocks:
                owner.blocks.remove(self)
            if not owner.blocks:
                sub.__dict__.pop(_OWNER, None)
        self._owners = []

    def _restore(self) -> None:
        for slot, value in self._before:
            if slot.store is None:
                slot.owner.set_extra_state(value)
            else:
                slot.store[slot.name] = value

    def _restore_originals(self) -> None:
        """Undo every open block of this module, the newest first, and close them all."""
        blocks = {id(b): b for _, owner in self._owners for b in owner.blocks}
        for block in reversed(list(blocks.values())):
            block._restore()
        for block in blocks.values():
            block._release()


def _second_thread(module: nn.Module) -> ConcurrencyError:
    return ConcurrencyError(
        explain(
            f"to_module: another thread is inside a block on {type(module).__name__} (or a part of it).",
            hint="apply, params, buffers = tdfunc.functional(m): apply(params, x) is thread-safe.",
        )
    )


def _out_of_order(module: nn.Module) -> ConcurrencyError:
    return ConcurrencyError(
        explain(
            f"to_module: blocks on {type(module).__name__} were left out of order; its original weights are back.",
            expected="the block entered last to be left first",
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
