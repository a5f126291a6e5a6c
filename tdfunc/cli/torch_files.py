"""Files of torch.save: read by torch's restricted reader only, and written by torch.save."""

import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Path
from tdfunc.ops.edits.edit import restore_ties
from tdfunc.storage.disk.commit import replace_file
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.safetensors.contents import nests

_EMPTY = Size(())
_PICKLE, _ZIP = b"\x80", b"PK"
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
    """Return whether a file is one of torch.save (a zip archive or, of old versions, a pickle) by its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(16)
    # The length of a safetensors header could begin with the same bytes; then `{` follows it.
    return start.startswith((_ZIP, _PICKLE)) and start[8:9] != b"{"


def read_torch(path: str) -> tuple[TensorCollection, dict[int, TorchLeaf]]:
    """Read a file of torch.save by the restricted reader; return the tree on the meta device, and the leaves.

    Dicts become trees, keys with dots nest where that is unambiguous, and lists and tuples in which there are tensors
    become trees with the keys 0, 1, ...; other values become non-tensor data, tuples as lists.
    """
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
        # All entries of torch.save are in one folder; a program of torch.jit has constants.
        names = {name.partition("/")[2] for name in listed}
        if "constants.pkl" in names or not any(name == "data.pkl" or name.startswith("data/") for name in names):
            raise UnsupportedError(
                f"{path} must be a file of torch.save, and is another archive.",
                got=", ".join(map(ascii, listed))[:300],
                hint="of a program of torch.jit, in Python: torch.jit.load(path).state_dict().",
            )
    try:
        # Files of torch before 1.6 cannot be mapped.
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_archive else None)
    except pickle.UnpicklingError as err:
        raise UnsupportedError(
            f"{path} must hold tensors and plain data only; other objects run code when they are read.",
            got="".join([line.strip() for line in str(err).splitlines() if "nsupported" in line])[:300] or None,
            hint="in a program that trusts the file, save its state dict anew.",
        ) from err
    # Damage raises errors of all kinds.
    except Exception as err:
        raise CorruptCheckpointError(
            f"{path}: torch.load cannot read this.", got=f"{type(err).__name__}: {err}"[:300]
        ) from err
    builder = _Builder(path)
    tree = builder.tree(loaded if isinstance(loaded, Mapping) else {"value": loaded}, ())
    ties = tuple(tuple(paths) for paths in builder.paths.values() if len(paths) > 1)
    return restore_ties(tree, ties), builder.leaves


class _Builder:
    """Builds trees from loaded values; tensors of one memory, shape and dtype are one tied leaf."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leaves: dict[int, TorchLeaf] = {}
        self.known: dict[Any, Tensor] = {}
        self.paths: dict[Any, list[Path]] = {}

    def tree(self, found: Mapping[Any, Any], at: Path) -> TensorCollection:
        """Make a tree of a dict."""
        keys = [str(key) if type(key) is int else key for key in found]
        if not all(type(key) is str and key for key in keys) or len(set(keys)) < len(keys):
            raise self._refusal(at, "keys that are distinct as texts or whole numbers", repr(list(found))[:300])
        split = [tuple(key.split(".")) for key in keys]
        level: dict[str, Any] = {}
        for path, value in zip(split if nests(split) else [(key,) for key in keys], found.values(), strict=True):
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
        if isinstance(value, Mapping):
            return self.tree(value, at)
        if isinstance(value, list | tuple) and _has_tensors(value):
            return self.tree(dict(enumerate(value)), at)
        return NonTensorData(_plain(value), _EMPTY)

    def _leaf(self, leaf: Tensor, at: Path) -> Tensor:
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
            raise self._refusal(at, "a dense tensor", f"{leaf.layout}, {leaf.dtype}, {leaf.device}")
        memory = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype
        # Empty tensors have no memory to share.
        mark = memory if leaf.numel() else at
        if mark not in self.known:
            made = self.known[mark] = without_values(leaf, leaf.dtype)
            self.leaves[id(made)] = TorchLeaf(leaf)
        self.paths.setdefault(mark, []).append(at)
        return self.known[mark]

    def _refusal(self, at: Path, expected: str, got: str) -> UnsupportedError:
        where = repr(dotted(at)) if at else "the root"
        return UnsupportedError(f"{self.path}: a tree cannot hold the value at {where}.", expected=expected, got=got)


class _Level(dict[str, Any]):
    """A sub-tree that dotted names imply."""


def without_values(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf like another one, on the meta device."""
    made = torch.empty(leaf.shape, dtype=dtype, device="meta")
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, leaf.requires_grad)
    return made.requires_grad_() if leaf.requires_grad else made


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _plain(value: Any) -> Any:
    """Return plain data as JSON can hold it, where that is clear: tuples as lists, whole numbers as keys as text."""
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def damaged_entry(path: str) -> str | None:
    """Return the damage of the first damaged entry of a zip archive, by its checksums; None if all are whole."""
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
