"""Structure: selecting, flattening and renaming entries, splitting by filters; batch size and names as metadata."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from tdfunc.core.collection import PLAIN, TensorCollection, no_one_shape, per_tree
from tdfunc.core.errors import MissingKeyError, error
from tdfunc.core.keys import Filter, FilterLike, assign, dotted, unravel
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import as_names, as_size
from tdfunc.core.ties import by_first_key, remap
from tdfunc.core.types import Group, Kind, NestedKey, Node, Path, Ties
from tdfunc.core.walk import Difference, replace, zip_trees
from tdfunc.ops.base.convert import resize
from tdfunc.ops.base.reading import check_same_keys, entries, get, get_value, has, iter_items, kind_of, refuse_inplace
from tdfunc.ops.edits.edit import delete_paths, restore_ties, set_, update

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
_STR = frozenset((str,))


# -- keys -------------------------------------------------------------------------------------------------------


def select(tree: T, keys: Sequence[NestedKey], strict: bool) -> T:
    """Keep the given entries."""
    if _is_flat(tree, keys):
        wanted = set(keys)
        data = tree._data
        # In the order of the tree, and no further than the last one wanted.
        kept = {key: data[key] for key in islice(filter(wanted.__contains__, data), len(wanted))}
        if len(kept) == len(wanted):
            if len(kept) == len(data):
                return tree
            return tree._replace(kept)
    paths = [unravel(key) for key in keys]
    if strict:
        for path in paths:
            get(tree, path)
    return _keep(tree, paths)


def _is_flat(tree: TensorCollection, keys: Sequence[NestedKey]) -> bool:
    """Return True if the keys name entries of this very node, and it has no kinds and ties."""
    # A lazy stack has static data.
    return tree._static is None and _STR.issuperset(map(type, keys)) and "" not in keys


def exclude(tree: T, keys: Sequence[NestedKey]) -> T:
    """Leave out the given entries."""
    if _is_flat(tree, keys):
        gone = set(keys)
        data = {key: node for key, node in tree._data.items() if key not in gone}
        if len(data) == len(tree._data):
            return tree
        return tree._replace(data)
    return delete_paths(tree, [unravel(key) for key in keys])


@per_tree()
def _keep(tree: T, paths: Sequence[Path]) -> T:
    wanted = by_first_key(paths)
    data = tree._data
    kept: dict[str, Node] = {}
    for key, node in data.items():
        paths = wanted.get(key, [])
        if () in paths:
            kept[key] = node
        # The paths below this tree may not exist.
        elif isinstance(node, TensorCollection) and any([has(node, path) for path in paths]):
            kept[key] = _keep(node, paths)
    if tree._static is None and len(kept) < len(data) and all([node is not None for node in kept.values()]):
        return tree._replace(kept)
    changes = {key: kept.get(key) for key, node in data.items() if kept.get(key) is not node}
    if changes:
        return tree._put(changes)
    return tree


@per_tree()
def flatten_keys(tree: TensorCollection, separator: str) -> Any:
    """Join nested keys; tie paths and kinds follow their leaves. A nested lazy stack is flattened inside."""
    data: dict[str, Node] = {}
    kinds: dict[str, Kind] = {}
    clash = _flatten_into(data, kinds, tree, separator, "")
    if clash is not None:
        paths = [path for path, _ in iter_items(tree, True, True) if separator.join(unravel(path)) == clash]
        raise MissingKeyError(
            f"flatten_keys: two paths become the key {clash!r}.",
            got=" and ".join([str(unravel(path)) for path in paths]),
            hint="choose another separator.",
        )
    ties = remap(tree._ties, lambda path: (separator.join(path),))
    new = TensorCollection._open._make(data, tree._batch_size, tree._device, tree._names)
    if kinds or ties:
        return new._replace(data, kinds=kinds, ties=ties)
    return new


def _flatten_into(
    data: dict[str, Node], kinds: dict[str, Kind], tree: TensorCollection, separator: str, prefix: str
) -> str | None:
    """Add the entries of a tree; return the first name that is there already."""
    for key in tree._keys():
        node = tree._get(key)
        name = prefix + key
        if isinstance(node, TensorCollection):
            if not node._is_lazy:
                clash = _flatten_into(data, kinds, node, separator, name + separator)
                if clash is not None:
                    return clash
                continue
            node = flatten_keys(node, separator)
        if name in data:
            return name
        data[name] = node
    kinds.update({prefix + key: kind for key, kind in tree._kinds.items()})
    return None


@per_tree()
def unflatten_keys(tree: TensorCollection, separator: str) -> Any:
    """Split keys at the separator into nested trees."""
    parts = {key: tuple(key.split(separator)) for key in tree._keys()}
    paths = {key: path if all(path) else (key,) for key, path in parts.items()}
    placed = [_Placed(path, tree._get(key), tree._kinds.get(key)) for key, path in paths.items()]
    new = _nest(placed, tree, ())
    ties = remap(tree._ties, lambda path: (*paths[path[0]], *path[1:]))
    return restore_ties(new._replace(new._data, names=tree._names, batch_size=tree._batch_size), ties)


class _Placed(NamedTuple):
    """A node with its kind, and the path at which it is put."""

    path: Path
    node: Node
    kind: Kind | None


def _nest(entries: Iterable[_Placed], like: TensorCollection, at: Path) -> Any:
    """Return a tree of nodes, with their kinds, at paths that all differ."""
    groups: dict[str, list[_Placed]] = {}
    for path, node, kind in entries:
        groups.setdefault(path[0], []).append(_Placed(path[1:], node, kind))
    data: dict[str, Node] = {}
    kinds: dict[str, Kind] = {}
    for key, group in groups.items():
        whole = [entry for entry in group if not entry.path]
        below = [entry for entry in group if entry.path]
        if not below:
            (entry,) = whole
            data[key] = entry.node
            if entry.kind is not None:
                kinds[key] = entry.kind
            continue
        new = _nest(below, like, (*at, key))
        for _, node, _ in whole:
            # Neither a leaf over entries of a tree, nor a tree over a leaf of another.
            if not isinstance(node, TensorCollection) or zip_trees(node, new, shared=True):
                raise MissingKeyError(
                    f"unflatten_keys: two keys become the entry {dotted((*at, key))!r}, or one entry below it.",
                    got=sorted(like._keys()),
                    hint="rename one of them first.",
                )
            new = update(node, new)
        data[key] = new
    made = TensorCollection._open._make(data, like._batch_size, like._device)
    if kinds:
        return made._replace(data, kinds=kinds)
    return made


# A function of the module: dynamo (torch 2.13) does not trace the annotations of one inside.
def _moved_path(source: Path, target: Path, path: Path) -> Path | None:
    """Return a path after a rename; None for a path below the target, whose leaf is overwritten."""
    n = len(source)
    if path[:n] == source:
        return target + path[n:]
    if path[: len(target)] == target:
        return None
    return path


@per_tree()
def rename_key(tree: T, old: NestedKey, new: NestedKey, safe: bool) -> T:
    """Move an entry to another path, keeping its place among its siblings when the parent stays the same."""
    source = unravel(old)
    target = unravel(new)
    get(tree, source)
    if source == target:
        return tree
    if safe and has(tree, target):
        raise MissingKeyError(
            f"rename_key: {dotted(target)!r} exists.",
            got=f"{dotted(source)!r}",
            hint="delete it first, or pass safe=False.",
        )
    ties = remap(tree._ties, partial(_moved_path, source, target))
    bare = _drop_ties(tree)
    if source[:-1] == target[:-1]:
        moved = _rename_here(bare, source, target[-1])
    else:
        node = get(bare, source)
        kind = kind_of(tree, source)
        above: Any = get(bare, source[:-1]) if source[1:] else bare
        if above._is_lazy and source[0] != target[0] and not isinstance(node, TensorCollection):
            # The key of a lazy stack: its trees have a tensor or value each.
            raise no_one_shape(f"rename_key of {dotted(source)!r}", above)
        moved = set_(delete_paths(bare, [source]), target, node, kind)
    return restore_ties(moved, ties)


def _drop_ties(tree: T) -> T:
    """Return the tree with no group recorded at any node."""
    if not tree._ties:
        return tree
    data = {key: _drop_ties(node) if isinstance(node, TensorCollection) else node for key, node in tree._data.items()}
    return tree._replace(data, ties=())


@per_tree()
def _rename_here(tree: T, path: Path, new: str) -> T:
    old = path[0]
    if len(path) > 1:
        return tree._put({old: _rename_here(tree._get(old), path[1:], new)})
    data = {(new if key == old else key): node for key, node in tree._data.items() if key != new}
    kinds = {(new if key == old else key): kind for key, kind in tree._kinds.items() if key != new}
    return tree._replace(data, kinds=kinds)


# -- dicts ------------------------------------------------------------------------------------------------------


def to_dict(tree: TensorCollection, call: str = "to_dict") -> dict[str, Any]:
    """Return nested dicts of the leaves and plain values."""
    check_same_keys(tree, call)
    return _to_dict(tree)


def _to_dict(tree: TensorCollection) -> dict[str, Any]:
    if PLAIN.issuperset(map(type, tree._data.values())):
        return tree._data.copy()
    result: dict[str, Any] = {key: tree._get(key) for key in tree._keys()}
    for key, node in result.items():
        if isinstance(node, TensorCollection):
            result[key] = _to_dict(node)
        elif not isinstance(node, torch.Tensor):
            result[key] = get_value(tree, key)
    return result


def saved_nodes(tree: TensorCollection) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) for the nodes that are in the tree's `state_dict`."""
    for path, node in iter_items(tree, True, True):
        kind = kind_of(tree, path)
        if kind is Kind.EXTRA_STATE if isinstance(node, NonTensorBase) else kind is not Kind.NON_PERSISTENT:
            yield path, node


