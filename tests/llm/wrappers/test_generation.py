"""Responses in all input modes: texts, messages and ids of one response agree; keys, samples, batching."""

import functools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.llm import ChatHistory, History, Text, Tokens, TokenTemplate, TransformersWrapper, chat_ids, qwen
from tdfunc.llm.generation.options import Response
from tdfunc.llm.rows.batch import Row
from tdfunc.llm.wrappers.replies import reply_texts
from tests.helpers import assert_pure
from tests.llm.models import make
from tests.llm.tokens import make_tokenizer
from tests.llm.wrappers.fake import FakeWrapper

tokenizers = pytest.importorskip("tokenizers")
TOKENIZER = make_tokenizer()
CHATS = [
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
    [{"role": "user", "content": "a much longer question than the other one"}],
]
PROMPTS = History.from_chats(CHATS)
SAMPLING = {"max_new_tokens": 6, "temperature": 0.7}


def wrapper_for(mode="history", **options):
    """A wrapper of a tiny model that knows the tokenizer's tokens."""
    options = {"generate_kwargs": SAMPLING, "pad_output": True, "input_mode": mode} | options
    return TransformersWrapper(make("llama", vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER, **options)


def inputs_of(mode):
    """The two prompts as a tree of each mode."""
    texts = PROMPTS.apply_chat_template(tokenizer=TOKENIZER)
    if mode == "history":
        return TensorDict({"history": ChatHistory(prompt=PROMPTS, batch_size=[2])}, [2])
    if mode == "text":
        return TensorDict({"text": Text(prompt=texts, batch_size=[2])}, [2])
    batch = TOKENIZER(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens = Tokens(prompt=batch["input_ids"], batch_size=[2])
    return TensorDict({"tokens": tokens, "attention_mask": batch["attention_mask"].bool()}, [2])


def rows_of(out):
    """The ids of each row of a padded result."""
    mask = out["masks"].all_attention_mask
    return [row[valid].tolist() for row, valid in zip(out["tokens"].full, mask, strict=True)]


class Speaker(FakeWrapper):
    """A backend that replies with given texts, one for each prompt in turn."""

    replies = ()
    reasons = ()

    def _speak(self, k, prompt, prompt_log_probs):
        tokens = torch.tensor(TOKENIZER(self.replies[k])["input_ids"])
        return Response(tokens, self.reasons[k], log_probs=-torch.ones(len(tokens)))


class Server(FakeWrapper):
    """A backend that gives texts alone."""

    def _speak(self, k, prompt, prompt_log_probs):
        return Response(None, "stop", text=f"reply {k}")


def speak(replies, reasons, **options):
    """A wrapper that replies with these texts."""
    made = Speaker(tokenizer=TOKENIZER, input_mode="history", chat_template=qwen, **options)
    made.replies, made.reasons = replies, reasons
    return made


@functools.cache
def drawn(samples, mode):
    """The padded result of a mode for one key."""
    return wrapper_for(mode, num_samples=samples)(inputs_of(mode), key=7)


SAMPLES = pytest.mark.parametrize("samples", [None, 3])
MODES = pytest.mark.parametrize("mode", ["history", "text", "tokens"])


@SAMPLES
@MODES
def test_all_modes_draw_one_response(mode, samples):
    """History, text and tokens give the same ids and numbers for one key."""
    first, out = drawn(samples, "history"), drawn(samples, mode)

    assert out.batch_size == torch.Size([2, *([] if samples is None else [samples])])
    tdf.assert_close(out["tokens"], first["tokens"])
    tdf.assert_close(out["log_probs"], first["log_probs"])
    assert torch.equal(out["masks"].all_attention_mask, first["masks"].all_attention_mask)


@SAMPLES
@MODES
def test_inputs_stay(mode, samples):
    """The tree is left alone, and the result has more."""
    td, call = inputs_of(mode), wrapper_for(mode, num_samples=samples)
    out = assert_pure(lambda td: call(td, key=7), td)

    assert set(td.keys()) < set(out.keys())


@SAMPLES
def test_reasons_and_texts_are_those_of_the_ids(samples):
    """A response that is complete was stopped; texts of histories and of texts are equal."""
    first = drawn(samples, "history")

    ends = [["length", "stop"][end] for end in first["tokens"].is_complete.flatten().tolist()]
    assert np.array(first["text"].finish_reason).flatten().tolist() == ends
    assert first["text"].full == drawn(samples, "text")["text"].full


@SAMPLES
def test_ragged_responses_are_the_padded_ones(samples):
    """Behind them is 0."""
    ragged = wrapper_for(pad_output=False, num_samples=samples)(inputs_of("history"), key=7)
    flat = [row for part in ragged["log_probs"].response for row in ([part] if samples is None else part)]
    padded = drawn(samples, "history")["log_probs"].response.reshape(len(flat), -1)

    torch.testing.assert_close([row[: len(alone)] for row, alone in zip(padded, flat, strict=True)], flat)
    behind = torch.cat([row[len(alone) :] for row, alone in zip(padded, flat, strict=True)])
    assert (behind == 0).all()


@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    cuts=st.fixed_dictionaries(
        {}, optional={"top_k": st.integers(1, 9), "top_p": st.floats(0.3, 0.95), "min_p": st.floats(0.01, 0.2)}
    ),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
)
def test_scoring_a_response_gives_its_log_probs(seed, cuts, temperature):
    """The scorer has the generator's raw log-probs; `full` exists."""
    kwargs = {"max_new_tokens": 5, "temperature": temperature, **cuts}
    wrapper = wrapper_for("tokens", generate_kwargs=kwargs, prompt_log_probs=True)
    out = wrapper(inputs_of("tokens"), key=seed)
    lp, scorer = out["log_probs"], wrapper.get_new_version(generate=False)

    again = scorer(out)["log_probs"]
    assert torch.equal(lp.mask, again.mask)
    torch.testing.assert_close(lp.full, again.full, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lp.response, again.response, atol=1e-4, rtol=1e-5)
    less = wrapper.get_new_version(prompt_log_probs=False)(inputs_of("tokens"), key=seed)["log_probs"]
    width = out["tokens"].prompt.shape[1]
    assert not less.mask[:, :width].any()
    assert torch.equal(less.full[:, width:], lp.full[:, width:])


CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "utc"}}\n</tool_call>'
REPLIES = ["<think>\nhm\n</think>\n\nyes<|im_end|>", f"{CALL}<|im_end|>", "the fox ju", "one stop , two"]
REASONS = ["stop", "stop", "length", "stop"]


