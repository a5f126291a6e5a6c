"""A tree from its JSON. What it says is checked before anything is built: the file may be damaged, or hostile."""

import json
import math
import re
import sys
from collections.abc import Collection, Sequence, Set
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Size

from tdfunc._collection import Static, TensorCollection
from tdfunc._errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc._shapes import as_names
from tdfunc._types import Kind, Path, Ties
from tdfunc.storage.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, REQUIRES_GRAD, check_tie_size, restrict
from tdfunc.storage.format import Spec, no_constant, spec_of, unique

_KINDS = {flag: kind for kind, flag in KIND_FLAGS.items()}
_FLAGS = frozenset((*_KINDS, IS_PARAMETER, REQUIRES_GRAD, IS_VALUE))
# What an item that is an object may be; it is one of them.
_MEANINGS = frozenset(("tree", "tie", "value", "values"))
# Longer prefixes are put together again for each node: all of a deep tree would fill the memory.
_MAX_KEPT_PREFIX = 256
_ONLY_INTS, _ONLY_TEXTS = frozenset([int]), frozenset([str])
# A key that is not followed by its colon at once, which nobody writes.
_LOOSE_KEY = re.compile(r'"\s+:')
Classes: TypeAlias = type[TensorCollection] | Sequence[type[TensorCollection]]


def parse_tree(text: str) -> dict[str, Any]:
    """Parse the description of a tree, which `check_unique` has to see before all of it is believed."""
    return json.loads(text, parse_constant=no_constant)


def check_unique(text: str, doc: dict[str, Any]) -> None:
    """Raise if an object in the description has a key twice; readers disagree on which of them counts."""
    nodes = doc["nodes"]
    # As many colons after quotes as there are keys: then none was there twice. It takes a tenth of asking each object.
    keys = len(doc) + sum(map(len, nodes))
    keys += sum([len(item) for node in nodes for item in node["items"] if type(item) is dict])
    if text.count('":') != keys or _LOOSE_KEY.search(text):
        json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)


class _Build(NamedTuple):
    """What `build` was asked for, and the nodes that it has made."""

    leaves: Any
    built: dict[int, Any]
    ties: dict[int, Ties]
    classes: Classes
    device: torch.device | None


class Plan:
    """A tree that was read and checked, still without values; `build` puts them in.

    Args:
        doc: The description of the tree.
        limit: What all names together may be long, since the header that repeats them is no longer.
    """

    def __init__(self, doc: dict[str, Any], limit: int | None) -> None:
        self.table = [spec_of(code, shape) for code, shape in doc["specs"]]
        self.nodes: list[dict[str, Any]] = doc["nodes"]
        self.groups: list[list[tuple[int, str]]] = [[(node, key) for node, key in group] for group in doc["ties"]]
        # The leaves: names as they stand in the header, flags, and the recorded device of the node.
        self.names: list[str] = []
        self.specs: list[Spec] = []
        self.flags: list[str] = []
        self.places: list[torch.device | None] = []
        count = len(self.nodes)
        self.parents: list[tuple[int, str] | None] = [None] * count
        self.sizes: list[Size] = [Size(())] * count
        self.devices: list[torch.device | None] = [None] * count
        # The first leaf of each node, and for each group the leaf that all its paths read.
        self.starts: list[int] = [0] * count
        self.tied: dict[int, int] = {}
        # A small file could name a deep path for each of many leaves.
        self._limit = math.inf if limit is None else limit
        self._prefixes: list[str | None] = [None] * count
        # Paths of ties that have not been met yet: (group, rank in the group).
        self._marks = {ref: (group, rank) for group, refs in enumerate(self.groups) for rank, ref in enumerate(refs)}
        self._check()

    def path(self, number: int) -> Path:
        """Return the keys that lead to a node."""
        keys: list[str] = []
        above = self.parents[number]
        while above is not None:
            keys.append(above[1])
            above = self.parents[above[0]]
        return tuple(reversed(keys))

    def _check(self) -> None:
        refs = sum(map(len, self.groups))
        if not self.nodes or refs != len(self._marks) or any(len(group) < 2 for group in self.groups):
            raise malformed("a node, and ties of two paths or more", f"{len(self.nodes)} nodes, ties {self.groups}")
        for number in range(len(self.nodes)):
            if number and self.parents[number] is None:
                raise malformed("every node inside an earlier one", f"node {number} outside")
            self._inherit(number)
            self._check_items(number)
        if self._marks:
            raise malformed("ties between leaves", f"a tie at {next(iter(self._marks))}")
        names = set(self.names)
        if len(names) != len(self.names) or '"__metadata__"' in names:
            raise malformed("leaves of distinct names, none of them __metadata__", "a name twice")

    def _inherit(self, number: int) -> None:
        """Set batch size and device of a node, which are its parent's where it has none of its own."""
        node, above = self.nodes[number], self.parents[number]
        self.starts[number] = len(self.names)
        if above is not None:
            kept = self._prefixes[above[0]]
            if kept is not None and len(kept) < _MAX_KEPT_PREFIX:
                self._prefixes[number] = f"{kept}{quote(above[1])[1:-1]}."
            # Most nodes have nothing of their own.
            if len(node) == 2:
                self.sizes[number], self.devices[number] = self.sizes[above[0]], self.devices[above[0]]
                return
        else:
            self._prefixes[number] = ""
        outer = self.sizes[above[0]] if above is not None else Size(())
        device = self.devices[above[0]] if above is not None else None
        size = _size(node["size"], -1 if "own" in node else 0) if "size" in node else outer
        free = above is not None and "own" in self.nodes[above[0]]
        if size[: len(outer)] != outer and not free:
            raise malformed(f"a batch size that starts with {list(outer)}", f"{list(size)} in node {number}")
        if "device" in node:
            name = node["device"]
            if name is not None and type(name) is not str:
                raise malformed("a device", repr(name))
            device = torch.device(name) if name is not None else None
        if "own" in node and "class" not in node:
            raise malformed("a class beside what it records", f"{node['own']!r} in node {number}")
        self.sizes[number], self.devices[number] = size, device

    def _check_items(self, number: int) -> None:
        node, size, device, prefix = self.nodes[number], self.sizes[number], self.devices[number], None
        # A class that stores its leaves in another form (a lazy stack) says itself what its batch size is.
        ndim = 0 if "own" in node else len(size)
        if not self._marks and not ndim and _ONLY_INTS.issuperset(map(type, node["items"])):
            self._add_plain(number, node["keys"], node["items"])
            return
        for key, what in zip(node["keys"], node["items"], strict=True):
            if type(key) is not str or not key:
                raise malformed("a key", repr(key))
            mark = self._marks.pop((number, key), None) if self._marks else None
            if type(what) is int:
                index, flags, own = what, "", None
            elif type(what) is list:
                index, flags, own, *_ = *what, None, None
            else:
                self._check_object(number, key, what, mark)
                continue
            if mark is not None:
                if mark[1]:
                    raise malformed(f"a tie at {key!r}", "a tensor of its own")
                self.tied[mark[0]] = len(self.names)
            if prefix is None:
                prefix = self._prefix(number)
            if type(index) is not int or index < 0:
                raise malformed("a spec", repr(index))
            spec = self.table[index]
            if type(what) is list:
                check_flags(flags, spec.dtype)
            check_place(device)
            if ndim and spec.size[:ndim] != size and IS_VALUE not in flags:
                raise malformed(f"leaf {prefix}{key} to start with the batch size {list(size)}", str(list(spec.size)))
            name = f'"{prefix}{quote(key)[1:-1]}"' if own is None else quote(own)
            self._limit -= len(name)
            if self._limit < 0:
                raise malformed("names that fit in the header", "longer ones")
            self.names.append(name)
            self.specs.append(spec)
            self.flags.append(flags)
            self.places.append(device)

    def _add_plain(self, number: int, keys: list[Any], items: list[int]) -> None:
        """Enter the leaves of a node that has nothing but plain tensors, all at once."""
        if len(keys) != len(items) or not _ONLY_TEXTS.issuperset(map(type, keys)) or "" in keys:
            raise malformed(f"{len(items)} keys", repr(keys))
        if items and min(items) < 0:
            raise malformed("a spec", repr(min(items)))
        prefix, table = self._prefix(number), self.table
        if items:
            check_place(self.devices[number])
        # Before they are made: of a deep node they might not fit in memory.
        self._limit -= (len(prefix) + 2) * len(keys) + sum(map(len, keys))
        if self._limit < 0:
            raise malformed("names that fit in the header", "longer ones")
        self.names += [f'"{prefix}{quote(key)[1:-1]}"' for key in keys]
        self.specs += [table[item] for item in items]
        self.flags += [""] * len(keys)
        self.places += [self.devices[number]] * len(keys)

    def _check_object(self, number: int, key: str, what: Any, mark: tuple[int, int] | None) -> None:
        """Check an item that is no tensor: a sub-tree, an alias of a tied leaf, or non-tensor data."""
        if type(what) is not dict:
            raise malformed("a tensor, tree, tie or value", f"{what!r} at {key!r}")
        if len(what) > 1:
            _check_fields_of(key, what)
        if "tie" in what:
            if mark is None or mark[0] != what["tie"] or not mark[1]:
                raise malformed(f"{key!r} among the ties", repr(mark))
            return
        if mark is not None:
            raise malformed("ties between tensors", repr(key))
        if "tree" in what:
            child = what["tree"]
            if type(child) is not int or child <= number or self.parents[child] is not None:
                raise malformed("each node once, after the node that it is in", repr(child))
            self.parents[child] = (number, key)
        elif not _MEANINGS & what.keys():
            raise malformed("a tensor, tree, tie or value", f"{what!r} at {key!r}")

    def _prefix(self, number: int) -> str:
        """Return the dotted path of a node, as it stands in names, with the dot after it."""
        kept = self._prefixes[number]
        return kept if kept is not None else "".join([f"{quote(key)[1:-1]}." for key in self.path(number)])

    # -- building ---------------------------------------------------------------------------------------------

    def build(
        self, leaves: Any, classes: Classes = (), device: torch.device | None = None, root: int = 0
    ) -> TensorCollection:
        """Return the tree (or a sub-tree) around values, `leaves[i]` being that of `self.names[i]`.

        If `device` is given, all of them are on it.
        """
        job = _Build(leaves, {}, self._ties(), classes, device)
        # A node comes after the one that it is in, so going back its sub-trees are there.
        numbers = range(len(self.nodes)) if not root else self._below(root)
        for number in reversed(numbers):
            job.built[number] = self._node(number, job)
        return job.built[root]

    def _below(self, root: int) -> list[int]:
        """Return a node and those in it, each after the one that it is in."""
        inside = {root}
        for number in range(root + 1, len(self.nodes)):
            above = self.parents[number]
            if above is not None and above[0] in inside:
                inside.add(number)
        return sorted(inside)

    def leaves_below(self, root: int) -> list[int]:
        """Return the leaves in a sub-tree, those included that it shares with the rest of the tree."""
        found: dict[int, None] = {}
        for number in self._below(root):
            leaf = self.starts[number]
            for what in self.nodes[number]["items"]:
                if type(what) is not dict:
                    found[leaf] = None
                    leaf += 1
                elif "tie" in what:
                    found[self.tied[what["tie"]]] = None
        return list(found)

    def _node(self, number: int, job: "_Build") -> Any:
        node, size, leaf = self.nodes[number], self.sizes[number], self.starts[number]
        leaves, ties = job.leaves, job.ties.get(number, ())
        device = self.devices[number] if job.device is None else job.device
        if not ties and len(node) == 2:
            plain = self._plain_node(node, leaves, leaf, job.built)
            if plain is not None:
                return TensorCollection._open._make(plain, size, device)
        outer = Size(()) if "own" in node else size
        data: dict[str, Any] = {}
        kinds: dict[str, Kind] = {}
        for key, what in zip(node["keys"], node["items"], strict=True):
            if type(what) is int:
                data[key] = leaves[leaf]
                leaf += 1
            elif type(what) is list:
                flags = what[1]
                shape = _batch(what[3] if len(what) > 3 else outer, outer) if IS_VALUE in flags else None
                data[key] = leaves[leaf] if shape is None else NonTensorData(leaves[leaf], shape)
                leaf += 1
                _put_kind(kinds, key, flags)
            elif "tree" in what:
                data[key] = job.built[what["tree"]]
            else:
                data[key] = leaves[self.tied[what["tie"]]] if "tie" in what else _nontensor(what, outer)
                _put_kind(kinds, key, what.get("flags", ""))
        if len(data) != len(node["keys"]):
            raise malformed("distinct keys", f"a key twice in node {number}")
        names = as_names(node["names"], len(size)) if "names" in node else None
        static = Static(kinds, ties, node.get("own"))
        if "class" in node and node["class"] == _lazy_name():
            return _stack(data, size, device, names, static)
        cls = _resolve(node["class"], job.classes) if "class" in node else TensorCollection._open
        _check_fields(cls, data, self.path(number))
        return cls._make(data, size, device, names, static if static != Static() else None)

    def _plain_node(self, node: dict[str, Any], leaves: Any, leaf: int, built: dict[int, Any]) -> dict[str, Any] | None:
        """Return the entries of a node of plain tensors and trees, which most are; None where there is more."""
        keys, items = node["keys"], node["items"]
        if type(leaves) is list and _ONLY_INTS.issuperset(map(type, items)):
            data: dict[str, Any] = dict(zip(keys, leaves[leaf : leaf + len(items)], strict=True))
        else:
            data = {}
            for key, what in zip(keys, items, strict=True):
                if type(what) is int:
                    data[key] = leaves[leaf]
                    leaf += 1
                elif type(what) is dict and "tree" in what:
                    data[key] = built[what["tree"]]
                else:
                    return None
        if len(data) != len(node["keys"]):
            raise malformed("distinct keys", f"a key twice in {node['keys']}"[:400])
        return data

    def _ties(self) -> dict[int, Ties]:
        """Return the groups of every node that has any, relative to it."""
        if not self.groups:
            return {}
        depths = [0] * len(self.nodes)
        for number, above in enumerate(self.parents):
            depths[number] = depths[above[0]] + 1 if above is not None else 0
        check_tie_size(sum((depths[node] + 1) ** 2 for refs in self.groups for node, _ in refs), CorruptCheckpointError)
        paths = [[(*self.path(node), key) for node, key in refs] for refs in self.groups]
        result: dict[int, Ties] = {0: tuple(tuple(group) for group in paths)}
        inner: dict[int, dict[str, Ties]] = {0: restrict(result[0])}
        for number, above in enumerate(self.parents):
            if above is not None and above[1] in inner.get(above[0], {}):
                ties = inner[above[0]][above[1]]
                if "ties" in self.nodes[number]:
                    ties = self._own_order(number, paths, ties)
                result[number], inner[number] = ties, restrict(ties)
        return result

    def _own_order(self, number: int, paths: list[list[Path]], known: Ties) -> Ties:
        depth = len(self.path(number))
        ties = tuple(tuple(paths[g][rank][depth:] for rank in ranks) for g, ranks in self.nodes[number]["ties"])
        if {frozenset(group) for group in ties} != {frozenset(group) for group in known}:
            raise malformed(f"the groups of its parent in node {number}", repr(ties)[:200])
        return ties


