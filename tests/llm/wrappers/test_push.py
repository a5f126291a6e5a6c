"""A push of weights is proven, or the engine is not used."""

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import ConcurrencyError, TreeStructureError
from tdfunc.llm.wrappers.push import draw_prompts, proven_label
from tests.helpers import quick
from tests.llm.models import make
from tests.llm.wrappers.pushing import KINDS, FakeEngine, count_pushes, other_weights, push, stale, trees_of


@pytest.fixture(scope="module")
def made():
    """Two models with other weights everywhere."""
    return [other_weights(make("llama"), seed) for seed in (3, 4)]


def test_a_push_replaces_the_weights(made):
    """The engine then computes what the tree computes, and its label is set."""
    first, second = made
    engine = FakeEngine(first)
    done = push(engine, second, version="7")

    assert done.version == proven_label(engine.label()) == "7"
    assert done.difference < 1e-5
    assert done.unread is None
    torch.testing.assert_close(list(engine.model.parameters()), list(second.parameters()), rtol=0, atol=0)


def test_the_record_of_a_push_has_a_digest_for_each_leaf(made):
    """All differ, and those of equal weights are equal, whatever the proof."""
    first, second = made
    engine = FakeEngine(first)
    done = push(engine, second, version="7")

    assert list(done.digests) == list(second.state_dict())
    assert len(set(done.digests.values())) == len(done.digests)
    assert push(engine, second, version="8", proof="full").digests == done.digests


def test_a_push_may_differ_by_its_tolerance(made):
    """And no more: the difference itself is allowed."""
    first, second = made
    engine = FakeEngine(first)
    limit = push(engine, second, key=5).difference

    assert push(engine, second, key=5, tolerance=limit).difference == limit


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom"])
def test_trees_with_buffers_are_pushed(family):
    """Instead of the buffers beside them; a tie needs one of its paths, and prompts fit the positions."""
    model = make(family, **({"max_position_embeddings": 6} if family == "llama" else {}))
    model.register_buffer("count", torch.ones(1, dtype=torch.int64))
    (_, params, buffers), engine = trees_of(model), FakeEngine(model)
    tree, head = tdf.combine(params, buffers), ("lm_head", "weight")
    done = push(engine, model, tree=tree, buffers=None, proof="full")

    assert done.digests.keys() == model.state_dict().keys()
    assert set(done.unread) <= {"transformer.wpe.weight"}
    assert max(map(len, engine.prompts)) == (5 if family == "llama" else 9)
    if model.config.tie_word_embeddings:
        assert head not in push(engine, model, tree=tree.delete(head), buffers=None).digests


FAULTS = {
    "dropped": ValueError,
    "swapped": ValueError,
    "scaled": ValueError,
    "stale cache": ValueError,
    "killed": ConnectionError,
    "left": ConcurrencyError,
    "busy": ConcurrencyError,
}


def push_with_faults(engine, model):
    """A faulty push and a whole one: the errors of the push and of the label after it, and the label at last."""
    found = []
    for call in (lambda: push(engine, model), lambda: proven_label(engine.label())):
        try:
            found.append(call())
        except Exception as err:
            found.append(err)
    engine.fault = None
    push(engine, model)
    return *found, proven_label(engine.label())


@pytest.mark.parametrize("count", quick([3, 150], 3))
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(made, name, count, seed):
    """A faulty push raises, the engine counts as unproven, and the next push mends it."""
    draws, shapes = random.Random(seed), [leaf.shape for leaf in made[1].state_dict().values()]
    usable = [i for i in range(len(shapes)) if name != "swapped" or shapes.index(shapes[i]) == i]
    usable = [i for i in usable if name != "swapped" or shapes.count(shapes[i]) > 1]
    found = {}
    for number in range(count):
        engine = FakeEngine(made[0])
        engine.fault, engine.chosen = name, draws.choice(usable)
        engine.factor = draws.choice([0.0, 0.5, 0.98, 1.02, 2.0, -1.0, float("nan")])
        found[number, engine.chosen, engine.factor] = push_with_faults(engine, made[1])

    assert {case: error for case, (error, *_) in found.items() if not isinstance(error, FAULTS[name])} == {}
    labels = {case: label for case, (_, label, _) in found.items() if not isinstance(label, ConcurrencyError)}
    assert labels == {}
    pattern = "are not proven(?s:.*)'1'(?s:.*)push again"
    assert [str(label) for _, label, _ in found.values() if not re.search(pattern, str(label))] == []
    assert {case: label for case, (*_, label) in found.items() if label != "1"} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_a_random_place_is_caught(kind, seed):
    """A wrong row or expert is caught by a full proof at once, and by the prompts of a few pushes otherwise."""
    start, model = (other_weights(make("qwen3_moe"), each) for each in (seed, seed + 1))
    # One of three pushes reads a row; a hundred miss it with a probability of 1e-13.
    assert count_pushes(kind, start, model, random.Random(seed), 100) is not None
    assert count_pushes(kind, start, model, random.Random(seed), 1, proof="full") == 1


