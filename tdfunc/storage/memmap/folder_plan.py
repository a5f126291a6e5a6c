"""A tree as a memmap folder: which folders, `meta.json` files and leaf files there will be. Nothing is written here.

The layout is tensordict's; what that has no field for is in `meta.json` under the empty key, which it ignores.
`docs/memmap.md` is the specification, `folder_read.py` reads it.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, TieError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.types import Path
from tdfunc.storage.memmap.names import LEAF_SUFFIX, META, encoded, is_special, special_name
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, REQUIRES_GRAD, _check_value, check_tie_size

VERSION = 1
TREE_TYPE = "<class 'tensordict._td.TensorDict'>"
LAZY_TYPE = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
VALUE_TYPE = "<class 'tensordict.tensorclass.NonTensorData'>"
VALUES_TYPE = "<class 'tensordict.tensorclass.NonTensorStack'>"
# tensordict's load of a whole folder fails at a leaf of any other dtype.
_SHARED_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128",
)  # fmt: skip
_OWN_DTYPES = (
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
SHARED_DTYPES = {f"torch.{name}": getattr(torch, name) for name in _SHARED_DTYPES if hasattr(torch, name)}
DTYPES = SHARED_DTYPES | {f"torch.{name}": getattr(torch, name) for name in _OWN_DTYPES if hasattr(torch, name)}
_KNOWN = frozenset(DTYPES.values())


class FileLeaf(NamedTuple):
    """A leaf and the file that it goes to, relative to the folder."""

    name: str
    leaf: Tensor
    path: Path
    size_bytes: int
    # Whether it is non-tensor data, which are no memory to be written to.
    is_value: bool


class FolderPlan(NamedTuple):
    """What is in a folder, by relative names; an outer folder comes before those in it."""

    metas: list[tuple[str, str]]
    files: list[FileLeaf]
    # Second names of tied leaves: (name, the file that has the values).
    links: list[tuple[str, str]]
    # The same for tensors under several keys that are not tied: these must be one file.
    same: list[tuple[str, str]]
    # The classes of the nodes that are no TensorDict, by folder: a local class cannot be found by its name.
    types: dict[str, type[TensorCollection]]
    size_bytes: int


class _Pending(NamedTuple):
    tree: TensorCollection
    folder: str
    path: Path


def plan_folder(tree: TensorCollection, call: str, *, values: bool = True) -> FolderPlan:
    """Lay out a tree; without `values` the leaves need not have any (they may be on the meta device).

    Raises:
        UnsupportedError: A leaf, value or key that a folder cannot hold unchanged; the message names it.
        BatchSizeError: A leaf does not start with the batch size.
        TieError: Tied paths hold different leaves.
    """
    return _Planner(call, values).plan(tree)


class _Planner:
    def __init__(self, call: str, values: bool) -> None:
        self.call = call
        self.values = values
        self.metas: list[tuple[str, str]] = []
        self.files: list[FileLeaf] = []
        self.links: list[tuple[str, str]] = []
        self.types: dict[str, type[TensorCollection]] = {}
        # The first paths of ties, and what is there.
        self.first: dict[Path, Path] = {}
        self.stored: dict[Path, tuple[str, Tensor]] = {}
        self.aliases: list[tuple[str, Path, Tensor, Path]] = []

    def plan(self, tree: TensorCollection) -> FolderPlan:
        check_tie_size(sum(len(path) ** 2 for group in tree._ties for path in group), UnsupportedError)
        self.first = {path: group[0] for group in tree._ties for path in group}
        stack = [_Pending(tree, "", ())]
        while stack:
            stack.extend(reversed(self._node(stack.pop())))
        for name, path, leaf, first in self.aliases:
            if first not in self.stored or self.stored[first][1] is not leaf:
                raise TieError(
                    f"{self.call}: {dotted(path)!r} is tied to {dotted(first)!r}, but holds another value.",
                    hint="td.untie(path) separates them.",
                )
            if leaf.numel():
                self.links.append((name, self.stored[first][0]))
        size_bytes = sum(file.size_bytes for file in self.files)
        return FolderPlan(self.metas, self.files, self.links, [], self.types, size_bytes)

    def _node(self, node: _Pending) -> list[_Pending]:
        """Lay out one node; return its sub-trees."""
        tree = node.tree
        # Counted from the end, the place of a lazy stack's dimension.
        place_from_end: int | None = tree._static.own if tree._static is not None else None
        is_lazy = place_from_end is not None
        own: dict[str, Any] = {"tdfunc": VERSION}
        if tree._names is not None:
            own["names"] = list(tree._names)
        if type(tree) is not TensorCollection._open and not is_lazy:
            own["class"] = f"{type(tree).__module__}:{type(tree).__qualname__}"
            self.types[node.folder] = type(tree)
        if tree._ties:
            own["ties"] = [[list(path) for path in group] for group in tree._ties]
        place = "cpu" if tree._device is not None else "None"
        if place_from_end is not None:
            own["count"], own["device"] = len(tree._data), place
            meta: dict[str, Any] = {"_type": LAZY_TYPE, "stack_dim": len(tree._batch_size) + place_from_end}
            children = [_Pending(t, _join(node.folder, i), (*node.path, i)) for i, t in self._trees(tree, node.path)]
        else:
            entries, children = self._entries(node, own)
            meta = {**entries, "shape": list(tree._batch_size), "device": place, "_type": TREE_TYPE}
        meta[""] = own
        self.metas.append((_join(node.folder, META), self._json(meta, node.path)))
        return children

    def _trees(self, tree: TensorCollection, path: Path) -> list[tuple[str, TensorCollection]]:
        trees: list[tuple[str, TensorCollection]] = []
        for key, node in tree._data.items():
            if not isinstance(node, TensorCollection):
                raise self._refusal((*path, key), f"a {type(node).__name__}", "a tree in each place of a lazy stack")
            trees.append((key, node))
        return trees

    def _entries(self, node: _Pending, own: dict[str, Any]) -> tuple[dict[str, Any], list[_Pending]]:
        tree, batch = node.tree, node.tree._batch_size
        entries: dict[str, Any] = {}
        special: dict[str, Any] = {}
        flags: dict[str, str] = {}
        shapes: dict[str, list[int]] = {}
        children: list[_Pending] = []
        for key, value in tree._data.items():
            path = (*node.path, key)
            self._check_encodable(key, path)
            flag = KIND_FLAGS[tree._kinds[key]] if key in tree._kinds else ""
            if isinstance(value, NonTensorBase):
                if value.shape[: len(batch)] != batch:
                    raise _misfit(self.call, path, batch, value.shape)
                if value.shape != batch:
                    shapes[key] = list(value.shape)
            if isinstance(value, NonTensorData) and isinstance(value.data, Tensor):
                special[key], flag = self._leaf(node.folder, path, value.data, Size(()), flag + IS_VALUE, True)
            elif isinstance(value, Tensor):
                is_own = is_special(key, leaf=True) or str(value.dtype) not in SHARED_DTYPES
                (special if is_own else entries)[key], flag = self._leaf(node.folder, path, value, batch, flag, is_own)
            elif isinstance(value, TensorCollection):
                is_own = is_special(key, leaf=False)
                (special if is_own else entries)[key] = {"type": "TensorDict" if not is_own else "tree"}
                name = special_name(key) if is_own else encoded(key)
                children.append(_Pending(value, _join(node.folder, name), path))
            elif isinstance(value, NonTensorBase):
                inline = self._value(node.folder, path, value)
                (entries if inline is None else special)[key] = inline or {"type": type(value).__name__}
            else:
                hint = "wrap it: NonTensorData(value)."
                raise self._refusal(path, f"a {type(value).__name__}", "a tensor, tree or non-tensor data", hint)
            if flag:
                flags[key] = flag
        if special:
            own["special"], own["order"] = special, list(tree._data)
        if flags:
            own["flags"] = flags
        if shapes:
            own["shapes"] = shapes
        return entries, children

    def _leaf(
        self, folder: str, path: Path, leaf: Tensor, batch: Size, flag: str, is_own: bool
    ) -> tuple[dict[str, Any], str]:
        """Enter a leaf; return its entry in meta.json and its flags."""
        self._check_leaf(path, leaf)
        if leaf.shape[: len(batch)] != batch:
            raise _misfit(self.call, path, batch, leaf.shape)
        if type(leaf) is nn.Parameter:
            flag += IS_PARAMETER
        if leaf.requires_grad:
            flag += REQUIRES_GRAD
        name = _join(folder, (special_name(path[-1]) if is_own else encoded(path[-1])) + LEAF_SUFFIX)
        first = self.first.get(path, path)
        if first != path:
            self.aliases.append((name, path, leaf, first))
        else:
            self.stored[path] = (name, leaf)
            # tensordict keeps no file for a leaf without elements.
            if leaf.numel():
                size_bytes = leaf.numel() * leaf.element_size()
                self.files.append(FileLeaf(name, leaf, path, size_bytes, IS_VALUE in flag))
        entry = {"device": "cpu", "shape": list(leaf.shape), "dtype": str(leaf.dtype), "is_nested": False}
        return entry, flag

    def _check_leaf(self, path: Path, leaf: Tensor) -> None:
        kind = type(leaf)
        if leaf.layout is torch.jagged:
            hint = "store its parts as leaves, .values() and .offsets(), or .to_padded_tensor(...)."
            raise self._refusal(path, "a jagged tensor", "a dense tensor", hint)
        if kind is not Tensor and kind is not nn.Parameter:
            hint = "store a plain tensor of it: .full_tensor(), or .as_subclass(torch.Tensor)."
            raise self._refusal(path, f"a {kind.__name__}", "a plain tensor or Parameter", hint)
        if leaf.layout is not torch.strided or leaf.is_nested:
            hint = "store .to_dense(), .to_padded_tensor(), or its parts as leaves."
            raise self._refusal(path, f"a tensor of layout {leaf.layout}", "a dense tensor", hint)
        if leaf.dtype not in _KNOWN:
            raise self._refusal(path, str(leaf.dtype), f"one of {', '.join(DTYPES)}", "convert it to one of these.")
        if not self.values:
            return
        if leaf.is_meta:
            hint = "materialize it first, or make room for it: memmap_like."
            raise self._refusal(path, "a tensor on the meta device", "a tensor with values", hint)
        try:
            empty = not leaf.data_ptr() and leaf.numel()
        except RuntimeError as err:
            hint = "write outside of torch.func transformations."
            raise self._refusal(path, f"{kind.__name__} inside a transformation", "a tensor", hint) from err
        if empty:
            raise self._refusal(path, "a tensor whose storage was freed", "a tensor with values")

    def _value(self, folder: str, path: Path, value: NonTensorBase) -> dict[str, Any] | None:
        """Write non-tensor data as tensordict does; where that would alter it, return its own entry."""
        special = is_special(path[-1], leaf=False)
        if isinstance(value, NonTensorData):
            self._check_value(value.data, path)
            if special:
                return {"value": value.data}
            meta = {"_type": VALUE_TYPE, "data": value.data, "_is_non_tensor": True, "_metadata": None}
        else:
            assert isinstance(value, NonTensorStack)
            flat = value._array.ravel().tolist()
            self._check_value(flat, path)
            # tensordict takes lists inside for further batch dimensions, and keeps no empty stack.
            if special or not value.shape or not flat or not all(type(v) in (str, bool, int, float) for v in flat):
                return {"values": flat}
            meta = {"_type": VALUES_TYPE, "stack_dim": 0, "device": None, "data": value._array.tolist()}
        self.metas.append((_join(_join(folder, encoded(path[-1])), META), self._json(meta, path)))
        return None

    def _check_value(self, value: Any, path: Path) -> None:
        try:
            _check_value(value, repr(dotted(path)))
        except UnsupportedError as err:
            raise UnsupportedError(f"{self.call}: {err}") from err

    def _json(self, meta: dict[str, Any], path: Path) -> str:
        text = json.dumps(meta, ensure_ascii=False, separators=(",", ":"))
        self._check_encodable(text, path)
        return text

    def _check_encodable(self, text: str, path: Path) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise UnsupportedError(
                f"{self.call}: text at {ascii(dotted(path))} is no valid Unicode; nothing was written.",
                expected="text that UTF-8 can encode",
                got=ascii(text[err.start : err.start + 1]),
                hint="a lone surrogate is half of a character: rename the key, or repair the value.",
            ) from err

    def _refusal(self, path: Path, got: str, expected: str, hint: str | None = None) -> UnsupportedError:
        return UnsupportedError(
            f"{self.call}: {dotted(path) or 'the tree'!r} cannot be stored; nothing was written.",
            expected=expected,
            got=got,
            hint=hint,
        )


def _misfit(call: str, path: Path, batch: Size, shape: Size) -> BatchSizeError:
    return BatchSizeError(
        f"{call}: {dotted(path)!r} does not start with the batch size; nothing was written.",
        expected=str(list(batch)),
        got=str(list(shape)),
    )


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
