"""Trees from and to the containers of other libraries: dicts, dataclasses, tuples, numpy, pandas, state dicts, batches.

The tables of torch's `default_collate` and pytrees are open to other libraries, and trees are entered in both.
"""

import dataclasses
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Size, Tensor
from torch.utils.data._utils import collate as torch_collate

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import (
    BatchSizeError,
    LeafMismatchError,
    MissingKeyError,
    TieError,
    UnsupportedError,
    error,
    needs,
)
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.shapes import common_prefix
from tdfunc.core.types import Group, Path
from tdfunc.ops.base.convert import adopt, as_tensor, resize
from tdfunc.ops.base.reading import get_value, iter_items
from tdfunc.ops.batch.index import unbind
from tdfunc.ops.batch.join import stack
from tdfunc.ops.edits.edit import update
from tdfunc.ops.edits.structure import flatten_keys, saved_nodes, to_dict

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
# The dtypes of codes that quantized weights have, and the words in the names of their scales.
_CODES = frozenset(
    [
        torch.int8,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    ]
)
_SCALE = re.compile(r"scale|absmax|SCB")


# -- from ---------------------------------------------------------------------------------------------------------


def fit_batch_sizes(tree: T, batch_dims: int | None) -> tuple[T, Size | None]:
    """Return the tree with the longest batch size that its entries share, at every node, and that size.

    A tree without anything that has a shape stays as it is, and its size is None.
    """
    data: dict[str, Any] = {}
    votes: list[Size] = []
    for key, node in tree._data.items():
        vote = node.shape if isinstance(node, (Tensor, NonTensorStack)) else None
        if isinstance(node, TensorCollection):
            node, vote = fit_batch_sizes(node, batch_dims)
        data[key] = node
        if vote is not None:
            votes.append(vote)
    new = tree._replace(data)
    size = None
    if votes:
        size = reduce(common_prefix, votes)[:batch_dims]
    return (new if size is None else resize(new, size)), size


