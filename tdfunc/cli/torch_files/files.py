"""Files of torch.save: read by torch's restricted reader only, and written by torch.save."""

import math
import os
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.cli.torch_files.pickles import Extents, NumpyArray, TensorSearch, Unknown, load_pickled
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, damaged
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Path
from tdfunc.ops.edits.edit import restore_ties
from tdfunc.storage.disk.commit import replace_file
from tdfunc.storage.disk.formats import HEAD_BYTES, TAIL_BYTES, TORCH, find_format
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.memmap.layout import META
from tdfunc.storage.safetensors.index import TORCH_INDEX, TORCH_NAMES, is_index
from tdfunc.storage.safetensors.read import parsing
from tdfunc.storage.tree.build import without_values
from tdfunc.storage.tree.foreign import nests
from tdfunc.storage.tree.objects import MAX_DEPTH, is_json, is_plain, is_plain_dtype, pack
from tdfunc.storage.tree.specs import parse_json

_EMPTY = Size(())
# In place of a value that is left out.
_OMITTED = object()
_ALIGN = 64
# Sub-trees in sub-trees, which are read by recursion.
_MAX_LEVELS = 250
# Of a plain object, whose text has each of them.
_MAX_VALUES = 10_000_000


class TorchLeaf(NamedTuple):
    """A leaf in a file of torch.save, mapped or in memory."""

    tensor: Tensor
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values."""
        flat = self.tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        # An empty tensor splits into one empty piece.
        if flat.numel():
            yield from flat.split(count)


class LeftOut(NamedTuple):
    """A value of a file that a tree cannot contain."""

    # The value, or its class.
    text: str
    is_tensor: bool


class TorchTree(NamedTuple):
    """The contents of files of torch.save."""

    # On the meta device.
    tree: TensorCollection
    leaves: dict[int, TorchLeaf]
    # Values that the tree contains in another form.
    altered: list[str]
    left_out: dict[Path, LeftOut]
    files: list[str]


def find_torch(path: str) -> str | None:
    """Return the file or index of torch.save that a path stands for; None if it is another checkpoint."""
    if os.path.isdir(path):
        return _find_in_folder(path)
    if not os.path.isfile(path):
        return None
    if os.path.basename(path) == TORCH_INDEX:
        return path
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        # The list of an archive is at its end.
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        tail = file.read()
    if find_format(head, tail) is TORCH:
        return path
    return None


def _find_in_folder(folder: str) -> str | None:
    """Return the file or index of torch.save in a folder that has no other checkpoint."""
    names = set(os.listdir(folder))
    if META in names:
        return None
    for name in names.difference(TORCH_NAMES):
        if name.endswith(".safetensors") or is_index(name):
            return None
    return next((os.path.join(folder, name) for name in TORCH_NAMES if name in names), None)


def read_torch(path: str) -> TorchTree:
    """Read a file of torch.save, or the shards of an index of such files, by the restricted reader.

    Dicts of tensors by name become trees, and keys with dots nest if that is unambiguous. Everything else stays a plain
    object, as in `save`: a dict with a list, a tuple or keys of another type is one plain object. A value that a tree
    cannot contain is left out by name; in a list, None is in its place.
    """
    if os.path.basename(path) == TORCH_INDEX:
        files, loaded, unlisted = _load_shards(path)
    else:
        files = [path]
        loaded = _load(path)
        unlisted = []
    builder = _Builder(path)
    for name in unlisted:
        builder.left_out[tuple(name.split("."))] = LeftOut("an entry that the index does not name", is_tensor=True)
    if not isinstance(loaded, Mapping):
        loaded = {"value": loaded}
    tree = builder.tree(loaded, ())
    if builder.left_out and not builder.leaves:
        # With nothing else to show, the first of them is the trouble.
        at, value = next(iter(builder.left_out.items()))
        what = f"{path}: a tree cannot contain the value at {dotted(at)!r}."
        raise UnsupportedError(what, expected="tensors and plain data", got=value.text)
    ties = tuple(tuple(paths) for paths in builder.paths.values() if len(paths) > 1)
    return TorchTree(restore_ties(tree, ties), builder.leaves, builder.altered, builder.left_out, files)


def _load(path: str) -> Any:
    return load_pickled(path, is_archive=zipfile.is_zipfile(path))


class _Shards(NamedTuple):
    """The files that an index names."""

    files: list[str]
    entries: dict[str, Any]
    # The names of entries in the files that the index does not list.
    unlisted: list[str]


def _load_shards(path: str) -> _Shards:
    """Read an index and its files."""
    with open(path, "rb") as file:
        raw = file.read()
    with parsing(path):
        homes: dict[str, str] = parse_json(raw)["weight_map"]
        names = list(dict.fromkeys(homes.values()))
        if not all(_is_file_name(name) for name in names):
            raise damaged("the index names files outside of its folder.", got=", ".join(map(repr, names[:5])))
    files = [os.path.join(os.path.dirname(path), name) for name in names]
    found = {name: _load(file) for name, file in zip(names, files, strict=True)}
    lacking = [key for key, home in homes.items() if not isinstance(found[home], Mapping) or key not in found[home]]
    if lacking:
        raise damaged(f"load {path}: the index does not fit its files.", got=f"missing: {', '.join(lacking[:5])}")
    unlisted: list[str] = []
    for entries in found.values():
        unlisted += [str(key) for key in entries if key not in homes]
    return _Shards(files, {key: found[home][key] for key, home in homes.items()}, unlisted)


def _is_file_name(name: str) -> bool:
    return name == os.path.basename(name) and name not in ("", ".", "..")


class _Builder:
    """Builds trees from loaded values; tensors of one memory, shape and dtype are one tied leaf."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leaves: dict[int, TorchLeaf] = {}
        self.known: dict[Any, Tensor] = {}
        self.paths: dict[Any, list[Path]] = {}
        self.altered: list[str] = []
        self.left_out: dict[Path, LeftOut] = {}
        self.extents = Extents()
        self.search = TensorSearch()

    def tree(self, found: Mapping[Any, Any], at: Path) -> TensorCollection:
        """Make a tree of a dict."""
        if not all(type(key) is str and key for key in found):
            found = {"value": found}
        is_nested = nests(list(found))
        level: dict[str, Any] = {}
        for name, value in found.items():
            if is_nested:
                path = name.split(".")
            else:
                path = [name]
            inner = level
            for key in path[:-1]:
                inner = inner.setdefault(key, _Level())
            inner[path[-1]] = value
        return self._build(level, at)

    def _build(self, level: dict[str, Any], at: Path) -> TensorCollection:
        nodes: dict[str, Any] = {}
        for key, value in level.items():
            node = self._node(value, (*at, key))
            if node is not _OMITTED:
                nodes[key] = node
        return TensorCollection._open._make(nodes, _EMPTY)

    def _node(self, value: Any, at: Path) -> Any:
        """Return a value as an entry of a tree."""
        if isinstance(value, _Level):
            return self._build(value, at)
        if isinstance(value, Tensor):
            return self._leaf(value, at)
        extent = self.extents.of(value)
        if extent.depth > _MAX_LEVELS or extent.values > _MAX_VALUES:
            return self._omit_container(value, at)
        if isinstance(value, Mapping) and _is_tree(value):
            return self.tree(value, at)
        if extent.depth > MAX_DEPTH:
            return self._omit_container(value, at)
        plain = self._plain(value, at)
        if plain is _OMITTED:
            return plain
        if is_json(plain):
            return NonTensorData(plain, _EMPTY)
        return self._packed(plain, at)

    def _packed(self, plain: Any, at: Path) -> TensorCollection:
        """Return the node of a plain object."""

        def refusal(place: str, got: str) -> UnsupportedError:
            inner = (*at, place) if place else at
            what = f"{self.path}: a tree cannot contain the value at {dotted(inner)!r}."
            return UnsupportedError(what, expected="plain data", got=got)

        node = pack(plain, _EMPTY, refusal)
        for part in node._data.values():
            # The bytes of numpy's arrays.
            if isinstance(part, NonTensorData) and isinstance(part.data, Tensor):
                self.leaves.setdefault(id(part.data), TorchLeaf(part.data))
        return node

    def _plain(self, value: Any, at: Path) -> Any:
        """Return a plain object without values in its tensors, and with Python's own classes."""
        if isinstance(value, Tensor):
            return self._leaf(value, at, in_object=True)
        if isinstance(value, NumpyArray) and value.array is not None:
            value = value.array
        if isinstance(value, list | tuple | Mapping):
            return self._plain_container(value, at)
        if isinstance(value, np.ndarray):
            # Its bytes are a leaf, as the bytes of a tensor are.
            is_kept = is_plain_dtype(value.dtype)
        else:
            is_kept = is_plain(value)
        return value if is_kept else self._omit(value, at)

    # Any, here and below: the contents of a file.
    def _plain_container(self, value: Any, at: Path) -> Any:
        """Return a container of plain objects; one of a subclass becomes one of the class that Python has."""
        cls = next(cls for cls in (OrderedDict, Counter, Mapping, list, tuple) if isinstance(value, cls))
        made: Any = dict if cls is Mapping else cls
        if type(value) is not made:
            self.altered.append(f"{dotted(at)}: {type(value).__name__} becomes {made.__name__}")
        if not isinstance(value, Mapping):
            parts = [self._plain(item, (*at, str(i))) for i, item in enumerate(value)]
            return made([None if part is _OMITTED else part for part in parts])
        entries: Mapping[Any, Any] = value
        pairs: dict[Any, Any] = {}
        for key, item in entries.items():
            inner = (*at, str(key))
            if not _is_key(key):
                self._omit(key, inner)
                continue
            part = self._plain(item, inner)
            if part is not _OMITTED:
                pairs[key] = part
        return made(pairs)

    def _leaf(self, leaf: Tensor, at: Path, *, in_object: bool = False) -> Any:
        if not _is_dense(leaf):
            return self._omit(leaf, at)
        # Empty tensors have no memory to share.
        mark: Any = at
        if leaf.numel():
            memory = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype
            # A conjugate and a negative are views of the same memory, with other values.
            mark = (in_object, leaf.is_conj(), leaf.is_neg(), *memory)
        if mark not in self.known:
            made = self.known[mark] = without_values(leaf, leaf.dtype)
            self.leaves[id(made)] = TorchLeaf(leaf)
        if not in_object:
            self.paths.setdefault(mark, []).append(at)
        return self.known[mark]

    def _omit(self, value: Any, at: Path) -> Any:
        """Leave a value out, and remember what it is."""
        self.left_out[at] = LeftOut(_text_of(value), self.search.finds(value))
        return _OMITTED

    def _omit_container(self, value: Any, at: Path) -> Any:
        """Leave a container out whose text would be without end."""
        extent = self.extents.of(value)
        if math.isinf(extent.depth):
            what = "contains itself"
        elif extent.depth > MAX_DEPTH:
            what = f"is nested over {MAX_DEPTH} deep"
        else:
            what = f"has over {_MAX_VALUES:,} values"
        self.left_out[at] = LeftOut(f"a {type(value).__name__} that {what}", extent.has_tensors)
        return _OMITTED


