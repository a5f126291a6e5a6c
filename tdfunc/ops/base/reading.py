"""Reading a tree: nodes by path, keys, values, leaves, and the entries that filters are given."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Literal, TypeVar, cast, overload

from torch import Tensor

from tdfunc.core.collection import PLAIN, TensorCollection, check_one_shape, leaf_items, leaf_paths
from tdfunc.core.errors import ImmutableError, TreeStructureError, error
from tdfunc.core.keys import Entry, dotted, is_key, missing, unravel
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.ties import groups_by_path
from tdfunc.core.types import Kind, NestedKey, Node, Path

T = TypeVar("T", bound=TensorCollection)

UNSET: Any = object()


def get(tree: TensorCollection, key: NestedKey, default: Any = UNSET) -> Node:
    """Return the node at a path, non-tensor data still wrapped."""
    return _find(tree, unravel(key), default)[1]


def _find(tree: TensorCollection, path: Path, default: Any) -> tuple[TensorCollection, Node]:
    """Return the node at a path and the tree that it is in."""
    parent = tree
    node = cast("Any", tree)
    for i, part in enumerate(path):
        is_tree = isinstance(node, TensorCollection)
        if is_tree and part in node._keys():
            parent = node
            node = node._get(part)
        elif default is not UNSET:
            return parent, default
        else:
            raise missing(path[: i + 1], list(node._keys()) if is_tree else [], node=node)
    return parent, node


def has(tree: TensorCollection, key: NestedKey) -> bool:
    """Return True if there is a node at a path; a tree made by `tree_map` may hold None there."""
    return get(tree, key, UNSET_NODE) is not UNSET_NODE


UNSET_NODE: Any = object()


def get_value(tree: TensorCollection, key: NestedKey, default: Any = UNSET) -> Any:
    """Return the value of `td[key]`: the node, or the plain value of non-tensor data."""
    path = unravel(key)
    parent, node = _find(tree, path, default)
    if not isinstance(node, NonTensorBase) or node is default:
        return node
    return value_of(parent, path[-1], node)


def value_of(tree: TensorCollection, key: str, node: Any) -> Any:
    """Return the plain value of non-tensor data; inside vmap a stack has values for more than this tree."""
    if isinstance(node, NonTensorStack):
        node.check_batch(tree._batch_size, key)
    return node.value


def iter_items(tree: TensorCollection, nested: bool, leaves_only: bool, at: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) in insertion order."""
    for key in tree._keys():
        node = tree._get(key)
        is_tree = isinstance(node, TensorCollection)
        if not (leaves_only and is_tree):
            yield (*at, key), node
        if nested and is_tree:
            yield from iter_items(node, nested, leaves_only, (*at, key))


def check_trees(call: str, *given: Any) -> None:
    """Raise unless all arguments are trees."""
    for i, tree in enumerate(given):
        if not isinstance(tree, TensorCollection):
            hint = "TensorDict(value) makes a tree of a dict; (td == value).all() compares with one value."
            raise error(
                TypeError, f"{call}: an argument is not a tree.", got=f"{type(tree).__name__} at {i}", hint=hint
            )


def check_same_keys(tree: TensorCollection, call: str) -> None:
    """Raise where only some trees of a lazy stack have a key: a conversion of the stack would lose it.

    Raises:
        TreeStructureError: There is such a key; the message names it.
    """
    if PLAIN.issuperset(map(type, tree._data.values())):
        return
    nodes = [tree._get(key) for key in tree._keys()]
    if tree._is_lazy:
        trees: list[Any] = list(tree._data.values())
        keys = [set(each._keys()) for each in trees]
        only_some = set[str]().union(*keys) - set[str].intersection(*keys)
        if only_some:
            key = min(only_some)
            raise TreeStructureError(
                f"{call}: the key {key!r} is not in all trees of its lazy stack.",
                expected="keys that all have",
                got=f"it is in trees {[i for i, each in enumerate(keys) if key in each]}",
                hint="select() the keys that all have, set() the others, or do it to each of lazy.trees.",
            )
        nodes += trees
    for node in nodes:
        if isinstance(node, TensorCollection):
            check_same_keys(node, call)


def check_dense(tree: TensorCollection, call: str) -> None:
    """Raise for a lazy stack, also inside the tree: its leaves do not start with the batch size."""
    check_one_shape(tree, call)
    for _, node in iter_items(tree, True, False):
        if isinstance(node, TensorCollection):
            check_one_shape(node, call)


def entries(tree: TensorCollection) -> list[Entry]:
    """Return every leaf once, with all its tied paths and its kind, as filters read them."""
    groups = groups_by_path(tree._ties)
    return [Entry(groups.get(path, (path,)), leaf, kind_of(tree, path)) for path, leaf in leaf_items(tree)]


def kind_of(tree: TensorCollection, path: Path) -> Kind | None:
    """Return the recorded kind of a leaf."""
    for key in path[:-1]:
        if key in tree._data:
            tree = tree._data[key]
        else:
            tree = tree._get(key)
    return tree._kinds.get(path[-1])


