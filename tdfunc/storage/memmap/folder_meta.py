"""What a `meta.json` says, part by part: each is checked before anything is made of it."""

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from torch import Size

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.shapes import as_names
from tdfunc.core.types import Names, Path, Ties
from tdfunc.storage.memmap.folder_plan import VERSION
from tdfunc.storage.safetensors.format import find_surrogate, first_twice, is_countable

_TOO_LARGE = 2**63
_NO_BATCH = Size(())


def parse_meta(raw: bytes, what: str) -> dict[str, Any]:
    """Read the JSON of a meta.json."""
    try:
        meta = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    # A nesting too deep, an int of thousands of digits, no UTF-8, no JSON.
    except (RecursionError, ValueError) as err:
        raise malformed_meta(what, "JSON", f"{type(err).__name__}: {err}"[:300]) from err
    if type(meta) is not dict:
        raise malformed_meta(what, "an object", repr(meta)[:100])
    if b"\\u" in raw and (half := find_surrogate(_keys(meta))) is not None:
        raise malformed_meta(what, "keys of whole characters", repr(half)[:100])
    return meta


def own_fields(meta: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return what tdfunc wrote into a meta.json; None where tensordict did it."""
    own = meta.get("")
    if own is None:
        return None
    if type(own) is not dict or "tdfunc" not in own:
        raise UnsupportedError(
            f"{where(path)} has an entry with an empty key.",
            expected="a key",
            hint="load it with tensordict and rename the key.",
        )
    if own["tdfunc"] != VERSION:
        raise UnsupportedError(
            f"{where(path)} has another format version.",
            expected=str(VERSION),
            got=repr(own["tdfunc"])[:100],
            hint="install the tdfunc that wrote it, or a newer one.",
        )
    return own


def in_order(entries: dict[str, Any], special: dict[str, Any], own: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the entries, those of special keys among them, in the order of the tree."""
    if not special:
        return entries
    order = own.get("order")
    both = {**entries, **special}
    if len(both) != len(entries) + len(special) or "" in both:
        raise malformed_meta(what, "distinct keys", "one twice")
    if type(order) is not list or any(type(key) is not str for key in order) or sorted(order) != sorted(both):
        raise malformed_meta(what, f"the order of the keys {list(both)}"[:300], repr(order)[:300])
    return {key: both[key] for key in order}


def inline_value(entry: dict[str, Any], size: Size, what: str) -> NonTensorBase:
    """Return non-tensor data that are in an entry itself."""
    if "value" in entry and "values" in entry:
        raise malformed_meta(what, "a value or values", ", ".join(map(repr, entry)))
    if "value" in entry:
        return NonTensorData(entry["value"], size)
    values = entry["values"]
    if type(values) is not list or len(values) != math.prod(size):
        raise malformed_meta(what, f"values for a batch of {list(size)}", repr(values)[:100])
    return stack_of(values, size)


def stack_of(flat: Sequence[Any], shape: Size) -> NonTensorBase:
    """Return values, one for each element of a shape."""
    array = np.empty(len(flat), dtype=object)
    for i, value in enumerate(flat):
        array[i] = value
    return NonTensorStack._wrap(array.reshape(shape))


def unnested(data: Any, dims: int, what: str) -> tuple[Size, list[Any]]:
    """Return the shape and values of lists nested `dims` deep."""
    flat: list[Any] = [data]
    shape: list[int] = []
    for _ in range(dims):
        lengths = {len(part) if type(part) is list else -1 for part in flat}
        if len(lengths) > 1 or -1 in lengths:
            raise malformed_meta(what, f"lists nested {dims} deep, of equal lengths", repr(data)[:200])
        shape.append(lengths.pop() if lengths else 0)
        flat = [value for part in flat for value in part]
    return Size(shape), flat


def object_in(own: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """Return an object among our own fields; an empty one where there is none."""
    found = own.get(name, {})
    if type(found) is not dict:
        raise malformed_meta(what, f"an object under {name!r}", repr(found)[:100])
    return found


def size_of(sizes: Any, what: str, batch: Size = _NO_BATCH) -> Size:
    """Check a list of sizes, which starts with the batch size."""
    if type(sizes) is not list or any(type(size) is not int or not 0 <= size < _TOO_LARGE for size in sizes):
        raise malformed_meta(what, "a list of sizes", repr(sizes)[:100])
    if not is_countable(sizes):
        raise malformed_meta(what, "elements that can be counted in 64 bits", repr(sizes)[:100])
    if tuple(sizes[: len(batch)]) != batch:
        raise malformed_meta(what, f"shapes that start with the batch size {list(batch)}", repr(sizes)[:100])
    return Size(sizes)


def names_of(own: dict[str, Any], what: str) -> Names | None:
    """Return the recorded names, whose number is still to be checked."""
    names = own.get("names")
    if names is None:
        return None
    if type(names) is not list or any(name is not None and type(name) is not str for name in names):
        raise malformed_meta(what, "names of dimensions", repr(names)[:100])
    try:
        as_names(names, len(names))
    except (TypeError, ValueError) as err:
        raise malformed_meta(what, "names of dimensions", repr(names)[:100]) from err
    return tuple(names)


def fit_names(names: Names | None, ndim: int, what: str) -> Names | None:
    """Return names, as many as there are dimensions."""
    if names is not None and len(names) != ndim:
        raise malformed_meta(what, f"{ndim} names", repr(names)[:100])
    return as_names(names, ndim)


def ties_of(own: dict[str, Any], what: str) -> Ties:
    """Return the groups of tied paths."""
    groups = own.get("ties", [])
    if type(groups) is not list:
        raise malformed_meta(what, "a list of ties", repr(groups)[:100])
    seen: set[Path] = set()
    for group in groups:
        if type(group) is not list or len(group) < 2:
            raise malformed_meta(what, "ties of two paths or more", repr(group)[:100])
        for path in group:
            if type(path) is not list or not path or any(type(key) is not str or not key for key in path):
                raise malformed_meta(what, "paths as lists of keys", repr(path)[:100])
            if tuple(path) in seen:
                raise malformed_meta(what, "each path in one tie", repr(path)[:100])
            seen.add(tuple(path))
    return tuple(tuple(tuple(path) for path in group) for group in groups)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"the key {first_twice(key for key, _ in pairs)!r} is there twice")
    return result


def _keys(meta: dict[str, Any]) -> list[str]:
    """Return all that may become a name of a file."""
    own = meta.get("")
    special = own.get("special") if type(own) is dict else None
    return [*meta, *(special if type(special) is dict else ())]


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def join_name(folder: str, name: str) -> str:
    """Return a name inside a folder; that of the root is empty."""
    return f"{folder}/{name}" if folder else name


def where(path: Path) -> str:
    """Return how messages name a node."""
    return repr(dotted(path)) if path else "the root"


def malformed_meta(what: str, expected: str, got: str) -> CorruptCheckpointError:
    """Build the error for a meta.json that says what it cannot."""
    return CorruptCheckpointError(f"{what} is malformed.", expected=expected, got=got[:400])