def state_dict(tree: TensorCollection, prefix: str, keep_vars: bool, flatten: bool) -> dict[str, Any]:
    """Return the `state_dict` of the module that the tree came from."""
    check_same_keys(tree, "state_dict")
    result: dict[str, Any] = {}
    for path, node in saved_nodes(tree):
        value = get_value(tree, path) if isinstance(node, NonTensorBase) else node
        if isinstance(value, torch.Tensor) and not keep_vars:
            value = value.detach()
        if flatten:
            key = prefix + dotted(path)
            if key in result:
                raise MissingKeyError(
                    f"state_dict: two paths become the key {key!r}.",
                    expected="one",
                    got=str(path),
                    hint="rename_key one of them, or pass flatten=False.",
                )
            result[key] = value
        else:
            inner = result
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = value
    return result


# -- filters ----------------------------------------------------------------------------------------------------


def partition(tree: T, where: FilterLike) -> tuple[T, T]:
    """Split a tree into the leaves that a filter chooses and the rest.

    Each side lacks the keys of the other; a tied leaf goes whole to the side that any of its paths matches, and
    non-tensor data and empty sub-trees go to the rest. `combine` puts the sides together again.

    Args:
        tree: Any tree.
        where: A glob on the dotted path, or a `Filter`.

    Returns:
        The chosen part and the rest.

    Raises:
        FilterError: A pattern matches no leaf.

    Examples:
        >>> head, rest = tdf.partition(TensorDict({"head": torch.zeros(1), "body": torch.zeros(2)}), "head*")
        >>> list(head.keys()), list(rest.keys())
        (['head'], ['body'])
    """
    found = entries(tree)
    chosen: set[Path] = set()
    rest: set[Path] = set()
    for entry, is_chosen in zip(found, Filter(where).mask(found), strict=True):
        if is_chosen:
            chosen.update(entry.paths)
        else:
            rest.update(entry.paths)
    return keep_leaves(tree, chosen), keep_leaves(tree, rest, nontensors=True)


