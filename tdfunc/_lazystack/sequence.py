"""`pad_sequence`: trees whose leaves differ in the length of one dimension, as one padded tree."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor

from tdfunc._lazystack.ragged import check_kinds, check_same_ndim, pad_trees, same_keys
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import NestedKey, Path
from tdfunc.ops.edit import set_


def pad_sequence(
    trees: Sequence[Any], pad_dim: int = 0, padding_value: Any = 0, *, return_mask: "bool | NestedKey" = False
) -> Any:
    """Stack trees whose leaves differ in the length of one dimension, the shorter ones padded at its end.

    `lazy_stack(trees).pad()` pads every dimension in which they differ, on either side.

    Args:
        trees: One or more trees of one class with the same keys.
        pad_dim: The dimension of each leaf whose length may differ, batch dimensions counted; a negative one counts
            from the last dimension of each leaf. A leaf without it is stacked as it is.
        padding_value: What the new elements hold: a number, or a dict from (nested) keys to numbers. Non-tensor data
            are padded with None.
        return_mask: Add a tree of masks, True where the value is real, under the key "masks" or the given one.

    Shapes:
        Leaves (*B, T_i, *F) become one of (N, *B, max T_i, *F), and its mask is (N, *B, max T_i).

    Raises:
        ValueError: There are no trees.
        LeafMismatchError: A leaf differs in another dimension or its dtype, or cannot hold the value; it is named.
        TreeStructureError: The trees differ in keys or class.
        UnsupportedError: A typed tree has no field for the masks.

    Examples:
        >>> trees = [TensorDict({"ids": torch.arange(n), "n": n}) for n in (1, 3)]
        >>> batch = tdf.pad_sequence(trees, padding_value=-1, return_mask=True)
        >>> batch["ids"], batch["masks", "ids"]
        (tensor([[ 0, -1, -1],
                [ 0,  1,  2]]), tensor([[ True, False, False],
                [ True,  True,  True]]))
    """
    given = list(trees)
    if not given:
        raise error(ValueError, "pad_sequence: no trees were given.", expected="one or more")
    check_same_ndim(given, "pad_sequence")
    _check_lengths(given, pad_dim, ())
    key = "masks" if return_mask is True else return_mask
    if key is not False and type(given[0]) is not TensorCollection._open:
        raise UnsupportedError(
            "pad_sequence: the masks have no place in a typed tree.",
            expected="TensorDict",
            got=type(given[0]).__name__,
            hint="tree, masks = lazy_stack(trees).pad(return_mask=True).",
        )
    padded, _ = pad_trees(given, 0, padding_value, "right", False)
    return padded if key is False else set_(padded, key, _masks(given, padded, pad_dim))


def _check_lengths(trees: Sequence[Any], pad_dim: int, at: Path) -> None:
    """Raise unless leaves, and batch sizes, differ in their length along one dimension only."""
    first = trees[0]
    if isinstance(first, TensorCollection._lazy):
        where = f"{dotted(at)!r} is" if at else "these are"
        raise UnsupportedError(
            f"pad_sequence: {where} lazy.",
            expected="trees",
            got="LazyStack",
            hint="lazy_stack(trees).pad() pads lazy stacks inside, too.",
        )
    for key, nodes in same_keys(trees, "pad_sequence", at):
        path = (*at, key)
        check_kinds(nodes, "pad_sequence", path)
        if isinstance(nodes[0], TensorCollection):
            _check_lengths(nodes, pad_dim, path)
            continue
        for i, node in enumerate(nodes):
            size = nodes[0].shape
            if not _agree(size, node.shape, pad_dim if pad_dim >= 0 else len(size) + pad_dim):
                what = f"leaf {dotted(path)!r} of trees 0 and {i} differs in more than dimension {pad_dim}"
                raise _differ(what, size, node.shape)
    for i, tree in enumerate(trees):
        # A negative dimension counts from the end of leaves: it is none of the batch.
        rest = f" in more than dimension {pad_dim}" if pad_dim >= 0 else ", and it counts from the front"
        if not _agree(first._batch_size, tree._batch_size, pad_dim if pad_dim >= 0 else None):
            what = f"the batch size{f' at {dotted(at)!r}' if at else ''} of trees 0 and {i} differs{rest}"
            raise _differ(what, first._batch_size, tree._batch_size)


def _agree(first: Sequence[int], other: Sequence[int], dim: int | None) -> bool:
    pairs = zip(first, other, strict=False)
    return len(first) == len(other) and all([a == b for d, (a, b) in enumerate(pairs) if d != dim])


def _differ(what: str, first: Sequence[int], other: Sequence[int]) -> LeafMismatchError:
    return LeafMismatchError(
        f"pad_sequence: {what}.",
        expected=str(list(first)),
        got=str(list(other)),
        hint="lazy_stack(trees).pad() pads all dimensions.",
    )


def _masks(trees: Sequence[Any], padded: Any, pad_dim: int) -> Any:
    """Return masks of the batch and the padded dimension, from the lengths."""
    first, n = trees[0], len(trees[0]._batch_size)
    data: dict[str, Any] = {}
    for key, node in padded._data.items():
        nodes = [tree._data[key] for tree in trees]
        if isinstance(node, TensorCollection):
            data[key] = _masks(nodes, node, pad_dim)
            continue
        ndim = nodes[0].dim() if isinstance(node, Tensor) else n
        dim = pad_dim if pad_dim >= 0 else ndim + pad_dim
        size = padded._batch_size if dim < n or dim >= ndim else Size((*padded._batch_size, node.shape[dim + 1]))
        device = node.device if isinstance(node, Tensor) else padded._device
        mask = torch.ones(size, dtype=torch.bool, device=device)
        if dim < ndim:
            lengths = torch.tensor([each.shape[dim] for each in nodes], device=device)
            place = min(dim, n)
            rows = torch.arange(size[place + 1], device=device) < lengths[:, None]
            mask = mask & rows.reshape(len(trees), *[1] * place, -1, *[1] * (len(size) - place - 2))
        data[key] = mask
    return first._open._make(data, padded._batch_size, padded._device, padded._names)
