"""What to say where one tree has a leaf and the other a tree, or one a tensor and the other something else."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import TreeStructureError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import shape_of
from tdfunc.core.types import Path

_HINT = "rename_key or delete the entry in one of the trees."


def clash(call: str, path: Path, mine: Any, theirs: Any, *, hint: str = _HINT, note: str = "") -> TreeStructureError:
    """Return the error for an entry that is of two kinds: the path, and what it is in either tree."""
    return TreeStructureError(
        f"{call}: {dotted(path)!r} is {_kind(mine)} in one tree and {_kind(theirs)} in the other{note}.",
        expected=described(mine),
        got=described(theirs),
        hint=hint,
    )


def described(node: Any) -> str:
    """Return what an entry is, with the shape of a tensor and the keys of a tree."""
    if isinstance(node, TensorCollection):
        return f"a {type(node).__name__} with the keys {sorted(node._keys())}"
    if isinstance(node, Tensor):
        shape = shape_of(node)
        return f"a tensor of {'no shape' if shape is None else f'shape {list(shape)}'}, {node.dtype}"
    return f"non-tensor data {node!r}"[:200] if isinstance(node, NonTensorBase) else f"a {type(node).__name__}"


def _kind(node: Any) -> str:
    if isinstance(node, TensorCollection):
        return "a tree"
    return "non-tensor data" if isinstance(node, NonTensorBase) else "a leaf"


def find_clash(mine: Iterable[tuple[Path, Any]], theirs: Iterable[tuple[Path, Any]]) -> tuple[Path, Any, Any] | None:
    """Return the first of two collections' paths, trees included, that is a tree in one and not in the other."""
    found = dict(theirs)
    for path, node in mine:
        twin = found.get(path, node)
        if isinstance(node, TensorCollection) is not isinstance(twin, TensorCollection):
            return path, node, twin
    return None
