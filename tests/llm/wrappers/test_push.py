"""A push of weights is proven, or the engine is not used."""

import copy
import random

import pytest
import torch

import tdfunc as tdf
from tdfunc import ConcurrencyError, TreeStructureError
from tdfunc.llm import causal_lm
from tdfunc.llm.wrappers.push import AbstractEngine, Probe, proven_label, push_weights
from tests.llm.models import make, row_log_probs


class FakeEngine(AbstractEngine):
    """A model with a cache of prompts; `fault` names how the next load or reset goes wrong, `chosen` the leaf."""

    def __init__(self, model):
        self.model, self.cache, self.version = copy.deepcopy(model), {}, "default"
        self.fault, self.chosen, self.factor, self.loads = None, 0, 1.0, 0

    def load(self, weights):
        """Write the weights, but for the fault."""
        self.loads += 1
        own = self.model.state_dict()
        given = {}
        for i, (name, leaf) in enumerate(weights):
            if i == self.chosen and self.fault == "killed":
                raise ConnectionError("the worker is gone")
            if i == self.chosen and self.fault == "left":
                break
            given[name] = leaf.clone()
        name = list(own)[self.chosen]
        if self.fault == "dropped":
            given.pop(name)
        elif self.fault == "scaled":
            given[name] = given[name] * self.factor
        elif self.fault == "swapped":
            other = next(each for each in reversed(own) if own[each].shape == own[name].shape)
            given[name], given[other] = given[other], given[name]
        with torch.no_grad():
            for each, leaf in given.items():
                own[each].copy_(leaf)

    def reset_cache(self):
        """Drop the cache, but for the fault."""
        if self.fault == "busy":
            return False
        if self.fault != "stale cache":
            self.cache.clear()
        return True

    def probe(self, ids):
        """Score past the cache, and continue by way of it."""
        key = tuple(ids.tolist())
        if key not in self.cache:
            with torch.no_grad():
                self.cache[key] = self.model(ids[None]).logits[0, -1].log_softmax(-1)
        candidates = self.cache[key].topk(5).indices
        own = torch.cat([torch.zeros(1), row_log_probs(self.model, ids)])
        return Probe(own, candidates, self.cache[key][candidates])

    def label(self):
        """The version."""
        return self.version

    def set_label(self, label):
        """Set the version."""
        self.version = label


@pytest.fixture(scope="module")
def made():
    """Two models with other weights everywhere, the specification, and the second one's tree and buffers."""
    first, second = (copy.deepcopy(make("llama")) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    for model in (first, second):
        for leaf in model.parameters():
            leaf.data = torch.randn(leaf.shape, generator=generator) * 0.3 + (leaf.ndim == 1)
    lm, params, buffers = causal_lm(second)
    return first, second, lm, params, buffers


def run(engine, made, *, leaves=None, version="1", tolerance=1e-4):
    """Push the second model's tree."""
    _, second, lm, params, buffers = made
    state = second.state_dict()
    ids = torch.randint(second.config.vocab_size, (9,), generator=torch.Generator().manual_seed(0))
    shapes = {name: leaf.shape for name, leaf in state.items()}
    return push_weights(
        engine,
        lm,
        dict(state) if leaves is None else leaves,
        shapes,
        [],
        ids,
        tree=params,
        buffers=buffers,
        version=version,
        tolerance=tolerance,
    )


def test_a_push_replaces_the_weights(made):
    """The engine then computes what the tree computes; the record has a digest for each leaf and the label is set."""
    first, second, *_ = made
    engine = FakeEngine(first)
    done = run(engine, made, version="7")

    assert done.version == proven_label(engine) == "7"
    assert done.difference < 1e-5
    assert list(done.digests) == list(second.state_dict())
    assert len(set(done.digests.values())) == len(done.digests)
    for own, other in zip(engine.model.parameters(), second.parameters(), strict=True):
        assert torch.equal(own, other)
    assert run(engine, made, version="8").digests == done.digests


FAULTS = {
    "dropped": ValueError,
    "swapped": ValueError,
    "scaled": ValueError,
    "stale cache": ValueError,
    "killed": ConnectionError,
    "left": ConcurrencyError,
    "busy": ConcurrencyError,
}


def check_fault(made, name, draws):
    """A faulty push raises, the engine counts as unproven, and the next push mends it."""
    engine = FakeEngine(made[0])
    state = made[1].state_dict()
    shapes = [leaf.shape for leaf in state.values()]
    usable = [i for i in range(len(shapes)) if name != "swapped" or list(shapes).index(shapes[i]) == i]
    usable = [i for i in usable if name != "swapped" or shapes.count(shapes[i]) > 1]
    engine.fault, engine.chosen = name, draws.choice(usable)
    engine.factor = draws.choice([0.0, 0.5, 0.98, 1.02, 2.0, -1.0, float("nan")])
    with pytest.raises(FAULTS[name]):
        run(engine, made)
    with pytest.raises(ConcurrencyError, match="must be proven(?s:.*)'1'(?s:.*)push again"):
        proven_label(engine)
    engine.fault = None
    run(engine, made)
    assert proven_label(engine) == "1"


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(made, name, seed):
    """Each way in which a push can go wrong, a few times."""
    draws = random.Random(seed)
    for _ in range(3):
        check_fault(made, name, draws)


@pytest.mark.slow
def test_a_thousand_faulty_pushes(made, seed):
    """None is taken for a good one."""
    draws = random.Random(seed)
    for _ in range(1000):
        check_fault(made, draws.choice(list(FAULTS)), draws)


def test_names_are_checked_before_anything_is_sent(made):
    """Missing, unknown and misshapen leaves: the engine keeps its weights and its label."""
    state = made[1].state_dict()
    name = next(iter(state))
    cases = {
        f"lacks '{name}'": {key: leaf for key, leaf in state.items() if key != name},
        "has the unknown 'x.y'": {**state, "x.y": torch.zeros(1)},
        f"leaf '{name}' must have the shape": {**state, name: torch.zeros(2)},
    }
    for pattern, leaves in cases.items():
        engine = FakeEngine(made[0])
        with pytest.raises(TreeStructureError, match=f"{pattern}(?s:.*)nothing was sent"):
            run(engine, made, leaves=leaves)
        assert engine.loads == 0
        assert proven_label(engine) == "default"


def test_nan_is_no_proof(made):
    """Weights that give NaN on both sides are refused."""
    first, second, lm, params, buffers = made
    engine = FakeEngine(first)
    broken = tdf.TensorDict(params.to_dict()) * float("nan")
    with pytest.raises(ValueError, match="must be those of the tree"):
        push_weights(
            engine,
            lm,
            {name: leaf * float("nan") for name, leaf in second.state_dict().items()},
            {name: leaf.shape for name, leaf in second.state_dict().items()},
            [],
            torch.arange(6),
            tree=broken,
            buffers=buffers,
            version="1",
            tolerance=1e-3,
        )