def keep_leaves(tree: T, paths: set[Path], nontensors: bool = False, at: Path = ()) -> T:
    """Return a tree with exactly these leaves, and with `nontensors` all other nodes; trees left empty go."""
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        path = (*at, key)
        if isinstance(node, TensorCollection):
            inner = keep_leaves(node, paths, nontensors, path)
            if inner._data or (nontensors and not node._data):
                data[key] = inner
        elif path in paths or (nontensors and isinstance(node, NonTensorBase)):
            data[key] = node
    if tree._static is None:
        return tree._replace(data)
    kinds = {key: kind for key, kind in tree._kinds.items() if key in data}
    ties = remap(tree._ties, lambda path: path if (*at, *path) in paths else None)
    return tree._replace(data, kinds=kinds, ties=ties)


def part_leaves(tree: T, parts: Sequence[set[Path]]) -> list[T]:
    """Return a tree with exactly the leaves of each part, as `keep_leaves`; no leaf is in two parts.

    One walk makes all of them: a walk for each takes time that grows with parts times leaves.
    """
    number: dict[Path, int] = {}
    for i, paths in enumerate(parts):
        number |= dict.fromkeys(paths, i)
    found = _part_node(tree, number, ())
    return [found[i] if i in found else keep_leaves(tree, set()) for i in range(len(parts))]


