"""A tree back into a module: `to_module`, for good or for the length of a `with` block."""

import itertools
import threading
import warnings
from types import TracebackType
from typing import Any

from torch import nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_transform, is_compiling
from tdfunc.core.errors import ConcurrencyError
from tdfunc.modules.extract import from_module
from tdfunc.modules.match import Match, match
from tdfunc.modules.slots import unwrap

_OWNER = "_tdfunc_owner"


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

    __slots__ = ("_match", "_module", "_serial", "_state")

    def __init__(self, module: nn.Module, match: Match) -> None:
        self._state = _CLOSED
        self._module, self._match = module, match
        self._serial = 0
        if in_transform():
            self._state = _UNBOUND
            return
        try:
            with _CLAIMS:
                _refuse_other_thread(match.modules)
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
            self._open()
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
            # What Ctrl-C cut short is done again: every step of it may be done twice.
            self._leave()
            raise
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

    def _open(self) -> None:
        if is_compiling():
            self._state = _OPEN
            self._match.write(permanent=False)
            return
        with _CLAIMS:
            _refuse_other_thread(self._match.modules)
            self._state = _OPEN
            self._match.write(permanent=False)
            self._claim()

    def _claim(self) -> None:
        self._serial = next(_SERIAL)
        for sub in self._match.modules:
            owner = sub.__dict__.setdefault(_OWNER, _Owner())
            owner.thread = threading.get_ident()
            owner.blocks.append(self)

    def _leave(self) -> bool:
        """Put back what was there and let go of the module; False where blocks are left out of order."""
        if self._state is _CLOSED:
            return False
        if is_compiling():
            self._match.restore()
            self._state = _CLOSED
            return True
        with _CLAIMS:
            in_order = all([blocks[-1] is self for blocks in _blocks(self._match.modules) if self in blocks])
            for block in [self] if in_order else _entangled(self):
                block._match.restore()
                block._release()
        return in_order

    def _release(self) -> None:
        for sub in self._match.modules:
            owner = sub.__dict__.get(_OWNER)
            if owner is not None:
                if self in owner.blocks:
                    owner.blocks.remove(self)
                if not owner.blocks:
                    sub.__dict__.pop(_OWNER, None)
        self._state = _CLOSED


def _blocks(modules: list[nn.Module]) -> list[list[ModuleHandle]]:
    """Return for each module that blocks are open on the blocks, the oldest first."""
    return [sub.__dict__[_OWNER].blocks for sub in modules if _OWNER in sub.__dict__]


def _refuse_other_thread(modules: list[nn.Module]) -> None:
    thread = threading.get_ident()
    for sub in modules:
        owner = sub.__dict__.get(_OWNER)
        if owner is not None and owner.blocks and owner.thread != thread:
            raise ConcurrencyError(
                f"to_module: another thread is inside a block on {type(modules[0]).__name__} (or a part of it).",
                expected="one thread in a module at a time",
                got=f"thread {thread}, while thread {owner.thread} holds {type(sub).__name__}",
                hint="apply, params, buffers = tdfunc.functional(m): apply(params, x) is thread-safe.",
            )


def _entangled(block: ModuleHandle) -> list[ModuleHandle]:
    """Return the block and all that are open on the same submodules, the newest first."""
    found = {id(other): other for blocks in _blocks(block._match.modules) for other in blocks} | {id(block): block}
    return sorted(found.values(), key=lambda other: -other._serial)


def _out_of_order(module: nn.Module) -> ConcurrencyError:
    return ConcurrencyError(
        f"to_module: blocks on {type(module).__name__} were left out of order; its original weights are back.",
        expected="the block entered last to be left first",
        got="one left while a later one was open, or closed by such an exit",
        hint="two generators cannot hold one module: use apply of tdfunc.functional(m).",
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
