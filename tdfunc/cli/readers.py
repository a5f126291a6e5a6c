"""The values of one leaf, read in pieces from where they are stored."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.core.keys import dotted
from tdfunc.storage.disk.mapped import open_inside
from tdfunc.storage.memmap.read import LeafFile
from tdfunc.storage.safetensors.header import check_digest
from tdfunc.storage.safetensors.read import Bytes, as_view, fill


class Reader(Protocol):
    """Where the values of one leaf are."""

    @property
    def digest(self) -> str | None:
        """The recorded checksum, if there is one."""
        ...

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values in row-major order, `count` elements at a time."""
        ...


class FileLeaf(NamedTuple):
    """A leaf in a safetensors file."""

    data: Bytes
    begin: int
    dtype: torch.dtype
    elements: int
    name: str
    digest: str | None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values, and compare the checksum at their end."""
        state = xxhash.xxh3_64()
        for part, view in _filled(self.data, self.begin, self.dtype, self.elements, count):
            state.update(view)
            yield part
        if self.digest is not None:
            check_digest(f"leaf {self.name}", self.digest, state.hexdigest())


class MemmapLeaf(NamedTuple):
    """A leaf in a memmap folder: a file of its own, opened while it is read."""

    root: int
    file: LeafFile
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values."""
        file = self.file
        if file.size_bytes:
            with self._opened() as fd:
                elements = file.shape.numel()
                yield from (part for part, _ in _filled(_Descriptor(fd), 0, file.dtype, elements, count))

    def check(self) -> None:
        """Raise if the file has not the bytes that the leaf needs."""
        if self.file.size_bytes:
            with self._opened() as fd:
                found, needed = os.fstat(fd).st_size, self.file.size_bytes
                if found < needed or (self.file.exact and found > needed):
                    raise CorruptCheckpointError(
                        f"leaf {dotted(self.file.path)!r}: its file has another size.",
                        expected=f"{needed} bytes",
                        got=f"{found} bytes",
                    )

    @contextmanager
    def _opened(self) -> Generator[int, None, None]:
        what = f"leaf {dotted(self.file.path)!r}"
        try:
            opened = open_inside(self.root, self.file.name, what)
        except FileNotFoundError as err:
            raise CorruptCheckpointError(f"{what}: its file is missing.", expected=self.file.name) from err
        with opened as fd:
            yield fd


class _Descriptor:
    """The bytes of an open file that somebody else closes."""

    def __init__(self, fd: int) -> None:
        self.fd, self.size_bytes = fd, os.fstat(fd).st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read once."""
        return os.preadv(self.fd, [view], offset)

    def close(self) -> None:
        """Leave it open."""


def _filled(
    data: Bytes, begin: int, dtype: torch.dtype, elements: int, count: int
) -> Iterator[tuple[Tensor, memoryview]]:
    for at in range(0, elements, count):
        part = torch.empty(min(count, elements - at), dtype=dtype)
        view = as_view(part)
        fill(data, view, begin + at * dtype.itemsize)
        yield part, view
