"""Each rule gives the numbers of torch.optim: for one tree, for stacked members, in transforms and traces."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tdfunc import TensorDict
from tdfunc._jit import jit
from tdfunc.optim import adagrad, adam, adamw, sgd
from tests.helpers import assert_trees_equal, quick
from tests.optim.table import (
    FAST,
    MEMBERS,
    RULES,
    WRAPPERS,
    assert_leaves,
    each_rule,
    make_optimizer,
    random_tree,
    rounds_steps,
    train,
    train_torch,
)

pytestmark = pytest.mark.sample(2)

STEPS = 12
FLAGS, BETAS = st.booleans(), st.sampled_from([0.0, 0.9, 0.999])
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


@given(rules(), DTYPES, st.sampled_from([(), (MEMBERS,)]), SEEDS)
def test_equals_torch_to_the_last_bit(rule, dtype, batch, generator):
    """A training run is that of torch.optim(fused=True)."""
    make, cls, options = rule
    params = random_tree(generator, dtype, batch)
    grads = [random_tree(generator, dtype, batch) for _ in range(STEPS)]
    opt = make(**options)

    trained, _ = train(opt.update, opt.init(params), params, grads)

    assert_leaves(trained, train_torch(cls, options, params, grads, fused=True)[0])


each_kernel = pytest.mark.parametrize(
    "make", [adam, adamw, adagrad, partial(sgd, momentum=0.9)], ids=["adam", "adamw", "adagrad", "sgd"]
)


def train_members(make, size, members, wrap, generator):
    """Learning rates, first parameters, gradients, and the weights of members that are trained together."""
    rates = torch.logspace(-3, -1, members, dtype=torch.float64)
    params = TensorDict({"w": torch.randn(members, size, generator=generator)}, [members])
    opt = make(lr=rates)
    grads = [params.apply(torch.randn_like) for _ in range(STEPS)]
    trained, _ = train(wrap(partial(opt.update, donate=True)), opt.init(params), params.clone(), grads)
    return rates, params, grads, trained["w"]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("members", [1, 2, 9])
@each_kernel
def test_a_small_member_is_rounded_alike_among_any_others(make, members, wrap, generator):
    """List arithmetic gives a small member what it gives a run of that member; in replays as well."""
    rates, params, grads, trained = train_members(make, 7, members, wrap, generator)

    alone = []
    for i in range(members):
        place, opt = slice(i, i + 1), make(lr=rates[i : i + 1])
        own, _ = train(opt.update, opt.init(params[place]), params[place], [grad[place] for grad in grads])
        alone.append(own["w"][0])
    torch.testing.assert_close(list(trained), alone, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("members", [1, 2, 9])
@each_kernel
def test_a_large_member_is_rounded_alike_among_any_others(make, members, wrap, generator):
    """One call of the kernel for each member gives it what one learning rate gives a tree; in replays as well."""
    rates, params, grads, trained = train_members(make, 1999, members, wrap, generator)

    alone = []
    for i in range(members):
        opt = make(lr=float(rates[i]))
        own, _ = train(opt.update, opt.init(params[i]), params[i], [grad[i] for grad in grads])
        alone.append(own["w"])
    torch.testing.assert_close(list(trained), alone, rtol=0, atol=0)


# A graph takes seconds to compile: one rule for the inner loop.
@pytest.mark.parametrize("name", quick([*RULES, *WRAPPERS], "adam"))
def test_compile_is_one_graph(name, generator):
    """`torch.compile(fullgraph=True)` compiles one graph, for any values."""
    params, grad = random_tree(generator, name=name), random_tree(generator, name=name)
    opt = make_optimizer(name)
    # All optimizers share the code of `update`, and dynamo keeps only a few versions of one.
    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(opt.update, backend=count, fullgraph=True, dynamic=False)

    got = train(compiled, opt.init(params), params, [grad] * 3)

    expected = train(opt.update, opt.init(params), params, [grad] * 3)
    assert_trees_equal(got, expected, rtol=1e-5, atol=1e-6)
    # A wrapper's counts may have other strides after the first step.
    assert count.frame_count <= 1 + (name in WRAPPERS)


@each_rule
@pytest.mark.parametrize(
    ("wrap", "donate"),
    [(jit, False), (lambda f: f, True), (jit, True)],
    ids=["jit", "donated", "donated, jit"],
)
def test_traces_and_donated_steps_equal_pure_ones(name, wrap, donate, generator):
    """A trace trains the same weights to the last bit; `donate=True` does it in the memory that was given."""
    params, *grads = [random_tree(generator, name=name) for _ in range(1 + STEPS)]
    opt, given = make_optimizer(name), params.clone()
    memory = given["out"].data_ptr()

    got = train(wrap(partial(opt.update, donate=donate)), opt.init(params), given, grads)

    assert_trees_equal(got, train(opt.update, opt.init(params), params, grads))
    assert (got[0]["out"].data_ptr() == memory) is donate


# A part of a vector of a CPU, whole ones, and both, in every dtype.
WIDTHS = [1, 4, 5, 8, 15, 16, 33, 64]


# Muon takes matrices only, and computes in bfloat16.
@rounds_steps
@pytest.mark.parametrize("name", quick([name for name in RULES if not name.startswith("muon")], *FAST))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rates", [1.0, pytest.param(torch.ones(()), marks=pytest.mark.slow), torch.ones(1)], ids=["number", "one", "each"]
)
def test_kernels_equal_the_plain_step(name, dtype, rates, generator):
    """A step by kernels is that of single operations, in any dtype: torch 2.13's fused SGD in 16 bits is wrong."""
    make, _, options = RULES[name]
    opt = make(**{**options, "lr": options["lr"] * rates})
    values = [torch.randn(len(WIDTHS), 1, 64, generator=generator).to(dtype) for _ in range(4)]
    params, *grads = [TensorDict({str(n): x[i, :, :n] for i, n in enumerate(WIDTHS)}, [1]) for x in values]

    found = train(opt.update, opt.init(params), params, grads)

    # Inside vmap there are no kernels.
    plain, tight = train(torch.vmap(opt.update), opt.init(params), params, grads), 4 * torch.finfo(dtype).eps
    assert_trees_equal(found, plain, rtol=tight, atol=tight)


