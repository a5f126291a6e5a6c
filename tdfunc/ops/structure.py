"""Keys and structure: reading, selecting, flattening and renaming entries; batch size and names as metadata."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Size

from tdfunc._collection import TensorCollection, iter_leaves, leaf_paths, with_leaves
from tdfunc._errors import BatchSizeError, MissingKeyError, explain
from tdfunc._keys import Entry, Filter, FilterLike, dotted, is_key, missing, unravel
from tdfunc._nontensor import NonTensorBase
from tdfunc._shapes import as_names, as_size
from tdfunc._ties import group_of, merge, remap
from tdfunc._types import Kind, NestedKey, Node, Path
from tdfunc.ops import edit

T = TypeVar("T", bound=TensorCollection)
_UNSET: Any = object()


class KeysView:
    """The keys of a tree: iterable, sized, and with membership of (nested) keys."""

    __slots__ = ("_leaves_only", "_nested", "_sort", "_tree")

    def __init__(self, tree: TensorCollection, nested: bool, leaves_only: bool, sort: bool) -> None:
        self._tree, self._nested, self._leaves_only, self._sort = tree, nested, leaves_only, sort

    def __iter__(self) -> Iterator[Any]:
        keys = (path[0] if len(path) == 1 else path for path, _ in iter_items(self._tree, self._nested, self._leaves_only))
        return iter(sorted(keys, key=unravel)) if self._sort else keys

    def __len__(self) -> int:
        return sum(1 for _ in iter_items(self._tree, self._nested, self._leaves_only))

    def __contains__(self, key: object) -> bool:
        if not is_key(key):
            return False
        path = unravel(key)  # pyright: ignore[reportArgumentType]
        if len(path) > 1 and not self._nested:
            raise TypeError(explain(f"keys: {key!r} is a nested key.", hint="use `in td.keys(include_nested=True)`, or `in td`."))
        node = edit.get(self._tree, path, None)
        return node is not None and not (self._leaves_only and isinstance(node, TensorCollection))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and set(self) == set(other)  # pyright: ignore[reportUnknownArgumentType]

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"keys({list(self)})"


def iter_items(tree: TensorCollection, nested: bool, leaves_only: bool, at: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) in insertion order."""
    for key in tree._keys():
        node = tree._get(key)
        is_tree = isinstance(node, TensorCollection)
        if not (leaves_only and is_tree):
            yield (*at, key), node
        if nested and is_tree:
            yield from iter_items(node, nested, leaves_only, (*at, key))


def entries(tree: TensorCollection) -> list[Entry]:
    """Return every leaf once, with all its tied paths and its kind: what filters look at."""
    found = dict(iter_leaves(tree))
    ties, result = tree._ties, list[Entry]()
    for path in leaf_paths(tree):
        result.append(Entry(group_of(ties, path) if ties else (path,), found[path], kind_of(tree, path)))
    return result


def kind_of(tree: TensorCollection, path: Path) -> Kind | None:
    """Return the recorded kind of a leaf."""
    for key in path[:-1]:
        tree = tree._data[key]
    return tree._kinds.get(path[-1])


def keep_paths(tree: T, keep: Callable[[Path], bool], at: Path = ()) -> T:
    """Return a tree with the children whose path is kept; sub-trees that become empty go too.

    Ties that lie among the kept paths stay.
    """
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        path = (*at, key)
        if keep(path):
            data[key] = node
        elif isinstance(node, TensorCollection):
            inner = keep_paths(node, keep, path)
            if inner._data:
                data[key] = inner
    if len(data) == len(tree._data) and all(data[k] is v for k, v in tree._data.items()):
        return tree
    return pruned_like(tree, data)


def pruned_like(tree: T, data: dict[str, Node]) -> T:
    """Return a tree of a part of the data, with the kinds and ties that still apply."""
    if tree._static is None:
        return tree._replace(data)
    kinds = {key: kind for key, kind in tree._kinds.items() if key in data}
    return tree._replace(data, kinds=kinds, ties=remap(tree._ties, lambda path: path if _leads(data, path) else None))


