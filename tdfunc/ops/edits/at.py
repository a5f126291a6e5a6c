"""The `at` handle: pure changes at an index of the batch, at a path, or at the leaves that a filter chooses."""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, check_one_shape
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, MissingKeyError, TieError, error
from tdfunc.core.keys import Filter, dotted, is_key, unravel
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.shapes import EMPTY, dim_size, normalize_index
from tdfunc.core.types import Path
from tdfunc.core.walk import Difference, zip_trees
from tdfunc.ops.base.cast import keeps_number, keeps_values
from tdfunc.ops.base.convert import NUMBERS, adopt, as_tensor, build
from tdfunc.ops.base.foreach import binary, over_batch_op
from tdfunc.ops.base.reading import get, get_value, iter_items
from tdfunc.ops.edits import storage_writes
from tdfunc.ops.edits.maps import apply

T = TypeVar("T", bound=TensorCollection)


class At(Generic[T]):
    """A place in a tree, and the pure ways to change it: `td.at[index]`, `td.at["a", "b"]`, `td.at[filter]`.

    An index takes rows of all leaves, a path one leaf or sub-tree, a `Filter` the leaves that it chooses. `set`
    requires that the place exists and keeps its keys and shapes; `td.set` adds entries and gives them other shapes.

    Examples:
        >>> td = TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3])
        >>> new = td.at[0].set(td[1] + 5)
        >>> new["a"], td["a"]
        (tensor([5., 0., 0.]), tensor([0., 0., 0.]))
        >>> td.at["b"].add(1)["b"]
        tensor([2., 2., 2.])
        >>> td.at[tdf.Filter("b")].set(0)["b"]
        tensor([0., 0., 0.])
    """

    __slots__ = ("_place", "_tree")

    def __init__(self, tree: T, place: Any) -> None:
        # `Any`: reading and writing at a path are methods of the public classes, a layer above.
        self._tree: Any = tree
        self._place = place

    def __getitem__(self, index: Any) -> NoReturn:
        raise error(
            TypeError,
            f"at[{self._place!r}][...]: one place must be given.",
            hint="td.at[key].apply(fn) changes a part of an entry, td.at[index].apply(fn) an entry of some rows.",
        )

    def get(self) -> Any:
        """Return the rows, entry or part of the tree there."""
        if self._is_filter:
            return self._tree.partition(self._place)[0]
        return self._tree[self._place]

    def set(self, value: Any) -> T:
        """Return a new tree in which `value` replaces the selected rows, leaves or entry.

        Args:
            value: A number, which fills the leaves there; at an index or filter also a tree of the rows or leaves, or
                a tensor over their batch; at a path also any value of the entry's shape.

        Raises:
            MissingKeyError: The path does not exist, or the rows lack a key of the tree or have one more.
            BatchSizeError: The batch size of the rows differs from the index.
            LeafMismatchError: The shape of a leaf differs, or casting rows to its dtype would lose values.
        """
        if self._is_filter:
            return self._change_part(lambda part: _as_rows(part, value, "set"))
        if not is_key(self._place):
            return write_rows(self._tree, self._place, value, "set")
        path = unravel(self._place)
        if isinstance(value, NUMBERS):
            done = _change_in_stack(self._tree, path, lambda tree, at: At(tree, at).set(value))
            if done is not None:
                return done
        old = get(self._tree, path)
        call = f"at[{self._place!r}].set"
        # A number fills the leaves, as it fills rows; `td.set` makes a leaf of the batch size.
        if isinstance(old, (Tensor, TensorCollection)) and isinstance(value, NUMBERS):
            if isinstance(old, TensorCollection):
                value = _spread(old, value, "set")
            else:
                value = _filled(old, value, call)
        new = self._tree.set(path, value)
        _check_shapes(old, get(new, path, None), path, call)
        return new

    def add(self, value: Any) -> T:
        """Return a tree with the value added there; a row that the index contains twice is added to twice.

        At a key in a lazy stack the value is divided among the trees as by `set`; one without dimensions goes to all.

        Raises:
            TypeError: The entry at the path is non-tensor data.
        """
        if self._is_filter:
            return self._change_part(lambda part: part + value)
        if is_key(self._place):
            return _change_entry(self._tree, unravel(self._place), operator.add, "add", value)
        return write_rows(self._tree, self._place, value, "add")

    def mul(self, value: Any) -> T:
        """Return a tree multiplied by the value there; the value is read as by `add`.

        Raises:
            ValueError: The index contains a row twice.
            TypeError: The entry at the path is non-tensor data.
        """
        if self._is_filter:
            return self._change_part(lambda part: part * value)
        if is_key(self._place):
            return _change_entry(self._tree, unravel(self._place), operator.mul, "mul", value)
        return self._change(lambda rows: binary(rows, value, "mul", None), "mul")

    def apply(self, fn: Callable[[Any], Any]) -> T:
        """Return a tree with `fn` applied to each leaf's rows there, to the leaves of a filter, or to a path's entry.

        At a path in a lazy stack `fn` is applied to the leaf or sub-tree of each of its trees.

        Raises:
            ValueError: The index contains a row twice.
        """
        if self._is_filter:
            return apply(self._tree, fn, (), where=self._place)
        if is_key(self._place):
            return _change_entry(self._tree, unravel(self._place), fn, "apply")
        return self._change(lambda rows: apply(rows, fn, ()), "apply")

    def set_(self, value: Any) -> Any:
        """Write a row into the storage of the tree and return the tree; without leaves, allocate them first.

        A number or a tensor over the batch is written to all leaves, as by `set`.
        """
        if is_key(self._place):
            return self._tree.set_(self._place, value)
        if isinstance(value, (Tensor, *NUMBERS)):
            value = _spread(self._tree._index(self._place), value, "set_")
        return storage_writes.write_row(self._tree, self._place, value)

    @property
    def _is_filter(self) -> bool:
        return isinstance(self._place, Filter)

    def _change_part(self, fn: Callable[[Any], Any]) -> Any:
        """Return the tree with its part there changed."""
        return self._tree.update(fn(self._tree.partition(self._place)[0]))

    def _change(self, fn: Callable[[Any], Any], call: str) -> Any:
        size = self._tree._batch_size
        parts = normalize_index(self._place, size)
        if any(isinstance(part, Tensor) for part in parts):
            # Only the dimensions that the index names count, and the others may be ragged.
            taken = _positions(size[: sum(p is not None and not isinstance(p, bool) for p in parts)], parts)
            if len(taken.unique()) < taken.numel():
                raise error(
                    ValueError,
                    f"at[...].{call}: the index contains a row more than once.",
                    got=repr(self._place),
                    hint="to add to a row more than once, use at[index].add.",
                )
        return write_rows(self._tree, self._place, fn(self._tree._index(self._place)), call)