@pytest.mark.parametrize("turn", [lambda g: g, lambda g: g.t().contiguous().t()], ids=["as they are", "turned"])
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_other_strides_are_right(wrap, donate, turn, generator):
    """Parameters and gradients of unlike strides are paired by index, which torch 2.13's fused kernels do not do."""
    params, grads = [TensorDict({key: torch.randn(3, 4, generator=generator) for key in "vw"}) for _ in range(2)]
    opt, expected = adam(lr=0.1), adam(lr=0.1).update(params, grads, adam(lr=0.1).init(params))[0]
    given = params.set("w", params["w"].t().contiguous().t())

    found, _ = wrap(partial(opt.update, donate=donate))(given, grads.apply(turn), opt.init(given))

    assert_trees_equal(found, expected, rtol=1e-6, atol=1e-6)


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
    params, grads = random_tree(generator), random_tree(generator)
    mixed = [tree.set("out", tree["out"].double()) for tree in (params, grads)]
    opt = adam(lr=0.1)

    got, _ = opt.update(*mixed, opt.init(mixed[0]))

    assert got["out"].dtype is torch.float64
    expected = opt.update(params, grads, opt.init(params))[0]
    assert_leaves(got.set("out", got["out"].float()), expected, rtol=1e-6, atol=1e-6)


TUNED = {
    "sgd": (sgd, {"lr": 0.1, "weight_decay": 0.3}),
    "momentum": (sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True}),
    "adam": (adam, {"lr": 0.1, "weight_decay": 0.3, "eps": 0.1}),
    "adamw": (adamw, {"lr": 0.1, "weight_decay": 0.3, "eps": 0.1, "amsgrad": True}),
    "eps_root": (adam, {"lr": 0.1, "weight_decay": 0.3, "eps_root": 1e-3}),
}


