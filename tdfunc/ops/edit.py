"""Immutable edits: converting values, `set`, `update`, `delete`, `pop`, `untie`, and the `at` handle."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc._collection import Static, TensorCollection, iter_leaves
from tdfunc._errors import BatchSizeError, ImmutableError, MissingKeyError, TieError, explain
from tdfunc._keys import dotted, is_key, missing, unravel
from tdfunc._nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc._shapes import as_size, check_lead
from tdfunc._ties import drop as drop_ties
from tdfunc._ties import group_of, lift, merge
from tdfunc._types import Kind, NestedKey, Node, Path
from tdfunc.ops import storage_writes

T = TypeVar("T", bound=TensorCollection)
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_UNSET: Any = object()


# -- values -----------------------------------------------------------------------------------------------------


def convert(value: Any, size: Size, device: torch.device | None, where: str) -> Node:
    """Return a value as a node of a tree with this batch size and device.

    Tensors are checked, dicts become trees, numbers become expanded tensors, lists of numbers tensors, other
    lists a `NonTensorStack` and other objects `NonTensorData`.
    """
    if isinstance(value, Tensor):
        return _tensor(value, size, device, where)
    if isinstance(value, TensorCollection):
        return _tree(value, size, device, where)
    if isinstance(value, NonTensorBase):
        return _nontensor(value, size, where)
    if isinstance(value, Mapping):
        return build(TensorCollection._open, value, size, device, where)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, _NUMBERS):
        return torch.as_tensor(value, device=device).expand(size)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUS":
            return _nontensor(NonTensorStack._wrap(value.astype(object)), size, where)
        return _tensor(torch.as_tensor(value, device=device), size, device, where)
    if isinstance(value, (list, tuple)):
        return _sequence(value, size, device, where)  # pyright: ignore[reportUnknownArgumentType]
    if value is None:
        raise TypeError(
            explain(f"{where}: None is no value.", expected="a tensor, tree, dict, number or other object", hint="leave the key out, or wrap it: NonTensorData(None).")
        )
    return NonTensorData(value, size)


def _tensor(value: Tensor, size: Size, device: torch.device | None, where: str) -> Tensor:
    try:
        shape = value.shape
    except RuntimeError:  # an uninitialised parameter has no shape yet
        return value
    check_lead(shape, size, where)
    if device is not None and value.device != device:
        return value.to(device)
    return value


def _tree(value: TensorCollection, size: Size, device: torch.device | None, where: str) -> TensorCollection:
    if value._batch_size[: len(size)] != size:
        value = grow(value, size, where)
    if device is not None and value._device != device:
        value = value.to(device)  # pyright: ignore
    return value


def grow(tree: T, size: Size, where: str) -> T:
    """Return a tree with a batch size that all its leaves have."""
    data = {key: convert(node, size, None, f"{where}.{key}") for key, node in tree._data.items()}
    return tree._replace(data, batch_size=size)


def _nontensor(value: NonTensorBase, size: Size, where: str) -> NonTensorBase:
    if isinstance(value, NonTensorData):
        return value.rebatch(size) if value.shape[: len(size)] != size else value
    check_lead(value.shape, size, where)
    return value


def _sequence(value: Sequence[Any], size: Size, device: torch.device | None, where: str) -> Node:
    flat = value
    while len(flat) and isinstance(flat[0], (list, tuple)):
        flat = flat[0]  # pyright: ignore[reportUnknownVariableType]
    if len(flat) and isinstance(flat[0], TensorCollection):
        raise TypeError(explain(f"{where}: a list of trees is not a value.", hint="torch.stack(trees) makes one tree of them."))
    if len(value) and all(isinstance(item, Tensor) for item in value):
        return _tensor(torch.stack(list(value)), size, device, where)
    if not len(flat) or isinstance(flat[0], _NUMBERS):
        try:
            return _tensor(torch.as_tensor(value, device=device), size, device, where)
        except (ValueError, TypeError, RuntimeError) as err:
            if isinstance(err, BatchSizeError):
                raise
    depth, level = 0, value
    while isinstance(level, (list, tuple)) and len(level) and depth < max(len(size), 1):
        depth, level = depth + 1, level[0]
    try:
        stack = NonTensorStack.from_nested(value, depth)
    except (IndexError, TypeError) as err:
        raise BatchSizeError(explain(f"{where}: the list is ragged.", expected=f"lists of the batch size {list(size)}", got=repr(value))) from err
    return _nontensor(stack, size, where)


def build(cls: type[T], source: Mapping[Any, Any], size: Size, device: torch.device | None, where: str = "") -> T:
    """Return a validated tree from a mapping whose keys may be nested."""
    ndim = len(size)
    data: dict[str, Node] = {}
    nested: list[tuple[Path, Any]] = []
    last = None
    trees = False
    for key, value in source.items():
        if type(key) is not str or not key:
            path = unravel(key)
            if len(path) > 1:
                nested.append((path, value))
                continue
            key = path[0]
        # The shape is compared with the last one that passed: leaves of a tree share shapes.
        if type(value) is Tensor and device is None and (not ndim or value.shape == last or value.shape[:ndim] == size):
            last = value.shape if ndim else None
            data[key] = value
            continue
        node = convert(value, size, device, f"{where}.{key}" if where else repr(key))
        data[key] = node
        trees = trees or isinstance(node, TensorCollection)
    static = _lifted(data) if trees else None
    tree = cls._make(data, size, device, None, static)
    for path, value in nested:
        tree = set_path(tree, path, value)
    return tree


def _lifted(data: dict[str, Node]) -> Static | None:
    ties = merge(*[lift(node._ties, key) for key, node in data.items() if isinstance(node, TensorCollection)])
    return Static({}, ties) if ties else None


# -- edits ------------------------------------------------------------------------------------------------------


def set_(tree: T, key: NestedKey, value: Any, kind: Kind | None = None) -> T:
    """Return a tree with one value replaced or added; every path of a tied leaf gets it."""
    path = unravel(key)
    for other in group_of(tree._ties, path) if tree._ties else (path,):
        tree = _set_one(tree, other, value, kind)
        value = get(tree, other) if len(path) > 1 or tree._ties else value
    return tree


def set_path(tree: T, path: Path, value: Any) -> T:
    """`set_` without the ties of other paths."""
    return _set_one(tree, path, value, None)


def _set_one(tree: T, path: Path, value: Any, kind: Kind | None, at: Path = ()) -> T:
    key, rest = path[0], path[1:]
    if not rest:
        node = convert(value, tree._batch_size, tree._device, repr(dotted((*at, key))))
        new = tree._put({key: node}, {key: kind} if kind is not None else None)
        return new if at else _check_ties(new, tree)
    child = tree._get(key) if key in tree._keys() else TensorCollection._open._make({}, tree._batch_size, tree._device)
    if not isinstance(child, TensorCollection):
        raise MissingKeyError(
            explain(
                f"set: {dotted((*at, key))!r} is a leaf, {dotted((*at, *path))!r} cannot be put under it.",
                hint=f"delete({(*at, key)!r}) first.",
            )
        )
    new = tree._put({key: _set_one(child, rest, value, kind, (*at, key))})
    return new if at else _check_ties(new, tree)


def _check_ties(new: T, old: TensorCollection) -> T:
    """Raise if an edit gave two paths of one group different tensors."""
    if not new._ties:
        return new
    for group in new._ties:
        first = get(new, group[0])
        for path in group[1:]:
            if get(new, path) is not first and set(group) & {p for g in old._ties for p in g}:
                raise tie_error(group[0], path)
    return new


def tie_error(first: Path, second: Path) -> TieError:
    """Build the error for two tied paths that would hold different tensors."""
    return TieError(
        explain(
            f"The edit gives the tied paths {dotted(first)!r} and {dotted(second)!r} different tensors.",
            expected="one tensor for both",
            hint=f"set one path (both are written), or separate them first: td.untie({dotted(second)!r}).",
        )
    )


def get(tree: TensorCollection, key: NestedKey, default: Any = _UNSET) -> Node:
    """Return the node at a path, non-tensor data still wrapped."""
    node: Any = tree
    path = unravel(key)
    for i, part in enumerate(path):
        if not isinstance(node, TensorCollection) or part not in node._keys():
            if default is not _UNSET:
                return default
            known = list(node._keys()) if isinstance(node, TensorCollection) else []
            raise missing(path[: i + 1], known)
        node = node._get(part)
    return node


def update(tree: T, other: Mapping[Any, Any] | TensorCollection) -> T:
    """Return a tree with the entries of `other` written over its own, nested trees merged."""
    edits: dict[Path, Any] = {}
    kinds: dict[Path, Kind] = {}
    _collect(tree, other, (), edits, kinds)
    given = set(edits)
    for path in list(edits):
        for tied in group_of(tree._ties, path):
            if tied in given and edits[tied] is not edits[path]:
                raise tie_error(path, tied)
            edits[tied] = edits[path]
    tree = _write_all(tree, edits, kinds)
    if isinstance(other, TensorCollection) and other._ties:
        tree = tree._replace(tree._data, ties=merge(tree._ties, other._ties))
    return tree


def _collect(tree: Any, other: Any, at: Path, edits: dict[Path, Any], kinds: dict[Path, Kind]) -> None:
    items = [(key, other._get(key)) for key in other._keys()] if isinstance(other, TensorCollection) else other.items()
    for key, value in items:
        path = unravel(key)
        mine = get(tree, path, None) if isinstance(tree, TensorCollection) else None
        if isinstance(mine, TensorCollection) and isinstance(value, (TensorCollection, Mapping)):
            _collect(mine, value, (*at, *path), edits, kinds)
        else:
            edits[*at, *path] = value
            if isinstance(other, TensorCollection) and path[0] in other._kinds:
                kinds[*at, *path] = other._kinds[path[0]]


def _write_all(tree: T, edits: dict[Path, Any], kinds: dict[Path, Kind], at: Path = ()) -> T:
    changes: dict[str, Node] = {}
    new_kinds: dict[str, Kind] = {}
    for key in dict.fromkeys(path[0] for path in edits):
        inner = {path[1:]: value for path, value in edits.items() if path[0] == key}
        inner_kinds = {path[1:]: kind for path, kind in kinds.items() if path[0] == key}
        if () in inner:
            changes[key] = convert(inner.pop(()), tree._batch_size, tree._device, repr(dotted((*at, key))))
            if () in inner_kinds:
                new_kinds[key] = inner_kinds.pop(())
        if inner:
            child = changes.get(key) or (tree._get(key) if key in tree._keys() else TensorCollection._open._make({}, tree._batch_size, tree._device))
            if not isinstance(child, TensorCollection):
                raise MissingKeyError(explain(f"update: {dotted((*at, key))!r} is a leaf, nothing can be put under it.", hint="delete it first."))
            changes[key] = _write_all(child, inner, inner_kinds, (*at, key))
    return tree._put(changes, new_kinds or None)


def delete(tree: T, key: NestedKey) -> T:
    """Return a tree without a path; the other paths of a tied leaf keep it."""
    path = unravel(key)
    get(tree, path)
    return delete_path(tree, path)


def delete_path(tree: T, path: Path) -> T:
    """`delete` of a path that exists."""
    if len(path) == 1:
        new = tree._put({path[0]: None})
        return new._replace(new._data, ties=drop_ties(new._ties, path)) if new._ties else new
    new = tree._put({path[0]: delete_path(tree._get(path[0]), path[1:])})
    return new._replace(new._data, ties=drop_ties(new._ties, path)) if new._ties else new


def untie(tree: T, key: NestedKey) -> T:
    """Return a tree in which a path of a tied leaf stands alone, with its own copy of the tensor."""
    path = unravel(key)
    leaf = get(tree, path)
    if len(group_of(tree._ties, path)) == 1:
        raise TieError(explain(f"untie: {dotted(path)!r} is not tied.", got=f"groups {[list(map(dotted, g)) for g in tree._ties]}"))
    return _put_untied(tree, path, leaf.clone())


def _put_untied(tree: T, path: Path, leaf: Any) -> T:
    rest = _put_untied(tree._get(path[0]), path[1:], leaf) if len(path) > 1 else leaf
    data = tree._data | {path[0]: rest}
    return tree._replace(data, ties=drop_ties(tree._ties, path))


def refuse_inplace(inplace: bool, call: str) -> None:
    """Raise for the incumbent's `inplace=True`."""
    if inplace:
        raise ImmutableError(explain("inplace=True: a tree is never changed.", hint=f"write td = td.{call}."))