def as_plain(value: Any) -> Any:
    """Return nested dicts of dicts, dataclass instances and tuples, and trees of tensordict's as ours."""
    value = adopt(value)
    # A size is one value, of as many numbers.
    if isinstance(value, (TensorCollection, Tensor, Size)):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
    elif isinstance(value, tuple):
        entries = cast("tuple[Any, ...]", value)
        items = dict(zip(getattr(value, "_fields", map(str, range(len(entries)))), entries, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        items = {key: item for key, item in given.items() if item is not None}
    else:
        return value
    return {key: as_plain(item) for key, item in items.items()}


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
            batch_dims: The largest number of batch dimensions to find; implies `auto_batch_size`.
            batch_size: The batch size of all trees.
            device: The device of every leaf.
            names: A name for each batch dimension.

        Raises:
            TypeError: `batch_size` is given with `auto_batch_size` or `batch_dims`.
            BatchSizeError: A leaf does not start with the batch size; the message names it.

        Examples:
            >>> TensorDict.from_dict({"a": torch.ones(3, 4), "b": torch.ones(3)}, auto_batch_size=True).batch_size
            torch.Size([3])
        """
        # Any: the constructor of a subclass.
        made: Any = cls
        if not auto_batch_size and batch_dims is None:
            return made(input_dict, batch_size, device, names)
        if batch_size is not None:
            raise error(
                TypeError,
                "from_dict: a given batch size and one found from the entries exclude each other.",
                expected="batch_size, or auto_batch_size and batch_dims",
                got="both",
            )
        tree, size = fit_batch_sizes(made(input_dict, (), device), batch_dims)
        return made(tree if size is not None else resize(tree, Size()), None, device, names)

    @classmethod
    def from_any(cls, obj: Any, **options: Any) -> "Self":
        """Return a tree of a dict, dataclass instance, tuple or tree, however nested.

        The items of a tuple get the keys "0", "1", ...; the items of a named tuple get its field names. A list is a
        value, as in the constructor, and so is a `torch.Size`.

        Args:
            obj: The object; fields of a dataclass that are None are left out.
            **options: The options of `from_dict`.

        Raises:
            TypeError: The object is of another type.

        Examples:
            >>> list(TensorDict.from_any((torch.ones(2), {"a": 1})).keys(True, True))
            ['0', ('1', 'a')]
        """
        return cls.from_dict(as_plain(obj), **options)

    @classmethod
    def from_dataclass(cls, dataclass: Any, **options: Any) -> "Self":
        """Return a tree of the fields of a dataclass instance, with the options of `from_dict`."""
        return cls.from_any(dataclass, **options)

    @classmethod
    def from_namedtuple(cls, named_tuple: Any, **options: Any) -> "Self":
        """Return a tree of the fields of a named tuple, with the options of `from_dict`."""
        return cls.from_any(named_tuple, **options)

    @classmethod
    def from_pandas(
        cls,
        dataframe: Any,
        *,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
    ) -> "Self":
        """Return a tree of the columns of a `pandas.DataFrame`; its index is left out.

        Columns of numbers and bools become tensors, all others non-tensor data with a value for each row.

        Args:
            dataframe: The data frame; its values are copied.
            separator: A string at which names of columns are split into nested keys.
            dtype: A dtype for all columns of numbers and bools.
            batch_size: The batch size, if not the number of rows: `[]`.
            device: The device of every leaf.
            names: A name for each batch dimension.

        Raises:
            LeafMismatchError: A column that becomes integers lacks values.
            MissingKeyError: Two columns have one name.
        """
        if not dataframe.columns.is_unique:
            raise MissingKeyError(
                "from_pandas: two columns have one name.",
                got=str(list(dataframe.columns)),
                hint="rename one of them.",
            )
        values: dict[Any, Any] = {}
        for name, column in dataframe.items():
            key = name if separator is None else tuple(name.split(separator))
            array = column.to_numpy()
            if dtype is not None and array.dtype.kind == "O" and column.dtype.kind == "b":
                # Bools that lack values are objects to numpy.
                array = column.to_numpy(dtype=np.float64, na_value=np.nan)
            if array.dtype.kind not in "biufc":
                objects: Any = np.empty(len(column), dtype=object)
                objects[:] = list(column)
                values[key] = NonTensorStack._wrap(objects)
                continue
            # A missing value is NaN, which makes other integers of the column floats that may not hold them.
            is_float = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
            if dtype is None:
                is_integral = column.dtype.kind in "biu"
            else:
                is_integral = not is_float
            if is_integral and column.isna().any():
                raise LeafMismatchError(
                    f"from_pandas: {name!r} lacks values, which a dtype of integers does not have.",
                    got=str(column.dtype),
                    hint="fillna() or dropna() first, or give a dtype of floats.",
                )
            # A copy: the arrays of a frame are shared, and may not be written to.
            values[key] = as_tensor(np.array(array), f"from_pandas: {name!r}", dtype=dtype)
        # Any: the constructor of a subclass.
        made: Any = cls
        return made(values, (len(dataframe),) if batch_size is None else batch_size, device, names)


# -- to -----------------------------------------------------------------------------------------------------------


def _as_array(leaf: Tensor, call: str, at: Path) -> Any:
    try:
        # Copies only a leaf that numpy cannot share: on another device, or a conjugate view.
        return leaf.numpy(force=True)
    except (TypeError, RuntimeError) as err:
        raise UnsupportedError(
            f"{call}: {dotted(at)!r} does not have a dtype and layout of numpy.",
            got=f"{leaf.dtype}, {leaf.layout}, on {leaf.device}",
            hint="td.to(torch.float32) casts." if leaf.is_floating_point() and leaf.device.type != "meta" else None,
        ) from err


def _numpy_of(value: Any, at: Path) -> Any:
    if isinstance(value, dict):
        return {key: _numpy_of(item, (*at, key)) for key, item in cast("dict[str, Any]", value).items()}
    # A key of a lazy stack has a tensor for each tree.
    if isinstance(value, tuple):
        return tuple([_numpy_of(item, at) for item in cast("tuple[Any, ...]", value)])
    if isinstance(value, Tensor):
        return _as_array(value, "numpy", at)
    return value


def _to_namedtuple(values: dict[str, Any], dest_cls: Any) -> Any:
    made = {key: _to_namedtuple(item, None) if isinstance(item, dict) else item for key, item in values.items()}
    # The fields are known only now.
    cls = dest_cls or namedtuple("GenericDict", made)  # pyright: ignore[reportUntypedNamedTuple]
    return cls(**made)


def tolist(tree: TensorCollection, convert: bool) -> Any:
    """Return nested lists over the batch dimensions, with a dict of the values of each element."""
    if tree._batch_size:
        return [tolist(row, convert) for row in unbind(tree, 0)]
    return {key: list_of(get_value(tree, key), convert) for key in tree._keys()}


def list_of(value: Any, convert: bool) -> Any:
    """Return a value of a tree as `tolist` shows it."""
    if isinstance(value, TensorCollection):
        # A class of trees may have its own form, unless it has a field of that name.
        own = getattr(type(value), "tolist", None)
        if callable(own):
            return own(value, convert_tensors=convert)
        return tolist(value, convert)
    if convert and isinstance(value, Tensor):
        return value.tolist()
    return value


# -- state dicts ----------------------------------------------------------------------------------------------------


def load_state_dict(tree: T, given: Mapping[str, Any], strict: bool, assign: bool, flat: bool | None) -> T:
    """Return the tree with the values of a state dict."""
    found = dict(given) if flat else dict(_flat(given, ""))
    nodes = {dotted(path): (path, node) for path, node in saved_nodes(tree)}
    if strict:
        _check_names(nodes, found)
    elif not assign:
        _check_codes(nodes, found)
    values: dict[Any, Any] = {}
    for name, (path, node) in nodes.items():
        if name not in found:
            continue
        values[path] = found[name]
        if isinstance(node, Tensor) and not assign:
            values[path] = _like_leaf(found[name], node, name)
    for group in tree._ties:
        _make_one(group, values)
    return update(tree, values)


def _check_names(nodes: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    missing = sorted(nodes.keys() - found)
    unexpected = sorted(found.keys() - nodes)
    if missing or unexpected:
        raise MissingKeyError(
            "load_state_dict: the state dict has other keys than the tree.",
            expected=str(sorted(nodes)),
            got=f"missing {missing}, unexpected {unexpected}",
            hint="strict=False loads the keys that both have.",
        )


def _check_codes(nodes: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise if codes would be cast to numbers, while the scale that they need is left out."""
    # The names that the tree lacks and that say of themselves what they are, by the name of their module or leaf.
    scales: dict[str, str] = {}
    for name in found.keys() - nodes:
        stem, _, key = name.rpartition(".")
        if _SCALE.search(key):
            scales[stem] = name
    if not scales:
        return
    for name, (_, leaf) in nodes.items():
        value = found.get(name)
        if not isinstance(value, Tensor) or not isinstance(leaf, Tensor):
            continue
        is_cast = value.dtype in _CODES and leaf.is_floating_point() and leaf.dtype != value.dtype
        scale = scales.get(name, scales.get(name.rpartition(".")[0]))
        if is_cast and scale is not None:
            raise UnsupportedError(
                f"load_state_dict: {name!r} has codes, which are numbers only together with their scale.",
                expected=f"numbers, to be cast to {leaf.dtype}",
                got=f"{value.dtype}, and {scale!r}, which the tree does not have",
                hint="tdf.load(path, dequantize=True) makes numbers of FP8 codes; assign=True keeps the codes.",
            )


def _like_leaf(value: Any, leaf: Tensor, name: str) -> Tensor:
    """Return a value of a state dict with the dtype and device of the leaf that it replaces."""
    if not isinstance(value, Tensor) or value.shape != leaf.shape:
        raise LeafMismatchError(
            f"load_state_dict: {name!r} does not have the shape of the leaf.",
            expected=f"shape {list(leaf.shape)}",
            got=f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
        )
    return value.detach().to(leaf.device, leaf.dtype)


def _make_one(group: Group, values: dict[Any, Any]) -> None:
    """Give the paths of one tied tensor one object among the values; raise if their values differ."""
    given = [path for path in group if path in values]
    for path in given[1:]:
        first = given[0]
        if not torch.equal(values[first], values[path]):
            raise TieError(
                f"load_state_dict: {dotted(first)!r} and {dotted(path)!r} are one tensor in the tree.",
                expected="equal values",
                got="values that differ",
                hint=f"untie({dotted(path)!r}) first, to load both.",
            )
        values[path] = values[first]


def _flat(given: Mapping[str, Any], prefix: str) -> "list[tuple[str, Any]]":
    pairs: list[tuple[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, Mapping):
            pairs += _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


class InteropMethods(TensorCollection):
    """Trees as the containers of other libraries."""

    __slots__ = ()

    def numpy(self) -> dict[str, Any]:
        """Return nested dicts of numpy arrays and plain values; arrays of CPU tensors share their memory.

        Raises:
            UnsupportedError: numpy does not support the dtype or layout of a leaf, or it has no values; it is named.
        """
        return _numpy_of(to_dict(self, "numpy"), ())

    def tolist(self, *, convert_tensors: bool = False) -> Any:
        """Return nested lists over the batch dimensions, with a dict of the values of each element.

        Args:
            convert_tensors: Also turn tensors into numbers and lists.

        Examples:
            >>> TensorDict({"n": torch.arange(2), "s": ["a", "b"]}, [2]).tolist(convert_tensors=True)
            [{'n': 0, 's': 'a'}, {'n': 1, 's': 'b'}]
        """
        return tolist(self, convert_tensors)

    def to_namedtuple(self, dest_cls: Any = None) -> Any:
        """Return nested named tuples of the tensors and plain values.

        Args:
            dest_cls: The class of the outer named tuple.
        """
        return _to_namedtuple(to_dict(self, "to_namedtuple"), dest_cls)

    def to_pandas(self, *, separator: str | None = None) -> Any:
        """Return a `pandas.DataFrame` with a column for each leaf and a row for each element of the batch.

        Args:
            separator: A string that joins nested keys to names of columns; required for nested trees.

        Raises:
            BatchSizeError: The tree does not have exactly one batch dimension.
            LeafMismatchError: An entry has features, or is a tree and `separator` is None; the message names it.
            UnsupportedError: numpy does not support the dtype or layout of a leaf; the message names it.
        """
        with needs("to_pandas", "pandas", "pandas"):
            import pandas

        if len(self._batch_size) != 1:
            raise BatchSizeError(
                "to_pandas: the rows are the batch, which must have one dimension.",
                got=f"batch size {list(self._batch_size)}",
                hint="td.reshape(-1) makes one of several, td.unsqueeze(0) of none.",
            )
        flat = self if separator is None else flatten_keys(self, separator)
        columns: dict[str, Any] = {}
        for key in flat._keys():
            node: Any = flat._get(key)
            if not isinstance(node, (Tensor, NonTensorBase)) or node.dim() != 1:
                raise LeafMismatchError(
                    f"to_pandas: {key!r} is not a leaf with one value for each row.",
                    got=f"a {type(node).__name__} of shape {list(node.shape)}",
                    hint='separator="." joins nested keys; pad() or dense() a lazy stack; give each feature a key.',
                )
            if isinstance(node, NonTensorBase):
                columns[key] = node._array
            else:
                columns[key] = _as_array(node, "to_pandas", (key,))
        return pandas.DataFrame(columns, index=range(self._batch_size[0]))

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
            from_flatten: True for dotted keys, False for nested dicts; by default found from the values.

        Raises:
            MissingKeyError: The keys differ, and `strict` is True.
            LeafMismatchError: A shape differs; the message names the key.
            TieError: Paths of one tied leaf have different values.
            UnsupportedError: Codes of a quantized weight would be cast without their scale, which the tree lacks.
        """
        return load_state_dict(self, state_dict, strict, assign, from_flatten)


# -- loggers ------------------------------------------------------------------------------------------------------


def scalars(tree: TensorCollection) -> dict[str, float]:
    """Return the numbers of a tree by path, as loggers take them: wandb, mlflow, tensorboard.

    A number for each member of a stack becomes a number under each member's index. Anything larger is refused: reduce
    it first, so that weights do not become millions of curves.

    Shapes:
        A leaf `a` of shape () gives `a`; one of shape (E,) gives `a/0`, ..., `a/{E - 1}`.

    Raises:
        LeafMismatchError: A leaf has more dimensions, or is not of real numbers; the message names it.
        MissingKeyError: Two numbers would have one name.

    Examples:
        >>> metrics = TensorDict({"loss": torch.tensor(0.5), "valid": {"accuracy": torch.tensor([0.75, 1.0])}})
        >>> tdf.scalars(metrics)
        {'loss': 0.5, 'valid/accuracy/0': 0.75, 'valid/accuracy/1': 1.0}
    """
    found: dict[str, float] = {}
    for path, node in iter_items(tree, True, True):
        is_tensor = isinstance(node, Tensor)
        if not is_tensor or node.dim() > 1 or node.is_complex():
            raise LeafMismatchError(
                f"scalars: {dotted(path)!r} is not a real number, or one for each member.",
                expected="a tensor of shape () or (E,)",
                got=f"{node.dtype} of shape {list(node.shape)}" if is_tensor else type(node).__name__,
                hint="reduce it first, tree.apply(lambda leaf: leaf.flatten(1).mean(1)), or exclude() it.",
            )
        name = "/".join(path)
        # Any: a number, or a list of numbers.
        values: Any = node.tolist()
        if node.dim():
            named = {f"{name}/{i}": value for i, value in enumerate(values)}
        else:
            named = {name: values}
        clash = found.keys() & named.keys()
        if clash:
            raise MissingKeyError(
                f"scalars: two numbers have the name {min(clash)!r}.", hint="rename_key() one of them."
            )
        found |= {name: float(value) for name, value in named.items()}
    return found


# -- batches ------------------------------------------------------------------------------------------------------


def collate(batch: Any) -> Any:
    """Return one batch of the rows of a data set: trees are stacked, all else is as `default_collate` makes it.

    A data set that is itself a tree is indexed once for a whole batch, and that is returned as it is. Rows that are
    tuples, lists or dicts may mix trees with tensors, numbers and strings. A `DataLoader` without a `collate_fn`
    does the same, since trees are in the table of torch's `default_collate`.

    Args:
        batch: A list of rows, or a tree.

    Raises:
        LeafMismatchError: The trees differ in a shape or dtype; the message names the leaf.
        TreeStructureError: Their keys differ.
        TypeError: torch cannot collate a row.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> [batch["x"].tolist() for batch in DataLoader(td, batch_size=3)]
        [[0, 1, 2], [3, 4]]
        >>> rows = [(row, i) for i, row in enumerate(td)]
        >>> tdf.collate(rows)[0].batch_size, tdf.collate(rows)[1]
        (torch.Size([5]), tensor([0, 1, 2, 3, 4]))
    """
    # A tree without a batch has no first row for torch to look at.
    if isinstance(batch, TensorCollection):
        return batch
    return torch_collate.default_collate(batch)


def _rows(batch: TensorCollection | Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, TensorCollection):
        return batch
    return stack(batch)


# Only classes of ours are looked up here, so other code sees no difference.
torch_collate.default_collate_fn_map.setdefault(TensorCollection, _rows)
