"""Optimizers around others, and maps of gradients: optax 0.2.8, plain loops, members, transforms and files."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import TensorDict, optim
from tests.helpers import assert_trees_equal
from tests.optim.table import WRAPPERS, each_wrapper, random_tree, rounds_steps, train

START = TensorDict(
    {
        "b": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "w": torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]], dtype=torch.float64),
    }
)


def gradient(params, i):
    """A gradient that is no constant."""
    return TensorDict({"b": torch.cos(params["b"] * (i + 1)), "w": torch.sin(3 * params["w"] + i)})


def flat(params):
    """The elements of all leaves."""
    return torch.cat([params["b"], params["w"].flatten()]).tolist()


# An optimizer, a number of steps, and the parameters that optax trains and evaluates; None is not compared.
OPTAX = {
    "lion": (
        optim.lion(0.05, (0.8, 0.95), 0.1), 9,
        [0.80589955, -1.86274705, 0.33088789, -0.90783517, 1.76425423, 1.48385402, 0.04218509, -0.5220658], None,
    ),
    "schedule_free sgd": (
        optim.schedule_free(optim.sgd(0.1)), 9,
        [1.01878721, -1.9351807, 0.37124256, -0.91759029, 1.91294805, 1.55531909, 0.14249467, -0.62425236],
        [1.01575523, -1.93769011, 0.38006065, -0.9255684, 1.91617762, 1.54948592, 0.15166546, -0.63153469],
    ),
    "schedule_free adamw": (
        optim.schedule_free(optim.adamw(0.05, (0.0, 0.99), weight_decay=0.1), 0.8), 9,
        [0.98134904, -1.86577104, 0.42693235, -0.87039676, 1.90105202, 1.49232623, 0.20081255, -0.6288421],
        [0.98539552, -1.88071933, 0.44001487, -0.885581, 1.9135116, 1.48883172, 0.21471425, -0.64146707],
    ),
    "accumulate": (
        optim.accumulate(optim.adam(0.1), 3), 9,
        [1.09794981, -1.71822768, 0.39659962, -0.87728016, 1.83772112, 1.64483719, 0.17557867, -0.56280292], None,
    ),
    "decay": (
        optim.chain(optim.clip_by_global_norm(0.5), optim.add_decayed_weights(0.1, "w"), optim.sgd(0.1, 0.9)), 9,
        [1.03623976, -1.96071828, 0.23172326, -0.5410518, 1.24252766, 1.07106677, 0.07022804, -0.33125048], None,
    ),
    "ema": (
        optim.ema(optim.sgd(0.1), 0.9), 9, None,
        [0.89790623, -1.90787358, 0.33965236, -0.98007172, 1.87167069, 1.50383579, 0.11017484, -0.67967782],
    ),
    "lookahead": (
        optim.lookahead(optim.sgd(0.1), 3), 8,
        [0.83524101, -1.90072179, 0.27559335, -0.97475081, 1.97190439, 1.59436097, 0.1157744, -0.60639189],
        [0.98102138, -1.95082045, 0.46132359, -1.02128598, 1.95435677, 1.43157202, 0.26158482, -0.75965618],
    ),
}  # fmt: skip
SAM = [0.86363346, -1.9413884, 0.23501626, -0.94836245, 1.81723953, 1.53401012, 0.00013232, -0.63300891]


def run(opt, steps=9):
    """Train for some steps and return params and state."""
    params, state = START, opt.init(START)
    for i in range(steps):
        params, state = opt.update(params, gradient(params, i), state)
    return params, state


def optax_cases(column):
    """The rows of `OPTAX` that have the numbers of a column: an optimizer, a count of steps, the numbers."""
    return [pytest.param(*row[:2], row[column], id=name) for name, row in OPTAX.items() if row[column] is not None]


in_a_chain = pytest.mark.parametrize(
    "wrap",
    [lambda opt: opt, lambda opt: optim.chain(optim.clip_by_global_norm(math.inf), opt)],
    ids=["alone", "in a chain"],
)


@in_a_chain
@pytest.mark.parametrize(("opt", "steps", "trained"), optax_cases(2))
def test_trained_parameters_are_those_of_optax(opt, steps, trained, wrap):
    """Steps give optax's numbers to train, through a chain as well."""
    params, _ = run(wrap(opt), steps)

    assert flat(params) == pytest.approx(trained, abs=1e-7)


