"""One file from many ranks: each writes its parts of the leaves to their places, and the first rank commits."""

import itertools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.storage.disk.commit import Descriptor, replace_named
from tdfunc.storage.disk.ranks import Ranks, group_of, is_sharded, own_part
from tdfunc.storage.disk.raw import raw_bytes, write_all
from tdfunc.storage.safetensors.blocks import Block, check_cover, cut_blocks, table_text
from tdfunc.storage.safetensors.header import DIGITS, Layout, lay_out, render, seal
from tdfunc.storage.safetensors.like import check_ranks, found_in
from tdfunc.storage.tree.build import without_values
from tdfunc.storage.tree.encode import Outline, outline

# Calls a function with the descriptor and name of a new file of a size, and gives the file its place.
Commit = Callable[[Callable[[int, str], None], int], None]
_EMPTY = xxhash.xxh3_64_hexdigest(b"")


class RankSave:
    """A save by the ranks of a mesh or of the default group, which agree on the tree and on the parts of each rank.

    Args:
        td: This rank's tree.
        call: The call, for messages.
        fsync: Wait until the disk has it.

    Raises:
        TreeStructureError: The trees of the ranks differ; every rank raises, as for all errors here.
        LeafMismatchError: Leaves differ in shape, or the values of a leaf that is not a DTensor differ.
        UnsupportedError: A leaf cannot be stored.
        PeerError: A rank did not take part in time, or died.
    """

    def __init__(self, td: TensorCollection, call: str, *, fsync: bool) -> None:
        self.ranks: Ranks = Ranks(call, group_of(td))
        self.fsync = fsync
        self._told = False
        # For each leaf this rank's part, as far as it writes one.
        self._parts: list[tuple[int, Block, Tensor]] = []
        self._table: dict[int, list[Block]] = {}
        differ = json.loads(self._agree(lambda: self._plan(td), self._compare))
        if differ:
            check_ranks(self.ranks, found_in(self.outline.names, self.outline.specs))

    # -- the plan -------------------------------------------------------------------------------------------------

    def _plan(self, td: TensorCollection) -> bytes:
        originals: dict[int, Any] = {}
        call = self.ranks.call

        def shell(leaf: Any) -> Any:
            if not is_sharded(leaf):
                return leaf
            empty = without_values(leaf, leaf.dtype)
            originals[id(empty)] = leaf
            return empty

        self.outline: Outline = outline(td._map(LeafOp(call, shell)), call=call, values=False)
        out = self.outline
        self.layout: Layout = lay_out(out.names, out.specs)
        digests: dict[str, str] = {}
        for i, (name, leaf) in enumerate(zip(out.names, out.leaves, strict=True)):
            whole = originals.get(id(leaf), leaf)
            start, shape, is_first = (0,) * leaf.dim(), tuple(leaf.shape), self.ranks.rank == 0
            values: Tensor = whole
            if whole is not leaf:
                if any([place.is_partial() for place in whole.placements]):
                    raise UnsupportedError(
                        f"{call}: leaf {name} is a partial sum; nothing was written.",
                        expected="a DTensor that is sharded or replicated",
                        got=str(whole.placements),
                        hint="leaf.redistribute(placements=[Replicate()]) adds it up.",
                    )
                start, shape, is_first = own_part(whole)
                values = whole._local_tensor
            elif leaf.is_meta:
                raise UnsupportedError(f"{call}: leaf {name} has no values; nothing was written.", got="a meta tensor")
            else:
                digests[name] = xxhash.xxh3_64_hexdigest(raw_bytes(leaf))
            if is_first and tuple(values.shape) == shape:
                self._parts.append((i, Block(start, shape), values))
        assert out.text is not None
        parts = [[i, *part] for i, part, _ in self._parts]
        return json.dumps([xxhash.xxh3_64_hexdigest(out.text.encode()), digests, parts]).encode()

    def _compare(self, plans: list[bytes]) -> bytes:
        """Compare the plans of all ranks, and put them together (on the first rank)."""
        texts, digests, parts = zip(*map(json.loads, plans), strict=True)
        if len({*texts}) > 1:
            return json.dumps(True).encode()
        for rank, other in enumerate(digests):
            for name, digest in other.items():
                if digest != digests[0].get(name):
                    raise LeafMismatchError(
                        f"{self.ranks.call}: leaf {name} is not a DTensor: its values must be the same on all ranks.",
                        expected=f"the values of rank 0, with the digest {digests[0].get(name)}",
                        got=f"the digest {digest} on rank {rank}",
                        hint="td.broadcast(0) gives all ranks one; leave out what belongs to a rank alone.",
                    )
        found: dict[int, list[Block]] = {}
        for i, start, shape in [part for of_rank in parts for part in of_rank]:
            found.setdefault(i, []).append(Block(tuple(start), tuple(shape)))
        for i, (name, spec) in enumerate(zip(self.outline.names, self.outline.specs, strict=True)):
            blocks = found.get(i, [])
            overlap = any([a.meets(b) for k, a in enumerate(blocks) for b in blocks[:k]])
            if overlap or sum([math.prod(b.shape) for b in blocks]) != spec.size.numel():
                raise UnsupportedError(
                    f"{self.ranks.call}: the parts of leaf {name} must cover it once; nothing was written.",
                    expected=f"parts of {list(spec.size)}",
                    got=str([[*b.start, *b.shape] for b in blocks])[:300],
                    hint="all ranks of the default group save together; redistribute() the leaf over one mesh of them.",
                )
            check_cover(name, spec, blocks)
            self._table[i] = [block for part in blocks for block in cut_blocks(part, spec.dtype.itemsize)]
        return json.dumps(False).encode()

    # -- the writing ----------------------------------------------------------------------------------------------

    def write(self, commit: Commit, anchor: str) -> None:
        """Write the file; `commit` is called on the first rank.

        Args:
            commit: Makes the file and gives it its place.
            anchor: A folder that all ranks share and that contains the file, also while it is written.
        """
        ranks = self.ranks
        if ranks.rank:
            name, begin = json.loads(self._agree(lambda: b""))
            self._agree(lambda: self._write_parts(os.path.join(anchor, name), begin))
            self._agree(lambda: b"")
            return
        self._told = False
        try:
            commit(lambda fd, name: self._lead(fd, os.path.relpath(name, anchor), name), self._size_bytes())
        except BaseException as err:
            failure = err if isinstance(err, Exception) else RuntimeError(f"{type(err).__name__}: {err}")
            if not self._told:
                self._tell(failure)
            raise
        self._agree(lambda: b"")

    def _tell(self, failure: Exception) -> None:
        def fail() -> bytes:
            raise failure

        try:
            self.ranks.agree(fail)
        except Exception:
            return

    def _agree(self, make: Callable[[], bytes], decide: Callable[[list[bytes]], bytes] = lambda _: b"") -> bytes:
        try:
            return self.ranks.agree(make, decide)
        except Exception:
            self._told = True
            raise

    def _head(self, digests: dict[int, list[str]] | None = None) -> bytearray:
        """Return the header, sealed if digests of all blocks are given."""
        names, table, zeros = self.outline.names, self._table, "0" * DIGITS
        many = {i: table_text(b, digests[i] if digests else [zeros] * len(b)) for i, b in table.items() if len(b) > 1}
        text = ",".join([f"{names[i]}:{rows}" for i, rows in many.items()])
        head = render(self.outline.text, self.layout, f"{{{text}}}" if many else "")
        if digests is not None:
            # A leaf without elements has no block.
            one = {i: found[0] if found else _EMPTY for i, found in digests.items()}
            seal(head, [xxhash.xxh3_64_hexdigest(many[i].encode()) if i in many else one[i] for i in self.layout.order])
        return head

    def _size_bytes(self) -> int:
        return len(self._head()) + self.layout.size_bytes

    def _lead(self, fd: int, name: str, path: str) -> None:
        begin = len(self._head())
        self._agree(lambda: b"", lambda _: json.dumps([name, begin]).encode())
        digests: dict[int, list[str]] = {i: [] for i in self._table}

        def join(made: list[bytes]) -> bytes:
            for raw in made:
                for i, found in json.loads(raw):
                    digests[i] += found
            return b""

        self._agree(lambda: self._write_parts(path, begin), join)
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, memoryview(self._head(digests)))

    def _write_parts(self, path: str, begin: int) -> bytes:
        """Write this rank's parts; return the digests of their blocks."""
        digests: list[tuple[int, list[str]]] = []
        with Descriptor(path, os.O_WRONLY) as fd, torch.no_grad():
            for i, part, values in self._parts:
                spec, at = self.outline.specs[i], begin + self.layout.begins[i]
                found: list[str] = []
                for block in cut_blocks(part, spec.dtype.itemsize):
                    inner = Block(tuple([a - b for a, b in zip(block.start, part.start, strict=True)]), block.shape)
                    raw = memoryview(raw_bytes(values.detach()[inner.box]))
                    found.append(xxhash.xxh3_64_hexdigest(raw))
                    write_box(fd, raw, at, block, tuple(spec.size), spec.dtype.itemsize)
                digests.append((i, found))
            if self.fsync:
                os.fsync(fd)
        return json.dumps(digests).encode()


