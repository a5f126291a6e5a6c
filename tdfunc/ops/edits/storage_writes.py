"""The only writes in `ops/`: values into storage that a tree already has, under names that end in `_`.

Structure never changes here. A leaf whose memory overlaps itself (an expanded one) is refused: one write would
change many elements.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection, check_one_shape, has_leaf, iter_leaves, per_tree
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import (
    BatchSizeError,
    LeafMismatchError,
    MissingKeyError,
    TieError,
    UnsupportedError,
)
from tdfunc.core.keys import by_head, dotted
from tdfunc.core.memory import Places, is_read_only, mapped_file, repeats_itself
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack, as_array, same_value
from tdfunc.core.shapes import check_positions, fits_into, index_size, normalize_index
from tdfunc.core.types import Path
from tdfunc.core.walk import Difference, zip_trees
from tdfunc.ops.base.cast import keeps_values
from tdfunc.ops.base.convert import as_tensor
from tdfunc.ops.base.reading import check_dense, get, iter_items

_NOTHING = "; nothing was written"


def check_dtype(value: Tensor, leaf: Tensor, where: str) -> None:
    """Raise if writing the value into the leaf's storage would change it, or if there is none."""
    if value.is_meta and not leaf.is_meta:
        raise LeafMismatchError(
            f"{where}: the value does not have data{_NOTHING}.",
            got="a tensor on the meta device",
        )
    if not keeps_values(value.dtype, leaf.dtype):
        raise LeafMismatchError(
            f"{where}: the values would be altered.",
            expected=f"a dtype that {leaf.dtype} can hold",
            got=str(value.dtype),
            hint=f"cast it first: value.to({leaf.dtype}).",
        )


def check_writable(leaf: Tensor, where: str) -> None:
    """Raise for a leaf whose writes would not reach its file, or in which elements share one memory location."""
    check_reaches_file(leaf, where)
    if not is_compiling() and is_read_only(leaf):
        raise LeafMismatchError(
            f"{where}: the leaf is on a read-only array, a write would end the process.",
            got="memory of numpy that cannot be written to",
            hint='np.load(path, mmap_mode="r+") writes to the file; td.clone() is in memory.',
        )
    if not is_compiling() and leaf.is_inference() and not torch.is_inference_mode_enabled():
        raise LeafMismatchError(
            f"{where}: the leaf was made in inference mode, torch writes to it nowhere else.",
            hint="write inside torch.inference_mode(), or to td.clone().",
        )
    if repeats_itself(leaf):
        raise LeafMismatchError(
            f"{where}: the leaf is expanded or overlaps itself, one write would change many elements.",
            got=f"shape {list(leaf.shape)} with strides {list(leaf.stride())}",
            hint="write td = td.clone() first, or use the pure td.at[...].set(...).",
        )


def check_reaches_file(leaf: Tensor, where: str) -> None:
    """Raise for a leaf that is mapped copy-on-write: a write to it would stay in this process."""
    file = None
    if not is_compiling():
        file = mapped_file(leaf)
    if file is not None and file.mode == "c":
        raise LeafMismatchError(
            f"{where}: the leaf is mapped copy-on-write, a write would not reach its file.",
            got=f"a copy-on-write mapping of {file.path}",
            hint='load_memmap(prefix, mode="r+") writes to the files; td.clone() is in memory.',
        )


def write_leaf(tree: TensorCollection, path: Path, value: Any) -> None:
    """Copy a value into the storage of an existing entry (a leaf, or a sub-tree from a tree)."""
    node = get(tree, path)
    is_many = isinstance(value, (TensorCollection, Mapping))
    if isinstance(node, TensorCollection):
        if not is_many and not isinstance(value, (list, tuple)):
            raise Difference(path, "kind", node, value).error("set_", hint="give a tree or dict.", note=_NOTHING)
        write_tree(node, value, complete=True)
        return
    if is_many:
        raise Difference(path, "kind", node, value).error("set_", hint="td.set replaces the entry.", note=_NOTHING)
    writes = _leaf_writes(tree, path, value)
    leaves = {at: leaf for at, (leaf, _) in writes.items()}
    values = {at: part for at, (_, part) in writes.items()}
    _write("set_", leaves, values, lambda leaf: leaf.shape, lambda leaf, value: leaf.copy_(value))


