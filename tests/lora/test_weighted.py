"""Several adapters as one: the weighted sum of their changes, on every layer that adapters go on."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.lora import Lora, add_weighted
from tests.lora.layers import MODULES, trained

pytestmark = pytest.mark.sample(4)


def setup(name, ranks=(2, 3), **options):
    """The function and the parameters of a module, and adapters of different ranks and scales."""
    make, where, _ = MODULES[name]
    apply, params, _ = tdf.functional(make().double())
    loras = [Lora(where, rank=rank, alpha=1.5 * rank + 1, **options) for rank in ranks]
    return apply, params, [(lora, trained(lora, params, apply, seed)) for seed, lora in enumerate(loras)]


def weighted_sum(params, pairs, weights):
    """Oracle: the sum of the changes of the merged parameters."""
    total = params
    for (lora, adapters), weight in zip(pairs, weights, strict=True):
        total = total + (lora.merge(params, adapters) - params) * weight
    return total


@pytest.mark.parametrize("name", MODULES)
def test_concatenated_adapters_are_the_weighted_sum(name):
    """Exactly, of different ranks and with a negative weight."""
    _, params, pairs = setup(name)

    lora, tree = add_weighted(params, pairs, [0.7, -1.3], combination_type="cat")

    expected = weighted_sum(params, pairs, [0.7, -1.3])
    tdf.assert_close(lora.merge(params, tree), expected, atol=1e-9, rtol=1e-7)


@pytest.mark.filterwarnings("ignore:apply. forward of Sequential scales rows:UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_a_combined_adapter_runs(name):
    """Attached to the function of the base."""
    apply, params, pairs = setup(name)
    inputs = MODULES[name][2]()
    inputs = inputs.double() if inputs.is_floating_point() else inputs

    lora, tree = add_weighted(params, pairs, [0.7, -1.3], combination_type="cat")

    expected = apply(weighted_sum(params, pairs, [0.7, -1.3]), inputs)
    torch.testing.assert_close(lora.attach(apply)((params, tree), inputs), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["linear", "conv2d", "grouped"])
@pytest.mark.parametrize("rank", [1, 2, 9])
def test_svd_is_the_closest_change_of_a_rank(name, rank):
    """Oracle: the truncated singular values of each weight's change; a rank above all of them is exact."""
    _, params, pairs = setup(name)
    change = weighted_sum(params, pairs, [1.0, 0.5]) - params

    lora, tree = add_weighted(params, pairs, [1.0, 0.5], rank=rank)

    def truncated(leaf):
        if leaf.dim() < 2:
            return leaf
        u, s, vh = torch.linalg.svd(leaf.flatten(1), full_matrices=False)
        return (u[:, :rank] * s[:rank] @ vh[:rank]).reshape(leaf.shape)

    found = lora.merge(params, tree) - params
    tdf.assert_close(found, change.apply(truncated), atol=1e-9, rtol=1e-7)


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_linear_adds_the_factors(weights):
    """Oracle: a loop of PEFT's formula, the sign of a weight with A and its root with both."""
    _, params, pairs = setup("linear", ranks=(2, 2, 2))

    _, tree = add_weighted(params, pairs, weights, combination_type="linear")

    scaled = [weight * lora.alpha / lora.rank for weight, (lora, _) in zip(weights, pairs, strict=True)]
    a = sum(
        abs(x) ** 0.5 * (1 if x >= 0 else -1) * own["0", "weight", "A"]
        for x, (_, own) in zip(scaled, pairs, strict=True)
    )
    b = sum(abs(x) ** 0.5 * own["0", "weight", "B"] for x, (_, own) in zip(scaled, pairs, strict=True))
    torch.testing.assert_close((tree["0", "weight", "A"], tree["0", "weight", "B"]), (a, b))


@pytest.mark.parametrize("combination_type", ["cat", "svd", "linear"])
def test_one_adapter_with_weight_one_is_itself(combination_type):
    """The law of a sum of one."""
    _, params, pairs = setup("linear", ranks=(2,))
    ((lora, adapters),) = pairs

    made, tree = add_weighted(params, pairs, [1.0], combination_type=combination_type)

    tdf.assert_close(made.merge(params, tree), lora.merge(params, adapters), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("combination_type", ["cat", "svd", "linear"])
def test_adapters_of_different_layers_are_joined(combination_type):
    """A weight that one of them adapts has that adapter's change."""
    _, params, _ = setup("linear")
    loras = [Lora("0.weight", rank=2), Lora(tdf.Filter("0.weight") | "1.weight", rank=2, alpha=3)]
    pairs = [(lora, trained(lora, params, None, seed)) for seed, lora in enumerate(loras)]

    lora, tree = add_weighted(params, pairs, [1.0, 2.0], combination_type=combination_type)

    found = lora.merge(params, tree)["1", "weight"]
    expected = weighted_sum(params, pairs, [1.0, 2.0])["1", "weight"]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_of_the_base_is_a_part_of_the_change(start):
    """As `merge` subtracts it."""
    _, params, pairs = setup("linear", ranks=(1, 2), start=start)

    lora, tree = add_weighted(params, pairs, [1.0, 0.5], combination_type="cat")

    tdf.assert_close(lora.merge(params, tree), weighted_sum(params, pairs, [1.0, 0.5]), atol=1e-9, rtol=1e-7)


def test_biases_are_added():
    """Also where one adapter has none."""
    _, params, pairs = setup("linear", bias=True)
    plain = replace(pairs[1][0], bias=False)
    pairs = [pairs[0], (plain, trained(plain, params, None, 5))]

    lora, tree = add_weighted(params, pairs, [0.7, -1.3], combination_type="cat")

    tdf.assert_close(lora.merge(params, tree), weighted_sum(params, pairs, [0.7, -1.3]), atol=1e-9, rtol=1e-7)


def refuse(loras, weights, **options):
    """A call with fresh adapters."""
    _, params, _ = setup("linear")
    pairs = [(lora, trained(lora, params, None, 0)) for lora in loras]
    return lambda: add_weighted(params, pairs, weights, **options)


PLAIN = Lora("*.weight", rank=2)
ERRORS = {
    "fewer weights": ([PLAIN, PLAIN], [1.0], {}, ValueError, "one weight for each"),
    "no adapters": ([], [], {}, ValueError, "1 or more adapters"),
    "a type": ([PLAIN], [1.0], {"combination_type": "ties"}, ValueError, "combination_type"),
    "a rank of cat": ([PLAIN], [1.0], {"combination_type": "cat", "rank": 2}, ValueError, "rank is an option"),
    "dora": ([replace(PLAIN, dora=True)], [1.0], {}, tdf.UnsupportedError, "magnitudes of DoRA"),
    "whole": ([replace(PLAIN, whole="*.bias")], [1.0], {}, tdf.UnsupportedError, "trained whole"),
    "ranks": (
        [PLAIN, replace(PLAIN, rank=1)],
        [1.0, 1.0],
        {"combination_type": "linear"},
        tdf.LeafMismatchError,
        "different ranks",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_added_is_named(name):
    """With the way out."""
    loras, weights, options, cls, words = ERRORS[name]

    with pytest.raises(cls, match=words):
        refuse(loras, weights, **options)()