def _check_fields_of(key: str, what: dict[str, Any]) -> None:
    """Raise for an item that two readers could take for different things, and for flags that are no kinds."""
    flags = what.get("flags", "")
    if not are_flags(flags, _KINDS.keys()):
        raise malformed(f"one of the flags {''.join(sorted(_KINDS))} at {key!r}", repr(flags))
    if len(_MEANINGS & what.keys()) > 1:
        raise malformed(f"one meaning of {key!r}", ", ".join(map(repr, what)))


def check_place(device: torch.device | None) -> None:
    """Raise for a device on which the leaves of a file would have no values."""
    if device is not None and device.type == "meta":
        raise malformed("leaves on a device that has values", str(device))


def check_flags(flags: Any, dtype: torch.dtype) -> None:
    """Raise unless flags are those that a leaf of this dtype can have."""
    if not are_flags(flags, _FLAGS):
        raise malformed(f"flags out of {''.join(sorted(_FLAGS))}, of one kind", repr(flags))
    if REQUIRES_GRAD in flags and not (dtype.is_floating_point or dtype.is_complex):
        raise malformed("a leaf that requires grad to be of a floating dtype", str(dtype))


def are_flags(flags: Any, known: Set[str]) -> bool:
    """Whether something is flags out of known ones, with at most one kind: of two, readers could take either."""
    return type(flags) is str and known >= set(flags) and len(_KINDS.keys() & set(flags)) < 2


