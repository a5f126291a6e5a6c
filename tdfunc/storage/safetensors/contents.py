"""An open checkpoint: one safetensors file or the shards of an index, the tree in it, and the place of each leaf."""

import fnmatch
import json
import math
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple

import torch

from tdfunc.core.context import cached_property, make_lock
from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, brief, damaged, error, explain
from tdfunc.core.keys import missing
from tdfunc.core.types import Path
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import RemoteBytes
from tdfunc.storage.safetensors.blocks import Blocks
from tdfunc.storage.safetensors.header import (
    BLOCKS_VERSION,
    VERSION,
    check_size,
    lay_out,
    parse_entries,
    split_digests,
)
from tdfunc.storage.safetensors.read import Digest, Source, naming, parsing
from tdfunc.storage.scales import Quantized, may_have_codes
from tdfunc.storage.tree.decode import Description, check_flags, check_place, check_unique, parse_tree
from tdfunc.storage.tree.foreign import Entries, Entry, describe, nests
from tdfunc.storage.tree.objects import OBJECT
from tdfunc.storage.tree.specs import Spec, malformed, parse_json, spec_of


class Places(NamedTuple):
    """The places of the leaves, in tree order."""

    # The number of the file; its bytes count from its beginning.
    homes: list[int]
    begins: list[int]
    # None for leaves without a checksum.
    digests: list[Digest | None]


class _Found(NamedTuple):
    """Leaves that were found in files: their first bytes, and their recorded digests."""

    begins: list[int]
    digests: list[str | None]


class Leaf(NamedTuple):
    """One leaf, and the place of its bytes."""

    source: Source
    begin: int
    spec: Spec
    name: str
    flags: str
    device: torch.device | None
    digest: Digest | None


