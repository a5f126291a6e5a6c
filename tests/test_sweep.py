"""Sweeps: trees of hyperparameters, folds, early stopping and the choice of members."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from sklearn.model_selection import KFold
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, random, sweep
from tests.helpers import assert_trees_equal, examples

SCORES = st.lists(st.one_of(st.floats(-5, 5, width=32), st.just(math.nan)), min_size=1, max_size=8)
MODES = st.sampled_from(["min", "max"])


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=3), max_size=3))
def test_grid_is_the_product(axes):
    """Members are in the order of `itertools.product`."""
    names = "abc"[: len(axes)]
    tree = sweep.grid(**dict(zip(names, axes, strict=True)))

    rows = list(zip(*[tree[name].tolist() for name in names], strict=True)) if axes else []
    assert rows == (list(itertools.product(*axes)) if axes else [])
    assert tree.batch_size == torch.Size([len(rows)] if axes else [])


def test_grid_keeps_dtypes():
    """Axes of unequal dtypes, a number among them."""
    tree = sweep.grid(lr=torch.tensor([0.1, 0.2], dtype=torch.float64), width=[16, 32], norm=True)

    assert [tree[name].dtype for name in ("lr", "width", "norm")] == [torch.float64, torch.int64, torch.bool]
    assert tree["width"].tolist() == [16, 32, 16, 32]


@given(seed=st.integers(0, 2**32), members=st.integers(1, 9), more=st.integers(0, 9))
def test_members_of_a_search_depend_on_nothing_else(seed, members, more):
    """The first members of a longer search are those of the shorter one, in any order of names, and without others."""
    spaces = {"lr": sweep.log_uniform(1e-4, 1e-1), "decay": [0.0, 0.1], "width": torch.tensor([16, 32])}
    few = sweep.random_search(random.key(seed), members, **spaces)
    many = sweep.random_search(random.key(seed), members + more, **spaces)

    assert_trees_equal(many[:members], few)
    reverse = sweep.random_search(random.key(seed), members, **dict(reversed(spaces.items())))
    assert_trees_equal(reverse.select(*spaces), few)
    assert_trees_equal(sweep.random_search(random.key(seed), members, lr=spaces["lr"]), few.select("lr"))
    assert ((many["lr"] >= 0.99e-4) & (many["lr"] <= 1.01e-1)).all()
    assert set(many["width"].tolist()) <= {16, 32}
    assert many["decay"].dtype == torch.float32


def test_spaces_have_their_distribution():
    """Log-uniform numbers have uniform logarithms; two names are independent."""
    tree = sweep.random_search(random.key(0), 20_000, a=sweep.log_uniform(1e-3, 1e2), b=sweep.uniform(-1.0, 3.0))

    assert stats.kstest(tree["a"].log().numpy(), stats.uniform(math.log(1e-3), math.log(1e5)).cdf).pvalue > 1e-4
    assert stats.kstest(tree["b"].numpy(), stats.uniform(-1, 4).cdf).pvalue > 1e-4
    assert abs(np.corrcoef(tree["a"].log(), tree["b"])[0, 1]) < 0.03
    assert sweep.uniform(2.0, 2.0)(random.key(0), 3).tolist() == [2.0] * 3


@given(examples=st.integers(2, 30), folds=st.integers(2, 30), seed=st.none() | st.integers(0, 99))
def test_kfold_is_that_of_sklearn(examples, folds, seed):
    """Each example validates once; without a key the folds are those of scikit-learn."""
    folds = min(folds, examples)
    mask = sweep.kfold(examples, folds, key=None if seed is None else random.key(seed))

    assert mask.shape == (folds, examples)
    assert ((~mask).sum(0) == 1).all()
    sizes = (~mask).sum(1)
    assert sizes.max() - sizes.min() <= 1
    if seed is None:
        expected = [np.isin(np.arange(examples), train) for train, _ in KFold(folds).split(np.zeros(examples))]
        assert mask.tolist() == np.stack(expected).tolist()


@given(seed=st.integers(0, 2**32), examples=st.integers(1, 20), members=st.integers(1, 6))
def test_bootstrap_indices_and_weights(seed, examples, members):
    """Weights count the indices, and a member's sample does not change with the number of members."""
    indices = sweep.bootstrap(random.key(seed), examples, members)
    weights = sweep.weights_of(indices, examples)

    assert indices.shape == (members, examples)
    assert torch.equal(sweep.bootstrap(random.key(seed), examples, members + 2)[:members], indices)
    expected = torch.stack([torch.bincount(row, minlength=examples) for row in indices])
    assert torch.equal(weights, expected.float())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_there_is_no_best_of_members_that_never_improved(mode):
    """A sweep whose members have all diverged has their first weights as the best ones."""
    stopping = sweep.EarlyStopping(2, mode=mode)
    state = stopping.update(torch.full((2,), math.nan), stopping.init(2))
    with pytest.raises(ValueError, match="none of the scores is a number"):
        sweep.best(TensorDict({"w": torch.zeros(2)}, [2]), state["best"], mode=mode)


