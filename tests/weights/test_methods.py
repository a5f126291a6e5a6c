"""Laws of every merging method in the registry, and mergekit's numbers."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tdfunc as tdf
from tests.helpers import assert_pure
from tests.weights.matrix import CASES, GOLDEN, METHODS, largest, models_of, options_of, weights_of

ROOT = Path(__file__).parent.parent.parent
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
random = pytest.mark.parametrize("method", [m for m in METHODS.values() if m.is_random], ids=lambda m: m.name)


def merge_by(method, options, base, stacked):
    """Merge models by a method with the weights of its tests."""
    return method(base, stacked, weights_of(method), **options)


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{case['method']}{i}" for i, case in enumerate(CASES)])
def test_equals_mergekit(place):
    """Each method gives the numbers of mergekit's `merge_state_dicts`."""
    case, found = CASES[place], load_file(GOLDEN / "mergekit.safetensors")
    part = lambda name: {key.split("/")[1]: x for key, x in found.items() if key.startswith(f"{name}/")}  # noqa: E731
    base = tdf.TensorDict(part("base")) if case.get("base") else None
    stacked = torch.stack([tdf.TensorDict(part(f"x{i}")) for i in range(case["models"])])
    method = METHODS[case["method"]]
    key = {"key": 0} if method.is_random else {}

    merged = method(base, stacked, case["weights"], **case.get("options", {}), **key)

    tdf.assert_close(merged, tdf.TensorDict(part(str(place))), atol=1e-6, rtol=1e-6)


@every
def test_pure_and_like_the_base(method):
    """The result has the structure, dtypes and ties of the base, and nothing that was given is written to."""
    base, stacked = models_of(method, torch.bfloat16)

    merged = assert_pure(lambda b, s: method(b, s, weights_of(method), **options_of(method)), base, stacked)

    assert merged.batch_size == base.batch_size
    assert merged.paths() == base.paths()
    assert all(x.dtype == torch.bfloat16 and x.isfinite().all() for x in merged.leaves())


@every
def test_models_equal_to_the_base_stay(method):
    """Merging copies of one model gives that model."""
    base, stacked = models_of(method)
    count = stacked.batch_size[0]
    same = torch.stack([base] * count)

    merged = method(base, same, torch.full((count,), 1 / count, dtype=torch.float64), **options_of(method))

    tdf.assert_close(merged, base, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [(3,), (2, 2)])
@every
def test_members_of_ensembles_are_merged_one_by_one(method, size):
    """A merge of ensembles is the ensemble of the merges; random methods are compared where they keep every number."""
    base, stacked = models_of(method)
    scale = 1 + torch.rand(size, dtype=torch.float64)
    bases = base.expand(size) * scale
    models = torch.stack([model.expand(size) * scale.square() for model in stacked])
    options = options_of(method) | ({"density": 1.0} if method.is_random else {})
    run = partial(merge_by, method, options)

    merged = run(bases, models)

    members = [run(b, s) for b, s in zip(bases.flatten(), models.flatten(1, -1).unbind(1), strict=True)]
    assert merged.batch_size == size
    tdf.assert_close(merged.flatten(), torch.stack(members), atol=1e-12, rtol=1e-9)


@random
def test_members_have_their_own_random_numbers(method):
    """Equal members of an ensemble drop other numbers."""
    base, stacked = tdf.TensorDict({"w": torch.zeros(100)}), tdf.TensorDict({"w": torch.rand(2, 100)}, [2])
    twice = torch.stack([model.expand(2) for model in stacked])

    merged = method(base.expand(2), twice, [1.0, 1.0], density=0.5, key=0)

    assert (merged[0]["w"] == 0).ne(merged[1]["w"] == 0).any()


@every
def test_vmapped_over_weights_and_models(method):
    """Merges with several weights, or of several sets of models, in one call are the merges one by one."""
    base, stacked = models_of(method)
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(8, stacked.batch_size[0], generator=generator, dtype=torch.float64) + 0.1
    sets = torch.stack([stacked, stacked.apply(lambda x: 1.5 * x)])
    by_weights = lambda w: method(base, stacked, w, **options_of(method))  # noqa: E731
    by_models = lambda s: method(base, s, weights_of(method), **options_of(method))  # noqa: E731

    for run, given in ((by_weights, weights), (by_models, sets)):
        for merged, one in zip(torch.vmap(run)(given), given, strict=True):
            tdf.assert_close(merged, run(one), atol=1e-9, rtol=1e-9)