def _leads(data: dict[str, Node], path: Path) -> bool:
    node: Any = data.get(path[0])
    for key in path[1:]:
        node = node._data.get(key) if isinstance(node, TensorCollection) else None
    return node is not None


def select(tree: T, keys: Sequence[NestedKey], strict: bool) -> T:
    """Keep the given entries."""
    paths = edit.select_paths(keys)
    if strict:
        for path in paths:
            edit.get(tree, path)
    wanted = set(paths)
    return _reorder(keep_paths(tree, lambda path: path in wanted), tree)


def _reorder(part: T, _: TensorCollection) -> T:
    return part


def exclude(tree: T, keys: Sequence[NestedKey]) -> T:
    """Drop the given entries; keys that do not exist are no error, as in the incumbent."""
    for path in edit.select_paths(keys):
        if edit.get(tree, path, None) is not None:
            tree = edit.delete_path(tree, path)
    return tree


def flatten_keys(tree: T, separator: str) -> Any:
    """Join nested keys; tie paths and kinds follow their leaves."""
    data: dict[str, Node] = {}
    kinds: dict[str, Kind] = {}
    source: dict[str, Path] = {}
    for path, node in iter_items(tree, True, True):
        key = separator.join(path)
        if key in data:
            raise MissingKeyError(explain(f"flatten_keys: two paths become the key {key!r}.", got=f"{source[key]} and {path}", hint="choose another separator."))
        data[key], source[key] = node, path
        kind = kind_of(tree, path)
        if kind is not None:
            kinds[key] = kind
    ties = remap(tree._ties, lambda path: (separator.join(path),))
    new = TensorCollection._open._make(data, tree._batch_size, tree._device, tree._names)
    return new._replace(data, kinds=kinds, ties=ties) if kinds or ties else new


def unflatten_keys(tree: T, separator: str) -> Any:
    """Split keys at the separator into nested trees."""
    new = TensorCollection._open._make({}, tree._batch_size, tree._device, tree._names)
    taken: dict[Path, str] = {}
    for key in tree._keys():
        path = tuple(key.split(separator))
        if not all(path):
            path = (key,)
        for i in range(1, len(path) + 1):
            clash = taken.get(path[:i])
            if clash is not None or (i == len(path) and edit.get(new, path, None) is not None):
                raise MissingKeyError(explain(f"unflatten_keys: {key!r} cannot stand beside {clash or path!r}.", hint="rename one of them first."))
        node = tree._get(key)
        new = edit._set_one(new, path, node, tree._kinds.get(key))
        if not isinstance(node, TensorCollection):
            taken[path] = key
    if tree._ties:
        ties = remap(tree._ties, lambda path: (*(path[0].split(separator)), *path[1:]))
        new = restore_ties(new, ties)
    return new


def restore_ties(tree: T, ties: Any) -> T:
    """Return a complete tree with the given groups recorded at every node that they concern."""
    if not ties:
        return tree
    data = {
        key: restore_ties(node, remap(ties, lambda path, key=key: path[1:] if path[0] == key and len(path) > 1 else None))
        if isinstance(node, TensorCollection)
        else node
        for key, node in tree._data.items()
    }
    return tree._replace(data, ties=merge(tree._ties, ties))


def rename_key(tree: T, old: NestedKey, new: NestedKey, safe: bool) -> T:
    """Move an entry to another path, keeping its place among its siblings when the parent stays the same."""
    source, target = unravel(old), unravel(new)
    node = edit.get(tree, source)
    if safe and edit.get(tree, target, None) is not None:
        raise MissingKeyError(explain(f"rename_key: {dotted(target)!r} exists.", hint="delete it first, or pass safe=False."))
    kind = kind_of(tree, source)
    ties = remap(tree._ties, lambda path: target + path[len(source) :] if path[: len(source)] == source else path)
    if source[:-1] == target[:-1]:
        moved = _rename_here(tree, source, target[-1])
    else:
        moved = edit.set_path(edit.delete_path(tree, source), target, node)
        if kind is not None:
            moved = edit._set_one(moved, target, node, kind)
    return restore_ties(moved, ties) if ties else moved