def _check_shapes(old: Any, new: Any, path: Path, call: str) -> None:
    """Raise unless an entry keeps its shape, and a sub-tree its keys; the parts of a lazy stack may change theirs."""
    one = [TensorCollection._open._make({path[-1]: node}, EMPTY) for node in (old, new)]
    pairs = zip_trees(*one, at=path[:-1])
    if isinstance(pairs, Difference):
        raise pairs.error(call, hint="td.set replaces an entry by one of another kind, or with other keys.")
    for at, mine, twin in pairs:
        if isinstance(mine, Tensor) and twin.shape != mine.shape:
            raise LeafMismatchError(
                f"{call}: the value for {dotted(at)!r} does not have the shape of the leaf.",
                expected=f"shape {list(mine.shape)}",
                got=f"shape {list(twin.shape)}",
                hint="td.set replaces a leaf by one of another shape.",
            )


def _change_entry(tree: Any, path: Path, fn: Callable[..., Any], call: str, *values: Any) -> Any:
    """Return the tree with `fn(entry, *values)` at a path; in a stack, in each of its trees."""
    old = get_value(tree, path)
    done = _change_in_stack(tree, path, lambda t, at, *parts: _change_entry(t, at, fn, call, *parts), *values)
    if done is not None:
        return done
    if values and isinstance(get(tree, path), NonTensorBase):
        raise error(
            TypeError,
            f"at[...].{call}: {dotted(path)!r} is not a tensor or a tree.",
            got=type(old).__name__,
            hint="td.at[key].apply(fn) makes another value of it.",
        )
    return tree.set(path, fn(old, *values))


def _change_in_stack(tree: Any, path: Path, fn: Callable[..., Any], *values: Any) -> Any:
    """Return the tree with `fn(part, rest of the path, *values)` for each tree of a stack on the path, or None."""
    node: Any = tree
    for i, key in enumerate(path):
        if node._is_lazy:
            done = _change_each(node, path[i:], fn, values)
            return tree.set(path[:i], done) if i else done
        node = node._get(key) if key in node._keys() else None
        if not isinstance(node, TensorCollection):
            return None
    return None


