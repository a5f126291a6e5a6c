"""An open checkpoint: one safetensors file or the shards of an index, the tree in it, and where each leaf lies."""

import json
import math
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, error
from tdfunc.core.keys import missing
from tdfunc.core.types import Path
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.safetensors.header import (
    Entry,
    as_entry,
    check_algorithm,
    check_size,
    check_version,
    lay_out,
    parse_entries,
    split_digests,
)
from tdfunc.storage.safetensors.read import Source, naming, parsing
from tdfunc.storage.tree.decode import Description, check_flags, check_unique, malformed, parse_tree
from tdfunc.storage.tree.specs import Spec, spec_of

_MAX_FOREIGN_DEPTH = 64
# Looking a key up in a list of so many costs as much as making a dict of them.
_MANY_KEYS = 32


class Places(NamedTuple):
    """Where the leaves lie, in tree order."""

    # The number of the file; its bytes count from its beginning.
    homes: list[int]
    begins: list[int]
    # None for what has no checksum.
    digests: list[str | None]


class Found(NamedTuple):
    """What a path leads to: the item of a node, and for a tensor where it is."""

    item: Any
    device: str | None
    name: str
    # How many keys of the path were followed.
    depth: int


class Contents:
    """The open files of a checkpoint. Several threads may read; whoever closes waits for them.

    Args:
        path: The file or folder, for messages.
        sources: The files.
        metadata: The strings that the file (or the index) says of itself.
        homes: For a folder: the number of the file of each leaf, by its name as JSON.
        verify: Whether what is read has to be what was saved.
    """

    def __init__(
        self, path: str, sources: Sequence[Source], metadata: dict[str, str], homes: dict[str, int] | None, verify: bool
    ) -> None:
        self.path, self.sources, self.metadata, self.homes, self.verify = path, sources, metadata, homes, verify
        self.is_ours = any(key.startswith("tdfunc") for key in metadata)
        if self.is_ours:
            check_version(metadata)
            if "tdfunc.tree" not in metadata:
                raise UnsupportedError(
                    "the file describes no tree: it is one shard of a larger save.",
                    expected="tdfunc.tree in the metadata",
                    got=", ".join(metadata),
                    hint="load the folder that it is in.",
                )
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._readers, self._closed = 0, False
        self._doc: Any = None
        self._names: list[str] = []
        self._plan: Description | None = None
        self._places: Places | None = None
        self._parents: dict[int, tuple[int, str]] | None = None
        self._wide: dict[int, dict[str, int]] = {}
        self._tables: dict[int, dict[str, tuple[int, str]] | None] = {}
        self._parsed: dict[int, dict[str, Entry]] = {}

    # -- open and closed --------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Generator[None, None, None]:
        """Keep the files open, and leave all transforms of `torch.func`; our errors inside name the checkpoint."""
        with self._lock:
            self.check_open()
            self._readers += 1
        try:
            with naming(self.path), outside_transforms():
                yield
        finally:
            with self._lock:
                self._readers -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Close the files, once nobody reads; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._readers:
                self._idle.wait()
            for source in self.sources:
                source.data.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise if it was closed."""
        if self._closed:
            raise error(
                ValueError,
                f"load {self.path}: the checkpoint is closed.",
                hint="read inside of `with tdfunc.open(path) as f:`.",
            )

    # -- the tree ---------------------------------------------------------------------------------------------

    @property
    def doc(self) -> dict[str, Any]:
        """The description of the tree: what was saved with it, or what dotted names imply."""
        with self._lock, parsing(self.path):
            if self._doc is None:
                self._doc = parse_tree(self.metadata["tdfunc.tree"]) if self.is_ours else self._implied()
            return self._doc

    @property
    def plan(self) -> Description:
        """The whole tree, checked."""
        if self._plan is not None:
            return self._plan
        with self._lock, parsing(self.path):
            if self._plan is None:
                # The names are in the headers too, so together they are no longer than these.
                limit = sum(source.begin for source in self.sources) if self.is_ours else math.inf
                plan = Description(self.doc)
                self._names = plan.name_leaves(limit)
                if self.is_ours:
                    check_unique(self.metadata["tdfunc.tree"], plan)
                self._plan = plan
            return self._plan

    @property
    def names(self) -> list[str]:
        """The names of the leaves, as they stand in the headers."""
        assert self.plan
        return self._names

    @property
    def places(self) -> Places:
        """Where all leaves lie; the entries of the headers have been compared with the tree."""
        if self._places is not None:
            return self._places
        with self._lock, parsing(self.path):
            if self._places is None:
                self._places = self._place_all()
            return self._places

    def _implied(self) -> dict[str, Any]:
        entries = [entry for source in self.sources for entry in self._entries(source)]
        if self.homes is not None:
            entries = self._indexed(entries)
        names = [entry.name for entry in entries]
        if "" in names:
            raise UnsupportedError(
                "a leaf has an empty name, which is no key.", hint="safetensors.torch.load_file reads it."
            )
        paths = [tuple(name.split(".")) for name in names]
        return describe(paths if nests(paths) else [(name,) for name in names], entries)

    def _indexed(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries in the order of the index, which has to name all of them."""
        assert self.homes is not None
        found = {quote(entry.name): entry for entry in entries}
        if len(found) != len(entries) or found.keys() != self.homes.keys():
            lacking = [name for name in self.homes if name not in found]
            stray = [name for name in found if name not in self.homes] or ["a name in two files"]
            raise CorruptCheckpointError(
                "the index does not fit its files.",
                expected=f"{len(self.homes)} leaves",
                got=f"{len(entries)} leaves; missing {lacking[:5]}, not in the index {stray[:5]}",
            )
        return [found[name] for name in self.homes]

    def _entries(self, source: Source) -> list[Entry]:
        if source.header.entries is not None:
            return source.header.entries
        return parse_entries(source.raw, source.size_bytes)[1]

    def _place_all(self) -> Places:
        count = len(self.names)
        homes = [0] * count if self.homes is None else self._homes_of(self.names)
        begins: list[int] = [0] * count
        digests: list[str | None] = [None] * count
        for number, source in enumerate(self.sources):
            mine = range(count) if self.homes is None else [i for i in range(count) if homes[i] == number]
            self._place(source, mine, begins, digests)
        return Places(homes, begins, digests)

    def _homes_of(self, names: Sequence[str]) -> list[int]:
        assert self.homes is not None
        if len(self.homes) != len(names) or any(name not in self.homes for name in names):
            lacking = [name for name in names if name not in self.homes]
            raise CorruptCheckpointError(
                "the index does not name the tree's leaves.",
                expected=f"{len(names)} names",
                got=f"{len(self.homes)}; missing: {lacking[:5]}",
            )
        return [self.homes[name] for name in names]

    def _place(self, source: Source, mine: Sequence[int], begins: list[int], digests: list[str | None]) -> None:
        """Find the leaves of one file; the header's own entries must agree with the tree."""
        plan, header = self.plan, source.header
        names, specs = self.names, plan.specs
        if self.homes is not None:
            names, specs = [names[i] for i in mine], [specs[i] for i in mine]
        if header.entries is None and self.is_ours:
            layout = lay_out(names, specs)
            if header.rest.rstrip(" ") == f"{layout.entries}}}":
                check_size(source.begin + layout.size_bytes, source.size_bytes)
                for i, begin in zip(mine, layout.begins, strict=True):
                    begins[i] = source.begin + begin
                if self.verify:
                    check_algorithm(header.algorithm)
                    recorded = split_digests(header.metadata["tdfunc.leaves"], len(names))
                    for k, digest in zip(layout.order, recorded, strict=True):
                        digests[mine[k]] = digest
                return
            if self.verify:
                raise CorruptCheckpointError(
                    "the header's entries are not those of its tree.",
                    expected=layout.entries[:200],
                    got=header.rest[:200],
                )
        # Another program wrote the header, or the index; the names still say which leaf is which.
        entries = self._entries(source)
        known: Sequence[str | None] = [None] * len(entries)
        if header.entries is None and self.verify:
            check_algorithm(header.algorithm)
            known = split_digests(header.metadata["tdfunc.leaves"], len(entries))
        found = {entry.name: (entry, digest) for entry, digest in zip(entries, known, strict=True)}
        for i, name, spec in zip(mine, names, specs, strict=True):
            entry, digests[i] = found.pop(json.loads(name), (None, None))
            begins[i] = source.begin + _same(entry, name, spec).begin
        if found:
            raise CorruptCheckpointError(
                "the file has leaves that its tree does not have.", got=", ".join(map(repr, list(found)[:5]))
            )

    # -- one path ---------------------------------------------------------------------------------------------

    def find(self, path: Path) -> Found:
        """Return what is at a path, reading no more of the tree than lies on the way.

        A path ends early where it meets a lazy stack, whose keys are not those of its node.

        Raises:
            MissingKeyError: There is nothing.
        """
        with parsing(self.path):
            return self._find(path)

    def _find(self, path: Path) -> Found:
        nodes, number = self.doc["nodes"], 0
        device = nodes[0].get("device")
        item: Any = {"tree": 0}
        for depth, key in enumerate(path):
            if number >= 0 and "own" in nodes[number]:
                return Found(item, device, "", depth)
            at = self._index_of(number, key) if number >= 0 else None
            if at is None:
                known = nodes[number]["keys"] if number >= 0 else []
                raise missing(path[: depth + 1], known, f"open({self.path!r})")
            item = nodes[number]["items"][at]
            number = self._child(item, number)
            if number >= 0:
                device = nodes[number].get("device", device)
            elif type(item) is dict and "tie" in item:
                if depth < len(path) - 1:
                    continue
                return self._find_tied(item, device)
            elif depth == len(path) - 1:
                # A value has no name in the file.
                return Found(item, device, "" if type(item) is dict else self._name(item, path[:-1], key), len(path))
        return Found(item, device, "", len(path))

    def _index_of(self, number: int, key: str) -> int | None:
        keys = self.doc["nodes"][number]["keys"]
        if len(keys) < _MANY_KEYS:
            return keys.index(key) if key in keys else None
        with self._lock:
            if number not in self._wide:
                self._wide[number] = {key: i for i, key in enumerate(keys)}
            return self._wide[number].get(key)

    def _child(self, item: Any, number: int) -> int:
        """Return the number of a sub-tree, which lies after its parent; -1 for anything else."""
        if type(item) is not dict or "tree" not in item:
            return -1
        child = item["tree"]
        if type(child) is not int or child <= number:
            raise malformed("each node once, after the node that it is in", repr(child))
        return child

    def _find_tied(self, item: dict[str, Any], device: str | None) -> Found:
        number, key = self.doc["ties"][item["tie"]][0]
        if self._parents is None:
            # A child lies after its parent, so the way up ends.
            self._parents = {
                child: (i, key)
                for i, node in enumerate(self.doc["nodes"])
                for key, found in zip(node["keys"], node["items"], strict=True)
                if (child := self._child(found, i)) >= 0
            }
        path: list[str] = []
        above = number
        while above:
            above, part = self._parents[above]
            path.append(part)
        at = self._index_of(number, key)
        if at is None:
            raise malformed(f"a leaf {key!r} for the ties", "none")
        first = self.doc["nodes"][number]["items"][at]
        name = self._name(first, tuple(reversed(path)), key)
        # The alias says which kind it is, the first path all else.
        return Found(first, device, name, -1)

    def _name(self, item: Any, parents: Path, key: str) -> str:
        if type(item) is list:
            check_flags(item[1], spec_of(*self.doc["specs"][item[0]]).dtype)
        if type(item) is list and len(item) > 2 and item[2] is not None:
            return quote(item[2])
        return f'"{"".join([f"{quote(part)[1:-1]}." for part in parents])}{quote(key)[1:-1]}"'

    def locate(self, name: str, spec: tuple[str, Sequence[int]]) -> tuple[Source, Entry, str | None]:
        """Return the file, entry and checksum of one leaf, given its name as JSON and what the tree says of it."""
        with parsing(self.path):
            return self._locate(name, spec)

    def _locate(self, name: str, spec: tuple[str, Sequence[int]]) -> tuple[Source, Entry, str | None]:
        number = 0 if self.homes is None else self.homes.get(name, -1)
        if number < 0:
            raise CorruptCheckpointError("the index lacks a leaf of its tree.", expected=name)
        source = self.sources[number]
        table = self._table(number)
        digest = None
        if table is None:
            entry = self._by_name(number).get(json.loads(name))
        elif (found := table.get(name[1:-1])) is not None:
            place, text = found
            entry = as_entry(json.loads(name), json.loads(f'{{"dtype":"{text}]}}'))
            if self.verify:
                check_algorithm(source.header.algorithm)
                width = len(source.header.metadata["tdfunc.leaves"]) // len(table)
                digest = source.header.metadata["tdfunc.leaves"][place * width : (place + 1) * width]
        else:
            entry = None
        if entry is None or (entry.spec.code, list(entry.spec.shape)) != (spec[0], list(spec[1])):
            raise CorruptCheckpointError(
                f"leaf {name} is not what the tree says.",
                expected=f"{spec[0]} {list(spec[1])}",
                got=f"{entry.spec.code} {list(entry.spec.shape)}" if entry is not None else "nothing of this name",
            )
        return source, entry, digest

    def _by_name(self, number: int) -> dict[str, Entry]:
        """Return the entries of a header that cannot be cut apart, which are looked up one by one."""
        with self._lock:
            if number not in self._parsed:
                self._parsed[number] = {entry.name: entry for entry in self._entries(self.sources[number])}
            return self._parsed[number]

    def _table(self, number: int) -> dict[str, tuple[int, str]] | None:
        """Return place and text of each entry by its name (JSON without quotes); None for a header of others."""
        with self._lock:
            if number not in self._tables:
                header = self.sources[number].header
                self._tables[number] = _split_entries(header.rest) if header.entries is None else None
            return self._tables[number]