class At:
    """A place in a tree (`td.at[index]` or `td.at["a", "b"]`), and the pure ways to change what is there."""

    __slots__ = ("_place", "_tree")

    def __init__(self, tree: TensorCollection, place: Any) -> None:
        self._tree, self._place = tree, place

    @property
    def _path(self) -> Path | None:
        return unravel(self._place) if is_key(self._place) else None

    def get(self) -> Any:
        """Return what is there."""
        return self._tree[self._place]  # pyright: ignore

    def set(self, value: Any) -> Any:
        """Return a tree with the value there; at an index the value is a tree (or a scalar for all leaves)."""
        return self._change(value, "set", lambda _, new: new)

    def add(self, value: Any) -> Any:
        """Return a tree with the value added there (repeated rows of an index add up)."""
        return self._change(value, "add", lambda old, new: old + new)

    def mul(self, value: Any) -> Any:
        """Return a tree multiplied by the value there."""
        return self._change(value, "mul", lambda old, new: old * new)

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        """Return a tree with `fn` applied there: to the leaves of the rows, or to the leaf or sub-tree of a path."""
        if self._path is not None:
            return set_(self._tree, self._path, fn(get_value(self._tree, self._path)))
        return write_rows(self._tree, self._place, None, lambda old, _: fn(old), "apply")

    def set_(self, value: Any) -> Any:
        """Write a row into the storage of the tree and return the tree; without leaves, allocate them first."""
        if self._path is not None:
            storage_writes.write_leaf(self._tree, self._path, value)
            return self._tree
        return storage_writes.write_row(self._tree, self._place, value)

    def _change(self, value: Any, name: str, combine: Callable[[Any, Any], Any]) -> Any:
        if self._path is None:
            return write_rows(self._tree, self._place, value, combine, name)
        if name == "set":
            return set_(self._tree, self._path, value)
        return set_(self._tree, self._path, combine(get_value(self._tree, self._path), value))


