"""What the values of leaves are like."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Kind, TensorDict
from tdfunc.ops.display import values
from tdfunc.ops.display.facts import bytes_text, count_text, kind_text, printable
from tdfunc.ops.display.values import Values, number_text, values_of


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.booleans())
def test_a_sample_is_spread_over_the_leaf(monkeypatched, sizes, transposed):
    """Large leaves would be judged by their first rows, or by elements that are not theirs."""
    leaf = torch.arange(torch.Size(sizes).numel(), dtype=torch.int64).reshape(sizes)
    # A part of a larger tensor: positions count from its own start.
    leaf = (
        leaf.transpose(0, -1) if transposed else torch.cat([leaf.reshape(-1) * 0 - 1, leaf.reshape(-1)])[leaf.numel() :]
    )

    (found,) = values_of([leaf])

    if leaf.numel() <= values.EXACT:
        assert "sample" not in found.of
        assert (found.low, found.high) == (leaf.min(), leaf.max())
    else:
        assert found.of == ("sample",)
        assert sum(found.counts) == values.RUNS * values.RUN
        assert found.low == leaf.reshape(-1)[0]
        assert found.high > leaf.reshape(-1)[-1] - leaf.numel() / 4 - 8 or transposed
        # Evenly spread elements of a ramp have nearly its mean.
        assert transposed or abs(found.mean - leaf.double().mean()) < leaf.numel() / 10


@pytest.fixture(scope="module")
def monkeypatched():
    """Small limits, so that small leaves are sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "EXACT", 64)
        patch.setattr(values, "RUNS", 8)
        patch.setattr(values, "RUN", 4)
        yield


def test_leaves_elsewhere_come_in_one_copy(monkeypatch):
    """Each leaf on an accelerator would wait for it, or leaves would get the values of others."""
    leaves = [torch.arange(3.0), torch.arange(4), torch.arange(5.0) + 10, torch.ones(2, dtype=torch.bool)]
    here = values_of(leaves)
    moved = []
    monkeypatch.setattr(values, "HOME", "elsewhere")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: moved.append(x.dtype) or x)

    there = values_of(leaves)

    assert there == here
    assert moved == [torch.float32, torch.int64, torch.bool]


def test_what_cannot_be_copied_has_no_values():
    """A device that fails would take the page with it."""
    assert values._to_cpu([torch.empty(2, device="meta"), None, torch.ones(1)]) == [None, None, torch.ones(1)]


def test_leaves_without_values():
    """A leaf that is no tensor, or has no values, would get some."""
    assert values_of([torch.empty(3, device="meta"), 3, None, "x", (torch.ones(1), 2), ()]) == [None] * 6


def test_parts_of_a_lazy_stack():
    """The tensors of a lazy stack would be judged by the first; of very many all would be read."""
    few, many = values_of([tuple(torch.tensor([float(i)]) for i in range(n)) for n in (3, 1000)])

    assert (few.low, few.high, few.of) == (0, 2, ())
    assert many.of == ("sample",)
    assert many.high > 900


@given(st.integers(0, 10**18))
def test_bytes(size):
    """A size would be given in the wrong unit, or in more than three digits."""
    number, unit = bytes_text(size).split(" ")

    power = ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert float(number) * 1000**power == pytest.approx(size, rel=0.006)
    assert len(number.replace(".", "")) <= 3 or unit == "PB"


def test_words():
    """A count, a kind or a number would read oddly."""
    assert [count_text(n, "leaf") for n in (0, 1, 2000)] == ["0 leaves", "1 leaf", "2,000 leaves"]
    assert [kind_text(kind) for kind in (None, *Kind)] == [
        "", "parameter", "buffer", "buffer, not saved", "extra state"
    ]  # fmt: skip
    assert [number_text(n) for n in (3, 12345, 10**9, 0.5, 1e-9)] == ["3", "12,345", "1e+09", "0.5", "1e-09"]
    assert printable("a" * 300) == "a" * 60 + "..." + "a" * 30 + " (300 characters)"


def test_a_wide_range_has_no_histogram():
    """The width of the range would overflow."""
    (found,) = values_of([torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)])

    assert (found.counts, found.low, found.high) == ((), -1.7e308, 1.7e308)
    assert isinstance(found, Values)
    assert np.isfinite(found.mean)


def test_looking_warns_of_nothing_and_keeps_no_graph():
    """A leaf that requires grad would get a graph, or its version would change."""
    leaf = torch.ones(3, requires_grad=True)

    TensorDict({"x": leaf, "y": leaf * torch.tensor([float("inf"), float("nan"), 1e38])})._repr_html_()

    assert leaf.grad is None
    assert leaf._version == 0
