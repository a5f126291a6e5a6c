"""Trees and leaves as text: sizes, counts, kinds, and the repr."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Kind
from tdfunc.ops.display.text import bytes_text, count_text, kind_text, printable


@given(st.integers(0, 10**18))
def test_bytes_text(size):
    """A size is given in the unit that gives it three digits."""
    number, unit = bytes_text(size).split(" ")

    power = ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert float(number) * 1000**power == pytest.approx(size, rel=0.006)
    assert len(number.replace(".", "")) <= 3 or unit == "PB"


def test_words():
    """Counts, kinds and long texts."""
    assert [count_text(n, "leaf") for n in (0, 1, 2000)] == ["0 leaves", "1 leaf", "2,000 leaves"]
    assert [kind_text(kind) for kind in (None, *Kind)] == [
        "", "parameter", "buffer", "buffer, not saved", "extra state"
    ]  # fmt: skip
    assert printable("a" * 300) == "a" * 60 + "..." + "a" * 30 + " (300 characters)"
