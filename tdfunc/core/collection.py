"""`TensorCollection`: the slots of every tree and the primitives that operations reach it by.

Operations live in `ops/`; they describe their effect on one leaf and on a batch size as a `LeafOp` and hand it to
a primitive. A class with another representation (a lazy stack) overrides primitives and nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from functools import partial, wraps
from multiprocessing.context import get_spawning_popen
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from tdfunc.core.context import is_compiling
from tdfunc.core.errors import ImmutableError, LeafMismatchError, TreeStructureError
from tdfunc.core.keys import dotted, is_key, missing, unravel
from tdfunc.core.memory import MIN_BYTES, read_rows_ahead
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import (
    check_positions,
    index_names,
    index_size,
    normalize_index,
    one_shape,
    put_first,
    slice_length,
)
from tdfunc.core.ties import graft, lift, merge, prune, remap
from tdfunc.core.types import Kind, LeafFn, Names, Node, Path, Ties

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from typing_extensions import Self

    class _Rows(Dataset[Any]):
        """Torch's DataLoader takes any object with a length and items; its annotation names the base of this class."""

        # Trees are added by their leaves, and not to a longer data set.
        def __add__(self, other: Any, **kwargs: Any) -> "Self": ...  # pyright: ignore[reportIncompatibleMethodOverride]
else:
    _Rows = object

T = TypeVar("T", bound="TensorCollection")
F = TypeVar("F", bound=Callable[..., Any])


class Static(NamedTuple):
    """A node's static data about its leaves: kinds, ties, and a subclass's own."""

    kinds: dict[str, Kind] = {}
    ties: Ties = ()
    # A subclass's own static data (a lazy stack's dimension).
    own: Any = None


class LeafOp(NamedTuple):
    """An operation as a tree sees it: functions of one leaf, of a batch size and of its names.

    `name` and `args` describe it symbolically, for classes that cannot apply `leaf` to what they store. An operation
    without `args` and `size` treats every element of the batch alike.
    """

    name: str
    leaf: LeafFn
    size: Callable[[Size], Size] | None = None
    names: Callable[[Names], Names | None] | None = None
    # True if it acts on batch dimensions: then nested trees get it through `_shape` and `leaf` sees non-tensor data.
    batch: bool = False
    args: tuple[Any, ...] = ()
    # True if `leaf` may return None, which drops the leaf.
    drops: bool = False
    # True if `leaf` takes the leaves of all trees as one sequence, as torch.stack does.
    packed: bool = False
    # Makes a faster `leaf` for the leaves of one node, all plain tensors: most share a shape, which is then read here.
    plain: Callable[[Collection[Tensor]], LeafFn] | None = None
    # Makes `leaf` from `args` that are laid out along the batch: a stack of trees makes one for each tree.
    bind: Callable[..., LeafFn] | None = None


def by_shape(call: Callable[[Size], LeafFn]) -> tuple[LeafFn, Callable[[Collection[Tensor]], LeafFn]]:
    """Return the `leaf` and the `plain` of an operation that is made for the shape of a leaf."""

    def leaf(x: Any) -> Any:
        return call(x.shape)(x)

    def plain(leaves: Collection[Tensor]) -> LeafFn:
        shape = one_shape(leaves)
        if shape is None:
            return leaf
        return call(shape)

    return leaf, plain


class Slots:
    """The layout of a tree, while it may still be written: `_make` fills one and then gives it its class.

    Plain stores are four times as fast as `object.__setattr__`, and trees are made by the thousand.
    """

    # `_bound` is set only by the first call of `apply` that finds the tree to fit its module, `_note` by `jit`.
    __slots__ = ("__weakref__", "_batch_size", "_bound", "_cache", "_data", "_device", "_names", "_note", "_static")


