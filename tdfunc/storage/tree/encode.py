"""A tree to JSON: nodes in a flat list, leaves by dtype and shape, ties once, non-tensor data as values.

The grammar is in `docs/formats.md`; `decode.py` reads it. A flat list, so that depth meets no recursion limit.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import is_fake
from tdfunc.core.errors import BatchSizeError, CorruptCheckpointError, TieError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.storage.disk.ranks import is_sharded
from tdfunc.storage.tree.objects import OBJECT, PlainObject, is_json, pack, pack_each
from tdfunc.storage.tree.specs import FILE_CODES, Spec, find_surrogate, spec_for

KIND_FLAGS = {Kind.PARAMETER: "p", Kind.BUFFER: "b", Kind.NON_PERSISTENT: "n", Kind.EXTRA_STATE: "x"}
IS_PARAMETER = "P"
REQUIRES_GRAD = "g"
IS_VALUE = "v"
# Each node on the way to a tied leaf keeps the group's paths below it, so memory grows with the depth squared.
MAX_TIE_KEYS = 4_000_000
_STRIDED = torch.strided


class _Mark(NamedTuple):
    """A path of a tied leaf: the number of its group, and its place in the group."""

    group: int
    rank: int


class _Tied(NamedTuple):
    """The value at a tied path."""

    name: str
    value: Any


# The paths of tied leaves below a node by their keys.
Marks: TypeAlias = "dict[str, Marks | _Mark] | None"


class Outline(NamedTuple):
    """A tree without its values: its JSON, and its leaves in tree order (depth first, a node's own leaves first)."""

    # None for a part of the leaves, whose tree is elsewhere.
    text: str | None
    # As in the header: dotted paths as JSON strings.
    names: list[str]
    specs: list[Spec]
    leaves: list[Tensor]


class _Pending(NamedTuple):
    """A node that is still to be written, and where its number goes in its parent."""

    tree: TensorCollection
    prefix: str
    parent: TensorCollection | None
    ties: Ties
    marks: Marks
    items: list[str]
    place: int
    # The flags of its item: the kind of a plain object.
    flags: str = ""


def outline(
    tree: TensorCollection,
    *,
    call: str = "save",
    values: bool = True,
    codes: Mapping[torch.dtype, str] = FILE_CODES,
    named: bool = True,
) -> Outline:
    """Write a tree as JSON and list its leaves.

    Args:
        tree: The tree.
        call: The name of the call for messages.
        values: Require values of the leaves; otherwise they may be on the meta device.
        codes: The dtypes that the format can hold.
        named: Give each leaf its own name, as one file requires.

    Raises:
        UnsupportedError: A leaf, value or key that the format cannot hold unchanged; the message names it.
        BatchSizeError: A leaf does not start with the batch size.
        TieError: Tied paths hold different leaves.
    """
    if is_fake(None):
        raise UnsupportedError(
            f"{call}: the tensors have no values.", got="FakeTensorMode", hint=f"{call} outside of this mode."
        )
    return _Writer(call, values, codes, named).outline(tree)


class _Writer:
    """Accumulates the nodes and leaves of one tree."""

    def __init__(self, call: str, values: bool, codes: Mapping[torch.dtype, str], named: bool) -> None:
        self.call = call
        self.values = values
        self.codes = codes
        self.named = named
        self.names: list[str] = []
        self.specs: list[Spec] = []
        self.leaves: list[Tensor] = []
        # safetensors keeps this name for itself.
        self.taken = {'"__metadata__"'}
        self.known: dict[tuple[torch.dtype, Size], int] = {}
        self.table: list[Spec] = []
        self.nodes: list[Callable[[], str]] = []
        self.ties: list[tuple[Path, ...]] = []
        self.refs: list[dict[int, str]] = []
        # By group: the value at its first path, which is written, and the values at its other paths.
        self.first: dict[int, _Tied] = {}
        self.others: list[tuple[int, _Tied]] = []

    def outline(self, tree: TensorCollection) -> Outline:
        root: list[str] = [""]
        stack = [_Pending(tree, "", None, tree._ties, self._mark(tree._ties), root, 0)]
        while stack:
            stack.extend(reversed(self._node(stack.pop())))
        self._check_tied()
        specs = ",".join([f'["{s.code}",{_numbers(s.shape)}]' for s in self.table])
        nodes = ",".join([node() for node in self.nodes])
        groups: list[str] = []
        for refs in self.refs:
            in_order = ",".join([refs[rank] for rank in range(len(refs))])
            groups.append(f"[{in_order}]")
        text = f'{{"specs":[{specs}],"nodes":[{nodes}],"ties":[{",".join(groups)}]}}'
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise UnsupportedError(
                f"{self.call}: a key or value is not valid Unicode; nothing was written.",
                expected="text that UTF-8 can encode",
                got=ascii(find_surrogate(text.split('"')))[:80],
                hint="a lone surrogate is half of a character: rename the key, or repair the value.",
            ) from err
        return Outline(text, self.names, self.specs, self.leaves)

    def _mark(self, ties: Ties) -> Marks:
        """Enter groups of tied paths; return the paths by key, so that a walk down the tree finds them."""
        keys = sum([len(path) ** 2 for group in ties for path in group])
        check_tie_size(keys, UnsupportedError)
        marks: dict[str, Any] = {}
        for paths in ties:
            for rank, path in enumerate(paths):
                at = marks
                for key in path[:-1]:
                    at = at.setdefault(key, {})
                at[path[-1]] = _Mark(len(self.ties), rank)
            self.ties.append(paths)
            self.refs.append({})
        return marks

    def _node(self, node: _Pending) -> list[_Pending]:
        """Write one node with its own leaves; return its sub-trees."""
        tree = node.tree
        number = len(self.nodes)
        keys: list[str] = []
        items: list[str] = []
        children: list[_Pending] = []
        below = {}
        if node.ties:
            below = restrict(node.ties)
        if node.parent is not None:
            node.items[node.place] = f'{{"tree":{number}{_flags_field(node.flags)}}}'
        fields = self._fields(node)
        # Called when the sub-trees have entered their numbers into the items.
        self.nodes.append(lambda: f'{{{fields}"keys":[{",".join(keys)}],"items":[{",".join(items)}]}}')
        kinds = tree._kinds
        # Ties end at an object: the tree around it has none of a tree in it.
        ends_ties = isinstance(tree, PlainObject) and not tree._ties
        # The batch size of a lazy stack follows from its trees.
        if tree._static is not None and tree._static.own is not None:
            size = Size(())
        else:
            size = tree._batch_size
        for key, value in tree._data.items():
            quoted = quote(key)
            keys.append(quoted)
            name = f'"{node.prefix}{quoted[1:-1]}"'
            flags = ""
            if key in kinds:
                flags = KIND_FLAGS[kinds[key]]
            mark = None
            if node.marks is not None:
                mark = node.marks.get(key)
            if isinstance(mark, _Mark):
                self.refs[mark.group][mark.rank] = f"[{number},{quoted}]"
                if mark.rank:
                    self.others.append((mark.group, _Tied(name, value)))
                    items.append(f'{{"tie":{mark.group}{_flags_field(flags)}}}')
                    continue
                self.first[mark.group] = _Tied(name, value)
                mark = None
            if isinstance(value, Tensor):
                items.append(self._tensor(name, value, size, flags))
                continue
            if isinstance(value, NonTensorBase):
                value = self._pack(name, value)
            if isinstance(value, TensorCollection):
                ties = below.get(key, ())
                if ends_ties:
                    ties = value._ties
                    mark = self._mark(ties)
                # Only a plain object has a kind; other trees have the kinds of their leaves.
                if not isinstance(value, PlainObject):
                    flags = ""
                children.append(_Pending(value, f"{name[1:-1]}.", tree, ties, mark, items, len(items), flags))
                items.append("")
            elif isinstance(value, NonTensorBase):
                items.append(self._nontensor(name, value, size, flags))
            else:
                hint = "wrap it: NonTensorData(value)."
                raise self._refusal(name, f"a {type(value).__name__}", "a tensor, tree or non-tensor data", hint)
        return children

    # Any: a value, or a node.
    def _pack(self, name: str, value: NonTensorBase) -> Any:
        """Return the node of plain objects that JSON cannot hold; other values as they are."""
        refuse = partial(self._no_value, name)
        if isinstance(value, NonTensorStack):
            values = value._array.ravel().tolist()
            return value if is_json(values) else pack_each(values, value.shape, refuse)
        assert isinstance(value, NonTensorData)
        if isinstance(value.data, Tensor) or is_json(value.data):
            return value
        return pack(value.data, value.shape, refuse)

    def _fields(self, node: _Pending) -> str:
        """Write a node's fields, omitting those equal to its parent's."""
        tree = node.tree
        outer_size: tuple[int, ...] = ()
        outer_device = None
        if node.parent is not None:
            outer_size = node.parent._batch_size
            outer_device = node.parent._device
        fields: dict[str, Any] = {}
        if tree._batch_size != outer_size:
            fields["size"] = list(tree._batch_size)
        if tree._device != outer_device:
            fields["device"] = None
            if tree._device is not None:
                fields["device"] = str(tree._device)
        if tree._names is not None:
            fields["names"] = list(tree._names)
        if type(tree) is not TensorCollection._open:
            fields["class"] = _class_name(tree)
        if tree._static is not None and tree._static.own is not None:
            fields["own"] = tree._static.own
        if set(map(frozenset, tree._ties)) != set(map(frozenset, node.ties)):
            raise TieError(
                f"{self.call}: the sub-tree at {node.prefix!r} and the tree around it have different ties.",
                expected=repr(node.ties)[:300],
                got=repr(tree._ties)[:300],
                hint="td.untie(path).",
            )
        if fields:
            return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[1:-1] + ","
        return ""

    def _tensor(self, name: str, leaf: Tensor, batch: Size, flags: str, shape: str = "") -> str:
        """Enter a leaf in the file and write its item: a spec, then flags, name and shape if there are any."""
        kind = type(leaf)
        if kind is nn.Parameter:
            flags += IS_PARAMETER
        elif kind is not Tensor:
            raise self._refuse_class(name, leaf)
        if leaf.layout is not _STRIDED or leaf.is_nested or (leaf.is_meta and self.values):
            raise self._refuse_layout(name, leaf)
        dtype = leaf.dtype
        size = leaf.shape
        number = self.known.get((dtype, size))
        if number is None:
            number = self._new_spec(name, dtype, size)
        if batch and size[: len(batch)] != batch:
            raise self._misfit(name, batch, size)
        if leaf.requires_grad:
            flags += REQUIRES_GRAD
        # The third part of the item: a name that is not the path, or null before a shape.
        given = "null" if shape else ""
        if self.named:
            if name in self.taken:
                name = given = self._free_name(name)
            self.taken.add(name)
        self.names.append(name)
        self.specs.append(self.table[number])
        self.leaves.append(leaf)
        if not flags and not given:
            return str(number)
        item = f'[{number},"{flags}"'
        if given:
            item += f",{given}"
        if shape:
            item += f",{shape}"
        return f"{item}]"

    def _free_name(self, name: str) -> str:
        """Return another name for a leaf: keys may contain dots, so two paths may be one name."""
        i = 1
        while f'{name[:-1]}~{i}"' in self.taken:
            i += 1
        return f'{name[:-1]}~{i}"'

    def _refuse_class(self, name: str, leaf: Tensor) -> UnsupportedError:
        hint = "save a plain tensor of it: .as_subclass(torch.Tensor), or leave the transformation."
        if leaf.layout is torch.jagged:
            hint = "save its parts as leaves, .values() and .offsets(), or .to_padded_tensor(...)."
        elif is_sharded(leaf):
            hint = "tdfunc.save and CheckpointManager.save write DTensors in parts; .full_tensor() is a plain tensor."
        return self._refusal(name, f"a {type(leaf).__name__}", "a plain tensor or Parameter", hint)

    def _refuse_layout(self, name: str, leaf: Tensor) -> UnsupportedError:
        if leaf.is_meta:
            got = "a tensor on the meta device"
            hint = "materialize it first."
        else:
            got = f"a tensor of layout {leaf.layout}"
            hint = "save .to_dense(), or its parts as leaves."
        return self._refusal(name, got, "a dense tensor with values", hint)

    def _new_spec(self, name: str, dtype: torch.dtype, size: Size) -> int:
        got = f"{dtype} of shape {list(size)}"
        try:
            spec = spec_for(dtype, size, self.codes)
        except CorruptCheckpointError as err:
            raise self._refusal(name, got, "a size in bytes of at most 63 bits", "save a part of it.") from err
        if spec is None:
            hint = "convert it to one of these."
            if dtype.is_complex:
                hint = "torch.view_as_real gives a real tensor of it."
            raise self._refusal(name, got, f"one of {', '.join(map(str, self.codes))}", hint)
        self.known[dtype, size] = len(self.table)
        self.table.append(spec)
        return len(self.table) - 1

    def _nontensor(self, name: str, value: NonTensorBase, batch: Size, flags: str) -> str:
        shape = value.shape
        if shape[: len(batch)] != batch:
            raise self._misfit(name, batch, shape)
        own_shape = ""
        if shape != batch:
            own_shape = _numbers(shape)
        if isinstance(value, NonTensorData) and isinstance(value.data, Tensor):
            return self._tensor(name, value.data, Size(()), flags + IS_VALUE, own_shape)
        if isinstance(value, NonTensorData):
            item = f'{{"value":{_json(value.data)}'
        else:
            assert isinstance(value, NonTensorStack)
            item = f'{{"values":{_json(value._array.ravel().tolist())}'
        if own_shape:
            item += f',"shape":{own_shape}'
        return f"{item}{_flags_field(flags)}}}"

    def _no_value(self, name: str, place: str, got: str) -> UnsupportedError:
        """Build the error for a value, or a part of it, that cannot be stored unchanged."""
        expected = "None, bools, numbers and str, and lists, tuples and dicts of these, of tensors and of trees"
        expected += ", and numpy's arrays and numbers"
        hint = "convert it to these, or leave the key out: td.delete(key); tdfunc.from_module(module) is a tree."
        if place:
            got = f"{got} at {place}"
        return self._refusal(name, got, expected, hint)

    def _check_tied(self) -> None:
        """Raise if the leaves at the tied paths are different: a save of one would lose the other."""
        hint = "td.untie(path) separates them."
        for group, refs in zip(self.ties, self.refs, strict=True):
            if len(refs) != len(group):
                paths = ", ".join(map(dotted, group))
                raise TieError(f"{self.call}: one of the tied paths {paths} has no leaf.", hint=hint)
        for group, other in self.others:
            first = self.first[group]
            if other.value is not first.value or not isinstance(other.value, Tensor):
                raise TieError(
                    f"{self.call}: {other.name} is tied to {first.name}, but holds another value.", hint=hint
                )

    def _misfit(self, name: str, batch: Size, shape: Size) -> BatchSizeError:
        return BatchSizeError(
            f"{self.call}: leaf {name} does not start with the batch size; nothing was written.",
            expected=str(list(batch)),
            got=str(list(shape)),
        )

    def _refusal(self, name: str, got: str, expected: str, hint: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.call}: leaf {name} cannot be stored; nothing was written.", expected=expected, got=got, hint=hint
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _class_name(tree: TensorCollection) -> str:
    """Return the name of a tree's class in a file."""
    cls = type(tree)
    if cls is PlainObject:
        return OBJECT
    # The trees of a lazy stack decide its class: typed or not.
    if isinstance(tree, TensorCollection._lazy):
        cls = TensorCollection._lazy
    return f"{cls.__module__}:{cls.__qualname__}"


def _flags_field(flags: str) -> str:
    if flags:
        return f',"flags":"{flags}"'
    return ""


def _numbers(values: Iterable[int]) -> str:
    return f"[{','.join(map(str, values))}]"


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


def check_tie_size(keys: int, kind: type[Exception]) -> None:
    """Raise if the paths of tied leaves would fill the memory."""
    if keys > MAX_TIE_KEYS:
        raise error(
            kind,
            "the paths of tied leaves are too long.",
            expected=f"at most {MAX_TIE_KEYS} keys (path lengths squared)",
            got=str(keys),
            hint="td.untie(path).",
        )
