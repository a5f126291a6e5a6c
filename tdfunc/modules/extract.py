"""A module's parameters, buffers and extra state as a tree, and trees split by kind."""

from typing import Any, TypeVar

import torch
from torch import Size, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.keys import Filter
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.shapes import EMPTY
from tdfunc.core.ties import by_identity
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.modules.slots import LAZY, Slot, keeps_own_state, walk
from tdfunc.ops.structure import entries, partition, restore_ties

T = TypeVar("T", bound=TensorCollection)
# The walk says what is wrong with them.
_UNREADABLE = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)
_DEEPEST = 100


def from_module(module: nn.Module) -> Any:
    """Return a module's live parameters, buffers and extra state as a tree nested by module path.

    Nothing is copied: the leaves are the module's own Parameters and buffers. Tied weights and the weights of a
    shared submodule are one leaf, readable under every path; each leaf's kind is recorded.

    Args:
        module: Any module; one wrapped by `torch.compile` is unwrapped.

    Returns:
        A `TensorDict` of batch size [], in registration order; submodules without leaves are left out.

    Raises:
        UnsupportedError: A ScriptModule, a data-parallel wrapper, packed weights of quantized layers, or a lazy module
            that has not run yet.

    Examples:
        >>> params = tdf.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> list(params.keys()), params["2", "weight"].shape
        (['0', '2'], torch.Size([2, 4]))
    """
    leaves: list[Any] = []
    tree = _read(module, leaves, 0) if isinstance(module, nn.Module) else None
    if tree is not None and len({id(leaf) for leaf in leaves}) == len(leaves):
        return tree
    # Ties, extra state, wrappers, and what cannot be read at all.
    slots = walk(module, "from_module")
    pairs = [(slot, NonTensorData(slot.value) if slot.store is None else slot.value) for slot in slots]
    return tree_of(pairs, by_identity([(slot.path, leaf) for slot, leaf in pairs]))


def _read(module: nn.Module, leaves: list[Any], depth: int) -> Any:
    """Return the tree of an ordinary module in one walk, collecting its leaves; None where only `walk` will do."""
    if keeps_own_state(module) or "_orig_mod" in module._modules:
        return None
    if isinstance(module, _UNREADABLE) or depth > _DEEPEST:
        return None
    data: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    for table, hidden in ((module._parameters, None), (module._buffers, module._non_persistent_buffers_set)):
        for name, value in table.items():
            if value is None:
                continue
            if type(value) in LAZY:
                return None
            data[name] = value
            leaves.append(value)
            kinds[name] = Kind.PARAMETER if hidden is None else Kind.NON_PERSISTENT if name in hidden else Kind.BUFFER
    for name, child in module._modules.items():
        if child is not None:
            node = _read(child, leaves, depth + 1)
            if node is None:
                return None
            if node._data:
                data[name] = node
    return TensorCollection._open._make(data, EMPTY, None, None, Static(kinds) if kinds else None)


def tree_of(pairs: list[tuple[Slot, Any]], ties: Ties, batch_size: Size = EMPTY) -> Any:
    """Build the tree of (slot, leaf) pairs, with their kinds and the given groups of tied paths."""
    root = _Level()
    # Slots of one submodule come one after another: its level is looked up once.
    last, level = None, root
    for slot, leaf in pairs:
        parent = slot.path[:-1]
        if parent != last:
            last, level = parent, root.descend(parent)
        level.data[slot.path[-1]] = leaf
        level.kinds[slot.path[-1]] = slot.kind
    tree = root.freeze(batch_size)
    return restore_ties(tree, ties) if ties else tree


class _Level:
    """A node under construction."""

    __slots__ = ("data", "kinds")

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.kinds: dict[str, Kind] = {}

    def descend(self, path: Path) -> "_Level":
        level = self
        for key in path:
            level = level.data.setdefault(key, _Level())
        return level

    def freeze(self, size: Size) -> Any:
        data = {key: value.freeze(size) if type(value) is _Level else value for key, value in self.data.items()}
        return TensorCollection._open._make(data, size, None, None, Static(self.kinds) if self.kinds else None)


def split(tree: T) -> tuple[T, T]:
    """Split a module's tree into its parameters and everything else (buffers and extra state).

    Args:
        tree: A tree of `from_module`, `stack_modules` or `init_ensemble`, or one made from them.

    Returns:
        The parameters and the rest; `combine` puts them together again.

    Raises:
        UnsupportedError: The tree does not know what its leaves are.

    Examples:
        >>> params, buffers = tdf.split(tdf.from_module(nn.BatchNorm1d(3)))
        >>> list(params.keys()), list(buffers.keys())
        (['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked'])
    """
    found = entries(tree)
    if found and all(entry.kind is None for entry in found):
        raise UnsupportedError(
            "split: the tree does not record what its leaves are.",
            expected="a tree of from_module, stack_modules or init_ensemble",
            hint="use partition(tree, filter), or td.set(key, leaf, kind=Kind.PARAMETER).",
        )
    return partition(tree, Filter(Kind.PARAMETER))
