"""Weight matching: the neurons of one model in the order of another. The function of the model does not change."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, UnsupportedError, as_count, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.core.walk import replace
from tdfunc.ops.base.foreach import check_keys
from tdfunc.ops.base.reading import get
from tdfunc.storage.scales import check_unscaled

T = TypeVar("T", bound=TensorCollection)
# The leaves of one order of neurons with the dimension of each; the first leaf has the number of neurons.
Group: TypeAlias = Mapping[Path, int]


def channel_groups(params: TensorCollection) -> list[dict[Path, int]]:
    """Return the orders of neurons of a chain of layers: linear, convolution, and norms between them.

    The layers must run in the order of the tree; layers whose keys are numbers run by number. The neurons of a layer
    with a matrix or kernel are its first dimension. The second dimension of the next such layer reads them, in blocks
    if feature maps were flattened. The outputs of the last layer keep their order. Write the groups of other networks
    by hand.

    Args:
        params: The parameters, and the buffers of norms if there are any.

    Raises:
        UnsupportedError: A leaf is tied, or the tree has the order of a file, in which the layers are sorted by name.
        BatchSizeError: The tree is an ensemble.

    Examples:
        >>> _, params, _ = tdf.functional(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)))
        >>> channel_groups(params)
        [{('0', 'weight'): 0, ('0', 'bias'): 0, ('2', 'weight'): 1}]
    """
    if params._ties:
        tied = [list(map(dotted, paths)) for paths in params._ties]
        raise UnsupportedError("channel_groups: a leaf is tied.", got=tied)
    if params._batch_size:
        raise BatchSizeError(
            "channel_groups: the models are stacked, and each has its own order of neurons.",
            expected="one model",
            got=f"batch size {list(params._batch_size)}",
            hint="match one member at a time: tdf.stack([weight_matching(a[i], b[i]) for i in range(len(a))]).",
        )
    groups: list[dict[Path, int]] = []
    # The leaves by layer; numbers, such as counts of passes, have no neurons.
    layers: dict[Path, dict[Path, Tensor]] = {}
    for path, leaf in iter_leaves(params):
        if leaf.dim():
            layers.setdefault(path[:-1], {})[path] = leaf
    for layer in _by_run(layers):
        leaves = layers[layer]
        kernels = [path for path, leaf in leaves.items() if leaf.dim() > 1]
        if kernels:
            if groups:
                groups[-1] |= dict.fromkeys(kernels, 1)
            groups.append({})
        if groups:
            groups[-1] |= dict.fromkeys(leaves, 0)
    return groups[:-1]


def _by_run(layers: Mapping[Path, Mapping[Path, Tensor]]) -> list[Path]:
    """Return the layers in the order in which they run."""
    is_sorted = any(_has_sorted_keys(leaves) for leaves in layers.values())
    siblings: dict[Path, dict[str, None]] = {}
    for layer in layers:
        for depth, key in enumerate(layer):
            siblings.setdefault(layer[:depth], {})[key] = None
    places = {node: _places(node, keys, is_sorted=is_sorted) for node, keys in siblings.items()}
    first = {layer: place for place, layer in enumerate(layers)}

    def order(layer: Path) -> tuple[list[int], int]:
        return [places[layer[:depth]][key] for depth, key in enumerate(layer)], first[layer]

    return sorted(layers, key=order)


def _has_sorted_keys(leaves: Iterable[Path]) -> bool:
    """Return whether a layer has its bias before its weight, as in other programs' files, which are sorted by name."""
    keys = [path[-1] for path in leaves]
    return "bias" in keys and "weight" in keys and keys.index("bias") < keys.index("weight")


def _places(node: Path, keys: Iterable[str], *, is_sorted: bool) -> dict[str, int]:
    """Return the place of each child of a node in the order in which they run."""
    names = list(keys)
    counted = [re.fullmatch(r"(.*?)([0-9]+)", name) for name in names]
    stems = {match[1] if match else None for match in counted}
    is_counted = stems == {""} or (is_sorted and len(stems) == 1 and None not in stems)
    if is_counted:
        return {match[0]: int(match[2]) for match in counted if match}
    if is_sorted and len(names) > 1:
        where = f"under {dotted(node)!r}" if node else "of the tree"
        raise UnsupportedError(
            f"channel_groups: the order of the layers {where} is not known.",
            expected="a tree in the order in which its layers run, as from_module makes it",
            got=f"the order of a file: {', '.join(names)}",
            hint="groups=channel_groups(tdf.from_module(model)) has the order of the module.",
        )
    return {name: place for place, name in enumerate(names)}


