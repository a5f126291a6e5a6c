"""Laws of all rules: torch.optim over 200 steps, members, transforms, files, and odd trees."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.optim import adagrad, asgd, sparse_adam
from tests.helpers import assert_pure, assert_trees_equal
from tests.optim.table import (
    PATHS,
    RULES,
    assert_leaves,
    each_optimizer,
    each_rule,
    make_optimizer,
    random_tree,
    rounds_steps,
    train,
    train_torch,
)

RATES = [0.1, 0.03, 0.01]
# Per member, and where norms of members are sums, the order of operations is another.
LOOSE = {"rtol": 1e-9, "atol": 1e-9}


def is_exact(name):
    """Whether a step of one tree does what torch's does, operation by operation."""
    # torch computes a variance as a difference.
    return not name.startswith(("adafactor", "lion", "rmsprop centered"))


def tolerance(name):
    """Differences of a run of members: Muon rounds to bfloat16, and other sums may round the other way."""
    return {"rtol": 0.1, "atol": 0.1} if name.startswith("muon") else LOOSE


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("steps", "dtype"),
    [(6, torch.float64), *[pytest.param(200, t, marks=pytest.mark.slow) for t in (torch.float32, torch.float64)]],
)
def test_steps_are_those_of_torch(name, steps, dtype, generator):
    """The trained tree and its state equal the results of torch.optim, to the last bit where the operations agree."""
    make, cls, options = RULES[name]
    params = random_tree(generator, dtype, (), name=name)
    grads = [random_tree(generator, dtype, (), name=name) for _ in range(steps)]
    opt = make(**options)
    # In which torch keeps numbers in the state.
    torch.set_default_dtype(dtype)
    try:
        trained, state = train(opt.update, opt.init(params), params, grads)
        expected, slots = train_torch(cls, options, params, grads, fused=True)
    finally:
        torch.set_default_dtype(torch.float32)

    single = {"rtol": 1e-4, "atol": 1e-4}
    bounds = {} if is_exact(name) else single if dtype is torch.float32 else LOOSE
    assert_leaves(trained, expected, **bounds)
    for path, other in slots.items():
        found = {key: state[key][path] for key in opt.rule.slots if key in other}
        torch.testing.assert_close(found, {key: other[key] for key in found}, **(bounds or {"rtol": 0, "atol": 0}))


@each_rule
@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_members_are_those_of_torch(name, steps, generator):
    """Each member with a learning rate of its own is trained as by a torch.optim of its own; by vmap too."""
    make, cls, options = RULES[name]
    params = random_tree(generator, torch.float64, name=name)
    grads = [random_tree(generator, torch.float64, name=name) for _ in range(steps)]
    opt = make(**{**options, "lr": torch.tensor(RATES, dtype=torch.float64)})
    one = make(**{**options, "lr": torch.tensor(0.1, dtype=torch.float64)})
    starts = torch.stack([make(**{**options, "lr": torch.tensor(r, dtype=torch.float64)}).init(params[i])
                          for i, r in enumerate(RATES)])  # fmt: skip

    stacked, _ = train(opt.update, opt.init(params), params, grads)
    mapped, _ = train(torch.vmap(one.update), starts, params, grads)

    alone = [
        train_torch(cls, {**options, "lr": rate}, params[i], [grad[i] for grad in grads], fused=False)[0]
        for i, rate in enumerate(RATES)
    ]
    expected = {path: torch.stack([leaves[path] for leaves in alone]) for path in PATHS}
    assert_leaves(stacked, expected, **tolerance(name))
    assert_leaves(mapped, expected, **tolerance(name))


@rounds_steps
@each_optimizer
def test_a_saved_run_continues_to_the_last_bit(name, generator, tmp_path):
    """A run of leaves of 16 and 32 bits that is saved, loaded and continued is the run that was not interrupted."""
    trees = [random_tree(generator, name=name) for _ in range(7)]
    params, *grads = [tree.set("out", tree["out"].bfloat16()) for tree in trees]
    opt = make_optimizer(name, lr=torch.tensor(RATES))
    half, state = train(opt.update, opt.init(params), params, grads[:3])

    tdf.save(TensorDict({"params": half, "state": state}), tmp_path / "run.safetensors")
    back = tdf.load(tmp_path / "run.safetensors")

    assert_trees_equal(back["state"], state)
    resumed = train(opt.update, back["state"], back["params"], grads[3:])
    assert_trees_equal(resumed, train(opt.update, opt.init(params), params, grads))