def _split_entries(rest: str) -> dict[str, tuple[int, str]] | None:
    """Cut entries apart without parsing them, which would take longer than all else in opening a file."""
    body = rest.rstrip(" ")[2:-3]
    if not body:
        return {}
    # A name has no quote that is not escaped, so the first one ends it.
    parts = [text.partition('":{"dtype":"') for text in body.split(']},"')]
    # Else a name ends like an entry.
    return (
        {name: (i, fields) for i, (name, _, fields) in enumerate(parts)} if all([end for _, end, _ in parts]) else None
    )


def _same(entry: Entry | None, name: str, spec: Spec) -> Entry:
    if entry is None or entry.spec != spec:
        raise CorruptCheckpointError(
            f"leaf {name} is not what the tree says.",
            expected=f"{spec.code} {list(spec.shape)}",
            got=f"{entry.spec.code} {list(entry.spec.shape)}" if entry is not None else "nothing of this name",
        )
    return entry


# -- files of other programs ------------------------------------------------------------------------------------


def nests(paths: Sequence[Path]) -> bool:
    """Whether dotted names can be read as paths in one way: no empty key, no leaf that is also a sub-tree."""
    if any("" in path or len(path) > _MAX_FOREIGN_DEPTH for path in paths):
        return False
    inner = {path[:i] for path in paths for i in range(1, len(path))}
    return inner.isdisjoint(paths)


