"""A tree from its JSON, which is checked before anything is built: the file may be damaged or hostile.

Most nodes contain plain tensors and trees, and there may be thousands, so all nodes are checked together if possible.
`build.py` makes the tree.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from json.encoder import encode_basestring as quote
from typing import Any

import torch
from torch import Size

from tdfunc.core.context import cached_property
from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path, Ties
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, REQUIRES_GRAD, check_tie_size, restrict
from tdfunc.storage.tree.objects import OBJECT
from tdfunc.storage.tree.specs import Spec, is_countable, malformed, no_constant, parse_json, spec_of

_KINDS = frozenset(KIND_FLAGS.values())
_FLAGS = frozenset((*_KINDS, IS_PARAMETER, REQUIRES_GRAD, IS_VALUE))
# The meanings of an item that is an object; it has one of them.
_MEANINGS = frozenset(("tree", "tie", "value", "values"))
# Longer prefixes are put together again for each node: all of a deep tree would fill the memory.
_MAX_KEPT_PREFIX = 256
_INTS = frozenset([int])
_TEXTS = frozenset([str])
_LISTS = frozenset([list])
_TENSORS = frozenset([int, list])
# A key that is not followed by its colon at once; a writer of tdfunc leaves no space there.
_LOOSE_KEYS = ('" ', '"\t', '"\n', '"\r')
# All fields of a node of plain tensors and trees.
_PLAIN_FIELDS = frozenset(["keys", "items", "size", "device"])
_TOO_LARGE = 2**63
# The errors of Python and torch for values of wrong types in a file.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)


def parse_tree(text: str) -> dict[str, Any]:
    """Parse the description of a tree; call `check_unique` after the other checks."""
    return json.loads(text, parse_constant=no_constant)


def check_unique(text: str, plan: "Description") -> None:
    """Raise if an object in the description has a key twice; readers use different ones of them."""
    # If there are as many colons after quotes as keys, none is there twice. This is faster than a check of each object.
    if text.count('":') != plan.fields or any([loose in text for loose in _LOOSE_KEYS]):
        parse_json(text)


class Description:
    """The description of a tree, checked.

    Args:
        doc: Its JSON.
    """

    def __init__(self, doc: dict[str, Any]) -> None:
        self._table = [spec_of(code, shape) for code, shape in doc["specs"]]
        self.nodes: list[dict[str, Any]] = doc["nodes"]
        self.keys: list[list[str]] = [node["keys"] for node in self.nodes]
        self.items: list[list[Any]] = [node["items"] for node in self.nodes]
        self.groups: list[list[tuple[int, str]]] = [_read_group(group) for group in doc["ties"]]
        count = len(self.nodes)
        self.parents: list[tuple[int, str] | None] = [None] * count
        self.sizes: list[Size] = [Size(())] * count
        self.devices: list[torch.device | None] = [None] * count
        # The first leaf of each node, and at the end the number of all leaves.
        self.starts: list[int] = [0]
        # The number of keys in the description, without the keys in values.
        self.fields: int = len(doc)
        # Nodes with more than tensors, trees, and the fields that both inherit.
        self.special: set[int] = set()
        self._aliases: dict[tuple[int, str], Any] = {}
        self._prefixes: list[str | None] = ["", *[None] * (count - 1)]
        self._lengths = [0] * count
        self._quoted = self._check_keys()
        self._walk()
        # The leaves: dtype and shape, and flags.
        self._flat: list[Any] = [what for items in self.items for what in items if type(what) is not dict]
        # Whether the item of some leaf is a list: its spec and its flags, and perhaps its name and shape.
        self._has_lists = False
        numbers = self._read_numbers()
        self.specs: list[Spec] = [self._table[number] for number in numbers]
        self.flags: list[str] = [""] * len(numbers)
        if self._has_lists:
            self.flags = self._read_flags(numbers)
        self._check_leaves(numbers)
        # For each group of ties the leaf that all its paths read.
        self.tied: dict[int, int] = self._find_tied()

    # What is made of all leaves or nodes is made once: a loop over sub-trees asks for it at each.

    @cached_property
    def marks(self) -> frozenset[str]:
        """The flags that some leaf has."""
        return frozenset(self.flags)

    @cached_property
    def has_devices(self) -> bool:
        """Whether a device is recorded."""
        return any(self.devices)

    @cached_property
    def objects(self) -> frozenset[Path]:
        """The paths of plain objects."""
        return frozenset([self.path(number) for number in self.special if self.nodes[number].get("class") == OBJECT])

    @cached_property
    def ties(self) -> dict[int, Ties]:
        """The groups of tied paths by node, relative to it."""
        return _ties_of(self)

    def path(self, number: int) -> Path:
        """Return the keys that lead to a node."""
        keys: list[str] = []
        above = self.parents[number]
        while above is not None:
            keys.append(above[1])
            above = self.parents[above[0]]
        return tuple(reversed(keys))

    def node_of(self, leaf: int) -> int:
        """Return the node that a leaf is in."""
        # Of nodes that start at one leaf, all but the last have none.
        return bisect_right(self.starts, leaf, hi=len(self.nodes)) - 1

    def path_of(self, leaf: int) -> Path:
        """Return the path of a leaf."""
        number = self.node_of(leaf)
        own = [key for key, what in zip(self.keys[number], self.items[number], strict=True) if type(what) is not dict]
        return (*self.path(number), own[leaf - self.starts[number]])

    def place(self, leaf: int) -> torch.device | None:
        """Return the recorded device of the node that a leaf is in."""
        return self.devices[self.node_of(leaf)]

    def below(self, root: int) -> list[int]:
        """Return a node and the nodes in it, each after its parent."""
        # No other nodes are looked at: a loop over all sub-trees reads each.
        inside = [root]
        for number in inside:
            inside += [what["tree"] for what in self.items[number] if type(what) is dict and "tree" in what]
        return sorted(inside)

    def leaves_below(self, root: int) -> list[int]:
        """Return the leaves in a sub-tree, including leaves that it shares with the rest of the tree."""
        found: dict[int, None] = {}
        for number in self.below(root):
            found.update(dict.fromkeys(range(self.starts[number], self.starts[number + 1])))
            if number not in self.special:
                continue
            for what in self.items[number]:
                if type(what) is dict and "tie" in what:
                    found[self.tied[what["tie"]]] = None
        return list(found)

    def _check_keys(self) -> list[list[str]]:
        """Return the keys of all nodes, quoted as in names."""
        if not self.nodes or not _LISTS.issuperset(map(type, chain(self.keys, self.items))):
            raise malformed("nodes with lists of keys and items", f"{len(self.nodes)} nodes")
        for keys, items in zip(self.keys, self.items, strict=True):
            if len(keys) != len(items):
                raise malformed(f"{len(keys)} items", f"{len(items)}")
        every = list(chain.from_iterable(self.keys))
        if not _TEXTS.issuperset(map(type, every)) or "" in every:
            raise malformed("a key", f"{_stray(every, _TEXTS)!r}")
        # Most trees have no key with a character that JSON escapes.
        text = "".join(every)
        if len(quote(text)) == len(text) + 2:
            return self.keys
        return [_quote_all(keys) for keys in self.keys]

    def _walk(self) -> None:
        """Visit the nodes, each after its parent, whose batch size and device it inherits."""
        end = 0
        for number, (node, items) in enumerate(zip(self.nodes, self.items, strict=True)):
            self.fields += len(node)
            if len(node) > 2:
                self._read_fields(number, node)
            end += len(items)
            if dict in map(type, items):
                end -= self._enter_objects(number)
            self.starts.append(end)
        if None in self.parents[1:]:
            raise malformed("every node inside an earlier one", f"node {self.parents.index(None, 1)} outside")

    def _read_fields(self, number: int, node: dict[str, Any]) -> None:
        """Read a node's fields."""
        if "size" in node:
            self._read_size(number, node)
        if "device" in node:
            self._read_device(number, node["device"])
        if "own" in node and "class" not in node:
            raise malformed("a class beside the field own", f"{node['own']!r} in node {number}")
        if not _PLAIN_FIELDS.issuperset(node):
            self.special.add(number)

    def _read_size(self, number: int, node: dict[str, Any]) -> None:
        # A lazy stack has -1 where the sizes of its trees differ.
        least = -1 if "own" in node else 0
        size = as_size(node["size"], least)
        outer = self.sizes[number]
        above = self.parents[number]
        # The trees in a lazy stack do not have its batch size.
        is_free = above is not None and "own" in self.nodes[above[0]]
        if size[: len(outer)] != outer and not is_free:
            raise malformed(f"a batch size that starts with {list(outer)}", f"{list(size)} in node {number}")
        self.sizes[number] = size

    def _read_device(self, number: int, name: Any) -> None:
        if name is None:
            self.devices[number] = None
            return
        if type(name) is not str:
            raise malformed("a device", repr(name))
        self.devices[number] = torch.device(name)

    def _enter_objects(self, number: int) -> int:
        """Enter the sub-trees, aliases of tied leaves and other data of a node; return their number."""
        size = self.sizes[number]
        device = self.devices[number]
        prefix = self._prefixes[number]
        keep = prefix is not None and len(prefix) < _MAX_KEPT_PREFIX
        sizes = self.sizes
        devices = self.devices
        lengths = self._lengths
        prefixes = self._prefixes
        length = lengths[number] + 1
        parents = self.parents
        count = 0
        fields = 0
        for key, quoted, what in zip(self.keys[number], self._quoted[number], self.items[number], strict=True):
            if type(what) is not dict:
                continue
            count += 1
            fields += len(what)
            if len(what) > 1:
                _check_fields(key, what)
            if "tree" in what:
                child = what["tree"]
                if type(child) is not int or not number < child < len(parents) or parents[child] is not None:
                    raise malformed("each node once, after the node that it is in", repr(child))
                if "flags" in what:
                    self.special.add(number)
                    self._check_is_object(key, child, what["flags"])
                parents[child] = (number, key)
                sizes[child] = size
                devices[child] = device
                lengths[child] = length + len(quoted)
                if keep:
                    prefixes[child] = f"{prefix}{quoted}."
                continue
            self.special.add(number)
            if "tie" in what:
                self._aliases[number, key] = what["tie"]
            elif not _MEANINGS & what.keys():
                raise malformed("a tensor, tree, tie or value", f"{what!r} at {key!r}")
        self.fields += fields
        return count

    def _check_is_object(self, key: str, child: int, flags: str) -> None:
        """Raise unless a sub-tree with flags is a plain object; other trees have the kinds of their leaves."""
        if self.nodes[child].get("class") != OBJECT:
            raise malformed(f"a tree without flags at {key!r}", repr(flags))

    def _read_numbers(self) -> list[int]:
        """Return the number of the spec of each leaf."""
        types = set(map(type, self._flat))
        if not types <= _TENSORS:
            raise malformed("tensors, trees, ties and values", f"a {_stray(self._flat, _TENSORS)!r}")
        self._has_lists = list in types
        numbers: list[int] = self._flat
        if self._has_lists:
            numbers = [what if type(what) is int else what[0] for what in self._flat]
        if not _INTS.issuperset(map(type, numbers)) or min(numbers, default=0) < 0:
            raise malformed("the numbers of specs", f"{_stray(numbers, _INTS)!r}")
        return numbers

    def _read_flags(self, numbers: list[int]) -> list[str]:
        """Return the flags of each leaf, checked."""
        flags = ["" if type(what) is int else what[1] for what in self._flat]
        if not _TEXTS.issuperset(map(type, flags)):
            check_flags(_stray(flags, _TEXTS), self.specs[0].dtype)
        # Most leaves of one spec have the same.
        for flag, number in set(zip(flags, numbers, strict=True)):
            check_flags(flag, self._table[number].dtype)
        values = {flag for flag in set(flags) if IS_VALUE in flag}
        if values:
            self.special.update([self.node_of(leaf) for leaf, flag in enumerate(flags) if flag in values])
        return flags

    def name_leaves(self, limit: float = math.inf) -> list[str]:
        """Return the names of the leaves in the header of one file.

        Args:
            limit: The largest number of characters of all names together: the length of the header, which repeats them.
        """
        given = self._given_names()
        # The number of leaves of each node whose names are their paths.
        counts = [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]
        for leaf in given:
            counts[self.node_of(leaf)] -= 1
        # Before the names are made: a small file could imply many long ones.
        if sum([count * (length + 2) for count, length in zip(counts, self._lengths, strict=True)]) > limit:
            raise malformed("names that fit in the header", "longer ones")
        names: list[str] = []
        for number, (keys, items) in enumerate(zip(self._quoted, self.items, strict=True)):
            leaves = self.starts[number + 1] - self.starts[number]
            if not leaves:
                continue
            prefix = ""
            if counts[number]:
                prefix = self._prefix_of(number)
            if leaves != len(keys):
                keys = [key for key, what in zip(keys, items, strict=True) if type(what) is not dict]
            names += [f'"{prefix}{key}"' for key in keys]
        for leaf, name in given.items():
            names[leaf] = quote(name)
        distinct = set(names)
        if len(distinct) != len(names) or '"__metadata__"' in distinct:
            raise malformed("leaves of distinct names, none of them __metadata__", "a name twice")
        return names

    def _given_names(self) -> dict[int, str]:
        """Return the recorded names of the leaves whose names are not their paths."""
        given: dict[int, str] = {}
        if self._has_lists:
            for leaf, what in enumerate(self._flat):
                # The third part of an item is the name.
                if type(what) is list and len(what) > 2 and what[2] is not None:
                    given[leaf] = what[2]
        return given

    def _prefix_of(self, number: int) -> str:
        """Return the beginning of the names of a node's leaves, quoted."""
        prefix = self._prefixes[number]
        if prefix is None:
            return "".join([f"{key}." for key in _quote_all(self.path(number))])
        return prefix

    def _check_leaves(self, numbers: list[int]) -> None:
        """Raise if leaves do not fit their nodes."""
        if any(self.devices):
            for number, device in enumerate(self.devices):
                if self.starts[number] != self.starts[number + 1]:
                    check_place(device)
        if any(self.sizes):
            for number, size in enumerate(self.sizes):
                # The batch size of a lazy stack follows from its trees.
                if size and "own" not in self.nodes[number]:
                    self._check_sizes(number, size, numbers)

    def _check_sizes(self, number: int, size: Size, numbers: list[int]) -> None:
        """Raise if a leaf of a node does not start with its batch size."""
        leaves = range(self.starts[number], self.starts[number + 1])
        # Many leaves have the same spec.
        distinct = set(numbers[leaves.start : leaves.stop])
        bad = {spec for spec in distinct if self._table[spec].size[: len(size)] != size}
        if not bad:
            return
        for leaf in leaves:
            # A tensor that is non-tensor data has any shape.
            if numbers[leaf] in bad and IS_VALUE not in self.flags[leaf]:
                expected = f"leaf {dotted(self.path_of(leaf))} to start with the batch size {list(size)}"
                raise malformed(expected, str(list(self.specs[leaf].size)))

    def _find_tied(self) -> dict[int, int]:
        """Return the leaf at the first path of each group of ties; its other paths are aliases."""
        refs = [ref for group in self.groups for ref in group]
        if len(set(refs)) != len(refs) or any([len(group) < 2 for group in self.groups]):
            raise malformed("ties of two paths or more, each in one of them", f"ties {self.groups}")
        aliases: dict[tuple[int, str], int] = {}
        for group, (_, *others) in enumerate(self.groups):
            aliases.update(dict.fromkeys(others, group))
        if aliases != self._aliases:
            raise malformed(f"ties at {sorted(self._aliases)}", f"at {list(aliases)}")
        # By node: its leaves by their keys.
        leaves: dict[int, dict[str, int]] = {}
        tied: dict[int, int] = {}
        for group, ((number, key), *_) in enumerate(self.groups):
            if type(number) is not int or not 0 <= number < len(self.nodes):
                raise malformed("ties between leaves", f"a tie at {(number, key)}")
            if number not in leaves:
                leaves[number] = self._leaves_of(number)
            if key not in leaves[number]:
                raise malformed("ties between leaves", f"a tie at {(number, key)}")
            tied[group] = leaves[number][key]
        return tied

    def _leaves_of(self, number: int) -> dict[str, int]:
        """Return the leaves of a node by their keys."""
        own = zip(self.keys[number], self.items[number], strict=True)
        names = [name for name, what in own if type(what) is not dict]
        return {name: leaf for leaf, name in enumerate(names, self.starts[number])}


