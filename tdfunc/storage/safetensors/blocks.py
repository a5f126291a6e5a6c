"""Leaves whose bytes several ranks write: a digest of each block, and of the table of blocks."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tdfunc.storage.safetensors.header import check_digest
from tdfunc.storage.tree.specs import Spec, malformed

# A block is one row, or some rows of at most this many bytes, of the part of a leaf that one rank has.
BLOCK_BYTES = 16 << 20


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
        self._name, self._recorded = name, recorded
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

    def _add(self, box: Block, bits: "np.ndarray[Any, Any]") -> None:
        start = np.array(box.start, np.int64)
        stop = start + np.array(box.shape, np.int64)
        met = np.flatnonzero(((self._starts < stop) & (self._stops > start)).all(axis=1))
        for number in met.tolist():
            first = np.maximum(self._starts[number], start) - start
            last = np.minimum(self._stops[number], stop) - start
            part = bits[tuple([slice(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])]
            self._states[number].update(np.ascontiguousarray(part).data)

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
    first, last = -(-begin // step), end // step
    if first > last:
        # Inside of one row.
        row = begin // step
        return _inside(row, begin - row * step, end - row * step, size)
    boxes = _inside(first - 1, begin - (first - 1) * step, step, size) if begin < first * step else []
    if first < last:
        boxes.append(Block((first, *[0] * (len(size) - 1)), (last - first, *size[1:])))
    return boxes + (_inside(last, 0, end - last * step, size) if last * step < end else [])


def _inside(row: int, begin: int, end: int, size: tuple[int, ...]) -> list[Block]:
    """Return boxes in one row."""
    inner = boxes_between(begin, end, size[1:])
    return [Block((row, *box.start), (1, *box.shape)) for box in inner]


def check_cover(name: str, spec: Spec, blocks: Sequence[Block]) -> None:
    """Raise unless blocks are inside a leaf and have as many elements."""
    count = 0
    for block in blocks:
        sizes = [*block.start, *block.shape]
        is_inside = len(block.start) == len(block.shape) == len(spec.size)
        is_inside = is_inside and all([type(size) is int and size >= 0 for size in sizes])
        if not is_inside or any([s.stop > size for s, size in zip(block.box, spec.size, strict=True)]):
            raise malformed(f"blocks inside leaf {name}", f"{block}")
        count += math.prod(block.shape)
    if count != math.prod(spec.size):
        raise malformed(f"blocks of all {math.prod(spec.size)} elements of leaf {name}", f"{count} elements")
