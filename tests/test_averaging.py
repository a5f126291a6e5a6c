"""Averages of weights against torch.optim.swa_utils, and against the formulas of the SWAG paper in numpy."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.optim.swa_utils import update_bn as torch_update_bn

import tdfunc as tdf
from tdfunc import TensorDict, averaging, random
from tests.helpers import TiedLM, assert_pure, assert_trees_equal
from tests.models import Norm, ResNet

RULES = {
    "ema": averaging.EMA(0.9),
    "ema biased": averaging.EMA(0.9, debias=False),
    "ema scheduled": averaging.EMA(tdf.optim.schedules.linear(torch.tensor(0.5), 0.9, 3)),
    "swa": averaging.SWA(),
    "swag": averaging.SWAG(3),
    "diagonal": averaging.SWAG(0),
    "snapshots": averaging.Snapshots(2),
}


def run_of(seed, steps, batch=()):
    """Trees along a run: three leaves of normal numbers, in float64."""
    keys = random.split(random.key(seed), 2 * steps)
    draw = partial(random.normal, dtype=torch.float64)
    return [
        TensorDict({"a": {"w": draw(one, (*batch, 2, 3))}, "b": draw(other, (*batch, 4)), "c": draw(one, batch)}, batch)
        for one, other in keys.reshape(steps, 2, 2)
    ]


def collect(rule, trees):
    """The state after all trees."""
    state = rule.init(trees[0])
    for tree in trees:
        state = assert_pure(rule.update, tree, state)
    return state


def flat(tree):
    """The leaves of one model as a vector of numpy."""
    return torch.cat([tree["a", "w"].flatten(), tree["b"].flatten()]).numpy()


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 6))
def test_swa_is_torchs_averaged_model(seed, steps):
    """The average of torch.optim.swa_utils, and the mean of the models."""
    trees = run_of(seed, steps)
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 2, bias=False).double(), nn.Parameter(torch.zeros(4, dtype=torch.float64))
    averaged = AveragedModel(model)
    for tree in trees:
        with torch.no_grad():
            model.a.weight.copy_(tree["a", "w"])
            model.b.copy_(tree["b"])
        averaged.update_parameters(model)
    state = collect(averaging.SWA(), trees)

    assert state["count"] == steps
    torch.testing.assert_close(state["mean", "a", "w"], averaged.module.a.weight.detach())
    torch.testing.assert_close(state["mean", "b"], averaged.module.b.detach())
    np.testing.assert_allclose(flat(state["mean"]), np.mean([flat(tree) for tree in trees], 0), atol=1e-12)


def train_norm(model, x):
    """A step of a model with BatchNorm, which changes its parameters and its buffers."""
    model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))


def test_ema_of_parameters_and_buffers_is_torchs_averaged_model():
    """Its first update is a copy, which is a decay of 0; the counter of BatchNorm comes from the last update."""
    model = Norm().double()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ema = averaging.EMA(lambda count: 0.9 * (count > 0).double())
    state = ema.init(tdf.from_module(model))
    for _ in range(5):
        train_norm(model, torch.randn(8, 3, dtype=torch.float64))
        averaged.update_parameters(model)
        state = ema.update(tdf.from_module(model), state)

    expected = tdf.from_module(averaged.module).detach()
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            expected = expected.set(tuple(name.split(".")), buffer)
    assert_trees_equal(state["mean"], expected, rtol=1e-12, atol=1e-12)


def test_ema_without_debias_is_that_of_timm():
    """`ModelEmaV3` begins with a copy of the model."""
    model = Norm().double()
    other = copy.deepcopy(model)
    ema = averaging.EMA(0.8, debias=False)
    state = ema.init(tdf.from_module(model))
    for _ in range(4):
        train_norm(model, torch.randn(8, 3, dtype=torch.float64))
        # timm.utils.ModelEmaV3.apply_update_
        for mean, x in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.lerp_(x, weight=1.0 - 0.8)
            else:
                mean.copy_(x)
        state = ema.update(tdf.from_module(model), state)

    assert_trees_equal(state["mean"], tdf.from_module(other).detach(), rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**32), decays=st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_ema_is_a_weighted_mean(seed, decays):
    """Model i has the weight (1 - d_i) d_(i+1) ... d_n, divided by their sum."""
    trees = run_of(seed, len(decays))
    state = collect(averaging.EMA(lambda count: torch.tensor(decays, dtype=torch.float64)[count]), trees)
    weights = np.array([(1 - d) * np.prod(decays[i + 1 :]) for i, d in enumerate(decays)])
    if weights.sum() < 1e-9:
        weights = np.eye(len(decays))[-1]

    expected = np.average([flat(tree) for tree in trees], 0, weights)
    np.testing.assert_allclose(flat(state["mean"]), expected, atol=1e-9)


@given(seed=st.integers(0, 2**32), decay=st.floats(0, 0.99), steps=st.integers(1, 6))
def test_ema_of_one_value_is_the_value(seed, decay, steps):
    """Whatever the decay is, also with a few updates."""
    [tree] = run_of(seed, 1)

    state = collect(averaging.EMA(decay), [tree] * steps)

    np.testing.assert_allclose(flat(state["mean"]), flat(tree), atol=1e-12)


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit], ids=["eager", "jit"])
def test_each_member_has_its_own_decay(wrap):
    """As a run of its own."""
    trees, decays = run_of(0, 5, (3,)), torch.tensor([0.1, 0.5, 0.9])
    ema = averaging.EMA(decays)
    state, update = ema.init(trees[0]), wrap(ema.update)
    for tree in trees:
        state = update(tree, state)

    alone = [collect(averaging.EMA(float(d)), [tree[i] for tree in trees])["mean"] for i, d in enumerate(decays)]
    assert_trees_equal(state["mean"], tdf.stack(alone), rtol=1e-6, atol=1e-7)


def test_ema_shows_its_decay():
    """A number as it is, and a schedule as a function."""
    rules = [averaging.EMA(0.999), averaging.EMA(lambda count: 0.9, debias=False)]

    assert list(map(repr, rules)) == [
        "EMA(decay=0.999, debias=True)",
        "EMA(decay=<a function>, debias=False)",
    ]


def by_the_paper(trees, rank):
    """Mean, variance and the last deviations from the running mean."""
    thetas = np.stack([flat(tree) for tree in trees])
    mean, square, columns = np.zeros(10), np.zeros(10), []
    for n, theta in enumerate(thetas):
        mean, square = (n * mean + theta) / (n + 1), (n * square + theta**2) / (n + 1)
        columns = [*columns, theta - mean][-rank:]
    return mean, square - mean**2, columns


@given(seed=st.integers(0, 2**32), steps=st.integers(2, 9), rank=st.sampled_from([0, 2, 3, 5]))
def test_swag_is_the_papers(seed, steps, rank):
    """Mean, and mean of squares less squared mean."""
    trees = run_of(seed, steps)
    state = collect(averaging.SWAG(rank), trees)
    mean, variance, _ = by_the_paper(trees, rank)

    np.testing.assert_allclose(flat(state["mean"]), mean, atol=1e-12)
    np.testing.assert_allclose(flat(state["variance"]), variance, atol=1e-10)


@given(seed=st.integers(0, 2**32), steps=st.integers(2, 9), rank=st.sampled_from([2, 3, 5]))
def test_deviations_of_swag_are_the_papers(seed, steps, rank):
    """The deviations from the running mean, the newest last; those that are not there yet are zeros."""
    trees = run_of(seed, steps)
    deviations = collect(averaging.SWAG(rank), trees)["deviations"]
    *_, columns = by_the_paper(trees, rank)

    expected = [np.zeros(10)] * (rank - len(columns)) + columns
    assert deviations.batch_size == (rank,)
    np.testing.assert_allclose(np.stack([flat(row) for row in deviations]), np.stack(expected), atol=1e-12)
    assert not np.any(flat(deviations[: rank - len(columns)]))


def test_the_rank_of_swag_is_the_papers():
    """Twenty deviations are kept unless another number is given."""
    assert averaging.SWAG().rank == 20


@pytest.mark.parametrize(("rank", "scale", "steps"), [(0, 1.0, 2), (0, 0.5, 6), (4, 1.0, 6), (4, 0.2, 6), (9, 1.0, 2)])
def test_samples_have_the_papers_moments(rank, scale, steps):
    """N(mean, (diagonal + D D^T / (K - 1)) / 2), or with the diagonal alone; K is the number of deviations kept."""
    trees, n = run_of(1, steps), 200_000
    rule = averaging.SWAG(rank)
    state = collect(rule, trees)
    drawn = rule.sample(state, n, key=random.key(3), scale=scale)
    vectors = torch.cat([drawn["a", "w"].flatten(1), drawn["b"]], 1).numpy()
    covariance = np.diag(flat(state["variance"]))
    if rank:
        kept = min(rank, steps)
        columns = np.stack([flat(row) for row in state["deviations"][-kept:]], 1)
        covariance = covariance / 2 + columns @ columns.T / (2 * (kept - 1))

    np.testing.assert_allclose(vectors.mean(0), flat(state["mean"]), atol=0.02)
    np.testing.assert_allclose(np.cov(vectors.T), scale * covariance, atol=0.03)


def test_a_sample_does_not_depend_on_the_number():
    """Nor on vmap over keys; other keys give others."""
    rule, key = averaging.SWAG(3), random.key(0)
    state = collect(rule, run_of(0, 5))
    many = rule.sample(state, 6, key=key)

    assert_trees_equal(rule.sample(state, 2, key=key), many[:2])
    assert_trees_equal(torch.vmap(lambda k: rule.sample(state, 6, key=k))(key.expand(3, 2))[1], many)
    assert not torch.equal(rule.sample(state, 2, key=random.key(1))["b"], many[:2]["b"])


@pytest.mark.parametrize("name", RULES)
def test_members_are_averaged_each_by_itself(name):
    """A row of a stacked state is the state of that member."""
    rule, trees = RULES[name], run_of(2, 5, (3,))

    alone = [collect(rule, [tree[i] for tree in trees]) for i in range(3)]
    assert_trees_equal(list(collect(rule, trees).unbind(0)), alone)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("wrap", "wrap_init"), [(tdf.jit, lambda f: f), (torch.vmap, torch.vmap)], ids=["jit", "vmap"])
def test_members_are_averaged_inside_transforms(name, wrap, wrap_init):
    """A state is updated inside vmap and in a replay as outside."""
    rule, trees = RULES[name], run_of(2, 5, (3,))
    update, state = wrap(rule.update), wrap_init(rule.init)(trees[0])
    for tree in trees:
        state = update(tree, state)

    assert_trees_equal(state, collect(rule, trees))


@pytest.mark.parametrize("name", RULES)
def test_inactive_members_are_not_averaged(name):
    """The state of a member that is not active stays."""
    rule, trees = RULES[name], run_of(2, 5, (3,))
    partly = rule.init(trees[0])
    for tree in trees:
        partly = rule.update(tree, partly, active=torch.tensor([True, False, True]))

    assert_trees_equal(partly[0], collect(rule, trees)[0])
    assert_trees_equal(partly[1], rule.init(trees[0])[1])


@pytest.mark.parametrize("name", RULES)
def test_a_state_is_on_the_device_of_its_tree(name):
    """The count is on the device of the leaves."""
    assert RULES[name].init(run_of(2, 1, (3,))[0].to("meta"))["count"].is_meta


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_updates_compile(name):
    """In one graph, with the numbers of an eager call."""
    rule, trees = RULES[name], run_of(2, 4, (3,))
    compiled, state = torch.compile(rule.update, fullgraph=True, backend="aot_eager"), rule.init(trees[0])
    for tree in trees:
        state = compiled(tree, state)

    assert_trees_equal(state, collect(rule, trees), atol=1e-12)


def test_snapshots_are_the_last_models():
    """The oldest first; members of a stack follow one another."""
    trees, rule = run_of(3, 5, (2,)), averaging.Snapshots(3)
    stacked = rule.stack(collect(rule, trees))
    early = rule.stack(collect(rule, trees[:2]))

    expected = torch.stack(trees[2:], 1).flatten(0, 1)
    assert_trees_equal(stacked, expected)
    assert_trees_equal(early, torch.stack(trees[:2], 1).flatten(0, 1))
    assert_trees_equal(rule.stack(collect(rule, [t[0] for t in trees])), torch.stack([t[0] for t in trees[2:]]))


def test_cycles_are_those_of_warm_restarts():
    """As in torch's CosineAnnealingWarmRestarts; a peak for each member."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
    rate, rates = averaging.cosine_cycles(0.3, 7), averaging.cosine_cycles(torch.tensor([0.3, 0.6]), 7)
    torchs = []
    for _ in range(20):
        torchs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()

    assert [float(rate(torch.tensor(step))) for step in range(20)] == pytest.approx(torchs, abs=1e-9)
    second = [rates(torch.full((2,), step))[1].item() for step in range(20)]
    assert second == pytest.approx([2 * value for value in torchs], abs=1e-7)


