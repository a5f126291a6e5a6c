"""One file from many ranks: each writes its parts of the leaves to their places, and the first rank commits."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.system import platform
from tdfunc.storage.disk.commit import Descriptor, replace_named
from tdfunc.storage.disk.ranks import Ranks, find_sharded, group_of, is_sharded, machine_of, own_part
from tdfunc.storage.disk.raw import raw_bytes, write_all
from tdfunc.storage.disk.remote import is_remote
from tdfunc.storage.safetensors.blocks import Block, cover_once, cut_blocks, table_text, write_box
from tdfunc.storage.safetensors.header import DIGITS, Layout, lay_out, render, seal
from tdfunc.storage.safetensors.like import check_ranks, found_in
from tdfunc.storage.safetensors.save import check_target
from tdfunc.storage.tree.build import without_values
from tdfunc.storage.tree.encode import Outline, outline
from tdfunc.storage.tree.objects import as_tree, map_parts

# Calls a function with the descriptor and name of a new file of a size, and gives the file its place.
Commit = Callable[[Callable[[int, str], None], int], None]
_EMPTY = xxhash.xxh3_64_hexdigest(b"")


class Checked(NamedTuple):
    """A save whose arguments one rank has checked."""

    tree: TensorCollection
    # What all ranks must have in common: the call, its target, step and options.
    terms: str


class _Part(NamedTuple):
    """A part of a leaf that a rank has, as JSON."""

    # The number of the leaf.
    leaf: int
    start: list[int]
    shape: list[int]
    # Of its values, if its mesh lacks some of the ranks: another row of ranks may have a copy of it.
    digest: str | None

    @property
    def block(self) -> Block:
        """Its place in the leaf."""
        return Block(tuple(self.start), tuple(self.shape))


class _Plan(NamedTuple):
    """What one rank knows of a save."""

    # Of the tree without its values.
    digest: str
    # Of the leaves that are not DTensors, by name.
    leaves: dict[str, str]
    # What the rank writes, if no earlier one has it.
    parts: list[_Part]


def _read_plan(raw: bytes) -> _Plan:
    digest, leaves, parts = json.loads(raw)
    return _Plan(digest, leaves, [_Part(*part) for part in parts])


class _Agreement(NamedTuple):
    """What the first rank tells the others of all plans, as JSON."""

    # The trees differ.
    is_refused: bool
    # For each rank the numbers of the leaves whose part an earlier rank writes.
    copies: list[list[int]]


class _Shells:
    """Leaves without values in the places of DTensors, so that a tree can be outlined."""

    def __init__(self, call: str) -> None:
        self._call = call
        # By the id of a shell its DTensor, and the other way round; both are kept, so that an id stays theirs.
        self._wholes: dict[int, tuple[Tensor, Any]] = {}
        self._shells: dict[int, Tensor] = {}

    # Any: a DTensor, or the leaf itself.
    def whole(self, leaf: Tensor) -> Any:
        """Return the DTensor in whose place a leaf is."""
        if id(leaf) in self._wholes:
            return self._wholes[id(leaf)][1]
        return leaf

    def of_tree(self, tree: TensorCollection) -> TensorCollection:
        """Return a tree with shells, in its plain objects as well."""
        return self._of_objects(tree._map(LeafOp(self._call, self._of_leaf)))

    # Any: a leaf or DTensor.
    def _of_leaf(self, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        if id(leaf) not in self._shells:
            empty = without_values(leaf, leaf.dtype)
            self._shells[id(leaf)] = empty
            self._wholes[id(empty)] = (empty, leaf)
        return self._shells[id(leaf)]

    # Any: a tensor or tree in a plain object.
    def _of_part(self, part: Any) -> Any:
        if isinstance(part, TensorCollection):
            return self.of_tree(part)
        return self._of_leaf(part)

    def _of_objects(self, tree: TensorCollection) -> TensorCollection:
        data = dict(tree._data)
        is_changed = False
        for key, node in tree._data.items():
            if isinstance(node, TensorCollection):
                data[key] = self._of_objects(node)
            elif isinstance(node, NonTensorData) and find_sharded(node) is not None:
                data[key] = NonTensorData(map_parts(node.data, self._of_part), node.shape)
            is_changed = is_changed or data[key] is not node
        if not is_changed:
            return tree
        return tree._make(data, tree._batch_size, tree._device, tree._names, tree._static)


class RankSave:
    """A save by the ranks of a mesh or of the default group, which agree on the tree and on the parts of each rank.

    Args:
        check: Checks the arguments of this rank's call. It runs in a round, so that its errors are raised on all ranks.
        call: The call, for messages.
        group: The group of the ranks.
        fsync: Wait until the disk has it.

    Raises:
        ValueError: The targets, steps or options of the ranks differ; every rank raises, as for all errors here.
        TreeStructureError: The trees of the ranks differ.
        LeafMismatchError: Leaves differ in shape, or the values of a leaf that is not a DTensor differ.
        UnsupportedError: A leaf cannot be stored.
        PeerError: A rank did not take part in time, or died.
    """

    # Any: a process group.
    def __init__(self, check: Callable[[], Checked], call: str, group: Any, *, fsync: bool) -> None:
        self.ranks: Ranks = Ranks(call, group)
        self.fsync = fsync
        self._told = False
        # For each leaf this rank's part, as far as it writes one.
        self._parts: list[tuple[int, Block, Tensor]] = []
        self._table: dict[int, list[Block]] = {}
        agreed = _Agreement(*json.loads(self._agree(lambda: self._prepare(check), self._compare)))
        if agreed.is_refused:
            check_ranks(self.ranks, found_in(self.outline.names, self.outline.specs), self.outline.text)
        copies = set(agreed.copies[self.ranks.rank])
        self._parts = [part for part in self._parts if part[0] not in copies]

    def _prepare(self, check: Callable[[], Checked]) -> bytes:
        checked = check()
        self.ranks.terms = checked.terms
        return json.dumps(self._plan(checked.tree)).encode()

    # -- the plan -------------------------------------------------------------------------------------------------

    def _plan(self, td: TensorCollection) -> _Plan:
        call = self.ranks.call
        shells = _Shells(call)
        self.outline: Outline = outline(shells.of_tree(td), call=call, values=False)
        out = self.outline
        self.layout: Layout = lay_out(out.names, out.specs)
        digests: dict[str, str] = {}
        parts: list[_Part] = []
        for i, (name, leaf) in enumerate(zip(out.names, out.leaves, strict=True)):
            whole = shells.whole(leaf)
            start = (0,) * leaf.dim()
            shape = tuple(leaf.shape)
            is_first = self.ranks.rank == 0
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
                parts.append(_Part(i, list(start), list(shape), self._digest_of_copy(whole, values)))
        assert out.text is not None
        return _Plan(xxhash.xxh3_64_hexdigest(out.text.encode()), digests, parts)

    # Any: a DTensor, or the leaf itself.
    def _digest_of_copy(self, whole: Any, values: Tensor) -> str | None:
        """Return the digest of a part that ranks outside of its mesh may have as well; None if there are none."""
        if not is_sharded(whole) or whole.device_mesh.size() >= self.ranks.size:
            return None
        return xxhash.xxh3_64_hexdigest(raw_bytes(values.detach()))

    def _compare(self, described: list[bytes]) -> bytes:
        """Compare the plans of all ranks, and put them together (on the first rank)."""
        plans = [_read_plan(raw) for raw in described]
        if len({plan.digest for plan in plans}) > 1:
            return json.dumps(_Agreement(True, [])).encode()
        for rank, plan in enumerate(plans):
            self._compare_leaves(plans[0].leaves, plan.leaves, rank)
        copies = self._drop_copies(plans)
        self._lay_table(plans)
        return json.dumps(_Agreement(False, copies)).encode()

    def _drop_copies(self, plans: list[_Plan]) -> list[list[int]]:
        """Take out the parts that an earlier rank has on another row of ranks, and return their leaves by rank.

        FSDP2 puts the layers that tensor parallelism leaves out on a mesh of one dimension, of which each rank of the
        other dimension has one.
        """
        first: dict[tuple[int, Block], tuple[int, str | None]] = {}
        copies: list[list[int]] = []
        for rank, plan in enumerate(plans):
            own: list[int] = []
            for part in plan.parts:
                if part.digest is None or 0 in part.shape:
                    continue
                holder, digest = first.setdefault((part.leaf, part.block), (rank, part.digest))
                if holder == rank:
                    continue
                if digest != part.digest:
                    raise self._copies_differ(part, holder, rank)
                own.append(part.leaf)
            dropped = set(own)
            plan.parts[:] = [part for part in plan.parts if part.leaf not in dropped]
            copies.append(own)
        return copies

    def _copies_differ(self, part: _Part, holder: int, rank: int) -> LeafMismatchError:
        """Return the error for a part of which two ranks have other values."""
        ranks = self.ranks
        holder = ranks.world_rank(holder)
        rank = ranks.world_rank(rank)
        return LeafMismatchError(
            f"{ranks.call}: ranks {holder} and {rank} have the same part of leaf {self.outline.names[part.leaf]} "
            "on two meshes, with other values; nothing was written.",
            expected=f"one mesh of all ranks, or the values of rank {holder} from {part.start} on",
            got=f"other values on rank {rank}",
            hint="broadcast() the part between these ranks; leave out what belongs to a mesh alone.",
        )

    def _compare_leaves(self, first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
        for name, digest in other.items():
            if digest != first.get(name):
                raise LeafMismatchError(
                    f"{self.ranks.call}: leaf {name} is not a DTensor, and its values differ between ranks.",
                    expected=f"the values of rank {self.ranks.world_rank(0)}, with the digest {first.get(name)}",
                    got=f"the digest {digest} on rank {self.ranks.world_rank(rank)}",
                    hint="td.broadcast(0) gives all ranks one; leave out what belongs to a rank alone.",
                )

    def _lay_table(self, plans: list[_Plan]) -> None:
        """List the blocks of each leaf; raise unless the parts of the ranks cover it once."""
        found: dict[int, list[Block]] = {}
        for plan in plans:
            for part in plan.parts:
                found.setdefault(part.leaf, []).append(part.block)
        for i, (name, spec) in enumerate(zip(self.outline.names, self.outline.specs, strict=True)):
            parts = found.get(i, [])
            if not cover_once(parts, tuple(spec.size)):
                boxes = [[*part.start, *part.shape] for part in parts[:10]]
                raise UnsupportedError(
                    f"{self.ranks.call}: the parts of leaf {name} leave a hole or overlap; nothing was written.",
                    expected=f"parts of {list(spec.size)}",
                    got=str(boxes)[:300],
                    hint="all ranks of the default group save together; redistribute() the leaf over one mesh of them.",
                )
            blocks: list[Block] = []
            for part in parts:
                blocks += cut_blocks(part, spec.dtype.itemsize)
            self._table[i] = blocks

    # -- the writing ----------------------------------------------------------------------------------------------

    def write(self, commit: Commit, anchor: str) -> None:
        """Write the file; `commit` is called on the first rank.

        Args:
            commit: Makes the file and gives it its place.
            anchor: A folder that all ranks share and that contains the file, also while it is written.
        """
        with self.ranks.entered():
            self._write(commit, anchor)

    def _write(self, commit: Commit, anchor: str) -> None:
        """Write the file between rounds."""
        if self.ranks.rank:
            self._follow(anchor)
            return
        self._told = False
        try:
            commit(lambda fd, name: self._lead(fd, name, anchor), self._size_bytes())
        except BaseException as err:
            if isinstance(err, Exception):
                failure = err
            else:
                failure = RuntimeError(f"{type(err).__name__}: {err}")
            if not self._told:
                self._tell(failure)
            raise
        self._agree(lambda: b"")

    def _follow(self, anchor: str) -> None:
        """Write this rank's parts into the file that the first rank makes."""
        place = _Place(*json.loads(self._agree(lambda: json.dumps(machine_of(anchor)).encode())))

        def write() -> bytes:
            try:
                return self._write_parts(os.path.join(anchor, place.name), place)
            except FileNotFoundError as err:
                raise error(
                    ValueError,
                    f"{self.ranks.call}: the ranks save to different folders.",
                    expected=f"a folder that all ranks share: {place.anchor}, as on rank {self.ranks.world_rank(0)}",
                    got=anchor,
                    hint="give one path on all ranks; a relative path begins in the current folder of each rank.",
                ) from err

        self._agree(write)
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
        names = self.outline.names
        # The tables of the leaves of several blocks, as JSON.
        tables: dict[int, str] = {}
        for i, blocks in self._table.items():
            if len(blocks) > 1:
                known = ["0" * DIGITS] * len(blocks)
                if digests is not None:
                    known = digests[i]
                tables[i] = table_text(blocks, known)
        text = ""
        if tables:
            entries = ",".join([f"{names[i]}:{rows}" for i, rows in tables.items()])
            text = f"{{{entries}}}"
        head = render(self.outline.text, self.layout, text)
        if digests is not None:
            seal(head, [_digest_of(tables.get(i), digests[i]) for i in self.layout.order])
        return head

    def _size_bytes(self) -> int:
        return len(self._head()) + self.layout.size_bytes

    def _lead(self, fd: int, path: str, anchor: str) -> None:
        begin = len(self._head())
        places: list[_Place] = []

        def decide(machines: list[bytes]) -> bytes:
            is_one_machine = len({*machines}) == 1 and json.loads(machines[0]) is not None
            places.append(_Place(os.path.relpath(path, anchor), begin, is_one_machine, anchor))
            return json.dumps(places[0]).encode()

        self._agree(lambda: json.dumps(machine_of(anchor)).encode(), decide)
        digests: dict[int, list[str]] = {i: [] for i in self._table}

        def join(made: list[bytes]) -> bytes:
            for raw in made:
                for i, found in json.loads(raw):
                    digests[i] += found
            return b""

        self._agree(lambda: self._write_parts(path, places[0]), join)
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, memoryview(self._head(digests)))

    def _write_parts(self, path: str, place: "_Place") -> bytes:
        """Write this rank's parts; return the digests of their blocks."""
        digests: list[tuple[int, list[str]]] = []
        with Descriptor(path, platform.READ_WRITE) as fd, torch.no_grad():
            for i, part, values in self._parts:
                spec = self.outline.specs[i]
                at = place.begin + self.layout.begins[i]
                size = tuple(spec.size)
                itemsize = spec.dtype.itemsize
                found: list[str] = []
                for block in cut_blocks(part, itemsize):
                    start = tuple([a - b for a, b in zip(block.start, part.start, strict=True)])
                    inner = Block(start, block.shape)
                    raw = memoryview(raw_bytes(values.detach()[inner.box]))
                    found.append(xxhash.xxh3_64_hexdigest(raw))
                    write_box(fd, raw, at, block, size, itemsize, place.is_one_machine)
                digests.append((i, found))
            if self.fsync:
                platform.sync_file(fd)
        return json.dumps(digests).encode()


def _digest_of(table: str | None, blocks: Sequence[str]) -> str:
    """Return the digest of a leaf, given the digests of its blocks, and their table if there are several."""
    if table is not None:
        return xxhash.xxh3_64_hexdigest(table.encode())
    # A leaf without elements has no block.
    return blocks[0] if blocks else _EMPTY


class _Place(NamedTuple):
    """Where the ranks write."""

    # The name of the new file below the folder that all ranks share.
    name: str
    # The length of its header.
    begin: int
    # All ranks have the file from one kernel.
    is_one_machine: bool
    # That folder, as the first rank calls it.
    anchor: str


# Any: a DTensor of the tree.
def save_by_ranks(
    td: TensorCollection | Mapping[str, Any], path: str | os.PathLike[str], leaf: Any, max_shard_size: Any, fsync: bool
) -> None:
    """Save a tree with DTensors: every rank of the default group calls this with its parts.

    Args:
        td: This rank's tree, unchecked like the other arguments.
        path: The file.
        leaf: A DTensor of the tree.
        max_shard_size: As for `save`; shards are refused.
        fsync: Wait until the disk has it.
    """
    targets: list[str] = []

    def check() -> Checked:
        target, max_bytes = check_target(path, max_shard_size)
        tree = as_tree(td, f"save {target}")
        if is_remote(target):
            raise UnsupportedError(
                f"save {target}: ranks save a tree with a DTensor to a file system that they share.",
                got="a URL",
                hint="save to a local file and upload it, or save .full_tensor() of each leaf on one rank.",
            )
        refuse_shards(f"save {target}", max_bytes)
        targets.append(target)
        return Checked(tree, f"save {os.path.basename(target)}, fsync={fsync}")

    def commit(write: Callable[[int, str], None], size_bytes: int) -> None:
        replace_named(targets[0], write, size_bytes=size_bytes, fsync=fsync)

    saving = RankSave(check, f"save {path}", group_of(leaf), fsync=fsync)
    saving.write(commit, os.path.dirname(os.path.abspath(targets[0])))


def refuse_shards(call: str, max_bytes: int | None) -> None:
    """Raise if ranks are to save a tree with DTensors in shards."""
    if max_bytes is not None:
        raise UnsupportedError(
            f"{call}: a tree with a DTensor cannot be saved in shards; nothing was written.",
            expected="no max_shard_size, or a plain tensor or Parameter in place of each DTensor",
            got=f"a DTensor, and max_shard_size={max_bytes}",
            hint="each rank writes its parts into one file; .full_tensor() is a plain tensor.",
        )