@in_a_chain
@pytest.mark.parametrize(("opt", "steps", "evaluated"), optax_cases(3))
def test_evaluated_parameters_are_those_of_optax(opt, steps, evaluated, wrap):
    """Steps give optax's numbers to evaluate, through a chain as well."""
    each = wrap(opt)

    assert flat(each.eval_params(*run(each, steps))) == pytest.approx(evaluated, abs=1e-7)


def test_sam_is_that_of_optax():
    """The gradient is taken a step uphill."""
    params, opt = START, optim.sgd(0.1)
    state = opt.init(params)
    for i in range(9):
        params, state = opt.update(params, optim.sam(gradient, 0.2)(params, i), state)

    assert flat(params) == pytest.approx(SAM, abs=1e-7)


@pytest.mark.parametrize("scheduled", [True, False])
def test_schedule_free_is_its_paper(scheduled):
    """The average is a mean of z, gradients are taken in between, and squares of the largest rate are the weights."""
    rates, beta = torch.tensor([0.3, 0.1, 0.4, 0.2, 0.2], dtype=torch.float64), 0.7
    opt = optim.schedule_free(optim.sgd(rates.__getitem__ if scheduled else rates[0]), beta)
    params, state = START, opt.init(START)
    x = y = z = START["w"]
    total = top = 0.0
    for i, rate in enumerate(rates):
        state = state if scheduled else state.set(("optimizer", "lr"), rate)
        params, state = opt.update(params, gradient(params, i), state)
        z = z - rate * torch.sin(3 * y + i)
        top = max(top, rate)
        total += top**2
        x = x + top**2 / total * (z - x)
        y = (1 - beta) * z + beta * x

    torch.testing.assert_close(params["w"], y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(opt.eval_params(params, state)["w"], x, rtol=1e-12, atol=1e-12)


@given(clipping=st.sampled_from([0.0, 0.05, 1.0, 100.0]), seed=st.integers(0, 99))
def test_adaptive_clip_is_that_of_a_loop(clipping, seed):
    """Each unit's gradient is clipped by the norm of its weights, each member's by itself."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"bias": (4,), "conv": (3, 2, 2, 2), "one": (), "weight": (4, 3)}
    make = lambda: TensorDict(  # noqa: E731
        {key: torch.randn(2, *s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}, [2]
    )
    params, grads = make(), make()

    clipped = optim.adaptive_grad_clip(clipping)(grads, params)

    for i in range(2):
        for key, shape in shapes.items():
            units = range(shape[0]) if len(shape) > 1 else [...]
            for unit in units:
                g, w, out = grads[key][i][unit], params[key][i][unit], clipped[key][i][unit]
                most = clipping * max(w.norm().item(), 1e-3)
                torch.testing.assert_close(out, g * min(1.0, most / g.norm().item()), rtol=1e-12, atol=1e-12)
    mapped = torch.vmap(lambda g, p: optim.adaptive_grad_clip(clipping)(g, p))(grads, params)
    assert_trees_equal(mapped, clipped, rtol=1e-12, atol=1e-12)


def test_added_decay_is_that_of_the_rule(generator):
    """`chain(add_decayed_weights(d), sgd())` is `sgd(weight_decay=d)`."""
    params, *grads = [random_tree(generator) for _ in range(4)]
    opt, other = optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1, 0.9)), optim.sgd(0.1, 0.9, weight_decay=0.1)

    found, _ = train(opt.update, opt.init(params), params, grads)

    assert_trees_equal(found, train(other.update, other.init(params), params, grads)[0], rtol=1e-6, atol=1e-6)


@rounds_steps
@each_wrapper
@pytest.mark.parametrize(
    ("dtype", "close"),
    [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 0.05, marks=pytest.mark.slow)],
)
def test_members_jit_and_vmap_equal_the_loop(name, dtype, close, generator):
    """A stack, a trace of it, a donated run and a run by vmap train each member as if it were alone."""
    opt = WRAPPERS[name]()
    params, *grads = [random_tree(generator).to(dtype) for _ in range(6)]
    donating = lambda p, g, s: opt.update(p, g, s, donate=True)  # noqa: E731
    start = opt.init(params)

    stacked = train(opt.update, start, params, grads)
    mapped = train(torch.vmap(opt.update), torch.vmap(opt.init)(params), params, grads)
    others = {
        "traced": train(tdf.jit(opt.update), start, params, grads),
        "donated": train(donating, start.clone(), params.clone(), grads),
        "donated and traced": train(tdf.jit(donating), start.clone(), params.clone(), grads),
    }
    assert_trees_equal(others, dict.fromkeys(others, stacked))

    alone = [train(opt.update, opt.init(params[i]), params[i], [grad[i] for grad in grads]) for i in range(3)]
    found = [[(trained[i], opt.eval_params(trained, rows)[i]) for i in range(3)] for trained, rows in (stacked, mapped)]
    expected = [(trained, opt.eval_params(trained, own)) for trained, own in alone]
    assert_trees_equal(found, [expected, expected], rtol=close, atol=close)


@each_wrapper
def test_donated_parameters_are_overwritten(name, generator):
    """They are trained in place, except where the step is added to an average."""
    opt = WRAPPERS[name]()
    given, *grads = [random_tree(generator) for _ in range(4)]
    before = given.clone()

    train(partial(opt.update, donate=True), opt.init(given), given, grads)

    assert torch.equal(given["out"], before["out"]) is (name == "schedule_free")


@each_wrapper
def test_leaves_that_require_grad_stay_leaves(name, generator):
    """Steps of live parameters grow no graph."""
    opt = WRAPPERS[name]()
    params = random_tree(generator).apply(lambda x: x.requires_grad_())

    trained, state = train(opt.update, opt.init(params), params, [random_tree(generator) for _ in range(3)])

    assert all(leaf.requires_grad and leaf.is_leaf for leaf in trained.leaves())
    assert not any(leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(state))


@each_wrapper
def test_a_learning_rate_is_learned_through_it(name, generator):
    """`torch.func.grad` and `backward()` reach hyperparameters through several steps."""
    params, *grads = [random_tree(generator, torch.float64) for _ in range(7)]
    make = {
        "accumulate": lambda lr: optim.accumulate(optim.sgd(lr), 3),
        "apply_if_finite": lambda lr: optim.apply_if_finite(optim.sgd(lr), 2),
        "lookahead": lambda lr: optim.lookahead(optim.sgd(lambda step: lr), 2),
        "schedule_free": lambda lr: optim.schedule_free(optim.sgd(lambda step: lr * (step > 1))),
    }.get(name, lambda lr: optim.ema(optim.masters(optim.sgd(lr)), 0.9))

    def after(lr):
        opt = make(lr)
        trained, state = train(opt.update, opt.init(params), params, grads)
        return sum(leaf.square().sum() for leaf in opt.eval_params(trained, state).leaves())

    rate, h = torch.tensor(0.1, dtype=torch.float64), 1e-6
    slope = (after(rate + h) - after(rate - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(after)(rate), slope, rtol=1e-6, atol=1e-6)
    live = rate.clone().requires_grad_()
    after(live).backward()
    torch.testing.assert_close(live.grad, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("wrap", "wrap_init"),
    [(lambda f: f, lambda f: f), (tdf.jit, lambda f: f), (torch.vmap, torch.vmap)],
    ids=["eager", "jit", "vmap"],
)
def test_steps_of_nan_are_skipped_by_member(wrap, wrap_init):
    """A member with a nan or infinity stays; after too many in a row they are applied."""
    opt = optim.apply_if_finite(optim.sgd(1.0), 2)
    update = wrap(opt.update)
    params = TensorDict({"w": torch.zeros(3, 2), "v": torch.zeros(3)}, [3])
    state = wrap_init(opt.init)(params)
    bad = TensorDict({"w": torch.ones(3, 2), "v": torch.tensor([1.0, math.nan, math.inf])}, [3])
    weights, steps, totals = [], [], []
    for _ in range(3):
        params, state = update(params, bad, state)
        weights.append(params["w"][:, 0].tolist())
        steps.append(state["optimizer", "step"].tolist())
        totals.append(state["total"].tolist())

    assert weights == [[-1, 0, 0], [-2, 0, 0], [-3, -1, -1]]
    assert steps[:2] == [[1, 0, 0], [2, 0, 0]]
    assert totals[:2] == [[0, 1, 1], [0, 2, 2]]
    assert state["consecutive"].tolist() == [0, 3, 3]
    assert update(params, torch.zeros_like(bad), state)[1]["consecutive"].tolist() == [0, 0, 0]


def test_inactive_members_are_no_steps_of_finite_gradients():
    """`active` and the check of the gradients choose together."""
    opt, params = optim.apply_if_finite(optim.sgd(1.0), 2), TensorDict({"w": torch.zeros(3)}, [3])
    grads = TensorDict({"w": torch.tensor([1.0, 1.0, math.nan])}, [3])
    new, _ = opt.update(params, grads, opt.init(params), active=torch.tensor([True, False, True]))

    assert new["w"].tolist() == [-1.0, 0.0, 0.0]


CLIPPED = optim.chain(optim.clip_by_global_norm(5.0), optim.sgd(1.0))
FINE = torch.tensor([True, False, True])
# name -> (optimizer, active)
LEFT_OUT = {
    "active": (CLIPPED, FINE),
    "a skipped step": (optim.apply_if_finite(CLIPPED, 2), None),
    "a sum": (optim.accumulate(CLIPPED, 1), FINE),
    "a group": (optim.multi({"*": CLIPPED}), FINE),
}


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_member_without_a_step_is_not_in_the_common_norm(name, wrap):
    """Its NaN would be the gradient of all others."""
    opt, active = LEFT_OUT[name]
    params = TensorDict({"w": torch.zeros(3)}, [3])
    grads = TensorDict({"w": torch.tensor([6.0, math.nan, 8.0])}, [3])
    update = wrap(lambda *args: opt.update(*args[:3], active=args[3]))
    new, _ = update(params, grads, opt.init(params), active)

    torch.testing.assert_close(new["w"], torch.tensor([-3.0, 0.0, -4.0]))


@rounds_steps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_a_run_in_float32(dtype, generator):
    """Their float32 parameters are those of a run in float32 by the same gradients, to the last bit."""
    start, *grads = [random_tree(generator).to(dtype) for _ in range(50)]
    opt, wide = optim.masters(optim.adamw(1e-4)), optim.adamw(1e-4)

    trained, state = train(opt.update, opt.init(start), start, grads)
    expected, _ = train(wide.update, wide.init(start.float()), start.float(), [grad.float() for grad in grads])

    assert_trees_equal(opt.eval_params(trained, state), expected)
    assert_trees_equal(trained, expected.to(dtype))
    # 16 bits alone lose such steps.
    assert not torch.equal(train(wide.update, wide.init(start), start, grads)[0]["out"], trained["out"])


@rounds_steps
def test_masters_of_mixed_leaves(generator):
    """Leaves of 32 and 64 bits are trained as without masters; ties stay; a change in between is kept."""
    shared = torch.randn(4, generator=generator).to(torch.bfloat16)
    params = TensorDict({"a": torch.randn(3, generator=generator), "d": torch.randn(2, dtype=torch.float64)})
    params = params.set("t", shared)
    opt, plain = optim.masters(optim.adam(0.1)), optim.adam(0.1)

    new, state = opt.update(params, params, opt.init(params))
    again, _ = opt.update(new.set("t", new["t"] + 8), params, state)

    expected = plain.update(params, params, plain.init(params))[0]
    torch.testing.assert_close((new["a"], new["d"]), (expected["a"], expected["d"]), rtol=0, atol=0)
    assert state["rest"].paths() == [("t",)]
    assert (again["t"] > 6).all()


def test_ema_is_that_of_torch(generator):
    """Without debias it is torch's AveragedModel; the first average with it is the parameters themselves."""
    model = torch.nn.Linear(3, 2)
    params = tdf.from_module(model).detach().clone()
    other = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    other.update_parameters(model)
    opt, debiased = optim.ema(optim.sgd(0.1), 0.9, debias=False), optim.ema(optim.sgd(0.1), 0.9)
    state, own = opt.init(params), debiased.init(params)
    assert_trees_equal(debiased.eval_params(params, own), params)
    first, one = debiased.update(params, params, own)
    torch.testing.assert_close(debiased.eval_params(first, one)["weight"], first["weight"])
    for _ in range(5):
        params, state = opt.update(params, params, state)
        params.to_module(model)
        other.update_parameters(model)

    torch.testing.assert_close(opt.eval_params(params, state)["weight"], other.module.weight.detach())


def averages(opt, params, grads):
    """The parameters after each step, and the average after the last one."""
    state, seen = opt.init(params), []
    for grad in grads:
        params, state = opt.update(params, grad, state)
        seen.append(params)
    return seen, opt.eval_params(params, state)


@given(seed=st.integers(0, 2**32), decays=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_a_schedule_of_ema_gives_a_weighted_mean(seed, decays):
    """Of the parameters after each step, whose weights have the sum 1; without a weight they are the last ones."""
    generator = torch.Generator().manual_seed(seed)
    params = random_tree(generator, torch.float64)
    grads = [random_tree(generator, torch.float64) for _ in decays]
    table = torch.tensor(decays, dtype=torch.float64)
    seen, average = averages(optim.ema(optim.sgd(0.1), lambda count: table[count]), params, grads)

    weights = [(1 - d) * math.prod(decays[i + 1 :]) for i, d in enumerate(decays)]
    if sum(weights) < 1e-9:
        return
    expected = sum([tree * (weight / sum(weights)) for tree, weight in zip(seen, weights, strict=True)])
    assert_trees_equal(average, expected, rtol=1e-9, atol=1e-9)


def test_ema_without_a_weight_so_far_evaluates_the_parameters(generator):
    """A schedule that begins with a decay of 1 averages nothing."""
    params = random_tree(generator)
    seen, average = averages(optim.ema(optim.sgd(0.1), lambda count: 1.0), params, [params] * 2)

    assert_trees_equal(average, seen[-1])


def test_a_state_of_ema_of_an_older_version_goes_on(generator):
    """It has no weight, and one decay gives it."""
    opt, params = optim.ema(optim.sgd(0.1), 0.9), random_tree(generator)
    params, state = train(opt.update, opt.init(params), params, [params] * 3)

    old = train(opt.update, state.delete("weight"), params, [params] * 2)

    new = train(opt.update, state, params, [params] * 2)
    assert_trees_equal(opt.eval_params(*old), opt.eval_params(*new), rtol=1e-6, atol=1e-6)


def test_ema_evaluates_a_state_of_an_older_version(generator):
    """Before its next step."""
    opt, params = optim.ema(optim.sgd(0.1), 0.9), random_tree(generator)
    params, state = train(opt.update, opt.init(params), params, [params] * 3)

    average = opt.eval_params(params, state.delete("weight"))

    assert_trees_equal(average, opt.eval_params(params, state), rtol=1e-6, atol=1e-6)


def test_ema_inside_of_accumulate_counts_steps(generator):
    """An average inside of `accumulate` counts the steps that are taken."""
    opt, params = optim.accumulate(optim.ema(optim.sgd(0.1), 0.9), 4), random_tree(generator)

    _, state = train(opt.update, opt.init(params), params, [params] * 8)

    assert state["optimizer", "count"].tolist() == [2] * 3


def test_ema_around_accumulate_counts_gradients(generator):
    """An average around `accumulate` counts the gradients that are given."""
    opt, params = optim.ema(optim.accumulate(optim.sgd(0.1), 4), 0.9), random_tree(generator)

    _, state = train(opt.update, opt.init(params), params, [params] * 8)

    assert state["count"].tolist() == [8] * 3


def means_of(grads, numbers):
    """The mean of the first gradients, of the next ones, and so on, by a plain loop; an incomplete one is left out."""
    grads, means = list(grads), []
    for number in numbers:
        if len(grads) < number:
            break
        means.append(sum(grads[1:number], grads[0]) / number)
        grads = grads[number:]
    return means, grads


@given(seed=st.integers(0, 2**32), numbers=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_schedule_of_accumulate_counts_steps(seed, numbers):
    """Step i is by the mean of as many gradients as the schedule says for i steps done."""
    generator = torch.Generator().manual_seed(seed)
    params = random_tree(generator, torch.float64)
    grads = [random_tree(generator, torch.float64) for _ in range(sum(numbers))]
    table, inner = torch.tensor(numbers + [99]), optim.adam(0.1)
    opt = optim.accumulate(inner, lambda steps: table[steps])

    new, _ = train(opt.update, opt.init(params), params, grads)

    means, _ = means_of(grads, numbers)
    assert_trees_equal(new, train(inner.update, inner.init(params), params, means)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_a_flush_is_a_step_by_the_mean_so_far(count, wrap, generator):
    """Nothing where there are no gradients: after 4 of them with a step for every 2."""
    params, inner = random_tree(generator, torch.float64), optim.adam(0.1)
    grads = [random_tree(generator, torch.float64) for _ in range(count)]
    opt = optim.accumulate(inner, 4)

    new, _ = wrap(opt.flush)(*train(opt.update, opt.init(params), params, grads))

    means, rest = means_of(grads, [4])
    means += means_of(rest, [len(rest)])[0] if rest else []
    assert_trees_equal(new, train(inner.update, inner.init(params), params, means)[0], rtol=1e-12, atol=1e-12)


def test_a_flush_leaves_an_empty_state(generator):
    """The next step is by its own gradients alone."""
    params, opt = random_tree(generator), optim.accumulate(optim.sgd(0.1), 2)
    params, state = train(opt.update, opt.init(params), params, [params])

    _, state = opt.flush(params, state)

    assert state["count"].tolist() == [0] * 3
    assert all(not leaf.any() for leaf in state["sum"].leaves())


def test_a_flush_of_some_members(generator):
    """The others keep their gradients."""
    params, opt = random_tree(generator), optim.accumulate(optim.sgd(0.1), 2)
    params, state = train(opt.update, opt.init(params), params, [params])

    new, after = opt.flush(params, state, active=torch.tensor([True, False, True]))

    assert after["count"].tolist() == [0, 1, 0]
    assert_trees_equal(new[1], params[1])


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit], ids=["eager", "jit"])
def test_members_accumulate_by_schedules_of_their_own(wrap, generator):
    """A schedule may give each member its own number."""
    params = random_tree(generator, torch.float64)
    grads = [random_tree(generator, torch.float64) for _ in range(6)]
    numbers, inner = torch.tensor([1, 2, 3]), optim.adam(0.1)
    opt = optim.accumulate(inner, lambda steps: numbers)

    new, _ = train(wrap(opt.update), opt.init(params), params, grads)

    alone = []
    for i, number in enumerate(numbers.tolist()):
        own = optim.accumulate(inner, number)
        alone.append(train(own.update, own.init(params[i]), params[i], [grad[i] for grad in grads])[0])
    assert_trees_equal(new, tdf.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(), (3,)], ids=["one", "members"])
def test_accumulate_with_a_smaller_number_goes_on(size):
    """A run that continues in the middle of a sum by another `every` steps by the mean of what is there."""
    params = TensorDict({"w": torch.zeros(*size, 2)}, size)
    grads = [torch.full_like(params, float(i)) for i in range(6)]
    before = optim.accumulate(optim.sgd(1.0), 8)
    _, state = train(before.update, before.init(params), params, grads[:5])

    got, state = optim.accumulate(optim.sgd(1.0), 4).update(params, grads[5], state)

    assert torch.equal(got["w"], torch.full((*size, 2), -2.5))


@pytest.mark.parametrize("size", [(), (3,)], ids=["one", "members"])
def test_lookahead_with_a_smaller_number_goes_on(size):
    """A run that continues by another `every` moves the slow parameters again."""
    params = TensorDict({"w": torch.zeros(*size, 2)}, size)
    before = optim.lookahead(optim.sgd(1.0), 6)
    params, state = train(before.update, before.init(params), params, [torch.ones_like(params)] * 5)

    opt = optim.lookahead(optim.sgd(1.0), 3)
    got, state = opt.update(params, torch.ones_like(params), state)

    assert torch.equal(opt.eval_params(got, state)["w"], torch.full((*size, 2), -3.0))


def test_sam_of_members_and_auxiliary_values(generator):
    """Members take steps uphill of one length each; a tuple's other entries are those at the parameters."""
    params = random_tree(generator, torch.float64)
    x = torch.randn(3, 7, generator=generator, dtype=torch.float64)

    def loss(params, x):
        return (params["out"] * x).sin().sum() + params["block", "weight"].square().sum(), params["out"] * 2

    grad = torch.func.grad(loss, has_aux=True)
    found, aux = torch.vmap(optim.sam(grad, 0.3))(params, x)
    stacked, _ = tdf.jit(optim.sam(torch.vmap(grad), 0.3))(params, x)

    def uphill(i):
        g, _ = grad(params[i], x[i])
        norm = torch.cat([leaf.flatten() for leaf in g.leaves()]).norm()
        return grad(params[i] + g * (0.3 / norm), x[i])[0]

    torch.testing.assert_close(aux, params["out"] * 2)
    assert_trees_equal(stacked, found, rtol=1e-12, atol=1e-12)
    assert_trees_equal([found[i] for i in range(3)], [uphill(i) for i in range(3)], rtol=1e-9, atol=1e-9)


def test_sam_of_a_part(generator):
    """Leaves without a gradient stay; adaptive steps are measured by the elements; a gradient of 0 gives no step."""
    params = random_tree(generator, torch.float64, ())
    grad = tdf.grad(lambda p: (p["out"] ** 3).sum() * p["block", "bias"].sum(), "out")

    found = optim.sam(grad, 0.1, adaptive=True)(params)

    w, s = params["out"], params["block", "bias"].sum()
    g = 3 * w**2 * s
    up = w + 0.1 * w**2 * g / (w * g).norm()
    torch.testing.assert_close(found["out"], 3 * up**2 * s, rtol=1e-9, atol=1e-9)
    assert found.paths() == [("out",)]
    assert optim.sam(grad, 0.1)(params * 0)["out"].tolist() == [0.0] * 7


# The patterns of parts need their leaves.
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "parts"])
@pytest.mark.parametrize(
    "params",
    [TensorDict({}), TensorDict({"w": torch.ones(0, 2), "v": torch.ones(0)}, [0]), TensorDict({"w": torch.ones(())})],
)
def test_trees_without_leaves_or_members(name, params):
    """No leaves, no members, and leaves of no elements are trained to the same."""
    opt = WRAPPERS[name]()
    new, state = opt.update(params, params, opt.init(params))
    assert [leaf.shape for leaf in new.leaves()] == [leaf.shape for leaf in params.leaves()]
    assert [leaf.shape for leaf in opt.eval_params(new, state).leaves()] == [leaf.shape for leaf in params.leaves()]