class TensorCollection(Slots, _Rows):
    """An immutable tree of tensors: the common base of `TensorDict`, `TensorClass` and `LazyStack`."""

    __slots__ = ()
    _data: dict[str, Node]
    _batch_size: Size
    _device: torch.device | None
    _names: Names | None
    _static: Static | None
    _cache: Any
    _bound: Any
    _note: Any

    # The class for open keys and the class for ragged stacks; the public modules set them, lower layers build by them.
    _open: ClassVar[Any] = None
    _lazy: ClassVar[Any] = None
    # True if the node is a lazy stack: its children are trees of unequal shapes, not leaves.
    _is_lazy: ClassVar[bool] = False
    # The method (key, value, where) by which a class with typed fields makes a value a node; others use `convert`.
    _accept: ClassVar[Any] = None
    # The replacement of a leaf in the pickle that starts a process, as a function of it; storage sets it.
    _send: ClassVar[Any] = None

    @classmethod
    def _make(
        cls,
        data: dict[str, Node],
        batch_size: Size,
        device: torch.device | None = None,
        names: Names | None = None,
        static: Static | None = None,
    ) -> "Self":
        """Build a tree of checked data."""
        if not is_compiling():
            made: Any = Slots()
            made._data = data
            made._batch_size = batch_size
            made._device = device
            made._names = names
            made._static = static
            made._cache = None
            made.__class__ = cls
            return made
        return cls._fill(object.__new__(cls), data, batch_size, device, names, static)

    @staticmethod
    def _fill(new: T, data: dict[str, Node], *rest: Any) -> T:
        """Set the slots of a new tree, as dynamo can trace it: by literal calls, without a change of class."""
        batch_size, device, names, static = rest
        object.__setattr__(new, "_data", data)
        object.__setattr__(new, "_batch_size", batch_size)
        object.__setattr__(new, "_device", device)
        object.__setattr__(new, "_names", names)
        object.__setattr__(new, "_static", static)
        object.__setattr__(new, "_cache", None)
        return new

    def _replace(
        self,
        data: dict[str, Node],
        *,
        batch_size: Size | None = None,
        names: Names | None = None,
        kinds: dict[str, Kind] | None = None,
        ties: Ties | None = None,
    ) -> "Self":
        """Build a tree like this one. With a new batch size the names are the given ones, else they stay."""
        static = self._static
        if kinds is not None or ties is not None:
            old = static or Static()
            static = Static(old.kinds if kinds is None else kinds, old.ties if ties is None else ties, old.own)
            if static == NO_STATIC:
                static = None
        if batch_size is None:
            batch_size = self._batch_size
            names = self._names
        return self._make(data, batch_size, self._device, names, static)

    @property
    def _ties(self) -> Ties:
        return self._static.ties if self._static is not None else ()

    @property
    def _kinds(self) -> dict[str, Kind]:
        return self._static.kinds if self._static is not None else {}

    if TYPE_CHECKING:

        @property
        def _dim(self) -> int:
            """Return the batch dimension along which the trees of a lazy stack are stacked."""
            ...

        def _each(self, fn: Callable[..., Any], *values: Any) -> Any:
            """Return the stack of `fn(tree, *its part of each value)` for the trees of a lazy stack."""

    # -- primitives ---------------------------------------------------------------------------------------------

    def _keys(self) -> Iterable[str]:
        return self._data

    def _get(self, key: str) -> Node:
        """Return the node under one key; non-tensor data stay wrapped."""
        try:
            return self._data[key]
        except KeyError:
            # For dynamo (torch 2.13), a guard that the key does not exist: it sets none on a lookup that fails.
            self._data.get(key)
            raise missing((key,), self._data, node=self) from None

    def _put(self, changes: dict[str, Node], kinds: dict[str, Kind] | None = None) -> "Self":
        """Return a tree with some children replaced or added (no checks) and, where the child is None, removed."""
        data = self._data | changes
        is_plain = self._static is None and kinds is None
        for key, node in changes.items():
            if node is None:
                data.pop(key, None)
            elif getattr(node, "_static", None) is not None:
                is_plain = False
        if is_plain:
            return self._make(data, self._batch_size, self._device, self._names, None)
        kept = {k: kind for k, kind in self._kinds.items() if k not in changes or _is_leaf(changes[k])}
        return self._replace(data, kinds=kept | (kinds or {}), ties=self._new_ties(changes))

    def _new_ties(self, changes: dict[str, Node]) -> Ties:
        """Return the groups that remain after an edit; the caller has checked the values of those that span."""
        inner = [lift(node._ties, key) for key, node in changes.items() if isinstance(node, TensorCollection)]
        if not self._ties:
            if any(inner):
                return merge(*inner)
            return ()
        kept = remap(self._ties, lambda path: path if _exists(changes, path) else None)
        return merge(kept, *inner)

    def _map(self, op: LeafOp, *others: "TensorCollection") -> "Self":
        """Apply `op.leaf` to every leaf (zipped with the leaves of `others`); a result of None drops the leaf."""
        static = self._static
        if static is not None and static.ties:
            return self._map_tied(op, others)
        data = self._data
        # Whole maps in C for the common node of plain tensors; dynamo traces the loop.
        if not is_compiling() and PLAIN.issuperset(map(type, data.values())):
            data = self._map_plain(op, others)
        else:
            check_keys(self, others)
            data = self._map_children(op, others)
        size = self._batch_size
        names = self._names
        if op.size is not None:
            if names is not None:
                names = None if op.names is None else op.names(names)
            size = op.size(size)
        if static is not None and len(data) != len(self._data):
            static = Static({k: kind for k, kind in static.kinds.items() if k in data}, static.ties, static.own)
        return self._make(data, size, self._device, names, static)

    def _map_plain(self, op: LeafOp, others: Sequence["TensorCollection"]) -> dict[str, Node]:
        data = self._data
        keys = iter(data)
        values = data.values()
        if others:
            rows = [values, *_rows(self, others)]
        else:
            rows = (values,)
        leaf = op.leaf if op.plain is None else op.plain(values)
        if op.packed:
            results = map(leaf, zip(*rows, strict=True))
        else:
            results = map(leaf, *rows)
        try:
            # As long as each other; `strict` takes longer than all else here.
            done = dict(zip(keys, results))  # noqa: B905
        except Exception as err:
            # zip had taken the key of the leaf that raised, and none after it.
            _note_key(list(data)[-1 - sum(1 for _ in keys)], err)
            raise
        if op.drops and type(None) in map(type, done.values()):
            return {key: value for key, value in done.items() if value is not None}
        return done

    def _map_children(self, op: LeafOp, others: Sequence["TensorCollection"]) -> dict[str, Node]:
        leaf = op.leaf if not op.packed else lambda *leaves: op.leaf(leaves)
        data: dict[str, Node] = {}
        key = ""
        try:
            for key, node in self._data.items():
                twins = [o._data[key] for o in others]
                if isinstance(node, TensorCollection):
                    if op.batch:
                        out = node._shape(op, *twins)
                    else:
                        out = node._map(op, *twins)
                elif isinstance(node, NonTensorBase) and not op.batch:
                    if op.size is None:
                        out = node
                    else:
                        out = node.resized(op.size(node.shape), key)
                else:
                    if isinstance(node, NonTensorBase):
                        node.check_batch(self._batch_size, key)
                    out = leaf(node, *twins)
                if out is not None:
                    data[key] = out
        except Exception as err:
            _note_key(key, err)
            raise
        return data

    def _map_tied(self, op: LeafOp, others: Sequence["TensorCollection"]) -> "Self":
        ties = self._ties
        cuts = [(path, group[0]) for group in self._ties for path in group[1:]]
        pruned, grafts = prune(self, cuts)
        done = pruned._map(op, *[prune(other, cuts)[0] for other in others])
        data = graft(done._data, grafts, ties)
        return done._replace(data, ties=remap(ties, lambda path: path if _exists(data, path) else None))

    def _index(self, index: Any) -> "Self":
        """Index the batch dimensions; the index is normalized here, once for all leaves."""
        head = _first_rows(index, self._batch_size)
        if head is not None and not is_compiling() and not self._ties:
            data = self._data
            names = self._names
            # The common index, without describing it.
            if PLAIN.issuperset(map(type, data.values())):
                names = None if names is None else index_names((index,), names)
                return self._make({k: x[index] for k, x in data.items()}, head, self._device, names, self._static)
        op = index_op(index, self._batch_size)
        if type(index) is not int and type(index) is not slice and not has_leaf(self):
            check_positions(op.args[0], self._batch_size)
        try:
            return self._shape(op)
        except (IndexError, RuntimeError):
            if op.plain is None:
                raise
        # index_select refuses negative rows, which indexing counts from the end.
        return self._shape(op._replace(plain=None))

    def _shape(self, op: LeafOp, *others: "TensorCollection") -> "Self":
        """Apply an operation on batch dimensions (reshape, permute, stack, ...)."""
        return self._map(op, *others)

    # -- immutability -------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        raise _frozen(self, f".{name} = value", _ATTRIBUTE_HINTS.get(name, f"td = td.set({name!r}, value)"))

    def __delattr__(self, name: str) -> None:
        raise _frozen(self, f"del .{name}", f"td = td.delete({name!r})")

    def __setitem__(self, key: Any, value: object) -> NoReturn:
        # A mask would be printed whole.
        parts: Any = key if isinstance(key, tuple) else (key,)
        shown = ", ".join([repr(part) if isinstance(part, (str, int, slice, tuple)) else "index" for part in parts])
        fix = "td = td.at[index].set(value)"
        if is_key(key):
            fix = f"td = td.set({key!r}, value)"
            if isinstance(value, Tensor) and dict(iter_leaves(self)).get(unravel(key)) is value:
                # `td[key] += 1` has changed the leaf by the time that Python assigns it.
                fix = f"td = td.at[{shown}].add(value). If this was +=, it has already written to the shared leaf."
        raise _frozen(self, f"td[{shown}] = value", fix)

    def __delitem__(self, key: Any) -> NoReturn:
        raise _frozen(self, f"del [{key!r}]", f"td = td.delete({key!r})")

    def __copy__(self) -> "Self":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Self":
        # One memo for the whole tree: a tensor at several paths is copied once, so ties survive.
        data = {key: deepcopy(node, memo) for key, node in self._data.items()}
        return self._replace(data)

    def __reduce__(self) -> Any:
        data = self._data
        send = TensorCollection._send
        # The pickle that starts a process: a leaf that is on a file goes by the file's name, not as a copy.
        if send is not None and get_spawning_popen() is not None:
            data = {key: send(node) if isinstance(node, Tensor) else node for key, node in data.items()}
        return _remake, (type(self), data, self._batch_size, self._device, self._names, self._static)