@every
def test_gradient_by_the_weights(method):
    """The gradient by the weights is that of finite differences, and not zero."""
    base, stacked = models_of(method)
    weights = weights_of(method).requires_grad_()
    run = lambda w: tuple(method(base, stacked, w, **options_of(method)).leaves())  # noqa: E731

    torch.autograd.gradcheck(run, (weights,), eps=1e-7, atol=1e-4)
    (grad,) = torch.autograd.grad(sum(x.square().sum() for x in run(weights)), weights)
    assert 0 < grad.abs().max() < torch.inf


@every
def test_gradient_by_the_models_is_finite(method):
    """No branch that was not taken leaves a nan, also where models are equal or a leaf is zero."""
    base, stacked = models_of(method)
    stacked = stacked.at["layer", "vector"].set(torch.zeros_like(stacked["layer", "vector"]))
    stacked = stacked.at["layer", "matrix"].set(base["layer", "matrix"].expand_as(stacked["layer", "matrix"]))
    run = lambda s: sum(  # noqa: E731
        x.square().sum() for x in method(base, s, weights_of(method), **options_of(method)).leaves()
    )

    assert all(x.isfinite().all() for x in torch.func.grad(run)(stacked).leaves())


@pytest.mark.slow
@every
def test_traced(method):
    """A jitted merge replays with other weights."""
    base, stacked = models_of(method)
    run = tdf.jit(lambda b, s, w: method(b, s, w, **options_of(method)))
    run(base, stacked, torch.ones_like(weights_of(method)))

    merged = run(base, stacked, weights_of(method))

    tdf.assert_close(merged, method(base, stacked, weights_of(method), **options_of(method)), atol=1e-9, rtol=1e-9)


@every
def test_leaf_by_leaf(method):
    """A leaf does not depend on the rest of the tree, so that a file can be merged in pieces."""
    base, stacked = models_of(method)
    run = partial(merge_by, method, options_of(method))
    whole = run(base, stacked)

    alone = {path: run(base.select(path), stacked.select(path))[path] for path in base.paths()}
    torch.testing.assert_close(alone, {path: whole[path] for path in alone}, rtol=0, atol=0)


@random
def test_random_methods_keep_the_expectation(method):
    """Over many keys the mean of the merges is the merge of everything."""
    base = tdf.TensorDict({"w": torch.zeros(4, 8)})
    # One model: the vote drops nothing.
    stacked = tdf.TensorDict({"w": torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))}, [1])
    keys = tdf.random.split(tdf.random.key(0), 20_000)

    merged = torch.vmap(lambda key: method(base, stacked, torch.ones(1), density=0.5, key=key)["w"])(keys)

    torch.testing.assert_close(merged.mean(0), stacked["w"][0], atol=0.1, rtol=0.05)
    assert (merged == 0).float().mean() == pytest.approx(0.5, abs=0.02)


def test_della_keeps_larger_numbers_more_often():
    """The probability rises by rank from density - epsilon to density + epsilon; one number has the middle rank."""
    base = tdf.TensorDict({"w": torch.zeros(5), "rows": torch.zeros(2, 1)})
    stacked = tdf.TensorDict({"w": torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0]]), "rows": torch.ones(1, 2, 1)}, [1])
    keys = tdf.random.split(tdf.random.key(0), 20_000)
    run = lambda key: tdf.weights.della_linear(base, stacked, torch.ones(1), density=0.5, epsilon=0.2, key=key)  # noqa: E731

    kept = torch.vmap(run)(keys).apply(lambda x: (x != 0).float().mean(0), batch_size=[])

    torch.testing.assert_close(kept["w"], torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7]), atol=0.02, rtol=0)
    torch.testing.assert_close(kept["rows"], torch.full((2, 1), 0.5), atol=0.02, rtol=0)


