"""`collate`: what a `torch.utils.data.DataLoader` makes of its rows, trees included.

torch's `default_collate` looks types up in a table that is open to other libraries, as its table of pytrees is: trees
are entered in both.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data._utils import collate as torch_collate

from tdfunc.core.collection import TensorCollection
from tdfunc.ops.join import stack


def collate(batch: Any) -> Any:
    """Return one batch of the rows of a data set: trees are stacked, all else is as `default_collate` makes it.

    A data set that is itself a tree is indexed once for a whole batch, which is returned as it is. In rows that are
    tuples, lists or dicts, trees may stand beside tensors, numbers and strings. A `DataLoader` without a `collate_fn`
    does the same, since trees are in the table of torch's `default_collate`.

    Args:
        batch: A list of rows, or a tree.

    Raises:
        LeafMismatchError: The trees differ in a shape or dtype; the message names the leaf.
        TreeStructureError: Their keys differ.
        TypeError: A row is nothing that torch can collate.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> [batch["x"].tolist() for batch in DataLoader(td, batch_size=3)]
        [[0, 1, 2], [3, 4]]
        >>> rows = [(row, i) for i, row in enumerate(td)]
        >>> tdf.collate(rows)[0].batch_size, tdf.collate(rows)[1]
        (torch.Size([5]), tensor([0, 1, 2, 3, 4]))
    """
    # A tree without a batch has no first row for torch to look at.
    return batch if isinstance(batch, TensorCollection) else torch_collate.default_collate(batch)


def _rows(batch: TensorCollection | Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    return batch if isinstance(batch, TensorCollection) else stack(batch)


# Only classes of ours are looked up here, so other code sees no difference.
torch_collate.default_collate_fn_map.setdefault(TensorCollection, _rows)