def malformed(expected: str, got: str) -> CorruptCheckpointError:
    """Build the error for JSON that describes no tree."""
    return CorruptCheckpointError(
        explain("the description of the tree is malformed.", expected=expected, got=got[:400])
    )


_TOO_LARGE = 2**63


def _size(sizes: Any, least: int = 0) -> Size:
    if type(sizes) is not list or any(type(size) is not int or not least <= size < _TOO_LARGE for size in sizes):
        raise malformed("a list of sizes", repr(sizes))
    if math.prod(sizes) >= _TOO_LARGE:
        raise malformed("a batch whose elements can be counted in 64 bits", repr(sizes))
    return Size(sizes)


def _batch(shape: Any, size: Size) -> Size:
    shape = shape if isinstance(shape, Size) else _size(shape)
    if shape[: len(size)] != size:
        raise malformed(f"a shape that starts with the batch size {list(size)}", str(list(shape)))
    return shape


def _put_kind(kinds: dict[str, Kind], key: str, flags: str) -> None:
    for flag in flags:
        if flag in _KINDS:
            kinds[key] = _KINDS[flag]


def _nontensor(what: dict[str, Any], size: Size) -> NonTensorBase:
    shape = _batch(what.get("shape", size), size)
    if "value" in what:
        return NonTensorData(what["value"], shape)
    array = np.empty(len(what["values"]), dtype=object)
    for i, value in enumerate(what["values"]):
        array[i] = value
    return NonTensorStack._wrap(array.reshape(shape))