def _rename_here(tree: T, path: Path, new: str) -> T:
    if len(path) > 1:
        child = _rename_here(tree._get(path[0]), path[1:], new)
        return tree._replace(tree._data | {path[0]: child}, ties=())
    data = {(new if key == path[0] else key): node for key, node in tree._data.items() if key != new or key == path[0]}
    kinds = {(new if key == path[0] else key): kind for key, kind in tree._kinds.items() if key != new}
    return tree._replace(data, kinds=kinds, ties=())


def with_batch_size(tree: T, batch_size: Any) -> T:
    """Return the tree seen with another batch size, which all leaves must have; nested trees grow with it."""
    size = as_size(batch_size)
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        if isinstance(node, TensorCollection):
            # A nested tree must be indexable by the batch: it keeps its own size if that starts with the new one.
            data[key] = node if node._batch_size[: len(size)] == size else with_batch_size(node, size)
        else:
            data[key] = _fit(node, size, key)
    names = tree._names[: len(size)] if tree._names is not None else None
    names = (*names, *[None] * (len(size) - len(names))) if names is not None else None
    return tree._replace(data, batch_size=size, names=as_names(names, len(size)))


def _fit(node: Node, size: Size, key: str) -> Node:
    if isinstance(node, NonTensorBase):
        return node.rebatch(size)  # pyright: ignore
    if node.shape[: len(size)] != size:
        raise BatchSizeError(
            explain(f"with_batch_size: leaf {key!r} does not start with it.", expected=f"shape {list(size)} + (...)", got=f"shape {list(node.shape)}")
        )
    return node


def to_dict(tree: TensorCollection, retain_none: bool = True) -> dict[str, Any]:
    """Return nested dicts of the leaves and plain values."""
    result: dict[str, Any] = {}
    for key in tree._keys():
        node = tree._get(key)
        result[key] = to_dict(node, retain_none) if isinstance(node, TensorCollection) else edit.get_value(tree, key)
    return result


def state_dict(tree: TensorCollection, prefix: str = "", keep_vars: bool = False, flatten: bool = True) -> dict[str, Any]:
    """Return what `nn.Module.state_dict` returns for the module that the tree came from."""
    result: dict[str, Any] = {}
    for path, node in iter_items(tree, True, True):
        kind = kind_of(tree, path)
        if kind is Kind.NON_PERSISTENT or (isinstance(node, NonTensorBase) and kind is not Kind.EXTRA_STATE):
            continue
        value = edit.get_value(tree, path) if isinstance(node, NonTensorBase) else node
        if isinstance(value, torch.Tensor) and not keep_vars:
            value = value.detach()
        if flatten:
            result[prefix + dotted(path)] = value
        else:
            inner = result
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = value
    return result


def partition(tree: T, where: FilterLike) -> tuple[T, T]:
    """Split a tree into the leaves that a filter chooses and the rest.

    Each side lacks the keys of the other; a tied leaf goes whole to the side that any of its paths matches, and
    non-tensor data go to the rest. `combine` puts the sides together again.

    Args:
        tree: Any tree.
        where: A glob on the dotted path, or a `Filter`.

    Returns:
        The chosen part and the rest.

    Raises:
        FilterError: A pattern matches no leaf.

    Examples:
        >>> from tdfunc import TensorDict, partition
        >>> head, rest = partition(TensorDict({"head": torch.zeros(1), "body": torch.zeros(2)}), "head*")
        >>> list(head.keys()), list(rest.keys())
        (['head'], ['body'])
    """
    found = entries(tree)
    chosen = {path for entry, yes in zip(found, Filter(where).mask(found), strict=True) if yes for path in entry.paths}
    rest = {path for entry in found for path in entry.paths} - chosen
    return keep_leaves(tree, chosen), keep_leaves(tree, rest, nontensors=True)