def test_unread_experts_are_named():
    """A full proof names the experts that no prompt reached: those stale pass, others do not, and digests cover all."""
    start, model = (other_weights(make("qwen3_moe", num_experts=96, num_experts_per_tok=1), seed) for seed in (1, 2))
    unread = push(FakeEngine(start), model, proof="full", key=3).unread
    name = "model.layers.0.mlp.experts.down_proj"
    rows = unread[name]

    assert 0 < len(rows) < 96
    assert set(unread) <= {each for each, leaf in model.named_parameters() if "mlp" in each}
    engine = FakeEngine(start)
    engine.fault = stale(name, rows)
    assert push(engine, model, proof="full", key=3).unread == unread
    engine = FakeEngine(start)
    engine.fault = stale(name, next(i for i in range(96) if i not in rows))
    with pytest.raises(ValueError, match="log-probs of the engine and the tree differ"):
        push(engine, model, proof="full", key=3)


@given(st.integers(2, 60), st.integers(1, 70), st.integers(0, 9))
def test_prompts_have_each_id_once_behind_another_token(vocabulary, length, seed):
    """A full proof scores each id once; a proof by one prompt has its first prompt, of different ids."""
    key = tdf.random.key(seed)
    prompts = draw_prompts(key, vocabulary, length, whole=True)

    assert sorted(torch.cat([ids[1:] for ids in prompts]).tolist()) == list(range(vocabulary))
    assert all(a[-1] == b[0] for a, b in zip(prompts, prompts[1:], strict=False))
    assert max(map(len, prompts)) <= max(length, 2)
    (one,) = draw_prompts(key, vocabulary, length, whole=False)
    assert torch.equal(one, prompts[0])


def test_each_push_draws_its_own_ids(made):
    """Unless it is given a key; torch's default generator is not drawn from."""
    engine, state = FakeEngine(made[0]), torch.get_rng_state()
    for options in ({}, {}, {"key": 5}, {"key": tdf.random.key(5)}):
        push(engine, made[1], **options)
    _, a, _, b, _, c, _, d = [ids.tolist() for ids in engine.prompts]

    assert c == d
    assert a != b != c
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        ("lacks '{name}'", lambda params, path: params.delete(path)),
        ("has the unknown 'x.y'", lambda params, path: params.set(("x", "y"), torch.zeros(1))),
        ("leaf '{name}' does not have the shape", lambda params, path: params.set(path, torch.zeros(2))),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_names_are_checked_before_anything_is_sent(made, pattern, change):
    """Missing, unknown and misshapen leaves: the engine keeps its weights and its label."""
    params = trees_of(made[1])[1]
    path = next(iter(params.paths()))
    pattern, engine = pattern.format(name=".".join(path)), FakeEngine(made[0])
    with pytest.raises(TreeStructureError, match=f"{pattern}(?s:.*)nothing was sent"):
        push(engine, made[1], tree=change(params, path))
    assert engine.loads == 0
    assert proven_label(engine.label()) == "default"


def test_nan_is_no_proof(made):
    """Weights that give NaN on both sides are refused."""
    broken = other_weights(made[1], 0)
    with torch.no_grad():
        for leaf in broken.parameters():
            leaf.mul_(float("nan"))
    with pytest.raises(ValueError, match="log-probs of the engine and the tree differ"):
        push(FakeEngine(made[0]), broken)