def _leaf_writes(tree: TensorCollection, path: Path, value: Any) -> dict[Path, tuple[Tensor, Tensor]]:
    """Return the leaf at a path with the value for it; where the path leads into a lazy stack, of each of its trees."""
    node: Any = tree
    for i, key in enumerate(path):
        writes: dict[Path, tuple[Tensor, Tensor]] = {}

        def add(inner: Any, part: Any, rest: Path = path[i:], to: dict[Any, Any] = writes) -> Any:
            to.update({(str(len(to)), *at): write for at, write in _leaf_writes(inner, rest, part).items()})
            return inner

        if node._is_lazy:
            node._each(add, value)
            return {(*path[:i], *at): write for at, write in writes.items()}
        node = node._get(key)
    leaf = node
    where = f"set_ {dotted(path)!r}"
    if not isinstance(leaf, Tensor):
        raise LeafMismatchError(
            f"{where}: only tensors have storage to write into.",
            got=type(leaf).__name__,
            hint="use td.set.",
        )
    if not isinstance(value, Tensor):
        value = as_tensor(value, where)
        # Python numbers have no width: integers that fit are taken.
        cast = value.to(leaf.dtype)
        value = cast if value.dtype is torch.int64 and torch.equal(cast.to(value.dtype), value) else value
    return {path: (leaf, value.expand(leaf.shape) if fits_into(value.shape, leaf.shape) else value)}


def write_tree(tree: TensorCollection, other: Any, *, complete: bool) -> None:
    """Copy the values of `other` into the leaves of `tree`; all keys are checked before the first write."""
    call = "copy_" if complete else "update_"
    given = _cut(tree, other, call, ())
    mine, theirs = _leaves_of_both(call, tree, given, complete)
    _write(call, mine, theirs, lambda leaf: leaf.shape, lambda leaf, value: leaf.copy_(value))


def _leaves_of_both(
    call: str, tree: TensorCollection, given: TensorCollection, complete: bool
) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Return the leaves of both trees by path; raise unless the first has the second's leaves (and the same ones)."""
    mine = dict(iter_leaves(tree))
    theirs = dict(iter_leaves(given))
    unknown = theirs.keys() - mine.keys()
    if unknown or (complete and mine.keys() != theirs.keys()):
        check_kinds(call, tree, given)
        hint = None
        if call.startswith("at"):
            hint = "a key cannot be added while writing rows: create all keys first, tree.new_zeros([N])."
        raise MissingKeyError(
            f"{call}: the trees have different keys{_NOTHING}.",
            expected=f"{sorted(map(dotted, mine))}",
            got=f"{sorted(map(dotted, theirs))}",
            hint=hint,
        )
    return mine, theirs


def _write(
    call: str,
    leaves: dict[Path, Any],
    values: dict[Path, Any],
    wanted: Callable[[Tensor], Size],
    write: Callable[[Tensor, Tensor], object],
) -> None:
    """Write values of the wanted shapes into leaves, after all of them were checked."""
    for path, value in values.items():
        leaf = leaves[path]
        where = f"{call} {dotted(path)!r}"
        check_writable(leaf, where)
        if value.shape != wanted(leaf):
            raise LeafMismatchError(
                f"{where}: the values do not fit{_NOTHING}.",
                expected=f"shape {list(wanted(leaf))}",
                got=f"shape {list(value.shape)}",
            )
        check_dtype(value, leaf, where)
    _check_one_value(leaves, values)
    places = Places(leaves.values())
    changed = {path: value for path, value in values.items() if value is not leaves[path]}
    # Values in memory that is written to are copied first, as when leaves are swapped.
    apart = {path: value.clone() if places.holds(value) else value for path, value in changed.items()}
    with torch.no_grad():
        for path, value in apart.items():
            write(leaves[path], value)


def _check_one_value(leaves: dict[Path, Any], values: dict[Path, Any]) -> None:
    """Raise unless a tensor at several paths, tied or not, is given one value."""
    first: dict[int, Path] = {}
    for path, value in values.items():
        other = first.setdefault(id(leaves[path]), path)
        if other is not path and value is not values[other] and not torch.equal(value, values[other]):
            both = f"{dotted(other)!r} and {dotted(path)!r}"
            raise TieError(
                f"the tied paths {both} are given different values{_NOTHING}.",
                expected="one value for the one tensor at both",
            )


def check_kinds(call: str, tree: TensorCollection, given: TensorCollection) -> None:
    """Raise where a leaf of one tree is a tree in the other."""
    found = zip_trees(tree, given, shared=True)
    if isinstance(found, Difference):
        raise found.error(call, note=_NOTHING if call.endswith("_") else "")


