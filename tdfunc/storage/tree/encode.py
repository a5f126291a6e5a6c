"""A tree to JSON: nodes in a flat list, leaves by dtype and shape, ties once, non-tensor data as values.

The grammar is in `docs/storage.md`; `decode.py` reads it. A flat list, so that depth meets no recursion limit.
"""

import json
import math
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, TieError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.storage.safetensors.format import DTYPES, Spec, find_surrogate, spec_for

KIND_FLAGS = {Kind.PARAMETER: "p", Kind.BUFFER: "b", Kind.NON_PERSISTENT: "n", Kind.EXTRA_STATE: "x"}
IS_PARAMETER, REQUIRES_GRAD, IS_VALUE = "P", "g", "v"
# Each node on the way to a tied leaf keeps the group's paths below it, so memory grows with the depth squared.
MAX_TIE_KEYS = 4_000_000
_MAX_VALUE_DEPTH = 200
_STRIDED = torch.strided
# Python may be told to read ints of no more than 640 digits.
_MAX_INT_BITS = 2048

# The paths of tied leaves below a node: key -> deeper marks, or (group, rank in the group).
Marks: TypeAlias = "dict[str, Marks | tuple[int, int]] | None"


class Outline(NamedTuple):
    """A tree without its values: its JSON, and its leaves in tree order (depth first, a node's own leaves first)."""

    # None for a part of the leaves, whose tree is elsewhere.
    text: str | None
    # As they stand in the header: dotted paths as JSON strings.
    names: list[str]
    specs: list[Spec]
    leaves: list[Tensor]


# -- writing ----------------------------------------------------------------------------------------------------


class _Pending(NamedTuple):
    """A node that is still to be written, and where its number goes in its parent."""

    tree: TensorCollection
    prefix: str
    parent: TensorCollection | None
    ties: Ties
    marks: Marks
    items: list[str]
    place: int


class _Writer:
    """What accumulates while the nodes of one tree are written."""

    def __init__(self, values: bool) -> None:
        self.values = values
        self.names: list[str] = []
        self.specs: list[Spec] = []
        self.leaves: list[Tensor] = []
        # safetensors keeps this name for itself.
        self.taken = {'"__metadata__"'}
        self.known: dict[tuple[torch.dtype, Size], int] = {}
        self.table: list[Spec] = []
        self.nodes: list[Callable[[], str]] = []
        self.refs: list[dict[int, str]] = []
        self.first: dict[int, tuple[str, Any]] = {}
        self.tied: list[tuple[int, str, Any]] = []


def outline(tree: TensorCollection, *, values: bool = True) -> Outline:
    """Write a tree as JSON and list its leaves; without `values` these need not have any (on the meta device, say).

    Raises:
        UnsupportedError: A leaf, value or key that a file cannot hold unchanged; the message names it.
    """
    writer = _Writer(values)
    ties = tree._ties
    check_tie_size(sum(len(path) ** 2 for group in ties for path in group), UnsupportedError)
    writer.refs = [{} for _ in ties]
    root: list[str] = [""]
    stack = [_Pending(tree, "", None, ties, _marks(ties), root, 0)]
    while stack:
        stack.extend(reversed(_write_node(writer, stack.pop())))
    _check_tied(writer, ties)
    specs = ",".join([f'["{s.code}",{_numbers(s.shape)}]' for s in writer.table])
    nodes = ",".join([node() for node in writer.nodes])
    groups = ",".join(["[" + ",".join([refs[i] for i in range(len(refs))]) + "]" for refs in writer.refs])
    text = f'{{"specs":[{specs}],"nodes":[{nodes}],"ties":[{groups}]}}'
    _check_encodable(text)
    return Outline(text, writer.names, writer.specs, writer.leaves)


def _write_node(writer: _Writer, node: _Pending) -> list[_Pending]:
    """Write one node with its own leaves; return its sub-trees."""
    tree, number = node.tree, len(writer.nodes)
    keys: list[str] = []
    items: list[str] = []
    children: list[_Pending] = []
    below = restrict(node.ties)
    if node.parent is not None:
        node.items[node.place] = f'{{"tree":{number}}}'
    fields = _node_fields(node)
    writer.nodes.append(lambda: f'{{{fields}"keys":[{",".join(keys)}],"items":[{",".join(items)}]}}')
    kinds = tree._kinds
    # A class that stores its leaves in another form (a lazy stack) says itself what its batch size is.
    size = Size(()) if tree._static is not None and tree._static.own is not None else tree._batch_size
    for key, value in tree._data.items():
        quoted = quote(key)
        keys.append(quoted)
        name = f'"{node.prefix}{quoted[1:-1]}"'
        flags = KIND_FLAGS[kinds[key]] if key in kinds else ""
        mark = node.marks.get(key) if node.marks is not None else None
        if isinstance(mark, tuple):
            writer.refs[mark[0]][mark[1]] = f"[{number},{quoted}]"
            if mark[1]:
                writer.tied.append((mark[0], name, value))
                items.append(f'{{"tie":{mark[0]}{_flags_field(flags)}}}')
                continue
            writer.first[mark[0]] = (name, value)
        if isinstance(value, Tensor):
            items.append(_tensor(writer, name, value, size, flags))
        elif isinstance(value, TensorCollection):
            deeper = mark if isinstance(mark, dict) else None
            children.append(_Pending(value, f"{name[1:-1]}.", tree, below.get(key, ()), deeper, items, len(items)))
            items.append("")
        elif isinstance(value, NonTensorBase):
            items.append(_nontensor(writer, name, value, size, flags))
        else:
            hint = "wrap it: NonTensorData(value)."
            raise _refusal(name, f"a {type(value).__name__}", "a tensor, tree or non-tensor data", hint)
    return children


