"""Files of torch.save: read by torch's restricted reader only, and written leaf by leaf."""

import ctypes
import mmap
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Size, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import CorruptCheckpointError, MissingKeyError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Kind, Path
from tdfunc.ops.edit import restore_ties
from tdfunc.storage.disk.commit import replace_file
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.safetensors.contents import nests

_EMPTY = Size(())
_PICKLE, _ZIP = b"\x80", b"PK"
_DONTNEED = 4
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
# Where a zip file keeps the checksum of an entry: in the entry of its directory, and behind the data.
_CENTRAL, _CENTRAL_CRC, _DESCRIPTOR_CRC = b"PK\x01\x02", 16, 4
_HAS_DESCRIPTOR = 0x08
# What torch.load and zipfile raise for damage.
_UNREADABLE = (
    AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
    struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class TorchLeaf(NamedTuple):
    """A leaf in a file of torch.save."""

    tensor: Tensor
    # Whether its memory is the file, whose pages can be given back.
    is_mapped: bool
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values."""
        flat = self.tensor.detach().resolve_conj().resolve_neg()
        is_own = self.is_mapped and flat.data_ptr() == self.tensor.data_ptr() and flat.is_contiguous()
        flat = flat.contiguous().view(-1)
        for part in flat.split(count) if flat.numel() else ():
            yield part.clone()
            if is_own:
                _give_back(part)


def _give_back(part: Tensor) -> None:
    """Drop the pages of a private mapping that nobody has written to; they are read again if they are needed."""
    if _libc is None:
        return
    size = mmap.PAGESIZE
    begin = -(-part.data_ptr() // size) * size
    length = (part.data_ptr() + part.numel() * part.element_size() - begin) // size * size
    if length > 0:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED))


def is_torch_file(path: str) -> bool:
    """Whether a file is one of torch.save (a zip archive or, of old versions, a pickle) by its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(16)
    # The length of a safetensors header could begin with the same bytes; then `{` follows it.
    return start.startswith((_ZIP, _PICKLE)) and start[8:9] != b"{"


# -- reading ----------------------------------------------------------------------------------------------------


def read_torch(path: str) -> tuple[TensorCollection, dict[int, TorchLeaf]]:
    """Read a file of torch.save by the restricted reader; return the tree on the meta device, and the leaves.

    Dicts become trees, keys with dots nest where that is unambiguous, and lists and tuples in which there are tensors
    become trees with the keys 0, 1, ...; what is no tensor becomes non-tensor data, tuples as lists.

    Raises:
        UnsupportedError: There is what only code could read, or a tensor that is not dense.
        CorruptCheckpointError: It is no file of torch.save, or damaged.
    """
    loaded, is_mapped = _load(path)
    builder = _Builder(path, is_mapped)
    tree = builder.tree(loaded if isinstance(loaded, Mapping) else {"value": loaded}, ())
    ties = tuple(tuple(paths) for paths in builder.paths.values() if len(paths) > 1)
    return restore_ties(tree, ties), builder.leaves


# Any: what torch.load returns.
def _load(path: str) -> tuple[Any, bool]:
    options: Any = {"map_location": "cpu", "weights_only": True}
    try:
        if zipfile.is_zipfile(path):
            _check_members(path)
            return torch.load(path, mmap=True, **options), True
        # Files of torch before 1.6 cannot be mapped.
        return torch.load(path, **options), False
    except pickle.UnpicklingError as err:
        reason = str(err).partition("Please file an issue")[0].strip().splitlines()
        raise UnsupportedError(
            f"{path}: this holds more than tensors and plain data, which only code could read.",
            expected="what torch.load(path, weights_only=True) reads",
            got=next(
                (line for line in reversed(reason) if "GLOBAL" in line or "Unsupported" in line), reason[0]
            ).strip()[:300],
            hint="in a program that trusts the file, save its state dict anew.",
        ) from err
    except UnsupportedError:
        raise
    except _UNREADABLE as err:
        raise CorruptCheckpointError(
            f"{path}: torch.load cannot read this.",
            expected="a file of torch.save",
            got=f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"[:300],
            hint="restore the file from a copy.",
        ) from err


def _check_members(path: str) -> None:
    """Raise for an archive of another program, which is no damaged one of torch.save."""
    with zipfile.ZipFile(path) as archive:
        listed = archive.namelist()
    # All entries of torch's are in one folder.
    names = {name.partition("/")[2] for name in listed}
    if "constants.pkl" in names:
        raise UnsupportedError(
            f"{path}: this is a program of torch.jit.",
            expected="a file of torch.save",
            got="constants.pkl",
            hint="in Python: torch.jit.load(path).state_dict().",
        )
    if "data.pkl" not in names and not any(name.startswith("data/") for name in names):
        raise UnsupportedError(
            f"{path}: this is another archive.",
            expected="a file of torch.save",
            got=", ".join(map(ascii, sorted(listed)))[:300],
        )


class _Builder:
    """Trees from what was loaded; tensors of one memory, shape and dtype are one tied leaf."""

    def __init__(self, path: str, is_mapped: bool) -> None:
        self.path, self.is_mapped = path, is_mapped
        self.leaves: dict[int, TorchLeaf] = {}
        self.known: dict[Any, Tensor] = {}
        self.paths: dict[Any, list[Path]] = {}

    def tree(self, found: Mapping[Any, Any], at: Path) -> TensorCollection:
        """Make a tree of a dict."""
        keys = [self._key(key, at) for key in found]
        if len(set(keys)) < len(keys):
            raise self._refusal(at, "a number and a text that are the same key", "distinct keys")
        split = [tuple(key.split(".")) for key in keys]
        level: dict[str, Any] = {}
        for path, value in zip(split if nests(split) else [(key,) for key in keys], found.values(), strict=True):
            inner = level
            for key in path[:-1]:
                inner = inner.setdefault(key, _Level())
            inner[path[-1]] = value
        return self._build(level, at)

    def _build(self, level: dict[str, Any], at: Path) -> TensorCollection:
        return TensorCollection._open._make(
            {key: self._node(value, (*at, key)) for key, value in level.items()}, _EMPTY
        )

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
            got = "a meta tensor" if leaf.is_meta else f"a tensor of layout {leaf.layout}, dtype {leaf.dtype}"
            raise self._refusal(at, got, "a dense tensor")
        memory = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype
        # Empty tensors have no memory to share.
        mark = memory if leaf.numel() else at
        if mark not in self.known:
            made = self.known[mark] = without_values(leaf, leaf.dtype)
            self.leaves[id(made)] = TorchLeaf(leaf, self.is_mapped)
        self.paths.setdefault(mark, []).append(at)
        return self.known[mark]

    def _key(self, key: Any, at: Path) -> str:
        if type(key) is int:
            return str(key)
        if type(key) is not str or not key:
            raise self._refusal(at, f"the key {key!r}", "keys that are text or whole numbers")
        return key

    def _refusal(self, at: Path, got: str, expected: str) -> UnsupportedError:
        where = f"at {dotted(at)!r}" if at else "at the root"
        return UnsupportedError(f"{self.path}: {where} is what no tree holds.", expected=expected, got=got)


def without_values(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf like another one, on the meta device."""
    made = torch.empty(leaf.shape, dtype=dtype, device="meta")
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, leaf.requires_grad)
    return made.requires_grad_() if leaf.requires_grad else made


class _Level(dict[str, Any]):
    """A sub-tree that dotted names imply."""


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _plain(value: Any) -> Any:
    """Return plain data as JSON can hold it, where that is clear: tuples as lists, whole numbers as keys as text."""
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def damaged_entries(path: str, tick: Callable[[int], object] | None) -> Iterator[str]:
    """Yield the entries of a zip archive that cannot be read, or whose checksums do not match."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            try:
                with archive.open(entry) as file:
                    while piece := file.read(1 << 20):
                        if tick is not None:
                            tick(len(piece))
            except _UNREADABLE as err:
                # Most of zipfile's own name the entry.
                yield str(err) if entry.filename in str(err) else f"{entry.filename}: {type(err).__name__}: {err}"


# -- writing ----------------------------------------------------------------------------------------------------


def state_of(tree: TensorCollection) -> tuple[dict[str, Tensor], list[str]]:
    """Return the leaves by dotted name, and the names of what a state dict has no place for.

    Raises:
        MissingKeyError: Two paths have the same dotted name.
    """
    state: dict[str, Tensor] = {}
    hidden = {path for path, kind in _kinds(tree) if kind is Kind.NON_PERSISTENT}
    for path, leaf in iter_leaves(tree):
        name = dotted(path)
        if name in state:
            raise MissingKeyError(
                f"Two paths become the name {name!r} in a state dict.",
                hint="extract one of them, or convert to another format.",
            )
        if path not in hidden:
            state[name] = leaf
    return state, [dotted(path) for path in sorted(hidden)]


def _kinds(tree: TensorCollection) -> Iterator[tuple[Path, Kind]]:
    stack: list[tuple[Path, TensorCollection]] = [((), tree)]
    while stack:
        at, node = stack.pop()
        yield from (((*at, key), kind) for key, kind in node._kinds.items())
        stack.extend(((*at, key), inner) for key, inner in node._data.items() if isinstance(inner, TensorCollection))


def write_torch(state: Mapping[str, Tensor], values: Callable[[Tensor], Iterable[Tensor]], path: str) -> None:
    """Write a state dict as torch.save does, asking for the values of each leaf when its turn comes.

    torch writes the archive with holes where values belong; these, and their checksums, are filled in after it.
    """

    def write(fd: int) -> None:
        leaves = _write_holes(fd, state)
        with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            found = {entry.filename.partition("/")[2]: entry for entry in entries}
            crcs: dict[str, int] = {}
            for number, leaf in enumerate(leaves):
                entry = found[f"data/{number}"]
                assert entry.file_size == leaf.numel() * leaf.element_size()
                if entry.file_size:
                    crcs[entry.filename] = _fill(fd, file, entry, values(leaf))
            _enter_checksums(fd, file, archive, crcs)

    replace_file(path, write, size_bytes=0, fsync=True)


def _write_holes(fd: int, state: Mapping[str, Tensor]) -> list[Tensor]:
    """Write the archive without values; return the leaves in the order of their entries."""
    fakes: dict[int, Any] = {}
    leaves: dict[int, Tensor] = {}
    with FakeTensorMode():
        for leaf in state.values():
            if id(leaf) not in fakes:
                fakes[id(leaf)], leaves[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"), leaf
    skeleton = {name: fakes[id(leaf)] for name, leaf in state.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True), os.fdopen(os.dup(fd), "wb") as file:
        torch.save(skeleton, file)
    return list(leaves.values())


def _fill(fd: int, file: BinaryIO, entry: zipfile.ZipInfo, pieces: Iterable[Tensor]) -> int:
    """Write the bytes of an entry; return their checksum."""
    file.seek(entry.header_offset)
    name, extra = struct.unpack("<HH", file.read(30)[26:])
    begin = at = entry.header_offset + 30 + name + extra
    crc = 0
    for piece in pieces:
        data = memoryview(raw_bytes(piece))
        crc = zlib.crc32(data, crc)
        while len(data):
            done = os.pwrite(fd, data, at)
            data, at = data[done:], at + done
    assert at == begin + entry.file_size
    if entry.flag_bits & _HAS_DESCRIPTOR:
        os.pwrite(fd, struct.pack("<I", crc), at + _DESCRIPTOR_CRC)
    return crc


def _enter_checksums(fd: int, file: BinaryIO, archive: zipfile.ZipFile, crcs: Mapping[str, int]) -> None:
    """Enter the checksums into the directory of the archive."""
    at = archive.start_dir
    for entry in archive.infolist():
        file.seek(at)
        head = file.read(46)
        assert head.startswith(_CENTRAL)
        if entry.filename in crcs:
            os.pwrite(fd, struct.pack("<I", crcs[entry.filename]), at + _CENTRAL_CRC)
        at += 46 + sum(struct.unpack("<HHH", head[28:34]))
