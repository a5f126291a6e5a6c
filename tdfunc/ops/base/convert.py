"""Values into nodes: conversions for constructors and edits, checked against a batch size and device."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, Static, TensorCollection
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, MissingKeyError, error
from tdfunc.core.keys import unravel
from tdfunc.core.memory import mark_read_only
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.shapes import as_names, check_lead, one_shape, shape_of
from tdfunc.core.ties import lift, merge
from tdfunc.core.types import Names, Node, Path
from tdfunc.ops.base.cast import to

T = TypeVar("T", bound=TensorCollection)
_STR = frozenset((str,))
NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def accept(tree: TensorCollection, key: str, value: Any, where: str) -> Node:
    """Return a value as a node under a key of a tree; a typed one may cast it, and takes None to empty a field."""
    if tree._accept is not None:
        return tree._accept(key, value, where)
    return convert(value, tree._batch_size, tree._device, where)


def convert(value: Any, size: Size, device: torch.device | None, where: str) -> Node:
    """Return a value as a node of a tree with this batch size and device; `where` is its dotted path.

    Tensors are checked, dicts become trees, numbers become expanded tensors, lists of numbers tensors, other
    lists a `NonTensorStack` and other objects `NonTensorData`.
    """
    if isinstance(value, Tensor):
        return _tensor(value, size, device, where)
    if isinstance(value, TensorCollection):
        if value._batch_size[: len(size)] == size:
            tree = value
        else:
            tree = resize(value, size, where)
        if device is None:
            return tree
        return to(tree, device)
    if isinstance(value, NonTensorBase):
        return _nontensor(value, size, where)
    if isinstance(value, Mapping):
        tree = adopt(value)
        if tree is not value:
            return convert(tree, size, device, where)
        return build(TensorCollection._open, tree, size, device, where)
    if isinstance(value, NUMBERS):
        return as_tensor(value, f"{where!r}", device).expand(size)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUS":
            return _nontensor(NonTensorStack._wrap(value.astype(object)), size, where)
        return _tensor(as_tensor(value, f"{where!r}", device), size, device, where)
    if isinstance(value, (list, tuple)):
        return _sequence(value, size, device, where)
    if value is None:
        raise error(
            TypeError,
            f"{where!r}: None cannot be a value.",
            expected="a tensor, tree, dict, number or other object",
            hint="leave the key out, or wrap it: NonTensorData(None).",
        )
    return NonTensorData(value, size)


def as_tensor(value: Any, where: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number or an array, whose memory is shared where torch can; `where` begins the message of an error."""
    # torch reads numpy's unsigned numbers from arrays only.
    source = np.asarray(value) if isinstance(value, np.number) else value
    try:
        tensor = torch.as_tensor(source, dtype=dtype, device=device)
    except (OverflowError, TypeError) as err:
        raise _no_dtype(where, value, err) from err
    except ValueError as err:
        if not isinstance(source, np.ndarray):
            raise _no_dtype(where, value, err) from err
        # A copy has the strides and the byte order that torch requires.
        native = np.array(source, source.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(native, dtype=dtype, device=device)
    if isinstance(source, np.ndarray) and not source.flags.writeable and tensor.data_ptr() == source.ctypes.data:
        mark_read_only(tensor)
    return tensor


def _no_dtype(where: str, value: Any, err: Exception) -> LeafMismatchError:
    return LeafMismatchError(
        f"{where}: torch does not have the dtype of the numbers.",
        got=f"{type(value).__name__}: {err}",
        hint="float(value) or value.astype(...) rounds; NonTensorData(value) keeps it as it is.",
    )


def _tensor(value: Tensor, size: Size, device: torch.device | None, where: str) -> Tensor:
    shape = shape_of(value)
    if shape is None:  # an uninitialised parameter
        return value
    check_lead(shape, size, where)
    if device is not None and value.device != device:
        return value.to(device)
    return value


def _nontensor(value: NonTensorBase, size: Size, where: str) -> NonTensorBase:
    if isinstance(value, NonTensorData):
        if value.shape[: len(size)] != size:
            return value.rebatch(size)
        return value
    check_lead(value.shape, size, where)
    return value


def resize(tree: T, size: Size, where: str = "") -> T:
    """Return the tree with a batch size that all its leaves start with; a longer one of a nested tree stays."""
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        path = f"{where}.{key}" if where else key
        if isinstance(node, TensorCollection):
            if node._batch_size[: len(size)] == size:
                data[key] = node
            else:
                data[key] = resize(node, size, path)
        else:
            data[key] = convert(node, size, None, path)
    names = None
    if tree._names is not None:
        # New dimensions, which are the last, have none.
        added = [None] * (len(size) - len(tree._names))
        names = as_names([*tree._names[: len(size)], *added], len(size))
    return tree._replace(data, batch_size=size, names=names)


def _sequence(value: Sequence[Any], size: Size, device: torch.device | None, where: str) -> Node:
    first: Any = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, TensorCollection):
        raise error(
            TypeError,
            f"{where!r}: trees are in a list, and not stacked.",
            got=f"{len(value)} trees",
            hint="torch.stack(trees) makes one tree of them.",
        )
    if value and all(isinstance(item, Tensor) for item in value):
        try:
            stacked = torch.stack(list(value))
        except RuntimeError as err:
            raise LeafMismatchError(
                f"{where!r}: the tensors of a list have different shapes.",
                got=str(err),
                hint="pad them, or keep them ragged: tdf.lazy_stack of a tree for each.",
            ) from err
        return _tensor(stacked, size, device, where)
    if isinstance(first, (*NUMBERS, list, tuple)):
        try:
            tensor = torch.as_tensor(value, device=device)
        except (OverflowError, ValueError, TypeError, RuntimeError) as err:
            # Lists that torch cannot read are non-tensor data, except numbers that are too large for it.
            if "Overflow" in str(err):
                raise _no_dtype(repr(where), value, err) from err
        else:
            return _tensor(tensor, size, device, where)
    # The outer levels are the batch; without a batch the list itself is one dimension.
    most = max(len(size), 1)
    depth = 0
    level = value
    while isinstance(level, (list, tuple)) and level and depth < most:
        depth += 1
        level = level[0]
    return as_rows(value, depth, size, where)


def as_rows(value: Sequence[Any], depth: int, size: Size, where: str) -> NonTensorBase:
    """Return the items of nested lists as non-tensor data, one for each row."""
    try:
        stack = NonTensorStack.from_nested(value, depth)
        if 0 in size:
            # The dimensions behind an empty one are not in the lists.
            empty = np.empty(size, dtype=object)
            if value == empty.tolist():
                stack = NonTensorStack._wrap(empty)
    except ValueError as err:
        raise BatchSizeError(
            f"{where!r}: the list is ragged.", expected=f"lists of batch size {list(size)}", got=repr(value)
        ) from err
    return _nontensor(stack, size, where)


def adopt(source: Any) -> Any:
    """Return a tree of tensordict's, which is read by its own methods, as one of ours; anything else as it is."""
    if isinstance(source, TensorCollection):
        return source
    if not hasattr(source, "batch_size") or not hasattr(source, "to_dict"):
        return source
    if hasattr(source, "tensordicts"):
        return TensorCollection._lazy([adopt(tree) for tree in source.tensordicts], source.stack_dim)
    # `to_dict` has no batch sizes of nested trees; in `items` non-tensor data are wrapped, in stacks that are mappings.
    trees = {key: node for key, node in source.items() if isinstance(node, Mapping)}
    nodes = {key: adopt(node) for key, node in trees.items() if not getattr(node, "_is_non_tensor", False)}
    values = {key: value for key, value in source.to_dict().items() if value is not None}
    size = Size(source.batch_size)
    tree = build(TensorCollection._open, values | nodes, size, source.device)
    return tree._replace(tree._data, batch_size=size, names=as_names(source.names, len(size)))


