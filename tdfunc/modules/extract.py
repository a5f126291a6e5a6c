"""A module's parameters, buffers and extra state as a tree, and trees split by kind."""

from typing import Any, TypeVar

from torch import nn

from tdfunc._collection import Static, TensorCollection, iter_leaves
from tdfunc._errors import UnsupportedError, explain
from tdfunc._keys import Filter
from tdfunc._nontensor import NonTensorData
from tdfunc._shapes import EMPTY
from tdfunc._ties import by_identity
from tdfunc._types import Kind, Ties
from tdfunc.modules.slots import Slot, walk
from tdfunc.ops.structure import entries, partition, restore_ties

T = TypeVar("T", bound=TensorCollection)


def from_module(module: nn.Module) -> Any:
    """Return a module's live parameters, buffers and extra state as a tree nested by module path.

    Nothing is copied: the leaves are the module's own Parameters and buffers. Tied weights and the weights of a
    shared submodule are one leaf, readable under every path; each leaf's kind is recorded.

    Args:
        module: Any module; one wrapped by `torch.compile` is unwrapped.

    Returns:
        A `TensorDict` of batch size [], in registration order; submodules without leaves are left out.

    Raises:
        UnsupportedError: A ScriptModule, a data-parallel wrapper, or a lazy module that has not run yet.

    Examples:
        >>> params = tdf.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> list(params.keys()), params["2", "weight"].shape
        (['0', '2'], torch.Size([2, 4]))
    """
    slots = list(walk(module, "from_module"))
    leaves = [(slot.path, NonTensorData(slot.value) if slot.store is None else slot.value) for slot in slots]
    return tree_of(list(zip(slots, [leaf for _, leaf in leaves], strict=True)), by_identity(leaves))


def tree_of(pairs: list[tuple[Slot, Any]], ties: Ties) -> Any:
    """Build the tree of (slot, leaf) pairs, with their kinds and the given groups of tied paths."""
    root: dict[str, Any] = {}
    kinds: dict[tuple[str, ...], dict[str, Kind]] = {}
    for slot, leaf in pairs:
        level = root
        for key in slot.path[:-1]:
            level = level.setdefault(key, {})
        level[slot.name] = leaf
        kinds.setdefault(slot.path[:-1], {})[slot.name] = slot.kind
    return restore_ties(_freeze(root, kinds, ()), ties)


def _freeze(level: dict[str, Any], kinds: dict[tuple[str, ...], dict[str, Kind]], at: tuple[str, ...]) -> Any:
    data = {key: _freeze(value, kinds, (*at, key)) if isinstance(value, dict) else value for key, value in level.items()}
    here = kinds.get(at)
    return TensorCollection._open._make(data, EMPTY, None, None, Static(here) if here else None)


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
            explain(
                "split: the tree does not record what its leaves are.",
                expected="a tree of from_module, stack_modules or init_ensemble",
                hint="use partition(tree, filter), or td.set(key, leaf, kind=Kind.PARAMETER).",
            )
        )
    return partition(tree, Filter(Kind.PARAMETER))


def leaf_count(tree: TensorCollection) -> int:
    """Return the number of leaves, every path of a tied one counted."""
    return sum(1 for _ in iter_leaves(tree))
