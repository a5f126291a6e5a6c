"""Arguments as people write them: a number of any kind has one meaning, or there is one clear error."""

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import calibration, llm, metrics, optim, random, sweep
from tdfunc.averaging import SWAG, Snapshots
from tdfunc.core.errors import as_count
from tdfunc.nn import BatchEnsembleLinear
from tests.helpers import assert_trees_equal

PARAMS = tdf.TensorDict({"w": torch.ones(4)})
MATRIX = tdf.TensorDict({"w": torch.arange(6.0).reshape(2, 3)})
RUN = tdf.TensorDict({"w": torch.arange(8.0)}, [8])
KEY = random.key(0)
APPLY, WEIGHTS, _ = tdf.functional(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
LOGITS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))


def train(opt, steps=5, params=PARAMS):
    """Return the parameters after some steps."""
    grads, state = params * 0.5, opt.init(params)
    for _ in range(steps):
        params, state = opt.update(params, grads, state)
    return params["w"]


def plateau(**counts):
    """Return the scale after updates without an improvement."""
    rule = optim.schedules.ReduceOnPlateau(0.5, **counts)
    state = rule.init()
    for _ in range(8):
        state = rule.update(1.0, state)
    return state["scale"]


def choose_rows(**counts):
    """Return the rows that are chosen of four of one prompt."""
    return llm.topk_rewards(["a"] * 4, torch.arange(4.0), **counts).chosen


def stop(patience):
    """Return the state of a stopping rule that has seen no improvement."""
    stopping = sweep.EarlyStopping(patience)
    state = stopping.init(1)
    for _ in range(6):
        state = stopping.update(torch.ones(1), state)
    return state


def steps(folder, **options):
    """Return the steps that a manager keeps of four."""
    manager = tdf.CheckpointManager(folder, metric="loss", **options)
    for i in range(4):
        manager.save(i, PARAMS, metadata={"loss": -float(i)})
    return manager.steps()


def saved_step(folder, step):
    """Return the name of a saved step."""
    return tdf.CheckpointManager(folder).save(step, PARAMS).result().name


def rung(run, _):
    """Train nothing."""
    return run, run["w"]


