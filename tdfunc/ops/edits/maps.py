"""Functions over leaves: `apply` and `named_apply`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, leaf_paths, note_leaf, per_tree
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.keys import Filter, FilterLike, dotted
from tdfunc.core.shapes import as_names, as_size, one_shape, put_first, shape_of
from tdfunc.core.types import Node, Path
from tdfunc.ops.base.cast import as_device
from tdfunc.ops.base.foreach import check_same
from tdfunc.ops.base.reading import UNSET, entries, holds_leaf, refuse_inplace

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


def apply(
    tree: T,
    fn: Callable[..., Any],
    others: tuple[TensorCollection, ...],
    *,
    batch_size: Any = None,
    device: Any = UNSET,
    names: Any = UNSET,
    default: Any = UNSET,
    filter_empty: bool = False,
    where: "FilterLike | None" = None,
) -> T:
    """Call `fn` on every leaf, or those that a filter chooses; None drops it. The results must have the batch size."""
    if where is not None:
        # In the order of a map, on which `with_leaves` also relies.
        marks = iter(Filter(where).mask(entries(tree)))
        fn = partial(_where, fn, marks)
    if default is not UNSET:
        others = tuple(_fill_missing(tree, other, default) for other in others)
    else:
        for other in others:
            check_same(tree, other, "apply")
    size = None
    if batch_size is not None:
        size = put_first(as_size(batch_size), len(tree._batch_size))
    out = _map_leaves(tree, fn, others, size)
    if filter_empty:
        out = drop_empty(out)
    if device is UNSET and names is UNSET:
        return out
    place = out._device if device is UNSET else as_device(device)
    given = out._names if names is UNSET else as_names(names, len(out._batch_size))
    return out._make(out._data, out._batch_size, place, given, out._static)


def _map_leaves(
    tree: T, fn: Callable[..., Any], others: tuple[TensorCollection, ...], size: Callable[[Size], Size] | None
) -> T:
    try:
        out = tree._map(LeafOp("apply", fn, size, None, False, (), True), *others)
    except Exception as err:
        note_leaf(err, "apply")
        raise
    _check_results(out, ())
    return out


def _where(fn: Callable[..., Any], marks: Iterator[bool], leaf: Any, *twins: Any) -> Any:
    if next(marks):
        return fn(leaf, *twins)
    return leaf


@per_tree(cut=1)
def _fill_missing(tree: TensorCollection, other: TensorCollection, default: Any) -> TensorCollection:
    """Return `other` with exactly the keys of `tree`, missing leaves being the default."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        mine = other._data.get(key)
        if isinstance(node, TensorCollection):
            inner = mine if isinstance(mine, TensorCollection) else tree._open._make({}, node._batch_size)
            data[key] = _fill_missing(node, inner, default)
        else:
            data[key] = default if mine is None else mine
    return tree._open._make(data, other._batch_size, other._device)


def _check_results(tree: TensorCollection, at: Path) -> None:
    size = tree._batch_size
    leaves = tree._data.values()
    ndim = len(size)
    # The common node, without a look at each leaf.
    if PLAIN.issuperset(map(type, leaves)):
        shape = one_shape(leaves) if ndim else size
        if not leaves or (shape is not None and shape[:ndim] == size):
            return
    for key, node in tree._data.items():
        if isinstance(node, Tensor):
            shape = shape_of(node)
            if shape is not None and shape[:ndim] != size:
                raise BatchSizeError(
                    f"apply: the result for {dotted((*at, key))!r} has lost the batch size.",
                    expected=f"shape {list(size)} + (...)",
                    got=f"shape {list(shape)}",
                    hint="pass batch_size= with the size that all results share.",
                )
        elif isinstance(node, TensorCollection):
            _check_results(node, (*at, key))


def drop_empty(tree: T) -> T:
    """Return the tree without sub-trees that hold no leaf; a lazy stack keeps the places of trees that are empty."""
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        if not isinstance(node, TensorCollection):
            data[key] = node
            continue
        inner = drop_empty(node)
        if holds_leaf(inner):
            data[key] = inner
    return tree._replace(data)


class MapMethods(TensorCollection):
    """`apply` and `named_apply`."""

    __slots__ = ()

    def apply(self, fn: Callable[..., Any], *others: Any, inplace: bool = False, **options: Any) -> "Self":
        """Return a tree of `fn(leaf, *leaves of others)`; a result of None drops the leaf.

        A tied leaf is passed once. Non-tensor data are kept as they are.

        Args:
            fn: A function of a tensor, and of one more for each other tree.
            *others: Trees with the same keys.
            inplace: Must be False: a tree is never changed.
            **options: `batch_size` of the results, if `fn` changes it; `device` and `names` of the result; `default`
                for leaves that another tree lacks; `filter_empty` to drop sub-trees without leaves; `where`, a
                filter: leaves that do not match it are kept unchanged.

        Raises:
            BatchSizeError: A result does not start with the batch size; the message names the leaf.
            TreeStructureError: The keys of another tree differ.

        Examples:
            >>> td = TensorDict({"a": torch.ones(3, 2), "n": torch.arange(3)}, [3])
            >>> list(td.apply(lambda x: x.sum(-1) if x.is_floating_point() else None).keys())
            ['a']
        """
        refuse_inplace(inplace, "apply(fn)")
        if others or options:
            return apply(self, fn, others, **options)
        return _map_leaves(self, fn, (), None)

    def named_apply(
        self,
        fn: Callable[..., Any],
        *others: Any,
        nested_keys: bool = False,
        inplace: bool = False,
        **options: Any,
    ) -> "Self":
        """Return a tree of `fn(name, leaf, ...)`.

        Args:
            fn: A function of a name and a tensor (and one tensor of each other tree).
            *others: Trees with the same keys.
            nested_keys: Pass the complete path (a tuple if it is nested) as the name, not the last key.
            inplace: Must be False: a tree is never changed.
            **options: As for `apply`.
        """
        refuse_inplace(inplace, "named_apply(fn)")
        # In the order of a map, as in `apply`.
        names = iter([path if nested_keys and path[1:] else path[-1] for path in leaf_paths(self)])
        return apply(self, lambda leaf, *rest: fn(next(names), leaf, *rest), others, **options)
