"""The values of leaves out of a file: one copy-on-write mapping, checked against the recorded checksums."""

import os
import stat
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc._errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, explain
from tdfunc.storage.format import (
    MAX_HEADER_BYTES,
    Header,
    Spec,
    check_algorithm,
    check_digest,
    parse,
    split_digests,
)


class Source(NamedTuple):
    """An open file whose header was read."""

    fd: int
    size_bytes: int
    # Length and header.
    begin: int
    header: Header
    raw: bytes


@contextmanager
def opened(path: str, *, verify: bool) -> Generator[Source, None, None]:
    """Open a safetensors file and read its header; every error inside names the file."""
    # Without O_NONBLOCK opening a pipe waits for a writer.
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(fd)
        if stat.S_ISDIR(mode.st_mode):
            raise IsADirectoryError(explain(f"load {path}: this is a folder.", expected="one safetensors file"))
        with _naming(path):
            if not stat.S_ISREG(mode.st_mode):
                raise CorruptCheckpointError(explain("this is no regular file.", expected="a safetensors file"))
            raw = _read_header(fd, mode.st_size)
            yield Source(fd, mode.st_size, len(raw), parse(raw, mode.st_size, verify=verify), raw)
    finally:
        os.close(fd)


@contextmanager
def _naming(path: str) -> Generator[None, None, None]:
    try:
        yield
    except (CorruptCheckpointError, TreeStructureError, UnsupportedError) as err:
        raise type(err)(f"load {path}: {err}") from err
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as err:
        # Only damaged or hostile headers come here: what they say is used as the types that it should have.
        raise CorruptCheckpointError(
            explain(
                f"load {path}: the header is malformed.",
                expected="the header of a safetensors file",
                got=f"{type(err).__name__}: {err}"[:400],
                hint="restore the file from a copy.",
            )
        ) from err


def _read_header(fd: int, size_bytes: int) -> bytes:
    start = os.pread(fd, 8, 0)
    if len(start) < 8:
        raise CorruptCheckpointError(
            explain(
                "the file is cut short.",
                expected="8 bytes or more",
                got=f"{size_bytes} bytes",
                hint="restore it from a copy.",
            )
        )
    length = int.from_bytes(start, "little")
    if length > min(size_bytes - 8, MAX_HEADER_BYTES):
        raise CorruptCheckpointError(
            explain(
                "this is no safetensors file.",
                expected=f"a header of at most {min(size_bytes - 8, MAX_HEADER_BYTES)} bytes",
                got=f"{length} bytes",
                hint=_other_format(start),
            )
        )
    parts, have = [start], 8
    while have < 8 + length:
        part = os.pread(fd, 8 + length - have, have)
        if not part:
            raise CorruptCheckpointError(
                explain(
                    "the file was cut short while it was read.", expected=f"{8 + length} bytes", got=f"{have} bytes"
                )
            )
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def _other_format(start: bytes) -> str:
    if start.startswith(b"PK"):
        return "a file of torch.save is read by torch.load(path, weights_only=True)."
    if start.startswith(b"\x80"):
        return "this looks like a pickle, which tdfunc never reads."
    return "restore the file from a copy."


def map_bytes(source: Source, path: str) -> Any:
    """Map a whole file copy-on-write: writing to it is allowed and changes neither the file nor other mappings."""
    # By descriptor where the system can, since another save may have replaced the path by now.
    name = {"linux": f"/proc/self/fd/{source.fd}", "darwin": f"/dev/fd/{source.fd}"}.get(sys.platform, path)
    if not os.path.exists(name):
        name = path
    try:
        mapped = torch.from_file(name, shared=False, size=source.size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as err:
        raise OSError(f"load {path}: the file cannot be mapped: {err}") from err
    # Through numpy: the tensor's own storage claims to be in shared memory and cannot be sent to a process.
    return mapped.numpy()


def verify_leaves(data: Any, source: Source, names: Sequence[str], specs: Sequence[Spec], order: Sequence[int]) -> None:
    """Compare the checksum of each leaf with the recorded one."""
    check_algorithm(source.header.algorithm)
    recorded = split_digests(source.header.metadata["tdfunc.leaves"], len(names))
    view, begin = memoryview(data), source.begin
    for i, expected in zip(order, recorded, strict=True):
        end = begin + specs[i].size_bytes
        found = xxhash.xxh3_64_hexdigest(view[begin:end])
        if found != expected:
            check_digest(f"leaf {names[i]}", expected, found)
        begin = end


def view_leaves(data: Any, specs: Sequence[Spec], begins: Sequence[int]) -> list[Tensor]:
    """Return leaves as tensors on the mapped bytes, each with a storage and a version of its own."""
    from_numpy, ndarray = torch.from_numpy, np.ndarray
    return [
        from_numpy(ndarray(spec.shape, spec.numpy, data, begin))
        if spec.numpy is not None and not begin % spec.numpy.itemsize
        else _view_bytes(data[begin : begin + spec.size_bytes], spec)
        for spec, begin in zip(specs, begins, strict=True)
    ]


def _view_bytes(data: Any, spec: Spec) -> Tensor:
    if not spec.size_bytes:
        return torch.empty(spec.size, dtype=spec.dtype, device="cpu")
    flat = torch.from_numpy(data)
    if flat.data_ptr() % spec.dtype.itemsize:
        # Another program's file need not be aligned.
        flat = flat.clone()
    # .data: the result is no view of the bytes, whose version and dtype would otherwise stay with it.
    return flat.view(spec.dtype).view(spec.size).data
