"""Immutable edits: `get`, `set`, `update`, `delete`, `pop`, `untie`; an edit keeps every tie or raises."""

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from tdfunc.core.collection import TensorCollection, check_one_shape, iter_leaves, per_tree
from tdfunc.core.errors import MissingKeyError, TieError, TreeStructureError
from tdfunc.core.keys import by_head, dotted, unravel
from tdfunc.core.shapes import starts_with
from tdfunc.core.ties import by_first_key, group_of, merge, node_at, remap, under
from tdfunc.core.types import Kind, NestedKey, Node, Path, Ties
from tdfunc.core.walk import describe
from tdfunc.ops.base.cast import to
from tdfunc.ops.base.convert import accept, adopt
from tdfunc.ops.base.reading import UNSET, get, get_value, has, refuse_inplace, refuse_options
from tdfunc.ops.edits import storage_writes
from tdfunc.ops.edits.at import At

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
# Options of tensordict's method; as entries by keyword they would silently become keys.
_UPDATE_OPTIONS = ("clone", "keys_to_update", "non_blocking", "is_leaf", "ignore_lock", "update_batch_size")


@per_tree(cut=2)
def set_(tree: T, key: NestedKey, value: Any, kind: Kind | None = None) -> T:
    """Return a tree with one value replaced or added; every path of a tied leaf gets it."""
    path = unravel(key)
    new = _set_path(tree, path, value, kind)
    # A typed tree takes None, which empties a field.
    if not new._ties or not has(new, path):
        return new
    node = get(new, path)
    others = {other: node for other in group_of(tree._ties, path) if other != path}
    if others:
        new = _set_paths(new, others, kind)
    return _record_ties(new, new._ties)


def _set_path(tree: T, path: Path, value: Any, kind: Kind | None, at: Path = ()) -> T:
    if tree._is_lazy:
        return set_(tree, path, value, kind)
    key = path[0]
    rest = path[1:]
    if not rest:
        node = accept(tree, key, value, dotted((*at, key)))
        return tree._put({key: node}, {key: kind} if kind is not None else None)
    has_key = key in tree._keys()
    if has_key:
        child = tree._get(key)
    else:
        child = _empty(tree)
    if not isinstance(child, TensorCollection):
        raise _under_leaf("set", (*at, key), (*at, *path))
    new = _set_path(child, rest, value, kind, (*at, key))
    return tree._put({key: new if has_key else _as_field(tree, key, new, at)})


def _set_paths(tree: T, values: Mapping[Path, Any], kind: Kind | None = None, at: Path = ()) -> T:
    """Return a tree with values at paths of leaves, put there in one walk: one at a time copies each node as often."""
    if tree._is_lazy:
        for path, value in values.items():
            tree = set_(tree, path, value, kind)
        return tree
    flat, nested = by_head(values.items())
    changes: dict[str, Node] = {key: accept(tree, key, value, dotted((*at, key))) for key, value in flat.items()}
    for key, inner in nested.items():
        child = tree._get(key)
        assert isinstance(child, TensorCollection)
        changes[key] = _set_paths(child, inner, kind, (*at, key))
    return tree._put(changes, None if kind is None else dict.fromkeys(flat, kind))


def _empty(tree: TensorCollection) -> TensorCollection:
    return TensorCollection._open._make({}, tree._batch_size, tree._device)


def _as_field(tree: TensorCollection, key: str, new: TensorCollection, at: Path) -> Node:
    """Return the tree that the path of an edit began, as the class of its field if the field has one."""
    if tree._accept is None:
        return new
    try:
        return accept(tree, key, new, dotted((*at, key)))
    except TreeStructureError as err:
        field: NestedKey = (*at, key) if at else key
        raise TreeStructureError(
            f"{dotted((*at, key))!r} is an empty field, which this path does not fill.",
            expected="fields of its class, all without a default among them",
            got=str(list(new._keys())),
            hint=f"set the whole field: td.set({field!r}, {{...}}).",
        ) from err


def _under_leaf(call: str, leaf: Path, path: Path) -> MissingKeyError:
    return MissingKeyError(
        f"{call}: {dotted(leaf)!r} is a leaf, {dotted(path)!r} cannot be put under it.",
        hint=f"delete it first: td.delete({leaf!r}).",
    )


