"""Files of torch.save: read by torch's restricted reader only, and written by torch.save."""

import os
import pickle
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, damaged
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Path
from tdfunc.ops.edits.edit import restore_ties
from tdfunc.storage.disk.commit import replace_file
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.disk.formats import HEAD_BYTES, TAIL_BYTES, TORCH, archive_format, find_format, refusal
from tdfunc.storage.tree.build import without_values
from tdfunc.storage.tree.foreign import nests
from tdfunc.storage.tree.objects import is_json, pack

_EMPTY = Size(())
_ALIGN = 64


class TorchLeaf(NamedTuple):
    """A leaf in a file of torch.save, mapped or in memory."""

    tensor: Tensor
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values."""
        flat = self.tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        yield from flat.split(count) if flat.numel() else ()


def is_torch_file(path: str) -> bool:
    """Return whether a file is one of torch.save: an archive or, of old versions, pickles."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        # An archive of torch.save may be damaged at its end.
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        return find_format(head, file.read()) is TORCH


def read_torch(path: str) -> tuple[TensorCollection, dict[int, TorchLeaf], list[str]]:
    """Read a file of torch.save by the restricted reader.

    Returns the tree on the meta device, the leaves, and the list of values that are altered.

    Dicts of tensors by name become trees, and keys with dots nest if that is unambiguous. Everything else stays a plain
    object, as in `save`: a dict with a list, a tuple or keys of another type is one plain object.
    """
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
        found = archive_format(listed)
        if found is not TORCH:
            raise refusal(path, found, b"PK")
    try:
        # Files of torch before 1.6 cannot be mapped.
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_archive else None)
    except pickle.UnpicklingError as err:
        raise UnsupportedError(
            f"{path} must contain only tensors and plain data; other objects run code when they are read.",
            got="".join([line.strip() for line in str(err).splitlines() if "nsupported" in line])[:300] or None,
            hint="in a program that trusts the file, save its state dict anew.",
        ) from err
    # Damage raises errors of all kinds.
    except Exception as err:
        raise damaged(f"{path}: torch.load must read the file.", got=f"{type(err).__name__}: {err}"[:300]) from err
    builder = _Builder(path)
    tree = builder.tree(loaded if isinstance(loaded, Mapping) else {"value": loaded}, ())
    ties = tuple(tuple(paths) for paths in builder.paths.values() if len(paths) > 1)
    return restore_ties(tree, ties), builder.leaves, builder.altered


class _Builder:
    """Builds trees from loaded values; tensors of one memory, shape and dtype are one tied leaf."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leaves: dict[int, TorchLeaf] = {}
        self.known: dict[Any, Tensor] = {}
        self.paths: dict[Any, list[Path]] = {}
        # The values that are altered.
        self.altered: list[str] = []

    def tree(self, found: Mapping[Any, Any], at: Path) -> TensorCollection:
        """Make a tree of a dict."""
        if not all(type(key) is str and key for key in found):
            found = {"value": found}
        is_nested = nests(list(found))
        level: dict[str, Any] = {}
        for name, value in found.items():
            path = name.split(".") if is_nested else [name]
            inner = level
            for key in path[:-1]:
                inner = inner.setdefault(key, _Level())
            inner[path[-1]] = value
        return self._build(level, at)

    def _build(self, level: dict[str, Any], at: Path) -> TensorCollection:
        nodes = {key: self._node(value, (*at, key)) for key, value in level.items()}
        return TensorCollection._open._make(nodes, _EMPTY)

    def _node(self, value: Any, at: Path) -> Any:
        if isinstance(value, _Level):
            return self._build(value, at)
        if isinstance(value, Tensor):
            return self._leaf(value, at)
        if isinstance(value, Mapping) and _is_tree(value):
            return self.tree(value, at)
        if is_json(value):
            return NonTensorData(value, _EMPTY)
        plain = self._plain(value, at)
        return pack(plain, _EMPTY, lambda place, what: self._refusal((*at, *filter(None, [place])), "plain data", what))

    def _plain(self, value: Any, at: Path) -> Any:
        """Return a plain object without values in its tensors, and with Python's own classes."""
        if isinstance(value, Tensor):
            return self._leaf(value, at, in_object=True)
        if not isinstance(value, list | tuple | Mapping):
            return value
        known = next(cls for cls in (OrderedDict, Counter, Mapping, list, tuple) if isinstance(value, cls))
        made: Any = known if known is not Mapping else dict
        if type(value) is not made:
            self.altered.append(f"{dotted(at)}: {type(value).__name__} becomes {made.__name__}")
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [(key, self._plain(item, (*at, str(key)))) for key, item in items]
        return made(dict(parts) if isinstance(value, Mapping) else [part for _, part in parts])

    def _leaf(self, leaf: Tensor, at: Path, *, in_object: bool = False) -> Tensor:
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
            raise self._refusal(at, "a dense tensor", f"{leaf.layout}, {leaf.dtype}, {leaf.device}")
        memory = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype
        # Empty tensors have no memory to share.
        mark = (in_object, *memory) if leaf.numel() else at
        if mark not in self.known:
            made = self.known[mark] = without_values(leaf, leaf.dtype)
            self.leaves[id(made)] = TorchLeaf(leaf)
        if not in_object:
            self.paths.setdefault(mark, []).append(at)
        return self.known[mark]

    def _refusal(self, at: Path, expected: str, got: str) -> UnsupportedError:
        what = f"{self.path}: a tree cannot contain the value at {dotted(at)!r}."
        return UnsupportedError(what, expected=expected, got=got)


class _Level(dict[str, Any]):
    """A sub-tree that dotted names imply."""


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Mapping) and any(map(_has_tensors, value.values())))


def _is_tree(found: Mapping[Any, Any]) -> bool:
    """Return whether a dict contains tensors by name, and besides them only such dicts and plain data."""
    if not found or not _has_tensors(found):
        return not found
    texts = all(type(key) is str and key for key in found)
    return texts and all(
        _is_tree(part)
        if isinstance(part, Mapping) and _has_tensors(part)
        else isinstance(part, Tensor) or is_json(part)
        for part in found.values()
    )


def damaged_entry(path: str) -> str | None:
    """Return the damage of the first damaged entry of a zip archive, by its checksums; None without damage."""
    with zipfile.ZipFile(path) as archive:
        try:
            name = archive.testzip()
        except Exception as err:
            return f"{type(err).__name__}: {err}"
    return None if name is None else f"Bad CRC-32 for file {name!r}"


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
            if size_bytes := leaf.numel() * leaf.element_size():
                mapped = torch.from_numpy(np.memmap(file, np.uint8, "c", begin, (size_bytes,)))
                made[key] = mapped.view(leaf.dtype).view(leaf.shape)
            else:
                made[key] = torch.empty(leaf.shape, dtype=leaf.dtype)
        whole = {name: made[id(leaf)] for name, leaf in state.items()}

        def write(fd: int) -> None:
            with os.fdopen(os.dup(fd), "wb") as target:
                torch.save(whole, target)

        replace_file(path, write, size_bytes=0, fsync=True)
