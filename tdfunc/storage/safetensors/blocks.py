"""Leaves whose bytes several ranks write: a digest of each block, and of the table of blocks."""

import itertools
import json
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tdfunc.core.system import platform
from tdfunc.storage.safetensors.header import check_digest
from tdfunc.storage.tree.specs import Spec, malformed

# A block is one row, or some rows of at most this many bytes, of the part of a leaf that one rank has.
BLOCK_BYTES = 16 << 20
# From this length on, a system call for each run of a box costs little beside the copy.
_LONG_RUN_BYTES = 1 << 16
# The words that numpy copies at once, by their size.
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Block(NamedTuple):
    """A box in a leaf: its first element and its sizes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of its elements."""
        return tuple([slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True)])

    def meets(self, other: "Block") -> bool:
        """Return whether two boxes have an element in common."""
        sides = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return all([a < b + q and b < a + p for a, p, b, q in sides])


def cut_blocks(part: Block, itemsize: int) -> list[Block]:
    """Return the blocks of a rank's part of a leaf."""
    if 0 in part.shape:
        return []
    if not part.shape:
        return [part]
    rows = max(1, BLOCK_BYTES // (itemsize * math.prod(part.shape[1:])))
    (first, *starts), (count, *shape) = part
    return [Block((first + done, *starts), (min(rows, count - done), *shape)) for done in range(0, count, rows)]


def cover_once(parts: Sequence[Block], size: tuple[int, ...]) -> bool:
    """Return whether boxes cover each element of a leaf exactly once.

    The corners of a box, each with the sign of its number of upper sides, are the differences of the box's indicator
    along all dimensions. Only the zero function has no differences. So the corners of the boxes add up to the corners
    of the leaf exactly if each element is in one box, and no two boxes have to be compared.
    """
    if any([len(part.start) != len(size) or len(part.shape) != len(size) for part in parts]):
        return False
    filled = [part for part in parts if 0 not in part.shape]
    if 0 in size:
        return not filled
    whole = Block((0,) * len(size), size)
    cut: list[int] = []
    for dim, length in enumerate(size):
        if any([_is_cut(part, dim, length) for part in filled]):
            cut.append(dim)
    left: defaultdict[tuple[int, ...], int] = defaultdict(int)
    # Of each corner, which of its sides are upper ones, and its sign.
    kinds = [(ends, -1 if sum(ends) % 2 else 1) for ends in itertools.product((0, 1), repeat=len(cut))]
    for ends, sign in kinds:
        left[_corner(whole, cut, ends)] += sign
    for part in filled:
        for ends, sign in kinds:
            left[_corner(part, cut, ends)] -= sign
    return not any(left.values())


def _is_cut(box: Block, dim: int, length: int) -> bool:
    return box.shape[dim] != length or box.start[dim] != 0


def _corner(box: Block, dims: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Return a corner of a box in some dimensions: at its end where `ends` has a 1, else at its start."""
    start, shape = box
    return tuple([start[dim] + end * shape[dim] for dim, end in zip(dims, ends, strict=True)])


def write_box(
    fd: int,
    raw: memoryview,
    at: int,
    block: Block,
    size: tuple[int, ...],
    itemsize: int,
    is_one_machine: bool = False,
) -> None:
    """Write the bytes of a box into a leaf that begins at `at`.

    Args:
        fd: The file, open to read and write.
        raw: The bytes of the box, row by row.
        at: The place of the leaf in the file.
        block: The box.
        size: The shape of the leaf.
        itemsize: The bytes of an element.
        is_one_machine: All processes that write to the file have its pages in common. A page holds parts of several
            of them, so that two kernels would write theirs over each other's.
    """
    if not len(raw):
        return
    strides = [itemsize * math.prod(size[dim + 1 :]) for dim in range(len(size))]
    base = at + sum([start * stride for start, stride in zip(block.start, strides, strict=True)])
    inner = len(size)
    while inner and block.shape[inner - 1] == size[inner - 1]:
        inner -= 1
    # The last dimension that is cut is contiguous with the complete ones after it.
    lead = max(inner - 1, 0)
    run = itemsize * math.prod(block.shape[lead:])
    if is_one_machine and lead and run < _LONG_RUN_BYTES:
        is_copied = _copy_box(fd, raw, base, block.shape, strides, itemsize)
        if is_copied:
            return
    steps = itertools.product(*map(range, block.shape[:lead]))
    for k, index in enumerate(steps):
        offset = base + sum([i * stride for i, stride in zip(index, strides, strict=False)])
        piece = raw[k * run : (k + 1) * run]
        while len(piece):
            done = platform.write_at(fd, piece, offset)
            piece = piece[done:]
            offset += done


def _copy_box(
    fd: int, raw: memoryview, base: int, shape: tuple[int, ...], strides: Sequence[int], itemsize: int
) -> bool:
    """Copy a box into a shared map of the file; return False if the file cannot be mapped."""
    last = sum([(count - 1) * stride for count, stride in zip(shape, strides, strict=True)])
    begin = base - base % mmap.ALLOCATIONGRANULARITY
    end = base + last + itemsize
    info = os.fstat(fd)
    # Where the file has no space yet, a full disk would end the process by a signal instead of an error.
    if info.st_size < end or not platform.has_space(info):
        return False
    word = _WORDS.get(itemsize)
    if word is None:
        word = np.uint8
        shape = (*shape, itemsize)
        strides = (*strides, 1)
    try:
        mapped = mmap.mmap(fd, end - begin, offset=begin)
    except (OSError, ValueError):
        return False
    with mapped:
        target = np.ndarray(shape, word, mapped, base - begin, tuple(strides))
        target[...] = np.frombuffer(raw, word).reshape(shape)
        # A map with an array in it cannot be closed.
        del target
    return True


def table_text(blocks: Sequence[Block], digests: Sequence[str]) -> str:
    """Return the entry of a leaf in the table, as JSON."""
    rows = [[block.start, block.shape, digest] for block, digest in zip(blocks, digests, strict=True)]
    return json.dumps(rows, separators=(",", ":"))


class Blocks(NamedTuple):
    """The recorded digests of one leaf: the digest of the table, and the digests in it."""

    root: str
    # As `json` parsed it out of a file.
    rows: list[Any]
    spec: Spec

    def check(self, name: str, view: memoryview, part: Block | None = None) -> None:
        """Compare the blocks that overlap with a part of a leaf, or all blocks, with their digests.

        Raises:
            CorruptCheckpointError: A block is damaged, or the blocks do not fit the leaf.
        """
        blocks = self.read_blocks(name)
        bits = np.frombuffer(view, np.uint8).reshape(*self.spec.size, -1)
        for block, (*_, digest) in zip(blocks, self.rows, strict=True):
            if part is None or block.meets(part):
                found = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(bits[block.box]).data)
                check_digest(block_name(name, block), digest, found)

    def read_blocks(self, name: str) -> list[Block]:
        """Return the blocks of the table, checked."""
        text = json.dumps(self.rows, separators=(",", ":"))
        check_digest(f"the table of leaf {name}", self.root, xxhash.xxh3_64_hexdigest(text.encode()))
        blocks = [Block(tuple(start), tuple(shape)) for start, shape, _ in self.rows]
        check_cover(name, self.spec, blocks)
        return blocks


class BlockDigests:
    """The digests of the blocks of one leaf whose elements come in pieces, in the order of the file.

    The elements of a block also come in the order of its rows, so each block has a digest that grows with every piece.
    """

    def __init__(self, name: str, recorded: Blocks) -> None:
        self._name = name
        self._recorded = recorded
        self._blocks: list[Block] = recorded.read_blocks(name)
        self._states = [xxhash.xxh3_64() for _ in self._blocks]
        self._starts = np.array([block.start for block in self._blocks], np.int64)
        self._stops = self._starts + np.array([block.shape for block in self._blocks], np.int64)
        self._done = 0

    def update(self, view: memoryview) -> None:
        """Add the bytes of the next elements."""
        itemsize = self._recorded.spec.dtype.itemsize
        size = tuple(self._recorded.spec.size)
        bits = np.frombuffer(view, np.uint8).reshape(-1, itemsize)
        begin = self._done
        self._done += len(bits)
        for box in boxes_between(begin, self._done, size):
            count = math.prod(box.shape)
            self._add(box, bits[:count].reshape(*box.shape, itemsize))
            bits = bits[count:]

    def _add(self, added: Block, bits: "np.ndarray[Any, Any]") -> None:
        start = np.array(added.start, np.int64)
        stop = start + np.array(added.shape, np.int64)
        met = np.flatnonzero(((self._starts < stop) & (self._stops > start)).all(axis=1))
        for number in met.tolist():
            first = np.maximum(self._starts[number], start) - start
            last = np.minimum(self._stops[number], stop) - start
            box = tuple(map(slice, first.tolist(), last.tolist()))
            self._states[number].update(np.ascontiguousarray(bits[box]).data)

    def check(self) -> None:
        """Compare the digests, after the last element."""
        for block, state, (*_, digest) in zip(self._blocks, self._states, self._recorded.rows, strict=True):
            check_digest(block_name(self._name, block), digest, state.hexdigest())


def block_name(name: str, block: Block) -> str:
    """Return the name of a block for messages."""
    return f"leaf {name}, from {list(block.start)} to {[s.stop for s in block.box]}"


def boxes_between(begin: int, end: int, size: tuple[int, ...]) -> list[Block]:
    """Return the boxes that contain the elements from `begin` to `end` of a leaf, in their order."""
    if begin == end:
        return []
    if not size:
        return [Block((), ())]
    step = math.prod(size[1:])
    first = -(-begin // step)
    last = end // step
    if first > last:
        # Inside of one row.
        row = begin // step
        return _inside(row, begin - row * step, end - row * step, size)
    boxes = []
    if begin < first * step:
        boxes = _inside(first - 1, begin - (first - 1) * step, step, size)
    if first < last:
        boxes.append(Block((first, *[0] * (len(size) - 1)), (last - first, *size[1:])))
    if last * step < end:
        boxes += _inside(last, 0, end - last * step, size)
    return boxes


def _inside(row: int, begin: int, end: int, size: tuple[int, ...]) -> list[Block]:
    """Return boxes in one row."""
    inner = boxes_between(begin, end, size[1:])
    return [Block((row, *box.start), (1, *box.shape)) for box in inner]


def check_cover(name: str, spec: Spec, blocks: Sequence[Block]) -> None:
    """Raise unless blocks are inside a leaf and have as many elements."""
    count = 0
    for block in blocks:
        if not _is_inside(block, spec.size):
            raise malformed(f"blocks inside leaf {name}", f"{block}")
        count += math.prod(block.shape)
    if count != math.prod(spec.size):
        raise malformed(f"blocks of all {math.prod(spec.size)} elements of leaf {name}", f"{count} elements")


def _is_inside(block: Block, size: Sequence[int]) -> bool:
    """Return whether a block, which may come from a file, is a box in a leaf."""
    if not len(block.start) == len(block.shape) == len(size):
        return False
    if not all([type(number) is int and number >= 0 for number in (*block.start, *block.shape)]):
        return False
    return all([side.stop <= length for side, length in zip(block.box, size, strict=True)])
