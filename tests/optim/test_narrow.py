"""Parameters of 16 bits: what a state keeps is that of float64, whatever the dtype and the size of the gradients."""

import warnings
from functools import partial

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict, optim
from tests.helpers import assert_trees_equal, quick
from tests.optim.table import RULES, WRAPPERS, each_rule, each_wrapper, random_tree, rounds_steps, train

LOW = [torch.bfloat16, torch.float16]
each_low = pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
# Of these the state depends on the parameters, which are rounded.
READS_PARAMS = ("asgd",)
# Steps of a run, each with a scale for its gradient and a sign.
COURSES = {
    "a large gradient long ago": [(1.0 if i < 20 else 0.01, 1) for i in range(300)],
    "near zero": [(1e-4, 1)] * 100,
    "opposite signs": [(1.0, (-1) ** i) for i in range(100)],
    "huge": [(300.0, 1)] * 20,
}
each_course = pytest.mark.parametrize("course", COURSES)
pytestmark = [pytest.mark.sample(9), rounds_steps]


def make_rule(name):
    """Return the rule of a row without the options by which its state depends on the parameters."""
    make, _, options = RULES[name]
    return make(**{key: value for key, value in options.items() if key != "weight_decay"})


def make_course(grad, course):
    """Return the gradients of a course."""
    return [grad * (scale * sign) for scale, sign in COURSES[course]]


def own_rules():
    """The rules that keep something, and whose state depends on gradients only."""
    names = [name for name in RULES if make_rule(name).rule.slots and not name.startswith(READS_PARAMS)]
    return pytest.mark.parametrize("name", quick(names, "momentum", "adam", "adagrad", "rmsprop centered", "muon"))


@own_rules()
@each_low
@each_course
def test_moments_of_16_bit_parameters_are_those_of_float64(name, dtype, course, generator):
    """Running averages and sums follow the formula, also where a factor such as 0.999 is 1 in the parameters' dtype."""
    opt = make_rule(name)
    params, grad = [random_tree(generator, name=name).to(dtype) for _ in range(2)]
    exact = make_course(grad, course)

    _, state = train(opt.update, opt.init(params), params, exact)

    wide = params.double()
    _, expected = train(opt.update, opt.init(wide), wide, [one.double() for one in exact])
    slots = opt.rule.slots
    assert_trees_equal(
        {slot: state[slot].double() for slot in slots}, {slot: expected[slot] for slot in slots}, rtol=2e-4, atol=1e-12
    )


@own_rules()
@each_low
@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit, torch.vmap], ids=["eager", "jit", "vmap"])
def test_a_state_is_kept_in_float32(name, dtype, wrap, generator):
    """The state before and after a step is of float32, and the parameters stay in their dtype."""
    opt = make_rule(name)
    params, grads = [random_tree(generator, name=name).to(dtype) for _ in range(2)]
    start = opt.init(params)

    trained, state = wrap(opt.update)(params, grads, start)

    kept = [leaf.dtype for tree in (start, state) for slot in opt.rule.slots for leaf in tree[slot].leaves()]
    assert set(kept) == {torch.float32}
    assert {leaf.dtype for leaf in trained.leaves()} == {dtype}


@each_rule
@pytest.mark.parametrize(("dtype", "wrap"), [(torch.bfloat16, tdf.jit), (torch.float16, lambda f: f)])
def test_16_bits_are_computed_in_32(name, dtype, wrap, generator):
    """A step of 16-bit leaves is that of float32, rounded."""
    make, _, options = RULES[name]
    params, grads = [random_tree(generator, name=name).to(dtype) for _ in range(2)]
    opt = make(**options)

    trained, state = wrap(opt.update)(params, grads, opt.init(params))

    wide = params.float()
    expected, wide_state = opt.update(wide, grads.float(), opt.init(wide))
    assert_trees_equal(trained, expected.to(dtype))
    assert_trees_equal(state, wide_state)


