"""Functions over leaves: `apply` and `named_apply`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Size

from tdfunc._collection import LeafOp, TensorCollection, iter_leaves
from tdfunc._errors import BatchSizeError, TreeStructureError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorBase
from tdfunc._shapes import as_names, as_size
from tdfunc._ties import graft, prune, remap
from tdfunc._types import Path
from tdfunc.ops import edit

T = TypeVar("T", bound=TensorCollection)
_UNSET: Any = object()


def apply(
    tree: T,
    fn: Callable[..., Any],
    others: tuple[TensorCollection, ...],
    *,
    batch_size: Any = None,
    device: Any = _UNSET,
    names: Any = _UNSET,
    default: Any = _UNSET,
    filter_empty: bool = False,
) -> T:
    """Call `fn` on every leaf; None drops it. The results must have the batch size."""
    if default is not _UNSET:
        others = tuple(_filled(tree, other, default) for other in others)
    else:
        _check_paths(tree, others)
    old = len(tree._batch_size)
    new = None if batch_size is None else as_size(batch_size)
    size = tree._batch_size if new is None else new
    op = LeafOp("apply", fn, None if new is None else (lambda b: new + b[old:]), None)
    try:
        out = tree._map(op, *others)
    except Exception as err:
        _add_path_note(tree, err)
        raise
    _check_results(out, size, ())
    if filter_empty:
        out = drop_empty(out)
    if device is not _UNSET or names is not _UNSET:
        out = out._make(
            out._data,
            out._batch_size,
            out._device if device is _UNSET else (None if device is None else torch.device(device)),
            out._names if names is _UNSET else as_names(names, len(size)),
            out._static,
        )
    return out


def _add_path_note(tree: TensorCollection, err: Exception) -> None:
    """Say in the traceback which tree the function was being applied to."""
    if hasattr(err, "add_note"):
        err.add_note(f"raised by the function given to apply() on a tree with leaves {[dotted(p) for p, _ in iter_leaves(tree)][:10]}")


def _check_paths(tree: TensorCollection, others: tuple[TensorCollection, ...]) -> None:
    for other in others:
        if other._data.keys() != tree._data.keys():
            raise TreeStructureError(
                explain("apply: the trees have different keys.", expected=f"{sorted(tree._data)}", got=f"{sorted(other._data)}", hint="pass default= for missing leaves.")
            )


def _filled(tree: TensorCollection, other: TensorCollection, default: Any) -> TensorCollection:
    """Return `other` with exactly the keys of `tree`, missing leaves being the default."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        mine = other._data.get(key)
        if isinstance(node, TensorCollection):
            data[key] = _filled(node, mine if isinstance(mine, TensorCollection) else TensorCollection._open._make({}, node._batch_size), default)
        else:
            data[key] = default if mine is None else mine
    return tree._open._make(data, other._batch_size, other._device)


def _check_results(tree: TensorCollection, size: Size, at: Path) -> None:
    # Leaves share shapes: comparing with the last one that passed saves the slice.
    ndim, last = len(size), None
    for key, node in tree._data.items():
        if isinstance(node, torch.Tensor):
            shape = node.shape
            if shape is not last and shape != last and shape[:ndim] != size:
                raise BatchSizeError(
                    explain(
                        f"apply: the result for {dotted((*at, key))!r} has lost the batch size.",
                        expected=f"shape {list(size)} + (...)",
                        got=f"shape {list(shape)}",
                        hint="pass batch_size= with the size that all results share.",
                    )
                )
            last = shape
        elif isinstance(node, TensorCollection):
            _check_results(node, node._batch_size, (*at, key))


def drop_empty(tree: T) -> T:
    """Return the tree without sub-trees that hold no leaf."""
    data: dict[str, Any] = {}
    for key, node in tree._data.items():
        if isinstance(node, TensorCollection):
            node = drop_empty(node)
            if not node._data:
                continue
        data[key] = node
    return tree._replace(data)


def named_apply(tree: T, fn: Callable[..., Any], others: tuple[TensorCollection, ...], nested_keys: bool, options: dict[str, Any]) -> T:
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
            data[key] = (path if len(path) > 1 else key) if nested else key
    return tree._replace(data)


class MapMethods(TensorCollection):
    """`apply` and `named_apply`."""

    __slots__ = ()

    def apply(self, fn: Callable[..., Any], *others: Any, inplace: bool = False, **options: Any) -> Any:
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
        """
        edit.refuse_inplace(inplace, "apply(fn)")
        return apply(self, fn, others, **options)

    def named_apply(self, fn: Callable[..., Any], *others: Any, nested_keys: bool = False, inplace: bool = False, **options: Any) -> Any:
        """Return a tree of `fn(name, leaf, ...)`; `nested_keys` gives the whole path as a tuple."""
        edit.refuse_inplace(inplace, "named_apply(fn)")
        return named_apply(self, fn, others, nested_keys, options)


__all__ = ["graft", "prune", "remap"]