# Each takes a count of 2; `folder` is a new one.
COUNTS = {
    "accumulate": lambda n, _: train(optim.accumulate(optim.sgd(0.1), n)),
    "lookahead": lambda n, _: train(optim.lookahead(optim.sgd(0.1), every=n)),
    "apply_if_finite": lambda n, _: train(optim.apply_if_finite(optim.sgd(0.1), max_consecutive=n)),
    "init_ensemble": lambda n, _: tdf.init_ensemble(lambda: nn.Linear(2, 1), n, key=0),
    "Ensemble": lambda n, _: tdf.Ensemble(APPLY, chunk_size=n).chunk_size,
    "MCDropout": lambda n, _: tdf.MCDropout(APPLY, n)(WEIGHTS, torch.ones(3, 2), rng=0),
    "Lora": lambda n, _: tdf.lora.Lora("0.weight", rank=n).init(WEIGHTS, key=0),
    "ece": lambda n, _: metrics.ece(LOGITS, LOGITS.argmax(-1), bins=n),
    "adaptive_ece": lambda n, _: metrics.adaptive_ece(LOGITS, LOGITS.argmax(-1), bins=n),
    "reliability_curve": lambda n, _: metrics.reliability_curve(LOGITS, LOGITS.argmax(-1), bins=n).nan_to_num(),
    "ReduceOnPlateau: patience": lambda n, _: plateau(patience=n),
    "ReduceOnPlateau: cooldown": lambda n, _: plateau(patience=0, cooldown=n),
    "SWAG": lambda n, _: SWAG(n).init(PARAMS),
    "muon": lambda n, _: train(optim.muon(0.1, ns_steps=n), params=MATRIX),
    "topk_rewards: group_size": lambda n, _: choose_rows(group_size=n, k=1),
    "topk_rewards: k": lambda n, _: choose_rows(group_size=4, k=n),
    "Batcher": lambda n, _: llm.Batcher(list, min_batch_size=n, max_batch_size=n)._options[:2],
    "keep_last": lambda n, folder: steps(folder, keep_last=n),
    "keep_best": lambda n, folder: steps(folder, keep_best=n),
    "save": lambda n, folder: saved_step(folder, n),
    "max_pending": lambda n, _: tdf.AsyncSaver(max_pending=n)._queue._max_pending,
    "max_shard_size": lambda n, folder: tdf.save(PARAMS, folder / "m", max_shard_size=n * 16),
    "EarlyStopping": lambda n, _: stop(n),
    "Snapshots": lambda n, _: Snapshots(n).init(PARAMS),
    "successive_halving": lambda n, _: sweep.successive_halving(RUN, rung, n),
    "train_blocks: rungs": lambda n, folder: sweep.train_blocks(RUN, rung, n, folder=folder, chunk_size=4)[1],
    "train_blocks: chunk_size": lambda n, folder: sweep.train_blocks(RUN, rung, 1, folder=folder, chunk_size=n)[1],
    "random_search": lambda n, _: sweep.random_search(KEY, n, lr=sweep.uniform(0, 1)),
    "kfold: folds": lambda n, _: sweep.kfold(8, n),
    "kfold: examples": lambda n, _: sweep.kfold(n, 2),
    "bootstrap: examples": lambda n, _: sweep.bootstrap(KEY, n, 3),
    "bootstrap: members": lambda n, _: sweep.bootstrap(KEY, 4, n),
    "elites": lambda n, _: sweep.elites(RUN, RUN["w"], n),
    "permutation": lambda n, _: random.permutation(KEY, n),
    "choice": lambda n, _: random.choice(KEY, n, (5,)),
    "map: num_workers": lambda n, _: RUN.map(lambda r: r + 1, num_workers=n, executor="threads"),
    "map: chunksize": lambda n, _: RUN.map(lambda r: r + 1, num_workers=2, chunksize=n, executor="threads"),
    "map: num_chunks": lambda n, _: RUN.map(lambda r: r + 1, num_workers=2, num_chunks=n, executor="threads"),
    "repeat": lambda n, _: RUN.repeat(n),
    "line_losses": lambda n, _: tdf.weights.line_losses(lambda run: run["w"].sum(), RUN, RUN * 2, points=n),
    "weight_matching": lambda n, _: tdf.weights.weight_matching(WEIGHTS, WEIGHTS, max_iter=n),
}
# Sizes of tensors: torch takes no floats.
SIZES = {
    "random.normal": lambda n, _: random.normal(KEY, (n, 3)),
    "random.normal, one": lambda n, _: random.normal(KEY, n),
    "random.split": lambda n, _: random.split(KEY, n),
    "random.gumbel": lambda n, _: random.gumbel(KEY, (n,)),
    "expand": lambda n, _: RUN[:1].expand(n),
    "batch_size": lambda n, _: tdf.TensorDict({"a": torch.zeros(2, 2)}, n).batch_size,
    "BatchEnsembleLinear": lambda n, _: BatchEnsembleLinear(2, 3, n).scale_in.shape,
}
WHOLE = {
    "numpy": np.int64(2),
    "a narrow one of numpy": np.uint8(2),
    "an array": np.array(2),
    "a tensor": torch.tensor(2),
}
FLOATS = {"a float": 2.0, "a float of numpy": np.float64(2)}
WRONG = {
    "a fraction": 2.5,
    "a fraction of numpy": np.float64(2.5),
    "nan": float("nan"),
    "infinite": float("inf"),
    "a text": "2",
    "a fraction in a tensor": torch.tensor(2.5),
}


MARGINS = {
    "EarlyStopping": lambda margin: sweep.EarlyStopping(3, min_delta=margin),
    "ReduceOnPlateau": lambda margin: optim.schedules.ReduceOnPlateau(threshold=margin),
}


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), np.float64("nan")])
@pytest.mark.parametrize("call", MARGINS.values(), ids=MARGINS)
def test_a_margin_is_finite(call, margin):
    """With a NaN nothing would ever be an improvement."""
    with pytest.raises(ValueError, match="must be finite"):
        call(margin)


def plain(result):
    """Return a result as plain values, which compare with ==."""
    if isinstance(result, tdf.TensorDict):
        return {key: plain(value) for key, value in result.items()}
    return result.tolist() if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("number", [*WHOLE.values(), *FLOATS.values()], ids=[*WHOLE, *FLOATS])
