"""vLLM's interface over a model of transformers in this process, and engines whose loads go wrong."""

import copy
import functools
from types import SimpleNamespace as Values

import torch
from safetensors.torch import load_file

from tdfunc.llm import causal_lm
from tdfunc.llm.wrappers.engine import Engine
from tdfunc.llm.wrappers.push import push_tree
from tests.llm.wrappers.serving import log_probs_of, respond

# What `respond` reads of the defaults of `SamplingParams`.
DEFAULTS = {"stop_token_ids": [], "ignore_eos": False, "top_k": -1}


class LLM:
    """A `vllm.LLM` with a copy of a model, with the cache of `log_probs_of`; it records its requests."""

    def __init__(self, model, core=None, *, mode="raw_logprobs", block=16, longest=48, end=None, resets=1):
        self.model, self.requests, self.end, labels = copy.deepcopy(model), [], end, ["default"]
        self.way = "weights_iterator" if core is None else "weights_path"
        self.get_weight_version, self.update_weight_version = lambda: labels[-1], labels.append
        self.reset_prefix_cache = lambda: log_probs_of.cache_clear() or resets
        config = {"logprobs_mode": mode, "hf_config": model.config, "max_model_len": longest}
        config = Values(**config, get_vocab_size=lambda: model.config.vocab_size)
        config = Values(model_config=config, cache_config=Values(block_size=block))
        self.llm_engine = Values(engine_core=core or type("InprocClient", (), {})(), vllm_config=config)

    def collective_rpc(self, method, kwargs):
        assert [*kwargs] == [self.way]
        given = kwargs.get("weights_iterator") or load_file(f"{kwargs['weights_path']}/model.safetensors").items()
        with torch.no_grad():
            for name, leaf in given:
                self.model.state_dict()[name].copy_(leaf)

    def generate(self, rows, params, use_tqdm):
        assert not use_tqdm
        return [self.answer(row["prompt_token_ids"], vars(each)) for row, each in zip(rows, params, strict=True)]

    def answer(self, ids, options):
        """The answer to a request."""
        self.requests.append(options)
        tokens, values, reason = respond(self.model, ids, DEFAULTS | options)
        before, after = log_probs_of(self.model, tuple(ids))
        likeliest = after.log_softmax(-1).topk(options.get("logprobs", 0))
        found, known = _entries(tokens, values), [None, *_entries(ids[1:], before)]
        for entry in _entries(likeliest.indices.tolist(), likeliest.values.tolist()):
            found[0] |= entry
        found, known = (found if "logprobs" in options else None), (known if "prompt_logprobs" in options else None)
        made = Values(token_ids=tokens, finish_reason=self.end or reason, logprobs=found)
        made.weight_versions = [Values(version=each) for each in ("old", self.get_weight_version())]
        return Values(outputs=[made], prompt_token_ids=ids, prompt_logprobs=known)


def _entries(tokens, values):
    return [{token: Values(logprob=value)} for token, value in zip(tokens, values, strict=True)]


class FakeEngine(Engine):
    """An engine without the package.

    Attributes:
        fault: How the next load or reset goes wrong, or a function that alters the leaves, given the old ones.
        chosen: The leaf that is concerned.
        loads: How many loads there were.
        prompts: Those that were scored.
    """

    def __init__(self, model, *, length=9):
        super().__init__(LLM(model, longest=length + 1))
        self.model, self.prompts = self.llm.model, []
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
        super().load(iter(given.items()))

    def reset_cache(self):
        """Drop the cache, but for the fault."""
        return self.fault == "stale cache" if self.fault in ("busy", "stale cache") else super().reset_cache()

    def probe(self, ids):
        self.prompts.append(ids)
        return super().probe(ids)

    def run(self, prompts, params):
        return [self.llm.answer(row.tolist(), each) for row, each in zip(prompts, params, strict=True)]


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
    tree, buffers = options.pop("tree", params), options.pop("buffers", buffers)
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
