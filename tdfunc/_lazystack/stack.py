"""`LazyStack`: trees of unequal shapes side by side, along a dimension that is never made.

A small container, not a second `TensorDict`: docs/ragged.md lists its operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc._lazystack.ragged import Nesting, check_alike, check_same_ndim, nest_trees, pad_trees
from tdfunc._lazystack.shapes import HANDLERS, pick
from tdfunc._tensordict import TreeMethods
from tdfunc.core.collection import LeafOp, Static, TensorCollection, no_one_shape
from tdfunc.core.context import make_lock
from tdfunc.core.errors import BatchSizeError, check_choice, error
from tdfunc.core.keys import missing
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.pytree import _UNDECIDED, register
from tdfunc.core.shapes import as_names, as_size, common_size, dim_index, normalize_index, stacked_size
from tdfunc.core.ties import lift, merge
from tdfunc.core.types import Kind, Names, NestedKey, Node
from tdfunc.ops.batch import index, join
from tdfunc.ops.display.text import printable, tree_repr
from tdfunc.ops.edits.edit import set_, update
from tdfunc.ops.interop import list_of

# Numbers of trees in the repr.
_SHOWN_PLACES = 20


class LazyStack(TreeMethods):
    """Trees side by side along a new batch dimension, each with its own shapes; made by `lazy_stack`.

    Sizes that differ between the trees show as -1 in `batch_size`. The stack has the keys that all trees have; the
    other keys are in `trees`. A key reads as a tuple with the tensor of each tree, even if their shapes agree: the
    type of a result never depends on lengths. Non-tensor data read as a list with the value of each tree, sub-trees
    as a lazy stack of them.

    Edits, `apply`, arithmetic and moves work on each tree. To set a value, give a tuple or list with one part for
    each tree, or a tensor or tree that is divided along `stack_dim`. Calls that need one tensor for each leaf raise:
    call `dense()`, `pad()` or `nested()` first. `torch.vmap` takes dimensions before `stack_dim`.

    A stack of `TensorClass` values is also an instance of their class.

    Examples:
        >>> ragged = LazyStack([TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (2, 4)])
        >>> ragged.batch_size, ragged[1].batch_size, [x.shape[0] for x in ragged["x"]]
        (torch.Size([2, -1]), torch.Size([4]), [2, 4])
        >>> ragged.pad()["x"].shape
        torch.Size([2, 4, 2])
    """

    __slots__ = ()
    _is_lazy = True

    def __new__(cls, trees: Sequence[TensorCollection], dim: int = 0) -> Any:
        """Return `lazy_stack(trees, dim)`; of typed trees, a stack of their class."""
        return lazy_stack(trees, dim)

    @classmethod
    def _of(cls, trees: Sequence[Any], dim: int) -> Any:
        """Stack without checks, in the class for these trees; the stack has the names that all share."""
        first = trees[0]
        size = common_size([tree._batch_size for tree in trees])
        names: Names | None = first._names
        if names is not None:
            is_shared = all([tree._names == names for tree in trees])
            names = (*names[:dim], None, *names[dim:]) if is_shared else None
        device = first._device
        if not all([tree._device == device for tree in trees]):
            device = None
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
        # A map of the leaves may take more dimensions than there are before the trees: then these come first.
        if static is not None and static.own < -len(batch_size):
            static = static._replace(own=-len(batch_size))
        return super()._make(data, batch_size, device, names, static)

    def _like(self, trees: Sequence[Any]) -> Any:
        return self._of(trees, self._dim)

    if TYPE_CHECKING:
        # Rows along the stack's own dimension are trees.
        def __getitem__(self, index: Any) -> Any: ...

        def __getitems__(self, indices: Any) -> Any: ...

        def __iter__(self) -> Iterator[Any]: ...

        def unbind(self, dim: int = 0) -> tuple[Any, ...]: ...

    # -- its trees ----------------------------------------------------------------------------------------------

    @property
    def _dim(self) -> int:
        static: Any = self._static
        return len(self._batch_size) + static.own

    @property
    def _trees(self) -> list[Any]:
        return list(self._data.values())

    def _tree_at(self, number: int) -> Any:
        """Return one tree without a list of all: a loop over numbers would make that list for each."""
        place = number if number >= 0 else number + len(self._data)
        found = self._data.get(str(place))
        if found is None:
            return self._trees[number]
        return found

    def _trees_at(self, numbers: Sequence[int]) -> list[Any]:
        """Return some trees: a loop over the batches of an epoch would make a list of all for each batch."""
        if 16 * len(numbers) < len(self._data):
            return [self._tree_at(number) for number in numbers]
        trees = self._trees
        return [trees[number] for number in numbers]

    @property
    def trees(self) -> tuple[Any, ...]:
        """The trees, in order."""
        return tuple(self._trees)

    @property
    def stack_dim(self) -> int:
        """The batch dimension along which the trees are stacked."""
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
        return join.stack(trees, self._dim)

    def pad(self, value: Any = 0, side: str = "right", return_mask: bool = False) -> Any:
        """Return one tree in which every leaf is padded to its largest sizes; gradients flow through it.

        Args:
            value: A number, or a dict from (nested) keys to numbers; leaves that it does not name are padded with 0.
                Non-tensor data are padded with None.
            side: The side of the padding, "right" or "left", in every dimension whose lengths differ.
            return_mask: Also return a tree of masks.

        Returns:
            The tree, or the tree and a `TensorDict` with a mask for each leaf, True for values that are not padding.

        Shapes:
            Leaves (T_i, *F) become one of (N, max T_i, *F), and its mask is (N, max T_i): it has the dimensions of
            the batch, and further ones up to the last in which lengths differ.

        Raises:
            ValueError: The side is neither "right" nor "left".
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
        whole, masks = pad_trees(self._trees, self._dim, value, side, return_mask)
        if self._names is not None:
            whole = whole.with_names(self._names)
            masks = None if masks is None else masks.with_names(self._names)
        if return_mask:
            return whole, masks
        return whole

    def nested(self, layout: torch.layout = torch.jagged) -> Any:
        """Return one tree of nested tensors, with batch size [number of trees].

        Args:
            layout: `torch.jagged` for leaves that differ in their first dimension only, `torch.strided` for any.

        Raises:
            ValueError: `layout` is neither of the two, or the stack dimension is not the first.
            LeafMismatchError: A leaf differs in more than its first dimension, and the layout is jagged; or the trees
                are lazy stacks themselves.
            TreeStructureError: A key is not in all trees.

        Examples:
            >>> tdf.lazy_stack([TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (2, 4)]).nested()["x"].unbind()[
            ...     1
            ... ].shape
            torch.Size([4, 2])
        """
        if self._dim:
            raise error(
                ValueError,
                "nested: the trees are not stacked along dimension 0.",
                got=f"stack_dim {self._dim}",
                hint="permute() the batch dimensions first, which moves no data.",
            )
        check_choice("nested: the layout", layout, (torch.jagged, torch.strided))
        return nest_trees(self._trees, Nesting(layout, {}, {}), ())

    def tolist(self, *, convert_tensors: bool = False) -> list[Any]:
        """Return nested lists over the batch dimensions, with a dict of the values of each element.

        Args:
            convert_tensors: Also turn tensors into numbers and lists.

        Examples:
            >>> tdf.lazy_stack([TensorDict({"n": torch.arange(n)}, [n]) for n in (1, 2)]).tolist(convert_tensors=True)
            [[{'n': 0}], [{'n': 0}, {'n': 1}]]
        """
        return [list_of(row, convert_tensors) for row in self]

    # -- metadata -----------------------------------------------------------------------------------------------

    def with_batch_size(self, batch_size: Any) -> Any:
        """Return the stack with another batch size, which includes the number of trees at the stack dimension.

        Raises:
            BatchSizeError: The size at the stack dimension is not the number of trees, or a leaf lacks the dimensions.
        """
        size = as_size(batch_size)
        dim = self._dim
        if size[dim : dim + 1] != (len(self._data),):
            raise BatchSizeError(
                f"with_batch_size: dimension {dim} is not the number of trees.",
                expected=len(self._data),
                got=str(list(size)),
            )
        inner = (*size[:dim], *size[dim + 1 :])
        return self._like([tree.with_batch_size(inner) for tree in self._trees])

    def with_names(self, names: Sequence[str | None] | None) -> Any:
        """Return the stack with names for the batch dimensions of its trees; its own dimension has none."""
        given = as_names(names, len(self._batch_size))
        dim = self._dim
        if given is not None and given[dim] is not None:
            raise error(
                ValueError,
                f"with_names: the stack dimension {dim} cannot have a name.",
                got=repr(given[dim]),
                hint="pad() or dense() first.",
            )
        inner = None if given is None else (*given[:dim], *given[dim + 1 :])
        return self._like([tree.with_names(inner) for tree in self._trees])

    def replace(self, changes: Mapping[str, Any] | TensorCollection | None = None, /, **entries: Any) -> Any:
        """Return the stack with some entries of each tree replaced: values are cut as by `set`."""
        new: Any = self
        if changes is not None:
            new = new._each(lambda tree, part: tree.replace(part), changes)
        if entries:
            new = new._each(lambda tree, part: tree.replace(part), entries)
        return new

    def __repr__(self) -> str:
        lines = [f"    stack_dim={self._dim}"]
        places: dict[str, list[int]] = {}
        # Inside tree_map a child may be anything.
        trees = [tree for tree in self._data.values() if isinstance(tree, TensorCollection)]
        for i, tree in enumerate(trees):
            for key in tree._keys():
                places.setdefault(key, []).append(i)
        for key in sorted(places.keys() - set(self._keys())):
            numbers = places[key]
            more = ""
            if len(numbers) > _SHOWN_PLACES:
                more = f" and {len(numbers) - _SHOWN_PLACES} more"
            lines.append(f"    {printable(key)}: in trees {numbers[:_SHOWN_PLACES]}{more}")
        rest = "".join([f",\n{line}" for line in lines])
        return f"{tree_repr(self)[:-1]}{rest})"

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

    def _get(self, key: str) -> Node:
        trees = self._trees
        if key not in self._keys():
            raise missing((key,), self._keys(), node=self)
        nodes = [tree._get(key) for tree in trees]
        is_one_class = len(set(map(type, nodes))) == 1
        if is_one_class and isinstance(nodes[0], TensorCollection):
            # Names belong to one node: the trees inside do not have them.
            return self._of(nodes, self._dim)
        if all([isinstance(node, NonTensorBase) for node in nodes]):
            return _Values(nodes)
        return tuple(nodes)

    def _put(self, changes: dict[str, Node], kinds: dict[str, Kind] | None = None) -> Any:
        return self._each(update, changes)

    def _each(self, fn: Callable[..., Any], *values: Any) -> Any:
        if values:
            rows = zip(*[self._cut(value) for value in values], strict=True)
        else:
            rows = [()] * len(self._data)
        done: list[Any] = []
        for i, (tree, row) in enumerate(zip(self._trees, rows, strict=True)):
            try:
                done.append(fn(tree, *row))
            except Exception as err:
                if hasattr(err, "add_note"):
                    err.add_note(f"In tree {i} of the lazy stack.")
                raise
        return self._like(done)

    # Any: the options of `TensorCollection._replace`.
    def _replace(self, data: dict[str, Node], *, batch_size: Size | None = None, **_: Any) -> Any:
        # A tree that loses all entries stays, as an empty one: the others keep their places.
        trees: list[Any] = []
        mine: dict[str, Any] = self._data
        for number, tree in mine.items():
            if number in data:
                trees.append(data[number])
            else:
                trees.append(tree._replace({}, kinds={}, ties=()))
        new = self._like(trees)
        if batch_size is not None and batch_size != new._batch_size and self._cache is not _UNDECIDED:
            raise BatchSizeError(
                "The batch size does not agree with the trees of the lazy stack.",
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
            cut: list[dict[Any, Any]] = [{} for _ in range(count)]
            for key, entry in entries.items():
                for own, part in zip(cut, self._cut(entry), strict=True):
                    own[key] = part
            return cut
        if isinstance(value, _Values):
            value = value.nodes
        if isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            if len(items) != count:
                raise BatchSizeError(
                    "The list or tuple does not have one value for each tree of the lazy stack.",
                    expected=f"{count} values",
                    got=f"{len(items)}",
                    hint="wrap one value for all as NonTensorData(value).",
                )
            return list(items)
        if isinstance(value, (TensorCollection, Tensor, np.ndarray, NonTensorStack)):
            return self._cut_along(value)
        return [value] * count

    def _cut_along(self, value: Any) -> list[Any]:
        dim = self._dim
        count = len(self._data)
        if isinstance(value, LazyStack) and value._dim == dim and len(value._data) == count:
            return value._trees
        is_tree = isinstance(value, TensorCollection)
        size = tuple(value._batch_size if is_tree else value.shape)
        if size[dim : dim + 1] != (count,):
            raise BatchSizeError(
                "The value does not have one part for each tree of the lazy stack, along its dimension.",
                expected=f"{count} at dimension {dim}",
                got=f"{'batch size' if is_tree else 'shape'} {list(size)}",
                hint="give one value for each tree, in a tuple.",
            )
        if isinstance(value, np.ndarray):
            return [np.take(cast("Any", value), i, dim) for i in range(count)]
        if is_tree:
            return list(index.unbind(value, dim))
        return list(value.unbind(dim))

    # -- operations ---------------------------------------------------------------------------------------------

    def _map(self, op: LeafOp, *others: TensorCollection) -> Any:
        return self._run(op, others, "_map")

    def _index(self, index: Any) -> Any:
        return pick(self, normalize_index(index, self._batch_size))

    def _shape(self, op: LeafOp, *others: Any) -> Any:
        handler = HANDLERS.get(op.name)
        if handler is None:
            return self._run(op, others, "_shape")
        return handler(self, op, others)

    def _run(self, op: LeafOp, others: Sequence[Any], primitive: str) -> Any:
        """Apply an operation that treats every element of the batch alike to each tree."""
        is_divisible = not op.args or (op.bind is not None and isinstance(op.args[0], Tensor))
        if op.size is not None or not is_divisible:
            raise no_one_shape(op.name, self)
        ops = [op] * len(self._data)
        if op.bind is not None:
            rows = zip(*[self._cut_operand(arg) for arg in op.args], strict=True)
            ops = [op._replace(leaf=op.bind(*row), args=row, plain=None) for row in rows]
        twins: list[list[Any]] = [self._cut_along(other) for other in others]
        done: list[Any] = []
        for tree, own_op, *rest in zip(self._trees, ops, *twins, strict=True):
            if any([twin._is_lazy != tree._is_lazy for twin in rest]):
                raise no_one_shape(f"{op.name} of stacks along different dimensions", self)
            done.append(getattr(tree, primitive)(own_op, *rest))
        return self._like(done)

    def _cut_operand(self, operand: Tensor) -> list[Tensor]:
        """Return the part for each tree of an operand that broadcasts to (leading) batch dimensions."""
        dim = self._dim
        count = len(self._data)
        if operand.dim() <= dim:
            return [operand] * count
        if operand.shape[dim] == 1:
            return [operand.select(dim, 0)] * count
        return [operand.select(dim, i) for i in range(count)]

    # -- pytree and pickle --------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return _restore, (self._trees, self._dim)


def lazy_stack(trees: Sequence[Any], dim: int = 0) -> Any:
    """Stack trees of possibly unequal shapes along a new dimension, without copying.

    Args:
        trees: One or more trees of one class, with one number of batch dimensions.
        dim: The place of the new dimension among the batch dimensions.

    Returns:
        A `LazyStack`; for typed trees, it is also an instance of their class.

    Shapes:
        N trees of batch sizes (T_i, *B) become one of (N, -1, *B), for `dim` 0.

    Raises:
        ValueError: `trees` is empty.
        TreeStructureError: The trees differ in class, or a key is a tensor in one and a tree in another.
        BatchSizeError: The trees have different numbers of batch dimensions.
        IndexError: The dimension does not exist.

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


def pad_sequence(
    trees: Sequence[Any], pad_dim: int = 0, padding_value: Any = 0, *, return_mask: "bool | NestedKey" = False
) -> Any:
    """Stack trees whose leaves differ in the length of one dimension, the shorter ones padded at its end.

    `lazy_stack(trees).pad()` pads every dimension in which they differ, on either side.

    Args:
        trees: One or more trees of one class with the same keys.
        pad_dim: The dimension of each leaf whose length may differ, batch dimensions counted; a negative one counts
            from the last dimension of each leaf. A leaf without it is stacked as it is.
        padding_value: A number for new elements, or a dict from (nested) keys to numbers. Non-tensor data are padded
            with None.
        return_mask: Add a tree of masks, True for values that are not padding, under the key "masks" or the given one.

    Shapes:
        Leaves (*B, T_i, *F) become one of (N, *B, max T_i, *F), and its mask is (N, *B, max T_i).

    Raises:
        ValueError: `trees` is empty.
        LeafMismatchError: A leaf differs in another dimension or its dtype, or cannot hold the value; it is named.
        TreeStructureError: The trees differ in keys or class.

    Examples:
        >>> trees = [TensorDict({"ids": torch.arange(n), "n": n}) for n in (1, 3)]
        >>> batch = tdf.pad_sequence(trees, padding_value=-1, return_mask=True)
        >>> batch["ids"], batch["masks", "ids"]
        (tensor([[ 0, -1, -1],
                [ 0,  1,  2]]), tensor([[ True, False, False],
                [ True,  True,  True]]))
    """
    given = lazy_stack(trees)._trees
    padded, masks = pad_trees(given, 0, padding_value, "right", return_mask is not False, only=pad_dim)
    if return_mask is False:
        return padded
    return set_(padded, "masks" if return_mask is True else return_mask, masks, None)


def _restore(trees: Sequence[Any], dim: int) -> Any:
    return LazyStack._of(trees, dim)


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
    """The class of a stack on the class of its trees; where cloudpickle copies the one, it makes the other itself."""

    def __init__(self, cls: Any, made: Any) -> None:
        self.cls = cls
        self.made = made

    def __reduce__(self) -> Any:
        return _kept, (self.cls,)


def _kept(cls: Any) -> Any:
    return cls.__dict__.get("_stack_class") or _Kept(cls, None)


def _define_for(cls: Any) -> None:
    with _DEFINING:
        if _kept(cls).made is not None:
            return
        name = f"LazyStack[{cls.__name__}]"
        namespace = {
            "__slots__": (),
            "__module__": cls.__module__,
            "__qualname__": name,
            "__doc__": LazyStack.__doc__,
            "_stacked": cls,
        }
        made = type(cls)(name, (LazyStack, cls), namespace)
        # Not in the namespace, where it would replace the constructor of the fields.
        made.__new__ = LazyStack.__new__
        for field in cls._fields:
            setattr(made, field, property(partial(_read_field, field)))
        register(made)
        cls._stack_class = _Kept(cls, made)


# A hook of the class, which runs when its stack is defined, may stack other classes.
_DEFINING = make_lock()


# Dynamo, which traces no definition of a class, calls it when it traces: the mark that
# torch.compiler.assume_constant_result sets, without its import of all of dynamo.
_define_for._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _read_field(name: str, stack: Any) -> Any:
    """Return a field of each tree; None if it is empty in all, and in its place if it is in some."""
    if name in stack._keys():
        return stack[name]
    # A tree that is a stack itself may have the field in some of its trees.
    values = [getattr(tree, name) for tree in stack._trees]
    if all([value is None for value in values]):
        return None
    data = _as_data(name, stack)
    if data is None:
        return tuple(values)
    return data.value


def _as_data(name: str, tree: Any) -> NonTensorBase | None:
    """Return a field as non-tensor data, None where it is empty; None where the field holds something else."""
    if name in tree._keys():
        node = tree._get(name)
        return node if isinstance(node, NonTensorBase) else None
    if not tree._is_lazy:
        return NonTensorData(None, tree._batch_size)
    nodes = [_as_data(name, each) for each in tree._trees]
    found = [node for node in nodes if node is not None]
    if len(found) == len(nodes):
        return _Values(found)
    return None


class _Values(NonTensorBase):
    """The non-tensor data under one key of all trees; reads as the list of their values.

    Where one has a value for each row, all read as nested lists.
    """

    __slots__ = ("nodes",)
    nodes: list[Any]

    def __init__(self, nodes: list[Any]) -> None:
        object.__setattr__(self, "nodes", nodes)

    @property
    def shape(self) -> Size:
        return Size((len(self.nodes),))

    @property
    def has_rows(self) -> bool:
        """Whether one of them has a value for each row."""
        return any([isinstance(node, NonTensorStack) or getattr(node, "has_rows", False) for node in self.nodes])

    @property
    def value(self) -> list[Any]:
        if self.has_rows:
            return self.tolist()
        return [node.value for node in self.nodes]

    def tolist(self) -> list[Any]:
        return [node.tolist() for node in self.nodes]

    def __repr__(self) -> str:
        return repr(self.value)


TensorCollection._lazy = LazyStack
register(LazyStack)