def _lazy_name() -> str:
    return f"{TensorCollection._lazy.__module__}:{TensorCollection._lazy.__qualname__}"


def _stack(
    data: dict[str, Any], size: Size, device: torch.device | None, names: tuple[str | None, ...] | None, static: Static
) -> Any:
    """Return a lazy stack of trees, in the class for theirs."""
    trees = list(data.values())
    kinds = {(type(tree), len(tree._batch_size)) if isinstance(tree, TensorCollection) else None for tree in trees}
    if len(kinds) != 1 or None in kinds or list(data) != [str(number) for number in range(len(trees))]:
        raise malformed("a lazy stack of trees of one class and number of dimensions, in order", repr(list(data)))
    dim = static.own
    if type(dim) is not int or not -len(size) <= dim < 0 or len(trees[0]._batch_size) != len(size) - 1:
        raise malformed(f"the dimension of a lazy stack whose batch size is {list(size)}", repr(dim))
    made = TensorCollection._lazy._of(trees, len(size) + dim)
    if made._batch_size != size:
        raise malformed(f"a lazy stack of the batch size {list(size)}", str(list(made._batch_size)))
    return made._make(made._data, size, device, names, static)


# Any: the class may be a TensorClass, which is of a higher layer.
def _check_fields(cls: Any, keys: Collection[str], path: Path) -> None:
    """Raise if a class of fixed fields has not those that were saved; fields may be empty, also those required."""
    if not hasattr(cls, "_fields") or cls._any_key:
        return
    unknown = [key for key in keys if key not in cls._fields]
    if unknown:
        lacking = [name for name in cls._required if name not in keys]
        raise TreeStructureError(
            explain(
                f"what was saved at {dotted(path) if path else 'the root'!r} is no {cls.__name__} of today.",
                expected=f"the fields {list(cls._fields)}",
                got=f"{list(keys)}: unknown {unknown}, missing {lacking}",
                hint=f"load(path, classes=TensorDict) gives plain trees; {cls.__name__}.from_tensordict takes one.",
            )
        )


def _resolve(name: Any, classes: Classes) -> type[TensorCollection]:
    """Return a class by its recorded name, from the given ones or from a module that is imported already."""
    if isinstance(classes, type):
        if classes is TensorCollection._open:
            return classes
        classes = (classes,)
    module, _, path = name.partition(":")
    for cls in classes:
        if (cls.__module__, cls.__qualname__) == (module, path):
            return cls
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module or class may run code to answer.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if (
        isinstance(found, type)
        and issubclass(found, TensorCollection)
        and (found.__module__, found.__qualname__) == (module, path)
    ):
        return found
    raise UnsupportedError(
        explain(
            f"the tree has nodes of the class {name!r}, which is not here.",
            expected="a TensorCollection class that is imported",
            got=type(found).__name__ if found is not None else "nothing of this name",
            hint="import its module, name it: load(path, classes=[...]), or take plain trees: classes=TensorDict.",
        )
    )