@each_optimizer
def test_inactive_members_stay(name, generator):
    """A finished member keeps parameters and state, the others go on as without it, and only donated leaves change."""
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    params, *grads, last = [random_tree(generator, dtype, name=name) for _ in range(4)]
    opt = make_optimizer(name)
    params, state = train(partial(assert_pure, opt.update), assert_pure(opt.init, params), params, grads)
    active, broken = torch.tensor([True, False, True]), last.at[1].set(float("inf"))
    # Such weights in 16 bits would round off the parts that masters keep.
    params = params.at[1].mul(2.0**20)
    both, both_after = opt.update(params, last, state)

    for update in (opt.update, tdf.jit(opt.update), partial(opt.update, donate=True)):
        donated = params.clone(), broken, state.clone()
        new, after = update(*donated, active=active)
        assert_trees_equal(new[1], params[1])
        assert_trees_equal(after[1], state[1])
        assert_trees_equal(new[::2], both[::2])
        assert_trees_equal(after[::2], both_after[::2])


@each_optimizer
def test_members_at_different_steps_equal_the_loop(name, generator):
    """A member that joined later is trained as if it were alone."""
    params = random_tree(generator, torch.float64, name=name)
    grads = [random_tree(generator, torch.float64, name=name) for _ in range(8)]
    opt = make_optimizer(name)
    late, state = params, opt.init(params)
    for i, grad in enumerate(grads):
        late, state = opt.update(late, grad, state, active=torch.tensor([True, i % 3 == 0, i > 4]))

    alone = [
        train(opt.update, opt.init(params[k]), params[k], [grad[k] for grad in own])
        for k, own in enumerate([grads, grads[::3], grads[5:]])
    ]
    assert_trees_equal([late[k] for k in range(3)], [trained for trained, _ in alone], **tolerance(name))
    evaluated = opt.eval_params(late, state)
    assert_trees_equal([evaluated[k] for k in range(3)], [opt.eval_params(*own) for own in alone], **tolerance(name))


@each_rule
def test_every_hyperparameter_may_differ_by_member(name, generator):
    """Each member is trained as by an optimizer with its own numbers."""
    opt, shares = make_optimizer(name), torch.tensor([1.0, 0.5, 0.9], dtype=torch.float64)
    params, *grads = [random_tree(generator, torch.float64, name=name) for _ in range(9)]
    each = replace(opt, hyper={key: x * shares for key, x in opt.hyper.items()})

    trained, state = train(each.update, each.init(params), params, grads)

    alone = []
    for i, share in enumerate(shares.tolist()):
        one = replace(opt, hyper={key: x * share for key, x in opt.hyper.items()})
        alone.append(train(one.update, one.init(params[i]), params[i], [grad[i] for grad in grads]))
    assert_trees_equal([trained[i] for i in range(3)], [own for own, _ in alone], **tolerance(name))
    slots = state.select(*opt.rule.slots)
    expected = [own.select(*opt.rule.slots) for _, own in alone]
    assert_trees_equal([slots[i] for i in range(3)], expected, **tolerance(name))


def after_two_steps(name):
    """A number that depends on learning rate, parameters and gradients by way of two steps."""
    make, _, options = RULES[name]

    def after(rate, params, grads):
        opt = make(**{**options, "lr": rate})
        new, state = opt.update(params, grads, opt.init(params))
        new, _ = opt.update(new, grads * 0.5, state)
        return sum(leaf.square().sum() for leaf in new.leaves())

    return after


@each_rule
def test_gradients_reach_through_a_step(name, generator):
    """A step is differentiated by parameters, gradients and the learning rate, in a loop and under vmap."""
    params = random_tree(generator, torch.float64, name=name)
    grads = random_tree(generator, torch.float64, name=name)
    rates = torch.tensor(RATES, dtype=torch.float64)
    derive = torch.func.grad(after_two_steps(name), argnums=(0, 1, 2))

    torch.vmap(derive)(rates, params, grads)
    alone = [derive(rate, params[i], grads[i]) for i, rate in enumerate(rates)]
    infinite = [
        (i, path) for i, (_, *trees) in enumerate(alone) for tree in trees for path in tree.paths()
        if not tree[path].isfinite().all()
    ]  # fmt: skip
    assert infinite == []


