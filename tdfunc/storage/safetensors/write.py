"""The values of leaves into a file: checksummed as they are written, small ones packed, large ones in pieces."""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import ConcurrencyError, UnsupportedError
from tdfunc.storage.disk.raw import raw_bytes, raw_view, write_all
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES, lay_out, render, seal
from tdfunc.storage.tree.encode import Outline

# A piece is still in the processor's cache when it is written after it was hashed.
_PIECE_BYTES = 4 << 20
# Up to this size a copy into the shared buffer costs less than a system call.
_SMALL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
# No allocator hands out addresses below this one; a storage that was freed has the address 0.
_LOW_ADDRESS = 1 << 20


Values: TypeAlias = Callable[[Tensor], Iterable[memoryview]]


class FilePlan(NamedTuple):
    """What goes where in a file."""

    # What goes before the data, still without checksums.
    head: bytearray
    # In file order: the address of a leaf whose bytes can be taken as they lie in memory (else 0), and its size.
    work: list[tuple[int, int, Tensor]]
    size_bytes: int
    # In file order, by name: the digest that a leaf must have when it is written, or None.
    expected: list[tuple[str, str | None]]
    # Where the bytes of a leaf come from if it has none: called with it when its turn has come.
    values: Values | None = None


def plan_file(outline: Outline, digests: Mapping[str, str] | None = None, values: Values | None = None) -> FilePlan:
    """Place the leaves, and check that they can be read; with digests by name, they must have these when written.

    With `values` the leaves need no memory: their bytes come from that.

    Raises:
        UnsupportedError: A leaf has no memory to read, or the header is too long; nothing was written.
    """
    layout = lay_out(outline.names, outline.specs)
    names, specs, leaves = outline.names, outline.specs, outline.leaves
    work = [
        (address_of("save", names[i], leaves[i]) if values is None else 0, specs[i].size_bytes, leaves[i])
        for i in layout.order
    ]
    head = render(outline.text, layout)
    if len(head) - 8 > MAX_HEADER_BYTES:
        raise UnsupportedError(
            "save: the header would be too long; nothing was written.",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            got=f"{len(head) - 8} bytes",
            hint="save parts of the tree in several files.",
        )
    expected = [(names[i], digests.get(names[i])) for i in layout.order] if digests else []
    return FilePlan(head, work, len(head) + layout.size_bytes, expected, values)


def address_of(call: str, name: str, leaf: Tensor) -> int:
    """Return where the bytes of a leaf lie in row-major order on the CPU; 0 where it has to be copied for that."""
    try:
        address = leaf.data_ptr()
    except RuntimeError as err:
        raise _no_memory(call, name, f"a tensor inside a transformation ({type(leaf).__name__})") from err
    if address < _LOW_ADDRESS and leaf.numel():
        raise _no_memory(call, name, f"{leaf.untyped_storage().nbytes()} bytes of storage")
    return address if _is_plain(leaf) else 0


def _no_memory(call: str, name: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{call}: leaf {name} has no memory to read; nothing was written.",
        expected="a tensor with values",
        got=got,
        hint="save outside of torch.func transformations, and before a storage is freed.",
    )


def write_file(fd: int, plan: FilePlan, tick: Callable[[int], object] | None = None) -> str:
    """Write everything: the data, then the header, which holds its checksums, in front of it.

    Args:
        fd: An empty file.
        plan: What goes where.
        tick: Called with the bytes of each leaf that is written.

    Returns:
        The digest of the header.

    Raises:
        ConcurrencyError: A leaf has not the digest that was expected of it.
    """
    digests: list[str] = []
    stage = np.empty(_PIECE_BYTES, dtype=np.uint8) if plan.expected else None
    buffer = np.empty(_BUFFER_BYTES, dtype=np.uint8)
    view, start, used = buffer.data, buffer.ctypes.data, 0
    memmove, hexdigest = ctypes.memmove, xxhash.xxh3_64_hexdigest
    os.lseek(fd, len(plan.head), os.SEEK_SET)
    with torch.no_grad():
        for address, size_bytes, leaf in plan.work:
            if tick is not None:
                tick(size_bytes)
            if size_bytes > _SMALL_BYTES or plan.values is not None:
                write_all(fd, view[:used])
                used = 0
                digests.append(_write_large(fd, (plan.values or pieces)(leaf), size_bytes, stage))
                continue
            end = used + size_bytes
            if end > _BUFFER_BYTES:
                write_all(fd, view[:used])
                used, end = 0, size_bytes
            if address:
                memmove(start + used, address, size_bytes)
            elif size_bytes:
                buffer[used:end] = raw_bytes(leaf)
            digests.append(hexdigest(view[used:end]))
            used = end
    write_all(fd, view[:used])
    _check_unchanged(plan, digests)
    # A copy: where the file has to be written twice, the plan is used twice.
    head = bytearray(plan.head)
    own = seal(head, digests)
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, memoryview(head))
    return own


def _write_large(fd: int, parts: Iterable[memoryview], size_bytes: int, stage: Any) -> str:
    state = xxhash.xxh3_64()
    for piece in parts:
        size_bytes -= len(piece)
        if stage is not None:
            # Another thread may write to the leaf now: what is hashed must be what the file gets.
            copy = stage[: len(piece)]
            copy[:] = piece
            piece = copy.data
        state.update(piece)
        write_all(fd, piece)
    assert not size_bytes
    return state.hexdigest()


def _check_unchanged(plan: FilePlan, digests: list[str]) -> None:
    changed = [
        (name, expected, found)
        for (name, expected), found in zip(plan.expected, digests, strict=False)
        if expected is not None and expected != found
    ]
    if changed:
        name, expected, found = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConcurrencyError(
            f"leaf {name}{more} changed after the save was submitted; nothing was saved.",
            expected=f"values with the digest {expected}",
            got=found,
            hint="submit with copy=True, or do not write to the tree until the save is done.",
        )


def pieces(leaf: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a leaf in row-major order, a few MB at a time; only leaves that need it are copied."""
    if _is_plain(leaf):
        data = memoryview(raw_view(leaf))
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]
    elif leaf.numel() * leaf.element_size() <= _PIECE_BYTES or leaf.dim() == 0:
        yield memoryview(raw_bytes(leaf))
    elif leaf.is_contiguous() and leaf.dim() > 1:
        yield from pieces(leaf.view(-1))
    else:
        rows = max(1, _PIECE_BYTES * leaf.shape[0] // (leaf.numel() * leaf.element_size()))
        for part in leaf.split(rows):
            yield from pieces(part.squeeze(0) if rows == 1 else part)


def _is_plain(leaf: Tensor) -> bool:
    return leaf.is_contiguous() and leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg()
