"""Non-tensor data as a person reads them: plain objects without their encoding, and the places where two differ."""

import os
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from torch import Size, Tensor

from tdfunc.cli.output import MAX_CELL
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Path
from tdfunc.storage.tree.decode import MALFORMED
from tdfunc.storage.tree.objects import PlainObject, unpack

# In place of a value that one side does not have.
ABSENT = "nothing"
# The characters before the first difference that are shown.
_CONTEXT = 20


class _Elsewhere:
    """A part of a plain object that is a leaf or a tree."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<{self.what}>"


def read_object(node: PlainObject) -> NonTensorBase:
    """Return the plain objects of a node, with a text in place of each tensor, array and tree."""
    own = None
    if node._static is not None:
        own = node._static.own
    parts: dict[str, NonTensorData] = {}
    for key, part in node._data.items():
        is_tensor = isinstance(part, NonTensorData) and isinstance(part.data, Tensor)
        parts[key] = NonTensorData(_Elsewhere("tensor" if is_tensor else "tree"), Size(()))
    try:
        found = unpack(parts, own, node._batch_size)
    except MALFORMED:
        # A file may contain anything there; a copy keeps it as it is.
        return NonTensorData(own)
    # One object has no batch here: the same is shown for any size.
    return NonTensorData(found.data) if isinstance(found, NonTensorData) else found


def plain(value: NonTensorBase) -> Any:
    """Return non-tensor data as in JSON: one value for a batch of any size is there once."""
    if isinstance(value, NonTensorData):
        return value.data
    return value.tolist()


def described(value: NonTensorBase | None) -> Any:
    """Return non-tensor data to compare and print: with its shape, because only that may differ."""
    if value is None:
        return ABSENT
    if value.shape:
        return {"shape": list(value.shape), "value": plain(value)}
    return plain(value)


def differing(a: Any, b: Any, at: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the places inside of two values that differ, with the part of each."""
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b) and a.keys() == b.keys():
            yield at, f"keys {list(a)}", f"keys {list(b)}"
        for key in dict.fromkeys([*a, *b]):
            yield from differing(a.get(key, ABSENT), b.get(key, ABSENT), (*at, str(key)))
    elif isinstance(a, list | tuple) and type(a) is type(b):
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=ABSENT)):
            yield from differing(x, y, (*at, str(i)))
    # As strings, since True == 1 == 1.0.
    elif repr(a) != repr(b):
        yield at, a, b


def differing_values(a: NonTensorBase | None, b: NonTensorBase | None) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the places where non-tensor data of two checkpoints differ; a batch is compared as a whole."""
    x = described(a)
    y = described(b)
    has_batch = any(side is not None and bool(side.shape) for side in (a, b))
    if not has_batch:
        yield from differing(x, y)
    elif repr(x) != repr(y):
        yield (), x, y


def texts_apart(a: str, b: str) -> tuple[str, str]:
    """Return two texts without most of their common beginning, if they would be cut before they differ."""
    # It compares characters, not the parts of paths.
    common = len(os.path.commonprefix([a, b]))
    if a == b or common < MAX_CELL - _CONTEXT:
        return a, b
    begin = max(0, common - _CONTEXT)
    return f"...{a[begin:]}", f"...{b[begin:]}"