def _record_ties(tree: T, ties: Ties) -> T:
    """Return an edited tree with its groups recorded at every node.

    Raises:
        TieError: The edit gave two paths of one group different tensors.
    """
    for group in ties:
        first = node_at(tree, group[0])
        for path in group[1:]:
            other = node_at(tree, path)
            if other is not first:
                names = " and ".join([repr(dotted(each)) for each in group])
                raise TieError(
                    f"The edit gives the tied paths {dotted(group[0])!r} and {dotted(path)!r} different tensors.",
                    expected=f"one tensor for {names}",
                    got=f"{describe(first)} and {describe(other)}",
                    hint=f"set one path (all are written), or separate them first: td.untie({dotted(path)!r}).",
                )
    return restore_ties(tree, ties)


def restore_ties(tree: T, ties: Ties) -> T:
    """Return a complete tree with the given groups recorded at every node that they concern."""
    if not ties:
        return tree
    inside: dict[str, list[Any]] = {}
    for group in ties:
        for key in dict.fromkeys(path[0] for path in group):
            inside.setdefault(key, []).append(group)
    data = tree._data.copy()
    for key, groups in inside.items():
        node = data.get(key)
        if isinstance(node, TensorCollection):
            data[key] = restore_ties(node, under(tuple(groups), key))
    return tree._replace(data, ties=merge(tree._ties, ties))


@per_tree(cut=1)
def update(tree: T, other: Mapping[Any, Any] | TensorCollection) -> T:
    """Return a tree with the entries of `other` written over its own, nested trees merged."""
    if isinstance(other, TensorCollection) and tree._device is not None:
        # As one tree, so that a tied leaf is moved once.
        other = to(other, tree._device)
    given: list[Path] = []
    new = _merge(tree, other, (), given)
    theirs = other._ties if isinstance(other, TensorCollection) else ()
    ties = merge(new._ties, theirs)
    if ties:
        return _write_groups(new, ties, set(given))
    return new


def _write_groups(tree: T, ties: Ties, written: Set[Path]) -> T:
    """Return an edited tree in which all paths of a group have the value that was written at some of them."""
    values: dict[Path, Any] = {}
    for group in ties:
        source = next((path for path in group if path in written), None)
        if source is not None:
            others = [path for path in group if path not in written]
            values |= dict.fromkeys(others, get(tree, source))
    if values:
        tree = _set_paths(tree, values)
    return _record_ties(tree, ties)


def replace_nodes(tree: T, nodes: dict[str, Node]) -> T:
    """Return a tree with nodes under its keys, put there in one step; all paths of a tied leaf get the same node."""
    new = tree._put(nodes)
    written = {(key,) for key, node in nodes.items() if node is not None and not isinstance(node, TensorCollection)}
    return _write_groups(new, new._ties, written)


def _merge(tree: T, other: Mapping[Any, Any] | TensorCollection, at: Path, given: list[Path]) -> T:
    """Return `update` without the ties of other paths; the paths of leaves that were written go to `given`."""
    if tree._is_lazy:
        return update(tree, other)
    if isinstance(other, TensorCollection):
        check_one_shape(other, "update", f" at {dotted(at)!r}" if at else "")
    changes: dict[str, Node] = {}
    kinds: dict[str, Kind] = {}
    theirs = other._kinds if isinstance(other, TensorCollection) else {}
    flat, nested = by_head(_entries(other))
    for key, value in flat.items():
        mine = tree._get(key) if key in tree._keys() else None
        if isinstance(mine, TensorCollection) and isinstance(value, (TensorCollection, Mapping)):
            changes[key] = _merge(mine, value, (*at, key), given)
            continue
        node = accept(tree, key, value, dotted((*at, key)))
        changes[key] = node
        if isinstance(node, TensorCollection):
            given.extend((*at, key, *path) for path, _ in iter_leaves(node))
        elif node is not None:
            given.append((*at, key))
        if key in theirs:
            kinds[key] = theirs[key]
    _merge_nested(tree, changes, nested, at, given)
    return tree._put(changes, kinds or None)