def _node_fields(node: _Pending) -> str:
    """Write what a node says of itself, less what it shares with its parent."""
    tree, parent = node.tree, node.parent
    fields: dict[str, Any] = {}
    if tree._batch_size != (parent._batch_size if parent is not None else ()):
        fields["size"] = list(tree._batch_size)
    if tree._device != (parent._device if parent is not None else None):
        fields["device"] = str(tree._device) if tree._device is not None else None
    if tree._names is not None:
        fields["names"] = list(tree._names)
    if type(tree) is not TensorCollection._open:
        # What else a stack of typed trees is follows from its trees.
        cls = TensorCollection._lazy if isinstance(tree, TensorCollection._lazy) else type(tree)
        fields["class"] = f"{cls.__module__}:{cls.__qualname__}"
    own = tree._static.own if tree._static is not None else None
    if own is not None:
        _check_value(own, node.prefix or '"(the tree)"')
        fields["own"] = own
    if tree._ties != node.ties:
        fields["ties"] = _own_order(tree._ties, node)
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[1:-1]
    return text + "," if text else ""


def _tensor(writer: _Writer, name: str, leaf: Tensor, batch: Size, flags: str, shape: str = "") -> str:
    """Enter a leaf in the file and write its item: a spec, then flags, name and shape as far as there are any."""
    kind = type(leaf)
    if kind is nn.Parameter:
        flags += IS_PARAMETER
    elif kind is not Tensor:
        hint = "save a plain tensor of it: .full_tensor(), .as_subclass(torch.Tensor), or leave the transformation."
        if leaf.layout is torch.jagged:
            hint = "save its parts as leaves, .values() and .offsets(), or .to_padded_tensor(...)."
        raise _refusal(name, f"a {kind.__name__}", "a plain tensor or Parameter", hint)
    dtype, size = leaf.dtype, leaf.shape
    number = writer.known.get((dtype, size))
    if number is None:
        number = _new_spec(writer, name, dtype, size)
    if batch and size[: len(batch)] != batch:
        raise _misfit(name, batch, size)
    if leaf.layout is not _STRIDED or (leaf.is_meta and writer.values):
        what = "on the meta device" if leaf.is_meta else f"of layout {leaf.layout}"
        hint = "materialize it first." if leaf.is_meta else "save .to_dense(), or its parts as leaves."
        raise _refusal(name, f"a tensor {what}", "a dense tensor with values", hint)
    if leaf.requires_grad:
        flags += REQUIRES_GRAD
    given = "null" if shape else ""
    if name in writer.taken:
        name = given = _free_name(name, writer.taken)
    writer.taken.add(name)
    writer.names.append(name)
    writer.specs.append(writer.table[number])
    writer.leaves.append(leaf)
    if not flags and not given:
        return str(number)
    more = ",".join(filter(None, (given, shape)))
    return f'[{number},"{flags}",{more}]' if more else f'[{number},"{flags}"]'


def _free_name(name: str, taken: set[str]) -> str:
    """Number a name that is taken: two keys may contain dots, and the format itself has a name."""
    i = 1
    while f'{name[:-1]}~{i}"' in taken:
        i += 1
    return f'{name[:-1]}~{i}"'


def _misfit(name: str, batch: Size, shape: Size) -> BatchSizeError:
    return BatchSizeError(
        f"save: leaf {name} does not start with the batch size; nothing was written.",
        expected=str(list(batch)),
        got=str(list(shape)),
    )


def _new_spec(writer: _Writer, name: str, dtype: torch.dtype, size: Size) -> int:
    spec = spec_for(dtype, size)
    if spec is None:
        got = f"{dtype} of shape {list(size)}"
        hint = (
            "torch.view_as_real gives a real tensor of it."
            if dtype.is_complex
            else "convert it to a dtype of the list."
        )
        raise _refusal(name, got, f"one of {', '.join(map(str, DTYPES.values()))}, which safetensors can hold", hint)
    writer.known[dtype, size] = len(writer.table)
    writer.table.append(spec)
    return len(writer.table) - 1


def _nontensor(writer: _Writer, name: str, value: NonTensorBase, batch: Size, flags: str) -> str:
    shape = value.shape
    if shape[: len(batch)] != batch:
        raise _misfit(name, batch, shape)
    own_shape = _numbers(shape) if shape != batch else ""
    if isinstance(value, NonTensorData) and isinstance(value.data, Tensor):
        return _tensor(writer, name, value.data, Size(()), flags + IS_VALUE, own_shape)
    tail = (f',"shape":{own_shape}' if own_shape else "") + _flags_field(flags) + "}"
    if isinstance(value, NonTensorData):
        return f'{{"value":{_json(value.data, name)}{tail}'
    assert isinstance(value, NonTensorStack)
    return f'{{"values":{_json(value._array.ravel().tolist(), name)}{tail}'


