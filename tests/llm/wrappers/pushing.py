"""An engine that is a model of transformers in this process, and loads that go wrong."""

import copy
import functools

import torch

from tdfunc.llm import causal_lm
from tdfunc.llm.wrappers.push import AbstractEngine, Probe, push_tree
from tests.llm.models import row_log_probs


class FakeEngine(AbstractEngine):
    """A model with a cache of prompts.

    Attributes:
        fault: How the next load or reset goes wrong, or a function that alters the leaves, given the old ones.
        chosen: The leaf that is concerned.
        loads: How many loads there were.
        prompts: Those that were scored.
    """

    def __init__(self, model, *, length=9):
        self.model, self.cache, self.version = copy.deepcopy(model), {}, "default"
        self.fault, self.chosen, self.factor, self.loads, self.prompts = None, 0, 1.0, 0, []
        self.length = length

    def limits(self):
        """All ids of the model."""
        return self.model.config.vocab_size, self.length

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
            assert not leaf.requires_grad
            given[name] = leaf.clone()
        if callable(self.fault):
            self.fault(given, own)
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
        self.prompts.append(ids)
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


def other_weights(model, seed):
    """A copy of a model with other weights everywhere, so large that a wrong one shows."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for leaf in made.parameters():
        leaf.data = torch.randn(leaf.shape, generator=generator) * 0.3 + (leaf.ndim == 1)
    return made


trees_of = functools.cache(causal_lm)


def push(engine, model, **options):
    """Push a model's weights."""
    lm, params, buffers = trees_of(model)
    tree = options.pop("tree", params)
    return push_tree(engine, lm, tree, buffers, **{"version": "1", "tolerance": 1e-4, **options})


def stale(name, rows):
    """A load that leaves rows of a leaf as they were."""

    def fault(given, own):
        given[name][rows] = own[name][rows]

    return fault


def swapped(name, i, j):
    """A load that swaps two rows of a leaf."""

    def fault(given, own):
        given[name][[i, j]] = given[name][[j, i]]

    return fault


EMBEDDINGS = "model.embed_tokens.weight"
# For each kind of fault a function of the number of ids, the name of the experts, their number, and random draws.
KINDS = {
    "one stale embedding": lambda size, name, count, draws: stale(EMBEDDINGS, draws.randrange(size)),
    "one stale row of the head": lambda size, name, count, draws: stale("lm_head.weight", draws.randrange(size)),
    "a stale shard of embeddings": lambda size, name, count, draws: stale(
        EMBEDDINGS, torch.arange(size // 8) + draws.randrange(8) * (size // 8)
    ),
    "one stale expert": lambda size, name, count, draws: stale(name, draws.randrange(count)),
    "two swapped experts": lambda size, name, count, draws: swapped(name, *draws.sample(range(count), 2)),
}


def count_pushes(kind, start, model, draws, most, **options):
    """The number of pushes with a fault of a kind at one place until one raises; None if none does."""
    engine = FakeEngine(start, length=options.pop("length", 24))
    name = draws.choice([name for name, leaf in model.named_parameters() if leaf.dim() == 3])
    engine.fault = KINDS[kind](model.config.vocab_size, name, model.get_parameter(name).shape[0], draws)
    for number in range(1, most + 1):
        try:
            push(engine, model, **options)
        except ValueError:
            return number
    return None