@per_tree(cut=1)
def _cut(tree: TensorCollection, other: Any, call: str, at: Path) -> TensorCollection:
    """Return the value for a tree as a tree, cut for the trees of a lazy stack where there is one."""
    if not isinstance(other, TensorCollection):
        source = _cut_mapping(tree, other, call, at) if isinstance(other, Mapping) else other
        return TensorCollection._open(source, tree._batch_size)
    check_one_shape(other, call, f" at {dotted(at)!r}" if at else "")
    changes: dict[str, Any] = {}
    for key, node in tree._data.items():
        twin = other._data.get(key)
        if isinstance(node, TensorCollection) and isinstance(twin, TensorCollection):
            changes[key] = _cut(node, twin, call, (*at, key))
    return other._replace({**other._data, **changes})


def _cut_mapping(tree: TensorCollection, other: Mapping[Any, Any], call: str, at: Path) -> dict[Any, Any]:
    """Return a mapping with the values for sub-trees as trees."""
    entries: dict[Any, Any]
    entries, nested = by_head(other.items())
    for key, value in entries.items():
        node = tree._data.get(key)
        if isinstance(node, TensorCollection) and (isinstance(value, (TensorCollection, Mapping)) or node._is_lazy):
            entries[key] = _cut(node, value, call, (*at, key))
    for key, inner in nested.items():
        node = tree._data.get(key)
        if key in entries or not isinstance(node, TensorCollection):
            entries |= {(key, *rest): value for rest, value in inner.items()}
        else:
            entries[key] = _cut(node, inner, call, (*at, key))
    return entries


def write_row(tree: TensorCollection, index: Any, row: Any) -> TensorCollection:
    """Write one row (or rows) of a batch in place; a tree without leaves is allocated first, as zeros."""
    call = "at[...].set_"
    parts = normalize_index(index, tree._batch_size)
    size = index_size(parts, tree._batch_size)
    # torch would look at the positions of one leaf after another was written to.
    check_positions(parts, tree._batch_size)
    if not isinstance(row, TensorCollection):
        row = TensorCollection._open(row, size)
    check_one_shape(row, call)
    check_dense(tree, call)
    if row._batch_size != size:
        raise BatchSizeError(
            f"{call}: the rows have another batch size.", expected=str(list(size)), got=str(list(row._batch_size))
        )
    if not has_leaf(tree):
        full = tree._batch_size
        k = len(size)
        zeros = LeafOp(
            "new_zeros",
            lambda x: x.new_zeros((*full, *x.shape[k:])),
            lambda old: full + old[k:],
            lambda _: None,
        )
        tree = tree._put(row._map(zeros)._data)
    leaves, rows = _leaves_of_both(call, tree, row, True)
    _check_values(tree, parts, row)
    n = len(tree._batch_size)

    def write(leaf: Tensor, value: Tensor) -> None:
        leaf[parts] = value.to(leaf.dtype)

    _write(call, leaves, rows, lambda leaf: size + leaf.shape[n:], write)
    return tree


def _check_values(tree: TensorCollection, parts: tuple[Any, ...], row: TensorCollection) -> None:
    """Raise for non-tensor data that differ: they have no storage to write into."""
    for path, node in iter_items(row, True, True):
        mine = get(tree, path, None)
        if not isinstance(node, NonTensorBase) or (isinstance(mine, NonTensorBase) and mine[parts].equal(node).all()):
            continue
        raise LeafMismatchError(
            f"at[...].set_: {dotted(path)!r} is not a tensor, and cannot be written in place{_NOTHING}.",
            expected=repr(mine),
            got=repr(node),
            hint="td.at[index].set(row) returns a tree that has it.",
        )


def nontensor_rows(node: NonTensorBase, parts: tuple[Any, ...], new: NonTensorBase) -> NonTensorBase:
    """Return (purely) non-tensor data with the values at an index replaced."""
    if isinstance(node, NonTensorData) and isinstance(new, NonTensorData) and same_value(node.data, new.data):
        return node
    array = np.array(node._array, dtype=object)
    # A 0-d object array assigned to one place would be put there itself.
    values = new._array if new._array.ndim else new._array[()]
    place = tuple(as_array(part) if isinstance(part, Tensor) else part for part in parts)
    array[place] = values
    return NonTensorStack._wrap(array)


def share(tree: TensorCollection) -> None:
    """Move the storage of every leaf to shared memory."""
    for path, leaf in iter_leaves(tree):
        check_reaches_file(leaf, f"share_memory_ {dotted(path)!r}")
        # As of torch 2.13 sharing a DTensor ends the process: it has no storage.
        if hasattr(leaf, "to_local"):
            raise UnsupportedError(
                f"share_memory_: {dotted(path)!r} is spread over processes.",
                got=f"a {type(leaf).__name__}",
                hint="td.apply(lambda x: x.to_local()) has the part of this one, x.full_tensor() all.",
            )
    for _, leaf in iter_leaves(tree):
        leaf.share_memory_()
