"""Trees from and to what other libraries have: dicts, dataclasses, named tuples, numpy arrays, state dicts."""

import dataclasses
import sys
from collections import namedtuple
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection, check_one_shape
from tdfunc.core.errors import (
    LeafMismatchError,
    MissingKeyError,
    TieError,
    TreeStructureError,
    UnsupportedError,
    error,
)
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.shapes import as_size, common_prefix
from tdfunc.core.types import Kind, Path
from tdfunc.ops.convert import resize
from tdfunc.ops.edit import update
from tdfunc.ops.index import unbind
from tdfunc.ops.reading import check_same_keys, get_value, iter_items, kind_of
from tdfunc.ops.structure import to_dict

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


# -- from ---------------------------------------------------------------------------------------------------------


def auto_batch_size(tree: T, batch_dims: int | None) -> T:
    """Return the tree with the longest batch size that its entries share, at every node."""
    new, size = _sized(tree, batch_dims)
    return new if size is not None else resize(new, Size())


def _sized(tree: T, batch_dims: int | None) -> tuple[T, Size | None]:
    """Return the tree with its batch size; None, and the tree as it is, where it holds nothing that has a shape."""
    data: dict[str, Any] = {}
    votes: list[Size] = []
    for key, node in tree._data.items():
        vote = node.shape if isinstance(node, (Tensor, NonTensorStack)) else None
        if isinstance(node, TensorCollection):
            node, vote = _sized(node, batch_dims)
        data[key] = node
        if vote is not None:
            votes.append(vote)
    new = tree._replace(data)
    if not votes:
        return new, None
    size = reduce(common_prefix, votes)[:batch_dims]
    return resize(new, size), size