def _merge_nested(
    tree: TensorCollection,
    changes: dict[str, Node],
    nested: Mapping[str, Mapping[Path, Any]],
    at: Path,
    given: list[Path],
) -> None:
    """Add entries under nested keys to the changes of a tree, in the sub-trees that they change or that it has."""
    for key, entries in nested.items():
        child: Node = None
        if key in changes:
            child = changes[key]
        elif key in tree._keys():
            child = tree._get(key)
        else:
            made = _merge(_empty(tree), entries, (*at, key), given)
            changes[key] = _as_field(tree, key, made, at)
            continue
        if not isinstance(child, TensorCollection):
            raise _under_leaf("update", (*at, key), (*at, key, *next(iter(entries))))
        changes[key] = _merge(child, entries, (*at, key), given)


def _entries(other: Mapping[Any, Any] | TensorCollection) -> Iterable[tuple[Any, Any]]:
    if isinstance(other, TensorCollection):
        return ((key, other._get(key)) for key in other._keys())
    return other.items()


def replacements(changes: Mapping[Any, Any] | TensorCollection | None, entries: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the arguments of `replace` as one dict."""
    if isinstance(changes, TensorCollection):
        check_one_shape(changes, "replace")
    if changes is None:
        return dict(entries)
    return {**dict(_entries(adopt(changes))), **entries}


def delete(tree: T, key: NestedKey) -> T:
    """Return a tree without a path; the other paths of a tied leaf keep it."""
    path = unravel(key)
    get(tree, path)
    return delete_paths(tree, [path])


@per_tree()
def delete_paths(tree: T, paths: Iterable[Path]) -> T:
    """Return a tree without the given paths; paths that do not exist are ignored."""
    changes: dict[str, Node] = {}
    for key, inner in by_first_key(paths).items():
        if key not in tree._keys():
            continue
        child = tree._get(key)
        if () in inner:
            changes[key] = None
        elif isinstance(child, TensorCollection):
            changes[key] = delete_paths(child, inner)
    if changes:
        return tree._put(changes)
    return tree


def untie_paths(tree: T, leaves: Mapping[Path, Any]) -> T:
    """Return the tree with its own leaves at paths that were tied to others."""
    changes, nested = by_head(leaves.items())
    for key, inside in nested.items():
        # Groups of tied paths lead through the stored nodes: of a stack, its trees.
        inner: Any = tree._data[key]
        changes[key] = untie_paths(inner, inside)
    return tree._replace(tree._data | changes, ties=remap(tree._ties, lambda tied: None if tied in leaves else tied))


class EditMethods(TensorCollection):
    """`set`, `update`, `delete`, `pop`, `at` and their kin."""

    __slots__ = ()

    def set(
        self, key: NestedKey, value: Any, inplace: bool = False, non_blocking: bool = False, *, kind: Kind | None = None
    ) -> "Self":
        """Return a tree with one entry replaced or added; intermediate trees are made.

        Every path of a tied leaf gets the value.

        Args:
            key: A str or nested tuple of str.
            value: A tensor, tree, dict, number, list or any other object but None.
            inplace: Write the values into the storage of the entry, and return this tree.
            non_blocking: Move tensors to the device of the tree without waiting, as `Tensor.to`.
            kind: The kind of the leaf, for trees of a module's parameters.

        Raises:
            BatchSizeError: The value does not start with the batch size; the message names the path.
            MissingKeyError: A part of the path is a leaf.
            TieError: A sub-tree would separate tied paths.

        Examples:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.set(("b", "c"), torch.ones(3, 2))["b", "c"].shape, "b" in td
            (torch.Size([3, 2]), False)
        """
        # The common call, without the walk; other classes store otherwise.
        if (
            type(key) is str
            and type(value) is Tensor
            and self._static is None
            and self._device is None
            and not inplace
            and kind is None
            and key
            and type(self) is self._open
            and starts_with(value, self._batch_size)
        ):
            data = self._data.copy()
            data[key] = value
            return self._make(data, self._batch_size, None, self._names)
        if non_blocking and self._device is not None and isinstance(value, (Tensor, TensorCollection)):
            # Any: two functions of one use.
            move: Any = to if isinstance(value, TensorCollection) else Tensor.to
            value = move(value, self._device, non_blocking=True)
        if inplace:
            storage_writes.write_leaf(self, unravel(key), value)
            return self
        return set_(self, key, value, kind)

    def update(
        self,
        other: Mapping[Any, Any] | TensorCollection | None = None,
        inplace: bool = False,
        **entries: Any,
    ) -> "Self":
        """Return a tree with the entries of a dict or tree written over its own; nested trees merge.

        Args:
            other: A dict whose keys may be nested, or a tree.
            inplace: Must be False: a tree is never changed.
            **entries: More entries, by keyword.

        Raises:
            BatchSizeError: A value does not start with the batch size; the message names the path.
            MissingKeyError: A part of a path is a leaf.
            TieError: Two paths of one tied leaf are given different tensors.
            TypeError: A keyword next to `other` is an option of tensordict's `update`.

        Examples:
            >>> td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [3])
            >>> td.update({"b": {"d": torch.ones(3)}}, e=1.0).paths()
            [('a',), ('b', 'c'), ('b', 'd'), ('e',)]
        """
        refuse_inplace(inplace, "update(other)")
        if entries and other is not None:
            refuse_options(entries, _UPDATE_OPTIONS, "update")
        tree = update(self, adopt(other)) if other is not None else self
        if entries:
            return update(tree, entries)
        return tree

    def delete(self, key: NestedKey) -> "Self":
        """Return a tree without one entry (a leaf or a sub-tree).

        Raises:
            MissingKeyError: The entry does not exist.
        """
        return delete(self, key)

    def pop(self, key: NestedKey, default: Any = UNSET) -> "tuple[Any, Self]":
        """Return the value of an entry and a tree without it.

        Raises:
            MissingKeyError: The entry does not exist, and `default` is not given.

        Examples:
            >>> value, rest = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}).pop("a")
            >>> value, list(rest.keys())
            (tensor([1., 1.]), ['b'])
        """
        if has(self, key):
            return get_value(self, key), delete(self, key)
        return get_value(self, key, default), self

    def untie(self, key: NestedKey) -> "Self":
        """Return a tree in which one path of a tied leaf has its own copy of the tensor.

        Raises:
            TieError: The path is not tied.
        """
        path = unravel(key)
        leaf = get(self, path)
        if len(group_of(self._ties, path)) == 1:
            groups = [list(map(dotted, group)) for group in self._ties]
            raise TieError(f"untie: {dotted(path)!r} is not tied.", expected=f"a path of {groups}")
        return untie_paths(self, {path: leaf.clone()})

    @property
    def at(self) -> "_AtGetter[Self]":
        """The pure spelling of assignment: `td.at[index].set(value)`, `.add`, `.mul`, `.apply(fn)`, `.get()`."""
        return _AtGetter(self)

    # -- storage writes: values into the memory that the tree has, as torch's names that end in _ -----------------

    def set_(self, key: NestedKey, value: Any) -> "Self":
        """Write values into the storage of an existing entry, in its dtype and on its device; returns this tree.

        A cast that could lose more than floating-point precision raises, unlike in `Tensor.copy_`: floats to integers,
        integers to narrower integers, numbers to bools.

        Raises:
            MissingKeyError: The entry does not exist.
            LeafMismatchError: The value's shape or dtype does not fit, or the leaf's memory overlaps itself.
        """
        storage_writes.write_leaf(self, unravel(key), value)
        return self

    def update_(self, other: Mapping[Any, Any] | TensorCollection) -> "Self":
        """Write the entries of `other` into the storage of entries that exist; returns this tree."""
        storage_writes.write_tree(self, other, complete=False)
        return self

    def copy_(self, other: Mapping[Any, Any] | TensorCollection) -> "Self":
        """Write the values of a tree with the same keys into the storage of this one; returns this tree."""
        storage_writes.write_tree(self, other, complete=True)
        return self


class _AtGetter(Generic[T]):
    __slots__ = ("_tree",)

    def __init__(self, tree: T) -> None:
        self._tree = tree

    def __getitem__(self, place: Any) -> At[T]:
        return At(self._tree, place)
