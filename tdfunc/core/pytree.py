"""Trees as pytrees: flattening, rebuilding around anything, and entering a class in both registries."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Size, Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils import _pytree as torch_pytree

from tdfunc.core.collection import NO_STATIC, PLAIN, Static, TensorCollection, iter_leaves
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.nontensor import GLOBAL_NAMESPACE, NonTensorBase
from tdfunc.core.shapes import common_prefix, common_size, shape_of, stacked_size
from tdfunc.core.ties import Graft, graft, prune, spanning
from tdfunc.core.types import Kind, Names, Ties

T = TypeVar("T", bound=TensorCollection)


class Context(NamedTuple):
    """The data that rebuild a flattened node. Only keys, ties and a class's own data are compared."""

    keys: tuple[str, ...]
    ties: Ties
    order: tuple[str, ...]
    batch_size: Size
    device: torch.device | None
    names: Names | None
    # For each child the number of dimensions after the batch; None where it has no shape.
    features: tuple[int | None, ...]
    static: Static | None
    grafts: tuple[Graft, ...]
    # The children's shapes when all are plain tensors: unchanged ones need no vote.
    shapes: list[Size] | None = None
    # Of a lazy stack, how many transforms of torch.func ran when it was flattened.
    level: int | None = None

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


# Marks a rebuilt tree of which no leaf has a shape to vote with: its parent gives it a batch size.
_UNDECIDED = "undecided"


def flatten(tree: TensorCollection) -> tuple[tuple[Any, ...], Context]:
    """Return the children in sorted key order, ties pruned to their first path, and the context."""
    compiling = is_compiling()
    if not compiling and type(tree._cache) is _Flat:
        return tree._cache
    data = tree._data
    grafts = ()
    if tree._static is not None:
        cuts = spanning(tree._ties)
        if cuts:
            pruned, grafts = prune(tree, cuts)
            data = pruned._data
    order = tuple(data)
    keys = tuple(sorted(data))
    # One object where they agree, so that unflattening compares identities.
    keys = order if keys == order else keys
    n = len(tree._batch_size)
    children = tuple([data[key] for key in keys])
    shapes = None
    if not compiling:
        shapes = plain_shapes(children)
    if shapes is None:
        features = [_features(child, n) for child in children]
    else:
        features = [len(shape) - n for shape in shapes]
    level = None
    if tree._is_lazy and not compiling:
        level = _functorch.maybe_current_level()
    # By position: keywords take longer, and every new node makes one.
    context = Context(
        keys, tree._ties, order, tree._batch_size, tree._device, tree._names,
        tuple(features), tree._static, grafts, shapes, level,
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
        children = tuple([_follow(child, old, size) for child in children])
    elif not cls._is_lazy and any([type(c) is not Tensor for c in children]):
        # Of the same size: only a child that has none yet takes it.
        children = tuple([_follow(c, old, size) if getattr(c, "_cache", None) is _UNDECIDED else c for c in children])
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
    """Return the batch size that rebuilt children give their node, None if none votes, and its device."""
    if not cls._is_lazy:
        return _vote(children, context)
    # A lazy stack has the batch size of its trees, with their number in its place.
    if any([not isinstance(child, TensorCollection) or child._cache is _UNDECIDED for child in children]):
        return None, context.device
    # The place of the stack counts from the end, so that dimensions may come and go in front.
    assert context.static is not None
    own: int = context.static.own
    size = common_size([child._batch_size for child in children])
    ndim = len(size) + 1
    _check_vmap(children, context, len(context.batch_size) + own, ndim)
    device = children[0]._device
    if not all([child._device == device for child in children]):
        device = None
    return stacked_size(size, max(ndim + own, 0), len(children)), device


def _check_vmap(children: tuple[Any, ...], context: Context, dim: int, ndim: int) -> None:
    """Raise if vmap has taken a dimension of the leaves that has another number in the lazy stack."""
    taken = _taken_dim(children, context, dim, ndim)
    if taken is not None:
        raise BatchSizeError(
            "vmap: in_dims is not in front of the dimension along which a lazy stack holds its trees.",
            expected=f"a dimension before {dim}",
            got=f"in_dims={taken}",
            hint="permute() the stack so that its own dimension comes last (no copy); to map over the trees, write "
            "dense() or pad() first, or [fn(tree) for tree in lazy].",
        )


def _taken_dim(children: tuple[Any, ...], context: Context, dim: int, ndim: int) -> int | None:
    """Return the first dimension, not in front of `dim`, that vmap has taken from the leaves of a lazy stack."""
    old_ndim = len(context.batch_size)
    if is_compiling():
        # dynamo (torch 2.13) cannot read from a tensor the dimension that vmap took.
        if ndim == old_ndim or dim >= old_ndim - 1:
            return None
        return dim
    if ndim >= old_ndim:
        return None
    level = _functorch.maybe_current_level()
    if level == context.level:
        return None
    for child in children:
        for _, leaf in iter_leaves(child):
            if isinstance(leaf, Tensor) and _functorch.maybe_get_level(leaf) == level:
                mapped_dim = _functorch.maybe_get_bdim(leaf)
                if mapped_dim >= dim:
                    return mapped_dim
    return None


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


def _follow(child: Any, old: Size, size: Size) -> Any:
    """Give a child without a vote (non-tensor data, a tree without shapes) the new batch size of its parent."""
    if isinstance(child, NonTensorBase):
        return child.follow(old, size)
    if isinstance(child, TensorCollection) and child._cache is _UNDECIDED and not child._is_lazy:
        inner = {key: _follow(node, old, size) for key, node in child._data.items()}
        return child._replace(inner, batch_size=size + child._batch_size[len(old) :])
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
        path_entry_type=_TreeEntry if cls._is_lazy else optree.MappingEntry,
        namespace=GLOBAL_NAMESPACE,
    )


