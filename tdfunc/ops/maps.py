"""Functions over leaves: `apply` and `named_apply`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import as_names, as_size, one_shape, put_first, shape_of
from tdfunc.core.types import Path
from tdfunc.ops.cast import as_device
from tdfunc.ops.foreach import check_same
from tdfunc.ops.reading import UNSET, refuse_inplace

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
# The frames whose local `key` names the leaf that an exception left.
_KNOW_KEYS = (TensorCollection._map_plain.__code__, TensorCollection._map_children.__code__)


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
) -> T:
    """Call `fn` on every leaf; None drops it. The results must have the batch size."""
    if default is not UNSET:
        others = tuple(_filled(tree, other, default) for other in others)
    else:
        for other in others:
            check_same(tree, other, "apply")
    size = None if batch_size is None else put_first(as_size(batch_size), len(tree._batch_size))
    out = _mapped(tree, fn, others, size)
    if filter_empty:
        out = drop_empty(out)
    if device is UNSET and names is UNSET:
        return out
    place = out._device if device is UNSET else as_device(device)
    given = out._names if names is UNSET else as_names(names, len(out._batch_size))
    return out._make(out._data, out._batch_size, place, given, out._static)


def _mapped(
    tree: T, fn: Callable[..., Any], others: tuple[TensorCollection, ...], size: Callable[[Size], Size] | None
) -> T:
    try:
        out = tree._map(LeafOp("apply", fn, size, None, False, (), True), *others)
    except Exception as err:
        _note_leaf(err)
        raise
    _check_results(out, ())
    return out


def _note_leaf(err: Exception) -> None:
    """Add the path of the leaf to an exception that the function raised."""
    # The frames of the maps that were left know their keys; counting calls instead would cost every call.
    path: list[str] = []
    trace = err.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in _KNOW_KEYS and "key" in frame.f_locals:
            path.append(frame.f_locals["key"])
        trace = trace.tb_next
    if path and hasattr(err, "add_note"):
        err.add_note(f"apply: raised at the leaf {dotted(path)!r}.")


def _filled(tree: TensorCollection, other: TensorCollection, default: Any) -> TensorCollection:
    """Return `other` with exactly the keys of `tree`, missing leaves being the default."""
    done = tree._each(lambda t, part: _filled(t, part, default), other)
    if done is not None:
        return done
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        mine = other._data.get(key)
        if isinstance(node, TensorCollection):
            inner = mine if isinstance(mine, TensorCollection) else tree._open._make({}, node._batch_size)
            data[key] = _filled(node, inner, default)
        else:
            data[key] = default if mine is None else mine
    return tree._open._make(data, other._batch_size, other._device)


def _check_results(tree: TensorCollection, at: Path) -> None:
    # Leaves share shapes: comparing with the last one that passed saves the slice.
    size, last = tree._batch_size, None
    ndim = len(size)
    leaves = tree._data.values()
    if PLAIN.issuperset(map(type, leaves)):
        shape = one_shape(leaves) if ndim else size
        if not leaves or (shape is not None and shape[:ndim] == size):
            return
    for key, node in tree._data.items():
        if isinstance(node, Tensor):
            shape = shape_of(node)
            if shape is not None and shape is not last and shape != last and shape[:ndim] != size:
                raise BatchSizeError(
                    f"apply: the result for {dotted((*at, key))!r} has lost the batch size.",
                    expected=f"shape {list(size)} + (...)",
                    got=f"shape {list(shape)}",
                    hint="pass batch_size= with the size that all results share.",
                )
            last = shape
        elif isinstance(node, TensorCollection):
            _check_results(node, (*at, key))


def drop_empty(tree: T) -> T:
    """Return the tree without sub-trees that hold no leaf; a lazy stack holds none if none of its trees does."""
    return tree._replace(_not_empty(tree))


def _not_empty(tree: TensorCollection) -> dict[str, Any]:
    """Return the leaves of a node and what is left of those of its trees that hold any."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        if isinstance(node, TensorCollection):
            inner = _not_empty(node)
            if not inner:
                continue
            # A lazy stack keeps the places of trees that are empty.
            node = node._replace(inner)
        data[key] = node
    return data


def named_apply(
    tree: T,
    fn: Callable[..., Any],
    others: tuple[TensorCollection, ...],
    nested_keys: bool,
    options: dict[str, Any],
) -> T:
    """`apply` whose function gets the key (or, with nested_keys, the path) first."""
    named = paths_tree(tree, nested_keys)
    return apply(tree, lambda leaf, name, *rest: fn(name, leaf, *rest), (named, *others), **options)


def paths_tree(tree: T, nested: bool, at: Path = ()) -> T:
    """Return a tree whose leaves are their own names."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        path = (*at, key)
        if isinstance(node, TensorCollection):
            data[key] = paths_tree(node, nested, path)
        elif isinstance(node, NonTensorBase):
            data[key] = node
        else:
            data[key] = path if nested and len(path) > 1 else key
    return tree._replace(data)


class MapMethods(TensorCollection):
    """`apply` and `named_apply`."""

    __slots__ = ()

    def apply(self, fn: Callable[..., Any], *others: Any, inplace: bool = False, **options: Any) -> "Self":
        """Return a tree of `fn(leaf, *leaves of others)`; a result of None drops the leaf.

        A tied leaf is passed once. Non-tensor data are kept as they are.

        Args:
            fn: A function of a tensor (and one of each other tree).
            *others: Trees with the same keys.
            inplace: Only False: a tree is never changed.
            **options: `batch_size` that the results have when `fn` changes it; `device` and `names` of the result;
                `default` for leaves that another tree lacks; `filter_empty` to drop sub-trees left without leaves.

        Raises:
            BatchSizeError: A result does not start with the batch size; the message names the leaf.
            TreeStructureError: The keys of another tree differ.

        Examples:
            >>> td = TensorDict({"a": torch.ones(3, 2), "n": torch.arange(3)}, [3])
            >>> list(td.apply(lambda x: x.sum(-1) if x.is_floating_point() else None).keys())
            ['a']
        """
        refuse_inplace(inplace, "apply(fn)")
        return apply(self, fn, others, **options) if others or options else _mapped(self, fn, (), None)

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
            nested_keys: The name is the whole path (a tuple where it is nested), not the last key.
            inplace: Only False: a tree is never changed.
            **options: As for `apply`.
        """
        refuse_inplace(inplace, "named_apply(fn)")
        return named_apply(self, fn, others, nested_keys, options)
