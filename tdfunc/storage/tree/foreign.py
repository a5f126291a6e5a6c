"""The leaves in a header of another program, and the tree that their names imply.

The rules of the safetensors package apply, which reads a header with serde: unknown fields are ignored, and a lone
surrogate or a number out of range is refused wherever it is. Here three more things are refused. Of a key that is there
twice, readers use different ones, and the format forbids it. A list of fields, or an object for a dtype, is what serde
takes for them, and not the format. The strides of some leaves without elements do not fit in 64 bits.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, brief, damaged
from tdfunc.core.types import Path
from tdfunc.storage.tree.specs import DTYPES, FILE_BITS, Spec, find_surrogate, no_constant, spec_of, unique

_FIELDS = ("dtype", "shape", "data_offsets")
# An escape that may be half of a character; a pair of them is one character.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A key that is followed by its colon, and one that is not at once.
_KEY = '":'
_LOOSE_KEYS = ('" ', '"\t', '"\n', '"\r')
# serde reads 127 containers in each other; the entry and the header are two of them.
_MAX_FIELD_DEPTH = 125
_MAX_DEPTH = 64


class Entry(NamedTuple):
    """One leaf in a safetensors header of another program."""

    name: str
    spec: Spec
    begin: int


class Entries:
    """The leaves of one header. All are checked together; the spec of a leaf is made when it is asked for.

    Args:
        header: The parsed header, without the metadata.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.names: list[str] = list(header)
        columns = [_columns(name, fields) for name, fields in header.items()]
        _check_types(self.names, columns)
        self._kinds: list[tuple[str, tuple[int, ...]]] = [(code, tuple(shape)) for code, shape, _ in columns]
        self._begins: list[int] = [offsets[0] for _, _, offsets in columns]
        self._specs: dict[tuple[str, tuple[int, ...]], Spec] = {}
        self._numbers: dict[str, int] = {}
        self._ends: list[int] = [offsets[1] for _, _, offsets in columns]
        self._check_sizes()

    def __len__(self) -> int:
        return len(self.names)

    def entry(self, number: int) -> Entry:
        """Return a leaf by its place in the header.

        Raises:
            UnsupportedError: torch does not have its dtype.
        """
        kind = self._kinds[number]
        if kind not in self._specs:
            try:
                self._specs[kind] = spec_of(*kind)
            except UnsupportedError as err:
                raise _named(self.names[number], err) from err
        return Entry(self.names[number], self._specs[kind], self._begins[number])

    def find(self, name: str) -> Entry | None:
        """Return a leaf by its name; None if there is none."""
        if not self._numbers:
            # Two threads may do this at the same time, with the same result.
            self._numbers = {name: number for number, name in enumerate(self.names)}
        number = self._numbers.get(name)
        if number is None:
            return None
        return self.entry(number)

    def all(self) -> list[Entry]:
        """Return all leaves, in the order of the header."""
        return [self.entry(number) for number in range(len(self.names))]

    def _check_sizes(self) -> None:
        """Raise unless each leaf has the bytes that its shape needs."""
        sizes = {kind: self._size_of(kind) for kind in set(self._kinds)}
        for number, (kind, begin, end) in enumerate(zip(self._kinds, self._begins, self._ends, strict=True)):
            if end - begin != sizes[kind]:
                code, shape = kind
                raise damaged(
                    f"leaf {self.names[number]!r} does not have the bytes that its shape needs.",
                    f"{sizes[kind]} for {code} {list(shape)}",
                    f"data_offsets {[begin, end]}",
                )

    def check_cover(self) -> int:
        """Check that the leaves cover the data, one after the other; return the size of the data."""
        places = sorted(zip(self._begins, self._ends, self.names, strict=True))
        at = 0
        for begin, end, name in places:
            if begin != at:
                raise damaged(f"leaf {name!r} overlaps its neighbour or leaves a hole.", f"first byte {at}", str(begin))
            at = end
        return at

    def _size_of(self, kind: tuple[str, tuple[int, ...]]) -> int:
        """Return the bytes of leaves of one dtype and shape."""
        code, shape = kind
        try:
            if code in DTYPES and code in FILE_BITS:
                self._specs[kind] = spec_of(code, shape)
                return self._specs[kind].size_bytes
            if code not in FILE_BITS:
                raise UnsupportedError(
                    f"safetensors does not have the dtype {code!r}.", expected=f"one of {', '.join(FILE_BITS)}"
                )
            # The format has it, and this torch does not: the other leaves can be read.
            bits = math.prod(shape) * FILE_BITS[code]
            if bits % 8:
                raise damaged("the elements do not fill whole bytes.", "a multiple of 8 bits", f"{bits} bits")
        except (CorruptCheckpointError, UnsupportedError) as err:
            raise _named(self.names[self._kinds.index(kind)], err) from err
        return bits // 8


