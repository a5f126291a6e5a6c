"""The part of a checkpoint that is read: leaves that a filter chooses, compared with a spec and cast to a dtype."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tdfunc.core.collection import LeafOp, TensorCollection, iter_leaves
from tdfunc.core.context import is_fake
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import FilterLike, unravel
from tdfunc.core.types import Path
from tdfunc.ops.edits.structure import partition
from tdfunc.storage.disk.ranks import find_sharded, is_sharded, own_part, place_like
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import LocalBytes, MappedBytes
from tdfunc.storage.progress import bytes_bar
from tdfunc.storage.safetensors.blocks import Block
from tdfunc.storage.safetensors.contents import Contents, group_by_home
from tdfunc.storage.safetensors.like import check_like
from tdfunc.storage.safetensors.read import Source, check_bytes, parsing, read_leaf, view_leaves
from tdfunc.storage.scales import Dequantizing, cast_tree
from tdfunc.storage.tree.build import Classes, build_tree, flag_leaf, move_leaf
from tdfunc.storage.tree.encode import IS_VALUE

# Of memory that torch allocates on the CPU.
_ALIGN_BYTES = 64
# By number; a list of all of them is the same and faster.
Leaves: TypeAlias = "dict[int, Tensor] | list[Tensor]"


@dataclass(frozen=True)
class Choice:
    """The options of `load`."""

    where: "FilterLike | None" = None
    # A tree, mapping or spec of anything that has a shape and a dtype.
    like: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    classes: Classes = ()
    # Make numbers of codes and their scales.
    dequantize: bool = False
    # Copy leaves without the alignment of torch's memory: sums and products of them may be rounded differently.
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise error(
                ValueError,
                "load: dtype= is not a floating dtype.",
                expected="a floating dtype",
                got=repr(self.dtype),
                hint="it casts floating leaves; cast others in the tree.",
            )


def read_tree(contents: Contents, choice: Choice, *, root: int = 0, mapped: bool) -> TensorCollection:
    """Read a tree, or the sub-tree at a node; `mapped` leaves are read when they are first used.

    Raises:
        FilterError: A pattern in `choice.where` matches no leaf.
        TreeStructureError: The keys differ from the keys of `choice.like`.
        LeafMismatchError: Shapes or dtypes differ.
        UnsupportedError: `choice.dtype` would cast codes as if they were numbers, or codes cannot be dequantized.
    """
    if choice.dequantize:
        return _read_dequantized(contents, choice, root, mapped=mapped)
    wanted: Sequence[int] = _leaves_at(contents, root)
    if choice.where is None and choice.like is None:
        if choice.dtype is not None:
            contents.quantized.check_cast(f"load {contents.path}", wanted, choice.dtype)
        return _build(contents, read_leaves(contents, wanted, choice, mapped=mapped), choice, root)
    outline, numbers = outline_tree(contents, choice, root)
    places = _sharded_places(outline, numbers, choice.like)
    if choice.where is not None:
        outline = partition(outline, choice.where)[0]
        wanted = sorted({numbers[id(leaf)] for _, leaf in iter_leaves(outline)})
    if choice.dtype is not None:
        contents.quantized.check_cast(f"load {contents.path}", wanted, choice.dtype)
    if choice.like is not None:
        check_like(outline, choice.like, contents.path)
    read = read_leaves(contents, wanted, choice, mapped=mapped, places=places)
    if choice.where is None:
        return _build(contents, read, choice, root)
    return outline._map(LeafOp("load", lambda leaf: read[numbers[id(leaf)]]))


def _leaves_at(contents: Contents, root: int) -> Sequence[int]:
    """Return the leaves of the tree, or of the sub-tree at a node."""
    if root:
        return contents.plan.leaves_below(root)
    return range(len(contents.plan.specs))


# Any: the tree, mapping or spec that is expected; DTensors.
def _sharded_places(outline: TensorCollection, numbers: Mapping[int, int], like: Any) -> dict[int, Any]:
    """Return the DTensors in an expected tree by the numbers of the leaves at their paths."""
    if find_sharded(like) is None:
        return {}
    spread = _list_sharded(like)
    return {numbers[id(leaf)]: spread[path] for path, leaf in iter_leaves(outline) if path in spread}


# Any: as `_sharded_places`.
def _list_sharded(like: Any) -> dict[Path, Any]:
    """Return the DTensors in a tree, or in a nested mapping of trees and DTensors, by their paths."""
    found: dict[Path, Any] = {}
    stack: list[tuple[Path, Any]] = [((), like)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, TensorCollection):
            found.update({(*at, *path): leaf for path, leaf in iter_leaves(node) if is_sharded(leaf)})
        elif isinstance(node, Mapping):
            items: Mapping[Any, Any] = node
            stack.extend([((*at, *unravel(key)), child) for key, child in items.items()])
        elif is_sharded(node):
            found[at] = node
    return found


def _read_dequantized(contents: Contents, choice: Choice, root: int, *, mapped: bool) -> TensorCollection:
    """Read a tree, with numbers in place of codes and their scales."""
    call = f"load {contents.path}"
    if find_sharded(choice.like) is not None:
        raise UnsupportedError(f"{call}: dequantize= and a DTensor in like= cannot be combined.")
    raw = replace(choice, where=None, like=None, dtype=None, dequantize=False)
    outline, _ = outline_tree(contents, raw, root)
    change = Dequantizing(call, outline, choice.where, choice.dtype)
    if choice.like is not None:
        # Before anything is read.
        with outside_transforms():
            expected = change.apply(outline)
        check_like(expected, choice.like, contents.path)
    if choice.where is not None:
        raw = replace(raw, where=change.reads)
    tree = read_tree(contents, raw, root=root, mapped=mapped)
    with outside_transforms():
        return change.apply(tree)


def narrow_tree(tree: TensorCollection, choice: Choice, path: str) -> TensorCollection:
    """Return the chosen part of a tree that has its leaves already."""
    if choice.dequantize:
        tree = Dequantizing(f"load {path}", tree, choice.where, choice.dtype).apply(tree)
    else:
        whole = tree
        if choice.where is not None:
            tree = partition(tree, choice.where)[0]
        if choice.dtype is not None:
            tree = cast_tree(f"load {path}", tree, choice.dtype, whole)
    if choice.like is not None:
        check_like(tree, choice.like, path)
    return tree


def outline_tree(contents: Contents, choice: Choice, root: int = 0) -> tuple[TensorCollection, dict[int, int]]:
    """Return the tree on the meta device in its final dtypes, and the number of each leaf by its id."""
    plan = contents.plan
    leaves: dict[int, Tensor] = {}
    with outside_transforms():
        for i in _leaves_at(contents, root):
            dtype = _dtype_of(contents, i, choice.dtype)
            empty = torch.empty(plan.specs[i].size, dtype=dtype, device="meta")
            leaves[i] = flag_leaf(empty, plan.flags[i])
    # The tree holds its leaves, so their ids stay theirs.
    return _build(contents, leaves, choice, root), {id(leaf): i for i, leaf in leaves.items()}


def _build(contents: Contents, leaves: "Leaves", choice: Choice, root: int) -> TensorCollection:
    with parsing(contents.path):
        return build_tree(contents.plan, leaves, choice.classes, choice.device, root)


# Any: DTensors.
def read_leaves(
    contents: Contents, wanted: Sequence[int], choice: Choice, *, mapped: bool, places: Mapping[int, Any] = {}
) -> "Leaves":
    """Return leaves by their number, checked, cast and on their devices; at `places` as DTensors like those."""
    parts = {i: Block(*own_part(like)[:2]) for i, like in places.items()}
    plan = contents.plan
    device = choice.device
    with contents.reading():
        has_values = not is_fake(device)
        if has_values:
            leaves = _read_files(contents, wanted, choice, mapped=mapped, parts=parts)
        else:
            leaves = _empty_leaves(contents, wanted, device)
        if choice.dtype is not None:
            for i in wanted:
                leaves[i] = leaves[i].to(_dtype_of(contents, i, choice.dtype))
        if has_values:
            _move_leaves(leaves, contents, wanted, device)
            for i, like in places.items():
                leaves[i] = place_like(leaves[i], like)
        if any(plan.marks):
            for i in wanted:
                leaves[i] = flag_leaf(leaves[i], plan.flags[i])
        return leaves


def _empty_leaves(contents: Contents, wanted: Sequence[int], device: torch.device | None) -> "Leaves":
    """Return leaves without values, in FakeTensorMode or on the meta device."""
    plan = contents.plan
    leaves: dict[int, Tensor] = {}
    for i in wanted:
        spec = plan.specs[i]
        leaves[i] = torch.empty(spec.size, dtype=spec.dtype, device=device or plan.place(i) or "cpu")
    return leaves


def _move_leaves(leaves: "Leaves", contents: Contents, wanted: Sequence[int], device: torch.device | None) -> None:
    """Move leaves that are on the CPU to a device, or to their recorded devices."""
    plan = contents.plan
    if device is None and not plan.has_devices:
        return
    for i in wanted:
        target = device or plan.place(i)
        if target is not None and target.type != "cpu":
            leaves[i] = move_leaf(leaves[i], target)


def _read_files(
    contents: Contents, wanted: Sequence[int], choice: Choice, *, mapped: bool, parts: Mapping[int, Block]
) -> "Leaves":
    """Return leaves on the CPU in their own dtypes, or parts of them, checked."""
    specs = contents.plan.specs
    with bytes_bar(f"load {os.path.basename(contents.path)}", sum([specs[i].size_bytes for i in wanted])) as tick:
        return _read_wanted(contents, wanted, choice, _Way(mapped, parts, tick))


class _Way(NamedTuple):
    """How leaves are read."""

    # On the mapped bytes of their file.
    mapped: bool
    # By the numbers of leaves of which this rank reads a part.
    parts: Mapping[int, Block]
    # Called with the number of bytes that are read.
    tick: Callable[[int], object]


def _read_wanted(contents: Contents, wanted: Sequence[int], choice: Choice, way: _Way) -> "Leaves":
    def read_file(source: Source, mine: Sequence[int]) -> list[Tensor]:
        if way.mapped:
            return _map_file(contents, source, mine, choice, way)
        return _read_file(contents, source, mine, way)

    if contents.homes is None:
        read = read_file(contents.sources[0], wanted)
        # All of them are in order, and a list is faster to read and to make.
        if type(wanted) is range:
            return read
        return dict(zip(wanted, read, strict=True))
    leaves: dict[int, Tensor] = {}
    groups = group_by_home(wanted, contents.places.homes, len(contents.sources))
    for source, mine in zip(contents.sources, groups, strict=True):
        if mine:
            leaves.update(zip(mine, read_file(source, mine), strict=True))
    return leaves


def _read_file(contents: Contents, source: Source, mine: Sequence[int], way: _Way) -> list[Tensor]:
    """Read leaves of one file into new memory."""
    specs = contents.plan.specs
    places = contents.places
    begins = places.begins
    leaves: dict[int, Tensor] = {}
    # In the order of the file, which the disk reads ahead.
    for i in sorted(mine, key=begins.__getitem__):
        leaf = read_leaf(source, specs[i], begins[i], contents.names[i], places.digests[i])
        if i in way.parts:
            leaf = leaf[way.parts[i].box].clone()
        leaves[i] = leaf
        way.tick(specs[i].size_bytes)
    return [leaves[i] for i in mine]


def _map_file(contents: Contents, source: Source, mine: Sequence[int], choice: Choice, way: _Way) -> list[Tensor]:
    """Return leaves of one file as tensors on its mapped bytes, which are compared with their checksums."""
    plan = contents.plan
    specs = plan.specs
    begins = contents.places.begins
    assert isinstance(source.data, (LocalBytes, MappedBytes))
    data = source.data.map()
    parts = way.parts
    _check_mapped(contents, memoryview(data), mine, way)
    views = view_leaves(data, [specs[i] for i in mine], [begins[i] for i in mine])
    if parts:
        for k, i in enumerate(mine):
            if i in parts:
                # No more than this part is read.
                views[k] = views[k][parts[i].box].clone()
    # Tensors in plain objects belong to torch's optimizers, which use them as they are.
    values = {flags for flags in plan.marks if IS_VALUE in flags}
    if choice.aligned or values:
        for k, i in enumerate(mine):
            if (choice.aligned or plan.flags[i] in values) and views[k].data_ptr() % _ALIGN_BYTES:
                views[k] = views[k].clone()
    return views


def _check_mapped(contents: Contents, view: memoryview, mine: Sequence[int], way: _Way) -> None:
    """Compare the checksums of leaves of one file, so far as they are recorded."""
    specs = contents.plan.specs
    places = contents.places
    begins = places.begins
    names = contents.names
    digests = places.digests
    # In the order of the file, which the disk reads ahead.
    for i in sorted(mine, key=begins.__getitem__):
        recorded = digests[i]
        if recorded is not None:
            begin = begins[i]
            check_bytes(names[i], view[begin : begin + specs[i].size_bytes], recorded, way.parts.get(i))
            way.tick(specs[i].size_bytes)


def _dtype_of(contents: Contents, i: int, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a leaf gets; codes and scales, and a tensor that is non-tensor data, keep their dtypes."""
    own = contents.plan.specs[i].dtype
    if dtype is None or not own.is_floating_point:
        return own
    is_kept = IS_VALUE in contents.plan.flags[i] or i in contents.quantized.kept
    return own if is_kept else dtype