def replied():
    """A wrapper that gives these replies, and its result."""
    prompts = History.from_chats([CHATS[0], CHATS[1], CHATS[0], CHATS[1]])
    kwargs = {"max_new_tokens": 99, "stop_sequences": ["stop"]}
    wrapper = speak(REPLIES, REASONS, generate_kwargs=kwargs, pad_output=True)
    return wrapper, wrapper(TensorDict({"history": ChatHistory(prompt=prompts, batch_size=[4])}, [4]))


def test_replies_are_parsed():
    """Messages have content, thinking, calls and the reason of their end."""
    _, out = replied()
    messages = [chat[0] for chat in out["history"].response.tolist()]

    assert [each.get("content") or "" for each in messages] == ["yes", "", "the fox ju", "one stop , two"]
    assert messages[0]["reasoning_content"] == "hm"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"zone": "utc"}}
    assert [each["finish_reason"] for each in messages] == ["stop", "tool_calls", "length", "stop_string"]
    assert [each.get("is_complete", True) for each in messages] == [True, True, False, True]


def test_replies_keep_their_texts():
    """As they are, behind those of the prompts."""
    _, out = replied()

    assert out["text"].response == REPLIES
    assert out["text"].full == [a + b for a, b in zip(out["text"].prompt, REPLIES, strict=True)]


def test_replies_are_parsed_and_keep_their_ids():
    """The conversation's ids are those of the prompt and the response, also when it is scored."""
    wrapper, out = replied()
    full = rows_of(out)
    assert chat_ids(TokenTemplate(TOKENIZER, qwen), out["history"].full) == full

    scored = wrapper.get_new_version(generate=False)(out)
    assert rows_of(scored) == full
    wrote = [int(row.sum()) for row in scored["masks"].all_assistant_mask]
    assert wrote == [len(TOKENIZER(reply)["input_ids"]) for reply in REPLIES]


def test_the_ids_of_a_rollout_only_grow():
    """Three turns: each prompt begins with the ids of the turn before."""
    wrapper = wrapper_for("history", pad_output=False, chat_template_name="chatml")
    td, prompts, wholes, lengths = inputs_of("history"), [], [], []
    for turn in range(3):
        out = wrapper(td, key=turn)
        prompts.append([row.tolist() for row in out["tokens"].prompt])
        wholes.append([row.tolist() for row in out["tokens"].full])
        asked = out["history"].full.append(History(role="user", content=["and?", "why?"], batch_size=[2]))
        lengths.append([len(chat) for chat in asked.tolist()])
        td = TensorDict({"history": ChatHistory(prompt=asked, batch_size=[2])}, [2])

    pairs = [zip(*turns, strict=True) for turns in zip(prompts[1:], wholes[:-1], strict=True)]
    assert [[prompt[: len(old)] for prompt, old in pair] for pair in pairs] == wholes[:-1]
    assert lengths == [[4, 3], [6, 5], [8, 7]]


def test_a_reply_that_only_ends_goes_on():
    """A reply of another special token alone has no content, and keeps its ids in the next turn; texts may lack it."""
    wrapper = speak(["</s>"], ["stop"], generate_kwargs={"skip_special_tokens": True})
    out = wrapper(TensorDict({"history": ChatHistory(prompt=History.from_chats(CHATS[0]), batch_size=[])}))

    assert out["history"].response.tolist()[0]["content"] == out["text"].response == ""
    ids = chat_ids(TokenTemplate(TOKENIZER, qwen), out["history"].full)
    assert ids == out["tokens"].full.tolist()


def test_texts_of_responses_follow_their_prompts():
    """A tokenizer that drops the first space of a text keeps the space before a response, and before a full stop."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0, "▁fox": 1, "▁.": 2}, unk_token="▁the"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    transformers = pytest.importorskip("transformers")
    wrapper = FakeWrapper(tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=backend), input_mode="text")

    out = wrapper(TensorDict({"text": Text(prompt="the fox", batch_size=[])}))
    assert out["text"].response == " ."
    assert out["text"].full == "the fox ."
    # A prompt that was cut within a character does not precede the text of both.
    first, second = torch.tensor(TOKENIZER("ü")["input_ids"]).split(1)
    assert reply_texts(TOKENIZER, [Row(first)], [Response(second, "stop")]) == ["\ufffd"]


def test_a_server_of_texts_gives_texts_alone():
    """Without ids there are texts and messages, and no numbers, also not those of an earlier call."""
    wrapper = Server(tokenizer=TOKENIZER, input_mode="history")
    out = wrapper(wrapper_for()(inputs_of("history"), key=0))

    assert out["text"].response == ["reply 0", "reply 1"]
    assert out["text"].finish_reason == ["stop", "stop"]
    message = {"role": "assistant", "finish_reason": "stop"}
    assert out["history"].response.tolist() == [[{**message, "content": f"reply {i}"}] for i in range(2)]
    assert set(out.keys()) == {"history", "text"}


# -- batching -----------------------------------------------------------------------------------------------------


def ask(wrapper, count, results, **options):
    """Call the wrapper in a thread for each of a number of prompts."""

    def one(i):
        td = TensorDict({"tokens": Tokens(prompt=torch.tensor([[i + 1] * (i % 3 + 1)]), batch_size=[1])}, [1])
        try:
            results[i] = wrapper(td, **options)
        except BaseException as err:
            results[i] = err

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_calls_of_threads_run_together():
    """Rows of several threads are one call of the backend, and each caller gets its own."""
    wrapper = FakeWrapper(input_mode="tokens", min_batch_size=4, max_batch_size=4, batching_timeout=60, pad_output=True)
    results = {}
    for thread in ask(wrapper, 8, results):
        thread.join(30)

    assert wrapper.batching
    assert [len(prompts) for prompts, *_ in wrapper.calls] == [4, 4]
    assert all(results[i]["tokens"].response[0, 0] == i + 2 for i in range(8))


def test_batched_draws_are_those_of_the_calls_alone():
    """Together with others' rows, rows draw what they draw alone."""
    alone = wrapper_for("tokens", num_samples=2)
    together = alone.get_new_version(min_batch_size=3, batching_timeout=60)
    results, own = {}, {}
    for thread in [*ask(together, 3, results, key=5), *ask(alone, 3, own, key=5)]:
        thread.join(60)

    found, expected = ({i: each[i]["tokens"].full.tolist() for i in range(3)} for each in (results, own))
    assert found == expected


