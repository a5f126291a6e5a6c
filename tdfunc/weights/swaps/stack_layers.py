"""`stack_layers`: a deeper or shallower model, made by renaming the layers of others."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import TieError, TreeStructureError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey, Path
from tdfunc.core.walk import list_paths, replace
from tdfunc.ops.base.reading import get

T = TypeVar("T", bound=TensorCollection)


def find_layers(paths: Iterable[Path]) -> Path | None:
    """Return the path of the node whose keys are 0, 1, ... n - 1; None without such a node, or with several.

    Nodes inside such a node, the experts of a layer, do not count.
    """
    keys_by_node: dict[Path, set[str]] = {}
    for path in paths:
        place = next((i for i, key in enumerate(path[:-1]) if key.isdecimal()), None)
        if place is not None:
            keys_by_node.setdefault(path[:place], set()).add(path[place])
    found: list[Path] = []
    for node, keys in keys_by_node.items():
        if keys == set(map(str, range(len(keys)))):
            found.append(node)
    if len(found) == 1:
        return found[0]
    return None


def node_at(tree: TensorCollection, where: Path) -> TensorCollection:
    """Return the node of the layers; in an `nn.Sequential` it is the tree itself, at an empty path."""
    if where:
        return get(tree, where)
    return tree


# Any: a node of any class, which is then the whole tree.
def with_node(tree: T, where: Path, node: Any) -> T:
    """Return the tree with another node of layers."""
    if where:
        return replace(tree, {where: node})
    return node


def stack_layers(parts: Sequence[tuple[T, Iterable[int]]], *, at: "NestedKey | None" = None) -> T:
    """Return a model with the layers of the parts, one after the other.

    Everything else comes from the first part. The leaves of a layer that is taken twice are one tensor under two paths,
    which are not tied.

    Args:
        parts: Models, each with the numbers of the layers to take from it.
        at: The path of the layers, such as `("model", "layers")`, or `()` if the tree itself has the layers; by default
            the one node with the keys 0, 1, 2, ...

    Raises:
        TreeStructureError: There is not exactly one such node.
        ValueError: A model does not have one of its layers.
        TieError: A leaf of the layers is tied.

    Examples:
        >>> model = TensorDict({"layers": {"0": {"w": torch.zeros(1)}, "1": {"w": torch.ones(1)}}})
        >>> deep = stack_layers([(model, range(0, 2)), (model, range(1, 2))])
        >>> list(deep["layers"].keys())
        ['0', '1', '2']
    """
    first = parts[0][0]
    if at is None:
        where = find_layers(list_paths(first))
    elif at:
        where = unravel(at)
    else:
        where = ()
    if where is None:
        raise TreeStructureError(
            "stack_layers: not exactly one node has the keys 0, 1, 2, ...", hint='name it: at=("model", "layers").'
        )
    taken: list[TensorCollection] = []
    for tree, numbers in parts:
        taken += _take_layers(tree, where, numbers)
    layers = {str(number): layer for number, layer in enumerate(taken)}
    return with_node(first, where, node_at(first, where)._replace(layers))


def _take_layers(tree: TensorCollection, where: Path, numbers: Iterable[int]) -> list[TensorCollection]:
    """Return the layers of a model that have these numbers."""
    layers = node_at(tree, where)
    for tied in tree._ties:
        if any(path[: len(where)] == where for path in tied):
            raise TieError(f"stack_layers: a leaf under {dotted(where)!r} is tied.", hint="untie it first.")
    taken: list[TensorCollection] = []
    for number in numbers:
        if str(number) not in layers._data:
            what = f"stack_layers: {dotted(where)!r} must have the layer {number}."
            raise error(ValueError, what, expected=f"0 to {len(layers._data) - 1}", got=number)
        taken.append(layers._data[str(number)])
    return taken