# The path of the leaf that raised: each node on the way out of a map puts its key in front.
_ERROR_PATH = "_tdfunc_path"


def _note_key(key: str, err: Exception) -> None:
    setattr(err, _ERROR_PATH, (key, *getattr(err, _ERROR_PATH, ())))


def note_leaf(err: Exception, call: str) -> None:
    """Add the path of the leaf at which a map raised to the error."""
    path = err.__dict__.pop(_ERROR_PATH, None)
    if path is not None and hasattr(err, "add_note"):
        err.add_note(f"{call}: raised at the leaf {dotted(path)!r}.")


NO_STATIC = Static()
PLAIN = frozenset((Tensor, Parameter))
_NBYTES = attrgetter("nbytes")

_ATTRIBUTE_HINTS = {
    "batch_size": "td = td.with_batch_size(value)",
    "names": "td = td.with_names(value)",
    "device": "td = td.to(value)",
}


def _frozen(tree: TensorCollection, what: str, fix: str) -> ImmutableError:
    return ImmutableError(f"{type(tree).__name__} is immutable: {what} cannot be written.", hint=fix)


def _remake(cls: type[TensorCollection], data: dict[str, Node], *rest: Any) -> TensorCollection:
    return cls._make(data, *rest)


def _is_leaf(node: Node) -> bool:
    return node is not None and not isinstance(node, TensorCollection)