def _flags_field(flags: str) -> str:
    return f',"flags":"{flags}"' if flags else ""


def _numbers(values: Iterable[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _json(value: Any, name: str) -> str:
    _check_value(value, name)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _check_value(value: Any, name: str) -> None:
    """Raise unless a value comes back from JSON as it is: exact types, finite numbers, str keys."""
    level = [value]
    for _ in range(_MAX_VALUE_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if type(item) is list:
                deeper.extend(item)
            elif type(item) is dict and all(type(key) is str for key in item):
                deeper.extend(item.values())
            elif not _is_plain(item):
                raise _refusal(
                    name,
                    # Python refuses to print an int of thousands of digits.
                    f"an int of {item.bit_length()} bits" if type(item) is int else f"{item!r} ({type(item).__name__})",
                    "str, bool, None, finite numbers, lists, and dicts with str keys: what JSON gives back as it was",
                    "convert it to these, or leave the key out: td.delete(key).",
                )
        if not deeper:
            return
        level = deeper
    raise _refusal(
        name, f"lists and dicts nested over {_MAX_VALUE_DEPTH} deep", "a shallower value", "store it as a str."
    )


def _is_plain(item: Any) -> bool:
    if type(item) is float:
        return math.isfinite(item)
    return item is None or type(item) in (str, bool) or (type(item) is int and item.bit_length() <= _MAX_INT_BITS)


def _refusal(name: str, got: str, expected: str, hint: str) -> UnsupportedError:
    return UnsupportedError(
        f"save: leaf {name} cannot be stored; nothing was written.", expected=expected, got=got, hint=hint
    )


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise UnsupportedError(
            "save: a key or value is no valid Unicode; nothing was written.",
            expected="text that UTF-8 can encode",
            got=ascii(find_surrogate(text.split('"'))),
            hint="a lone surrogate is half of a character: rename the key, or repair the value.",
        ) from err


# -- ties -------------------------------------------------------------------------------------------------------


def _marks(ties: Ties) -> Marks:
    """Arrange the paths of all groups by key, so that a walk down the tree finds them."""
    marks: dict[str, Any] = {}
    for group, paths in enumerate(ties):
        for rank, path in enumerate(paths):
            at: Any = marks
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = (group, rank)
    return marks or None


def _check_tied(writer: _Writer, ties: Ties) -> None:
    """Raise if the record of ties is not what the tree holds: saving one of the leaves would lose the other."""
    hint = "td.untie(path) separates them."
    for group, refs in zip(ties, writer.refs, strict=True):
        if len(refs) != len(group):
            raise TieError(f"save: no leaf at one of the tied paths {', '.join(map(dotted, group))}.", hint=hint)
    for group, name, leaf in writer.tied:
        first, value = writer.first[group]
        if leaf is not value or not isinstance(leaf, Tensor):
            raise TieError(f"save: {name} is tied to {first}, but holds another value.", hint=hint)


def restrict(ties: Ties) -> dict[str, Ties]:
    """Return the groups inside each child, relative to it: `under` for all keys in one pass."""
    result: dict[str, list[tuple[Path, ...]]] = {}
    for group in ties:
        inner: dict[str, list[Path]] = {}
        for path in group:
            if len(path) > 1:
                inner.setdefault(path[0], []).append(path[1:])
        for key, paths in inner.items():
            if len(paths) > 1:
                result.setdefault(key, []).append(tuple(paths))
    return {key: tuple(groups) for key, groups in result.items()}


def _own_order(ties: Ties, node: _Pending) -> list[list[Any]]:
    """Write a node's groups where their order is not that of its parent: [group, ranks]."""
    result: list[list[Any]] = []
    for group in ties:
        found = [_find(node.marks, path) for path in group]
        if None in found or len({mark[0] for mark in found if mark}) > 1:
            shown = ", ".join(dotted(path) for path in group)
            raise TieError(
                f"save: the tree does not know that {shown} are tied in its sub-tree {node.prefix!r}.",
                hint="td.untie(path).",
            )
        result.append([found[0][0], [mark[1] for mark in found if mark]])  # pyright: ignore[reportOptionalSubscript]
    return result


def _find(marks: Marks, path: Path) -> tuple[int, int] | None:
    at: Any = marks
    for key in path:
        at = at.get(key) if isinstance(at, dict) else None
    return at if isinstance(at, tuple) else None


def check_tie_size(keys: int, kind: type[Exception]) -> None:
    """Raise for tied leaves so deep that their paths would fill the memory."""
    if keys > MAX_TIE_KEYS:
        raise error(
            kind,
            "The tied leaves lie too deep.",
            expected=f"at most {MAX_TIE_KEYS} keys (path lengths squared)",
            got=str(keys),
            hint="td.untie(path).",
        )