def write_box(fd: int, raw: memoryview, at: int, block: Block, size: tuple[int, ...], itemsize: int) -> None:
    """Write the bytes of a box into a leaf that begins at `at`, in contiguous runs."""
    inner = len(size)
    while inner and block.shape[inner - 1] == size[inner - 1]:
        inner -= 1
    # The last dimension that is cut is contiguous with the complete ones after it.
    lead = max(inner - 1, 0)
    strides = [itemsize * math.prod(size[k + 1 :]) for k in range(len(size))]
    base = at + sum([start * stride for start, stride in zip(block.start, strides, strict=True)])
    run = itemsize * math.prod(block.shape[lead:])
    for k, index in enumerate(itertools.product(*map(range, block.shape[:lead]))):
        offset = base + sum([i * stride for i, stride in zip(index, strides, strict=False)])
        piece = raw[k * run : (k + 1) * run]
        while len(piece):
            done = os.pwrite(fd, piece, offset)
            piece, offset = piece[done:], offset + done


def save_by_ranks(td: TensorCollection, target: str, *, fsync: bool) -> None:
    """Save a tree with DTensors: every rank of the default group calls this with its parts."""

    def commit(write: Callable[[int, str], None], size_bytes: int) -> None:
        replace_named(target, write, size_bytes=size_bytes, fsync=fsync)

    RankSave(td, f"save {target}", fsync=fsync).write(commit, os.path.dirname(os.path.abspath(target)))