def _exists(data: dict[str, Node], path: Path) -> bool:
    """Return True if a path leads to a leaf, looking only into the given children."""
    if path[0] not in data:
        return True
    node: Node = data[path[0]]
    for key in path[1:]:
        if not isinstance(node, TensorCollection) or key not in node._data:
            return False
        node = node._data[key]
    return _is_leaf(node)


def _rows(first: TensorCollection, others: Sequence[TensorCollection]) -> list[Iterable[Any]]:
    """Return the children of other nodes in the key order of the first."""
    keys = list(first._data)
    if all([isinstance(o, TensorCollection) and list(o._data) == keys for o in others]):
        return [o._data.values() for o in others]
    check_keys(first, others)
    return [list(map(o._data.__getitem__, keys)) for o in others]


def check_keys(first: TensorCollection, others: Sequence[TensorCollection]) -> None:
    """Raise unless all nodes have the keys of the first."""
    keys = first._data.keys()
    for other in others:
        is_tree = isinstance(other, TensorCollection)
        if not is_tree or other._data.keys() != keys:
            raise TreeStructureError(
                "The trees have different keys.",
                expected=f"{sorted(keys)}",
                got=f"{sorted(other._data)}" if is_tree else f"a leaf of type {type(other).__name__}",
                hint="select() the common keys, or set() the missing ones.",
            )


# -- lazy stacks ------------------------------------------------------------------------------------------------


def per_tree(cut: int = 0) -> Callable[[F], F]:
    """Let a function of a tree run for each tree of a lazy stack, and stack the results.

    Args:
        cut: The place of the argument that is cut into a part for each tree, as `set` cuts values; 0 for none.
    """

    def decorate(fn: Any) -> Any:
        @wraps(fn)
        def run(tree: Any, *args: Any, **options: Any) -> Any:
            if not tree._is_lazy:
                return fn(tree, *args, **options)
            if not cut:
                return tree._each(lambda t: run(t, *args, **options))
            before = args[: cut - 1]
            after = args[cut:]
            return tree._each(lambda t, part: run(t, *before, part, *after, **options), args[cut - 1])

        return run

    return decorate


