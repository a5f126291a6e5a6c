"""Whether `map(out=)` may write to `out` while the tree is read: in the same rows, or in memory of its own."""

from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError
from tdfunc.core.keys import dotted
from tdfunc.core.memory import Extent, extent_of
from tdfunc.core.types import Path

# How long numpy may search for an element that two leaves share; where it gives up, they count as sharing one.
_MAX_WORK = 1_000_000


def check_rows_apart(tree: TensorCollection, out: TensorCollection, dim: int) -> None:
    """Raise where a row of `out` shares memory with another row of the tree, which may be read after the write.

    Raises:
        LeafMismatchError: One does; the message names both leaves.
    """
    for (path, leaf), (target_path, target) in _meetings(list(iter_leaves(tree)), list(iter_leaves(out))):
        in_stack = _in_stack(tree, path) or _in_stack(out, target_path)
        if _is_in_place(leaf, target) and (not in_stack or path == target_path):
            continue
        if (not in_stack and _same_rows(leaf, target, dim)) or not _share(leaf, target):
            continue
        raise LeafMismatchError(
            f"map: leaf {dotted(target_path)!r} of out shares memory with other rows of leaf {dotted(path)!r}: "
            "rows would be read after they were overwritten.",
            expected="memory of its own, or the rows of the tree themselves (in place)",
            got="rows of the tree at other places",
            hint="out=td.clone(), or tree.clone().map(...); without out= the results are a new tree.",
        )


def _meetings(leaves: list[tuple[Path, Any]], targets: list[tuple[Path, Any]]) -> list[Any]:
    """Return the pairs of a leaf of the tree and one of `out` that lie in one stretch of memory."""
    places: list[tuple[Extent, bool, Any]] = []
    for is_target, items in ((False, leaves), (True, targets)):
        for item in items:
            place = extent_of(item[1])
            if place is not None and place[1] < place[2]:
                places.append((place, is_target, item))
    found: list[Any] = []
    places.sort(key=lambda entry: (str(entry[0][0]), entry[0][1]))
    for _, group in groupby(places, key=lambda entry: entry[0][0]):
        # Those that begin before this one and end after its beginning.
        open_: list[tuple[Extent, bool, Any]] = []
        for entry in group:
            open_ = [other for other in open_ if other[0][2] > entry[0][1]]
            pairs = [sorted((other, entry), key=itemgetter(1)) for other in open_ if other[1] is not entry[1]]
            found.extend((mine[2], target[2]) for mine, target in pairs)
            open_.append(entry)
    return found


def _in_stack(tree: TensorCollection, path: Path) -> bool:
    """Whether a leaf is in a tree of a lazy stack, where it lacks a dimension."""
    node: Any = tree
    for key in path:
        if node._is_lazy:
            return True
        node = node._get(key)
    return False


def _is_in_place(leaf: Tensor, target: Tensor) -> bool:
    same = leaf.shape == target.shape and leaf.stride() == target.stride() and leaf.dtype is target.dtype
    return same and extent_of(leaf) == extent_of(target)


def _same_rows(leaf: Tensor, target: Tensor, dim: int) -> bool:
    """Whether each row of both lies in a stretch of memory in which no other row does."""
    if leaf.shape[dim] == 1:
        return True
    step = leaf.stride(dim) * leaf.element_size()
    row, target_row = extent_of(leaf.select(dim, 0)), extent_of(target.select(dim, 0))
    if step != target.stride(dim) * target.element_size() or row is None or target_row is None:
        return False
    return max(row[2], target_row[2]) - min(row[1], target_row[1]) <= step


class _Layout:
    """Where the elements of a tensor lie, as numpy asks for it; nothing is read."""

    def __init__(self, tensor: Tensor) -> None:
        size, place = tensor.element_size(), extent_of(tensor)
        assert place is not None
        self.__array_interface__ = {
            # A leaf at the beginning of a file must not be a null pointer.
            "data": (place[1] + _BASE, True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


_BASE = 1 << 12


def _share(leaf: Tensor, target: Tensor) -> bool:
    """Whether two leaves have an element in common, and not only lie between each other's."""
    # Any: as of numpy 2.4 its types take no limit but 0 and -1.
    search: Any = np.shares_memory
    try:
        return search(np.asarray(_Layout(leaf)), np.asarray(_Layout(target)), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True
