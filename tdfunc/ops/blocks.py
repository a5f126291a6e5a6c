"""numpy's names for joins and splits along the first, second or third dimension: `torch.vstack`, `torch.hsplit`, ..."""

from collections.abc import Iterable, Sequence
from typing import Any

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, error
from tdfunc.ops import join
from tdfunc.ops.rearrange import atleast, tensor_split
from tdfunc.ops.shape import reshape


def vstack(trees: Iterable[Any]) -> Any:
    """Concatenate along the first batch dimension; a batch of one dimension is a row."""
    return join.cat([atleast(tree, 2) for tree in join.as_trees(trees, "vstack")], 0)


def hstack(trees: Iterable[Any]) -> Any:
    """Concatenate along the second batch dimension, or the only one."""
    wide = [atleast(tree, 1) for tree in join.as_trees(trees, "hstack")]
    return join.cat(wide, 0 if len(wide[0]._batch_size) == 1 else 1)


def dstack(trees: Iterable[Any]) -> Any:
    """Concatenate along the third batch dimension, which is made where it is missing."""
    return join.cat([atleast(tree, 3) for tree in join.as_trees(trees, "dstack")], 2)


def column_stack(trees: Iterable[Any]) -> Any:
    """Concatenate along the second batch dimension; a batch of one dimension is a column."""
    given = join.as_trees(trees, "column_stack")
    columns = [t if len(t._batch_size) > 1 else reshape(t, (t._batch_size.numel(), 1)) for t in given]
    return join.cat(columns, 1)


def split_along(tree: TensorCollection, sections: int | Sequence[int], call: str) -> tuple[Any, ...]:
    """Split along the dimension that `vsplit`, `hsplit` or `dsplit` means, into equal parts or at positions."""
    size = tree._batch_size
    least = {"vsplit": 2, "hsplit": 1, "dsplit": 3}[call]
    if len(size) < least:
        raise BatchSizeError(
            f"torch.{call}: the tree has too few dimensions.",
            expected=f"{least} batch dimensions or more",
            got=f"batch size {list(size)}",
        )
    dim = 0 if call == "vsplit" or len(size) == 1 else {"hsplit": 1, "dsplit": 2}[call]
    if isinstance(sections, int) and (sections < 1 or size[dim] % sections):
        raise error(
            ValueError,
            f"torch.{call}: the parts would not be equal.",
            expected=f"a number that divides {size[dim]}, the size of dimension {dim}",
            got=sections,
            hint="torch.tensor_split makes parts of unequal sizes.",
        )
    return tensor_split(tree, sections, dim)
