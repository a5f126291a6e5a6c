"""Steps that take large gradients some members at a time are the steps of the whole gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc._jit.replay import products
from tests.helpers import examples
from tests.jit.blocks import calls_of, pool_all_sizes, threads
from tests.jit.test_products import assert_same, make_step, random_params

MEMBERS = 4
CONSTANT = torch.tensor(0.01)
RATES = torch.tensor([0.1, 0.01, 0.02, 0.03])
FACTORS = {"left": (8, 64), "right": (64, 32)}
OPTIMIZERS = {
    "adam": tdf.optim.adam(1e-2),
    "adamw": tdf.optim.adamw(1e-2),
    "amsgrad": tdf.optim.adam(1e-2, amsgrad=True),
    "a tensor": tdf.optim.adam(CONSTANT),
    "rates": tdf.optim.adam(RATES),
    "a schedule": tdf.optim.adam(tdf.optim.schedules.cosine_decay(1e-2, 10)),
    "sgd": tdf.optim.sgd(1e-2),
    "momentum": tdf.optim.sgd(1e-2, momentum=0.9),
    "adagrad": tdf.optim.adagrad(1e-2),
    "rmsprop": tdf.optim.rmsprop(1e-2),
    "nadam": tdf.optim.nadam(1e-2),
    "clipped": tdf.optim.chain(tdf.optim.clip_by_member_norm(0.1), tdf.optim.adam(1e-2)),
    "an average": tdf.optim.ema(tdf.optim.adam(1e-2), 0.9),
    "checked": tdf.optim.apply_if_finite(tdf.optim.adam(1e-2), 2),
}


def assert_replayed(fn, params, state, x):
    """Check that a replay with blocks of the pool is the function."""
    with pool_all_sizes():
        step = tdf.jit(fn)
        step(params, state, x + 1)
        assert_same(step(params, state, x), fn(params, state, x))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(32, 64), (30, 50)], ids=["vectors", "ends"])
def test_steps_in_parts_are_the_step(name, shape):
    """Three steps have the bits of the function, and the trees in between stay as they were."""
    opt = OPTIMIZERS[name]
    params, x = random_params(MEMBERS, *shape, 16), torch.randn(8, shape[0])
    fn, state = make_step(opt), opt.init(params)
    expected, got = [(params, state)], [(params, state)]
    with pool_all_sizes():
        step = tdf.jit(fn)
        for i in range(4):
            expected.append(fn(*expected[-1], x * i))
            got.append(step(*got[-1], x * i))

    assert_same(got, expected)


@pytest.mark.parametrize("name", ["adam", "momentum", "clipped"])
def test_donated_steps_in_parts(name):
    """Donated leaves are overwritten in parts."""
    opt = OPTIMIZERS[name]
    params, x = random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)
    fn = make_step(opt)
    expected, got = (params, opt.init(params)), (params.clone(), opt.init(params))
    address = got[0]["w"].data_ptr()
    with pool_all_sizes():
        step = tdf.jit(make_step(opt, donate=True))
        for i in range(4):
            expected = fn(*expected, x * i)
            got = step(*got, x * i)

    assert_same(got, expected)
    assert got[0]["w"].data_ptr() == address


@examples(1)
@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70),
    st.sampled_from([torch.float32, torch.float64]), st.sampled_from([1, 2]), st.booleans(),
)  # fmt: skip
def test_layers_of_any_sizes(members, batch, inputs, hidden, dtype, count, donate):
    """A step has the bits of the function for any members, examples and features, and any number of threads."""
    params = random_params(members, inputs, hidden, 8, dtype, hidden)
    x = torch.randn(batch, inputs, generator=torch.Generator().manual_seed(batch), dtype=dtype)
    opt = OPTIMIZERS["adamw"]
    fn, state = make_step(opt), opt.init(params)
    expected = fn(params, state, x)
    with threads(count), pool_all_sizes():
        step = tdf.jit(make_step(opt, donate=donate))
        step(params.clone(), opt.init(params), x + 1)
        assert_same(step(params.clone(), opt.init(params), x), expected)


def test_gradients_come_some_members_at_a_time():
    """No gradient of the large leaves is whole: each member has a product."""
    opt, params, x = OPTIMIZERS["adam"], random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)
    state = opt.init(params)
    plain = tdf.jit(make_step(opt))
    plain(params, state, x)
    with pool_all_sizes():
        step = tdf.jit(make_step(opt))
        step(params, state, x)

    assert calls_of(step, "aten::bmm", params, state, x) > calls_of(plain, "aten::bmm", params, state, x)


def test_gradients_with_other_uses_are_whole():
    """A gradient that is returned as well is one tensor."""
    opt, params, x = OPTIMIZERS["adam"], random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)

    def fn(params, state, x):
        grads = torch.vmap(torch.func.grad(lambda p: F.linear(x, p["w"]).sin().sum()))(params)
        return opt.update(params, grads, state), grads["w"]

    state = opt.init(params)
    assert_replayed(fn, params, state, x)


def test_a_copy_that_is_used_before_the_step():
    """A copy that something reads before the optimizer overwrites it is made at once."""
    opt, params, x = OPTIMIZERS["adam"], random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)

    def fn(params, state, x):
        first, state = make_step(opt)(params, state, x)
        second, state = make_step(opt)(first, state, x)
        return first, second, state

    state = opt.init(params)
    assert_replayed(fn, params, state, x)


def test_other_threads_between_calls():
    """The number of threads is asked at each call."""
    opt, params, x = OPTIMIZERS["adam"], random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)
    fn, state = make_step(opt), opt.init(params)
    with pool_all_sizes():
        step = tdf.jit(fn)
        step(params, state, x + 1)
        for count in (2, 1):
            with threads(count):
                assert_same(step(params, state, x), fn(params, state, x))


@pytest.mark.parametrize("donate", [False, True])
def test_leaves_that_are_factors(donate):
    """A leaf that is a factor of another leaf's gradient is not overwritten before."""
    opt = OPTIMIZERS["adam"]
    generator = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(MEMBERS, *shape, generator=generator) for name, shape in FACTORS.items()}
    params = TensorDict(leaves, [MEMBERS])

    def make(donate):
        def step(params, state):
            grads = torch.func.grad(lambda p: (p["left"] @ p["right"]).sin().sum())(params)
            return opt.update(params, grads, state, donate=donate)

        return step

    with pool_all_sizes():
        step = tdf.jit(make(donate))
        step(params.clone(), opt.init(params))
        assert_same(step(params.clone(), opt.init(params)), make(False)(params, opt.init(params)))