def test_batched_scores_are_those_of_the_calls_alone():
    """They keep their gradients, unless these are off."""
    alone = wrapper_for("tokens", num_samples=2, generate=False)
    together = alone.get_new_version(min_batch_size=2, batching_timeout=60)
    td = inputs_of("tokens")
    full = TensorDict({"tokens": Tokens(full=td["tokens"].prompt, batch_size=[2])}, [2])

    scored = together(full)["log_probs"].full
    torch.testing.assert_close(scored, alone(full)["log_probs"].full)
    assert scored.requires_grad
    with torch.no_grad():
        assert not together.get_new_version()(full)["log_probs"].full.requires_grad


@pytest.fixture(scope="module")
def waiting():
    """A wrapper that waits for more calls than there are."""
    return FakeWrapper(input_mode="tokens", min_batch_size=99, batching_timeout=600)


@pytest.mark.parametrize(
    ("options", "kind"), [({"flush": True}, TensorDict), ({}, BaseException)], ids=["flushed", "cancelled"]
)
def test_the_queue_can_be_flushed_and_cancelled(waiting, options, kind):
    """`cleanup_batching(flush=True)` answers those who wait; without it their calls are cancelled; it may go on."""
    results = {}
    threads = ask(waiting, 3, results)
    deadline = time.monotonic() + 20
    while waiting.get_batching_state()["queue_size"] < 3 and time.monotonic() < deadline:
        time.sleep(0.01)

    assert len(waiting.cleanup_batching(**options)) == 3
    for thread in threads:
        thread.join(30)
    assert [i for i in range(3) if not isinstance(results[i], kind)] == []


def test_a_wrapper_without_batching_has_no_queue():
    """`batching=True` gives it one of the least size."""
    alone = FakeWrapper(input_mode="tokens", min_batch_size=99).get_new_version(min_batch_size=None)

    assert alone.get_batching_state() == {"batching": False}
    assert alone.cleanup_batching() == []
    assert alone.get_new_version(batching=True).get_batching_state()["min_batch_size"] == 1


def test_one_bad_request_fails_alone():
    """A row that cannot be answered raises in its own call."""

    class Picky(FakeWrapper):
        def generate_tokens(self, prompts, options, **rest):
            if any([int(prompt[0]) == 2 for prompt in prompts]):
                raise ValueError("two")
            return super().generate_tokens(prompts, options, **rest)

    wrapper = Picky(input_mode="tokens", min_batch_size=3, batching_timeout=60)
    results = {}
    for thread in ask(wrapper, 3, results):
        thread.join(30)
    assert [type(results[i]) for i in range(3)] == [TensorDict, ValueError, TensorDict]