def build(cls: type[T], source: Mapping[Any, Any], size: Size, device: torch.device | None, where: str = "") -> T:
    """Return a validated tree from a mapping whose keys may be nested."""
    data, static = read_mapping(source, size, device, where)
    return cls._make(data, size, device, None, static)


def read_mapping(
    source: Mapping[Any, Any], size: Size, device: torch.device | None, where: str = ""
) -> tuple[dict[str, Node], Static | None]:
    """Return the validated data of a tree, and the ties of its sub-trees."""
    if device is None and type(source) is dict and not is_compiling() and is_plain(source, size):
        return source.copy(), None
    ndim = len(size)
    data: dict[str, Node] = {}
    nested: dict[str, dict[Path, Any]] = {}
    last: Any = None
    holds_trees = False
    for key, value in source.items():
        if type(key) is not str or not key:
            key, *rest = unravel(key)
            if rest:
                nested.setdefault(key, {})[tuple(rest)] = value
                data.setdefault(key, None)
                continue
        # The shape is compared with the last one that passed: leaves of a tree share shapes.
        if type(value) is Tensor and device is None and not value.is_nested:
            shape = value.shape if ndim else last
            if shape == last or shape[:ndim] == size:
                last = shape
                data[key] = value
                continue
        node = convert(value, size, device, f"{where}.{key}" if where else key)
        data[key] = node
        holds_trees = holds_trees or isinstance(node, TensorCollection)
    if nested:
        _add_nested(data, nested, size, device, where)
    if holds_trees or nested:
        return data, lift_ties(data)
    return data, None


def _add_nested(
    data: dict[str, Node], nested: dict[str, dict[Path, Any]], size: Size, device: torch.device | None, where: str
) -> None:
    """Add the entries under nested keys to the trees that are given under their first keys, or as trees."""
    for key, entries in nested.items():
        path = f"{where}.{key}" if where else key
        mine = data[key]
        inner_size = mine._batch_size if isinstance(mine, TensorCollection) else size
        tree = build(TensorCollection._open, entries, inner_size, device, path)
        data[key] = tree if mine is None else _join(mine, tree, path)


def is_plain(source: dict[Any, Any], size: Size) -> bool:
    """Return True if all are plain tensors of one shape that starts with the size, under str keys: the common case."""
    if "" in source or not _STR.issuperset(map(type, source)) or not PLAIN.issuperset(map(type, source.values())):
        return False
    if not size or not source:
        return True
    shape = one_shape(source.values())
    return shape is not None and shape[: len(size)] == size


def _join(mine: Node, new: Node, where: str) -> TensorCollection:
    """Return two trees that are given under one key as one."""
    if not isinstance(mine, TensorCollection) or not isinstance(new, TensorCollection):
        raise MissingKeyError(f"{where!r} is given twice.", got=f"{type(mine).__name__} and {type(new).__name__}")
    nodes = {key: new._get(key) for key in new._keys()}
    for key, node in nodes.items():
        if key in mine._keys():
            nodes[key] = _join(mine._get(key), node, f"{where}.{key}")
    return mine._put(nodes)


def join_nodes(
    data: dict[str, Node], size: Size, device: torch.device | None = None, names: Names | None = None
) -> Any:
    """Return an open tree around checked nodes, which has the ties of its sub-trees."""
    return TensorCollection._open._make(data, size, device, names, lift_ties(data))


def lift_ties(data: dict[str, Node]) -> Static | None:
    """Return the ties of the sub-trees among the nodes of a tree, as its static data."""
    tied = [(key, node) for key, node in data.items() if isinstance(node, TensorCollection) and node._ties]
    if tied:
        return Static({}, merge(*[lift(node._ties, key) for key, node in tied]))
    return None
