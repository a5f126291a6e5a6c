"""Part of a leaf: the rows that an index names, and nothing else of the file."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdfunc.storage.disk.raw import is_wrapped, outside_transforms
from tdfunc.storage.safetensors.contents import Contents
from tdfunc.storage.safetensors.header import Entry
from tdfunc.storage.safetensors.read import Source, read_leaf, read_rows


def read_index(contents: Contents, source: Source, entry: Entry, index: Any) -> Tensor:
    """Return `leaf[index]`.

    Raises:
        IndexError: The index does not fit the leaf.
    """
    spec, begin = entry.spec, source.begin + entry.begin
    with outside_transforms():
        plan = _plan_rows(index, spec.size)
    if plan is None:
        with contents.reading():
            leaf = read_leaf(source, spec, begin, entry.name, None)
        return leaf[index]
    runs, rest = plan
    with contents.reading():
        rows = read_rows(source, spec, begin, runs)
    return rows[rest]


def _plan_rows(index: Any, size: torch.Size) -> tuple[list[tuple[int, int]], Any] | None:
    """Return runs of rows (first, count), and the index that takes the result out of them; None for all rows."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    if not size or first is None or first is Ellipsis or isinstance(first, (bool, np.bool_)):
        return None
    if isinstance(index, tuple) and not index:
        return None
    length = size[0]
    if isinstance(first, (int, np.integer)):
        row = int(first)
        if not -length <= row < length:
            # As torch says it.
            raise IndexError(f"index {row} is out of bounds for dimension 0 with size {length}")
        return [(row % length, 1)], (0, *rest)
    if isinstance(first, slice):
        rows = range(*first.indices(length))
        if rows.step < 0:
            raise ValueError("step must be greater than zero")
        return _runs(rows), (slice(None), *rest)
    try:
        picked = torch.as_tensor(first, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        # torch says of the whole leaf what is wrong.
        return None
    if is_wrapped(picked):
        # Inside of vmap an index has no values of its own; torch takes the rows out of the whole leaf.
        return None
    if picked.dtype is torch.bool:
        if picked.dim() != 1 or picked.shape[0] != length:
            return None
        picked = picked.nonzero()[:, 0]
    if picked.dtype is torch.uint8 or picked.is_floating_point() or picked.is_complex():
        # torch takes uint8 for a mask, and refuses the others.
        return None
    flat = picked.reshape(-1).tolist()
    for row in flat:
        if not -length <= row < length:
            raise IndexError(f"index {row} is out of bounds for dimension 0 with size {length}")
    rows = sorted({row % length for row in flat})
    places = {row: i for i, row in enumerate(rows)}
    where = torch.tensor([places[row % length] for row in flat], dtype=torch.int64, device="cpu").reshape(picked.shape)
    return _runs(rows), (where, *rest)


def _runs(rows: Any) -> list[tuple[int, int]]:
    """Join neighbouring rows, which ascend."""
    if isinstance(rows, range) and rows.step == 1:
        return [(rows.start, len(rows))] if rows else []
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and sum(runs[-1]) == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs
