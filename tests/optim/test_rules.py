"""Each rule gives the numbers of torch.optim: for one tree, for stacked members, in transforms and traces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from tdfunc import TensorDict
from tdfunc._jit import jit
from tdfunc.optim import adam, adamw, sgd
from tests.helpers import assert_pure, assert_trees_equal

MEMBERS, STEPS = 3, 12
RULES = {
    "sgd": (sgd, torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (sgd, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "dampening": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "adam": (adam, torch.optim.Adam, {"lr": 0.01}),
    "adam decay": (adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-4}),
    "amsgrad": (adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    "adamw": (adamw, torch.optim.AdamW, {"lr": 0.01}),
    "adamw amsgrad": (adamw, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2, "amsgrad": True, "maximize": True}),
}
FLAGS, BETAS = st.booleans(), st.sampled_from([0.0, 0.9, 0.999])
PATHS = [("block", "bias"), ("block", "weight"), ("out",)]
each_rule = pytest.mark.parametrize("name", RULES)
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


@st.composite
def rules(draw):
    """A rule, torch's class for it, and any hyperparameters that both take."""
    options = {"lr": draw(st.floats(0, 1)), "weight_decay": draw(st.sampled_from([0.0, 0.3])), "maximize": draw(FLAGS)}
    if draw(FLAGS):
        options["momentum"] = momentum = draw(st.sampled_from([0.0, 0.9]))
        options["nesterov"] = nesterov = momentum > 0 and draw(FLAGS)
        options["dampening"] = draw(st.sampled_from([0.0, 0.3])) if not nesterov else 0.0
        return sgd, torch.optim.SGD, options
    options |= {"betas": (draw(BETAS), draw(BETAS)), "eps": draw(st.sampled_from([1e-8, 0.1])), "amsgrad": draw(FLAGS)}
    return draw(st.sampled_from([(adam, torch.optim.Adam, options), (adamw, torch.optim.AdamW, options)]))


def random_tree(generator, dtype=torch.float32, batch=(MEMBERS,)):
    """Return a tree of an awkward number of elements, keys not in sorted order."""
    make = lambda *shape: torch.randn(*batch, *shape, generator=generator, dtype=dtype)  # noqa: E731
    return TensorDict({"out": make(7), "block": {"weight": make(5, 3), "bias": make(5)}}, batch)


def train(update, state, params, grads):
    """Return params and state after one step for each gradient."""
    for grad in grads:
        params, state = update(params, grad, state)
    return params, state


def train_torch(cls, options, params, grads, fused):
    """Train plain Parameters with torch.optim and return them by path."""
    leaves = [nn.Parameter(params[path].clone()) for path in PATHS]
    optimizer = cls(leaves, foreach=False, fused=fused, **options)
    for grad in grads:
        for leaf, path in zip(leaves, PATHS, strict=True):
            leaf.grad = grad[path].clone()
        optimizer.step()
    return {path: leaf.detach() for path, leaf in zip(PATHS, leaves, strict=True)}


def assert_leaves(tree, expected, **tolerance):
    """Check each leaf, to the last bit unless a tolerance is given."""
    for path in PATHS:
        torch.testing.assert_close(tree[path], expected[path], **(tolerance or {"rtol": 0, "atol": 0}))


@given(rules(), DTYPES, st.sampled_from([(), (MEMBERS,)]), SEEDS)
def test_equals_torch_to_the_last_bit(rule, dtype, batch, generator):
    """A training run is that of torch.optim(fused=True)."""
    make, cls, options = rule
    params = random_tree(generator, dtype, batch)
    grads = [random_tree(generator, dtype, batch) for _ in range(STEPS)]
    opt = make(**options)

    trained, _ = train(opt.update, opt.init(params), params, grads)

    assert_leaves(trained, train_torch(cls, options, params, grads, fused=True))