def test_trees_of_modules_keep_their_kinds_and_ties():
    """A tied model stays tied; counters are the last ones, complex numbers are averaged, and 16 bits in float32."""
    tree, rule = tdf.from_module(TiedLM()), averaging.SWA()
    mean = rule.update(tree, rule.init(tree))["mean"]
    assert mean["emb", "weight"] is mean["out", "weight"]
    assert not mean["emb", "weight"].requires_grad

    make = lambda i: {"w": torch.tensor(i).bfloat16(), "z": torch.tensor(2 * i + 1j * i), "n": torch.tensor(int(i))}  # noqa: E731
    mean = collect(rule, [TensorDict(make(i)) for i in (1.0, 2.0)])["mean"]
    assert mean["w"].dtype == torch.float32
    assert mean["w"].item() == 1.5
    assert mean["z"].item() == 3 + 1.5j
    assert mean["n"].item() == 2


@pytest.mark.parametrize("make", [Norm, ResNet, lambda: nn.Sequential(Norm(None), nn.BatchNorm1d(4, affine=False))])
def test_update_bn_is_torchs(make):
    """Statistics, and the number of batches, of each BatchNorm layer; for members of a stack as well."""
    models = [make().double() for _ in range(2)]
    shape = (6, 3, 5, 5) if isinstance(models[0], ResNet) else (6, 3)
    batches = [torch.randn(shape, dtype=torch.float64) + i for i in range(3)]
    apply, _, _ = tdf.functional(models[0])
    params, buffers = tdf.split(tdf.stack_modules(models))
    _, buffers = tdf.Ensemble(apply.train()).with_buffers(params, buffers, batches[0])

    expected = []
    for model in models:
        updated = copy.deepcopy(model)
        torch_update_bn(batches, updated)
        expected.append(tdf.split(tdf.from_module(updated).detach())[1])
    together = averaging.update_bn(apply, params, buffers, [(x, None) for x in batches])
    alone = [averaging.update_bn(apply, params[i], buffers[i], batches) for i in range(2)]
    assert_trees_equal(list(together.unbind(0)), expected, atol=1e-12)
    assert_trees_equal(alone, expected, atol=1e-12)


