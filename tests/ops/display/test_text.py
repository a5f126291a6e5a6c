"""Trees and leaves as text: sizes, counts, kinds, and the repr."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Kind, NonTensorStack, TensorDict
from tdfunc.ops.display.text import bytes_text, count_text, kind_text, printable, totals, value_text


@given(st.integers(0, 10**18))
def test_bytes_text(size):
    """A size is given in the unit that gives it three digits."""
    number, unit = bytes_text(size).split(" ")

    power = ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert float(number) * 1000**power == pytest.approx(size, rel=0.006)
    assert len(number.replace(".", "")) <= 3 or unit == "PB"


@pytest.mark.parametrize(("count", "text"), [(0, "0 leaves"), (1, "1 leaf"), (2000, "2,000 leaves")])
def test_counts(count, text):
    """A count has its word in the singular or plural, and commas."""
    assert count_text(count, "leaf") == text


def test_kinds():
    """Each kind of a leaf has its words, and a plain tensor none."""
    assert [kind_text(kind) for kind in (None, *Kind)] == [
        "", "parameter", "buffer", "buffer, not saved", "extra state"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "text"),
    [(999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (9995 * 10**14, "1000 PB")],
)
def test_bytes(size, text):
    """A number of bytes has three digits and a unit."""
    assert bytes_text(size) == text


def test_values():
    """Values of each row are shown with their number."""
    assert value_text(NonTensorStack(*"abcdef")) == "[6] values: 'a', 'b', 'c', 'd', 'e', 'f'"


@pytest.mark.parametrize(("limit", "complete"), [(2, True), (1, False)])
def test_totals(limit, complete):
    """Leaves and bytes are counted, and whether those are all within the limit."""
    tree = TensorDict({"a": torch.zeros(2), "b": torch.zeros(3)})

    assert totals(tree, limit) == (2, 20, complete)


@pytest.mark.parametrize(
    ("text", "shown"), [("a" * 120, "a" * 120), ("a" * 300, "a" * 60 + "..." + "a" * 30 + " (300 characters)")]
)
def test_long_texts(text, shown):
    """A long text is cut in the middle, and its length is given."""
    assert printable(text) == shown