def _read_group(group: Any) -> list[tuple[int, str]]:
    """Return a group of ties: a node and a key for each of its paths."""
    return [(node, key) for node, key in group]


def _quote_all(keys: Iterable[str]) -> list[str]:
    """Return keys as they are in names, which are JSON."""
    return [quote(key)[1:-1] for key in keys]


def _check_fields(key: str, what: dict[str, Any]) -> None:
    """Raise unless an item that is an object has one meaning and correct flags."""
    # Two readers could take the item for different things.
    if len(_MEANINGS & what.keys()) > 1:
        raise malformed(f"one meaning of {key!r}", ", ".join(map(repr, what)))
    if not are_flags(what.get("flags", ""), _KINDS):
        expected = f"one of the flags {''.join(sorted(_KINDS))} at {key!r}"
        raise malformed(expected, repr(what["flags"]))


def check_place(device: torch.device | None) -> None:
    """Raise if a device holds leaves without values."""
    if device is not None and device.type == "meta":
        raise malformed("leaves on a device that has values", str(device))


def check_flags(flags: Any, dtype: torch.dtype) -> None:
    """Raise unless a leaf of this dtype can have the flags."""
    if not are_flags(flags, _FLAGS):
        raise malformed(f"flags out of {''.join(sorted(_FLAGS))}, of one kind", repr(flags))
    if REQUIRES_GRAD in flags and not (dtype.is_floating_point or dtype.is_complex):
        raise malformed("a leaf that requires grad to be of a floating dtype", str(dtype))