@given(rules(), DTYPES, SEEDS)
def test_per_member_values_equal_the_loop(rule, dtype, generator):
    """A member with a learning rate of its own is trained as if it were alone."""
    make, cls, options = rule
    params = random_tree(generator, dtype)
    grads = [random_tree(generator, dtype) for _ in range(STEPS)]
    rates = torch.tensor([0.3, 0.01, 0.002], dtype=torch.float64)
    opt = make(**{**options, "lr": rates})

    trained, _ = train(opt.update, opt.init(params), params, grads)

    for i, rate in enumerate(rates.tolist()):
        alone = train_torch(cls, {**options, "lr": rate}, params[i], [grad[i] for grad in grads], fused=False)
        assert_leaves(
            trained[i],
            alone,
            rtol=1e-14 if dtype is torch.float64 else 1e-6,
            atol=1e-14 if dtype is torch.float64 else 1e-7,
        )


@given(rules(), DTYPES, SEEDS)
def test_vmap_equals_stacked(rule, dtype, generator):
    """`torch.vmap(opt.update)` gives the numbers of the stacked call."""
    make, _, options = rule
    params = random_tree(generator, dtype)
    grads = [random_tree(generator, dtype) for _ in range(STEPS)]
    opt = make(**options)

    mapped, state = train(torch.vmap(opt.update), torch.vmap(opt.init)(params), params, grads)
    stacked, expected = train(opt.update, opt.init(params), params, grads)

    tight = dtype is torch.float64
    assert_trees_equal(mapped, stacked, rtol=1e-13 if tight else 1e-5, atol=1e-13 if tight else 1e-6)
    assert_trees_equal(state, expected, rtol=1e-12 if tight else 1e-4, atol=1e-13 if tight else 1e-6)


@each_rule
def test_jit_equals_eager_to_the_last_bit(name, generator):
    """A trace trains the weights that the function trains."""
    make, _, options = RULES[name]
    params = random_tree(generator)
    grads = [random_tree(generator) for _ in range(STEPS)]
    opt = make(**options)
    update = jit(opt.update)

    traced = train(update, opt.init(params), params, grads)

    for got, expected in zip(traced, train(opt.update, opt.init(params), params, grads), strict=True):
        assert_trees_equal(got, expected)
    assert update.cache_info().misses == 1


@each_rule
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_donate_equals_pure_and_reuses_memory(name, wrap, generator):
    """`donate=True` trains the same weights, in the memory that was given."""
    make, _, options = RULES[name]
    params = random_tree(generator)
    grads = [random_tree(generator) for _ in range(STEPS)]
    opt = make(**options)
    donated = params.clone()
    memory = donated["out"].data_ptr()
    update = wrap(lambda p, g, s: opt.update(p, g, s, donate=True))

    got, state = train(update, opt.init(params), donated, grads)

    expected, expected_state = train(opt.update, opt.init(params), params, grads)
    assert_trees_equal(got, expected)
    assert_trees_equal(state, expected_state)
    assert got["out"].data_ptr() == memory


# A graph takes seconds to compile: one rule for the inner loop.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "adam" else pytest.mark.slow) for n in RULES])
def test_compile_is_one_graph(name, generator):
    """`torch.compile(fullgraph=True)` compiles one graph, for any values."""
    make, _, options = RULES[name]
    params, grad = random_tree(generator), random_tree(generator)
    opt = make(**options)
    # All optimizers share the code of `update`, and dynamo keeps only a few versions of one.
    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(opt.update, backend=count, fullgraph=True, dynamic=False)

    got = train(compiled, opt.init(params), params, [grad] * 3)

    expected = train(opt.update, opt.init(params), params, [grad] * 3)
    for tree, other in zip(got, expected, strict=True):
        assert_trees_equal(tree, other, rtol=1e-5, atol=1e-6)
    assert count.frame_count == 1


@each_rule
def test_pure(name, generator):
    """A step writes to none of its arguments."""
    make, _, options = RULES[name]
    params, grads = random_tree(generator), random_tree(generator)
    opt = make(**options)
    state = assert_pure(opt.init, params)
    params_after, state_after = assert_pure(opt.update, params, grads, state)

    assert_pure(opt.update, params_after, grads, state_after)


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rates", [torch.ones(()), torch.ones(MEMBERS), 1.0], ids=["one", "each", "number"])
def test_low_precision_follows_float32(name, dtype, rates, generator):
    """A step in 16 bits computes in float32, whatever kernel runs: torch 2.13's fused SGD in bfloat16 is wrong."""
    make, _, options = RULES[name]
    params = random_tree(generator)
    grads = [random_tree(generator) for _ in range(STEPS)]
    opt = make(**{**options, "lr": options["lr"] * rates})

    low, _ = train(opt.update, opt.init(params.to(dtype)), params.to(dtype), [grad.to(dtype) for grad in grads])

    full, _ = train(opt.update, opt.init(params), params, grads)
    assert low["out"].dtype is dtype
    torch.testing.assert_close(low["out"].float(), full["out"], rtol=0.1, atol=0.1)


def test_other_strides_are_right(generator):
    """Parameters and gradients of unlike strides are paired by index, which torch 2.13's fused kernels do not do."""
    params = TensorDict({"w": torch.randn(4, 3, generator=generator).t()})
    grads = TensorDict({"w": torch.randn(3, 4, generator=generator)})
    opt = adam(lr=0.1)
    expected = opt.update(params.apply(torch.Tensor.contiguous), grads, opt.init(params))[0]

    for other in (grads, grads.apply(lambda g: g.t().contiguous().t())):
        torch.testing.assert_close(opt.update(params, other, opt.init(params))[0]["w"], expected["w"])
        donated = TensorDict({"w": params["w"].t().clone().t()})
        torch.testing.assert_close(opt.update(donated, other, opt.init(params), donate=True)[0]["w"], expected["w"])


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_channels_last_is_kept(wrap, generator):
    """A step keeps the memory format of convolution weights."""
    weight, grad = torch.randn(2, 4, 3, 3, generator=generator), torch.randn(2, 4, 3, 3, generator=generator)
    opt = adam(lr=0.1)
    expected = opt.update(TensorDict({"w": weight}), TensorDict({"w": grad}), opt.init(TensorDict({"w": weight})))[0]

    params = TensorDict({"w": weight.to(memory_format=torch.channels_last)})
    moved, state = wrap(opt.update)(params, TensorDict({"w": grad}), opt.init(params))

    assert moved["w"].is_contiguous(memory_format=torch.channels_last)
    assert state["exp_avg", "w"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(moved["w"], expected["w"], rtol=0, atol=0)


def test_mixed_dtypes_step_together(generator):
    """Leaves of several dtypes step together, each in its own."""
    params = random_tree(generator)
    mixed = params.set("out", params["out"].double())
    grads = random_tree(generator)
    opt = adam(lr=0.1)

    got, _ = opt.update(mixed, grads.set("out", grads["out"].double()), opt.init(mixed))

    assert got["out"].dtype is torch.float64
    assert_leaves(
        got.set("out", got["out"].float()), opt.update(params, grads, opt.init(params))[0], rtol=1e-6, atol=1e-6
    )


def test_gradient_through_a_step(generator):
    """Gradients flow through an update, as in MAML."""
    params, grads = random_tree(generator, torch.float64), random_tree(generator, torch.float64)

    def inner(p, scale):
        opt = sgd(lr=0.1)
        return opt.update(p, grads.apply(lambda g: g * scale), opt.init(p))[0]["out"].sum()

    scale = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(torch.func.grad(inner, argnums=1)(params, scale), -0.1 * grads["out"].sum())
    torch.testing.assert_close(torch.func.grad(inner)(params, scale)["out"], torch.ones_like(params["out"]))


def test_parameters_stay_trainable(generator):
    """A leaf that requires grad is a leaf again after a step, without a graph that grows from step to step."""
    params = random_tree(generator).apply(lambda x: x.requires_grad_())
    opt = adam(lr=0.1)

    trained, state = opt.update(params, random_tree(generator), opt.init(params))

    assert trained["out"].requires_grad
    assert trained["out"].is_leaf
    assert not state["exp_avg", "out"].requires_grad


def test_schedule_sees_steps_done(generator):
    """A schedule is given the number of steps done, in traces too."""
    params = random_tree(generator)
    opt = sgd(lr=lambda step: 0.5**step)
    ones = params.apply(torch.ones_like)

    for update in (opt.update, jit(opt.update), torch.vmap(opt.update)):
        trained, state = train(update, opt.init(params), params, [ones] * 3)
        torch.testing.assert_close(trained["out"], params["out"] - 1.75)
        assert state["step"].tolist() == [3] * MEMBERS
