"""Gradients that an optimizer needs in another order than a product has them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc._jit.replay import products
from tests.helpers import examples
from tests.jit.blocks import calls_of, threads


def make_step(opt, **options):
    """Return a step of stacked linear layers, on inputs that all members share or that each has."""

    def loss(params, x):
        hidden = torch.vmap(F.linear, (0 if x.dim() > 2 else None, 0, 0))(x, params["w"], params["b"])
        return torch.vmap(F.linear)(hidden.relu(), params["v"]).sin().sum()

    def step(params, state, x):
        grads = torch.func.grad(loss)(params, x)
        return opt.update(params, grads, state, **options)

    return step


def random_params(members, inputs, hidden, outputs, dtype=torch.float32, seed=0):
    """Return the parameters of two layers of each member."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (hidden, inputs), "b": (hidden,), "v": (outputs, hidden)}
    leaves = {key: torch.randn(members, *shape, generator=generator, dtype=dtype) for key, shape in shapes.items()}
    return TensorDict(leaves, [members])


def assert_same(a, b):
    """Check that two trees have the same bits, and weights and averages the same strides."""
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert torch.equal(x, y)
        # A number of steps may be expanded.
        assert x.stride() == y.stride() or not x.is_floating_point()


OPTIMIZERS = {
    "adam": tdf.optim.adam(1e-2),
    "sgd": tdf.optim.sgd(1e-2, momentum=0.9),
    "clipped": tdf.optim.chain(tdf.optim.clip_by_member_norm(0.1), tdf.optim.adam(1e-2)),
    "clipped together": tdf.optim.chain(tdf.optim.clip_by_global_norm(0.1), tdf.optim.adamw(1e-2)),
    "lion": tdf.optim.lion(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replay_has_the_bits_of_the_step(name):
    """Optimizers and clips see the same gradients in the same order, recorded or not."""
    opt = OPTIMIZERS[name]
    params, x = random_params(4, 12, 16, 3), torch.randn(8, 12)
    fn = make_step(opt)
    step = tdf.jit(fn)
    state = opt.init(params)
    step(params, state, x + 1)

    assert_same(step(params, state, x), fn(params, state, x))


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.integers(1, 20))


@examples(1)
@given(SIZES, st.sampled_from([torch.float32, torch.float64]), st.booleans(), st.sampled_from([1, 2]))
def test_layers_of_any_sizes(sizes, dtype, is_shared, count):
    """A step has the bits of the function for any members, examples and features, and any number of threads."""
    members, batch, inputs, hidden, outputs = sizes
    params = random_params(members, inputs, hidden, outputs, dtype, sum(sizes))
    generator = torch.Generator().manual_seed(sum(sizes) + 1)
    x = torch.randn((batch, inputs) if is_shared else (members, batch, inputs), generator=generator, dtype=dtype)
    opt = tdf.optim.adam(1e-2)
    fn, state = make_step(opt), opt.init(params)
    with threads(count):
        step = tdf.jit(fn)
        step(params, state, x + 1)
        assert_same(step(params, state, x), fn(params, state, x))


@pytest.mark.parametrize("name", ["adam", "clipped"])
def test_no_gradient_is_copied(name, monkeypatch):
    """The weights' gradients are products in the order of the weights, where these have the same bits."""
    monkeypatch.setattr(products, "_has_turned_bits", lambda *_: True)
    opt = OPTIMIZERS[name]
    params, x = random_params(4, 32, 64, 16), torch.randn(8, 32)
    step, state = tdf.jit(make_step(opt)), opt.init(params)
    step(params, state, x)

    # Of parameters and of two averages, of each of the three leaves.
    assert calls_of(step, "aten::clone", params, state, x) == 9


def test_products_of_other_bits_are_copied(monkeypatch):
    """Where the product of the turned factors rounds otherwise, the function's product is computed, and copied."""
    monkeypatch.setattr(products, "_has_turned_bits", lambda *_: False)
    opt, params, x = OPTIMIZERS["adam"], random_params(3, 32, 64, 16), torch.randn(8, 32)
    fn, state = make_step(opt), opt.init(params)
    step = tdf.jit(fn)
    step(params, state, x + 1)

    assert_same(step(params, state, x), fn(params, state, x))
    assert calls_of(step, "aten::clone", params, state, x) == 9 + 2


def test_returned_gradients_have_the_strides_of_the_function():
    """A gradient that is a result stays as the function made it."""
    params, x = random_params(3, 8, 16, 5), torch.randn(4, 8)
    opt = OPTIMIZERS["adam"]

    def fn(params, state, x):
        grads = torch.func.grad(lambda p: torch.vmap(F.linear, (None, 0))(x, p["w"]).sin().sum())(params)
        return opt.update(params, grads, state), grads

    step, state = tdf.jit(fn), opt.init(params)
    step(params, state, x + 1)

    assert_same(step(params, state, x), fn(params, state, x))