@pytest.mark.parametrize("call", COUNTS.values(), ids=COUNTS)
def test_a_whole_number_is_a_count(call, number, tmp_path):
    """Of Python, numpy or torch, and a float without a fraction."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert plain(call(number, tmp_path / "a")) == plain(call(2, tmp_path / "b"))


@pytest.mark.parametrize("number", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("call", SIZES.values(), ids=SIZES)
def test_a_whole_number_is_a_size(call, number, tmp_path):
    """Sizes often come from numpy."""
    assert plain(call(number, tmp_path)) == plain(call(2, tmp_path))


@pytest.mark.parametrize("number", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", [name for name in COUNTS if name != "max_shard_size"])
def test_what_is_not_a_whole_number_is_refused(name, number, tmp_path):
    """A count with a fraction would never be reached; the message has the argument."""
    with pytest.raises(TypeError, match=r".+ must be a whole number"):
        COUNTS[name](number, tmp_path)


@pytest.mark.parametrize("number", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", SIZES.values(), ids=SIZES)
def test_what_is_not_a_whole_number_is_not_a_size(call, number, tmp_path):
    """As torch refuses it."""
    with pytest.raises(TypeError):
        call(number, tmp_path)


@pytest.mark.parametrize("number", [0, -1, np.int64(-3), torch.tensor(0), 0.0])
def test_a_count_below_its_least_is_refused(number):
    """With the least in the message."""
    with pytest.raises(ValueError, match="members must be at least 1"):
        as_count("members", number)


DRAWS = {
    "normal": lambda key: random.normal(key, (3,)),
    "uniform": lambda key: random.uniform(key, (3,)),
    "split": random.split,
    "fold_in": lambda key: random.fold_in(key, 1),
    "randint": lambda key: random.randint(key, (3,), 0, 5),
    "permutation": lambda key: random.permutation(key, 5),
    "bernoulli": lambda key: random.bernoulli(key, 0.5, (3,)),
    "categorical": lambda key: random.categorical(key, LOGITS),
}


@pytest.mark.parametrize("key", [0, np.int64(3), True, 2.5, "a", None, torch.Generator(), np.random.default_rng(0)])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_is_not_a_key_is_refused_by_draws(draw, key):
    """A draw takes one key; `key=` and `rng=` of other functions take a seed as well."""
    with pytest.raises(TypeError, match="the key is not a random key"):
        draw(key)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_error_of_a_seed_in_place_of_a_key_has_the_way(draw):
    """The line that makes a key of it."""
    with pytest.raises(TypeError, match=r"tdfunc\.random\.key\(7\)"):
        draw(7)


RATES = {
    "lr": lambda rate: train(optim.sgd(rate)),
    "momentum": lambda rate: train(optim.sgd(0.1, momentum=rate)),
    "beta": lambda rate: train(optim.adam(0.1, betas=(rate, 0.9))),
    "decay": lambda rate: train(optim.ema(optim.sgd(0.1), rate)),
    "alpha": lambda rate: calibration.conformal_threshold(LOGITS[:, 0], rate),
    "Lora: dropout": lambda rate: tdf.lora.Lora("0.weight", 2, dropout=rate).dropout,
    "Lora: alphas": lambda rate: tdf.lora.Lora("0.weight", 2, alpha={"*": rate}).alpha["*"],
}
NUMBERS = {
    "numpy": np.float64(0.25),
    "a narrow one of numpy": np.float32(0.25),
    "an array": np.array(0.25),
    "a tensor": torch.tensor(0.25),
    "a wide tensor": torch.tensor(0.25, dtype=torch.float64),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("call", RATES.values(), ids=RATES)
def test_a_number_of_any_kind_is_a_rate(call, number):
    """With the result of the same number of Python."""
    torch.testing.assert_close(call(number), call(0.25))


@pytest.mark.parametrize("number", ["0.25", None])
@pytest.mark.parametrize("call", RATES.values(), ids=RATES)
def test_what_is_not_a_number_is_not_a_rate(call, number):
    """A text of a configuration, for example."""
    with pytest.raises(TypeError, match="is not a number"):
        call(number)


TEXTS = {
    "names": lambda: tdf.TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names="ab"),
    "with_names": lambda: tdf.TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).with_names("ab"),
    "split_keys": lambda: PARAMS.split_keys("w"),
    "split_keys, of absent keys": lambda: PARAMS.split_keys("wide", strict=False),
    "topk_rewards": lambda: llm.topk_rewards("aabb", torch.arange(4.0), group_size=2, k=1),
    "tokenize_prompts: prompts": lambda: llm.tokenize_prompts(None, "ab", ["c", "d"]),
    "tokenize_prompts: responses": lambda: llm.tokenize_prompts(None, ["a", "b"], "cd"),
}


@pytest.mark.parametrize("call", TEXTS.values(), ids=TEXTS)
def test_one_text_is_not_several(call):
    """Its characters would be names, keys or prompts."""
    with pytest.raises(TypeError, match="must be several, not one text"):
        call()


@pytest.mark.parametrize("number", [32, 32.0, np.int64(32), torch.tensor(32), True])
def test_one_number_of_a_search_is_the_value_of_all_members(number):
    """As in a grid; `random.choice` would draw from the numbers below it."""
    found = sweep.random_search(KEY, 5, batch=number)["batch"]

    assert found.tolist() == [number] * 5


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("dim", [np.int64(0), torch.tensor(0), np.int64(-1)], ids=["numpy", "tensor", "negative"])
def test_a_dimension_is_an_integer_of_any_kind(name, dim):
    """Reductions to one position take what the others take."""
    assert_trees_equal(getattr(RUN, name)(dim), getattr(RUN, name)(0))


@pytest.mark.parametrize("mode", ["MIN", "minimum", None])
def test_a_plateau_has_one_of_two_modes(mode):
    """Another one would count as `max`."""
    with pytest.raises(ValueError, match="mode must be one of 'min', 'max'"):
        optim.schedules.ReduceOnPlateau(mode=mode)


@pytest.mark.parametrize(
    "members",
    [
        (),
        (optim.sgd(0.1), optim.clip_by_global_norm(1.0)),
        ([optim.clip_by_global_norm(1.0), optim.sgd(0.1)],),
        (optim.sgd(0.1), optim.sgd(0.1)),
        (optim.clip_by_global_norm(1.0), optim.sgd),
    ],
)
def test_a_chain_ends_with_its_one_optimizer(members):
    """Found where the chain is made."""
    with pytest.raises(TypeError, match="maps of gradients and then one optimizer"):
        optim.chain(*members)


@pytest.mark.parametrize("share", [20, 1.5, -0.1, [0.5, 2]])
@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("ties", "density"),
        ("breadcrumbs", "density"),
        ("breadcrumbs", "gamma"),
        ("della_linear", "density"),
        ("sce", "select_topk"),
    ],
)
def test_a_share_is_not_a_percentage(method, option, share):
    """Of 20 all numbers would be kept."""
    stacked = tdf.TensorDict({"w": torch.randn(2, 4)}, [2])
    options = {option: share} | ({"key": 0} if method == "della_linear" else {})

    with pytest.raises(ValueError, match=f"{option} is a share of the numbers"):
        getattr(tdf.weights, method)(PARAMS, stacked, [1.0, 1.0], **options)


@pytest.mark.parametrize(
    ("method", "options", "expected", "says"),
    [
        ("linear", {"normalize": "false"}, TypeError, "normalize must be True or False"),
        ("ties", {"rescale": "no"}, TypeError, "rescale must be True or False"),
        ("karcher", {"max_iter": 2.5}, TypeError, "max_iter must be a whole number"),
        ("karcher", {"max_iter": -1}, ValueError, "max_iter must be at least 0"),
        ("della", {"epsilon": -0.1, "key": 0}, ValueError, "epsilon must not be negative"),
    ],
)
def test_an_option_of_a_merge_has_its_kind(method, options, expected, says):
    """A text would be True, and a negative number another merge."""
    stacked = tdf.TensorDict({"w": torch.randn(2, 4)}, [2])

    with pytest.raises(expected, match=says):
        getattr(tdf.weights, method)(PARAMS, stacked, [1.0, 1.0], **options)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), {"*": -np.inf}, torch.tensor(float("nan"))])
def test_an_alpha_is_finite(alpha):
    """The change of each weight would be NaN."""
    with pytest.raises(ValueError, match="Lora: alpha must be finite"):
        tdf.lora.Lora("0.weight", 2, alpha=alpha)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_an_adapter_has_a_floating_dtype(dtype):
    """All of its numbers would be 0."""
    params = tdf.from_module(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=f"dtype is not a floating-point one.*(?s:.*){dtype}"):
        tdf.lora.Lora("0.weight", 2).init(params, key=0, dtype=dtype)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25)], ids=repr)
def test_an_adapter_has_plain_numbers(number, tmp_path):
    """Its configuration can be written and read."""
    own = tdf.lora.Lora("0.weight", rank=np.int64(2), alpha=number * 32, dropout=number)
    tdf.lora.save(tmp_path, own, own.init(WEIGHTS, key=0).apply(torch.ones_like), APPLY)

    found, _ = tdf.lora.load(tmp_path, WEIGHTS, apply=APPLY)

    assert found.rank == 2
    assert found.alpha == 8
    assert found.dropout == 0.25


@pytest.mark.parametrize("flag", ["none", "false", "", None, 2, 0.5])
@pytest.mark.parametrize("name", ["bias", "dora", "rslora"])
def test_a_flag_is_true_or_false(name, flag):
    """PEFT's `bias="none"` would be True."""
    with pytest.raises(TypeError, match=f"Lora: {name} must be True or False"):
        tdf.lora.Lora("0.weight", 2, **{name: flag})


@pytest.mark.parametrize("flag", [1, np.bool_(True), torch.tensor(True), 1.0], ids=repr)
def test_a_flag_of_any_kind_is_a_bool(flag):
    """A plain one, which a file can have."""
    assert tdf.lora.Lora("0.weight", 2, bias=flag).bias is True


def test_a_line_has_two_points():
    """The barrier on one point is 0."""
    with pytest.raises(ValueError, match="points must be at least 2"):
        tdf.weights.barrier(lambda run: run["w"].sum(), RUN, RUN, points=1)


def test_a_class_is_not_a_filter():
    """It would be called with each leaf."""
    with pytest.raises(tdf.FilterError, match=r"a class does not choose.*\n.*\n.*Linear\n.*tdfunc\.of_type"):
        tdf.Filter(nn.Linear)