def get_value(tree: TensorCollection, key: NestedKey, default: Any = _UNSET) -> Any:
    """Return what `td[key]` returns: the node, or the plain value of non-tensor data."""
    node = get(tree, key, default)
    return node.value if isinstance(node, (NonTensorData, NonTensorStack)) else node


def write_rows(tree: T, index: Any, value: Any, combine: Callable[[Any, Any], Any], name: str) -> T:
    """Return a tree with `combine(old rows, value)` at an index of the batch, leaf by leaf."""
    rows = tree._index(index)
    if isinstance(value, Mapping):
        value = build(TensorCollection._open, value, rows._batch_size, tree._device)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, TensorCollection):
        _check_rows(rows, value, name)
    parts = storage_writes.index_parts(index, tree._batch_size)
    return _write_node(tree, parts, value, combine, name)


def _write_node(tree: T, parts: tuple[Any, ...], value: Any, combine: Callable[[Any, Any], Any], name: str) -> T:
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        new = value._data[key] if isinstance(value, TensorCollection) else value
        if isinstance(node, TensorCollection):
            data[key] = _write_node(node, parts, new, combine, name)
        elif isinstance(node, Tensor):
            data[key] = _write_leaf_rows(node, parts, new, combine, name)
        elif isinstance(node, NonTensorBase) and isinstance(new, NonTensorBase) and name == "set":
            data[key] = storage_writes.nontensor_rows(node, parts, new)
        else:
            data[key] = node
    return tree._replace(data)


