"""The values of leaves in a file: mapped copy-on-write or read one by one, and compared with the recorded checksums."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import mod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import CorruptCheckpointError, MissingKeyError, TreeStructureError, UnsupportedError, damaged
from tdfunc.storage.disk.formats import TAIL_BYTES, find_format, refusal
from tdfunc.storage.disk.raw import is_wrapped, raw_view
from tdfunc.storage.disk.remote import Bytes
from tdfunc.storage.safetensors.blocks import Block, Blocks
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES, Header, check_digest, check_size, parse
from tdfunc.storage.tree.decode import MALFORMED
from tdfunc.storage.tree.specs import Spec

_GUESS_BYTES = 1 << 16
# The digest of all bytes of a leaf, or the digests of its blocks.
Digest: TypeAlias = str | Blocks


class Source(NamedTuple):
    """An open file whose header was read."""

    path: str
    data: Bytes
    # Length and header.
    begin: int
    header: Header
    raw: bytes

    @property
    def size_bytes(self) -> int:
        """The length of the file."""
        return self.data.size_bytes


def open_source(path: str, *, verify: bool, data: Bytes) -> Source:
    """Read the header of a safetensors file; errors name the file. The caller closes `data`."""
    try:
        with naming(path):
            size_bytes = data.size_bytes
            if size_bytes < 8:
                raise damaged("the file is cut short.", "8 bytes or more", f"{size_bytes} bytes")
            # Most headers come with the first read; the bytes after one are cheaper than a second read.
            raw = read_bytes(data, 0, min(size_bytes, _GUESS_BYTES))
            length = int.from_bytes(raw[:8], "little")
            limit = min(size_bytes - 8, MAX_HEADER_BYTES)
            if length > limit:
                raise _no_header(path, data, raw)
            raw = raw[: 8 + length]
            if len(raw) < 8 + length:
                raw += read_bytes(data, len(raw), 8 + length - len(raw))
        with parsing(path):
            return Source(path, data, len(raw), parse(raw, data.size_bytes, verify=verify), raw)
    except BaseException:
        data.close()
        raise


def _no_header(path: str, data: Bytes, raw: bytes) -> CorruptCheckpointError | UnsupportedError:
    """Return the error for a file that does not begin with the length of its header: it is another one, or cut."""
    length = int.from_bytes(raw[:8], "little")
    limit = min(data.size_bytes - 8, MAX_HEADER_BYTES)
    expected = f"the length of a header, at most {limit}, in 8 bytes"
    hint = "give the path of a .safetensors file; if this was one, restore it from a copy."
    # A header begins with `{`; the first bytes of an archive or a pickle can also be a small number.
    is_other = raw.startswith((b"PK", b"\x80")) and raw[8:9] != b"{"
    if length <= MAX_HEADER_BYTES and not is_other:
        return damaged("the file is cut short.", expected, f"the length {length}", hint=hint)
    begin = max(0, data.size_bytes - TAIL_BYTES)
    found = find_format(raw, read_bytes(data, begin, data.size_bytes - begin))
    if found is not None:
        return refusal(path, found, raw)
    return damaged("this is not a safetensors file.", expected, f"the bytes {raw[:8]!r}", hint=hint)


_OURS = (CorruptCheckpointError, TreeStructureError, UnsupportedError)


# A class: as a generator it would take a tenth of the time of reading a small leaf.
class naming:
    """A `with` block that adds the name of the file to our errors, and replaces `malformed` errors by ours."""

    __slots__ = ("_malformed", "_path")

    def __init__(self, path: str, malformed: tuple[type[Exception], ...] = ()) -> None:
        self._path = path
        self._malformed = malformed

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, err: BaseException | None, __: object) -> None:
        if isinstance(err, _OURS):
            if not str(err).startswith("load "):
                raise type(err)(f"load {self._path}: {err}") from err
        elif isinstance(err, self._malformed) and not isinstance(err, MissingKeyError):
            raise damaged(
                f"load {self._path}: the header is malformed.",
                "the header of a safetensors file",
                f"{type(err).__name__}: {err}"[:400],
            ) from err


# In code that parses headers, errors of Python are damage.
parsing: partial[naming] = partial(naming, malformed=MALFORMED)


def read_bytes(data: Bytes, offset: int, count: int) -> bytes:
    """Return `count` bytes from `offset` on."""
    buffer = bytearray(count)
    fill(data, memoryview(buffer), offset)
    return bytes(buffer)


def fill(data: Bytes, view: memoryview, offset: int) -> None:
    """Fill all of `view`."""
    done = 0
    while done < len(view):
        count = data.read_into(view[done:], offset + done)
        if not count:
            raise damaged(
                "the file was cut short while it was read.", f"{offset + len(view)} bytes", f"{offset + done} bytes"
            )
        done += count


def check_bytes(name: str, view: memoryview, recorded: Digest, part: Block | None = None) -> None:
    """Compare the checksum of a leaf with the recorded one; in a leaf of blocks, of those that overlap with a part."""
    if isinstance(recorded, Blocks):
        recorded.check(name, view, part)
        return
    found = xxhash.xxh3_64_hexdigest(view)
    if found != recorded:
        check_digest(f"leaf {name}", recorded, found)


def read_leaf(source: Source, spec: Spec, begin: int, name: str, digest: Digest | None) -> Tensor:
    """Read one leaf into new memory, and compare its checksum if there is one."""
    # Before memory is taken: a header may be wrong.
    if begin + spec.size_bytes > source.size_bytes:
        check_size(begin + spec.size_bytes, source.size_bytes)
    leaf = torch.empty(spec.size, dtype=spec.dtype, device="cpu")
    view = as_view(leaf)
    fill(source.data, view, begin)
    if digest is not None:
        check_bytes(name, view, digest)
    return leaf


def read_rows(source: Source, spec: Spec, begin: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Read runs of rows (first, count) of a leaf, one after the other."""
    row_bytes = math.prod(spec.size[1:]) * spec.dtype.itemsize
    rows = torch.empty((sum(count for _, count in runs), *spec.size[1:]), dtype=spec.dtype, device="cpu")
    view = as_view(rows)
    done = 0
    for first, count in runs:
        fill(source.data, view[done : done + count * row_bytes], begin + first * row_bytes)
        done += count * row_bytes
    return rows