@own_rules()
@each_low
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit, torch.vmap], ids=["eager", "jit", "vmap"])
def test_a_state_in_16_bits_continues_in_float32(name, dtype, donate, wrap, generator, tmp_path):
    """The file of an older version, with a state in the dtype of its parameters, loads and is widened by a step."""
    opt = make_rule(name)
    params, *grads = [random_tree(generator, name=name).to(dtype) for _ in range(3)]
    _, state = opt.update(params, grads[0], opt.init(params))
    old = state.update({slot: state[slot].to(dtype) for slot in opt.rule.slots})
    tdf.save(old, tmp_path / "state.safetensors")

    back = tdf.load(tmp_path / "state.safetensors")
    _, found = wrap(partial(opt.update, donate=donate))(params.clone(), grads[1], back)

    wide = old.update({slot: old[slot].float() for slot in opt.rule.slots})
    _, expected = opt.update(params, grads[1], wide)
    assert_trees_equal(found, expected, rtol=1e-5, atol=1e-6)


def test_a_state_of_float32_parameters_is_not_of_16_bits(generator):
    """Only 16-bit parameters take a narrow state: another dtype is a mistake."""
    opt = optim.adam()
    params = random_tree(generator)
    state = opt.init(params)

    with pytest.raises(tdf.LeafMismatchError, match="exp_avg of 'block.bias'"):
        opt.update(params, params, state.set("exp_avg", state["exp_avg"].bfloat16()))


@each_rule
def test_rules_warn_of_rounded_parameters(name, generator):
    """A rule says at its start that parameters of 16 bits lose small steps, and what keeps them."""
    opt = make_rule(name)
    params = random_tree(generator, torch.bfloat16, name=name)

    with pytest.warns(UserWarning, match=rf"{opt.rule.name}: rounding parameters(.|\n)*masters\({opt.rule.name}"):
        opt.init(params)


@pytest.mark.parametrize("make", [optim.masters, optim.schedule_free], ids=["masters", "schedule_free"])
def test_optimizers_that_keep_the_rounding_do_not_warn(make, generator):
    """`masters` and `schedule_free` keep what rounding cuts off."""
    params = random_tree(generator, torch.bfloat16)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = make(optim.adam()).init(params)

    assert {leaf.dtype for leaf in state["rest"].leaves()} == {torch.float32}


# Muon computes in bfloat16.
@pytest.mark.parametrize(
    "name", quick([name for name in RULES if not name.startswith("muon")], "adam", "asgd", "rprop")
)
@each_low
@each_course
def test_masters_follow_the_formula(name, dtype, course, generator):
    """Inside `masters` the parameters are those of a run in float64 by the same gradients."""
    opt = make_rule(name)
    params, grad = [random_tree(generator).to(dtype) for _ in range(2)]
    exact = make_course(grad, course)
    outer = optim.masters(opt)

    trained, state = train(outer.update, outer.init(params), params, exact)

    wide = params.double()
    expected, _ = train(opt.update, opt.init(wide), wide, [one.double() for one in exact])
    assert_trees_equal(outer.eval_params(trained, state).double(), expected, rtol=2e-3, atol=2e-3)


@each_low
@each_course
def test_schedule_free_follows_the_formula(dtype, course, generator):
    """Points, steps and their average are those of float64, where steps are smaller than roundings of the points."""
    opt = optim.schedule_free(optim.adamw(1e-3, (0.0, 0.99), weight_decay=0.0))
    params, grad = [random_tree(generator).to(dtype) for _ in range(2)]
    exact = make_course(grad, course)

    trained, state = train(opt.update, opt.init(params), params, exact)

    wide = params.double()
    points, kept = train(opt.update, opt.init(wide), wide, [one.double() for one in exact])
    ulp = torch.finfo(dtype).eps
    average = opt.eval_params(trained, state)
    assert_trees_equal(average.double(), opt.eval_params(points, kept), rtol=ulp, atol=1e-5)


@each_low
def test_schedule_free_continues_an_older_state(dtype, generator):
    """A state whose points were kept in 16 bits, without the rest of the parameters, is widened."""
    opt = optim.schedule_free(optim.adamw(1e-3, (0.0, 0.99)))
    params, grad = [random_tree(generator).to(dtype) for _ in range(2)]
    _, state = opt.update(params, grad, opt.init(params))
    data = {key: node for key, node in state.items() if key != "rest"}
    data |= {"z": state["z"].to(dtype)}
    moments = {slot: state["optimizer", slot].to(dtype) for slot in ("exp_avg", "exp_avg_sq")}
    data["optimizer"] = state["optimizer"].update(moments)
    old = TensorDict(data, [3])

    new, after = opt.update(params, grad, old)

    wide = {"z": data["z"].float(), "rest": state["rest"] * 0}
    wide["optimizer"] = data["optimizer"].update({slot: x.float() for slot, x in moments.items()})
    expected, expected_state = opt.update(params, grad, state.update(wide))
    assert_trees_equal(new, expected)
    assert_trees_equal(after, expected_state)


