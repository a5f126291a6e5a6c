"""Rows that are computed some at a time have the bits of all rows at once."""

import resource

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc._jit.replay import rows as rows_module
from tests.helpers import examples
from tests.jit.blocks import calls_of, pool_all_sizes, threads

ROWS = 7


def attend(mask=None, **options):
    """Return a function of queries, keys and values, with a mask of a shape."""

    def call(x):
        q, k, v = x.reshape(3, ROWS, 2, 16, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v, None if mask is None else mask(x), **options)

    return call


def bools(*shape):
    """Return a mask that leaves each query a key."""
    return lambda x: (x.reshape(-1)[: torch.Size(shape).numel()].reshape(shape) > -0.5).logical_or(torch.eye(16) > 0)


def floats(*shape):
    """Return a mask that is added."""
    return lambda x: x.reshape(-1).repeat(2)[: torch.Size(shape).numel()].reshape(shape)


FORWARD = {
    "layer norm": lambda x: F.layer_norm(x, (128,)),
    "layer norm of two dimensions": lambda x: F.layer_norm(x.reshape(ROWS, 3, 16, 8), (16, 8)),
    "layer norm with weights": lambda x: F.layer_norm(x, (128,), x[0, 0], x[1, 0]),
    "layer norm, turned": lambda x: F.layer_norm(x.transpose(0, 1), (128,)),
    "layer norm of all": lambda x: F.layer_norm(x, x.shape),
    "attention": attend(),
    "causal attention": attend(is_causal=True),
    "scaled attention": attend(scale=0.3),
    "attention, mask of rows": attend(floats(ROWS, 2, 16, 16)),
    "attention, one mask": attend(floats(1, 2, 16, 16)),
    "attention, mask of places": attend(floats(16, 16)),
    "attention, mask of bools": attend(bools(ROWS, 1, 16, 16)),
}


def with_gradient(fn):
    """Return the gradient of a function."""
    return lambda x: torch.func.grad(lambda y: fn(y).sin().sum())(x)


FUNCTIONS = FORWARD | {f"gradient of {name}": with_gradient(fn) for name, fn in FORWARD.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("piece_bytes", [1, 3000])
def test_pieces_have_the_bits_of_the_whole(name, piece_bytes, monkeypatch):
    """A replay has the values and strides of the function, for pieces of one row and of some."""
    monkeypatch.setattr(rows_module, "_PIECE_BYTES", piece_bytes)
    fn = FUNCTIONS[name]
    x = torch.randn(2 * ROWS, 3, 128)[::2]
    with pool_all_sizes():
        step = tdf.jit(fn)
        step(x + 1)
        got = step(x)

    expected = fn(x)
    assert got.stride() == expected.stride()
    assert torch.equal(got, expected)


SIZES = st.tuples(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1, 5, 8, 16, 24, 32, 48]),
    st.sampled_from([1, 3, 16, 33, 64]),
    st.sampled_from([1, 3, 8, 16, 17]),
)


@examples(2)
@given(SIZES, st.sampled_from([torch.float32, torch.float64]), st.sampled_from([1, 2]), st.booleans())
def test_attention_of_any_sizes(sizes, dtype, count, heads_inside):
    """Attention and its gradients have the bits of the function, whatever rows, heads and threads there are."""
    rows, heads, queries, keys, width = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = [(rows, heads, length, width) for length in (queries, keys, keys)]
    parts = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    if heads_inside:
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]

    def loss(q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y.sin().sum(), y

    fn = torch.func.grad(loss, (0, 1, 2), has_aux=True)
    with threads(count), pool_all_sizes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_PIECE_BYTES", 1)
        step = tdf.jit(fn)
        step(*[x + 1 for x in parts])
        got = step(*parts)
        expected = fn(*parts)

    assert all(map(torch.equal, tree_leaves(got), tree_leaves(expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_two_dtypes(dtype):
    """A norm of 16 bits with weights of 32 has its mean in 32, and its gradients."""
    x = torch.randn(ROWS, 128).to(dtype)
    weight, bias = torch.rand(2, 128)

    def fn(x, weight, bias):
        grads = torch.func.grad(lambda *args: F.layer_norm(args[0], (128,), *args[1:]).float().sin().sum(), (0, 1, 2))
        return grads(x, weight, bias), torch.native_layer_norm(x, (128,), weight, bias, 1e-5)

    with pool_all_sizes():
        step = tdf.jit(fn)
        step(x + 1, weight, bias)
        got = tree_leaves(step(x, weight, bias))

    expected = tree_leaves(fn(x, weight, bias))
    assert [y.dtype for y in got] == [y.dtype for y in expected]
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("layer norm", "aten::native_layer_norm"),
        ("gradient of layer norm", "aten::native_layer_norm_backward"),
        ("attention, one mask", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("gradient of attention", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    ],
)
def test_rows_are_computed_apart(name, operation, monkeypatch):
    """Large results come in pieces, of one row at least."""
    monkeypatch.setattr(rows_module, "_PIECE_BYTES", 1)
    x = torch.randn(ROWS, 3, 128)
    with pool_all_sizes():
        step = tdf.jit(FUNCTIONS[name])
        step(x)

    assert calls_of(step, operation, x) == ROWS


def test_sums_over_rows_are_not_cut(monkeypatch):
    """The gradients of shared weights are sums over all rows."""
    monkeypatch.setattr(rows_module, "_PIECE_BYTES", 1)
    x = torch.randn(ROWS, 128)
    apply, params, _ = tdf.functional(nn.LayerNorm(128))
    with pool_all_sizes():
        step = tdf.jit(torch.func.grad(lambda p, x: apply(p, x).sin().sum()))
        step(params, x)

    assert calls_of(step, "aten::native_layer_norm_backward", params, x) == 1


@pytest.mark.slow
def test_large_rows_take_no_new_pages():
    """A step whose layer norms have results of 40 MB gets no page from the system after its first calls."""
    x = torch.randn(40, 1 << 18)
    step = tdf.jit(lambda x: F.layer_norm(F.layer_norm(x, (256, 1024) if x.dim() == 3 else (1 << 18,)), (1 << 18,)))
    for _ in range(4):
        y = step(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        y = step(x)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    assert y.shape == x.shape
    # Pages of Python's own; a result of 40 MB has 10,240.
    assert after - before < 1_000