class Contents:
    """The open files of a checkpoint. Several threads may read; `close` waits for them.

    Args:
        path: The file or folder, for messages.
        sources: The files.
        metadata: The strings in the header or index.
        homes: The number of the file of each leaf in a folder, by its name as JSON.
        verify: Compare checksums.
    """

    def __init__(
        self, path: str, sources: Sequence[Source], metadata: dict[str, str], homes: dict[str, int] | None, verify: bool
    ) -> None:
        self.path = path
        self.sources = sources
        self._remote = [source.data for source in sources if isinstance(source.data, RemoteBytes)]
        self.metadata = metadata
        self.homes = homes
        self.verify = verify
        self.is_ours: bool = any([key.startswith("tdfunc") for key in metadata])
        if self.is_ours:
            _check_metadata(metadata)
        self._lock = make_lock()
        self._idle = threading.Condition(self._lock)
        # The process and thread of each read that has begun. A forked process does not have the reads of its parent.
        self._readers: list[tuple[int, int]] = []
        self.closed: bool = False
        self._has_closed_files = False
        # The names of the leaves in the headers, as `plan` found them.
        self.names: list[str] = []
        # The leaves that are described, if not all are, and True if some were left out.
        self._glob: re.Pattern[str] | None = None
        self._is_part = False
        self._keys: dict[int, dict[str, int]] = {}
        self._tables: dict[int, dict[str, tuple[int, str]]] = {}
        self._digests: dict[int, dict[str, str | None]] = {}

    # -- open and closed --------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Generator[None, None, None]:
        """Keep the files open and leave all transforms of `torch.func`; our errors in the block name the checkpoint."""
        reader = os.getpid(), threading.get_ident()
        with self._lock:
            self.check_open()
            self._readers.append(reader)
        try:
            with naming(self.path), outside_transforms():
                try:
                    yield
                except CorruptCheckpointError:
                    # A checksum also differs where the file was replaced.
                    self._check_same()
                    raise
                self._check_same()
        finally:
            with self._lock:
                self._readers.remove(reader)
                self._idle.notify_all()
                self._close_if_idle()

    def _check_same(self) -> None:
        for data in self._remote:
            data.check_same()

    def close(self) -> None:
        """Close the files, once all reads have ended; a second call does nothing.

        A read of this thread, which a signal handler has interrupted, ends after this call and closes the files.
        """
        process = os.getpid()
        here = threading.get_ident()
        with self._lock:
            if self.closed:
                return
            self.closed = True
            while any([reader[0] == process and reader[1] != here for reader in self._readers]):
                self._idle.wait()
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        process = os.getpid()
        if not self.closed or self._has_closed_files or any([reader[0] == process for reader in self._readers]):
            return
        self._has_closed_files = True
        for source in self.sources:
            source.data.close()

    def check_open(self) -> None:
        """Raise if it was closed."""
        if self.closed:
            raise error(
                ValueError,
                f"load {self.path}: the checkpoint is closed.",
                hint="read inside of `with tdfunc.open(path) as f:`.",
            )

    # -- the tree ---------------------------------------------------------------------------------------------

    # Two threads may compute one of these at the same time; the results are equal.

    @cached_property
    def doc(self) -> dict[str, Any]:
        """The description of the tree: the saved one, or the one that dotted names imply."""
        with parsing(self.path):
            if self.is_ours:
                return parse_tree(self.metadata["tdfunc.tree"])
            return self._implied()

    @cached_property
    def plan(self) -> Description:
        """The complete tree, checked."""
        with parsing(self.path):
            plan = Description(self.doc)
            limit = math.inf
            if self.is_ours:
                # The headers contain the names, so together these are not longer.
                limit = sum([source.begin for source in self.sources])
            self.names = plan.name_leaves(limit)
            if self.is_ours:
                check_unique(self.metadata["tdfunc.tree"], plan)
            return plan

    @cached_property
    def quantized(self) -> Quantized:
        """The leaves of codes, and the scales beside them."""
        specs = self.plan.specs
        if not may_have_codes([spec.dtype for spec in specs], self.names):
            return Quantized({}, [], {})
        numbers = {json.loads(name): i for i, name in enumerate(self.names)}
        return Quantized.of({name: (specs[i].dtype, specs[i].size) for name, i in numbers.items()}, numbers)

    @cached_property
    def places(self) -> Places:
        """The places of all leaves; the entries of the headers have been compared with the tree."""
        with parsing(self.path):
            return self._place_all()

    def narrow(self, glob: str) -> None:
        """Describe only the leaves of another program that a glob matches, if it matches any; before the first read."""
        if not self.is_ours:
            self._glob = re.compile(fnmatch.translate(glob))

    def _implied(self) -> dict[str, Any]:
        """Return the description of the tree that the names in files of another program imply."""
        tables = [self._entries(source) for source in self.sources]
        # By its name as JSON, the table of a leaf and its number there.
        places: dict[str, tuple[Entries, int]] = {}
        # Of all files, also if a name is there twice.
        names: list[str] = []
        for table in tables:
            for i, name in enumerate(table.names):
                quoted = quote(name)
                names.append(quoted)
                places[quoted] = (table, i)
        if self.homes is None:
            names = list(places)
        else:
            # In the order of the index. The files may have further leaves.
            self._check_index(self.homes, names)
            names = list(self.homes)
        if '""' in names:
            raise UnsupportedError("a leaf has an empty name.", hint="safetensors.torch.load_file reads the file.")
        if self._glob is not None:
            wanted = [name for name in names if self._glob.match(json.loads(name)) is not None]
            # Without one, the filter reports what there is.
            self._is_part = bool(wanted)
            names = wanted or names
        entries = [table.entry(i) for table, i in map(places.__getitem__, names)]
        return describe(entries, is_nested=self._nests)

    @staticmethod
    def _check_index(homes: Mapping[str, int], names: Sequence[str]) -> None:
        """Raise unless the files of another program's index have each leaf that it names, and no leaf twice."""
        known = set(names)
        lacking = [name for name in homes if name not in known]
        if lacking:
            stray = [name for name in names if name not in homes]
            others = ""
            if stray:
                others = f", not in the index {stray[:5]}"
            got = f"{len(names)} leaves; missing {lacking[:5]}{others}"
            raise damaged("the index does not fit its files.", f"{len(homes)} leaves", got)
        if len(known) != len(names):
            twice = [name for name, count in Counter(names).items() if count > 1]
            what = "the files of the index have leaves twice, and one of them would be lost."
            raise damaged(what, "each leaf in one file", ", ".join(twice[:5]))

    def _entries(self, source: Source) -> Entries:
        found = source.header.entries
        if found is None:
            return parse_entries(source.raw, source.size_bytes)[1]
        return found

    @cached_property
    def _nests(self) -> bool:
        """Whether the dotted names of another program's leaves are paths."""
        if self.homes is not None:
            return nests([json.loads(name) for name in self.homes])
        return nests([name for source in self.sources for name in self._entries(source).names])

    def unlisted(self) -> list[str]:
        """Return the leaves of the files of another program that its index does not name."""
        if self.homes is None or self.is_ours:
            return []
        names = [quote(name) for source in self.sources for name in self._entries(source).names]
        # An index that names a leaf of no file is refused when its tree is read.
        is_whole = self.homes.keys() <= set(names)
        if is_whole:
            return [name for name in names if name not in self.homes]
        return []

    def _place_all(self) -> Places:
        count = len(self.plan.specs)
        homes = [0] * count
        if self.homes is not None:
            lacking = [name for name in self.names if name not in self.homes]
            if lacking or (len(self.homes) != count and not self._is_part):
                raise damaged(
                    "the index does not name the tree's leaves.",
                    f"{count} names",
                    f"{len(self.homes)}; missing {brief(lacking)}",
                )
            homes = [self.homes[name] for name in self.names]
        if self.homes is None:
            begins, recorded = self._place(self.sources[0], self.names, self.plan.specs)
        else:
            begins, recorded = self._place_in_shards(homes)
        digests: list[Digest | None] = [*recorded]
        if self._blocks:
            leaves = zip(recorded, self.names, self.plan.specs, strict=True)
            digests = [self._in_blocks(*leaf) for leaf in leaves]
        return Places(homes, begins, digests)

    def _place_in_shards(self, homes: Sequence[int]) -> _Found:
        found = _Found([0] * len(homes), [None] * len(homes))
        parts = group_by_home(range(len(homes)), homes, len(self.sources))
        for source, mine in zip(self.sources, parts, strict=True):
            names = [self.names[i] for i in mine]
            specs = [self.plan.specs[i] for i in mine]
            begins, digests = self._place(source, names, specs)
            for i, begin, digest in zip(mine, begins, digests, strict=True):
                found.begins[i] = begin
                found.digests[i] = digest
        return found

    @cached_property
    def _blocks(self) -> dict[str, Any]:
        """The tables of the leaves that several ranks wrote, by name."""
        if not self.is_ours or self.metadata["tdfunc.version"] != BLOCKS_VERSION:
            return {}
        table = parse_json(self.metadata["tdfunc.blocks"])
        for rows in table.values():
            for row in rows:
                if [type(part) for part in row] != [list, list, str]:
                    raise malformed("lists of a start, sizes and a digest", brief(rows))
        return table

    def _in_blocks(self, digest: str | None, name: str, spec: Spec) -> Digest | None:
        """Return the digest of a leaf; if it was written in blocks, with their digests."""
        if digest is None:
            return None
        rows = self._blocks.get(json.loads(name))
        if rows is None:
            return digest
        return Blocks(digest, rows, spec)

    def _place(self, source: Source, names: Sequence[str], specs: Sequence[Spec]) -> _Found:
        """Find leaves in one file; the header's own entries must agree with the tree."""
        if not self.is_ours:
            return self._place_foreign(source, names, specs)
        found = None
        if source.header.entries is None:
            found = self._place_ours(source, names, specs)
        if found is None:
            found = self._place_by_name(source, names, specs)
        return found

    def _place_ours(self, source: Source, names: Sequence[str], specs: Sequence[Spec]) -> _Found | None:
        """Find leaves at the places that the tree implies; None, unless verified, if the header has other entries."""
        header = source.header
        layout = lay_out(names, specs)
        if header.rest.rstrip(" ") != f"{layout.entries}}}":
            if self.verify:
                raise damaged("the header's entries do not fit its tree.", layout.entries[:200], header.rest[:200])
            return None
        check_size(source.begin + layout.size_bytes, source.size_bytes)
        digests: list[str | None] = [None] * len(names)
        if self.verify:
            recorded = split_digests(header.metadata["tdfunc.leaves"], len(names))
            for i, digest in zip(layout.order, recorded, strict=True):
                digests[i] = digest
        return _Found([source.begin + begin for begin in layout.begins], digests)

    def _place_foreign(self, source: Source, names: Sequence[str], specs: Sequence[Spec]) -> _Found:
        """Find leaves of a tree that the names in the file imply. The file may have further leaves."""
        table = self._entries(source)
        recorded = self._recorded(source)
        found = _Found([], [])
        for name, spec in zip(names, specs, strict=True):
            plain = json.loads(name)
            found.begins.append(source.begin + _same(table.find(plain), name, spec).begin)
            found.digests.append(recorded.get(plain))
        return found

    def _place_by_name(self, source: Source, names: Sequence[str], specs: Sequence[Spec]) -> _Found:
        """Find leaves of a saved tree in a file whose header, or whose index, another program wrote."""
        header = source.header
        entries = self._entries(source).all()
        known: Sequence[str | None] = [None] * len(entries)
        if header.entries is None and self.verify:
            known = split_digests(header.metadata["tdfunc.leaves"], len(entries))
        rest = {quote(entry.name): (entry, digest) for entry, digest in zip(entries, known, strict=True)}
        found = _Found([], [])
        for name, spec in zip(names, specs, strict=True):
            entry, digest = rest.pop(name, (None, None))
            found.begins.append(source.begin + _same(entry, name, spec).begin)
            found.digests.append(digest)
        if rest:
            raise damaged("the file has leaves that its tree does not have.", got=", ".join(list(rest)[:5]))
        return found

    def _recorded(self, source: Source) -> dict[str, str | None]:
        """Return the digests of a file that tdfunc wrote, by the names of its leaves; nothing for other files.

        Another program may have written the index of such files.
        """
        header = source.header
        if header.entries is not None or not self.verify:
            return {}
        if id(source) not in self._digests:
            # Two threads may do this at the same time, with the same result.
            names = self._entries(source).names
            digests = split_digests(header.metadata["tdfunc.leaves"], len(names))
            self._digests[id(source)] = dict(zip(names, digests, strict=True))
        return self._digests[id(source)]

    # -- one path ---------------------------------------------------------------------------------------------

    def leaf_at(self, path: Path) -> Leaf | None:
        """Return the leaf at a path; None for anything else there.

        Raises:
            MissingKeyError: The path does not exist.
        """
        with parsing(self.path):
            leaf = None
            if "places" not in vars(self):
                if self.is_ours:
                    leaf = self._read_alone(path)
                else:
                    leaf = self._find_foreign(path)
            if leaf is not None:
                return leaf
            _, depth, i = self.find(path)
            if i is None or i < 0 or depth < len(path):
                return None
            return self.leaf(i)

    def leaf(self, i: int) -> Leaf:
        """Return a leaf by its number."""
        plan = self.plan
        places = self.places
        source = self.sources[places.homes[i]]
        place = plan.place(i)
        digest = places.digests[i]
        return Leaf(source, places.begins[i], plan.specs[i], self.names[i], plan.flags[i], place, digest)

    def find(self, path: Path) -> tuple[int, int, int | None]:
        """Return the deepest node on a path, the number of keys to it, and the leaf at the end (-1 for a value).

        A path ends early at a lazy stack, whose keys differ from the keys of its node.

        Raises:
            MissingKeyError: The path does not exist.
        """
        plan = self.plan
        number = 0
        for depth, key in enumerate(path):
            if "own" in plan.nodes[number]:
                if plan.nodes[number]["class"] == OBJECT:
                    raise missing(path[: depth + 1], [], f"open({self.path!r})")
                return number, depth, None
            at = self._index_of(number, key)
            if at is None:
                raise missing(path[: depth + 1], plan.keys[number], f"open({self.path!r})")
            item = plan.items[number][at]
            if type(item) is dict and "tree" in item:
                number = item["tree"]
                continue
            if depth < len(path) - 1:
                # A leaf has no keys.
                raise missing(path[: depth + 2], [], f"open({self.path!r})")
            if type(item) is not dict:
                before = sum([type(other) is not dict for other in plan.items[number][:at]])
                return number, len(path), plan.starts[number] + before
            if "tie" in item:
                return number, len(path), plan.tied[item["tie"]]
            return number, len(path), -1
        return number, len(path), None

    def _index_of(self, number: int, key: str) -> int | None:
        with self._lock:
            if number not in self._keys:
                self._keys[number] = {key: i for i, key in enumerate(self.doc["nodes"][number]["keys"])}
            return self._keys[number].get(key)

    def _read_alone(self, path: Path) -> Leaf | None:
        """Return a plain leaf, after checking only the nodes on the way to it; None for anything else."""
        found = self._item_at(path)
        if found is None:
            return None
        item, device = found
        # Any: checked next.
        described: list[Any] = [item, "", None]
        if type(item) is list:
            described = [*item, None]
        place, flags, given = described[:3]
        spec = spec_of(*self.doc["specs"][place])
        check_flags(flags, spec.dtype)
        if given is None:
            given = ".".join(path)
        name = quote(given)
        home = 0
        if self.homes is not None:
            home = self.homes[name]
        source = self.sources[home]
        table = self._table(home)
        if name[1:-1] not in table:
            return None
        rank, text = table[name[1:-1]]
        alone = Entries({json.loads(name): json.loads(f'{{"dtype":"{text}]}}')})
        entry = _same(alone.entry(0), name, spec)
        recorded = None
        if self.verify:
            digests = source.header.metadata["tdfunc.leaves"]
            width = len(digests) // len(table)
            recorded = digests[rank * width : (rank + 1) * width]
        target = None
        if device is not None:
            target = torch.device(device)
        check_place(target)
        digest: Digest | None = recorded
        if self._blocks:
            digest = self._in_blocks(recorded, name, spec)
        return Leaf(source, source.begin + entry.begin, spec, name, flags, target, digest)

    # Any: JSON of a file.
    def _item_at(self, path: Path) -> tuple[Any, Any] | None:
        """Return the item of a leaf and the device of its node, unchecked; None if there is no plain leaf."""
        nodes = self.doc["nodes"]
        number = 0
        device = None
        item = None
        for depth, key in enumerate(path):
            node = nodes[number]
            if "own" in node:
                return None
            device = node.get("device", device)
            at = self._index_of(number, key)
            if at is None:
                return None
            item = node["items"][at]
            is_last = depth == len(path) - 1
            if is_last and type(item) not in (int, list):
                return None
            if not is_last:
                if type(item) is not dict or "tree" not in item:
                    return None
                number = item["tree"]
        return item, device

    def _find_foreign(self, path: Path) -> Leaf | None:
        """Return a leaf of another program's file by its name, without a tree; None for anything else."""
        name = ".".join(path)
        if self._nests and any(["." in key for key in path]):
            return None
        if not self._nests and len(path) > 1:
            return None
        home = 0
        if self.homes is not None:
            home = self.homes.get(quote(name), -1)
        if home < 0:
            return None
        source = self.sources[home]
        entry = self._entries(source).find(name)
        if entry is None:
            return None
        digest = self._recorded(source).get(name)
        return Leaf(source, source.begin + entry.begin, entry.spec, quote(name), "", None, digest)

    def _table(self, number: int) -> dict[str, tuple[int, str]]:
        """Return the place and text of each entry of a header of ours by its name (JSON without quotes).

        The entries are split without parsing, which would take longer than the other steps of opening a file.
        """
        with self._lock:
            if number not in self._tables:
                rest = self.sources[number].header.rest.rstrip(" ")[2:-3]
                # A name has no quote that is not escaped, so the first one ends it.
                parts = [text.partition('":{"dtype":"') for text in rest.split(']},"')]
                # A part without an end: some name ends like an entry. The whole tree is read then.
                complete = all([end for _, end, _ in parts])
                table = {}
                if complete:
                    table = {name: (i, fields) for i, (name, _, fields) in enumerate(parts)}
                self._tables[number] = table
            return self._tables[number]


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise unless a file of tdfunc has a version that is known, and describes a tree."""
    version = metadata.get("tdfunc.version")
    if version not in (VERSION, BLOCKS_VERSION):
        raise UnsupportedError(
            "this version of tdfunc cannot read the format of the file.",
            expected=f"{VERSION} or {BLOCKS_VERSION}",
            got=brief(version),
            hint="install the tdfunc that wrote it, or a newer one.",
        )
    if "tdfunc.tree" not in metadata:
        raise UnsupportedError(
            "the file describes no tree: it is one shard of a larger save.",
            expected="tdfunc.tree in the metadata",
            got=", ".join([*metadata][:10]),
            hint="load the folder that it is in.",
        )


def warn_unlisted(contents: Contents) -> None:
    """Warn if an index of another program leaves leaves of its files out."""
    with parsing(contents.path):
        names = contents.unlisted()
    if names:
        what = f"load {contents.path}: the index does not name {len(names)} leaves of its files; they are left out."
        got = ", ".join(names[:5])
        warnings.warn(explain(what, got=got, hint="load(path) of a file has all of its leaves."), stacklevel=3)


def group_by_home(leaves: Sequence[int], homes: Sequence[int], count: int) -> list[list[int]]:
    """Return the leaves of each of some files, in one pass over all."""
    found: list[list[int]] = [[] for _ in range(count)]
    for i in leaves:
        found[homes[i]].append(i)
    return found


def _same(entry: Entry | None, name: str, spec: Spec) -> Entry:
    if entry is None or entry.spec != spec:
        got = "nothing of this name"
        if entry is not None:
            got = f"{entry.spec.code} {list(entry.spec.shape)}"
        raise damaged(f"leaf {name} is not as the tree describes it.", f"{spec.code} {list(spec.shape)}", got)
    return entry