def _text_of(value: Any) -> str:
    """Return the text that stands for a value which is left out."""
    if isinstance(value, Tensor):
        # A nested tensor has no one shape.
        size = "nested" if value.is_nested else str(list(value.shape))
        return f"a tensor of {value.layout}, {value.dtype}, {value.device}, {size}"
    if isinstance(value, type):
        return f"the class or function {getattr(value, 'name', value.__name__)}"
    if isinstance(value, Unknown):
        return value.name
    if type(value).__module__ in ("builtins", "torch"):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_dense(leaf: Tensor) -> bool:
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)


def _is_key(key: Any) -> bool:
    parts: Any = key if isinstance(key, tuple) else (key,)
    return all([is_plain(part) for part in parts])


class _Level(dict[str, Any]):
    """A sub-tree that dotted names imply."""


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Mapping) and any(map(_has_tensors, value.values())))


def _is_tree(found: Mapping[Any, Any]) -> bool:
    """Return whether a dict contains tensors by name, and besides them only such dicts and values without tensors."""
    if not found or not _has_tensors(found):
        return not found
    if not all(type(key) is str and key for key in found):
        return False
    for part in found.values():
        is_deeper = isinstance(part, Mapping) and _has_tensors(part)
        if is_deeper and not _is_tree(part):
            return False
        if not is_deeper and isinstance(part, list | tuple | Mapping) and not is_json(part):
            return False
    return True


