"""Groups of paths that hold one tensor: restrict, lift, remap, merge; prune them from a tree and graft them back.

A tree stores the same tensor at every path of a group (its data are complete) and, at each node, the groups
inside that node, first path first. Only flattening, maps and edits read them: they prune the later paths,
run, and graft the result of the first path back.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tdfunc.core.keys import by_head
from tdfunc.core.types import Group, Path, Ties


class Graft(NamedTuple):
    """A pruned path, with the place of its key in its dict and the path that it is read from."""

    path: Path
    place: int
    source: Path


def under(ties: Ties, key: str) -> Ties:
    """Return the groups inside one child, relative to it."""
    return remap(ties, lambda path: path[1:] if path[0] == key else None)


def lift(ties: Ties, key: str) -> Ties:
    """Return a child's groups as its parent sees them."""
    groups: list[Group] = []
    for group in ties:
        groups.append(tuple([(key, *path) for path in group]))
    return tuple(groups)


def remap(ties: Ties, rename: Callable[[Path], Path | None]) -> Ties:
    """Rename every path; None removes it, and a group that is left with one path."""
    groups: list[Group] = []
    for group in ties:
        renamed = [rename(path) for path in group]
        kept = tuple([path for path in renamed if path is not None])
        if len(kept) > 1:
            groups.append(kept)
    return tuple(groups)


def merge(*parts: Ties) -> Ties:
    """Join groups that share a path; the order of first appearance is kept."""
    groups: list[list[Path]] = []
    # The number of the group in which each path is.
    number: dict[Path, int] = {}
    for ties in parts:
        for group in ties:
            touching = sorted({number[path] for path in group if path in number})
            if not touching:
                touching = [len(groups)]
                groups.append([])
            # All go to the first; the others stay as empty groups, so that numbers keep their meaning.
            joined = [path for i in touching for path in groups[i]]
            for i in touching:
                groups[i] = []
            home = touching[0]
            groups[home] = list(dict.fromkeys([*joined, *group]))
            number.update(dict.fromkeys(groups[home], home))
    return tuple(tuple(group) for group in groups if group)


def common(parts: Sequence[Ties]) -> Ties:
    """Return the groups of paths that are tied in every one of several trees."""
    first = parts[0]
    if all([ties == first for ties in parts]):
        return first
    numbers = [_number_groups(ties) for ties in parts]
    groups: dict[tuple[int | None, ...], list[Path]] = {}
    for path in numbers[0]:
        place = tuple([number.get(path) for number in numbers])
        if None not in place:
            groups.setdefault(place, []).append(path)
    return tuple([tuple(group) for group in groups.values() if len(group) > 1])


def _number_groups(ties: Ties) -> dict[Path, int]:
    """Return the number of the group of every tied path."""
    return {path: number for number, group in enumerate(ties) for path in group}


def group_of(ties: Ties, path: Path) -> Group:
    """Return all paths of the leaf at `path`, first path first."""
    for group in ties:
        if path in group:
            return group
    return (path,)


def groups_by_path(ties: Ties) -> dict[Path, Group]:
    """Return the group of every tied path."""
    return {path: group for group in ties for path in group}


def by_identity(leaves: Iterable[tuple[Path, Any]]) -> Ties:
    """Group the paths that hold the very same object."""
    # Keyed on id(), not on equal values: two layers initialised to zero are equal without being tied.
    paths: dict[int, list[Path]] = {}
    for path, leaf in leaves:
        paths.setdefault(id(leaf), []).append(path)
    return tuple(tuple(group) for group in paths.values() if len(group) > 1)


def spanning(ties: Ties) -> list[tuple[Path, Path]]:
    """Return (path to prune, first path) for groups across children of a node; others are pruned in the child."""
    return [(path, group[0]) for group in ties for path in group[1:] if path[0] != group[0][0]]


def by_first_key(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Group paths by their first key, and cut it off."""
    result: dict[str, list[Path]] = {}
    for path in paths:
        result.setdefault(path[0], []).append(path[1:])
    return result


# A tree and its nodes are `Any` below: `TensorCollection` is in a module above this one.


def prune(tree: Any, cuts: list[tuple[Path, Path]]) -> tuple[Any, tuple[Graft, ...]]:
    """Return the tree without the cut paths, and the grafts that put them back."""
    places: dict[Path, dict[str, int]] = {}
    grafts: list[Graft] = []
    for path, source in cuts:
        parent = path[:-1]
        if parent not in places:
            places[parent] = {key: place for place, key in enumerate(node_at(tree, parent)._data)}
        grafts.append(Graft(path, places[parent][path[-1]], source))
    grafts.sort(key=lambda item: (item.path[:-1], item.place))
    return _without(tree, [path for path, _ in cuts]), tuple(grafts)


# None is a value in trees that `tree_map` built.
_GONE = object()


def graft(data: dict[str, Any], grafts: tuple[Graft, ...], ties: Ties) -> dict[str, Any]:
    """Return a node's data with the pruned paths read from their first path and put in their place.

    A source that is gone (a map dropped it) leaves its aliases out.
    """
    values: dict[Path, Any] = {}
    for item in grafts:
        value: Any = data.get(item.source[0], _GONE)
        for key in item.source[1:]:
            inner = getattr(value, "_data", None)
            value = inner.get(key, _GONE) if inner is not None else _GONE
        if value is not _GONE:
            values[item.path] = (item.place, value)
    return _insert(data, values, ties)


def _insert(data: dict[str, Any], values: dict[Path, Any], ties: Ties) -> dict[str, Any]:
    items = list(data.items())
    flat, deeper = by_head(values.items())
    for key, (place, value) in flat.items():
        items.insert(place, (key, value))
    result = dict(items)
    for key, inner in deeper.items():
        # Any: a prefix (None for a whole sub-tree) has nothing to graft into.
        child: Any = result.get(key)
        if hasattr(child, "_data"):
            inner_ties = under(ties, key)
            result[key] = child._replace(_insert(child._data, inner, inner_ties), ties=inner_ties)
    return result


def node_at(tree: Any, path: Path) -> Any:
    """Return the node at a path of stored nodes, which leads through the trees of a lazy stack by their numbers."""
    for key in path:
        tree = tree._data[key]
    return tree


def _without(node: Any, paths: list[Path]) -> Any:
    cut = by_first_key(paths)
    data: dict[str, Any] = {}
    for key, value in node._data.items():
        inner = cut.get(key)
        if inner is None:
            data[key] = value
        elif () not in inner:
            data[key] = _without(value, inner)
    gone = set(paths)
    return node._replace(data, ties=remap(node._ties, lambda path: None if path in gone else path))