def _change_each(stack: Any, path: Path, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Return the stack of `fn(tree, path, *its part of each value)` for its trees."""

    def change(tree: Any, *parts: Any) -> Any:
        return fn(tree, path, *map(_unwrapped, parts))

    return stack._each(change, *map(_uncut, values))


def _uncut(value: Any) -> Any:
    """Wrap a tensor of no dimensions, which cannot be cut and is for every tree of a stack."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        return NonTensorData(value)
    return value


def _unwrapped(value: Any) -> Any:
    return value.data if isinstance(value, NonTensorData) else value


def _positions(size: Size, parts: tuple[Any, ...]) -> Tensor:
    """Return the numbers of the rows that an index takes, counted through the whole batch."""
    if -1 in size:
        dim_size(size, size.index(-1), "at[...]")
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    return torch.arange(size.numel(), device=device).reshape(size)[parts]


def write_rows(tree: T, index: Any, value: Any, call: str) -> T:
    """Return a tree with rows replaced (or, for "add", added to) at an index of the batch."""
    parts = normalize_index(index, tree._batch_size)
    rows = tree._index(index)
    if tree._is_lazy:
        value = _as_tree(rows, value, call)
        return tree._shape(LeafOp("write_rows", lambda old: old, batch=True, args=(parts, call)), value)
    value = _as_rows(rows, value, call)
    taken = _positions(tree._batch_size, parts)
    count = tree._batch_size.numel()
    n = len(tree._batch_size)

    def leaf(old: Any, new: Any) -> Any:
        if isinstance(old, NonTensorBase):
            if call == "set":
                return storage_writes.nontensor_rows(old, parts, new)
            return old
        features = old.shape[n:]
        # index_put works inside vmap and grad, where writing to a copy of the leaf may not be legal.
        flat = old.reshape(count, *features)
        new = new.reshape(taken.numel(), *features).to(old.dtype)
        rows = as_leaf(taken.reshape(-1), flat)
        return flat.index_put((rows,), new, accumulate=call == "add").reshape(old.shape)

    return tree._shape(LeafOp("write_rows", leaf, batch=True, args=(parts, call)), value)


def _as_tree(rows: TensorCollection, value: Any, call: str) -> TensorCollection:
    """Return rows that are given as a tree, dict, number or tensor as a tree."""
    value = adopt(value)
    if isinstance(value, Mapping):
        return build(TensorCollection._open, value, rows._batch_size, rows._device)
    if isinstance(value, TensorCollection):
        return value
    return _spread(rows, value, call)


def _as_rows(rows: TensorCollection, value: Any, call: str) -> TensorCollection:
    """Return a value as a tree that can replace these rows."""
    tree = _as_tree(rows, value, call)
    _check_rows(rows, tree, f"at[...].{call}")
    return tree


def _spread(rows: T, value: Any, call: str) -> T:
    """Return the tree of a number or of a tensor over the rows' batch, in the shape of the rows."""
    if isinstance(value, NUMBERS):
        return rows._map(LeafOp("full", lambda x: _filled(x, value, f"at[...].{call}")))
    if isinstance(value, Tensor):
        return rows._map(over_batch_op(rows, f"at[...].{call}", lambda x, operand: operand.expand(x.shape), value))
    raise error(TypeError, f"at[...].{call}: rows are not a tree, dict, number or tensor.", got=type(value).__name__)


def _filled(leaf: Tensor, value: Any, where: str) -> Tensor:
    """Return a number in the leaf's shape, and in its dtype if that keeps it: 0 fits a bool leaf, 1.5 no int leaf."""
    number = value.item() if isinstance(value, np.generic) else value
    dtype = leaf.dtype if keeps_number(number, leaf.dtype) else None
    if isinstance(number, int) and leaf.dtype.is_floating_point and abs(number) < 2**1023:
        # torch cannot fill with an integer of more than 64 bits; a float of its size can.
        number = float(number)
    made = as_tensor(number, where, leaf.device, dtype)
    return as_leaf(made, leaf).expand(leaf.shape)


def as_leaf(made: Tensor, leaf: Any) -> Tensor:
    """Return a tensor of ours for use with a leaf: a DTensor works with others of its kind only."""
    if type(leaf) in PLAIN or not hasattr(leaf, "device_mesh"):
        return made
    mesh = leaf.device_mesh
    # Not the placements of the leaf: its ranks may have parts of a sum, and each of them has all of the tensor.
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return type(leaf).from_local(made, mesh, [replicate] * mesh.ndim)


def _check_rows(rows: TensorCollection, value: TensorCollection, call: str) -> None:
    """Raise unless a tree has the paths, the batch size, the shapes and the ties of the rows that it replaces."""
    check_one_shape(value, call)
    mine = dict(iter_items(rows, True, True))
    theirs = dict(iter_items(value, True, True))
    if mine.keys() != theirs.keys():
        storage_writes.check_kinds(call, rows, value)
        raise MissingKeyError(
            f"{call}: the rows have other keys than the tree.",
            expected=f"{sorted(map(dotted, mine))}",
            got=f"{sorted(map(dotted, theirs))}",
            hint="td.at[i].set(td[i].update(rows)) writes some keys; a key for all rows is set on the whole tree.",
        )
    if value._batch_size != rows._batch_size:
        raise BatchSizeError(
            f"{call}: the rows have another batch size.",
            expected=str(list(rows._batch_size)),
            got=str(list(value._batch_size)),
        )
    for path, old in mine.items():
        if isinstance(old, Tensor):
            _check_row_leaf(old, theirs[path], path, call)
    for group in rows._ties:
        if any(get(value, path) is not get(value, group[0]) for path in group[1:]):
            names = " and ".join(repr(dotted(path)) for path in group)
            raise TieError(f"{call}: the tied paths {names} are given different rows.", expected="one tensor")


def _check_row_leaf(old: Tensor, new: Any, path: Path, call: str) -> None:
    is_tensor = isinstance(new, Tensor)
    if is_tensor and new.shape == old.shape and keeps_values(new.dtype, old.dtype):
        return
    raise LeafMismatchError(
        f"{call}: the rows for {dotted(path)!r} do not fit.",
        expected=f"shape {list(old.shape)}, {old.dtype}",
        got=f"shape {list(new.shape)}, {new.dtype}" if is_tensor else type(new).__name__,
        hint="cast or reshape them first; a dtype that loses values is never cast to.",
    )