# Merges at the limits of their conditions: (method, base, models, weights, options, result).
LIMITS = [
    ("slerp", [1.0, 0.0], [[-2.0, 0.0]], [0.25], {}, [0.25, 0.0]),
    # The cosine is 0.9995, the last one with an arc.
    ("slerp", [1.0, 0.0], [[569.0, 18.0]], [0.5], {}, [570 / 1.99975, 18 / 1.99975]),
    ("nuslerp", [0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [1.0, -1.0], {}, [0.5**0.5, 0.5**0.5]),
    ("nuslerp", [0.0, 0.0], [[1.0, 0.0], [3.0, 0.0]], [1.0, 1.0], {}, [2.0, 0.0]),
    ("multislerp", [0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], {"normalize_weights": False}, [2**0.5, 2**0.5]),
    ("multislerp", [0.0, 0.0], [[1.0, 0.0], [-3.0, 0.0]], [1.0, 1.0], {"eps": 0.0}, [-1.0, 0.0]),
    ("multislerp", [1.0], [[1.0]] * 3, [1.0] * 3, {"eps": 0.0}, [1.0]),
    ("karcher", [0.0, 0.0], [[0.0, 0.0], [0.0, 3.0], [0.0, -3.0]], [1, 1, 1], {"tol": 0.0}, [0.0, 2.0]),
    ("karcher", [0.0, 0.0], [[0.0, 1e-6], [1.0, 0.0], [0.0, 1.0]], [1, 3, 1], {"max_iter": 1}, [0.739104, 0.306147]),
    # The square of the norm of this direction is above 1 in float32.
    ("karcher", [0.0, 0.0], [[1.0, 4.0], [-1.0, -4.0]], [3.0, 1.0], {}, [1.0, 4.0]),
    ("model_stock", [1.0, 1.0], [[1.0, 2.0], [1.0, 0.0]], [3.0, 1.0], {}, [1.0, 1.0]),
    ("task_arithmetic", [0.0], [[3.0], [1.0]], [1.0, -1.0], {"normalize": True}, [2.0]),
    ("ties", [0.0], [[1.0], [-1.0]], [1.0, 1.0], {}, [1.0]),
    ("ties", [0.0, 0.0, 0.0], [[1.0, 2.0, 3.0]], [1.0], {"density": 0.01}, [0.0, 0.0, 3.0]),
    ("breadcrumbs", [0.0, 0], [[1.0, 2]] * 2, [1, 1], {"density": [1, 0.5], "gamma": 0.5, "rescale": True}, [4.0, 2]),
    ("dare_linear", [5.0, 6.0], [[1.0, 1.0]], [1.0], {"density": 0.0, "key": 0}, [5.0, 6.0]),
    ("della_linear", [5.0, 6.0], [[1.0, 1.0]], [1.0], {"density": 0.0, "key": 0}, [5.0, 6.0]),
    ("sce", [0.0], [[1e-4], [3e-4]], [1.0, 1.0], {}, [2e-4]),
    # A number in which no model differs is kept with all numbers, and else dropped.
    ("sce", [0.0, 0.0], [[1e-3, 2e-3], [1e-3, 3e-3]], [1.0, 1.0], {}, [1e-3, 8e-3 / 3]),
    ("sce", [1.0, 1.0], [[2.0, 3.0]], [1.0], {"select_topk": 0.5}, [1.0, 1.0]),
    ("ram", [0.0, 0.0], [[1.0, 2.0], [0.0, 4.0]], [1.0, 1.0], {"epsilon": 1.0}, [0.0, 3.0]),
    ("ramplus_tl", [0.0, 0.0, 0.0], [[1.0, 2.0, 4.0], [0.0, 2.0, 0.0]], [1.0, 1.0], {"epsilon": 1.0}, [0.0, 2.0, 4.08]),
    # The smaller probability of each row is 0 in float32.
    ("arcee_fusion", [0.0] * 5, [[3.0, 4.9, 1.0, 3.2, 2.0]], [1.0], {}, [0.0, 4.9, 0.0, 0.0, 0.0]),
    ("arcee_fusion", [0.0, 200.0], [[200.0, 0.0]], [1.0], {}, [200.0, 0.0]),
]


@pytest.mark.parametrize(("name", "base", "models", "weights", "options", "expected"), LIMITS)
def test_values_at_the_limits(name, base, models, weights, options, expected):
    """Vectors that cancel out, weights whose sum is 0 and numbers at a threshold have the documented result."""
    models = tdf.TensorDict({"w": torch.tensor(models)}, [len(models)])

    merged = METHODS[name](tdf.TensorDict({"w": torch.tensor(base)}), models, weights, **options)

    torch.testing.assert_close(merged["w"], torch.tensor(expected), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_merged(dtype):
    """Numbers of 8 bits, complex ones and leaves without any are merged, also without a base."""
    stacked = tdf.TensorDict({"w": torch.tensor([[1.0, 3], [3, 5]]), "none": torch.empty(2, 0)}, [2]).to(dtype)

    merged, one = (tdf.weights.linear(None, stacked[:count], [1.0] * count) for count in (2, 1))

    assert merged["w"].to(torch.complex64).tolist() == [2, 4]
    assert [(x.shape, x.dtype) for x in (merged["none"], one["none"])] == [((0,), dtype)] * 2


def test_ties_and_integers_stay():
    """A tied leaf is merged once and stays tied; integers that all models share are kept."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3), "c": torch.nn.BatchNorm1d(3)})
    module["b"].weight = module["a"].weight
    base = tdf.from_module(module).detach()

    merged = tdf.weights.linear(base, torch.stack([base, base]), [1.0, 1.0])

    assert merged.ties() == [["a.weight", "b.weight"]]
    assert merged["c", "num_batches_tracked"].dtype == torch.int64


W, T = tdf.weights, tdf.TensorDict
MODEL = T({"w": torch.zeros(2)})
TWO = torch.stack([MODEL, MODEL])
WIDE, COUNTS, ROUND = T({"w": torch.zeros(2, 3)}, [2]), T({"n": torch.tensor([1, 2])}, [2]), torch.eye(3) - 1 / 3


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: W.ties(None, TWO, [1, 1]), ValueError, "requires a base"),
        (lambda: W.slerp(MODEL, TWO, [1, 1]), ValueError, "expected: 1"),
        (lambda: W.model_stock(MODEL, TWO[:1], [1]), ValueError, "expected: at least 2"),
        (lambda: W.linear(MODEL, MODEL, [1]), tdf.BatchSizeError, "are not stacked"),
        (lambda: W.linear(MODEL, TWO, [1, 1, 1]), tdf.BatchSizeError, "not one for each model"),
        (lambda: torch.vmap(lambda w: W.linear(MODEL, TWO, w))(torch.ones(4, 3)), tdf.BatchSizeError, "each"),
        (lambda: W.ties(MODEL, TWO.rename_key("w", "v"), [1, 1]), tdf.TreeStructureError, "different keys"),
        (lambda: W.ties(MODEL, WIDE, [1, 1]), tdf.LeafMismatchError, "'w' does not have the shape"),
        (lambda: W.linear(None, COUNTS, [1, 1]), tdf.LeafMismatchError, "'n'.*differs between"),
        (lambda: W.multislerp(None, T({"w": ROUND}, [3]), [1, 1, 1]), ValueError, "cancel out"),
    ],
)
def test_errors_name_what_must_hold(call, kind, text):
    """A base that lacks, another number of models or weights, other leaves: each has its message."""
    with pytest.raises(kind, match=text):
        call()


def test_the_page_lists_every_method():
    """docs/merging.md has each method of the package, in its order, with its base and number of models."""
    page = (ROOT / "docs" / "merging.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (unused|optional|required) \| ([^|]+) \|", page, re.MULTILINE)
    rows = tdf.weights.table().splitlines()[2:]
    # Bars inside of definitions are escaped.
    cells = [re.split(r"(?<!\\) ?\| ?", row) for row in rows]

    assert listed == [(row[1].strip("`"), row[3], row[4]) for row in cells]


def test_the_table_is_that_of_the_mapping():
    """The table has the methods of the mapping that it is given, and each method of the package has an oracle."""
    assert {case["method"] for case in CASES} == set(tdf.weights.METHODS)
    assert largest.__doc__.startswith("Take the largest step")
    assert "| `largest` | `b + max w d` |" in tdf.weights.table(METHODS)
    assert repr(largest) == "<merging method largest>"