def as_plain(value: Any) -> Any:
    """Return nested dicts of dicts, dataclass instances, tuples and structured arrays, and trees of data frames."""
    # A size is one value, of as many numbers.
    if isinstance(value, (TensorCollection, Tensor, Size)):
        return value
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Any = value
        return {key: as_plain(getattr(fields, key)) for key in fields._fields}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return {str(i): as_plain(item) for i, item in enumerate(items)}
    # Who has a data frame has imported pandas, which is optional.
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return TensorCollection._open.from_pandas(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {key: as_plain(item) for key, item in given if item is not None}
    if isinstance(value, np.ndarray) and value.dtype.names is not None:
        array: Any = value
        # Fields lie between each other, in steps that torch may not be able to take. `ascontiguousarray` would give
        # an array without dimensions one.
        return {key: as_plain(np.asarray(array[key], order="C")) for key in array.dtype.names}
    return value


# -- to -----------------------------------------------------------------------------------------------------------


def _as_array(leaf: Tensor, call: str, at: Path) -> Any:
    try:
        # Copies only what numpy cannot see: another device, a conjugate view.
        return leaf.numpy(force=True)
    except (TypeError, RuntimeError) as err:
        raise UnsupportedError(
            f"{call}: {dotted(at)!r} is no array of numpy.",
            expected="values in a dtype and layout of numpy",
            got=f"{leaf.dtype}, {leaf.layout}, on {leaf.device}",
            hint="td.to(torch.float32) casts." if leaf.is_floating_point() and leaf.device.type != "meta" else None,
        ) from err


def to_numpy(tree: TensorCollection) -> dict[str, Any]:
    """Return nested dicts of arrays and plain values."""
    return {key: _numpy_of(value, (key,)) for key, value in to_dict(tree, "numpy").items()}


def _numpy_of(value: Any, at: Path) -> Any:
    if isinstance(value, dict):
        return {key: _numpy_of(item, (*at, key)) for key, item in cast("dict[str, Any]", value).items()}
    # A key of a lazy stack has a tensor for each tree.
    if isinstance(value, tuple):
        return tuple([_numpy_of(item, at) for item in cast("tuple[Any, ...]", value)])
    return _as_array(value, "numpy", at) if isinstance(value, Tensor) else value


def to_struct_array(tree: TensorCollection, at: Path = ()) -> Any:
    """Return one array of records over the batch; nested trees are records in records."""
    check_one_shape(tree, "to_struct_array", f" at {dotted(at)!r}" if at else "")
    size = tree._batch_size
    columns: dict[str, Any] = {}
    for key in tree._keys():
        node = tree._get(key)
        if isinstance(node, TensorCollection):
            columns[key] = to_struct_array(node, (*at, key))
        elif isinstance(node, NonTensorBase):
            values = node._array
            texts = all(isinstance(value, str) for value in values.flat)
            columns[key] = values.astype(str) if texts and values.size else values
        else:
            columns[key] = _as_array(cast("Tensor", node), "to_struct_array", (*at, key))
    made = np.empty(tuple(size), [(key, column.dtype, column.shape[len(size) :]) for key, column in columns.items()])
    for key, column in columns.items():
        made[key] = column
    return made


def to_namedtuple(tree: TensorCollection, dest_cls: Any) -> Any:
    """Return nested named tuples."""
    return _named(to_dict(tree, "to_namedtuple"), dest_cls)


def _named(values: dict[str, Any], dest_cls: Any) -> Any:
    made = {key: _named(item, None) if isinstance(item, dict) else item for key, item in values.items()}
    # The fields are known only now.
    cls = dest_cls or namedtuple("GenericDict", made)  # pyright: ignore[reportUntypedNamedTuple]
    return cls(**made)


def tolist(tree: TensorCollection, convert: bool) -> Any:
    """Return nested lists over the batch dimensions, with a dict of the values of each element."""
    if tree._batch_size:
        return [tolist(row, convert) for row in unbind(tree, 0)]
    return {key: _list_of(get_value(tree, key), convert) for key in tree._keys()}


def _list_of(value: Any, convert: bool) -> Any:
    if isinstance(value, TensorCollection):
        # A class of trees may have a form of its own, unless a field of it has that name.
        own = getattr(type(value), "tolist", None)
        return own(value, convert_tensors=convert) if callable(own) else tolist(value, convert)
    return value.tolist() if convert and isinstance(value, Tensor) else value


# -- state dicts ----------------------------------------------------------------------------------------------------


def load_state_dict(tree: T, given: Mapping[str, Any], strict: bool, assign: bool, flat: bool | None) -> T:
    """Return the tree with the values of a state dict."""
    if not isinstance(given, (Mapping, TensorCollection)):
        raise error(
            TypeError,
            "load_state_dict: this is no state dict.",
            expected="a dict, as state_dict() returns",
            got=type(given).__name__,
        )
    if strict:
        for each in (tree, given):
            if isinstance(each, TensorCollection):
                check_same_keys(each, "load_state_dict")
    flat = not any(isinstance(value, Mapping) for value in given.values()) if flat is None else flat
    found = dict(given) if flat else dict(_flat(given, ""))
    nodes = {dotted(path): (path, node) for path, node in iter_items(tree, True, True) if _is_state(tree, path, node)}
    missing, unexpected = sorted(nodes.keys() - found), sorted(found.keys() - nodes)
    if strict and (missing or unexpected):
        for outer, inner in ((missing, unexpected), (unexpected, missing)):
            _check_levels(outer, inner, sorted(nodes))
        raise MissingKeyError(
            "load_state_dict: the keys are not those of the tree.",
            expected=str(sorted(nodes)),
            got=f"missing {missing}, unexpected {unexpected}",
            hint="strict=False loads the keys that both have.",
        )
    values: dict[Any, Any] = {}
    for name, (path, node) in nodes.items():
        if name in found:
            values[path] = _loaded(name, node, found[name], assign)
    return update(tree, _agreeing(tree, values))


def _check_levels(leaves: list[str], others: list[str], mine: list[str]) -> None:
    """Raise where one side has a leaf and the other, under its name, a tree."""
    trees = {name[:i]: name for name in others for i, letter in enumerate(name) if letter == "."}
    for name in leaves:
        if name in trees:
            expected, got = (name, trees[name]) if name in mine else (trees[name], name)
            raise TreeStructureError(
                f"load_state_dict: {name!r} is a leaf on one side and a tree on the other.",
                expected=repr(expected),
                got=repr(got),
                hint="rename_key or delete the entry.",
            )


def _flat(given: Mapping[str, Any], prefix: str) -> "list[tuple[str, Any]]":
    pairs: list[tuple[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, Mapping):
            pairs += _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


def _is_state(tree: TensorCollection, path: Path, node: Any) -> bool:
    """Whether a leaf is in the tree's `state_dict()`."""
    kind = kind_of(tree, path)
    return kind is not Kind.NON_PERSISTENT and (not isinstance(node, NonTensorBase) or kind is Kind.EXTRA_STATE)


def _loaded(name: str, node: Any, value: Any, assign: bool) -> Any:
    if not isinstance(node, Tensor) or assign:
        return value
    if not isinstance(value, Tensor) or value.shape != node.shape:
        raise LeafMismatchError(
            f"load_state_dict: {name!r} does not fit.",
            expected=f"shape {list(node.shape)}",
            got=f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
        )
    return value.detach().to(node.device, node.dtype)


def _agreeing(tree: TensorCollection, values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the values with one tensor for each group of tied paths."""
    for group in tree._ties:
        given = [path for path in group if path in values]
        for path in given[1:]:
            first, other = values[given[0]], values[path]
            if not torch.equal(first, other):
                raise TieError(
                    f"load_state_dict: {dotted(given[0])!r} and {dotted(path)!r} are one tensor in the tree.",
                    expected="equal values",
                    got="values that differ",
                    hint=f"untie({dotted(path)!r}) first, to load both.",
                )
            values[path] = first
    return values


class ExchangeMethods(TensorCollection):
    """Trees as what other libraries have."""

    __slots__ = ()

    def numpy(self) -> dict[str, Any]:
        """Return nested dicts of numpy arrays and plain values; arrays of CPU tensors share their memory.

        Raises:
            UnsupportedError: numpy has no such dtype or layout, or a leaf has no values; the message names it.
        """
        return to_numpy(self)

    def tolist(self, *, convert_tensors: bool = False) -> Any:
        """Return nested lists over the batch dimensions, with a dict of the values of each element.

        Args:
            convert_tensors: Turn tensors into numbers and lists, too.

        Examples:
            >>> TensorDict({"n": torch.arange(2), "s": ["a", "b"]}, [2]).tolist(convert_tensors=True)
            [{'n': 0, 's': 'a'}, {'n': 1, 's': 'b'}]
        """
        return tolist(self, convert_tensors)

    def to_namedtuple(self, dest_cls: Any = None) -> Any:
        """Return nested named tuples of the tensors and plain values.

        Args:
            dest_cls: The class of the outer one.
        """
        return to_namedtuple(self, dest_cls)

    def to_struct_array(self) -> Any:
        """Return one numpy array of records over the batch: a copy; nested trees are records in records.

        Examples:
            >>> TensorDict({"age": torch.tensor([9, 3]), "name": ["Rex", "Fido"]}, [2]).to_struct_array()["name"]
            array(['Rex', 'Fido'], dtype='<U4')

        Raises:
            UnsupportedError: numpy has no such dtype or layout, or a leaf has no values; the message names it.
            LeafMismatchError: The trees of a lazy stack differ; the message says where.
        """
        return to_struct_array(self)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> "Self":
        """Return the tree with the values of a state dict, as `state_dict()` returns one; nothing is written.

        Args:
            state_dict: Values under dotted keys, or in nested dicts.
            strict: Require exactly the keys that `state_dict()` has.
            assign: Take the values as they are; otherwise they are cast to the dtype and device of the leaf.
            from_flatten: Whether keys are dotted; without it they are unless there are nested dicts.

        Raises:
            TypeError: The state dict is no mapping.
            MissingKeyError: The keys differ, and `strict`.
            TreeStructureError: A leaf of the tree is a tree in the state dict, or the other way round, or only some
                trees of a lazy stack have a key, and `strict`.
            LeafMismatchError: A shape differs; the message names the key.
            TieError: Paths of one tied leaf have different values.
        """
        return load_state_dict(self, state_dict, strict, assign, from_flatten)


class FromMethods(TensorCollection):
    """Trees with open keys from other objects."""

    __slots__ = ()

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
    ) -> "Self":
        """Return a tree of nested dicts.

        Args:
            input_dict: Values by (nested) key.
            auto_batch_size: Give every tree the longest batch size that its entries share.
            batch_dims: At most this many dimensions; asks for `auto_batch_size` where no batch size is given.
            batch_size: The batch size of all trees, without it.
            device: Where every leaf is put.
            names: A name for each batch dimension.

        Raises:
            TypeError: Both a batch size and `auto_batch_size`.
            BatchSizeError: A leaf does not start with the batch size; the message names it.

        Examples:
            >>> TensorDict.from_dict({"a": torch.ones(3, 4), "b": torch.ones(3)}, auto_batch_size=True).batch_size
            torch.Size([3])
        """
        return _from(cls, input_dict, auto_batch_size, batch_dims, batch_size, device, names)

    @classmethod
    def from_any(cls, obj: Any, **options: Any) -> "Self":
        """Return a tree of a dict, dataclass instance, tuple, structured array, data frame or tree, however nested.

        The items of a tuple have the keys "0", "1", ..., those of a named tuple its names. A list is a value, as in the
        constructor, and so is a `torch.Size`. A data frame is read as by `from_pandas`.

        Args:
            obj: The object; fields of a dataclass that are None are left out.
            **options: Those of `from_dict`.

        Raises:
            TypeError: The object is none of these.

        Examples:
            >>> list(TensorDict.from_any((torch.ones(2), {"a": 1})).keys(True, True))
            ['0', ('1', 'a')]
        """
        plain = as_plain(obj)
        if not isinstance(plain, (Mapping, TensorCollection)):
            raise error(
                TypeError,
                "from_any: this has no keys.",
                expected="a dict, dataclass instance, tuple, structured array, data frame or tree",
                got=type(obj).__name__,
            )
        return cls.from_dict(cast("Any", plain), **options)

    @classmethod
    def from_dataclass(cls, dataclass: Any, **options: Any) -> "Self":
        """Return a tree of the fields of a dataclass instance; options are those of `from_dict`."""
        return cls.from_any(dataclass, **options)

    @classmethod
    def from_namedtuple(cls, named_tuple: Any, **options: Any) -> "Self":
        """Return a tree of the fields of a named tuple; options are those of `from_dict`."""
        return cls.from_any(named_tuple, **options)

    @classmethod
    def from_struct_array(cls, struct_array: Any, *, batch_size: Any = None, **options: Any) -> "Self":
        """Return a tree of the fields of an array of records, with its shape as the batch size.

        Examples:
            >>> TensorDict.from_struct_array(np.zeros(3, [("age", "i8"), ("xy", "f4", 2)]))["xy"].shape
            torch.Size([3, 2])
        """
        size = struct_array.shape if batch_size is None and not options.get("auto_batch_size") else batch_size
        return cls.from_any(struct_array, batch_size=size, **options)


def _from(cls: Any, source: Any, auto: bool, batch_dims: int | None, batch_size: Any, device: Any, names: Any) -> Any:
    if auto and batch_size is not None:
        raise error(
            TypeError,
            "from_dict: a batch size is given and asked for.",
            expected="batch_size or auto_batch_size",
            got=f"both; batch_size {list(as_size(batch_size))}",
        )
    if not auto and (batch_dims is None or batch_size is not None):
        return cls(source, batch_size, device, names)
    return cls(auto_batch_size(cls(source, (), device), batch_dims), None, None, names)