def tune(name):
    """Return parameters after three steps as a function of parameters, gradients and hyperparameters; and arguments."""
    make, options = TUNED[name]
    keys = [key for key in ("lr", "weight_decay", "momentum") if key in options]

    def run(w, g, *values):
        opt = make(**{**options, **dict(zip(keys, values, strict=True))})
        params, grads = TensorDict({"w": w}), TensorDict({"w": g})
        return train(opt.update, opt.init(params), params, [grads * scale for scale in (1, 2, -0.5)])[0]["w"]

    exact = lambda *x: torch.tensor(*x, dtype=torch.float64)  # noqa: E731
    # An entry of both that is 0 has second moments of 0.
    return run, [exact([1.0, 0.0, -2.0]), exact([0.3, 0.0, 2.0]), *[exact(options[key]) for key in keys]]


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TUNED)
def test_derivatives_of_steps(name, wrap):
    """The derivatives by parameters, gradients and hyperparameters are those of finite differences."""
    run, args = tune(name)

    jacobians = wrap(torch.func.jacrev(run, argnums=tuple(range(len(args)))))(*args)

    def slope(i, k):
        x = args[i]
        h = torch.zeros_like(x).reshape(-1).index_fill(0, torch.tensor(k), 1e-8).reshape(x.shape)
        ends = [run(*args[:i], x + sign * h, *args[i + 1 :]) for sign in (1, -1)]
        return (ends[0] - ends[1]) / 2e-8

    found = [jacobian.reshape(3, -1) for jacobian in jacobians]
    expected = [torch.stack([slope(i, k) for k in range(x.numel())], 1) for i, x in enumerate(args)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TUNED)
def test_hyperparameters_that_require_grad_are_differentiated(name):
    """`backward()` reaches hyperparameters through all steps, as torch.func.grad does, but not under no_grad."""
    run, (w, g, *values) = tune(name)
    needing = [value.clone().requires_grad_() for value in values]

    run(w, g, *needing).sum().backward()

    expected = torch.func.grad(lambda values: run(w, g, *values).sum())(tuple(values))
    torch.testing.assert_close([value.grad for value in needing], list(expected))
    with torch.no_grad():
        assert not run(w, g, *needing).requires_grad


@pytest.mark.parametrize("rule", [adam, adamw])
def test_each_member_has_its_own_eps_root(rule, generator):
    """A tensor with a value for each member, one of them 0, is as good as a number for each."""
    stack = TensorDict({"w": torch.randn(3, 4, generator=generator)}, [3])
    roots = [0.0, 1e-3, 1.0]

    def two_steps(tree, eps_root):
        opt = rule(lr=0.1, eps_root=eps_root)
        return train(opt.update, opt.init(tree), tree, [tree * 0.5, tree])[0]

    expected = torch.stack([two_steps(stack[i], root)["w"] for i, root in enumerate(roots)])
    torch.testing.assert_close(two_steps(stack, torch.tensor(roots))["w"], expected)


def test_nesterov_with_a_dampening_for_each_member_is_refused():
    """The error names the dampening, as for a number."""
    with pytest.raises(ValueError, match="nesterov is set without momentum, or with dampening"):
        sgd(0.1, momentum=0.9, nesterov=True, dampening=torch.tensor([0.0, 0.1]))


@pytest.mark.parametrize("rule", [adam, adamw])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_eps_root_is_added_under_the_root(rule, amsgrad, generator):
    """A step divides by sqrt(v + eps_root) + eps, with v the average square without bias."""
    params, grads = [random_tree(generator, torch.float64).select("out") for _ in range(2)]
    opt = rule(lr=0.1, eps=0.01, eps_root=0.5, weight_decay=0.0, amsgrad=amsgrad)

    trained, _ = train(opt.update, opt.init(params), params, [grads, grads * 0.5])

    x, g = params["out"], grads["out"]
    m, v = (0.9 * 0.1 + 0.1 * 0.5) * g / (1 - 0.9**2), (0.999 + 0.25) * 0.001 * g**2 / (1 - 0.999**2)
    expected = x - 0.1 * g / ((g**2 + 0.5).sqrt() + 0.01) - 0.1 * m / ((v + 0.5).sqrt() + 0.01)
    torch.testing.assert_close(trained["out"], expected, rtol=1e-12, atol=1e-12)