def are_flags(flags: Any, known: frozenset[str]) -> bool:
    """Return whether something is flags out of known ones, with at most one kind."""
    return type(flags) is str and known.issuperset(flags) and len(_KINDS & set(flags)) < 2


def kinds_in(flags: str) -> str:
    """Return the flags that are kinds."""
    return "".join([flag for flag in flags if flag in _KINDS])


def _stray(values: list[Any], types: frozenset[type]) -> Any:
    """Return the first value of another type, else the least value."""
    return next((value for value in values if type(value) not in types), None) or min(values)


def _ties_of(plan: Description) -> dict[int, Ties]:
    """Return the groups of tied paths by node, relative to it."""
    if not plan.groups:
        return {}
    depths = [0] * len(plan.nodes)
    for number, above in enumerate(plan.parents):
        if above is not None:
            depths[number] = depths[above[0]] + 1
    keys = 0
    for refs in plan.groups:
        keys += sum([(depths[node] + 1) ** 2 for node, _ in refs])
    # Before the paths are made, which could fill the memory.
    check_tie_size(keys, CorruptCheckpointError)
    paths: list[tuple[Path, ...]] = []
    for refs in plan.groups:
        paths.append(tuple([(*plan.path(node), key) for node, key in refs]))
    result: dict[int, Ties] = {0: tuple(paths)}
    inner: dict[int, dict[str, Ties]] = {0: restrict(result[0])}
    for number, above in enumerate(plan.parents):
        if above is None:
            continue
        parent, key = above
        if key in inner.get(parent, {}):
            result[number] = inner[parent][key]
            inner[number] = restrict(result[number])
    return result


def as_size(sizes: Any, least: int = 0) -> Size:
    """Return a list of sizes as a Size."""
    if type(sizes) is not list:
        raise malformed("a list of sizes", repr(sizes))
    for size in sizes:
        if type(size) is not int or not least <= size < _TOO_LARGE:
            raise malformed("a list of sizes", repr(sizes))
    if 0 not in sizes and not is_countable(sizes):
        raise malformed("a batch whose elements can be counted in 64 bits", repr(sizes))
    return Size(sizes)
