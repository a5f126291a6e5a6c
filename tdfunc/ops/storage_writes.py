"""The only writes in `ops/`: values into storage that a tree already has, under names that end in `_`.

Structure never changes here. A leaf whose memory overlaps itself (an expanded one) is refused: one write would
change many elements.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc._collection import LeafOp, TensorCollection, is_compiling, iter_leaves
from tdfunc._errors import BatchSizeError, LeafMismatchError, MissingKeyError, TieError, explain
from tdfunc._keys import dotted, missing
from tdfunc._mapped import mapped_file
from tdfunc._nontensor import NonTensorBase, NonTensorData, NonTensorStack, same_value
from tdfunc._shapes import index_size, normalize_index
from tdfunc._types import Path
from tdfunc.ops.reading import get, iter_items


def index_parts(index: Any, size: Size) -> tuple[Any, ...]:
    """Return a normalized index that has been checked against the batch size."""
    parts = normalize_index(index, size)
    index_size(parts, size)
    return parts


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast loses nothing but floating-point precision: no float becomes an int, no int a narrower one."""
    if source is target or source is torch.bool or target.is_complex:
        return True
    if source.is_complex or target is torch.bool:
        return False
    if source.is_floating_point or target.is_floating_point:
        return target.is_floating_point
    given, kept = torch.iinfo(source), torch.iinfo(target)
    return kept.min <= given.min and given.max <= kept.max


def check_dtype(value: Tensor, leaf: Tensor, where: str) -> None:
    """Raise if writing the value into the leaf's storage would change it."""
    if not keeps_values(value.dtype, leaf.dtype):
        expected, got = f"a dtype that {leaf.dtype} can hold", str(value.dtype)
        hint = f"cast it first: value.to({leaf.dtype})."
        what = f"{where}: the values would be altered."
        raise LeafMismatchError(explain(what, expected=expected, got=got, hint=hint))


def check_writable(leaf: Tensor, where: str) -> None:
    """Raise for a leaf whose writes would not reach its file, or in which elements share one memory location."""
    check_reaches_file(leaf, where)
    if overlaps(leaf):
        raise LeafMismatchError(
            explain(
                f"{where}: the leaf is expanded or overlaps itself, one write would change many elements.",
                got=f"shape {list(leaf.shape)} with strides {list(leaf.stride())}",
                hint="write td = td.clone() first, or use the pure td.at[...].set(...).",
            )
        )