def keep_leaves(tree: T, paths: set[Path], nontensors: bool = False, at: Path = ()) -> T:
    """Return a tree with exactly these leaves; sub-trees without any of them go."""
    data: dict[str, Node] = {}
    for key, node in tree._data.items():
        path = (*at, key)
        if isinstance(node, TensorCollection):
            inner = keep_leaves(node, paths, nontensors, path)
            if inner._data:
                data[key] = inner
        elif path in paths or (nontensors and isinstance(node, NonTensorBase)):
            data[key] = node
    return pruned_like(tree, data)


def combine(*trees: T) -> T:
    """Put disjoint parts of a tree together; keys come in the order of the first tree, then the next.

    Args:
        *trees: Parts with no leaf in common, as `partition` and `split` return them.

    Raises:
        ValueError: Two parts have the same leaf; the message names it.

    Examples:
        >>> from tdfunc import TensorDict, combine
        >>> list(combine(TensorDict({"a": torch.zeros(1)}), TensorDict({"b": torch.zeros(2)})).keys())
        ['a', 'b']
    """
    if not trees:
        raise ValueError(explain("combine: no trees were given."))
    result = trees[0]
    for other in trees[1:]:
        both = {p for p, _ in iter_items(result, True, True)} & {p for p, _ in iter_items(other, True, True)}
        if both:
            raise ValueError(explain(f"combine: both parts have the leaf {dotted(sorted(both)[0])!r}.", hint="use a.update(b) to write one over the other."))
        result = edit.update(result, other)
    return result


def in_dims(tree: T, where: "dict[str | Filter, int | None] | int | None") -> T:
    """Return the tree of ints and None that `torch.vmap` takes as in_dims.

    Args:
        tree: The tree that will be mapped.
        where: A dimension for each filter, the first that matches a leaf wins; or one for all.

    Raises:
        FilterError: A pattern matches no leaf, or a leaf is matched by none.

    Examples:
        >>> from tdfunc import TensorDict, in_dims
        >>> dims = in_dims(TensorDict({"trunk": torch.zeros(1), "head": torch.zeros(2)}), {"trunk*": None, "*": 0})
        >>> dims["head"], dims["trunk"]
        (0, None)
    """
    found = entries(tree)
    dims = assign(found, where if isinstance(where, dict) else {"*": where}, "in_dims")
    by_path = {path: dim for entry, dim in zip(found, dims, strict=True) for path in entry.paths}
    return _fill(tree, by_path)


def _fill(tree: T, values: dict[Path, Any], at: Path = ()) -> T:
    # None is a value here, so this cannot be a map (which would drop the leaf).
    data = {
        key: _fill(node, values, (*at, key)) if isinstance(node, TensorCollection) else values.get((*at, key), node)
        for key, node in tree._data.items()
    }
    return tree._replace(data)


def assign(found: Sequence[Entry], where: "dict[Any, Any]", call: str) -> list[Any]:
    """Return for each leaf the value of the first filter that matches it."""
    masks = [(Filter(spec).mask(found), value) for spec, value in where.items()] if found else []
    result: list[Any] = []
    for i, entry in enumerate(found):
        values = [value for mask, value in masks if mask[i]]
        if not values:
            raise edit_filter_error(call, entry, where)
        result.append(values[0])
    return result


def edit_filter_error(call: str, entry: Entry, where: "dict[Any, Any]") -> Exception:
    """Build the error for a leaf that no filter of a dict matches."""
    from tdfunc._errors import FilterError

    return FilterError(explain(f"{call}: no filter matches the leaf {dotted(entry.paths[0])!r}.", got=str(list(where)), hint='end the dict with "*": value.'))