@given(st.lists(st.lists(st.floats(-3, 3, width=16) | st.just(math.nan), min_size=3, max_size=3), max_size=12),
       st.integers(1, 4), st.sampled_from([0.0, 0.5]), MODES)  # fmt: skip
def test_early_stopping_is_the_loop_in_python(history, patience, min_delta, mode):
    """Each member stops as a counter of its own would stop it, and never starts again."""
    stopping = sweep.EarlyStopping(patience, min_delta=min_delta, mode=mode)
    state = stopping.init(3)
    sign = 1 if mode == "min" else -1
    best, waited, active = [sign * math.inf] * 3, [0] * 3, [True] * 3
    for row in history:
        state = stopping.update(torch.tensor(row), state)
        for i, metric in enumerate(row):
            if active[i]:
                improved = sign * (best[i] - metric) > min_delta
                best[i], waited[i] = (metric, 0) if improved else (best[i], waited[i] + 1)
                active[i] = waited[i] < patience

    assert state["best"].tolist() == best
    assert state["active"].tolist() == active
    assert state["waited"].tolist() == waited


def test_the_repr_of_early_stopping_has_its_options():
    """All three, as the constructor takes them."""
    stopping = sweep.EarlyStopping(3, min_delta=0.1, mode="max")

    assert repr(stopping) == "EarlyStopping(patience=3, min_delta=0.1, mode='max')"


def test_early_stopping_is_a_value():
    """Two with the same options are equal, and have one hash."""
    assert len({sweep.EarlyStopping(3, mode="max"), sweep.EarlyStopping(3, mode="max"), sweep.EarlyStopping(3)}) == 2


@given(scores=SCORES, mode=MODES)
def test_results_are_the_sorted_members(scores, mode):
    """The rows as Python sorts them, each with its own hyperparameters."""
    hyper = TensorDict({"model": {"lr": torch.arange(len(scores))}}, [len(scores)])
    sign = 1 if mode == "min" else -1
    order = sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), sign * scores[i], i))

    results = sweep.Results(hyper, torch.tensor(scores, dtype=torch.float64), mode=mode)

    expected = [{"member": i, "score": scores[i], "model.lr": i} for i in order]
    assert list(map(repr, results.rows())) == list(map(repr, expected))
    assert results.order.tolist() == order
    assert len(results) == len(scores)


def test_results_name_the_best_member():
    """By numbers of Python."""
    hyper = sweep.grid(lr=[0.5, 0.25], width=[16, 32])

    results = sweep.Results(hyper, torch.tensor([3.0, 1.0, 2.0, math.nan]), mode="max")

    assert results.best_member == 0
    assert results.best_score == 3.0
    assert results.best_hyper == {"lr": 0.5, "width": 16}


def test_results_of_early_stopping_show_who_has_stopped():
    """With the updates that a member has waited."""
    stopping = sweep.EarlyStopping(1)
    state = stopping.init(2)
    for metric in ([2.0, 0.5], [1.0, 0.75]):
        state = stopping.update(torch.tensor(metric), state)

    assert repr(sweep.Results(sweep.grid(lr=[0.5, 0.125]), state)).splitlines() == [
        "Results(2 members, mode='min')",
        "  member  score     lr  waited  active",
        "       1    0.5  0.125       1   False",
        "       0      1    0.5       0    True",
    ]