def _part_node(tree: T, number: dict[Path, int], at: Path) -> dict[int, T]:
    """Return the tree of each part that has a leaf in a node at a place, by the number of the part."""
    parts: dict[int, dict[str, Node]] = {}
    for key, node in tree._data.items():
        path = (*at, key)
        if isinstance(node, TensorCollection):
            for i, inner in _part_node(node, number, path).items():
                parts.setdefault(i, {})[key] = inner
        elif path in number:
            parts.setdefault(number[path], {})[key] = node
    if tree._static is None:
        return {i: tree._replace(data) for i, data in parts.items()}
    kinds = tree._kinds
    ties = _part_ties(tree._ties, number, at)
    made: dict[int, T] = {}
    for i, data in parts.items():
        own = {key: kinds[key] for key in data if key in kinds}
        made[i] = tree._replace(data, kinds=own, ties=tuple(ties.get(i, ())))
    return made


def _part_ties(ties: Ties, number: dict[Path, int], at: Path) -> dict[int, list[Group]]:
    """Return the groups of tied leaves in each part that has such a group, by the number of the part."""
    found: dict[int, list[Group]] = {}
    for group in ties:
        names: dict[int, list[Path]] = {}
        for path in group:
            i = number.get((*at, *path))
            if i is not None:
                names.setdefault(i, []).append(path)
        for i, paths in names.items():
            if len(paths) > 1:
                found.setdefault(i, []).append(tuple(paths))
    return found


def combine(*trees: T) -> T:
    """Put disjoint parts of a tree together; keys come in the order of the first tree, then the next.

    Args:
        *trees: Parts with no leaf in common, as `partition` and `split` return them.

    Raises:
        ValueError: Two trees have the same leaf; the message names it.
        TreeStructureError: A leaf of one is a tree in another.

    Examples:
        >>> list(tdf.combine(TensorDict({"a": torch.zeros(1)}), TensorDict({"b": torch.zeros(2)})).keys())
        ['a', 'b']
    """
    if not all([isinstance(tree, TensorCollection) for tree in trees]):
        raise error(TypeError, "combine: an argument is not a tree.", got=trees, hint="combine(*parts) for a list.")
    result, *others = trees
    for other in others:
        found = zip_trees(result, other, shared=True)
        if isinstance(found, Difference):
            raise found.error("combine")
        if found:
            raise error(
                ValueError,
                f"combine: two parts have the leaf {dotted(found[0][0])!r}.",
                hint="use a.update(b) to write one over the other.",
            )
        result = update(result, other)
    return result