def _write_leaf_rows(leaf: Tensor, parts: tuple[Any, ...], new: Any, combine: Callable[[Any, Any], Any], name: str) -> Tensor:
    # index_put on a dense copy works inside vmap and grad, where in-place writes to the input would not be legal.
    if name == "add" and all(isinstance(p, Tensor) for p in parts):
        value = new if isinstance(new, Tensor) else torch.as_tensor(new, dtype=leaf.dtype, device=leaf.device)
        return leaf.index_put(parts, value.to(leaf.dtype), accumulate=True)
    out = leaf.clone(memory_format=torch.contiguous_format)
    result = combine(leaf[parts], new)
    if isinstance(result, Tensor) and result.dtype != leaf.dtype and not torch.can_cast(result.dtype, leaf.dtype):
        out = out.to(torch.promote_types(result.dtype, leaf.dtype))
    out[parts] = result
    return out


def _check_rows(rows: TensorCollection, value: TensorCollection, name: str) -> None:
    mine = {path for path, _ in iter_leaves(rows)}
    theirs = {path for path, _ in iter_leaves(value)}
    if mine != theirs:
        raise MissingKeyError(
            explain(
                f"at[...].{name}: the rows have other keys than the tree.",
                expected=f"{sorted(map(dotted, mine))}",
                got=f"{sorted(map(dotted, theirs))}",
                hint="earlier rows have no value for a new key, later ones none for a missing one: set the key on the whole tree.",
            )
        )
    if value._batch_size != rows._batch_size:
        raise BatchSizeError(explain(f"at[...].{name}: the rows have another batch size.", expected=str(list(rows._batch_size)), got=str(list(value._batch_size))))