@pytest.mark.parametrize(("members", "lines"), [(0, 1), (12, 14), (13, 15), (500, 15)])
def test_results_of_many_members_are_short(members, lines):
    """The best are shown."""
    results = sweep.Results(sweep.random_search(0, members, lr=sweep.uniform(0, 1)), torch.rand(members))

    assert len(repr(results).splitlines()) == lines


@examples(0.4)
@given(scores=SCORES, mode=MODES, data=st.data())
def test_elites_are_the_sorted_members(scores, mode, data):
    """As Python sorts them, nan last; `best` is the first."""
    count = data.draw(st.integers(1, len(scores)))
    tree = tdf.TensorDict({"i": torch.arange(len(scores))}, [len(scores)])
    sign = 1 if mode == "min" else -1
    order = sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), sign * scores[i], i))

    assert sweep.rank(torch.tensor(scores), mode=mode).tolist() == order
    # Without one score that is a number there is no best member.
    assume(not all(map(math.isnan, scores)))
    assert sweep.elites(tree, torch.tensor(scores), count, mode=mode)["i"].tolist() == order[:count]
    assert tdf.jit(sweep.elites)(tree, torch.tensor(scores), count, mode=mode)["i"].tolist() == order[:count]
    assert sweep.best(tree, torch.tensor(scores), mode=mode)["i"].item() == order[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.bool])
def test_scores_of_any_dtype(dtype):
    """Ranks are those of numpy, for integers without a sign too."""
    scores = torch.tensor([3, 0, 1, 0]).to(dtype)

    assert sweep.rank(scores).tolist() == np.argsort(scores.float().numpy(), stable=True).tolist()
    assert sweep.rank(scores, mode="max").tolist() == np.argsort(-scores.float().numpy(), stable=True).tolist()


SCORES = torch.tensor([[3.0, math.nan, 1.0], [1.0, 2.0, 0.0]])


@pytest.mark.parametrize("fn", [lambda tree, row: sweep.elites(tree, row, 2), sweep.best], ids=["elites", "best"])
def test_choices_under_transforms(fn):
    """Under vmap and jit members are taken as in a loop."""
    tree = tdf.TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2, 3])
    loop = torch.stack([fn(part, row) for part, row in zip(tree, SCORES, strict=True)])

    assert_trees_equal(torch.vmap(fn)(tree, SCORES), loop)
    assert_trees_equal(tdf.jit(fn)(tree[0], SCORES[0]), loop[0])


def test_ranks_under_vmap():
    """Members are ranked under vmap, nans last."""
    assert torch.vmap(sweep.rank)(SCORES).tolist() == [[2, 0, 1], [2, 0, 1]]


def test_early_stopping_under_jit():
    """A replay gives the state of the call."""
    stopping = sweep.EarlyStopping(2)

    found = tdf.jit(stopping.update)(SCORES[0], stopping.init(3))
    assert_trees_equal(found, stopping.update(SCORES[0], stopping.init(3)))


@given(members=st.integers(1, 40), rungs=st.integers(1, 4), factor=st.sampled_from([1, 1.5, 2, 3, 10]), mode=MODES)
def test_halving_trains_the_best_of_each_rung(members, rungs, factor, mode):
    """Each rung gets the members that a loop in Python keeps, and no others; sizes are those of scikit-learn."""
    seen = []

    def train(run, rung):
        seen.append(sorted(run["i"].tolist()))
        run = run.set("trained", run["trained"] + 1)
        return run, torch.sin(run["i"] * (rung + 1.0))

    run = tdf.TensorDict({"i": torch.arange(members), "trained": torch.zeros(members)}, [members])
    last = sweep.successive_halving(run, train, rungs, factor=factor, mode=mode)

    sign = 1 if mode == "min" else -1
    alive = list(range(members))
    expected = []
    for rung in range(rungs):
        expected.append(sorted(alive))
        ranked = sorted(alive, key=lambda i: sign * math.sin(i * (rung + 1.0)))
        alive = ranked[: math.ceil(len(ranked) / factor)]
    assert seen == expected
    assert last["i"].tolist() == ranked
    assert (last["trained"] == rungs).all()