def parse_foreign(raw: bytes) -> tuple[dict[str, str], Entries]:
    """Parse the JSON of any safetensors header: the metadata, and the leaves."""
    text = raw.decode()
    header: Any = _parse_unique(text)
    if not isinstance(header, dict):
        raise damaged("the header is not a JSON object.", got=brief(header))
    if _SURROGATE.search(raw) is not None:
        _check_surrogates(header)
    metadata = header.pop("__metadata__", None)
    # MLX writes null in a file without metadata.
    if metadata is None:
        metadata = {}
    check_text(metadata)
    return metadata, Entries(header)


def check_text(metadata: Any) -> None:
    """Raise unless metadata are a map of strings."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged("the metadata are not a map of strings.", got=brief(metadata))


def _parse_unique(text: str) -> Any:
    """Parse JSON, and refuse a key that an object has twice."""
    # `-0` is an integer for Python, and a fraction for serde.
    whole = _whole if "-0" in text else None
    found = json.loads(text, parse_constant=no_constant, parse_int=whole)
    # If there are as many colons after quotes as keys, none is there twice. This is faster than a check of each object.
    if text.count(_KEY) == _count_keys(found) and not any([loose in text for loose in _LOOSE_KEYS]):
        return found
    return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_int=whole)


def _count_keys(header: Any) -> int:
    """Return the number of keys in a header and in its entries; deeper ones are not counted."""
    if not isinstance(header, dict):
        return 0
    return len(header) + sum([len(fields) for fields in header.values() if type(fields) is dict])


def _whole(text: str) -> int | float:
    if text == "-0":
        return -0.0
    return int(text)


def _check_surrogates(found: Any) -> None:
    stray = find_surrogate([json.dumps(found, ensure_ascii=False)])
    if stray is not None:
        raise damaged("the header has half of a character.", "text that UTF-8 can encode", ascii(stray)[:200])


def _columns(name: str, fields: Any) -> tuple[Any, Any, Any]:
    """Return the dtype, shape and offsets of an entry, which may have further fields."""
    if type(fields) is not dict or not all([field in fields for field in _FIELDS]):
        raise _malformed(name, fields)
    if len(fields) > 3:
        further = [value for field, value in fields.items() if field not in _FIELDS]
        _check_further(name, further)
    return (fields["dtype"], fields["shape"], fields["data_offsets"])


def _check_further(name: str, values: Sequence[Any]) -> None:
    """Raise if an unknown field has a value that serde refuses: too deep, or a number out of range."""
    level = list(values)
    depth = 0
    while level:
        wrong = [value for value in level if isinstance(value, int | float) and not _is_in_range(value)]
        if wrong:
            raise damaged(f"leaf {name!r} has a number out of range.", got=str(wrong[0])[:40])
        containers = [value for value in level if isinstance(value, dict | list)]
        if containers and depth == _MAX_FIELD_DEPTH:
            raise damaged(f"leaf {name!r} has fields nested too deep.", f"at most {_MAX_FIELD_DEPTH} levels")
        level = []
        for value in containers:
            level.extend(value.values() if isinstance(value, dict) else value)
        depth += 1


def _is_in_range(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _check_types(names: Sequence[str], columns: Sequence[tuple[Any, Any, Any]]) -> None:
    """Raise unless all entries have a dtype, a list of sizes and two offsets."""
    for name, (code, shape, offsets) in zip(names, columns, strict=True):
        if type(code) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
            raise _malformed(name, {"dtype": code, "shape": shape, "data_offsets": offsets})
    if _has_sizes(columns):
        return
    for name, (_, shape, offsets) in zip(names, columns, strict=True):
        if not all(map(_is_size, shape)):
            raise damaged(f"leaf {name!r}: the shape is not a list of sizes.", got=brief(shape))
        if not all(map(_is_size, offsets)):
            raise _malformed(name, {"data_offsets": offsets})


def _has_sizes(columns: Sequence[tuple[Any, Any, Any]]) -> bool:
    """Return whether all numbers in shapes and all first offsets are sizes, in passes over all entries."""
    numbers = chain.from_iterable([(*shape, *offsets) for _, shape, offsets in columns])
    types = {type(number) for number in numbers}
    if not types <= {int}:
        return False
    least = min([min(shape, default=0) for _, shape, _ in columns], default=0)
    # The check of the sizes of leaves compares the second offset with the first.
    return least >= 0 and all([offsets[0] >= 0 for _, _, offsets in columns])


# Any: JSON.
def _is_size(number: Any) -> bool:
    return type(number) is int and number >= 0


def _malformed(name: str, fields: Any) -> CorruptCheckpointError:
    return damaged(f"leaf {name!r} is malformed.", "a dtype, a shape and two data_offsets", brief(fields))


def _named(name: str, err: Exception) -> Exception:
    return type(err)(f"leaf {name!r}: {err}")


# -- the tree ---------------------------------------------------------------------------------------------------


def nests(names: Sequence[str]) -> bool:
    """Return whether dotted names can be read as paths in one way: no empty key, no leaf that is also a sub-tree."""
    if any([not name or name[0] == "." or name[-1] == "." or ".." in name for name in names]):
        return False
    if max([name.count(".") for name in names], default=0) >= _MAX_DEPTH:
        return False
    # The names of the nodes, from the deepest up. There are few of them beside the leaves.
    nodes = {name.rpartition(".")[0] for name in names} - {""}
    leaves = set(names)
    while nodes:
        if not nodes.isdisjoint(leaves):
            return False
        nodes = {node.rpartition(".")[0] for node in nodes} - {""}
    return True


def describe(entries: Sequence[Entry], *, is_nested: bool) -> dict[str, Any]:
    """Return the description of the tree of dotted names, or of flat ones, as `encode.outline` writes it."""
    specs: dict[tuple[str, tuple[int, ...]], int] = {}
    # Of each node, by its path, the items by key: the number of a leaf's spec, or None for a sub-tree.
    trees: dict[Path, dict[str, int | None]] = {(): {}}
    for entry in entries:
        path: Path = (entry.name,)
        if is_nested:
            path = tuple(entry.name.split("."))
        _enter_nodes(trees, path[:-1])
        spec = specs.setdefault((entry.spec.code, entry.spec.shape), len(specs))
        trees[path[:-1]][path[-1]] = spec
    order = _depth_first(trees)
    numbers = {path: number for number, path in enumerate(order)}
    nodes: list[dict[str, Any]] = []
    for path in order:
        items: list[Any] = []
        for key, spec in trees[path].items():
            if spec is None:
                items.append({"tree": numbers[(*path, key)]})
            else:
                items.append(spec)
        nodes.append({"keys": list(trees[path]), "items": items})
    return {"specs": [[code, list(shape)] for code, shape in specs], "nodes": nodes, "ties": []}


def _enter_nodes(trees: dict[Path, dict[str, int | None]], path: Path) -> None:
    """Enter a node and those around it, so far as they are missing; keys have the order in which they first come."""
    known = len(path)
    # Names of one node mostly follow each other, so the deepest is looked for first.
    while path[:known] not in trees:
        known -= 1
    for depth in range(known, len(path)):
        trees[path[:depth]][path[depth]] = None
        trees[path[: depth + 1]] = {}


def _depth_first(trees: Mapping[Path, Mapping[str, int | None]]) -> list[Path]:
    """Return the paths of all nodes, each after its parent."""
    order: list[Path] = []
    stack: list[Path] = [()]
    while stack:
        path = stack.pop()
        order.append(path)
        inner = [(*path, key) for key, spec in trees[path].items() if spec is None]
        stack.extend(reversed(inner))
    return order
