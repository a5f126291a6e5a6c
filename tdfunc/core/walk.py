"""Walks over trees: leaves as a list and back, replacing nodes, comparing trees.

Lists of leaves have one of two orders. The order of the pytree registration (sorted keys, as `tree_leaves`) uses the
cached contexts and is for optimizers and traced functions; insertion order is for kernels over many leaves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Size, Tensor
from torch.utils import _pytree as torch_pytree

from tdfunc.core.collection import PLAIN, LeafOp, Slots, TensorCollection
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import TreeStructureError
from tdfunc.core.keys import by_head, dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.pytree import Context, _Flat, flatten, unflatten
from tdfunc.core.shapes import shape_of
from tdfunc.core.types import Names, Path

T = TypeVar("T", bound=TensorCollection)


# Any: inside tree transformations a leaf may be anything.
def list_leaves(tree: TensorCollection) -> list[Any]:
    """Return the leaves in sorted key order, a tied leaf once, without non-tensor data."""
    if is_compiling():
        return torch_pytree.tree_leaves(tree)
    leaves: list[Any] = []
    _extend(tree, leaves)
    return leaves


def _extend(tree: TensorCollection, leaves: list[Any]) -> None:
    for child in flatten(tree)[0]:
        if isinstance(child, TensorCollection):
            _extend(child, leaves)
        elif type(child) not in torch_pytree.SUPPORTED_NODES:
            leaves.append(child)


def list_paths(tree: TensorCollection) -> list[Path]:
    """Return the path of each leaf, in the order of `list_leaves`."""
    found, _ = torch_pytree.tree_flatten_with_path(tree)
    return [tuple(map(_key_of, entries)) for entries, _ in found]


def _key_of(entry: Any) -> str:
    return str(getattr(entry, "key", entry))


def rebuild(tree: T, leaves: Sequence[Any]) -> T:
    """Return a tree like this one around other leaves of the same shapes, in the order of `list_leaves`."""
    if is_compiling():
        return torch_pytree.tree_unflatten(list(leaves), torch_pytree.tree_structure(tree))
    return _rebuild(tree, iter(leaves))


def _rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    old, context = flatten(tree)
    children: list[Any] = []
    same = True
    for child in old:
        if isinstance(child, TensorCollection):
            new = _rebuild(child, leaves)
        elif type(child) not in torch_pytree.SUPPORTED_NODES:
            new = next(leaves)
        else:
            new = child
        same = same and new is child
        children.append(new)
    if same:
        return tree
    return node_like(type(tree), context, tuple(children))


def node_like(cls: type[T], context: Context, children: tuple[Any, ...]) -> T:
    """Return a node with this context around children of the shapes it was made with."""
    if context.grafts:
        return unflatten(cls, context, children)
    data = dict(zip(context.keys, children, strict=True))
    if context.order != context.keys:
        data = {key: data[key] for key in context.order}
    new = cls._make(data, context.batch_size, context.device, context.names, context.static)
    # The children are in the order of the context already: no need to sort them again.
    object.__setattr__(new, "_cache", _Flat(children, context))
    return new


def make_node_maker(cls: type[T], context: Context) -> Callable[[tuple[Any, ...]], T]:
    """Return `node_like` for one context: a third of its time, for nodes that are made again and again."""
    makes_its_own = cls._make.__func__ is not TensorCollection._make.__func__
    if context.grafts or makes_its_own:
        return partial(node_like, cls, context)
    order = context.order
    in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    if order != context.keys:
        in_order = itemgetter(*map(context.keys.index, order))
    size, device, names, static = context.batch_size, context.device, context.names, context.static

    def make(children: tuple[Any, ...]) -> Any:
        # As `_make` does it, without its call.
        made: Any = Slots()
        made._data = dict(zip(order, in_order(children), strict=True))
        made._batch_size = size
        made._device = device
        made._names = names
        made._static = static
        made._cache = _Flat(children, context)
        made.__class__ = cls
        return made

    return make


def same_keys(a: TensorCollection, b: TensorCollection) -> bool:
    """Return True if two trees have the same leaf paths and ties; fast for trees of one origin."""
    if is_compiling():
        return torch_pytree.tree_structure(a) == torch_pytree.tree_structure(b)
    mine, context = flatten(a)
    theirs, other = flatten(b)
    if context is not other and context != other:
        return False
    for x, y in zip(mine, theirs, strict=True):
        nested = isinstance(x, TensorCollection)
        if nested != isinstance(y, TensorCollection) or (nested and not same_keys(x, y)):
            return False
    return True


def gather(trees: Sequence[TensorCollection]) -> list[list[Tensor]] | None:
    """Return the leaves of each tree; None unless they are untied trees of plain tensors of one structure and order."""
    columns: list[list[Any]] = [[] for _ in trees]
    if len(trees) == 1:
        if not _extend_plain(trees[0], columns[0]):
            return None
    elif not _gather(trees, columns) or not all([PLAIN.issuperset(map(type, column)) for column in columns]):
        return None
    # Trees without leaves have none to gather.
    return columns if columns[0] else None


def _extend_plain(tree: TensorCollection, leaves: list[Any]) -> bool:
    """Append the leaves of a tree; return False where it is not an untied tree of plain tensors."""
    if (tree._static is not None and tree._static.ties) or tree._is_lazy:
        return False
    values = tree._data.values()
    if PLAIN.issuperset(map(type, values)):
        leaves += values
        return True
    for node in values:
        if type(node) in PLAIN:
            leaves.append(node)
        elif not isinstance(node, TensorCollection) or not _extend_plain(node, leaves):
            return False
    return True


def _gather(nodes: Sequence[TensorCollection], columns: list[list[Any]]) -> bool:
    """Append the leaves of each node to its column; return False where the nodes are not of one structure."""
    first = nodes[0]
    cls = type(first)
    static = first._static
    keys = list(first._data)
    if cls._shape is not TensorCollection._shape or (static is not None and static.ties):
        return False
    for node in nodes[1:]:
        if type(node) is not cls or (node._static is not static and node._static != static) or list(node._data) != keys:
            return False
    if PLAIN.issuperset(map(type, first._data.values())):
        for column, node in zip(columns, nodes, strict=True):
            column += node._data.values()
        return True
    for children in zip(*[node._data.values() for node in nodes], strict=True):
        if isinstance(children[0], TensorCollection):
            if not all([isinstance(child, TensorCollection) for child in children]) or not _gather(children, columns):
                return False
        else:
            for column, child in zip(columns, children, strict=True):
                column.append(child)
    return True


def refill(tree: T, leaves: Iterator[Any], op: LeafOp | None = None) -> T:
    """Return a gathered tree around new leaves, with the batch size and names that an operation gives it."""
    data: dict[str, Any] = tree._data
    if PLAIN.issuperset(map(type, data.values())):
        data = dict(zip(data, islice(leaves, len(data)), strict=True))
    else:
        data = {
            key: refill(node, leaves, op) if isinstance(node, TensorCollection) else next(leaves)
            for key, node in data.items()
        }
    size: Size = tree._batch_size
    names: Names | None = tree._names
    if op is not None and op.size is not None:
        size = op.size(size)
        names = None if names is None or op.names is None else op.names(names)
    return tree._make(data, size, tree._device, names, tree._static)


def replace(tree: T, nodes: Mapping[Path, Any]) -> T:
    """Return the tree with other nodes at the given paths, which must exist; batch sizes and ties stay."""
    # None is a node here, so this cannot be a map (which would drop the leaf).
    flat, nested = by_head(nodes.items())
    return tree._replace(tree._data | flat | {key: replace(tree._data[key], below) for key, below in nested.items()})


Pairs: TypeAlias = list[tuple[Path, Any, Any]]
# None is a node in trees that `tree_map` built.
_ABSENT: Any = object()
_KINDS = ((TensorCollection, "a tree"), (NonTensorBase, "non-tensor data"), (object, "a leaf"))


class Difference(NamedTuple):
    """The first place where two trees differ: in the "keys" of two nodes, or in the "kind" (leaf, tree, non-tensor)."""

    path: Path
    kind: Literal["keys", "kind"]
    a: Any
    b: Any

    def error(self, call: str, *, hint: str | None = None, note: str = "") -> TreeStructureError:
        """Return the error that names the path and the two nodes."""
        if self.kind == "keys":
            where = f" under {dotted(self.path)!r}" if self.path else ""
            return TreeStructureError(
                f"{call}: the trees have different keys{where}{note}.",
                expected=f"{sorted(self.a._keys())}",
                got=f"{sorted(self.b._keys())}",
                hint=hint or "select() the common keys, or set() the missing ones.",
            )
        return TreeStructureError(
            f"{call}: {dotted(self.path)!r} is {_kind(self.a)} in one tree and {_kind(self.b)} in the other{note}.",
            expected=describe(self.a),
            got=describe(self.b),
            hint=hint or "rename_key or delete the entry in one of the trees.",
        )


def zip_trees(a: TensorCollection, b: TensorCollection, *, shared: bool = False, at: Path = ()) -> Pairs | Difference:
    """Return (path, node, node) for all leaves and non-tensor data of two trees of one structure, or how they differ.

    Classes, batch sizes, shapes and ties of nodes are not compared; `shared` leaves out keys that only one tree has.
    """
    # Two classes may store one tree in different ways: these are compared through their keys.
    same = type(a) is type(b) and not a._is_lazy
    mine = a._data if same else _nodes(a)
    theirs = b._data if same else _nodes(b)
    if mine.keys() != theirs.keys() and not shared:
        return Difference(at, "keys", a, b)
    pairs: Pairs = []
    for key, node in mine.items():
        twin = theirs.get(key, _ABSENT)
        if type(node) is type(twin) is Tensor:
            pairs.append(((*at, key), node, twin))
        elif isinstance(node, TensorCollection) and isinstance(twin, TensorCollection):
            inner = zip_trees(node, twin, shared=shared, at=(*at, key))
            if isinstance(inner, Difference):
                return inner
            pairs += inner
        elif twin is _ABSENT:
            continue
        elif any([isinstance(node, kind) != isinstance(twin, kind) for kind in (TensorCollection, NonTensorBase)]):
            return Difference((*at, key), "kind", node, twin)
        else:
            pairs.append(((*at, key), node, twin))
    return pairs


def _nodes(tree: TensorCollection) -> dict[str, Any]:
    return {key: tree._get(key) for key in tree._keys()}


def _kind(node: Any) -> str:
    return next(name for kind, name in _KINDS if isinstance(node, kind))


def describe(node: Any) -> str:
    """Return a node in a few words, for a message."""
    if isinstance(node, TensorCollection):
        return f"a {type(node).__name__} with the keys {sorted(node._keys())}"
    if isinstance(node, Tensor):
        shape = shape_of(node)
        size = "no shape" if shape is None else f"shape {list(shape)}"
        return f"a tensor of {size}, {node.dtype}"
    if isinstance(node, NonTensorBase):
        return f"non-tensor data {node!r}"[:200]
    return f"a {type(node).__name__}"
