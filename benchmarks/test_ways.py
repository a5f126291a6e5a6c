"""The ways of a case do the same, and are the structures that its words say."""

import pytest
import torch

from benchmarks import compiled, ensembles, optimizers, scaling, training


def test_training_ways_do_the_same():
    """The rows of training steps would compare different steps."""
    torch.manual_seed(0)
    models = [training.make_model("mlp") for _ in range(2)]
    x, t = training.make_data("mlp")
    ways = {
        "ours": training.ours(models, x, t),
        "loop": training.loop(models, x, t),
        "stacked": training.stacked(models, x, t),
        "fused": training.stacked_fused(models, x, t),
    }
    for way in ways.values():
        for _ in range(3):
            way()
    ours, loop, stacked, fused = (_closure(way) for way in ways.values())
    reference = [torch.stack(leaves) for leaves in zip(*[list(m.parameters()) for m in loop["members"]], strict=True)]

    for mine, theirs, expected in zip(ours["now"][0].leaves(), stacked["now"][0], reference, strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)
        assert torch.allclose(theirs, expected, atol=1e-5)
    for leaf, expected in zip(fused["params"].values(), reference, strict=True):
        assert torch.allclose(leaf, expected, atol=1e-5)


@pytest.mark.parametrize("name", optimizers.RULES)
def test_optimizer_ways_do_the_same(name):
    """The rows of rules would compare different steps."""
    torch.manual_seed(0)
    models = [optimizers.mlp(16, 64, 64, 1) for _ in range(2)]
    ways = [way(name, models, [0.1, 0.01]) for way in (optimizers.ours, optimizers.loop)]
    for way in ways:
        for _ in range(3):
            way()
    trained, members = _closure(ways[0])["now"][0], _closure(ways[1])["optimizers"]
    expected = [torch.stack(leaves) for leaves in zip(*[m.param_groups[0]["params"] for m in members], strict=True)]

    for mine, theirs in zip(trained.leaves(), expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def _closure(fn):
    return dict(zip(fn.__code__.co_freevars, [cell.cell_contents for cell in fn.__closure__], strict=True))


# torch's fused encoder layer has no batching rule, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("model", ensembles.MODELS)
def test_ensemble_ways_agree(model):
    """`auto` would be compared with ways that compute something else."""
    make, shape = ensembles.MODELS[model]
    trees_ = [make().eval() for _ in range(2)]
    apply, _, _ = ensembles.tdf.functional(trees_[0])
    tree, x = ensembles.stack_modules(trees_), torch.randn(*shape)

    with torch.no_grad():
        results = {how: ensembles.Ensemble(apply, how)(tree, x) for how in ("loop", "vmap")}

    assert torch.allclose(results["loop"], results["vmap"], atol=1e-5)


def test_depth_trees_have_the_same_leaves():
    """Depth would be compared between trees of different sizes."""
    counts = [
        len(list(t.keys(True, True)))
        for t in (scaling.flat_tree(1024), scaling.wide_tree(32, 32), scaling.deep_tree(32, 32))
    ]
    modules_ = [
        scaling.Weights([], 1024),
        scaling.Weights([scaling.Weights([], 32) for _ in range(32)], 0),
        scaling.deep_module(32, 32),
    ]

    assert counts == [1024] * 3
    assert [len(list(m.parameters())) for m in modules_] == [1024] * 3


@pytest.mark.slow
def test_step_functions_compile_to_one_graph():
    """The page would be the only place that says so."""
    assert all(found.reached for found in compiled.compile_counts(print))
