"""Every operation under every transformation, against plain tensors: the cells of docs/transforms_table.md."""

import pytest
import torch

from benchmarks.pages.transform_table import COLUMNS, RAISES, ROWS, compare

pytestmark = pytest.mark.sample(3)


def cells(*, raising):
    """Pytest parameters for the cells that work, or for those that raise."""
    return [
        pytest.param(row, column, id=f"{row}-{column.name}", marks=[pytest.mark.slow] * column.slow)
        for column in COLUMNS
        for row in ROWS
        if ((row, column.name) in RAISES) is raising
    ]


@pytest.mark.parametrize(("row", "column"), cells(raising=False))
def test_cell(row, column):
    """An operation gives the values, keys and batch sizes under a transformation that plain tensors do."""
    column.check(ROWS[row])


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions may run what 2.13 refuses")
@pytest.mark.parametrize(("row", "column"), cells(raising=True))
def test_cell_raises(row, column):
    """A cell that the page says to raise raises its error."""
    error, message, _ = RAISES[row, column.name]

    with pytest.raises(error, match=message):
        column.check(ROWS[row])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.set("a", t["a"] + 1e-3),
        lambda t: t.delete("a"),
        lambda t: t.set("c", t["a"]),
        lambda t: t.with_batch_size([]),
    ],
    ids=["value", "missing", "added", "batch size"],
)
def test_comparison_can_fail(wrong):
    """The comparison of a cell can fail."""
    row = ROWS["clone"]
    tensors = torch.ones(3, 2), torch.ones(3)
    out = row.fn(row.fn.__globals__["make"](*tensors))
    compare(out, row.plain(*tensors), row.batch)

    with pytest.raises(AssertionError):
        compare(wrong(out), row.plain(*tensors), row.batch)
