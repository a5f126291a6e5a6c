"""Trees from and to pandas: a column for each leaf, a row for each element of the batch."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tdfunc.core.collection import TensorCollection, check_one_shape
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, MissingKeyError, TreeStructureError, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.ops.structure import check_separator, flatten_keys

if TYPE_CHECKING:
    from typing_extensions import Self


def to_pandas(tree: Any, separator: str | None) -> Any:
    """Return a data frame of the leaves."""
    # pandas is optional.
    try:
        import pandas
    except ImportError as err:
        raise error(
            ImportError,
            "to_pandas: pandas is not installed.",
            hint="pip install pandas, or td.to_struct_array() for an array of records.",
        ) from err
    if len(tree._batch_size) != 1 or -1 in tree._batch_size:
        raise BatchSizeError(
            "to_pandas: the rows are the batch.",
            expected="one batch dimension",
            got=f"batch size {list(tree._batch_size)}",
            hint="td.reshape(-1) makes one of several, td.unsqueeze(0) of none; lazy.pad() makes rows of one length.",
        )
    check_one_shape(tree, "to_pandas")
    flat = tree if separator is None else flatten_keys(tree, separator)
    columns = {key: _column(key, flat._get(key)) for key in flat._keys()}
    return pandas.DataFrame(columns, index=range(tree._batch_size[0]))


def _column(key: str, node: Any) -> Any:
    if isinstance(node, TensorCollection):
        raise TreeStructureError(
            f"to_pandas: {key!r} is a tree.",
            expected="a leaf",
            got="a tree",
            hint='td.to_pandas(separator=".") joins nested keys.',
        )
    if node.dim() != 1:
        raise LeafMismatchError(
            f"to_pandas: {key!r} has features, a column has one value for each row.",
            expected="no dimensions but the batch",
            got=f"shape {list(node.shape)}",
            hint="give each feature a key of its own, or leave it out.",
        )
    if isinstance(node, NonTensorBase):
        return node._array
    try:
        return node.numpy(force=True)
    except (TypeError, RuntimeError) as err:
        raise LeafMismatchError(
            f"to_pandas: {key!r} is no array of numpy.",
            expected="values in a dtype of numpy",
            got=f"{node.dtype} on {node.device}",
            hint=None if node.device.type == "meta" else "td.to(torch.float32) casts.",
        ) from err


def read_frame(frame: Any, separator: str | None, dtype: torch.dtype | None) -> dict[Any, Any]:
    """Return the columns of a data frame by key: tensors of numbers, non-tensor data of all else."""
    if separator is not None:
        check_separator(separator, "from_pandas")
    values: dict[Any, Any] = {}
    for name, column in frame.items():
        if not isinstance(name, str):
            raise error(
                TypeError,
                "from_pandas: the name of a column is no str.",
                expected="a str",
                got=repr(name),
                hint="frame.rename(columns=str).",
            )
        key = tuple(name.split(separator)) if separator is not None else (name,)
        if key in values:
            raise MissingKeyError(
                f"from_pandas: two columns are called {name!r}.",
                expected="names that differ",
                got=repr(name),
                hint="rename one of them.",
            )
        values[key] = _values(name, column, dtype)
    return values


def _values(name: str, column: Any, dtype: torch.dtype | None) -> Any:
    given = column.to_numpy()
    if given.dtype.kind in "biufc":
        # Of the names that C has for an integer, and of the orders of its bytes, torch knows one.
        known = np.dtype(given.dtype.str).newbyteorder("=")
        # A copy: the arrays of a frame are shared, and may not be written to.
        array = np.array(given, known, copy=True).view(known)
        _check_missing(name, column, array, dtype)
        leaf = torch.from_numpy(array)
        return leaf if dtype is None else leaf.to(dtype)
    objects: Any = np.empty(len(column), dtype=object)
    objects[:] = list(column)
    return NonTensorStack._wrap(objects)


# Up to here a float64 holds every integer.
_EXACT = 2**53


def _check_missing(name: str, column: Any, array: Any, dtype: torch.dtype | None) -> None:
    """Raise where a missing value, as NaN, would make other values of its column floats that they are not."""
    integers = getattr(column.dtype, "kind", "") in "iu" and array.dtype.kind == "f"
    given: Any = column.dropna().to_numpy() if integers else array[:0]
    large = given[(given > _EXACT) | (given < -_EXACT if given.dtype.kind == "i" else False)]
    lost = [int(value) for value in large if int(float(value)) != int(value)]
    hint = "fill its missing values (fillna), or drop their rows (dropna), first."
    if lost:
        raise LeafMismatchError(
            f"from_pandas: {name!r} lacks values, which are NaN in a tensor; a float does not hold its integers.",
            expected="integers up to 2**53",
            got=str(lost[0]),
            hint=hint,
        )
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and np.isnan(array).any():
        raise LeafMismatchError(
            f"from_pandas: {name!r} lacks values, which {dtype} cannot say.",
            expected="a dtype with NaN",
            got=str(dtype),
            hint=hint,
        )


class FrameMethods(TensorCollection):
    """Trees as data frames."""

    __slots__ = ()

    def to_pandas(self, *, separator: str | None = None) -> Any:
        """Return a `pandas.DataFrame` with a column for each leaf and a row for each element of the batch.

        Args:
            separator: Joins nested keys to names of columns; without it nested trees are refused.

        Raises:
            ImportError: pandas is not installed.
            BatchSizeError: There is not one batch dimension.
            LeafMismatchError: A leaf has features, or a dtype that numpy does not have; the message names it.
            TreeStructureError: There are nested trees, and no separator.
        """
        return to_pandas(self, separator)


class FromFrameMethods(TensorCollection):
    """Trees with open keys from data frames."""

    __slots__ = ()

    @classmethod
    def from_pandas(
        cls,
        dataframe: Any,
        *,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
    ) -> "Self":
        """Return a tree of the columns of a `pandas.DataFrame`; its index is left out.

        Columns of numbers and bools become tensors, all others non-tensor data with a value for each row. A missing
        value (`pandas.NA`) in a column of numbers is NaN, which makes integers float64; a column of bools that lacks
        one is non-tensor data.

        Args:
            dataframe: The data frame; its values are copied.
            separator: Splits names of columns into nested keys.
            dtype: A dtype for all columns of numbers and bools.
            batch_size: Another batch size than the number of rows: `[]`.
            device: Where every leaf is put.
            names: A name for each batch dimension.

        Raises:
            TypeError: The name of a column is no str.
            ValueError: The separator is empty.
            LeafMismatchError: A column lacks values, and has integers that float64 does not hold, or is asked for in a
                dtype that has no NaN.
            MissingKeyError: Two columns have one name.
        """
        size = (len(dataframe),) if batch_size is None else batch_size
        cls_: Any = cls
        return cls_(read_frame(dataframe, separator, dtype), size, device, names)