class TwoPasses(nn.Module):
    """A layer that runs twice, on numbers of other sizes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x) + self.norm(4 * x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3), TwoPasses])
@pytest.mark.parametrize("members", [None, 2])
def test_statistics_of_16_bits_are_averages_in_float32(make, dtype, members, generator):
    """Hundreds of batches: in 16 bits the average would stop moving."""
    batches = [(torch.randn(16, 3, generator=generator) + 3 + i / 100).to(dtype) for i in range(300)]
    apply, params, buffers = tdf.functional(make())
    if members is not None:
        params, buffers = [torch.stack([tree] * members) for tree in (params, buffers)]

    found = averaging.update_bn(apply, params.to(dtype), buffers.to(dtype), batches)

    exact = averaging.update_bn(apply, params.double(), buffers.double(), [x.double() for x in batches])
    tdf.assert_close(found, exact.to(dtype), rtol=3 * torch.finfo(dtype).eps, atol=0)


def test_update_bn_draws_from_a_key():
    """Batch i drops by `fold_in(key, i)`, in each member as it would alone."""
    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))  # noqa: E731
    apply, _, _ = tdf.functional(make())
    params, buffers = tdf.split(tdf.init_ensemble(make, 3))
    batches, key = [torch.randn(6, 3) for _ in range(3)], random.key(1)
    found = averaging.update_bn(apply, params, buffers, batches, rng=1)
    drops = tdf.Ensemble(tdf.functional(make()[:2])[0])
    hidden = [drops(tdf.partition(params, "0.*")[0], x, rng=random.fold_in(key, i)) for i, x in enumerate(batches)]

    expected = torch.stack([h.mean(1) for h in hidden]).mean(0)
    torch.testing.assert_close(found["2", "running_mean"], expected)


def test_update_bn_leaves_other_models_alone():
    """Without statistics of BatchNorm the buffers are the same ones."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
    apply, params, buffers = tdf.functional(model)

    assert averaging.update_bn(apply, params, buffers, []) is buffers


