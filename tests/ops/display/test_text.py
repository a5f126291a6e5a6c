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


def test_words():
    """Counts, kinds and long texts."""
    assert [count_text(n, "leaf") for n in (0, 1, 2000)] == ["0 leaves", "1 leaf", "2,000 leaves"]
    assert [kind_text(kind) for kind in (None, *Kind)] == [
        "", "parameter", "buffer", "buffer, not saved", "extra state"
    ]  # fmt: skip
    sizes = {999: "999 B", 1000: "1.00 kB", 999_499: "999 kB", 999_500: "1.00 MB", 9995 * 10**14: "1000 PB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert value_text(NonTensorStack(*"abcdef")) == "[6] values: 'a', 'b', 'c', 'd', 'e', 'f'"
    tree = TensorDict({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert [totals(tree, limit) for limit in (2, 1)] == [(2, 20, True), (2, 20, False)]
    assert printable("a" * 120) == "a" * 120
    assert printable("a" * 300) == "a" * 60 + "..." + "a" * 30 + " (300 characters)"