def test_results_that_are_factors_and_donated():
    """The same for leaves that the function has computed."""
    opt = OPTIMIZERS["adam"]
    params = TensorDict({"p": torch.randn(MEMBERS, 8, 64), "w": torch.randn(MEMBERS, 32, 64)}, [MEMBERS])

    def steps(params, state):
        for i in range(2):
            grads = torch.func.grad(lambda q: torch.vmap(F.linear)(q["p"], q["w"]).sin().sum())(params)
            params, state = opt.update(params, grads, state, donate=i > 0)
        return params, state

    with pool_all_sizes():
        step = tdf.jit(steps)
        step(params, opt.init(params))
        assert_same(step(params, opt.init(params)), steps(params, opt.init(params)))


@pytest.mark.parametrize("name", ["adam", "clipped"])
def test_gradients_that_are_copies_of_turned_products(name, monkeypatch):
    """Where turned factors have other bits, each part of the product is turned in the cache."""
    monkeypatch.setattr(products, "_has_turned_bits", lambda *_: False)
    opt, params, x = OPTIMIZERS[name], random_params(MEMBERS, 32, 64, 16), torch.randn(8, 32)
    fn, state = make_step(opt), opt.init(params)
    assert_replayed(fn, params, state, x)


def test_captured_gradients():
    """Gradients that the function has captured are stepped as they are."""
    opt, params = OPTIMIZERS["adam"], random_params(MEMBERS, 32, 64, 16)
    grads = random_params(MEMBERS, 32, 64, 16, seed=1)
    fn, state = (lambda params, state: opt.update(params, grads, state)), opt.init(params)
    with pool_all_sizes():
        step = tdf.jit(fn, captures="constants")
        step(params, state)
        assert_same(step(params, state), fn(params, state))


@pytest.mark.slow
def test_the_pool_holds_no_gradient():
    """Of a layer of 16 MB, the pool holds the old and the new parameters and averages."""
    module = nn.Linear(512, 512, bias=False)
    apply, _, _ = tdf.functional(module)
    params, _ = tdf.split(tdf.init_ensemble(lambda: nn.Linear(512, 512, bias=False), 16))
    opt = tdf.optim.adam(1e-3)
    x = torch.randn(16, 512)

    @tdf.jit
    def step(params, state, x):
        grads = torch.func.grad(lambda p: torch.vmap(apply, (0, None))(p, x).square().sum())(params)
        return opt.update(params, grads, state)

    state = opt.init(params)
    for _ in range(4):
        params, state = step(params, state, x)

    assert step.cache_info().held_bytes == 6 * params["weight"].nbytes