class _TreeKey(torch_pytree.MappingKey[str, Any]):
    """The number of a tree in a lazy stack, which is not one of its keys."""

    def get(self, mapping: Any) -> Any:
        return mapping._data[self.key]


class _TreeEntry(optree.MappingEntry[str, Any]):
    """The same for optree."""

    def __call__(self, obj: Any) -> Any:
        return obj._data[self.entry]

    def codify(self, node: str = "") -> str:
        return f"{node}.trees[{self.entry}]"


def _flatten_with_keys(tree: TensorCollection) -> Any:
    children, context = flatten(tree)
    kind = _TreeKey if tree._is_lazy else torch_pytree.MappingKey
    return [(kind(key), child) for key, child in zip(context.keys, children, strict=True)], context


def _flatten_with_entries(tree: TensorCollection) -> Any:
    children, context = flatten(tree)
    return children, context, context.keys


def _dump(context: Context) -> Any:
    """Return the context as JSON, so that exported programs save."""
    static = context.static or NO_STATIC
    return {
        "keys": list(context.keys),
        "order": list(context.order),
        "ties": [list(map(list, group)) for group in context.ties],
        "batch_size": [int(size) for size in context.batch_size],
        "device": None if context.device is None else str(context.device),
        "names": None if context.names is None else list(context.names),
        "features": list(context.features),
        "kinds": {key: kind.value for key, kind in static.kinds.items()},
        "own": static.own,
        "grafts": [[list(g.path), g.place, list(g.source)] for g in context.grafts],
    }


def _restore(dumped: Any) -> Context:
    """Return the context that `_dump` wrote."""
    ties = tuple([tuple(map(tuple, group)) for group in dumped["ties"]])
    kinds = {key: Kind(kind) for key, kind in dumped["kinds"].items()}
    static = Static(kinds, ties, dumped["own"])
    device = dumped["device"]
    names = dumped["names"]
    grafts = [Graft(tuple(path), place, tuple(source)) for path, place, source in dumped["grafts"]]
    return Context(
        keys=tuple(dumped["keys"]),
        ties=ties,
        order=tuple(dumped["order"]),
        batch_size=Size(dumped["batch_size"]),
        device=torch.device(device) if device else None,
        names=tuple(names) if names else None,
        features=tuple(dumped["features"]),
        static=None if static == NO_STATIC else static,
        grafts=tuple(grafts),
    )


def flatten_with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return what torch's `tree_flatten_with_path` does: the leaves with their paths, and the spec.

    Classes may be registered without names for their children; the leaves of such a tree have numbers.
    """
    try:
        return torch_pytree.tree_flatten_with_path(tree)
    except ValueError:
        leaves, spec = torch_pytree.tree_flatten(tree)
        return [((torch_pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(leaves)], spec