def in_dims(tree: T, where: "dict[str | Filter, int | None] | int | None") -> T:
    """Return the tree of ints and None that `torch.vmap` takes as in_dims.

    Args:
        tree: The tree that will be mapped.
        where: A dict from filters to dimensions, in which the first filter that matches a leaf counts; or one
            dimension for all leaves.

    Raises:
        FilterError: A pattern matches no leaf, or no filter matches a leaf.

    Examples:
        >>> tree = TensorDict({"trunk": torch.zeros(1), "head": torch.zeros(2)})
        >>> dims = tdf.in_dims(tree, {"trunk*": None, "*": 0})
        >>> dims["head"], dims["trunk"]
        (0, None)
    """
    found = entries(tree)
    dims = assign(found, where if isinstance(where, dict) else {"*": where}, "in_dims")
    return replace(tree, {path: dim for entry, dim in zip(found, dims, strict=True) for path in entry.paths})


class StructureMethods(TensorCollection):
    """Rearranging keys, and metadata."""

    __slots__ = ()

    def select(self, *keys: NestedKey, strict: bool = True, inplace: bool = False) -> "Self":
        """Return a tree with only these entries, in the order they have here, sharing the tensors.

        Raises:
            MissingKeyError: A key does not exist, and `strict`.
        """
        refuse_inplace(inplace, "select(*keys)")
        return select(self, keys, strict)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> "Self":
        """Return a tree without these entries; keys that do not exist are ignored."""
        refuse_inplace(inplace, "exclude(*keys)")
        return exclude(self, keys)

    def flatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Return a tree of one level whose keys are the joined paths; empty sub-trees are left out.

        Raises:
            MissingKeyError: Two paths become one key.

        Examples:
            >>> flat = TensorDict({"a": {"b": torch.zeros(2)}}).flatten_keys()
            >>> list(flat.keys()), list(flat.unflatten_keys().keys(True, True))
            (['a.b'], [('a', 'b')])
        """
        refuse_inplace(inplace, "flatten_keys(separator)")
        return flatten_keys(self, separator)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Return a nested tree made by splitting each key; a key with an empty part stays whole.

        Raises:
            MissingKeyError: One key would be both a leaf and a tree.
            ValueError: The separator is empty.
        """
        refuse_inplace(inplace, "unflatten_keys(separator)")
        return unflatten_keys(self, separator)

    def rename_key(self, old: NestedKey, new: NestedKey, safe: bool = False) -> "Self":
        """Return a tree with an entry moved; it keeps its place when it stays under the same parent.

        Raises:
            MissingKeyError: `old` does not exist, or `new` does and `safe`.
        """
        return rename_key(self, old, new, safe)

    def with_batch_size(self, batch_size: Any) -> "Self":
        """Return the tree with another batch size; nested trees keep a longer one and grow with it.

        Raises:
            BatchSizeError: A leaf does not start with it; the message names the leaf.

        Examples:
            >>> TensorDict({"a": torch.zeros(3, 4)}, [3]).with_batch_size([3, 4]).batch_size
            torch.Size([3, 4])
        """
        return resize(self, as_size(batch_size))

    def with_names(self, names: Sequence[str | None] | None) -> "Self":
        """Return the tree with names for its batch dimensions; None removes them.

        Raises:
            ValueError: There is not one distinct name, or None, for each dimension.
        """
        given = as_names(names, len(self._batch_size))
        return self._make(self._data, self._batch_size, self._device, given, self._static)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of the tensors and plain values."""
        return to_dict(self)

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
    ) -> dict[str, Any]:
        """Return the dict of `module.state_dict()`: every path of a tied leaf, without non-persistent buffers.

        Args:
            destination: A dict that the entries are put in.
            prefix: The start of each key.
            keep_vars: Keep the leaves as they are; otherwise they are detached.
            flatten: Dotted keys, as a module has them; otherwise nested dicts.
        """
        result = state_dict(self, prefix, keep_vars, flatten)
        if destination is None:
            return result
        destination.update(result)
        return destination

    def partition(self, where: FilterLike) -> tuple[Any, Any]:
        """Return the leaves that a filter chooses, and the rest: the function `partition`."""
        return partition(self, where)