@pytest.mark.parametrize("wrap", [lambda f: f, torch.vmap, tdf.jit], ids=["eager", "vmap", "jit"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_a_centered_variance_is_never_negative(wrap, dtype, size, generator):
    """Gradients that stay the same have a variance near 0, and every step goes down their slope."""
    opt = optim.rmsprop(1e-3, alpha=0.9, centered=True)
    grads = TensorDict({"w": torch.rand(1, 300, generator=generator) + 0.1}, [1]).mul(size).to(dtype)
    params = TensorDict({"w": torch.zeros(1, 300, dtype=dtype)}, [1])
    state, step = opt.init(params), wrap(opt.update)
    for _ in range(120):
        params, state = step(params, grads, state)

    assert (state["variance", "w"] >= 0).all()
    assert (params["w"] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_a_centered_variance_follows_the_formula(dtype, spread, generator):
    """It is the mean of squares minus the squared mean in float64, also where both are far larger than it."""
    opt = optim.rmsprop(1e-3, alpha=0.9, centered=True)
    params = TensorDict({"w": torch.zeros(50, dtype=dtype)})
    noise = torch.randn(100, 50, generator=generator)
    grads = (1 + spread * noise).to(dtype)
    _, state = train(opt.update, opt.init(params), params, [TensorDict({"w": row}) for row in grads])

    mean = square = torch.zeros(50, dtype=torch.float64)
    for row in grads.double():
        mean = 0.9 * mean + 0.1 * row
        square = 0.9 * square + 0.1 * row.square()
    torch.testing.assert_close(state["variance", "w"].double(), square - mean.square(), rtol=1e-3, atol=1e-12)


def test_a_centered_state_of_an_older_version_continues(generator):
    """A state with the mean of squares in place of the variance is read as the variance that it means."""
    opt = optim.rmsprop(1e-2, alpha=0.9, centered=True, momentum=0.9)
    params, *grads = [random_tree(generator, torch.float64) for _ in range(6)]
    half, state = train(opt.update, opt.init(params), params, grads[:3])
    squares = state["variance"] + state["grad_avg"] * state["grad_avg"]
    old = state.exclude("variance").set("square_avg", squares)

    found = train(opt.update, old, half, grads[3:])

    assert_trees_equal(found, train(opt.update, state, half, grads[3:]), rtol=1e-9, atol=1e-9)


@each_low
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 300.0])
def test_the_step_uphill_of_sam_follows_the_formula(dtype, adaptive, size, generator):
    """Squared sizes and the inverse of a small norm leave the range of 16 bits; the point uphill does not."""
    params = TensorDict({"w": torch.randn(20, generator=generator) * 20, "b": torch.randn((), generator=generator)})
    grads = params.apply(lambda x: torch.randn(x.shape, generator=generator) * size).to(dtype)
    params = params.to(dtype)
    seen = []
    uphill = optim.sam(lambda p: seen.append(p) or grads.to(p["w"].dtype), rho=0.5, adaptive=adaptive)

    uphill(params)
    uphill(params.double())

    assert_trees_equal(seen[1].double(), seen[3], rtol=torch.finfo(dtype).eps, atol=1e-6)


@each_wrapper
@each_low
def test_states_of_wrappers_hold_no_16_bits(name, dtype, generator):
    """Whatever a wrapper averages, sums or keeps is of float32."""
    opt = WRAPPERS[name]()
    params, grads = [random_tree(generator).to(dtype) for _ in range(2)]

    _, state = opt.update(params, grads, opt.init(params))

    narrow = [path for path, leaf in zip(state.paths(), state.leaves(), strict=True) if leaf.dtype in LOW]
    assert narrow == []
