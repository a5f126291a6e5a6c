"""The leaves and values of a tree as a file stores them: each tensor once, with all its paths."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import Entry, Filter, FilterLike, dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.ties import groups_by_path
from tdfunc.core.types import Kind, Path


class Stored(NamedTuple):
    """A leaf as a file stores it: once, with all its paths."""

    paths: tuple[Path, ...]
    leaf: Tensor
    kind: Kind | None
    # Whether it is non-tensor data that happens to be a tensor.
    is_value: bool

    @property
    def path(self) -> Path:
        """The first path."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The first path with dots."""
        return dotted(self.paths[0])

    @property
    def size_bytes(self) -> int:
        """What its values take."""
        return self.leaf.numel() * self.leaf.element_size()


def walk_nodes(tree: TensorCollection) -> Iterator[tuple[Path, TensorCollection, str, Any]]:
    """Yield every entry that is no tree: its path, the node it is in, its key and its value; then empty nodes."""
    stack: list[tuple[Path, TensorCollection]] = [((), tree)]
    while stack:
        at, node = stack.pop()
        inner: list[tuple[Path, TensorCollection]] = []
        for key, value in node._data.items():
            if isinstance(value, TensorCollection):
                inner.append(((*at, key), value))
            else:
                yield (*at, key), node, key, value
        stack.extend(reversed(inner))


def stored_leaves(tree: TensorCollection) -> list[Stored]:
    """Return every stored tensor once, non-tensor data that are tensors included."""
    groups = groups_by_path(tree._ties)
    aliases = {path for group in tree._ties for path in group[1:]}
    found: list[Stored] = []
    for path, node, key, value in walk_nodes(tree):
        is_value = isinstance(value, NonTensorData) and isinstance(value.data, Tensor)
        leaf = value.data if is_value else value
        if isinstance(leaf, Tensor) and path not in aliases:
            found.append(Stored(groups.get(path, (path,)), leaf, node._kinds.get(key), is_value))
    return found


def plain_values(tree: TensorCollection) -> dict[Path, NonTensorBase]:
    """Return the non-tensor data that are no tensors."""
    return {
        path: value
        for path, _, _, value in walk_nodes(tree)
        if isinstance(value, NonTensorBase)
        and not (isinstance(value, NonTensorData) and isinstance(value.data, Tensor))
    }


def plain(value: NonTensorBase) -> Any:
    """Return non-tensor data as JSON has it: one value for a batch, which may be of any size, once."""
    return value.data if isinstance(value, NonTensorData) else value.tolist()


def same_values(a: NonTensorBase | None, b: NonTensorBase | None) -> bool:
    """Whether two sides have equal non-tensor data: as texts, since True is 1, and 1 is 1.0, but not the same."""
    if a is None or b is None:
        return a is b
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return a.shape == b.shape and repr(a.data) == repr(b.data)
    # What is there for each element may equal one list; one value for more elements than that is never made.
    size = max(value.shape.numel() for value in (a, b) if not isinstance(value, NonTensorData))
    return max(a.shape.numel(), b.shape.numel()) <= max(size, 1) and repr(a.tolist()) == repr(b.tolist())


def make_filter(include: Sequence[str], exclude: Sequence[str]) -> "FilterLike | None":
    """Return what matches any of some globs and none of others; None for everything."""
    chosen: Filter | None = None
    for pattern in include:
        chosen = Filter(pattern) if chosen is None else chosen | pattern
    for pattern in exclude:
        chosen = ~Filter(pattern) if chosen is None else chosen & ~Filter(pattern)
    return chosen


def choose(found: Sequence[Stored], where: "FilterLike | None") -> list[Stored]:
    """Return the leaves that a filter chooses.

    Raises:
        FilterError: A pattern matches no leaf.
    """
    if where is None:
        return list(found)
    mask = Filter(where).mask([Entry(one.paths, one.leaf, one.kind) for one in found])
    return [one for one, yes in zip(found, mask, strict=True) if yes]