def permute_channels(params: T, groups: Sequence[Group], orders: Sequence[Tensor]) -> T:
    """Return the model with the neurons of each group in another order.

    Args:
        params: The model.
        groups: The leaves of each order, as `channel_groups` returns them.
        orders: The number of the neuron in each place, for each group.

    Raises:
        LeafMismatchError: A dimension is not a multiple of the number of neurons.

    Examples:
        >>> params = TensorDict({"w": torch.tensor([1.0, 2.0, 3.0])})
        >>> permute_channels(params, [{("w",): 0}], [torch.tensor([2, 0, 1])])["w"]
        tensor([3., 1., 2.])
    """
    new: dict[Path, Tensor] = {}
    for group, order in zip(groups, orders, strict=True):
        for path, dim in group.items():
            # A leaf can be in several groups.
            leaf = new[path] if path in new else get(params, path)
            new[path] = _reordered(path, leaf, [(dim, order)])
    return replace(params, new)


def _reordered(path: Path, leaf: Tensor, orders: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return a leaf with the neurons of some dimensions in other orders."""
    for dim, order in orders:
        blocks = _blocks(path, leaf, dim, len(order))
        leaf = blocks.index_select(dim, order).reshape(leaf.shape)
    return leaf


def weight_matching(a: TensorCollection, b: T, *, groups: Sequence[Group] | None = None, max_iter: int = 100) -> T:
    """Return the second model with its neurons in the order that brings its weights nearest to the first model.

    Its function does not change: `barrier(loss, a, weight_matching(a, b))` is often much below `barrier(loss, a, b)`.
    Each step solves one assignment exactly. The steps end at a local optimum, which depends on the order of the groups.

    Args:
        a: The model that does not change.
        b: The model to reorder.
        groups: The leaves of each order. By default `channel_groups(b)`, for a chain of layers. Leave out the channels
            before a `GroupNorm` of several groups, whose order is part of the function.
        max_iter: The largest number of rounds over the groups.

    Raises:
        TreeStructureError: The trees have different paths.
        LeafMismatchError: A dimension is not a multiple of the number of neurons.
        ValueError: A leaf of the groups contains NaN or infinities, or products of its numbers overflow: no order of
            such neurons is nearest.

    Source:
        Ainsworth, Hayase and Srinivasa, "Git re-basin: merging models modulo permutation symmetries" (2022), algorithm
        1, with the groups in the given order and not in random order.

    Examples:
        >>> params = TensorDict({"w": torch.tensor([1.0, 2.0, 3.0])})
        >>> other = TensorDict({"w": torch.tensor([3.0, 1.0, 2.0])})
        >>> weight_matching(params, other, groups=[{("w",): 0}])["w"]
        tensor([1., 2., 3.])
    """
    check_keys(a, b, "weight_matching")
    check_unscaled("weight_matching", a)
    check_unscaled("weight_matching", b)
    if groups is None:
        groups = channel_groups(b)
    _check_finite((a, b), groups)
    orders = [torch.arange(_count_neurons(b, group)) for group in groups]
    # By path, the dimension of each group that has it, by the number of the group.
    dims: dict[Path, dict[int, int]] = {}
    for place, group in enumerate(groups):
        for path, dim in group.items():
            dims.setdefault(path, {})[place] = dim
    with torch.no_grad():
        for _ in range(as_count("max_iter", max_iter, least=0)):
            is_better = False
            for place, group in enumerate(groups):
                profits: list[Tensor] = []
                for path, dim in group.items():
                    # Of the leaves of this group alone: the whole model for each group would be pairs of groups.
                    others = [(own, orders[other]) for other, own in dims[path].items() if other != place]
                    moved = _reordered(path, get(b, path), others)
                    profits.append(_profit(path, get(a, path), moved, dim, len(orders[place])))
                profit = torch.stack(profits).sum(0)
                order = _assign(profit)
                if _is_better(profit, order, orders[place]):
                    orders[place] = order
                    is_better = True
            if not is_better:
                break
    return permute_channels(b, groups, orders)


def _count_neurons(params: TensorCollection, group: Group) -> int:
    """Return the number of neurons of a group, which its first leaf has."""
    path, dim = next(iter(group.items()))
    return get(params, path).shape[dim]


def _profit(path: Path, a: Tensor, b: Tensor, dim: int, count: int) -> Tensor:
    """Return for each pair of neurons of two models the product of their weights in one leaf."""
    return _rows(path, a, dim, count) @ _rows(path, b, dim, count).T


def _is_better(profit: Tensor, order: Tensor, old: Tensor) -> bool:
    """Return whether an order of the columns has a greater sum than the old one."""
    gain = profit.gather(1, order[:, None]).sum() - profit.gather(1, old[:, None]).sum()
    # Without a threshold, equally good orders would alternate for ever.
    return bool(gain > 1e-9 * profit.abs().sum())


def _check_finite(models: Sequence[TensorCollection], groups: Sequence[Group]) -> None:
    """Raise if a number of a group is NaN or infinite."""
    paths = {path: None for group in groups for path in group}
    for model, which in zip(models, ("first", "second"), strict=True):
        for path in paths:
            leaf = get(model, path)
            count = int((~leaf.isfinite()).sum())
            if count:
                what = f"weight_matching: the leaf {dotted(path)!r} of the {which} model is not finite."
                raise error(ValueError, what, got=f"{count} of {leaf.numel()} numbers are NaN or infinite")


def _blocks(path: Path, leaf: Tensor, dim: int, count: int) -> Tensor:
    """Return a leaf whose dimension is the neurons, and a further one behind it the block of each."""
    size = leaf.shape[dim]
    if size % count:
        raise LeafMismatchError(
            f"weight_matching: dimension {dim} of {dotted(path)!r} is not a multiple of the neurons before it.",
            expected=f"a multiple of {count}",
            got=size,
            hint="groups= names the leaves of each order, for layers that are not a chain.",
        )
    return leaf.reshape(*leaf.shape[:dim], count, size // count, *leaf.shape[dim + 1 :])


def _rows(path: Path, leaf: Tensor, dim: int, count: int) -> Tensor:
    return _blocks(path, leaf, dim, count).movedim(dim, 0).reshape(count, -1).double()


def _assign(profit: Tensor) -> Tensor:
    """Return for each row the column of the assignment with the greatest sum.

    Source:
        The Hungarian method with potentials and shortest augmenting paths (Jonker and Volgenant, 1987).
    """
    cost = -profit.detach().cpu().numpy()
    n = profit.shape[0]
    # Their sums must not overflow, or no column is the nearest and the search does not end.
    largest = np.abs(cost).max(initial=0.0)
    if not largest < np.finfo(cost.dtype).max / (4 * n + 4):
        raise error(ValueError, "weight_matching: the products of the weights overflow.", got=f"a sum of {largest:.3g}")
    rows = np.zeros(n + 1)
    columns = np.zeros(n + 1)
    # Column -> row, and the column before it on the path; number 0 is the start.
    owner = np.zeros(n + 1, dtype=np.int64)
    back = np.zeros(n + 1, dtype=np.int64)
    for row in range(1, n + 1):
        owner[0] = row
        at = 0
        least = np.full(n + 1, np.inf)
        is_used = np.zeros(n + 1, dtype=bool)
        while True:
            is_used[at] = True
            reduced = cost[owner[at] - 1] - rows[owner[at]] - columns[1:]
            is_nearer = ~is_used[1:] & (reduced < least[1:])
            least[1:][is_nearer] = reduced[is_nearer]
            back[1:][is_nearer] = at
            at = int(np.where(is_used, np.inf, least)[1:].argmin()) + 1
            step = least[at]
            rows[owner[is_used]] += step
            columns[is_used] -= step
            least[~is_used] -= step
            if owner[at] == 0:
                break
        # Along the path back to the start, each column takes the row of the one before it.
        while at:
            before = int(back[at])
            owner[at] = owner[before]
            at = before
    found = np.empty(n, dtype=np.int64)
    found[owner[1:] - 1] = np.arange(n)
    return torch.from_numpy(found)