NORM = tdf.functional(nn.BatchNorm1d(2))
STACK = TensorDict({"w": torch.zeros(2, 3)}, [2])
SNAPSHOTS = averaging.Snapshots(2)
MESSAGES = [
    (lambda: averaging.update_bn(*NORM, []), ValueError, "`batches` is empty.*used up"),
    (lambda: averaging.EMA(1.0), ValueError, "EMA: decay is out of range.*< 1.0.*1.0"),
    (lambda: averaging.EMA(lambda count: torch.ones(3)).update(STACK, averaging.EMA(0.9).init(STACK)),
     tdf.BatchSizeError, "EMA.update: the schedule of decay does not give one number for each member.*2.*3"),
    (lambda: averaging.EMA(torch.ones(3) / 2).update(STACK, averaging.EMA(0.9).init(STACK)),
     tdf.BatchSizeError, "EMA.update: decay does not have one value for each member.*2.*3"),
    (lambda: averaging.SWAG(1), ValueError, "rank must be 0, or at least 2.*1"),
    (lambda: averaging.SWAG().init(TensorDict({"n": torch.ones(2).long()})), tdf.LeafMismatchError, "SWAG.init.*'n'"),
    *[(lambda rule=rule: rule.init({}), TypeError, "init: params is not a tree.*dict") for rule in RULES.values()],
    *[(lambda rule=rule: rule.update({}, rule.init(STACK)), TypeError, "update: params is not a tree.*dict")
      for rule in RULES.values()],
    (lambda: averaging.Snapshots(0), ValueError, "members must be at least 1.*0"),
    (lambda: averaging.cosine_cycles(0.1, 0), ValueError, "cycle_steps must be at least 1.*0"),
    (lambda: averaging.SWA().update(averaging.SWA().init(STACK), STACK), tdf.TreeStructureError, "not of this.*'w'"),
    (lambda: averaging.SWAG(0).update(STACK, averaging.SWAG(2).init(STACK)), tdf.TreeStructureError,
     "SWAG.update: the state is not of this class.*'deviations'"),
    (lambda: averaging.SWAG(3).sample(averaging.SWAG(2).init(STACK), 2, key=0), tdf.TreeStructureError,
     "SWAG.sample: the state is of another rank.*3.*2"),
    (lambda: averaging.SWAG(2).sample(averaging.SWAG(2).init(STACK), 2, key=0), ValueError,
     r"fewer than two models.*\[0, 0\]"),
    *[(lambda rule=rule: rule.init(tdf.lazy_stack([STACK, STACK])), tdf.UnsupportedError, "init: the members are not")
      for rule in RULES.values()],
    (lambda: averaging.Snapshots(3).update(STACK, SNAPSHOTS.init(STACK)), tdf.TreeStructureError,
     "Snapshots.update: the state is of another number of members.*3.*2"),
    (lambda: averaging.Snapshots(3).stack(SNAPSHOTS.init(STACK)), tdf.TreeStructureError,
     "Snapshots.stack: the state is of another number of members.*3.*2"),
    (lambda: SNAPSHOTS.stack(SNAPSHOTS.init(STACK)), ValueError, r"no models, or different numbers.*\[0, 0\]"),
    (lambda: SNAPSHOTS.update(STACK[0], SNAPSHOTS.init(STACK)), tdf.BatchSizeError,
     r"Snapshots.update.*different batch sizes.*\[2\].*\[\]"),
    (lambda: SNAPSHOTS.update(STACK.apply(lambda x: x[:, :2]), SNAPSHOTS.init(STACK)), tdf.LeafMismatchError,
     r"Snapshots.update: the leaf 'w'.*\[2, 3\].*\[2, 2\]"),
    (lambda: averaging.SWA().update(STACK.rename_key("w", "v"), averaging.SWA().init(STACK)), tdf.TreeStructureError,
     "SWA.update.*'v'"),
    (
        lambda: SNAPSHOTS.update(STACK, SNAPSHOTS.init(STACK), active=torch.ones(3).bool()),
        tdf.BatchSizeError,
        r"active is not one bool.*\[2\].*\[3\]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each refusal names the call and both values."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call()