def as_view(leaf: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, to be written to."""
    return raw_view(leaf).data


def view_leaves(data: Any, specs: Sequence[Spec], begins: Sequence[int]) -> list[Tensor]:
    """Return leaves as tensors on the mapped bytes. Each has its own storage and version."""
    dtypes = [spec.numpy for spec in specs]
    sizes = [spec.dtype.itemsize for spec in specs]
    if None not in dtypes and not any(map(mod, begins, sizes)):
        # All files of ours. Without a line of Python for each leaf it takes two thirds of the time.
        shapes = [spec.shape for spec in specs]
        arrays = map(np.ndarray, shapes, dtypes, repeat(data), begins)
        return list(map(torch.from_numpy, arrays))
    return [_view_leaf(data, spec, begin) for spec, begin in zip(specs, begins, strict=True)]


def _view_leaf(data: Any, spec: Spec, begin: int) -> Tensor:
    if spec.numpy is None or begin % spec.numpy.itemsize:
        return _view_bytes(data[begin : begin + spec.size_bytes], spec)
    return torch.from_numpy(np.ndarray(spec.shape, spec.numpy, data, begin))


def _view_bytes(data: Any, spec: Spec) -> Tensor:
    if not spec.size_bytes:
        return torch.empty(spec.size, dtype=spec.dtype, device="cpu")
    flat = torch.from_numpy(data)
    if flat.data_ptr() % spec.dtype.itemsize:
        # Another program's file need not be aligned.
        flat = flat.clone()
    # .data: the result is not a view of the bytes, whose version and dtype would otherwise stay with it.
    return flat.view(spec.dtype).view(spec.size).data


# Runs of rows (first, count), and the index of the result in them.
Rows: TypeAlias = tuple[list[tuple[int, int]], Any]


# Any: an index of torch.
def plan_rows(index: Any, size: torch.Size) -> Rows | None:
    """Return runs of rows (first, count), and the index of the result in them; None for all rows."""
    first = index
    rest: list[Any] = []
    if isinstance(index, tuple):
        if not index:
            return None
        first, *rest = index
    if not size or first is None or first is Ellipsis or isinstance(first, (bool, np.bool_)):
        return None
    if isinstance(first, slice):
        return _plan_slice(first, rest, size[0])
    picked = _as_numbers(first, size[0])
    if picked is None:
        return None
    return _plan_picked(first, rest, picked, size[0])


def _plan_slice(first: slice, rest: Sequence[Any], length: int) -> Rows:
    rows = range(*first.indices(length))
    if rows.step < 0:
        raise ValueError("step must be greater than zero")
    if rows.step == 1:
        runs = [(rows.start, len(rows))]
    else:
        runs = [(row, 1) for row in rows]
    return runs, (slice(None), *rest)


# Any: the first part of an index.
def _as_numbers(first: Any, length: int) -> Tensor | None:
    """Return the numbers of the rows that an index picks, negative ones included; None for all rows."""
    try:
        picked = torch.as_tensor(first, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        # torch reports the mistake, of the whole leaf.
        return None
    # Inside of vmap an index has no values here; torch takes the rows out of the whole leaf.
    if is_wrapped(picked):
        return None
    if picked.dtype is torch.bool:
        if picked.shape != (length,):
            return None
        picked = picked.nonzero()[:, 0]
    # torch takes uint8 for a mask, and refuses floats.
    if picked.dtype is torch.uint8 or picked.is_floating_point() or picked.is_complex():
        return None
    return picked.to(torch.int64)


def _plan_picked(first: Any, rest: Sequence[Any], picked: Tensor, length: int) -> Rows:
    wrong = picked[(picked < -length) | (picked >= length)]
    if wrong.numel():
        raise IndexError(f"index {int(wrong[0])} is out of bounds for dimension 0 with size {length}")
    rows, where = torch.unique(picked % max(length, 1), return_inverse=True)
    runs: list[tuple[int, int]] = []
    for row in rows.tolist():
        if runs and sum(runs[-1]) == row:
            begin, count = runs[-1]
            runs[-1] = (begin, count + 1)
        else:
            runs.append((row, 1))
    # A number takes the dimension away, as in torch.
    if isinstance(first, (int, np.integer)):
        return runs, (int(where), *rest)
    return runs, (where, *rest)