def no_one_shape(call: str, stack: Any, where: str = "") -> LeafMismatchError:
    """Return the error of a call that needs one tensor for each leaf, which a lazy stack does not have."""
    return LeafMismatchError(
        f"{call}: a lazy stack has no one tensor for each leaf{where}.",
        expected="a tree whose leaves have one shape",
        got=f"batch size {list(stack._batch_size)}, trees along dimension {stack._dim}",
        hint="write lazy.pad() first, or lazy.dense() where the trees have one shape; lazy.trees are the trees.",
    )


def check_one_shape(tree: TensorCollection, call: str, where: str = "") -> None:
    """Raise for a lazy stack."""
    if tree._is_lazy:
        raise no_one_shape(call, tree, where)


def index_op(index: Any, size: Size) -> LeafOp:
    """Return the operation of one index on all leaves of a tree with this batch size."""
    head = _first_rows(index, size)
    if head is None and size and size[0] > 0 and type(index) is Tensor and _is_rows(index):
        head = index.shape + size[1:]
    if head is None:
        parts: tuple[Any, ...] = normalize_index(index, size)
        head = index_size(parts, size)
    else:
        parts = (index,)
    # x[i] and x[i:j] are faster than x[(i,)]; index_select is faster than both for many rows of a large leaf.
    key: Any = parts[0] if len(parts) == 1 else parts
    names = partial(index_names, parts)
    if not _is_rows(key):
        return LeafOp("index", itemgetter(key), put_first(head, len(size)), names, True, (parts,))
    leaf = _row_select(key)
    plain = partial(_small_row_select, key)
    return LeafOp("index", leaf, put_first(head, len(size)), names, True, (parts,), plain=plain)


def _first_rows(index: Any, size: Size) -> Size | None:
    """Return the batch size after an index of one int or slice, the most common ones, which need no normal form."""
    if not size:
        return None
    if type(index) is int:
        if -size[0] <= index < size[0]:
            return size[1:]
        return None
    if type(index) is slice and index.step is None:
        return Size((slice_length(index, size[0]), *size[1:]))
    return None


def _is_rows(key: Any) -> bool:
    return isinstance(key, Tensor) and key.dim() == 1 and key.dtype is torch.int64 and key.device.type == "cpu"


def _small_row_select(rows: Tensor, leaves: Collection[Tensor]) -> LeafFn:
    if max(map(_NBYTES, leaves), default=0) >= MIN_BYTES:
        return _row_select(rows)
    return methodcaller("index_select", 0, rows)


def _row_select(rows: Tensor) -> LeafFn:
    def select(leaf: Any) -> Any:
        if not is_compiling() and type(leaf) is Tensor and leaf.nbytes >= MIN_BYTES:
            read_rows_ahead(leaf, rows)
        try:
            return leaf.index_select(0, rows)
        # index_select refuses negative rows, which indexing counts from the end.
        except (IndexError, RuntimeError):
            return leaf[rows]

    return select


# -- leaves -----------------------------------------------------------------------------------------------------


def iter_leaves(tree: TensorCollection, prefix: Path = ()) -> Iterable[tuple[Path, Any]]:
    """Yield (path, leaf) in insertion order, every path of a tied leaf included, non-tensor data left out."""
    for key, node in tree._data.items():
        if isinstance(node, TensorCollection):
            yield from iter_leaves(node, (*prefix, key))
        elif not isinstance(node, NonTensorBase):
            yield (*prefix, key), node


def has_leaf(tree: TensorCollection) -> bool:
    """Return True if the tree has a leaf, non-tensor data left out."""
    first = next(iter(tree._data.values()), None)
    return isinstance(first, Tensor) or next(iter(iter_leaves(tree)), None) is not None


def leaf_items(tree: TensorCollection) -> list[tuple[Path, Any]]:
    """Return (path, leaf) for the leaves of `tree_leaves`, in insertion order; tied leaves have their first path."""
    aliases = {path for group in tree._ties for path in group[1:]}
    return [(path, leaf) for path, leaf in iter_leaves(tree) if path not in aliases]


def leaf_paths(tree: TensorCollection) -> list[Path]:
    """Return the paths of `leaf_items`."""
    return [path for path, _ in leaf_items(tree)]


def with_leaves(tree: T, leaves: Iterable[Any]) -> T:
    """Return a tree of the same structure and batch sizes around new leaves, in the order of `leaf_paths`."""
    source = iter(leaves)
    return tree._map(LeafOp("with_leaves", lambda _: next(source)))
