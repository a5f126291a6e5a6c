"""Trees as pytrees: flattening, rebuilding around anything, and entering a class in both registries."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Size, Tensor
from torch.utils import _pytree as torch_pytree

from tdfunc.core.collection import NO_STATIC, PLAIN, Static, TensorCollection, iter_leaves
from tdfunc.core.context import is_compiling
from tdfunc.core.nontensor import GLOBAL_NAMESPACE, NonTensorBase, NonTensorStack
from tdfunc.core.shapes import common_prefix, shape_of
from tdfunc.core.ties import Graft, graft, prune, spanning
from tdfunc.core.types import Kind, Names, Ties
from tdfunc.core.vmapped import Layout, Move, layout_of, read_move

T = TypeVar("T", bound=TensorCollection)

is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Context(NamedTuple):
    """What a flattened node needs to be rebuilt. Only keys, ties and a class's own data are compared."""

    keys: tuple[str, ...]
    ties: Ties
    order: tuple[str, ...]
    batch_size: Size
    device: torch.device | None
    names: Names | None
    # For each child the number of dimensions after the batch; None where it has no shape of its own.
    features: tuple[int | None, ...]
    static: Static | None
    grafts: tuple[Graft, ...]
    # The children's shapes when all are plain tensors: unchanged ones need no vote.
    shapes: list[Size] | None = None
    probe: Any = None
    # How the leaves lie in memory, where values for each row follow them: empty if there are no leaves.
    layouts: tuple[Layout, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context) or self.keys != other.keys or self.ties != other.ties:
            return False
        return self.static is other.static or (self.static or NO_STATIC).own == (other.static or NO_STATIC).own

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.keys, self.ties))


class _Flat(NamedTuple):
    """The cached flattening of a tree, which never changes."""

    children: tuple[Any, ...]
    context: Context


# Marks a rebuilt tree none of whose leaves said what its batch size is now: its parent decides.
_UNDECIDED = "undecided"


def flatten(tree: TensorCollection) -> tuple[tuple[Any, ...], Context]:
    """Return the children in sorted key order, ties pruned to their first path, and the context."""
    compiling = is_compiling()
    if not compiling and type(tree._cache) is _Flat:
        return tree._cache
    node, grafts = tree, ()
    cuts = spanning(tree._ties) if tree._static is not None else []
    if cuts:
        node, grafts = prune(tree, cuts)
    data = node._data
    order = tuple(data)
    keys = tuple(sorted(data))
    # One object where they agree, which unflattening tells at once.
    keys = order if keys == order else keys
    n = len(tree._batch_size)
    children = tuple([data[key] for key in keys])
    shapes = None if compiling else plain_shapes(children)
    features = [_features(child, n) for child in children] if shapes is None else [len(shape) - n for shape in shapes]
    context = Context(
        keys, tree._ties, order, tree._batch_size, tree._device, tree._names,
        tuple(features), tree._static, grafts, shapes,
        None if tree._static is None or tree._static.own is None else tree._probe(),
        None if shapes is not None or is_dynamo_compiling() else _layouts(children),
    )  # fmt: skip
    flat = _Flat(children, context)
    if not compiling:
        object.__setattr__(tree, "_cache", flat)
    return flat


def plain_shapes(children: tuple[Any, ...]) -> list[Size] | None:
    """Return the shapes of children that are all plain tensors."""
    if not PLAIN.issuperset(map(type, children)):
        return None
    try:
        return [child.shape for child in children]
    except RuntimeError:  # a strided nested tensor
        return None


def _layouts(children: tuple[Any, ...]) -> tuple[Layout, ...] | None:
    """Return the layouts of the leaves if a child, or a child without leaves, holds a value for each row."""
    for child in children:
        if isinstance(child, NonTensorStack) or (
            isinstance(child, TensorCollection) and flatten(child)[1].layouts == ()
        ):
            return tuple([layout_of(leaf) for leaf in _leaves(children)])
    return None


def _leaves(children: tuple[Any, ...]) -> Iterable[Any]:
    for child in children:
        if isinstance(child, TensorCollection):
            yield from [leaf for _, leaf in iter_leaves(child)]
        elif not isinstance(child, NonTensorBase):
            yield child


def _features(child: Any, n: int) -> int | None:
    if isinstance(child, Tensor):
        try:
            return child.dim() - n
        except (RuntimeError, ValueError):  # an uninitialised parameter has no shape
            return None
    if isinstance(child, TensorCollection):
        return len(child._batch_size) - n
    return None


def unflatten(cls: type[T], context: Context, children: Iterable[Any]) -> T:
    """Rebuild a node around anything; never raises, never validates."""
    children = tuple(children)
    if context.shapes is not None and not is_compiling():
        new = _unflatten_same(cls, context, children)
        if new is not None:
            return new
    old = context.batch_size
    size, device = rebuilt_size(cls, children, context)
    undecided = size is None
    if size is None:
        size = old
    elif size != old:
        move = read_move(context.layouts, _leaves(children)) if context.layouts else None
        children = tuple([_follow(child, len(old), size, move) for child in children])
    elif any(type(c) is not Tensor for c in children):
        children = tuple(
            [_follow(c, len(old), size) if getattr(c, "_cache", None) is _UNDECIDED else c for c in children]
        )
    data = dict(zip(context.keys, children, strict=True))
    if context.order is not context.keys:
        data = {key: data[key] for key in context.order}
    if context.grafts:
        data = graft(data, context.grafts, context.ties)
    names = context.names if len(size) == len(old) else None
    new = cls._make(data, size, device, names, context.static)
    if undecided and children or not children:
        object.__setattr__(new, "_cache", _UNDECIDED)
    return new