class EditMethods(TensorCollection):
    """`set`, `update`, `delete`, `pop`, `at` and their kin."""

    __slots__ = ()

    def set(self, key: NestedKey, value: Any, inplace: bool = False, *, kind: Kind | None = None) -> Any:
        """Return a tree with one entry replaced or added; intermediate trees are made.

        Every path of a tied leaf gets the value.

        Args:
            key: A str or nested tuple of str.
            value: A tensor, tree, dict, number, list or any other object but None.
            inplace: Write the values into the storage that the entry has now, and return this tree.
            kind: What the leaf is, for trees of a module's parameters.

        Raises:
            BatchSizeError: The value does not start with the batch size; the message names the path.
            TieError: A sub-tree would separate tied paths.
        """
        if (
            type(key) is str
            and type(value) is Tensor
            and self._static is None
            and self._device is None
            and not inplace
            and kind is None
            and key
            and value.shape[: len(self._batch_size)] == self._batch_size
        ):
            return self._make(self._data | {key: value}, self._batch_size, None, self._names)
        if inplace:
            storage_writes.write_leaf(self, unravel(key), value)
            return self
        return set_(self, key, value, kind)

    def update(self, other: Mapping[Any, Any] | TensorCollection | None = None, inplace: bool = False, **entries: Any) -> Any:
        """Return a tree with the entries of a dict or tree written over its own; nested trees merge.

        Raises:
            TieError: Two paths of one tied leaf are given different tensors.
        """
        refuse_inplace(inplace, "update(other)")
        tree = update(self, other) if other is not None else self
        return update(tree, entries) if entries else tree

    def delete(self, key: NestedKey) -> Any:
        """Return a tree without one entry (a leaf or a sub-tree).

        Raises:
            MissingKeyError: There is no such entry.
        """
        return delete(self, key)

    def pop(self, key: NestedKey, default: Any = _UNSET) -> tuple[Any, Any]:
        """Return the value of an entry and a tree without it.

        Raises:
            MissingKeyError: There is no such entry and no default.
        """
        value = get_value(self, key, default)
        return value, (delete(self, key) if get(self, key, None) is not None else self)

    def setdefault(self, key: NestedKey, value: Any) -> Any:
        """Return this tree if it has the entry, else one with it set."""
        return self if get(self, key, None) is not None else set_(self, key, value)

    def untie(self, key: NestedKey) -> Any:
        """Return a tree in which one path of a tied leaf stands alone, with a copy of the tensor.

        Raises:
            TieError: The path is not tied.
        """
        return untie(self, key)

    @property
    def at(self) -> "_AtGetter":
        """The pure spelling of assignment: `td.at[index].set(value)`, `.add`, `.mul`, `.apply(fn)`, `.get()`."""
        return _AtGetter(self)

    # -- storage writes: values into the memory that the tree has, as torch's names that end in _ -----------------

    def set_(self, key: NestedKey, value: Any) -> Any:
        """Write values into the storage of an existing entry, casting as `Tensor.copy_`; returns this tree."""
        storage_writes.write_leaf(self, unravel(key), value)
        return self

    def update_(self, other: Mapping[Any, Any] | TensorCollection) -> Any:
        """Write the entries of `other` into the storage of entries that exist; returns this tree."""
        storage_writes.write_tree(self, other, complete=False)
        return self

    def copy_(self, other: Mapping[Any, Any] | TensorCollection) -> Any:
        """Write the values of a tree with the same keys into the storage of this one; returns this tree."""
        storage_writes.write_tree(self, other, complete=True)
        return self


class _AtGetter:
    __slots__ = ("_tree",)

    def __init__(self, tree: TensorCollection) -> None:
        self._tree = tree

    def __getitem__(self, place: Any) -> At:
        return At(self._tree, place)


def select_paths(paths: Iterable[NestedKey]) -> list[Path]:
    """Unravel several keys."""
    return [unravel(key) for key in paths]


__all__ = ["as_size"]