def overlaps(leaf: Tensor) -> bool:
    """Whether two elements share one memory location, as in an expanded tensor or in the windows of `unfold`."""
    if leaf.is_contiguous():
        return False
    dims = sorted((stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size != 1)
    if any(size == 0 for _, size in dims):
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    reach, nested = 0, True
    for stride, size in dims:
        nested = nested and stride > reach
        reach += stride * (size - 1)
    # Each step leaves the memory of the steps below it, as in every view that is not made by hand.
    if nested or is_compiling():
        return not nested
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in dims:
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places.unique().numel() < places.numel()


def check_reaches_file(leaf: Tensor, where: str) -> None:
    """Raise for a leaf that is mapped copy-on-write: what is written to it would stay in this process."""
    file = None if is_compiling() else mapped_file(leaf)
    if file is not None and file.mode == "c":
        raise LeafMismatchError(
            explain(
                f"{where}: the leaf is mapped copy-on-write, a write would not reach its file.",
                expected="a leaf in memory, or one mapped for writing",
                got=f"a copy-on-write mapping of {file.path}",
                hint='load_memmap(prefix, mode="r+") writes to the files; td.clone() is in memory.',
            )
        )


def write_leaf(tree: TensorCollection, path: Path, value: Any) -> None:
    """Copy a value into the storage of an existing entry (a leaf, or a sub-tree from a tree)."""
    parent: Any = tree
    for i, key in enumerate(path):
        if not isinstance(parent, TensorCollection) or key not in parent._keys():
            known = parent._keys() if isinstance(parent, TensorCollection) else []
            raise missing(path[: i + 1], known, "set_", parent)
        parent = parent._get(key)
    if isinstance(parent, TensorCollection):
        write_tree(parent, value, complete=True)
    else:
        _copy(parent, value, f"set_ {dotted(path)!r}")


def _copy(leaf: Any, value: Any, where: str) -> None:
    if not isinstance(leaf, Tensor):
        what = f"{where}: only tensors have storage to write into."
        raise LeafMismatchError(explain(what, expected="a tensor", got=type(leaf).__name__, hint="use td.set."))
    check_writable(leaf, where)
    if isinstance(value, Tensor):
        check_dtype(value, leaf, where)
    else:
        value = torch.as_tensor(value)
        # Python numbers have no width of their own: integers that fit are taken.
        if value.dtype is not torch.int64 or not torch.equal(value.to(leaf.dtype).to(value.dtype), value):
            check_dtype(value, leaf, where)
    try:
        fits = torch.broadcast_shapes(value.shape, leaf.shape) == leaf.shape
    except RuntimeError:
        fits = False
    if not fits:
        expected, got = f"shape {list(leaf.shape)}", f"shape {list(value.shape)}"
        raise LeafMismatchError(explain(f"{where}: the value does not fit the leaf.", expected=expected, got=got))
    with torch.no_grad():
        leaf.copy_(value)


def write_tree(tree: TensorCollection, other: Mapping[Any, Any] | TensorCollection, *, complete: bool) -> None:
    """Copy the values of `other` into the leaves of `tree`; all keys are checked before the first write."""
    given: TensorCollection = (
        other if isinstance(other, TensorCollection) else TensorCollection._open(other, tree._batch_size)
    )
    mine, theirs = dict(iter_leaves(tree)), dict(iter_leaves(given))
    extra = [path for path in theirs if path not in mine]
    lacking = [path for path in mine if path not in theirs] if complete else []
    if extra or lacking:
        raise MissingKeyError(
            explain(
                "The trees have different keys; nothing was written.",
                expected=f"{sorted(map(dotted, mine))}",
                got=f"{sorted(map(dotted, theirs))}",
            )
        )
    for path, value in theirs.items():
        if value.shape != mine[path].shape:
            raise LeafMismatchError(
                explain(
                    f"leaf {dotted(path)!r} has another shape; nothing was written.",
                    expected=f"{list(mine[path].shape)}",
                    got=f"{list(value.shape)}",
                )
            )
        check_writable(mine[path], repr(dotted(path)))
        check_dtype(value, mine[path], repr(dotted(path)))
    _check_one_value(mine, theirs)
    for path, value in _unshared(mine, theirs).items():
        _copy(mine[path], value, repr(dotted(path)))


def _check_one_value(leaves: dict[Path, Any], values: dict[Path, Any]) -> None:
    """Raise for a tensor that stands at several paths, tied or not, and is given more than one value."""
    first: dict[int, Path] = {}
    for path, value in values.items():
        other = first.setdefault(id(leaves[path]), path)
        if other is not path and value is not values[other] and not torch.equal(value, values[other]):
            both = f"{dotted(other)!r} and {dotted(path)!r}"
            what = f"the tied paths {both} are given different values; nothing was written."
            raise TieError(explain(what, expected="one value for the one tensor at both", got="two that differ"))


def _unshared(leaves: dict[Path, Any], values: dict[Path, Any]) -> dict[Path, Any]:
    """Return the values, copied where an earlier write would change them, as when two leaves are swapped."""
    if len(values) < 2:
        return values
    homes = {path: _storage(leaves[path]) for path in values}
    sources = {path: _storage(value) for path, value in values.items()}
    if None in homes.values() or None in sources.values():
        return {path: value.clone() for path, value in values.items()}
    # Where two leaves lie in one storage, nothing tells which parts of it a value and the leaves share.
    counts = Counter(homes.values())
    safe = {path for path, source in sources.items() if counts[source] == (source == homes[path])}
    return {path: value if path in safe else value.clone() for path, value in values.items()}


def _storage(leaf: Tensor) -> Any:
    """Return what tensors that share memory have in common; None where nobody can tell."""
    if is_compiling():
        return None
    try:
        return leaf.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def write_row(tree: TensorCollection, index: Any, row: Any) -> TensorCollection:
    """Write one row (or rows) of a batch in place; a tree without leaves is allocated first, as zeros."""
    parts = index_parts(index, tree._batch_size)
    if tree._each(lambda t: t) is not None:
        check_row(tree, parts, row)
        done = tree._shape(_row_op(parts, "set_"), row)
        return tree if any(True for _ in iter_leaves(tree)) else done
    tree, row = check_row(tree, parts, row)
    leaves = dict(iter_leaves(tree))
    rows = _unshared(leaves, dict(iter_leaves(row)))
    with torch.no_grad():
        for path, leaf in leaves.items():
            leaf[parts] = rows[path].to(leaf.dtype)
    return tree


def _row_op(parts: tuple[Any, ...], call: str) -> LeafOp:
    return LeafOp("write_rows", lambda old: old, batch=True, args=(parts, call))


def check_row(tree: TensorCollection, parts: tuple[Any, ...], row: Any) -> tuple[TensorCollection, Any]:
    """Return the tree, allocated if it had no leaves, and the row as a tree; raise if it does not fit."""
    if tree._each(lambda t: t) is not None:
        # All trees of a stack are checked before the first is written to.
        owners: dict[int, str] = {}
        if any(owners.setdefault(id(leaf), path[0]) != path[0] for path, leaf in iter_leaves(tree)):
            got, hint = "a tensor that is in two of its trees", "write stack = stack.clone() first."
            what = "at[...].set_: one write would change several rows of the lazy stack."
            raise LeafMismatchError(explain(what, got=got, hint=hint))
        return tree._shape(_row_op(parts, "check_"), row), row
    size = index_size(parts, tree._batch_size)
    if not isinstance(row, TensorCollection):
        row = TensorCollection._open(row, size)
    if row._batch_size != size:
        expected, got = str(list(size)), str(list(row._batch_size))
        raise BatchSizeError(explain("at[...].set_: the rows have another batch size.", expected=expected, got=got))
    if not any(True for _ in iter_leaves(tree)):
        tree = _allocate(tree, row)
    leaves, rows = dict(iter_leaves(tree)), dict(iter_leaves(row))
    if leaves.keys() != rows.keys():
        raise MissingKeyError(
            explain(
                "at[...].set_: the row has other keys than the tree; nothing was written.",
                expected=f"{sorted(map(dotted, leaves))}",
                got=f"{sorted(map(dotted, rows))}",
                hint="earlier rows would be silent zeros: allocate all keys first, foo().new_zeros([N]).",
            )
        )
    for path, leaf in leaves.items():
        check_writable(leaf, f"at[...].set_ {dotted(path)!r}")
        wanted = size + leaf.shape[len(tree._batch_size) :]
        if rows[path].shape != wanted:
            raise LeafMismatchError(
                explain(
                    f"at[...].set_: leaf {dotted(path)!r} does not fit; nothing was written.",
                    expected=f"shape {list(wanted)}",
                    got=f"shape {list(rows[path].shape)}",
                )
            )
        check_dtype(rows[path], leaf, f"at[...].set_ {dotted(path)!r}")
    _check_one_value(leaves, rows)
    _check_values(tree, row)
    return tree, row


def _check_values(tree: TensorCollection, row: TensorCollection) -> None:
    """Raise for non-tensor data that differ: they have no storage to write into."""
    for path, node in iter_items(row, True, True):
        if not isinstance(node, NonTensorBase):
            continue
        mine = get(tree, path, None)
        if not (
            isinstance(mine, NonTensorData) and isinstance(node, NonTensorData) and same_value(mine.data, node.data)
        ):
            raise LeafMismatchError(
                explain(
                    f"at[...].set_: {dotted(path)!r} is no tensor and cannot be written in place; nothing was written.",
                    expected=repr(mine),
                    got=repr(node),
                    hint="td.at[index].set(row) returns a tree that has it.",
                )
            )


def _allocate(tree: TensorCollection, row: TensorCollection) -> TensorCollection:
    n = len(row._batch_size)
    size = tree._batch_size
    zeros = row._map(
        LeafOp("new_zeros", lambda x: x.new_zeros((*size, *x.shape[n:])), lambda old: size + old[n:], lambda _: None)
    )
    return tree._put(zeros._data)


def nontensor_rows(node: NonTensorBase, parts: tuple[Any, ...], new: NonTensorBase) -> NonTensorBase:
    """Return (purely) non-tensor data with the values at an index replaced."""
    if isinstance(node, NonTensorData) and isinstance(new, NonTensorData) and same_value(node.data, new.data):
        return node
    array = np.array(node._array, dtype=object)
    # A 0-d object array assigned to one place would be put there itself.
    values = new._array if new._array.ndim else new._array[()]
    array[tuple(p.cpu().numpy() if isinstance(p, Tensor) else p for p in parts)] = values
    return NonTensorStack._wrap(array)


def share(tree: TensorCollection) -> None:
    """Move the storage of every leaf to shared memory."""
    for path, leaf in iter_leaves(tree):
        if isinstance(leaf, Tensor):
            check_reaches_file(leaf, f"share_memory_ {dotted(path)!r}")
    for _, leaf in iter_leaves(tree):
        if isinstance(leaf, Tensor):
            leaf.share_memory_()