def damaged_entry(path: str) -> str | None:
    """Return the damage of the first damaged entry of a zip archive, by its checksums; None without damage."""
    with zipfile.ZipFile(path) as archive:
        try:
            name = archive.testzip()
        except Exception as err:
            return f"{type(err).__name__}: {err}"
    if name is None:
        return None
    return f"Bad CRC-32 for file {name!r}"


def write_torch(state: Mapping[str, Tensor], values: Callable[[Tensor], Iterable[Tensor]], path: str) -> None:
    """Write a state dict by torch.save, which maps the values from a temporary file: memory need not hold them all."""
    leaves = {id(leaf): leaf for leaf in state.values()}
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))) as file:
        made: dict[int, Tensor] = {}
        for key, leaf in leaves.items():
            begin = -(-file.tell() // _ALIGN) * _ALIGN
            file.seek(begin)
            for piece in values(leaf):
                file.write(raw_bytes(piece))
            file.flush()
            size_bytes = leaf.numel() * leaf.element_size()
            if size_bytes:
                mapped = torch.from_numpy(np.memmap(file, np.uint8, "c", begin, (size_bytes,)))
                made[key] = mapped.view(leaf.dtype).view(leaf.shape)
            else:
                made[key] = torch.empty(leaf.shape, dtype=leaf.dtype)
        whole = {name: made[id(leaf)] for name, leaf in state.items()}

        def write(fd: int) -> None:
            with os.fdopen(os.dup(fd), "wb") as target:
                torch.save(whole, target)

        replace_file(path, write, size_bytes=0, fsync=True)