def _unflatten_same(cls: type[T], context: Context, children: tuple[Any, ...]) -> T | None:
    """Rebuild a node of plain tensors whose shapes (and device, if it has one) are as they were."""
    if not children or context.grafts or plain_shapes(children) != context.shapes:
        return None
    device = context.device
    if device is not None and any([child.device != device for child in children]):
        return None
    data = dict(zip(context.keys, children, strict=True))
    if context.order is not context.keys:
        data = {key: data[key] for key in context.order}
    new = cls._make(data, context.batch_size, device, context.names, context.static)
    object.__setattr__(new, "_cache", _Flat(children, context))
    return new


def rebuilt_size(
    cls: type[TensorCollection], children: tuple[Any, ...], context: Context
) -> tuple[Size | None, torch.device | None]:
    """Return the batch size that rebuilt children give their node, None if they do not say, and its device."""
    return cls._rebuilt_size(children, context) or _vote(children, context)


def _vote(children: tuple[Any, ...], context: Context) -> tuple[Size | None, torch.device | None]:
    """Return the common prefix of the leading dimensions that the children leave to the batch."""
    # torch.vmap unflattens its in_dims: trees of ints.
    if children and type(children[0]) is int:
        return None, context.device
    size: Size | None = None
    device = context.device
    last: Any = None
    for child, features in zip(children, context.features, strict=True):
        if features is None:
            continue
        if isinstance(child, Tensor):
            shape = shape_of(child)
            if shape is None:
                continue
            if device is not None and child.device != device:
                device = None
        elif isinstance(child, TensorCollection):
            if child._cache is _UNDECIDED:
                continue
            shape = child._batch_size
        else:
            continue
        if (shape, features) == last:
            continue
        last = (shape, features)
        lead = shape[: max(len(shape) - features, 0)]
        size = lead if size is None else common_prefix(size, lead)
    return size, device


def _follow(child: Any, old_ndim: int, size: Size, move: Move | None = None) -> Any:
    """Give a child that has no say (non-tensor data, a tree without shapes) the new batch size of its parent."""
    if isinstance(child, NonTensorBase):
        return child.follow(old_ndim, size, move)
    if isinstance(child, TensorCollection) and child._cache is _UNDECIDED:
        within = child._within(old_ndim, size)
        if within is None:
            return child
        inner = {k: _follow(v, *within, move) for k, v in child._data.items()}
        return child._replace(inner, batch_size=size + child._batch_size[old_ndim:])
    return child


def register(cls: type[TensorCollection]) -> None:
    """Enter a class in both pytree registries; a class of the same name defined again replaces the first."""
    # Typed as (list, context); torch only iterates, and a cached tuple cannot be changed by a caller.
    enter: Any = torch_pytree.register_pytree_node
    enter(
        cls,
        flatten,
        lambda children, context: unflatten(cls, context, children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_restore,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    # Typed for containers of the collections protocol; any class will do.
    enter = optree.register_pytree_node
    enter(
        cls,
        _flatten_with_entries,
        lambda context, children: unflatten(cls, context, children),
        path_entry_type=optree.MappingEntry,
        namespace=GLOBAL_NAMESPACE,
    )


def _flatten_with_keys(tree: TensorCollection) -> Any:
    children, context = flatten(tree)
    return [(torch_pytree.MappingKey(key), child) for key, child in zip(context.keys, children, strict=True)], context


def _flatten_with_entries(tree: TensorCollection) -> Any:
    children, context = flatten(tree)
    return children, context, context.keys


def _dump(context: Context) -> Any:
    """Return the context as JSON, so that exported programs save."""
    static = context.static or NO_STATIC
    return {
        "keys": list(context.keys),
        "order": list(context.order),
        "ties": [[list(path) for path in group] for group in context.ties],
        "batch_size": [int(size) for size in context.batch_size],
        "device": str(context.device) if context.device is not None else None,
        "names": list(context.names) if context.names is not None else None,
        "features": list(context.features),
        "kinds": {key: kind.value for key, kind in static.kinds.items()},
        "own": static.own,
        "grafts": [[list(g.path), g.place, list(g.source)] for g in context.grafts],
    }


def _restore(dumped: Any) -> Context:
    ties = tuple(tuple(tuple(path) for path in group) for group in dumped["ties"])
    static = Static({key: Kind(kind) for key, kind in dumped["kinds"].items()}, ties, dumped["own"])
    return Context(
        tuple(dumped["keys"]), ties, tuple(dumped["order"]), Size(dumped["batch_size"]),
        torch.device(dumped["device"]) if dumped["device"] else None,
        tuple(dumped["names"]) if dumped["names"] else None,
        tuple(dumped["features"]), None if static == NO_STATIC else static,
        tuple(Graft(tuple(path), place, tuple(source)) for path, place, source in dumped["grafts"]),
    )  # fmt: skip
