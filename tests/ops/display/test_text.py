"""Trees and leaves as text: sizes, counts, kinds, and the repr."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Kind, TensorDict
from tdfunc.ops.display.text import bytes_text, count_text, kind_text, printable

TREE = """TensorDict(
    fields={
        a: NonTensorData(data=word, batch_size=torch.Size([2]), device=None),
        b: TensorDict(
            fields={
                c: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False),
        l: NonTensorStack(['x', 'y'], batch_size=torch.Size([2]), device=None)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False,
    names=['t'])"""


def test_repr():
    """Names, values and nested trees print in one form, inside vmap too."""
    tree = TensorDict({"b": {"c": torch.zeros(2)}, "a": "word", "l": ["x", "y"]}, [2], names=["t"])
    seen = []
    torch.vmap(lambda t: seen.append(repr(t)) or t)(TensorDict({"a": torch.zeros(2)}, [2]))

    assert repr(tree) == TREE
    assert "batch_size=torch.Size([])" in seen[0]


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