def refuse_inplace(inplace: bool, call: str) -> None:
    """Raise for the incumbent's `inplace=True`."""
    if inplace:
        raise ImmutableError("inplace=True: a tree is never changed.", hint=f"write td = td.{call}.")


def refuse_options(entries: Mapping[str, Any], options: tuple[str, ...], call: str) -> None:
    """Raise for an option of the incumbent among entries by keyword, which would silently become a key."""
    for name in options:
        if name in entries:
            raise error(
                TypeError,
                f"{call}: keywords must be entries, and {name!r} is an option of tensordict.",
                got=f"{name}={entries[name]!r}"[:80],
                hint=f"leave it out; an entry of this name goes into the dict: {{..., {name!r}: value}}.",
            )


def holds_leaf(tree: TensorCollection) -> bool:
    """Return True if a tree has a leaf or non-tensor data, of a lazy stack also in some trees only."""
    return any([not isinstance(n, TensorCollection) or holds_leaf(n) for n in tree._data.values()])


class KeysView(Set[Any]):
    """The keys of a tree: iterable, sized, and with membership of (nested) keys."""

    __slots__ = ("_leaves_only", "_nested", "_sort", "_tree")

    def __init__(self, tree: TensorCollection, nested: bool, leaves_only: bool, sort: bool) -> None:
        self._tree = tree
        self._nested = nested
        self._leaves_only = leaves_only
        self._sort = sort

    # `keys() & other` is a plain set.
    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __iter__(self) -> Iterator[Any]:
        paths: Iterable[Path] = (path for path, _ in iter_items(self._tree, self._nested, self._leaves_only))
        if self._sort:
            paths = sorted(paths)
        return (path[0] if len(path) == 1 else path for path in paths)

    def __len__(self) -> int:
        return sum(1 for _ in iter_items(self._tree, self._nested, self._leaves_only))

    def __contains__(self, key: object) -> bool:
        if not is_key(key):
            return False
        path = unravel(key)  # pyright: ignore[reportArgumentType]
        if len(path) > 1 and not self._nested:
            raise error(
                TypeError,
                f"keys: {key!r} is a nested key.",
                expected="a str",
                hint="use `in td.keys(include_nested=True)`, or `in td`.",
            )
        node = get(self._tree, path, UNSET_NODE)
        return node is not UNSET_NODE and not (self._leaves_only and isinstance(node, TensorCollection))

    def __repr__(self) -> str:
        return f"keys({list(self)})"


class ReadMethods(TensorCollection):
    """Keys, values and leaves."""

    __slots__ = ()

    def keys(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> KeysView:
        """Return the keys, in insertion order or sorted; nested keys are tuples."""
        return KeysView(self, include_nested, leaves_only, sort)

    def values(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> list[Any]:
        """Return the values, as `td[key]` returns them."""
        return [value for _, value in self.items(include_nested, leaves_only, sort=sort)]

    @overload
    def items(
        self, include_nested: Literal[False] = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[tuple[str, Any]]: ...
    @overload
    def items(
        self, include_nested: bool, leaves_only: bool = False, *, sort: bool = False
    ) -> list[tuple[Any, Any]]: ...
    def items(
        self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[tuple[Any, Any]]:
        """Return (key, value) pairs, in insertion order or sorted."""
        pairs = list(iter_items(self, include_nested, leaves_only))
        if sort:
            pairs.sort(key=lambda pair: pair[0])
        return [
            (path[0] if len(path) == 1 else path, get_value(self, path) if isinstance(node, NonTensorBase) else node)
            for path, node in pairs
        ]

    def leaves(self) -> list[Tensor]:
        """Return the tensors in insertion order, each tied tensor once; non-tensor data are left out.

        `torch.utils._pytree.tree_leaves` gives the same tensors in sorted key order: do not zip the two.
        """
        return [leaf for _, leaf in leaf_items(self)]

    def paths(self) -> list[Path]:
        """Return the path of each of `leaves()`; a tied leaf has its first path.

        In a lazy stack each path begins with the index of a tree in `lazy.trees`, as in the pytree.

        Examples:
            >>> TensorDict({"a": {"b": torch.ones(2)}, "c": torch.ones(1)}).paths()
            [('a', 'b'), ('c',)]
        """
        return leaf_paths(self)

    def ties(self) -> list[list[str]]:
        """Return the groups of dotted paths that hold one tensor."""
        return [list(map(dotted, group)) for group in self._ties]

    def kind(self, key: NestedKey) -> Kind | None:
        """Return the kind of a leaf in the module it came from, or None.

        Raises:
            MissingKeyError: The entry does not exist.
        """
        path = unravel(key)
        get(self, path)
        return kind_of(self, path)

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return a value, or the default if the key does not exist."""
        return get_value(self, key, default)

    def is_empty(self) -> bool:
        """Return True if the tree has neither tensors nor non-tensor data at any depth."""
        return not holds_leaf(self)

    def __contains__(self, key: object) -> bool:
        return is_key(key) and has(self, key)  # pyright: ignore[reportArgumentType]
