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
    """With scores of prompts on request, also where no token is to be drawn."""
    wrapper = connect()
    found = wrapper.generate_tokens(PROMPTS, parse(), prompt_log_probs=True)
    nothing = wrapper.generate_tokens(PROMPTS, parse(max_new_tokens=0), prompt_log_probs=True)
    scores = [torch.cat([torch.zeros(1), row_log_probs(MODEL, row)]) for row in PROMPTS]

    check(found)
    torch.testing.assert_close([each.prompt_log_probs for each in found], scores)
    torch.testing.assert_close([each.prompt_log_probs for each in nothing], scores)
    assert [each.version for each in (*found, *nothing)] == ["default"] * 2 * len(PROMPTS)
    assert [each.tokens.tolist() for each in nothing] == [[]] * len(PROMPTS)


def test_greedy_and_empty_responses_have_no_behaviour(connect):
    """They were not drawn."""
    wrapper = connect()
    (greedy,) = wrapper.generate_tokens(PROMPTS[:1], parse())
    (empty,) = wrapper.generate_tokens(PROMPTS[:1], parse(max_new_tokens=0), prompt_log_probs=True)

    assert greedy.behaviour is None
    assert empty.behaviour is None


def test_without_tokens_nothing_is_sent(connect):
    """Neither for an empty response without scores, nor for the scores of an empty row."""
    wrapper, empty = connect(), torch.zeros(0, dtype=torch.int64)

    assert wrapper.generate_tokens(PROMPTS[:1], parse(max_new_tokens=0))[0].prompt_log_probs is None
    assert [each.tolist() for each in wrapper.score_tokens([empty])] == [[]]
    assert wrapper.model.requests == []
    assert [len(each) for each in wrapper.score_tokens([empty, PROMPTS[0], empty])] == [0, 3, 0]


def test_responses_may_have_no_log_probs(connect):
    """With `logprobs=False`."""
    (less,) = connect().generate_tokens(PROMPTS[:1], parse(logprobs=False, stop_sequences="x"))

    assert less.log_probs is None
    assert less.prompt_log_probs is None
    assert less.behaviour is None


def test_texts_are_made_only_to_stop_at(connect):
    """The engine turns tokens into text where a stop sequence needs it."""
    wrapper = connect()
    wrapper.generate_tokens(PROMPTS[:1], parse(stop_sequences="x"))
    wrapper.generate_tokens(PROMPTS[:1], parse())

    assert [request["detokenize"] for request in wrapper.model.requests] == [True, False]


def test_each_draw_has_a_seed(connect):
    """One of its own, even or odd; what it was drawn from is its raw log-prob."""
    wrapper = connect()
    drawn = wrapper.generate_tokens(PROMPTS, parse(temperature=1.0), keys=tdf.random.split(tdf.random.key(3), 3))

    assert [each.behaviour.tolist() for each in drawn] == [each.log_probs.tolist() for each in drawn]
    seeds = {each["seed"] for each in wrapper.model.requests}
    assert len(seeds) == 3
    assert {seed % 2 for seed in seeds} == {0, 1}
    assert min(seeds) >= 0


@pytest.mark.parametrize("core", [None, Values()], ids=["in process", "with workers"])
def test_pushes_replace_the_weights(connect, core):
    """In process and by a folder."""
    wrapper, (_, params, _) = connect(core), causal_lm(other_weights(MODEL, 2))
    done = wrapper.push(params, version=2, proof="full")

    assert done.version == "2"
    assert wrapper.version == "2"
    assert done.unread == {}
    assert done.difference < 1e-5


@pytest.mark.parametrize("core", [None, Values()], ids=["in process", "with workers"])
def test_the_model_to_compare_is_made_once(connect, core):
    """It draws nothing, and digests of equal weights are equal."""
    wrapper, (_, params, buffers) = connect(core), causal_lm(other_weights(MODEL, 2))
    state = torch.get_rng_state()
    done, own = wrapper.push(params, version=2, proof="full"), wrapper._model()

    assert wrapper.push(params, version=3, buffers=buffers, key=0).digests == done.digests
    assert wrapper._model() is own
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("block", "longest", "length"), [(16, 48, 47), (16, 400, 256), (300, 400, 308)])
def test_limits_of_prompts(block, longest, length):
    """Prompts of the proof fill more than a block of the cache, as far as the model reads."""
    assert Engine(LLM(MODEL, block=block, longest=longest)).limits() == (VOCAB, length)


REFUSED = [
    (lambda connect: connect(mode="processed"), UnsupportedError, "does not return raw log-probs(?s:.*)processed"),
    (lambda connect: connect().score_tokens(PROMPTS, training=True), UnsupportedError, "has no dropout"),
    (
        lambda connect: connect(end="abort").generate_tokens(PROMPTS, parse()),
        ConcurrencyError,
        "did not complete a response(?s:.*)abort",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=["processed", "dropout", "abort"])
def test_what_an_engine_cannot_do_is_refused(connect, call, kind, text):
    """Processed log-probs, dropout, and an aborted response."""
    with pytest.raises(kind, match=text):
        call(connect)


def test_a_cache_that_stays_is_refused(connect):
    """After it nothing is generated or scored."""
    wrapper = connect(resets=0)
    with pytest.raises(ConcurrencyError, match="did not drop its prefix cache"):
        wrapper.push(causal_lm(MODEL)[1], version=2)
    with pytest.raises(ConcurrencyError, match="are not proven"):
        wrapper.generate_tokens(PROMPTS, parse())
    with pytest.raises(ConcurrencyError, match="are not proven"):
        wrapper.score_tokens(PROMPTS)