# Derivatives through products of bfloat16 differ.
@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("muon")])
def test_gradients_of_the_rate_are_those_of_differences(name, generator):
    """The derivative by the learning rate is one number in a loop and under vmap, that of finite differences."""
    params = random_tree(generator, torch.float64, name=name)
    grads = random_tree(generator, torch.float64, name=name)
    rates, after = torch.tensor(RATES, dtype=torch.float64), after_two_steps(name)

    mapped = torch.vmap(torch.func.grad(after))(rates, params, grads)
    alone = torch.stack([torch.func.grad(after)(rate, params[i], grads[i]) for i, rate in enumerate(rates)])
    ends = [torch.stack([after(rate + h, params[i], grads[i]) for i, rate in enumerate(rates)]) for h in (1e-3, -1e-3)]
    torch.testing.assert_close(mapped, alone, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(alone, (ends[0] - ends[1]) / 2e-3, rtol=2e-2, atol=1e-2)


def odd_leaves(name, batch):
    """Leaves of few dimensions or of no elements; of Muon, matrices."""
    ends = [(2, 3), (0, 3)] if name.startswith("muon") else [(), (4,), (0,), (2, 3, 2)]
    return {str(i): torch.ones((*batch, *end)) for i, end in enumerate(ends)}


@each_rule
@pytest.mark.parametrize("make_leaves", [lambda *_: {}, odd_leaves], ids=["empty", "leaves"])
@pytest.mark.parametrize("batch", [(), (2,), (0,)], ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, pytest.param(tdf.jit, marks=pytest.mark.slow)], ids=["eager", "jit"])
def test_odd_trees(name, wrap, batch, make_leaves):
    """No leaves, no members, leaves of no dimensions or elements, and gradients of zeros."""
    make, _, options = RULES[name]
    opt, tree = make(**options), TensorDict(make_leaves(name, batch), batch)

    new, state = wrap(opt.update)(tree, tree * 0, opt.init(tree))

    assert [leaf.shape for leaf in new.leaves()] == [leaf.shape for leaf in tree.leaves()]
    assert [path for path in new.paths() if not new[path].isfinite().all()] == []
    assert state["step"].tolist() == torch.ones(batch, dtype=torch.long).tolist()


@each_rule
def test_steps_of_no_leaves_are_counted_under_vmap(name):
    """Members that share a tree without leaves count their steps."""
    make, _, options = RULES[name]
    opt, none = make(**options), TensorDict({})
    states = torch.stack([opt.init(none)] * 2)

    assert torch.vmap(opt.update, (None, None, 0))(none, none, states)[1]["step"].tolist() == [1, 1]


