"""The slots of a module: where its parameters, buffers and extra state live, found by one walk."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc.core.context import in_transform
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Kind, Path

EXTRA_STATE = "_extra_state"
LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)


class Slot(NamedTuple):
    """One place in a module that holds a leaf; `store` is the dict to write to (None for extra state)."""

    path: Path
    owner: nn.Module
    store: dict[str, Any] | None
    kind: Kind

    @property
    def name(self) -> str:
        """The last key of the path."""
        return self.path[-1]

    @property
    def value(self) -> Any:
        """What the slot holds now."""
        return self.owner.get_extra_state() if self.store is None else self.store[self.name]

    @property
    def title(self) -> str:
        """`Linear.weight`, for messages."""
        return f"{type(self.owner).__name__}.{self.name}"


def unwrap(module: nn.Module, call: str) -> nn.Module:
    """Return the module under `torch.compile`'s wrapper; refuse what cannot be a pure function.

    Raises:
        TypeError: It is no module.
        UnsupportedError: It is a ScriptModule, a data-parallel wrapper, or a quantized module of packed weights.
    """
    if not isinstance(module, nn.Module):
        raise error(TypeError, f"{call}: not a module.", expected="torch.nn.Module", got=type(module).__name__)
    # By name: importing torch._dynamo for an isinstance test would cost a second.
    while type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{call}: a ScriptModule keeps its weights in compiled code, where they cannot be replaced.",
            got=type(module).__name__,
            hint="pass the nn.Module that it was scripted or traced from.",
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedError(
            f"{call}: {type(module).__name__} copies the module on every call.", hint="pass its .module."
        )
    if keeps_own_state(module) and any(isinstance(value, torch.ScriptObject) for value in module.__dict__.values()):
        raise UnsupportedError(
            f"{call}: {type(module).__name__} keeps its weights packed, where they cannot be read or replaced.",
            expected="weights that are parameters or buffers",
            got=f"{type(module).__module__}.{type(module).__qualname__}",
            hint="use the module that it was quantized from, or take the parts beside it: from_module(model.head).",
        )
    return module


def is_renormed(module: nn.Module) -> bool:
    """Whether a forward writes to the module's parameters: a table that keeps its rows under a norm."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def keeps_own_state(module: nn.Module) -> bool:
    """Whether a module may have state beside its parameters and buffers."""
    cls = type(module)
    return (
        cls.get_extra_state is not nn.Module.get_extra_state
        or cls._save_to_state_dict is not nn.Module._save_to_state_dict
    )


def walk(module: nn.Module, call: str) -> list[Slot]:
    """Return the slots in the order of `state_dict`; a shared submodule is visited under each of its paths.

    Raises:
        UnsupportedError: A parameter is lazy and has no shape yet.
    """
    slots: list[Slot] = []
    _collect(module, call, (), slots, [])
    return slots


def _collect(module: nn.Module, call: str, at: Path, slots: list[Slot], above: list[nn.Module]) -> None:
    module = unwrap(module, call)
    if any(module is outer for outer in above):
        raise _cycle_error(module, call, at)
    for name, value in module._parameters.items():
        if value is not None:
            if isinstance(value, LAZY):
                raise _lazy_error(module, call, (*at, name))
            slots.append(Slot((*at, name), module, module._parameters, Kind.PARAMETER))
    for name, value in module._buffers.items():
        if value is not None:
            if isinstance(value, LAZY):
                raise _lazy_error(module, call, (*at, name))
            kind = Kind.NON_PERSISTENT if name in module._non_persistent_buffers_set else Kind.BUFFER
            slots.append(Slot((*at, name), module, module._buffers, kind))
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        slots.append(Slot((*at, EXTRA_STATE), module, None, Kind.EXTRA_STATE))
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, call, (*at, name), slots, [*above, module])


def _cycle_error(module: nn.Module, call: str, path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{call}: {dotted(path)!r} is {type(module).__name__} again, which contains it.",
        expected="submodules that form a tree",
        got="a submodule that registers a module above it",
        hint="keep the reference out of the registry: self.parent = [module], or a weakref.",
    )


def _lazy_error(module: nn.Module, call: str, path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{call}: {dotted(path)!r} of {type(module).__name__} is uninitialised.",
        hint="run the module once on an example input, so that lazy layers get their shapes.",
    )


def same_memory(a: Any, b: Any) -> bool:
    """Whether two leaves are one tensor: the same object, or views of the same memory in the same way."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    try:
        return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.data_ptr() != 0
    # Tensors without memory of their own (batched, fake) are one only by identity.
    except RuntimeError:
        return False


def is_one_tensor(a: Any, b: Any) -> bool:
    """Whether two leaves may stand for one tensor: one memory, or equal values where no gradient would be split."""
    if same_memory(a, b):
        return True
    if in_transform() or a.requires_grad or b.requires_grad or a.is_meta or b.is_meta:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