def test_a_member_of_a_sweep_is_its_own_run():
    """Eight learning rates, halved twice: the best member equals the run of it alone."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    x = random.normal(random.key(1), (64, 3), dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    hyper = sweep.grid(lr=torch.logspace(-4, -1, 8, dtype=torch.float64))
    optimizer = tdf.optim.adam(lr=hyper["lr"])
    rows = []

    def loss(params):
        return (apply(params, x) - y).square().mean()

    def train(run, rung):
        rows.append(len(run))
        params, state = run["params"], run["state"]
        for _ in range(10):
            # The learning rates are in the state, so that those of the members that are left are used.
            params, state = optimizer.update(params, torch.vmap(tdf.grad(loss))(params), state)
        return run.update({"params": params, "state": state}), torch.vmap(loss)(params)

    start = params.expand(8).clone()
    sweep_of_8 = tdf.TensorDict({"params": start, "state": optimizer.init(start), "hyper": hyper}, [8])
    winner = sweep.successive_halving(sweep_of_8, train, rungs=3)[0]

    assert rows == [8, 4, 2]
    alone = tdf.optim.adam(lr=winner["hyper", "lr"].item())
    state = alone.init(params)
    for _ in range(30):
        params, state = alone.update(params, tdf.grad(loss)(params), state)
    tdf.assert_close(winner["params"], params)
    assert loss(params) < loss(start[0])
    assert winner["hyper", "lr"] in hyper["lr"]


def test_halving_of_folds_goes_by_their_mean():
    """Folds are a dimension after the configurations: they stay or go together."""
    scores = torch.tensor([[1.0, 9.0], [4.0, 4.0], [0.0, 9.0], [6.0, 1.0]])
    run = tdf.TensorDict(sweep.grid(lr=[0.1, 0.2, 0.3, 0.4], fold=range(2)).to_dict(), [8]).unflatten(0, (4, 2))
    run = sweep.successive_halving(run, lambda run, _: (run, scores[(run["lr"][:, 0] * 10 - 1).long()].mean(1)), 2)

    assert run["fold"].tolist() == [[0, 1]] * 2
    torch.testing.assert_close(run["lr"], torch.tensor([[0.4, 0.4], [0.2, 0.2]]))


@pytest.mark.parametrize("fn", [sweep.keep_best, tdf.jit(sweep.keep_best)])
def test_keep_best_takes_rows(fn):
    """Improved members come from the new tree, under jit as well."""
    old = tdf.TensorDict({"w": torch.zeros(3, 2)}, [3])
    new = tdf.TensorDict({"w": torch.ones(3, 2)}, [3])
    improved = torch.tensor([True, False, True])

    assert fn(old, new, improved)["w"][:, 0].tolist() == [1, 0, 1]


def test_the_best_of_live_parameters_keep_no_graph():
    """A loop over an `EnsembleModule` keeps weights, and not a graph that grows."""
    live = TensorDict({"w": nn.Parameter(torch.zeros(2, 3))}, [2])

    kept = sweep.keep_best(live, live, torch.tensor([True, False]))

    assert not kept["w"].requires_grad


def test_the_best_can_be_differentiated_in_a_transform():
    """Under `torch.func.grad` the chosen members have a derivative."""
    tree = TensorDict({"w": torch.ones(2)}, [2])
    improved = torch.tensor([True, False])

    grads = torch.func.grad(lambda new: sweep.keep_best(tree, new, improved)["w"].sum())(tree)

    assert grads["w"].tolist() == [1.0, 0.0]


TREE = tdf.TensorDict({"w": torch.zeros(3)}, [3])
KEY, STOPPING = random.key(0), sweep.EarlyStopping(1)
MESSAGES = [
    (lambda: sweep.grid(lr=[0.1], act=["relu", "tanh"]), TypeError, "grid: the values of 'act' are not num.*'relu'"),
    (lambda: sweep.grid(decay=[None, 0.1]), TypeError, "grid: the values of 'decay' are not numbers.*None"),
    (lambda: sweep.random_search(KEY, 4, act=["relu"]), TypeError, "random_search: the values of 'act'.*'relu'"),
    (lambda: sweep.random_search(KEY, 4, a=lambda key, n: torch.zeros(3)), tdf.BatchSizeError, r"'a'.*\[4\].*\[3\]"),
    (lambda: sweep.elites(TREE, torch.zeros(2), 1), tdf.BatchSizeError, r"a member for each score.*\[2, ...\].*\[3\]"),
    (lambda: sweep.elites(TREE, torch.zeros(3, 2), 1), tdf.BatchSizeError, r"for each score.*\[3, 2, ...\].*\[3, 2\]"),
    (lambda: sweep.elites(TREE, torch.tensor(0.0), 1), tdf.BatchSizeError, r"for each score.*\[3\].*shape \[\]"),
    (lambda: sweep.elites(TREE, torch.zeros(3), 4), ValueError, "members is out of range.*1 to 3.*4"),
    (
        lambda: sweep.best(TREE, torch.full((3,), math.nan)),
        ValueError,
        r"^sweep: none of the scores.*\[nan, nan, nan\]",
    ),
    (
        lambda: STOPPING.update(torch.zeros(2), STOPPING.init(3)),
        tdf.BatchSizeError,
        r"metric does not have.*\[3\].*\[2\]",
    ),
    (lambda: sweep.Results(TREE, torch.zeros(2)), tdf.BatchSizeError, r"a member for each score.*\[2, ...\].*\[3\]"),
    (lambda: sweep.Results(TREE, torch.full((3,), math.nan)).best_score, ValueError, "none of the scores is a number"),
    (lambda: sweep.EarlyStopping(0, mode="min"), ValueError, "patience must be at least 1.*0"),
    (lambda: sweep.successive_halving(TREE, lambda r, _: (r, torch.zeros(3)), 0), ValueError, "rungs must be at.*0"),
    (lambda: sweep.successive_halving(TREE, lambda r, _: (r, r["w"]), 2, factor=0), ValueError, "factor must be.*0"),
    (lambda: sweep.successive_halving(TREE, lambda r, _: (r, torch.zeros(2)), 2), tdf.BatchSizeError, "each score"),
    (lambda: sweep.rank(torch.zeros(3), mode="up"), ValueError, "(?s)mode must be one of 'min', 'max'.*'up'"),
    (lambda: sweep.keep_best(TREE, TREE, torch.ones(1).bool()), tdf.BatchSizeError, r"for each member.*\[3\].*\[1\]"),
    (lambda: sweep.log_uniform(0.0, 1.0), ValueError, "low must be above 0"),
    (lambda: sweep.uniform(2.0, 1.0), ValueError, "high is below low.*2.0.*1.0"),
    (lambda: sweep.kfold(3, 4), ValueError, "folds must be at least 2"),
]


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each refusal names the call and both values."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call()


LOST = {
    "fewer": lambda run: run[:1],
    "more": lambda run: torch.cat([run, run]),
    "none": lambda run: run[:0],
    "no batch": lambda run: tdf.TensorDict({"w": run["w"].sum()}),
    "a dict": lambda run: {"w": run["w"]},
}


@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
def test_blocks_come_back_with_all_members(change, tmp_path):
    """A block without some of its members is an error that names it; scores would belong to other members."""
    run = tdf.TensorDict({"w": torch.arange(11.0)}, [11])

    with pytest.raises(tdf.BatchSizeError, match="members 0 to 2: train returned another number of members"):
        sweep.train_blocks(run, lambda r, _: (change(r), r["w"]), rungs=1, folder=tmp_path, chunk_size=3)


@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
def test_rungs_come_back_with_all_members(change):
    """The same for a rung of successive halving."""
    run = tdf.TensorDict({"w": torch.arange(8.0)}, [8])

    with pytest.raises(tdf.BatchSizeError, match="successive_halving: train returned another number of members"):
        sweep.successive_halving(run, lambda r, _: (change(r), r["w"]), rungs=2)


PLAIN = {
    "texts": (["relu", "tanh", "silu"], ["relu", "gelu", "silu"]),
    "one value for all": (tdf.NonTensorData({"depth": 2}), tdf.NonTensorData({"depth": 3})),
    "arrays": (tdf.NonTensorData({"a": np.arange(2000)}), tdf.NonTensorData({"a": np.arange(2000) % 1999})),
}


def scored(run, rung):
    """The run, and a score of each member."""
    return run, run["w"]


@pytest.mark.parametrize(("first", "second"), PLAIN.values(), ids=PLAIN)
def test_blocks_of_another_run_are_not_resumed(first, second, tmp_path):
    """A hyperparameter that is not a tensor makes another run, too."""
    run = tdf.TensorDict({"w": torch.arange(3.0), "option": first}, [3])
    sweep.train_blocks(run, scored, rungs=1, folder=tmp_path, chunk_size=2)

    with pytest.raises(ValueError, match="has checkpoints of another run"):
        sweep.train_blocks(run.set("option", second), scored, rungs=1, folder=tmp_path, chunk_size=2)


@pytest.mark.parametrize(("first", "_"), PLAIN.values(), ids=PLAIN)
def test_blocks_of_the_same_run_are_resumed(first, _, tmp_path):
    """Plain values are those of the first call."""
    run = tdf.TensorDict({"w": torch.arange(3.0), "option": first}, [3])
    sweep.train_blocks(run, scored, rungs=1, folder=tmp_path, chunk_size=2)

    _, scores = sweep.train_blocks(run, scored, rungs=2, folder=tmp_path, chunk_size=2)

    assert scores.tolist() == [0, 1, 2]


def test_progress_of_blocks_is_shown(tmp_path, terminal):
    """`progress=True` counts blocks."""
    run = tdf.TensorDict({"w": torch.arange(11.0)}, [11])
    sweep.train_blocks(run, lambda r, _: (r, r["w"]), rungs=1, folder=tmp_path, chunk_size=3, progress=True)

    assert "4/4" in terminal.readouterr().err


@pytest.fixture
def blocks(tmp_path):
    """Return a function that trains members of a network of linear layers in blocks, from seeds to parameters."""
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    apply, _, _ = tdf.functional(make())
    x = random.normal(random.key(1), (64, 3))
    y = x.sum(1, keepdim=True).sin()
    members = tdf.init_ensemble(make, 4, key=0)

    def loss(params):
        return (apply(params, x) - y).square().mean()

    def train(run, rung):
        params = run["params"]
        for _ in range(10):
            params = params - torch.vmap(tdf.grad(loss))(params) * 0.1
        return run.update({"params": params}), torch.vmap(loss)(params)

    def run(chosen, block):
        start = tdf.TensorDict({"params": members[chosen]}, [len(range(4)[chosen])])
        folder = tmp_path / f"{chosen.start} {chosen.stop} {block}"
        return sweep.train_blocks(start, train, rungs=2, folder=folder, chunk_size=block)[0]["params"]

    return run


@pytest.mark.parametrize("block", [1, 2, 3])
def test_members_of_blocks_of_any_size_are_alike_up_to_rounding(block, blocks):
    """Kernels of batched products depend on the number of members, those of linear layers as well."""
    assert_trees_equal(blocks(slice(0, 4), block), blocks(slice(0, 4), 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 2])
def test_blocks_of_the_same_members_give_the_same_bits(first, blocks):
    """A block knows nothing of the other ones."""
    assert_trees_equal(blocks(slice(0, 4), 2)[first : first + 2], blocks(slice(first, first + 2), 2))


@pytest.mark.parametrize("executor", [lambda: "threads", lambda: ThreadPoolExecutor(4)])
def test_blocks_in_threads_have_their_own_draws(executor, tmp_path):
    """The default generator of torch belongs to all threads: their draws mixed, and the caller's state was lost."""

    def train(run, rung):
        for _ in range(20):
            run = run.set("x", run["x"] + torch.randn(run["x"].shape))
        return run, run["x"]

    run = TensorDict({"x": torch.zeros(12)}, [12])
    before = torch.default_generator.get_state()
    expected, _ = sweep.train_blocks(run, train, 2, folder=tmp_path / "one", chunk_size=2)
    options = {"folder": tmp_path / "four", "chunk_size": 2, "num_workers": 4}
    found, _ = sweep.train_blocks(run, train, 2, executor=executor(), **options)
    assert torch.equal(found["x"], expected["x"])
    assert torch.equal(torch.default_generator.get_state(), before)
