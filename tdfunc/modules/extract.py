"""A module's parameters, buffers and extra state: the slots that hold them, their tree, and trees split by kind.

`walk` lists the slots in the order of `state_dict`, with a shared submodule under each of its paths; `from_module`
makes a tree of what they hold. Nothing is copied.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.context import in_transform
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import Filter, dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.shapes import EMPTY
from tdfunc.core.ties import by_identity
from tdfunc.core.types import Kind, Path
from tdfunc.ops.base.reading import entries
from tdfunc.ops.edits.edit import restore_ties
from tdfunc.ops.edits.structure import partition

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)
EXTRA_STATE = "_extra_state"
_LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)


class Slot(NamedTuple):
    """One place in a module that holds a leaf; `store` is the dict to write to (None for extra state)."""

    path: Path
    owner: nn.Module
    store: dict[str, Any] | None
    kind: Kind

    @property
    def value(self) -> Any:
        """The leaf that the slot holds now."""
        if self.store is None:
            return self.owner.get_extra_state()
        return self.store[self.path[-1]]


def unwrap(module: nn.Module, call: str) -> nn.Module:
    """Return the module under `torch.compile`'s wrapper; refuse modules whose weights cannot be replaced.

    Raises:
        TypeError: It is not a module.
        UnsupportedError: It is a ScriptModule, or a quantized module of packed weights.
    """
    if not isinstance(module, nn.Module):
        raise error(TypeError, f"{call}: the module is not an nn.Module.", got=type(module).__name__)
    # By name: an isinstance test would import torch._dynamo.
    while "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
        module = module._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{call}: the weights of a {type(module).__name__} are in compiled code, where they cannot be replaced.",
            hint="pass the nn.Module that it was scripted or traced from.",
        )
    saves_itself = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    if saves_itself and any(isinstance(value, torch.ScriptObject) for value in module.__dict__.values()):
        raise UnsupportedError(
            f"{call}: {type(module).__name__} keeps its weights packed, where they cannot be read or replaced.",
            expected="weights that are parameters or buffers",
            got=f"{type(module).__module__}.{type(module).__qualname__}",
            hint="use the module that it was quantized from, or take the other parts: from_module(model.head).",
        )
    return module


def has_extra_state(module: nn.Module) -> bool:
    """Return whether the module's class defines extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def is_renormed(module: nn.Module) -> bool:
    """Return whether forward writes the module's parameters: an embedding with `max_norm` scales rows in place."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def walk(module: nn.Module, call: str, at: Path = ()) -> list[Slot]:
    """Return the slots in the order of `state_dict`; a shared submodule is visited under each of its paths.

    Raises:
        UnsupportedError: A parameter is lazy and has no shape yet, or cannot be replaced.
    """
    module = unwrap(module, call)
    slots: list[Slot] = []
    hidden = module._non_persistent_buffers_set
    for store, kind in ((module._parameters, Kind.PARAMETER), (module._buffers, Kind.BUFFER)):
        for name, value in store.items():
            if value is None:
                continue
            path = (*at, name)
            if type(value) in _LAZY:
                raise UnsupportedError(
                    f"{call}: {dotted(path)!r} of {type(module).__name__} is uninitialised.",
                    hint="run the module once on an example input, so that lazy layers get their shapes.",
                )
            slots.append(Slot(path, module, store, Kind.NON_PERSISTENT if name in hidden else kind))
    if has_extra_state(module):
        slots.append(Slot((*at, EXTRA_STATE), module, None, Kind.EXTRA_STATE))
    for name, child in module._modules.items():
        if child is not None:
            slots += walk(child, call, (*at, name))
    return slots


def from_module(module: nn.Module) -> "TensorDict":
    """Return a module's live parameters, buffers and extra state as a tree nested by module path.

    Nothing is copied: the leaves are the module's own Parameters and buffers. Tied weights and the weights of a
    shared submodule are one leaf, readable under every path; each leaf's kind is recorded. A `DataParallel` or
    `DistributedDataParallel` has its model under the path `module`: pass `wrapper.module`.

    Args:
        module: Any module; one wrapped by `torch.compile` is unwrapped.

    Returns:
        A `TensorDict` of batch size [], in registration order; submodules without leaves are left out.

    Raises:
        UnsupportedError: The module is a ScriptModule, has packed weights of quantized layers, or is lazy and has not
            run yet.

    Examples:
        >>> params = tdf.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> list(params.keys()), params["2", "weight"].shape
        (['0', '2'], torch.Size([2, 4]))
    """
    slots = walk(module, "from_module")
    pairs = [(slot, NonTensorData(slot.value) if slot.store is None else slot.value) for slot in slots]
    root = _Level()
    # Slots of one submodule come one after another: its level is looked up once.
    last = None
    level = root
    for slot, leaf in pairs:
        parent = slot.path[:-1]
        if parent != last:
            last = parent
            level = root
            for key in parent:
                level = level.data.setdefault(key, _Level())
        level.data[slot.path[-1]] = leaf
        level.kinds[slot.path[-1]] = slot.kind
    ties = by_identity([(slot.path, leaf) for slot, leaf in pairs])
    return restore_ties(root.freeze(), ties)


class _Level:
    """A node under construction."""

    __slots__ = ("data", "kinds")

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.kinds: dict[str, Kind] = {}

    def freeze(self) -> Any:
        data = {key: value.freeze() if type(value) is _Level else value for key, value in self.data.items()}
        static = Static(self.kinds) if self.kinds else None
        return TensorCollection._open._make(data, EMPTY, None, None, static)


def split(tree: T) -> tuple[T, T]:
    """Split a module's tree into its parameters and everything else (buffers and extra state).

    Args:
        tree: A tree of `from_module`, `stack_modules` or `init_ensemble`, or one made from them.

    Returns:
        The parameters and the rest; `combine` puts them together again.

    Raises:
        UnsupportedError: The tree does not record the kinds of its leaves.

    Examples:
        >>> params, buffers = tdf.split(tdf.from_module(nn.BatchNorm1d(3)))
        >>> list(params.keys()), list(buffers.keys())
        (['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked'])
    """
    found = entries(tree)
    if found and all(entry.kind is None for entry in found):
        raise UnsupportedError(
            "split: the tree does not record the kinds of its leaves.",
            expected="a tree of from_module, stack_modules or init_ensemble",
            hint="use partition(tree, filter), or td.set(key, leaf, kind=Kind.PARAMETER).",
        )
    return partition(tree, Filter(Kind.PARAMETER))


def is_one_tensor(a: Any, b: Any) -> bool:
    """Return whether two leaves may stand for one tensor.

    They may if they view the same memory in the same way, or if they are equal and no gradient is split.
    """
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    try:
        if a.data_ptr() == b.data_ptr() != 0 and a.stride() == b.stride():
            return True
    # Tensors without memory (batched, fake) are one only by identity.
    except RuntimeError:
        return False
    if in_transform() or a.requires_grad or b.requires_grad or a.is_meta:
        return False
    return torch.equal(a, b)
