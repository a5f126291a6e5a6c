"""Trees and leaves as text: counts and sizes, the facts of a leaf, totals of a tree, and the repr.

The functions that describe leaves never raise: a leaf may be any object, and any class of tensor.
"""

import reprlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.shapes import shape_of
from tdfunc.core.types import Kind, Path
from tdfunc.ops.base.cast import all_shared, is_shared

# The methods that return the tensors of a sparse leaf.
_ROWS = ("values", "crow_indices", "col_indices")
_COLUMNS = ("values", "ccol_indices", "row_indices")
_STORED = {
    torch.sparse_coo: ("_values", "_indices"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


class Facts(NamedTuple):
    """The printable attributes of a leaf; "" and None where an attribute is unavailable."""

    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    elements: int | None = None
    size_bytes: int | None = None
    # The layout unless strided; `frozen`, `requires grad`.
    notes: tuple[str, ...] = ()


def printable(text: str, limit: int | None = 120) -> str:
    """Return text on one line, with control characters escaped and no more than `limit` characters."""
    if limit is not None and len(text) > limit:
        keep = limit // 2
        text = f"{text[:keep]}...{text[-keep // 2 :]} ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


def count_text(n: int, word: str) -> str:
    """Return `1 leaf`, `2 leaves`."""
    plural = {"leaf": "leaves", "entry": "entries"}.get(word, f"{word}s")
    if n == 1:
        return f"1 {word}"
    return f"{n:,} {plural}"


def bytes_text(size: int) -> str:
    """Return a size in the unit that gives it three digits."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    if value >= 999.5:
        digits = f"{value:.0f}"
    else:
        digits = f"{value:#.3g}".removesuffix(".")
    return f"{digits} {unit}"


def kind_text(kind: Kind | None) -> str:
    """Return a kind in words."""
    if kind is None:
        return ""
    return kind.value.replace("_", " ").replace("non persistent", "buffer, not saved")


def facts_of(leaf: Any) -> Facts:
    """Describe a node that is not a tree: a tensor, the tensors of a lazy stack, non-tensor data, any object."""
    parts = list(flat(leaf))
    if not parts or not all([isinstance(part, Tensor) for part in parts]):
        return Facts(leaf_type(leaf))
    # The class of a tensor may raise from anything.
    try:
        first = parts[0]
        shape = _shape_text(parts)
        if isinstance(leaf, tuple):
            shape = f"{len(parts):,} x {shape}"
        elements, size_bytes = _amount(parts)
        return Facts(
            type(first).__name__,
            shape,
            dtype=_agreed({str(part.dtype).removeprefix("torch.") for part in parts}),
            device=_agreed({str(part.device) for part in parts}),
            elements=elements,
            size_bytes=size_bytes,
            notes=_notes(first),
        )
    except Exception:
        return Facts(leaf_type(leaf))


def _notes(leaf: Tensor) -> tuple[str, ...]:
    """Return the layout of a tensor unless it is strided, and `frozen` or `requires grad` where that is unusual."""
    notes: list[str] = []
    if leaf.layout is not torch.strided:
        notes.append(str(leaf.layout).removeprefix("torch.").replace("_", " "))
    is_parameter = isinstance(leaf, Parameter)
    if is_parameter and not leaf.requires_grad:
        notes.append("frozen")
    elif leaf.requires_grad and not is_parameter:
        notes.append("requires grad")
    return tuple(notes)


def leaf_type(leaf: Any) -> str:
    """Return the class of a leaf; of non-tensor data the class of its value, or `list` where each row has one."""
    if isinstance(leaf, NonTensorBase):
        if isinstance(leaf, NonTensorData):
            return type(leaf.data).__name__
        return "list"
    return type(leaf).__name__


def flat(leaf: Any) -> Iterator[Any]:
    """Yield the tensors of a leaf: several in a lazy stack."""
    if not isinstance(leaf, tuple):
        yield leaf
        return
    items: tuple[Any, ...] = leaf
    for item in items:
        yield from flat(item)


def stored_bytes(leaf: Tensor) -> int:
    """Return the bytes that the elements take; of a sparse tensor those that it stores, its indices among them."""
    names = _STORED.get(leaf.layout)
    if names is None:
        parts = [leaf]
    else:
        parts = [getattr(leaf, name)() for name in names]
    return sum([part.numel() * part.element_size() for part in parts])


def _shape_text(parts: list[Tensor]) -> str:
    """Return the common shape: sizes that differ are -1, symbolic ones have their names."""
    shapes = [shape_of(part) for part in parts]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return "not initialised"
    if len(set(map(len, known))) > 1:
        return "shapes differ"
    is_nested = parts[0].is_nested

    def size_text(size: Any) -> str:
        # The sizes of a jagged nested tensor are symbols without a name.
        if is_nested and type(size) is not int:
            return "-1"
        return str(size)

    sizes = [_agreed(set(map(size_text, column)), "-1") for column in zip(*known, strict=True)]
    return f"[{', '.join(sizes)}]"


def _agreed(values: set[str], other: str = "differ") -> str:
    if len(values) == 1:
        return values.pop()
    return other


def _amount(parts: list[Tensor]) -> tuple[int | None, int | None]:
    """Return the number of elements and the bytes that they take; None where torch has neither."""
    try:
        elements = sum([part.numel() for part in parts])
        size = sum(map(stored_bytes, parts))
        # Traced sizes are symbols.
        if type(elements) is int:
            return elements, size
    except Exception:
        pass
    return None, None


# Of a leaf in a tree's repr: a list of a data set's names would fill the screen.
_MAX_CHARACTERS = 3_000
# Of non-tensor data with a value for each row.
_SHOWN_VALUES = 6
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 6


def value_text(leaf: Any) -> str:
    """Return the value of non-tensor data, or any object, on one short line."""
    if isinstance(leaf, NonTensorStack):
        shown = [_short_repr(value) for value in islice(leaf._array.flat, _SHOWN_VALUES)]
        if leaf._array.size > _SHOWN_VALUES:
            shown.append("...")
        return f"{list(leaf.shape)} values: {', '.join(shown)}"
    return _short_repr(leaf.data if isinstance(leaf, NonTensorData) else leaf)


def repr_of(value: Any, write: Callable[[Any], str] = repr) -> str:
    """Return `repr(value)`, or that it raises: an object's own may."""
    try:
        return write(value)
    except Exception as err:
        inner = value.data if isinstance(value, NonTensorData) else value
        return f"<{type(inner).__name__}: its repr raises {type(err).__name__}>"


def _short_repr(value: Any) -> str:
    return printable(repr_of(value, _short.repr), 200)


def totals(tree: TensorCollection, limit: int) -> tuple[int, int, bool]:
    """Return the leaves of a tree, their bytes, and whether `limit` nodes were enough; a tensor counts once."""
    seen: set[int] = set()
    leaves = 0
    size_bytes = 0
    visited = 0
    nodes = [tree]
    while nodes:
        # By storage, not by key: a lazy stack's trees one by one.
        for child in nodes.pop()._data.values():
            if isinstance(child, TensorCollection):
                nodes.append(child)
            visited += 1
            if isinstance(child, Tensor) and id(child) not in seen:
                seen.add(id(child))
                leaves += 1
                _, child_bytes = _amount([child])
                size_bytes += child_bytes or 0
            if visited > limit:
                return leaves, size_bytes, False
    return leaves, size_bytes, True


def aliases(tree: TensorCollection) -> dict[Path, list[Path]]:
    """Return for each path of a tied tensor the other paths, the first one first."""
    found: dict[Path, list[Path]] = {}
    for group in tree._ties:
        for path in group:
            found[path] = [other for other in group if other != path]
    return found


def describe_leaf(leaf: Any) -> str:
    """Return the one-line form of a leaf in the repr of a tree."""
    if isinstance(leaf, tuple) and all([isinstance(part, Tensor) for part in flat(leaf)]):
        facts = facts_of(leaf)
        return f"{facts.type}({facts.shape}, {facts.dtype}, {facts.device})"
    if not isinstance(leaf, Tensor):
        return printable(repr_of(leaf), _MAX_CHARACTERS)
    name = type(leaf).__name__
    shape = shape_of(leaf)
    if shape is None:
        return f"{name}(uninitialized, device={leaf.device}, dtype={leaf.dtype})"
    return f"{name}(shape={shape}, device={leaf.device}, dtype={leaf.dtype}, is_shared={is_shared(leaf)})"


def tree_repr(tree: TensorCollection, indent: str = "") -> str:
    """Return the multi-line form of a tree, keys sorted."""
    lines: list[str] = []
    for key in sorted(tree._keys()):
        node = tree._get(key)
        # A class with its own repr keeps it; the plain form is called directly, to save stack.
        if not isinstance(node, TensorCollection):
            text = describe_leaf(node)
        elif type(node).__repr__ is TensorCollection._open.__repr__:
            text = tree_repr(node, indent=f"{indent}        ")
        else:
            text = repr(node).replace("\n", f"\n{indent}        ")
        lines.append(f"{indent}        {printable(key, None)}: {text}")
    fields = ",\n".join(lines) or f"{indent}    "
    names = ""
    if tree._names is not None:
        names = f",\n{indent}    names={list(tree._names)}"
    return (
        f"{type(tree).__name__}(\n{indent}    fields={{\n{fields}}},\n{indent}    batch_size={tree._batch_size},\n"
        f"{indent}    device={tree._device},\n{indent}    is_shared={all_shared(tree)}{names})"
    )
