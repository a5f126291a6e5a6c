"""vLLM's interface over a model of transformers; tests/engines has vLLM itself."""

import sys
from types import SimpleNamespace as Values

import pytest
import torch

import tdfunc as tdf
from tdfunc import ConcurrencyError, UnsupportedError
from tdfunc.llm import causal_lm, vLLMWrapper
from tdfunc.llm.wrappers.engine import Engine
from tests.llm.models import VOCAB, row_log_probs
from tests.llm.wrappers.pushing import LLM, other_weights
from tests.llm.wrappers.test_remote import MODEL, PROMPTS, check, parse


@pytest.fixture
def connect(monkeypatch):
    """A function that makes a wrapper of a new engine, with a package of one class."""
    monkeypatch.setitem(sys.modules, "vllm", Values(SamplingParams=Values))
    return lambda *args, **options: vLLMWrapper(LLM(MODEL, *args, **options), input_mode="tokens")


def test_responses_and_scores_are_those_of_the_model(connect):
    """With scores of prompts and log-probs on request, and a seed for each response; without tokens nothing is sent."""
    wrapper, empty = connect(), torch.zeros(0, dtype=torch.int64)
    found = wrapper.generate_tokens(PROMPTS, parse(), prompt_log_probs=True)
    nothing = wrapper.generate_tokens(PROMPTS, parse(max_new_tokens=0), prompt_log_probs=True)

    check(found)
    for row, each, none in zip(PROMPTS, found, nothing, strict=True):
        for scores in (each.prompt_log_probs, none.prompt_log_probs):
            torch.testing.assert_close(scores, torch.cat([torch.zeros(1), row_log_probs(MODEL, row)]))
        assert each.version == "default"
        assert none.version == "default"
        assert none.tokens.tolist() == []
        assert none.behaviour is None
    count = len(wrapper.model.requests)
    assert wrapper.generate_tokens(PROMPTS[:1], parse(max_new_tokens=0))[0].prompt_log_probs is None
    assert [each.tolist() for each in wrapper.score_tokens([empty])] == [[]]
    assert len(wrapper.model.requests) == count
    assert [len(each) for each in wrapper.score_tokens([empty, PROMPTS[0], empty])] == [0, 3, 0]
    (less,) = wrapper.generate_tokens(PROMPTS[:1], parse(logprobs=False, stop_sequences="x"))
    assert less.log_probs is None
    assert less.prompt_log_probs is None
    assert less.behaviour is None
    assert found[0].behaviour is None
    drawn = wrapper.generate_tokens(PROMPTS, parse(temperature=1.0), keys=tdf.random.split(tdf.random.key(3), 3))
    assert all(torch.equal(each.behaviour, each.log_probs) for each in drawn)
    seeds = {each["seed"] for each in wrapper.model.requests[-3:]}
    assert len(seeds) == 3
    assert {seed % 2 for seed in seeds} == {0, 1}
    assert min(seeds) >= 0
    assert [wrapper.model.requests[i]["detokenize"] for i in (-4, -3)] == [True, False]


@pytest.mark.parametrize("core", [None, Values()], ids=["in process", "with workers"])
def test_pushes_replace_the_weights(connect, core):
    """In process and by a folder; the model to compare is made once, and draws nothing."""
    wrapper, (_, params, buffers) = connect(core), causal_lm(other_weights(MODEL, 2))
    state = torch.get_rng_state()
    done, own = wrapper.push(params, version=2, proof="full"), wrapper._model()

    assert done.version == "2"
    assert wrapper.version == "2"
    assert done.unread == {}
    assert done.difference < 1e-5
    assert wrapper.push(params, version=3, buffers=buffers, key=0).digests == done.digests
    assert wrapper._model() is own
    assert torch.equal(torch.get_rng_state(), state)
    for block, longest, length in ((16, 48, 47), (16, 400, 256), (300, 400, 308)):
        assert Engine(LLM(MODEL, block=block, longest=longest)).limits() == (VOCAB, length)


def test_what_an_engine_cannot_do_is_refused(connect):
    """Processed log-probs, dropout, an aborted response, and a cache that stays: after it nothing is generated."""
    wrapper = connect(resets=0)
    with pytest.raises(ConcurrencyError, match="did not drop its prefix cache"):
        wrapper.push(causal_lm(MODEL)[1], version=2)
    cases = [
        (lambda: connect(mode="processed"), UnsupportedError, "does not return raw log-probs(?s:.*)processed"),
        (lambda: connect().score_tokens(PROMPTS, training=True), UnsupportedError, "has no dropout"),
        (
            lambda: connect(end="abort").generate_tokens(PROMPTS, parse()),
            ConcurrencyError,
            "did not complete a response(?s:.*)abort",
        ),
        (lambda: wrapper.generate_tokens(PROMPTS, parse()), ConcurrencyError, "are not proven"),
        (lambda: wrapper.score_tokens(PROMPTS), ConcurrencyError, "are not proven"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
