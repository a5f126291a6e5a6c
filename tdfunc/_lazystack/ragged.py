"""One tree, padded or of nested tensors, made of trees of unequal shapes; and the checks that they fit each other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import NO_STATIC, PLAIN, Static, TensorCollection, check_one_shape
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError, check_choice
from tdfunc.core.keys import dotted, missing, unravel
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.shapes import stacked_size
from tdfunc.core.ties import common
from tdfunc.core.types import NestedKey, Node, Path
from tdfunc.core.walk import Difference
from tdfunc.ops.base.cast import keeps_number
from tdfunc.ops.base.reading import check_trees, has
from tdfunc.ops.batch.join import defined_twice

# A tree, and a tree of masks, True where it is not padding; None without padding.
Padded = tuple[Any, Any]


class Padding(NamedTuple):
    """The options of padding, and the nodes that are padded already."""

    value: Callable[[Path, Any], Any]
    left: bool
    masks: bool
    # The only dimension of a leaf whose lengths may differ; None for all.
    only: int | None
    # A tied leaf is padded once, so that it stays one. By identity, with the nodes, which keeps those alive.
    done: dict[tuple[int, ...] | Path, tuple[list[Node], Padded]]


def check_same_ndim(trees: Sequence[Any], call: str) -> None:
    """Raise unless the trees have one class and one number of batch dimensions."""
    check_trees(call, *trees)
    first = trees[0]
    for i, tree in enumerate(trees):
        if type(tree) is not type(first):
            raise TreeStructureError(
                f"{call}: trees 0 and {i} are of different classes.",
                expected=type(first).__name__,
                got=type(tree).__name__,
                hint=defined_twice(type(first), type(tree)),
            )
        if len(tree._batch_size) != len(first._batch_size):
            raise BatchSizeError(
                f"{call}: trees 0 and {i} have different numbers of batch dimensions.",
                expected=f"batch size {list(first._batch_size)}",
                got=f"batch size {list(tree._batch_size)}",
                hint="unsqueeze() adds the dimension that is missing.",
            )


def check_alike(trees: Sequence[Any], at: Path) -> None:
    """Raise if a key is a tensor in one tree and a sub-tree in another."""
    for key in trees[0]._keys():
        nodes = [tree._get(key) for tree in trees if key in tree._keys()]
        check_kinds(nodes, "lazy_stack", (*at, key))
        if isinstance(nodes[0], TensorCollection):
            check_alike(nodes, (*at, key))


def same_keys(trees: Sequence[Any], call: str, at: Path) -> Iterator[tuple[str, list[Node]]]:
    """Yield each key with its nodes in all trees.

    Raises:
        TreeStructureError: A key is not in all trees, or is a tree in one and a leaf in another.
    """
    first = trees[0]._keys()
    for i, tree in enumerate(trees):
        if set(tree._keys()) != set(first):
            raise Difference(at, "keys", trees[0], tree).error(f"{call} of trees 0 and {i}")
    for key in first:
        nodes = [tree._get(key) for tree in trees]
        check_kinds(nodes, call, (*at, key))
        yield key, nodes


def check_kinds(nodes: Sequence[Node], call: str, at: Path) -> None:
    """Raise unless the nodes under one key are all tensors, all non-tensor data, or all trees of one class."""
    if PLAIN.issuperset(map(type, nodes)):
        return
    kinds = [_kind(node) for node in nodes]
    for i, kind in enumerate(kinds):
        hint = defined_twice(type(nodes[0]), type(nodes[i]))
        if kind != kinds[0] or hint is not None:
            raise TreeStructureError(
                f"{call}: {dotted(at)!r} is of different kinds in trees 0 and {i}.",
                expected=kinds[0],
                got=kind,
                hint=hint,
            )


def _kind(node: Node) -> str:
    if isinstance(node, TensorCollection):
        return f"a tree of class {type(node).__name__}"
    if isinstance(node, NonTensorBase):
        return "non-tensor data"
    if isinstance(node, Tensor):
        return "a tensor"
    return f"a {type(node).__name__}"


def _check_leaves(leaves: Sequence[Tensor], call: str, at: Path) -> None:
    """Raise unless the leaves have one dtype and one number of dimensions."""
    first = leaves[0]
    for i, leaf in enumerate(leaves):
        if leaf.dim() != first.dim() or leaf.dtype != first.dtype:
            raise LeafMismatchError(
                f"{call}: leaf {dotted(at)!r} differs in more than lengths in trees 0 and {i}.",
                expected=f"shape {list(first.shape)}, {first.dtype}",
                got=f"shape {list(leaf.shape)}, {leaf.dtype}",
                hint="cast or reshape it first: lazy_stack([fn(tree) for tree in lazy.trees]).",
            )


def pad_trees(trees: Sequence[Any], dim: int, value: Any, side: str, masks: bool, *, only: int | None = None) -> Padded:
    """Return the stack of trees padded to the largest sizes, and its masks or None."""
    check_choice("pad: side", side, ("right", "left"))
    padding = Padding(_values(trees, value), side == "left", masks, only, {})
    return _pad([_dense_pair(tree, padding) for tree in trees], dim, (), padding)


def _values(trees: Sequence[Any], value: Any) -> Callable[[Path, Any], Any]:
    """Return the function from the path of a leaf, and the value that its class has for pads or None, to its value."""
    if not isinstance(value, dict):
        return lambda path, own: value if own is None else own
    given: dict[NestedKey, Any] = value
    table = {unravel(key): number for key, number in given.items()}
    for path in table:
        if not has(trees[0], path):
            raise missing(path, trees[0]._keys(), "pad")

    def nearest(path: Path, own: Any) -> Any:
        """Return the value of the longest given path that leads to the leaf, or the one of its class."""
        for length in range(len(path), 0, -1):
            if path[:length] in table:
                return table[path[:length]]
        return 0 if own is None else own

    return nearest


def _dense_pair(tree: Any, padding: Padding) -> Padded:
    """Return a tree with no masks, or an inner stack padded."""
    if not tree._is_lazy:
        return tree, None
    return _pad([_dense_pair(inner, padding) for inner in tree._trees], tree._dim, (), padding)


def _pad(pairs: Sequence[Padded], dim: int, at: Path, padding: Padding) -> Padded:
    trees = [tree for tree, _ in pairs]
    first = trees[0]
    data: dict[str, Node] = {}
    masks: dict[str, Node] = {}
    ndim = len(first._batch_size)
    for key, nodes in same_keys(trees, "pad", at):
        path = (*at, key)
        ids = _ids_of(nodes, path)
        if ids not in padding.done:
            inner = [None if mask is None else mask._data[key] for _, mask in pairs]
            own = getattr(type(first), "_pads", {}).get(key)
            made = _pad_nodes(list(zip(nodes, inner, strict=True)), dim, ndim, path, padding, own)
            padding.done[ids] = (nodes, made)
        _, (padded, mask) = padding.done[ids]
        data[key] = padded
        masks[key] = mask
    largest = Size(_largest([tree._batch_size for tree in trees]))
    size = stacked_size(largest, dim, len(trees))
    static = _common_static(trees)
    whole = first._make(data, size, first._device, None, static)
    if not padding.masks:
        return whole, None
    return whole, first._open._make(masks, size, first._device, None, static)


def _ids_of(nodes: Sequence[Node], at: Path) -> tuple[int, ...] | Path:
    """Return what nodes that are tied have in common: their identity, so that they are made once."""
    # A compiler would guard on the identity, and compile again for every new tensor.
    if is_compiling():
        return at
    return tuple(map(id, nodes))


def _largest(sizes: Iterable[Sequence[int]]) -> list[int]:
    """Return the largest size in each dimension."""
    return [max(each) for each in zip(*sizes, strict=True)]


# Any: a number.
def _pad_nodes(pairs: Sequence[Padded], dim: int, ndim: int, at: Path, padding: Padding, own: Any) -> Padded:
    """Pad the nodes under one key, given with the masks that they have already."""
    node = pairs[0][0]
    if isinstance(node, TensorCollection):
        inner = [(tree, mask) if mask is not None else _dense_pair(tree, padding) for tree, mask in pairs]
        return _pad(inner, dim, at, padding)
    if isinstance(node, NonTensorBase):
        return _pad_values(pairs, dim, padding)
    return _pad_leaves(pairs, dim, ndim, at, padding, own)


def _common_static(trees: Sequence[Any]) -> Static | None:
    """Return the kinds of the leaves, and the groups of paths that are tied in all trees."""
    static = Static(trees[0]._kinds, common([tree._ties for tree in trees]))
    return None if static == NO_STATIC else static


# Any: a number.
def _pad_leaves(pairs: Sequence[Padded], dim: int, ndim: int, at: Path, padding: Padding, own: Any) -> Padded:
    leaves: list[Tensor] = [leaf for leaf, _ in pairs]
    _check_leaves(leaves, "pad", at)
    full = _largest([leaf.shape for leaf in leaves])
    value = padding.value(at, own)
    # The dimensions in which the lengths differ, counted from 1.
    ragged: list[int] = []
    for i, length in enumerate(full):
        if any([leaf.shape[i] != length for leaf in leaves]):
            ragged.append(i + 1)
    if padding.only is not None:
        ragged = [_only_place(leaves, ragged, padding.only, at)]
    if not keeps_number(value, leaves[0].dtype):
        raise LeafMismatchError(
            f"pad: leaf {dotted(at)!r} cannot hold the value.",
            expected=f"a value of {leaves[0].dtype}",
            got=repr(value),
            hint="give a value for each leaf: pad({key: value}).",
        )
    padded = torch.stack([_grown(leaf, full, value, padding.left) for leaf in leaves], dim)
    if not padding.masks:
        return padded, None
    # The mask has the dimensions up to the last in which the lengths differ, and at least the batch dimensions.
    inner_ndims = [mask.dim() for _, mask in pairs if mask is not None]
    mask_ndim = max([ndim, *ragged, *inner_ndims])
    masks = [_mask(leaf, mask, mask_ndim) for leaf, mask in pairs]
    return padded, torch.stack([_grown(mask, full[:mask_ndim], False, padding.left) for mask in masks], dim)


def _only_place(leaves: Sequence[Tensor], ragged: Sequence[int], only: int, at: Path) -> int:
    """Return the dimension `only` counted from 1, 0 if the leaves lack it; raise if they differ in another.

    It is also the answer where the lengths happen to agree.
    """
    ndim = leaves[0].dim()
    place = only % ndim + 1 if -ndim <= only < ndim else 0
    if any(other != place for other in ragged):
        shapes = [list(leaf.shape) for leaf in leaves]
        raise LeafMismatchError(
            f"pad_sequence: leaf {dotted(at)!r} differs in more than dimension {only}.",
            got=f"shapes {shapes}",
            hint="lazy_stack(trees).pad() pads all dimensions.",
        )
    return place


def _mask(leaf: Tensor, mask: Tensor | None, ndim: int) -> Tensor:
    """Return the mask of a leaf, or the one that it has, over its first dimensions."""
    size = leaf.shape[:ndim]
    if mask is None:
        return torch.ones(size, dtype=torch.bool, device=leaf.device)
    added = [1] * (ndim - mask.dim())
    return mask.reshape(*mask.shape, *added).expand(size)


def _grown(x: Tensor, full: Sequence[int], value: Any, left: bool) -> Tensor:
    widths: list[int] = []
    for size, target in zip(reversed(x.shape), reversed(full), strict=True):
        widths += [target - size, 0] if left else [0, target - size]
    if any(widths):
        return torch.constant_pad_nd(x, widths, value)
    return x


def _pad_values(pairs: Sequence[Padded], dim: int, padding: Padding) -> Padded:
    """Pad non-tensor values with None."""
    full = _largest([node._array.shape for node, _ in pairs])
    filled: list[Any] = []
    real: list[Any] = []
    for node, mask in pairs:
        array = node._array
        values = np.full(full, None, dtype=object)
        known = np.zeros(full, dtype=bool)
        if padding.left:
            spans = [slice(target - length, target) for length, target in zip(array.shape, full, strict=True)]
        else:
            spans = [slice(length) for length in array.shape]
        # Without a dimension, the Ellipsis assigns the array as it is, not the array as one value.
        place = (*spans, ...)
        values[place] = array
        known[place] = True if mask is None else mask.numpy()
        filled.append(values)
        real.append(known)
    return NonTensorStack._wrap(np.stack(filled, dim)), torch.from_numpy(np.stack(real, dim))


class Nesting(NamedTuple):
    """The layout of nested tensors, and what is made already: offsets by lengths, and leaves by identity."""

    layout: torch.layout
    offsets: dict[Any, Tensor]
    # As in `Padding`: a tied leaf is nested once.
    done: dict[tuple[int, ...] | Path, tuple[Sequence[Tensor], Tensor]]


def nest_trees(trees: Sequence[Any], nesting: Nesting, at: Path) -> Any:
    """Return a tree of nested tensors, batch size [number of trees]."""
    first = trees[0]
    check_one_shape(first, "nested", f" at {dotted(at)!r}" if at else "")
    data: dict[str, Node] = {}
    for key, nodes in same_keys(trees, "nested", at):
        path = (*at, key)
        if isinstance(nodes[0], TensorCollection):
            data[key] = nest_trees(nodes, nesting, path)
        elif isinstance(nodes[0], NonTensorBase):
            data[key] = NonTensorStack(*[node.value for node in nodes])
        else:
            ids = _ids_of(nodes, path)
            if ids not in nesting.done:
                nesting.done[ids] = nodes, _nested_leaf(nodes, nesting, path)
            _, data[key] = nesting.done[ids]
    return first._make(data, Size((len(trees),)), first._device, None, _common_static(trees))


def _nested_leaf(leaves: Sequence[Tensor], nesting: Nesting, at: Path) -> Tensor:
    _check_leaves(leaves, "nested", at)
    first = leaves[0]
    # A leaf without dimensions cannot be ragged.
    if first.dim() == 0:
        return torch.stack(list(leaves))
    if nesting.layout is torch.strided:
        return torch.nested.as_nested_tensor(list(leaves), layout=nesting.layout)
    for i, leaf in enumerate(leaves):
        if leaf.shape[1:] != first.shape[1:]:
            raise LeafMismatchError(
                f"nested: leaf {dotted(at)!r} differs in more than its first dimension in trees 0 and {i}.",
                expected=f"shape {list(first.shape)}",
                got=f"shape {list(leaf.shape)}",
                hint="layout=torch.strided takes any shapes.",
            )
    lengths = tuple(leaf.shape[0] for leaf in leaves)
    where = (lengths, first.device)
    # Leaves of equal lengths share one tensor of offsets, by which torch finds that they can be combined.
    if where not in nesting.offsets:
        ends = np.cumsum(lengths).tolist()
        nesting.offsets[where] = torch.tensor([0, *ends], device=first.device)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(leaves)), nesting.offsets[where], min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
