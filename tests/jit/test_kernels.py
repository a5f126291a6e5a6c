"""Faster kernels in a replay have the bits of the operations that they replace."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc._jit.replay import kernels
from tests.helpers import examples

SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38]


def same(a, b):
    """Return whether two tensors have the same numbers, NaN in the same places."""
    return (
        a.stride() == b.stride() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def numbers(rows, classes, dtype, seed):
    """Return random logits, with special numbers in some rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=generator, dtype=dtype) * 4
    for i, number in enumerate(SPECIAL):
        x[i, i % classes] = number
    x[len(SPECIAL)] = -float("inf")
    return x


@examples(1)
@given(
    st.integers(90, 400),
    st.integers(1, 34),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([1, 2]),
    st.integers(0, 1 << 30),
)
def test_rows_of_a_softmax_and_its_derivative(rows, classes, dtype, groups, seed):
    """The logarithm of a softmax over the last dimension, and its gradient, are torch's for any number of rows."""
    x = numbers(rows, classes, dtype, seed).expand(groups, rows, classes)
    weights = torch.randn(groups, rows, classes, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)

    def fn(x, weights):
        grad = torch.func.grad(lambda x: (F.log_softmax(x, -1) * weights).sum())(x)
        return F.log_softmax(x, -1), grad

    step = tdf.jit(fn)
    step(x + 1, weights)

    assert all(map(same, step(x, weights), fn(x, weights)))


@pytest.mark.parametrize("shape", [(96, 10), (4, 32, 10), (2, 3, 32, 5), (97, 3), (1, 101, 7)])
@pytest.mark.parametrize("layout", ["whole", "turned", "every other"])
def test_layouts_of_logits(shape, layout):
    """Logits of any layout give the values and strides of the function."""
    x = torch.randn(*shape)
    if layout == "turned":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every other":
        x = torch.stack([x, x], -1)[..., 0]
    step = tdf.jit(lambda x: F.log_softmax(x, -1))
    step(x + 1)

    assert same(step(x), F.log_softmax(x, -1))


def test_several_threads():
    """Parts for threads end where vectors end."""
    x = torch.randn(64, 999, 5)
    step = tdf.jit(lambda x: F.log_softmax(x, -1))
    step(x + 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = step(x)
    finally:
        torch.set_num_threads(before)

    assert same(got, F.log_softmax(x, -1))


@pytest.mark.parametrize("dim", [0, 1])
def test_other_dimensions_stay(dim):
    """A softmax over another dimension is the operation itself."""
    x = torch.randn(100, 100, 6)
    step = tdf.jit(lambda x: F.log_softmax(x, dim))

    assert same(step(x), F.log_softmax(x, dim))


def test_rows_of_a_vector_are_told_apart():
    """The comparison finds the orders of addition that round otherwise: torch adds long rows by lanes."""
    assert not kernels._is_same_by_columns(torch.float32, 31)


def test_the_comparison_draws_nothing():
    """A record is made without random numbers of torch's default generator."""
    kernels._is_same_by_columns.cache_clear()
    torch.manual_seed(3)
    tdf.jit(lambda x: F.log_softmax(x, -1))(torch.ones(100, 6))
    drawn = torch.rand(3)
    torch.manual_seed(3)

    assert torch.equal(drawn, torch.rand(3))
