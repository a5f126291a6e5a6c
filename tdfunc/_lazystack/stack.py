"""`LazyStack`: trees of possibly unequal shapes side by side, along a dimension that is never materialised.

The class answers the primitives of `TensorCollection` for its trees; what operations do to them is beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc._lazystack.mapped import check_mapped
from tdfunc._lazystack.pick import pick
from tdfunc._lazystack.ragged import (
    check_alike,
    check_dense,
    check_same_ndim,
    common_size,
    nest_trees,
    pad_trees,
    stacked_size,
    without,
)
from tdfunc._lazystack.shapes import HANDLERS, REDUCTIONS, one_shape, reduce_all, reduce_dims, run_along
from tdfunc._lazystack.show import as_list, render
from tdfunc._tensordict import TreeMethods
from tdfunc.core.collection import LeafOp, Static, TensorCollection, iter_leaves
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError, MissingKeyError, TreeStructureError, UnsupportedError, error
from tdfunc.core.keys import missing
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.pytree import _UNDECIDED, Context, register
from tdfunc.core.shapes import as_names, as_size, dim_index, index_names, normalize_index
from tdfunc.core.ties import lift, merge
from tdfunc.core.types import Kind, Names, Node, Path, Ties
from tdfunc.core.vmapped import layout_of
from tdfunc.ops import index, join
from tdfunc.ops.convert import accept, resize
from tdfunc.ops.edit import replacements
from tdfunc.ops.reading import has


class LazyStack(TreeMethods):
    """Trees side by side along a new batch dimension, each with its own shapes; made by `lazy_stack`.

    Sizes that differ between the trees show as -1 in `batch_size`. The keys are those that all trees have; the others
    are in `trees`. A key reads as a tuple with the tensor of each tree, also when their shapes agree: the type of a
    result never depends on lengths. Non-tensor data read as a list with the value of each tree, sub-trees as a lazy
    stack of them. `dense()`, `pad()` and `nested()` make one tree.

    Indexing, edits, `apply`, arithmetic and moves work on each tree. A value that is set is a tuple or list with one
    part for each tree, or a tensor or tree that is cut along `stack_dim`. What needs one shape (most reshapes,
    reductions over the stack) raises and says so.

    `torch.vmap` maps dimensions before `stack_dim`; others raise, because torch would map another dimension of the
    leaves than the one that was asked for.

    A stack of `TensorClass` values is an instance of their class, too.

    Examples:
        >>> ragged = LazyStack([TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (2, 4)])
        >>> ragged.batch_size, ragged[1].batch_size, [x.shape[0] for x in ragged["x"]]
        (torch.Size([2, -1]), torch.Size([4]), [2, 4])
        >>> ragged.pad()["x"].shape
        torch.Size([2, 4, 2])
    """

    __slots__ = ()

    def __new__(cls, trees: Sequence[TensorCollection], dim: int = 0) -> Any:
        """Return `lazy_stack(trees, dim)`; of typed trees, a stack of their class."""
        return lazy_stack(trees, dim)

    def __init_subclass__(cls, **options: Any) -> None:
        if "_stacked" not in cls.__dict__:
            raise UnsupportedError(
                f"LazyStack is final, {cls.__name__} cannot subclass it.",
                hint="write functions of a LazyStack; lazy_stack makes the classes for typed trees itself.",
            )
        super().__init_subclass__(**options)

    @classmethod
    def _of(cls, trees: Sequence[Any], dim: int, name: str | None = None) -> Any:
        """Stack without checks, in the class for these trees."""
        first = trees[0]
        size = common_size([tree._batch_size for tree in trees])
        lead = first._names if all([tree._names == first._names for tree in trees]) else None
        names: Names | None = None
        if lead is not None or name is not None:
            lead = lead or (None,) * len(size)
            names = as_names((*lead[:dim], name, *lead[dim:]), len(size) + 1)
        device = first._device if all([tree._device == first._device for tree in trees]) else None
        ties = merge(*[lift(tree._ties, str(i)) for i, tree in enumerate(trees) if tree._ties])
        # Counted from the end, the place stays right when vmap takes dimensions in front of it away.
        static = Static({}, ties, dim - len(size) - 1)
        data = {str(i): tree for i, tree in enumerate(trees)}
        return _class_for(type(first))._make(data, stacked_size(size, dim, len(trees)), device, names, static)

    @classmethod
    def _make(
        cls,
        data: dict[str, Node],
        batch_size: Size,
        device: torch.device | None = None,
        names: Names | None = None,
        static: Static | None = None,
    ) -> Any:
        # A map of the leaves may take more dimensions than lie before the trees: then these come first.
        if static is not None and static.own < -len(batch_size):
            static = static._replace(own=-len(batch_size))
        return super()._make(data, batch_size, device, names, static)

    def _like(self, trees: Sequence[Any], dim: int | None = None) -> Any:
        return self._of(trees, self._dim if dim is None else dim, self._dim_name)

    if TYPE_CHECKING:
        # Rows along the stack's own dimension are trees.
        def __getitem__(self, index: Any) -> Any: ...

        def __getitems__(self, indices: Any) -> Any: ...

        def __iter__(self) -> Iterator[Any]: ...

        def unbind(self, dim: int = 0) -> tuple[Any, ...]: ...

        def argmax(self, dim: Any = None, keepdim: bool = False) -> Any: ...

        def argmin(self, dim: Any = None, keepdim: bool = False) -> Any: ...

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def _dim(self) -> int:
        static: Any = self._static
        return len(self._batch_size) + static.own

    @property
    def _dim_name(self) -> str | None:
        return self._names[self._dim] if self._names is not None else None

    @property
    def _trees(self) -> list[Any]:
        trees = list(self._data.values())
        if self._names is None:
            return trees
        names = as_names(without(self._names, self._dim), len(self._names) - 1)
        return [t if t._names == names else t._make(t._data, t._batch_size, t._device, names, t._static) for t in trees]

    @property
    def trees(self) -> tuple[Any, ...]:
        """The trees, in order."""
        return tuple(self._trees)

    @property
    def stack_dim(self) -> int:
        """The batch dimension along which the trees lie."""
        return self._dim

    def numel(self) -> int:
        """Return the number of elements of the batch: the sum over the trees."""
        return sum(tree.numel() for tree in self._trees)

    # -- one tree of all ----------------------------------------------------------------------------------------

    def dense(self) -> Any:
        """Return `torch.stack` of the trees.

        Raises:
            LeafMismatchError: A leaf differs in shape or dtype; the message names it with both.
            TreeStructureError: A key is not in all trees.

        Examples:
            >>> tdf.lazy_stack([TensorDict({"x": torch.ones(3)}), TensorDict({"x": torch.zeros(3)})]).dense()["x"].shape
            torch.Size([2, 3])
        """
        trees = [LazyStack.dense(tree) if isinstance(tree, LazyStack) else tree for tree in self._trees]
        check_dense(trees, "dense")
        made = join.stack(trees, self._dim)
        return made if self._names is None else made.with_names(self._names)

    def pad(self, value: Any = 0, side: str = "right", return_mask: bool = False) -> Any:
        """Return one tree in which every leaf is padded to its largest sizes; gradients flow through it.

        Args:
            value: A number, or a dict from (nested) keys to numbers; leaves that it does not name are padded with 0.
                Non-tensor data are padded with None.
            side: Where the padding goes, "right" or "left", in every dimension whose lengths differ.
            return_mask: Also return a tree of masks.

        Returns:
            The tree, or the tree and a `TensorDict` with a mask for each of its leaves, True where the value is real.

        Shapes:
            Leaves (T_i, *F) become one of (N, max T_i, *F), and its mask is (N, max T_i): it has the dimensions of
            the batch, and further ones up to the last in which lengths differ.

        Raises:
            ValueError: There is no such side.
            LeafMismatchError: A leaf differs in dtype or number of dimensions, or cannot hold the value.
            TreeStructureError: A key is not in all trees.
            MissingKeyError: `value` names a key that does not exist.

        Examples:
            >>> ragged = tdf.lazy_stack([TensorDict({"ids": torch.arange(n)}, [n]) for n in (1, 3)])
            >>> padded, masks = ragged.pad(-1, side="left", return_mask=True)
            >>> padded["ids"], masks["ids"]
            (tensor([[-1, -1,  0],
                    [ 0,  1,  2]]), tensor([[False, False,  True],
                    [ True,  True,  True]]))
        """
        padded = pad_trees(self._trees, self._dim, value, side, return_mask)
        if self._names is not None:
            padded = tuple([tree if tree is None else tree.with_names(self._names) for tree in padded])
        return padded if return_mask else padded[0]

    def nested(self, layout: torch.layout = torch.jagged) -> Any:
        """Return one tree of nested tensors, with batch size [number of trees].

        Args:
            layout: `torch.jagged` for leaves that differ in their first dimension only, `torch.strided` for any.

        Raises:
            ValueError: There is no such layout, or the stack dimension is not the first.
            LeafMismatchError: A leaf differs in more than its first dimension, and the layout is jagged.
            TreeStructureError: A key is not in all trees.
            UnsupportedError: The trees are lazy stacks themselves.

        Examples:
            >>> tdf.lazy_stack([TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (2, 4)]).nested()["x"].unbind()[
            ...     1
            ... ].shape
            torch.Size([4, 2])
        """
        if self._dim:
            raise error(
                ValueError,
                "nested: the trees lie along another dimension.",
                expected=0,
                got=f"stack_dim {self._dim}",
                hint="permute() the batch dimensions first, which moves no data.",
            )
        return nest_trees(self._trees, layout)

    def tolist(self, *, convert_tensors: bool = False) -> list[Any]:
        """Return nested lists over the batch dimensions, with a dict of the values of each element.

        Args:
            convert_tensors: Turn tensors into numbers and lists, too.

        Examples:
            >>> tdf.lazy_stack([TensorDict({"n": torch.arange(n)}, [n]) for n in (1, 2)]).tolist(convert_tensors=True)
            [[{'n': 0}], [{'n': 0}, {'n': 1}]]
        """
        return [as_list(row, convert_tensors) for row in self]

    # -- metadata -----------------------------------------------------------------------------------------------

    def with_batch_size(self, batch_size: Any) -> Any:
        """Return the stack with another batch size: that of the trees, and their number in its place.

        Raises:
            BatchSizeError: The number of trees is not in its place, or a leaf does not have the dimensions.
        """
        size, dim = as_size(batch_size), self._dim
        if len(size) <= dim or size[dim] != len(self._data):
            raise BatchSizeError(
                "with_batch_size: the trees must stay.",
                expected=f"{len(self._data)} at dimension {dim}",
                got=str(list(size)),
            )
        return self._like([tree.with_batch_size(without(size, dim)) for tree in self._trees])

    def with_names(self, names: Sequence[str | None] | None) -> Any:
        """Return the stack with names for its batch dimensions, which its trees get too."""
        given = as_names(names, len(self._batch_size))
        if given is None:
            return self._of([tree.with_names(None) for tree in self._trees], self._dim)
        trees = [tree.with_names(without(given, self._dim)) for tree in self._trees]
        return self._of(trees, self._dim, given[self._dim])

    def replace(self, changes: Mapping[str, Any] | TensorCollection | None = None, /, **entries: Any) -> Any:
        """Return the stack with some entries of each tree replaced: values are cut as by `set`."""
        return self._each(lambda tree, part: tree.replace(part), replacements(changes, entries))

    def to_tensordict(self, **options: Any) -> Any:
        """Return a lazy stack of `TensorDict`s."""
        return self._each(lambda tree: tree.to_tensordict(**options))

    def __repr__(self) -> str:
        return render(self)

    def _show_heading(self) -> list[str]:
        return [f"stacked along dimension {self._dim}"]

    # -- primitives ---------------------------------------------------------------------------------------------

    def _keys(self) -> list[str]:
        trees = list(self._data.values())
        # Inside tree_map a child may be anything.
        if not all([isinstance(tree, TensorCollection) for tree in trees]):
            return []
        shared = set(trees[0]._keys()).intersection(*[tree._keys() for tree in trees[1:]])
        return [key for key in trees[0]._keys() if key in shared]

    def _some_keys(self) -> dict[str, list[int]]:
        # Inside tree_map a child may be anything.
        trees: list[Any] = [tree for tree in self._data.values() if isinstance(tree, TensorCollection)]
        # What some trees of a stack inside have is in that stack.
        sets = [{*tree._keys(), *tree._some_keys()} for tree in trees]
        some = sorted(set().union(*sets).difference(self._keys()))
        return {key: [i for i, keys in enumerate(sets) if key in keys] for key in some}

    def _owner(self, path: Path) -> str | None:
        number, rest = path[0], path[1:]
        if not rest or number not in self._data or number in self._keys():
            return None
        # Only where there is something: a path that an edit begins is one of keys.
        return number if has(self._data[number], rest) else None

    def _get(self, key: str) -> Node:
        trees = self._trees
        having = [i for i, tree in enumerate(trees) if key in tree._keys()]
        if len(having) < len(trees):
            if not having:
                raise missing((key,), self._keys(), node=self)
            raise MissingKeyError(
                f"get: the key {key!r} is not in all trees of the lazy stack.",
                got=f"it is in trees {having}",
                hint="read it from .trees, or set() it in the others.",
            )
        nodes = [tree._get(key) for tree in trees]
        if all([isinstance(node, TensorCollection) for node in nodes]) and len(set(map(type, nodes))) == 1:
            # Names are of one node: those of this one are not of the trees inside.
            return self._of(nodes, self._dim)
        if all([isinstance(node, NonTensorBase) for node in nodes]):
            return _Values(nodes)
        return tuple(nodes)

    def _put(self, changes: dict[str, Node], kinds: dict[str, Kind] | None = None) -> Any:
        trees = self._trees
        rows: list[dict[str, Node]] = [{} for _ in trees]
        for key, node in changes.items():
            for row, tree, part in zip(rows, trees, self._cut(node), strict=True):
                row[key] = None if part is None else accept(tree, key, part, key)
        return self._like([tree._put(row, kinds) for tree, row in zip(trees, rows, strict=True)])

    def _each(self, fn: Callable[..., Any], *values: Any) -> Any:
        rows = zip(*[self._cut(value) for value in values], strict=True) if values else [()] * len(self._data)
        done: list[Any] = []
        for i, (tree, row) in enumerate(zip(self._trees, rows, strict=True)):
            try:
                done.append(fn(tree, *row))
            except Exception as err:
                if hasattr(err, "add_note"):
                    err.add_note(f"In tree {i} of the lazy stack.")
                raise
        return self._like(done)

    def _replace(
        self,
        data: dict[str, Node] | None = None,
        *,
        batch_size: Size | None = None,
        names: Names | None = None,
        kinds: dict[str, Kind] | None = None,
        ties: Ties | None = None,
    ) -> Any:
        mine = self._data
        data = mine if data is None else data
        if not data.keys() <= mine.keys():
            raise TreeStructureError(
                "This cannot be done to a lazy stack, whose entries are in its trees.",
                expected=f"the trees {list(mine)}",
                got=f"{list(data)}",
                hint="do it to each: lazy_stack([fn(tree) for tree in lazy.trees]).",
            )
        # A tree of which nothing is left stays, as an empty one: the others keep their places.
        whole = [data[key] if key in data else mine[key]._replace({}, kinds={}, ties=()) for key in mine]
        if not all([isinstance(tree, TensorCollection) for tree in whole]):
            return self._make(dict(zip(mine, whole, strict=True)), self._batch_size, self._device, names, self._static)
        # The names are the stack's: its trees may have been made before it was given them.
        new = self._named(self._of(whole, self._dim), self._names)
        if batch_size is not None and batch_size != new._batch_size and self._cache is not _UNDECIDED:
            raise BatchSizeError(
                "The batch size of a lazy stack is that of its trees.",
                expected=str(list(new._batch_size)),
                got=str(list(batch_size)),
                hint="lazy.with_batch_size(...), or give the tree around it another batch size.",
            )
        return new

    # -- cutting values for the trees ---------------------------------------------------------------------------

    def _cut(self, value: Any) -> list[Any]:
        """Return the part of a value for each tree: an item of a tuple or list, a slice of a tensor or tree."""
        count = len(self._data)
        if isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value)
            parts = {key: self._cut(part) for key, part in entries.items()}
            return [{key: part[i] for key, part in parts.items()} for i in range(count)]
        if isinstance(value, _Values):
            value = value.nodes
        if isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            if len(items) != count:
                raise BatchSizeError(
                    "A list or tuple of values for a lazy stack has one for each tree.",
                    expected=f"{count} values",
                    got=f"{len(items)}",
                    hint="wrap one value for all as NonTensorData(value).",
                )
            return list(items)
        if isinstance(value, TensorCollection) and len(value._batch_size) <= self._dim:
            value = self._grown(value)
        if isinstance(value, (TensorCollection, Tensor, np.ndarray, NonTensorStack)):
            return self._cut_along(value)
        return [value] * count

    def _grown(self, value: TensorCollection) -> TensorCollection:
        """Return a tree of too few batch dimensions with those of this one, as a dense tree would take it."""
        lead = self._batch_size[: self._dim + 1]
        return value if -1 in lead else resize(value, lead)

    def _cut_along(self, value: Any) -> list[Any]:
        dim, count = self._dim, len(self._data)
        if isinstance(value, LazyStack) and value._dim == dim and len(value._data) == count:
            return value._trees
        if isinstance(value, Tensor) and value.is_nested and dim == 0 and value.size(0) == count:
            return list(value.unbind())
        size = tuple(value._batch_size if isinstance(value, TensorCollection) else value.shape)
        if len(size) <= dim or size[dim] != count:
            raise BatchSizeError(
                "The value does not have the dimension along which the trees of the lazy stack lie.",
                expected=f"{count} at dimension {dim}",
                got=f"{'batch size' if isinstance(value, TensorCollection) else 'shape'} {list(size)}",
                hint="give one value for each tree, in a tuple.",
            )
        if isinstance(value, np.ndarray):
            return [np.take(cast("Any", value), i, dim) for i in range(count)]
        return list(index.unbind(value, dim) if isinstance(value, TensorCollection) else value.unbind(dim))

    # -- operations ---------------------------------------------------------------------------------------------

    def _map(self, op: LeafOp, *others: TensorCollection) -> Any:
        return self._run(op, others, "_map")

    def _index(self, index: Any) -> Any:
        parts = normalize_index(index, self._batch_size)
        names = None if self._names is None else index_names(parts, self._names)
        return self._named(pick(self._unnamed(), parts), names)

    def _shape(self, op: LeafOp, *others: Any) -> Any:
        handler = HANDLERS.get(op.name)
        if handler is None:
            return self._run(op, others, "_shape")
        names = self._names
        if names is not None and op.size is not None:
            names = op.names(names) if op.names is not None else None
        return self._named(handler(self._unnamed(), op, others), names)

    def _unnamed(self) -> Any:
        """Return the stack without names for its dimensions, which need not be told apart while the trees move."""
        return self if self._names is None else self.with_names(None)

    def _named(self, done: Any, names: Names | None) -> Any:
        """Return what trees of this stack have become with these names, as the dense tree has after the same."""
        if done._names == names:
            return done
        if self._names is None:
            # The names of each tree, which they did not share, stay with the trees.
            return (
                done._make(done._data, done._batch_size, done._device, None, done._static)
                if isinstance(done, LazyStack)
                else done
            )
        return done.with_names(names)

    def _run(self, op: LeafOp, others: Sequence[Any], primitive: str) -> Any:
        """Apply an operation that treats every element alike, or that reduces dimensions of the trees."""
        count = len(self._data)
        if op.bind is not None and op.args and isinstance(op.args[0], (tuple, int)):
            return reduce_dims(self, op) if isinstance(op.args[0], tuple) else run_along(self, op)
        if op.size is not None:
            if op.name in REDUCTIONS and not op.args and not others:
                return reduce_all(self, op, ())
            raise one_shape(self, op.name)
        if op.bind is not None:
            rows = zip(*[self._cut_operand(arg) for arg in op.args], strict=True)
            ops = [op._replace(leaf=op.bind(*row), args=row, plain=None) for row in rows]
        elif op.args:
            raise one_shape(self, op.name)
        else:
            ops = [op] * count
        twins = zip(*[self._twins(other) for other in others], strict=True) if others else [()] * count
        done = [getattr(t, primitive)(o, *rest) for t, o, rest in zip(self._trees, ops, twins, strict=True)]
        return self._like(done)

    def _twins(self, other: Any) -> list[Any]:
        """Return the part of another tree for each tree, of one shape where the tree has one."""
        parts = zip(self._data.values(), self._cut_along(other), strict=True)
        return [
            LazyStack.dense(p) if isinstance(p, LazyStack) and not isinstance(t, LazyStack) else p for t, p in parts
        ]

    def _cut_operand(self, operand: Tensor) -> list[Tensor]:
        """Return the part for each tree of an operand that broadcasts to (leading) batch dimensions."""
        dim, count = self._dim, len(self._data)
        if operand.dim() <= dim:
            return [operand] * count
        return [operand.select(dim, i if operand.shape[dim] > 1 else 0) for i in range(count)]

    # -- pytree and pickle --------------------------------------------------------------------------------------

    @classmethod
    def _rebuilt_size(cls, children: tuple[Any, ...], context: Context) -> tuple[Size | None, torch.device | None]:
        if any([not isinstance(child, TensorCollection) or child._cache is _UNDECIDED for child in children]):
            return None, context.device
        static: Any = context.static
        size = common_size([child._batch_size for child in children])
        check_mapped(children, context, len(context.batch_size) + static.own, len(size) + 1)
        device = children[0]._device
        shared = device if all([child._device == device for child in children]) else None
        return stacked_size(size, max(len(size) + 1 + static.own, 0), len(children)), shared

    def _within(self, old_ndim: int, size: Size) -> tuple[int, Size] | None:
        # The trees have all dimensions but that of the stack, which counts from the end.
        static: Any = self._static
        place = len(size) + len(self._batch_size) - old_ndim + static.own
        if place >= len(size):
            return old_ndim, size
        return (old_ndim - 1, size[:place] + size[place + 1 :]) if place >= 0 else None

    def _probe(self) -> Any:
        """Return how vmap has wrapped each leaf: its level and its layout, from which `check_mapped` tells dims."""
        # dynamo cannot ask how a tensor is wrapped.
        if is_compiling() or not in_functorch():
            return None
        return [layout_of(leaf) for _, leaf in iter_leaves(self)]

    def __reduce__(self) -> Any:
        return _restore, (self._trees, self._dim, self._dim_name)


def lazy_stack(trees: Sequence[Any], dim: int = 0) -> Any:
    """Stack trees of possibly unequal shapes along a new dimension, without copying.

    Args:
        trees: One or more trees of one class, with one number of batch dimensions.
        dim: Where the new dimension goes among those of the batch.

    Returns:
        A `LazyStack`; of typed trees, one that is an instance of their class too.

    Shapes:
        N trees of batch sizes (T_i, *B) become one of (N, -1, *B), for `dim` 0.

    Raises:
        ValueError: There are no trees.
        TreeStructureError: The trees differ in class, or a key is a tensor in one and a tree in another.
        BatchSizeError: The trees have different numbers of batch dimensions.
        IndexError: There is no such dimension.

    Examples:
        >>> ragged = tdf.lazy_stack([TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (2, 4)])
        >>> (ragged * 2).batch_size, ragged[:, :1].dense()["x"].shape
        (torch.Size([2, -1]), torch.Size([2, 1, 2]))
    """
    given: list[Any] = list(trees)
    if not given:
        raise error(ValueError, "lazy_stack: no trees were given.", expected="one or more")
    check_same_ndim(given, "lazy_stack")
    check_alike(given, ())
    return LazyStack._of(given, dim_index(dim, len(given[0]._batch_size) + 1, "lazy_stack"))


def _restore(trees: Sequence[Any], dim: int, name: str | None) -> Any:
    return LazyStack._of(trees, dim, name)


# -- the class for typed trees ----------------------------------------------------------------------------------


def _class_for(cls: Any) -> Any:
    """Return the class of a stack of trees of this class, made once and kept on it."""
    if issubclass(cls, LazyStack):
        return cls
    if cls is TensorCollection._open:
        return LazyStack
    _define_for(cls)
    return cls.__dict__["_stack_class"].made


class _Kept:
    """The class of a stack on that of its trees; where cloudpickle copies the one, it makes the other itself."""

    def __init__(self, cls: Any, made: Any) -> None:
        self.cls, self.made = cls, made

    def __reduce__(self) -> Any:
        return _kept, (self.cls,)


def _kept(cls: Any) -> Any:
    return cls.__dict__.get("_stack_class") or _Kept(cls, None)


def _define_for(cls: Any) -> None:
    if _kept(cls).made is not None:
        return
    with _DEFINING:
        # Another thread may have been here first.
        if _kept(cls).made is None:
            cls._stack_class = _Kept(cls, _define(cls))


def _define(cls: Any) -> Any:
    namespace = {"__slots__": (), "__module__": cls.__module__, "_stacked": cls, "__doc__": LazyStack.__doc__}
    namespace["__qualname__"] = name = f"LazyStack[{cls.__name__}]"
    made = type(cls)(name, (LazyStack, cls), namespace)
    # Not in the namespace, where it would replace the constructor of the fields.
    made.__new__ = _stack_typed
    for field in cls._fields:
        setattr(made, field, property(partial(_read_field, field)))
    register(made)
    return made


# A hook of the class, which runs when its stack is defined, may stack other classes.
_DEFINING = RLock()


# Dynamo, which traces no definition of a class, calls it when it traces: what torch.compiler.assume_constant_result
# sets, which would import all of dynamo.
_define_for._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _stack_typed(cls: Any, *trees: Any, **fields: Any) -> Any:
    """Return `LazyStack(trees, dim)`, and refuse fields, which `dataclasses.replace` gives."""
    given = [name for name in fields if name not in ("trees", "dim")]
    if given:
        raise error(
            TypeError,
            f"{cls.__qualname__}: a lazy stack is made of trees.",
            expected="one sequence of trees",
            got=f"the fields {given}",
            hint="stack.replace(field=value) replaces a field of each tree; dataclasses.replace calls a constructor.",
        )
    return LazyStack.__new__(cls, *trees, **fields)


def _read_field(name: str, stack: Any) -> Any:
    """Return a field of each tree; None if it is empty in all, and in its place if it is in some."""
    having = [name in tree._keys() for tree in stack._trees]
    if all(having):
        return stack[name]
    return (
        tuple([tree[name] if has else None for tree, has in zip(stack._trees, having, strict=True)])
        if any(having)
        else None
    )


class _Values(NonTensorBase):
    """The non-tensor data under one key of all trees; reads as the list of their values."""

    __slots__ = ("nodes",)
    nodes: list[Any]

    def __init__(self, nodes: list[Any]) -> None:
        object.__setattr__(self, "nodes", nodes)

    @property
    def shape(self) -> Size:
        return Size((len(self.nodes),))

    @property
    def value(self) -> list[Any]:
        return [node.value for node in self.nodes]


TensorCollection._lazy = LazyStack
register(LazyStack)