class StructureMethods(TensorCollection):
    """Reading and rearranging keys."""

    __slots__ = ()

    def keys(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> KeysView:
        """Return the keys, in insertion order; nested ones as tuples."""
        return KeysView(self, include_nested, leaves_only, sort)

    def values(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> list[Any]:
        """Return the values, as `td[key]` gives them."""
        return [value for _, value in self.items(include_nested, leaves_only, sort=sort)]

    def items(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> list[tuple[Any, Any]]:
        """Return (key, value) pairs."""
        pairs = [(path, getattr(node, "value", node) if isinstance(node, NonTensorBase) else node) for path, node in iter_items(self, include_nested, leaves_only)]
        pairs = sorted(pairs, key=lambda pair: pair[0]) if sort else pairs
        return [(path[0] if len(path) == 1 else path, value) for path, value in pairs]

    def leaves(self) -> list[Any]:
        """Return the tensors in registration order, a tied one once; non-tensor data are left out.

        `torch.utils._pytree.tree_leaves` gives the same tensors in sorted key order: do not zip the two.
        """
        found = dict(iter_leaves(self))
        return [found[path] for path in leaf_paths(self)]

    def paths(self) -> list[Path]:
        """Return the path of each of `leaves()`; a tied leaf has its first path."""
        return leaf_paths(self)

    def ties(self) -> list[list[str]]:
        """Return the groups of dotted paths that hold one tensor."""
        return [[dotted(path) for path in group] for group in self._ties]

    def kind(self, key: NestedKey) -> Kind | None:
        """Return what a leaf is in the module it came from, or None."""
        path = unravel(key)
        edit.get(self, path)
        return kind_of(self, path)

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return a value, or the default when there is no such key."""
        return edit.get_value(self, key, default)

    def is_empty(self) -> bool:
        """Whether there are no leaves (tensors or non-tensor data), however deep."""
        return not any(True for _ in iter_items(self, True, True))

    def select(self, *keys: NestedKey, strict: bool = True, inplace: bool = False) -> Any:
        """Return a tree with only these entries, sharing the tensors.

        Raises:
            MissingKeyError: A key does not exist, and `strict`.
        """
        edit.refuse_inplace(inplace, "select(*keys)")
        return select(self, keys, strict)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Any:
        """Return a tree without these entries."""
        edit.refuse_inplace(inplace, "exclude(*keys)")
        return exclude(self, keys)

    def flatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Return a tree of one level whose keys are the joined paths.

        Raises:
            MissingKeyError: Two paths become one key.
        """
        edit.refuse_inplace(inplace, "flatten_keys(separator)")
        return flatten_keys(self, separator)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Return a nested tree made by splitting each key.

        Raises:
            MissingKeyError: One key would be both a leaf and a tree.
        """
        edit.refuse_inplace(inplace, "unflatten_keys(separator)")
        return unflatten_keys(self, separator)

    def rename_key(self, old: NestedKey, new: NestedKey, safe: bool = False) -> Any:
        """Return a tree with an entry moved; it keeps its place when it stays under the same parent.

        Raises:
            MissingKeyError: `old` does not exist, or `new` does and `safe`.
        """
        return rename_key(self, old, new, safe)

    def with_batch_size(self, batch_size: Any) -> Any:
        """Return the tree with another batch size.

        Raises:
            BatchSizeError: A leaf does not start with it; the message names the leaf.
        """
        return with_batch_size(self, batch_size)

    def with_names(self, names: Sequence[str | None] | None) -> Any:
        """Return the tree with names for its batch dimensions."""
        return self._make(self._data, self._batch_size, self._device, as_names(names, len(self._batch_size)), self._static)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of the tensors and plain values."""
        return to_dict(self)

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False, flatten: bool = True) -> dict[str, Any]:
        """Return what `module.state_dict()` would: every path of a tied leaf, no non-persistent buffers."""
        result = state_dict(self, prefix, keep_vars, flatten)
        if destination is None:
            return result
        destination.update(result)
        return destination

    def partition(self, where: FilterLike) -> tuple[Any, Any]:
        """Return the leaves that a filter chooses, and the rest."""
        return partition(self, where)

    def __contains__(self, key: object) -> bool:
        return is_key(key) and edit.get(self, key, None) is not None  # pyright: ignore[reportArgumentType]


__all__ = ["missing", "with_leaves"]