def describe(paths: Sequence[Path], entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the description of a tree of plain leaves, as `encode.outline` writes it."""
    specs: dict[tuple[str, tuple[int, ...]], int] = {}
    # A node's keys in the order in which they first come; nodes are numbered below, each after its parent.
    trees: dict[Path, dict[str, Any]] = {(): {}}
    for path, entry in zip(paths, entries, strict=True):
        for depth in range(len(path) - 1, 0, -1):
            if path[:depth] in trees:
                break
        else:
            depth = 0
        for i in range(depth, len(path) - 1):
            trees[path[:i]][path[i]] = None
            trees[path[: i + 1]] = {}
        spec = specs.setdefault((entry.spec.code, entry.spec.shape), len(specs))
        trees[path[:-1]][path[-1]] = spec
    return {"specs": [[code, list(shape)] for code, shape in specs], "nodes": _numbered(trees), "ties": []}


def _numbered(trees: dict[Path, dict[str, Any]]) -> list[dict[str, Any]]:
    order: list[Path] = []
    stack: list[Path] = [()]
    while stack:
        path = stack.pop()
        order.append(path)
        stack.extend((*path, key) for key, item in reversed(trees[path].items()) if item is None)
    numbers = {path: i for i, path in enumerate(order)}
    return [
        {
            "keys": list(trees[path]),
            "items": [{"tree": numbers[(*path, k)]} if item is None else item for k, item in trees[path].items()],
        }
        for path in order
    ]