@each_rule
def test_a_nan_stays_in_its_member(name, generator):
    """A gradient of nan changes the numbers of its own member alone, as torch changes them."""
    make, cls, options = RULES[name]
    params, grads = random_tree(generator, name=name), random_tree(generator, name=name)
    broken = grads.at[1].set(float("nan"))
    opt = make(**options)

    trained, _ = train(opt.update, opt.init(params), params, [broken, grads])

    sound, _ = train(opt.update, opt.init(params), params, [grads, grads])
    assert_trees_equal(trained[::2], sound[::2])
    alone, _ = train_torch(cls, options, params[1], [broken[1], grads[1]], fused=False)
    assert_leaves(trained[1], alone, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_muon_of_stacks_of_stacks(generator):
    """Matrices of any number of batch dimensions are orthogonalized each by itself."""
    make, _, options = RULES["muon"]
    params, *grads = [random_tree(generator, torch.float64, (2, 3), name="muon") for _ in range(21)]
    opt = make(**options)

    trained, _ = train(opt.update, opt.init(params), params, grads)

    def alone(*i):
        return train(opt.update, opt.init(params[i]), params[i], [grad[i] for grad in grads])[0]

    assert_trees_equal(trained[0, 0], alone(0, 0))
    assert_trees_equal(trained[1, 2], alone(1, 2))


def authors_update(grad, momentum, beta=0.95):
    """`muon_update` of Keller Jordan's code, with the sizes of the matrix."""
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp(momentum, beta)
    if update.ndim == 4:
        update = update.reshape(len(update), -1)
    x = update.bfloat16()
    if update.size(-2) > update.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    if update.size(-2) > update.size(-1):
        x = x.mT
    return x.float() * max(1, update.size(-2) / update.size(-1)) ** 0.5


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (32, 2, 1, 3), (5, 7, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_muon_of_convolutions_is_that_of_the_authors(shape, layout, generator):
    """The weight is a matrix with a row for each output; products of bfloat16 are rounded in another order."""
    param = start = torch.randn(shape, generator=generator).to(memory_format=layout)
    params, opt = TensorDict({"w": param}), RULES["muon"][0](0.1, 0.01)
    momentum, state = torch.zeros(shape), opt.init(params)
    for _ in range(3):
        grad = torch.randn(shape, generator=generator)
        params, state = opt.update(params, TensorDict({"w": grad}), state)
        param = param * (1 - 0.1 * 0.01) - 0.1 * authors_update(grad, momentum).reshape(shape)

    assert (params["w"] - param).norm() < 0.15 * (param - start).norm()


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit, torch.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_of_convolutions_is_muon_of_matrices(adjust, wrap, generator):
    """Also for members."""
    params, *grads = [TensorDict({"w": torch.randn(3, 8, 2, 1, 3, generator=generator)}, [3]) for _ in range(4)]
    opt = RULES["muon"][0](0.1, adjust_lr_fn=adjust)
    flat = [tree.apply(lambda x: x.flatten(2)) for tree in (params, *grads)]

    new, _ = train(wrap(opt.update), opt.init(params), params, grads)

    expected, _ = train(opt.update, opt.init(flat[0]), flat[0], flat[1:])
    moved = expected["w"] - flat[0]["w"]
    assert (new["w"].flatten(2) - expected["w"]).norm() < 0.15 * moved.norm()


def sparse(generator, members=None):
    """Return a gradient of some rows of a table of 6 x 2, one of them twice."""
    rows = torch.tensor([0, 3, 3, 5]) if members is None else torch.tensor([[0, 0, 1, 2, 2], [1, 1, 5, 0, 4]])
    shape = (6, 2) if members is None else (members, 6, 2)
    values = torch.randn(rows.shape[-1], 2, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(rows.reshape(-1, rows.shape[-1]), values, shape, check_invariants=True)


@pytest.mark.parametrize("maximize", [False, True])
def test_sparse_adam_is_that_of_torch(maximize, generator):
    """Steps of sparse gradients, to the last bit; memory is reused where it is donated."""
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    grads = [sparse(generator) for _ in range(50)]
    leaf = torch.nn.Parameter(x.clone())
    other = torch.optim.SparseAdam([leaf], lr=0.1, betas=(0.8, 0.99), maximize=maximize)
    for grad in grads:
        leaf.grad = grad
        other.step()
    opt = sparse_adam(lr=0.1, betas=(0.8, 0.99), maximize=maximize)
    params = TensorDict({"w": x.clone()})

    trained, _ = train(opt.update, opt.init(params), params, [TensorDict({"w": grad}) for grad in grads])

    torch.testing.assert_close(trained["w"], leaf.detach(), rtol=0, atol=0)
    state = opt.init(params)
    for grad in grads:
        donated, state = opt.update(params, TensorDict({"w": grad}), state, donate=True)
    assert donated["w"] is params["w"]
    torch.testing.assert_close(donated["w"], leaf.detach(), rtol=0, atol=0)


def test_sparse_members_have_rates_of_their_own(generator):
    """A sparse gradient of a stack trains each member as if it were alone."""
    params = TensorDict({"w": torch.randn(3, 6, 2, generator=generator, dtype=torch.float64)}, [3])
    grads = [TensorDict({"w": sparse(generator, 3)}, [3]) for _ in range(5)]
    opt = sparse_adam(lr=torch.tensor(RATES, dtype=torch.float64))

    trained, _ = train(opt.update, opt.init(params), params, grads)

    alone = []
    for i, rate in enumerate(RATES):
        one = sparse_adam(lr=rate)
        own = [TensorDict({"w": grad["w"].to_dense()[i].to_sparse(1)}) for grad in grads]
        alone.append(train(one.update, one.init(params[i]), params[i], own)[0]["w"])
    torch.testing.assert_close(trained["w"], torch.stack(alone), rtol=1e-12, atol=1e-12)


def test_a_schedule_of_asgd_acts_at_its_own_step():
    """The step size follows the schedule, where torch's is one step late."""
    params = TensorDict({"w": torch.zeros(2, dtype=torch.float64)})
    opt = asgd(lr=lambda step: 1.0 if step < 1 else 0.5, lambd=0.0)

    trained, _ = train(opt.update, opt.init(params), params, [params + 1] * 2)

    assert trained["w"].tolist() == [-1.5, -1.5]


def test_adagrad_begins_with_its_members_sums():
    """The first sums may differ by member."""
    params = TensorDict({"w": torch.zeros(3, 2)}, [3])

    state = adagrad(initial_accumulator_value=torch.tensor([0.0, 1.0, 2.0])).init(params)

    assert state["sum", "w"][:, 0].tolist() == [0.0, 1.0, 2.0]
