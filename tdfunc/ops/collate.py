"""`collate`: what a `torch.utils.data.DataLoader` makes of its rows, trees included."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data._utils import collate as torch_collate

from tdfunc._collection import TensorCollection
from tdfunc.ops.join import stack


def collate(batch: Any) -> Any:
    """Return one batch of the rows of a data set: trees are stacked, all else is as `default_collate` makes it.

    A data set that is itself a tree is indexed once for a whole batch, which is returned as it is. In rows that are
    tuples, lists or dicts, trees may stand beside tensors, numbers and strings.

    Args:
        batch: A list of rows, or a tree.

    Raises:
        LeafMismatchError: The trees differ in a shape or dtype; the message names the leaf.
        TreeStructureError: Their keys differ.
        TypeError: A row is nothing that torch can collate.

    Source:
        `torch.utils.data.default_collate`, whose table of types is a global of torch: this function brings its own.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> [batch["x"].tolist() for batch in DataLoader(td, batch_size=3, collate_fn=tdf.collate)]
        [[0, 1, 2], [3, 4]]
        >>> rows = [(row, i) for i, row in enumerate(td)]
        >>> tdf.collate(rows)[0].batch_size, tdf.collate(rows)[1]
        (torch.Size([5]), tensor([0, 1, 2, 3, 4]))
    """
    if isinstance(batch, TensorCollection):
        return batch
    table: dict[Any, Any] = {TensorCollection: _stack_rows, **torch_collate.default_collate_fn_map}
    return torch_collate.collate(batch, collate_fn_map=table)


def _stack_rows(batch: Sequence[Any], *, collate_fn_map: Any) -> Any:
    return stack(batch)
