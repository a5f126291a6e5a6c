"""A model behind a real HTTP server has the numbers of the model itself, whatever happens on the way."""

import copy
import functools
import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import (
    ConcurrencyError,
    CorruptCheckpointError,
    RemoteError,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
)
from tdfunc.llm import ChatHistory, History, RemoteWrapper, Text, Tokens, TransformersWrapper, causal_lm
from tdfunc.llm.generation.options import GenerationOptions
from tests.helpers import examples
from tests.llm.models import VOCAB, make, row_log_probs
from tests.llm.tokens import make_tokenizer
from tests.llm.wrappers.pushing import other_weights
from tests.llm.wrappers.serving import COMPLETIONS, EOS, IDS, Service, answer, cut, refuse, report, reset
from tests.storage.trees import assert_same

pytestmark = pytest.mark.sample(2)

MODEL = make("llama")
PROMPTS = [torch.tensor([5, 9, 11]), torch.tensor([7]), torch.tensor([3, 4, 90, 2, 8])]
SENDS = pytest.mark.parametrize(
    ("ids_endpoint", "stream"), [(True, False), (True, True), (False, False), (False, True)]
)


@pytest.fixture
def serve():
    """Start services that end with the test."""
    made = []

    def start(model=MODEL, **options):
        made.append(Service(model, **options))
        return made[-1]

    yield start
    for service in made:
        service.close()


def connect(service, **options):
    """A wrapper of a service, which tries again at once."""
    defaults = {"input_mode": "tokens", "backoff_s": 0.0, "timeout_s": 20.0, "max_retries": 2}
    return RemoteWrapper("tiny", base_url=service.url, **{**defaults, **options})


def parse(**options):
    """Options of generation."""
    return GenerationOptions.parse({"max_new_tokens": 6, **options})


@functools.cache
def greedy(prompt):
    """The greedy response of transformers to a tuple of ids, with its log-probs."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": EOS, "pad_token_id": 0}
    full = MODEL.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
    return full[len(prompt) :], row_log_probs(MODEL, full)[len(prompt) - 1 :]


def check(found, prompts=PROMPTS):
    """Assert that responses are those of the model."""
    assert len(found) == len(prompts)
    for response, prompt in zip(found, prompts, strict=True):
        tokens, log_probs = greedy(tuple(prompt.tolist()))
        assert response.tokens.tolist() == tokens.tolist()
        assert torch.allclose(response.log_probs, log_probs, atol=1e-5)
        assert response.finish_reason == ("stop" if tokens[-1] == EOS else "length")


@SENDS
def test_responses_are_the_models(serve, ids_endpoint, stream):
    """Ids and log-probs are those of transformers, by both endpoints, whole or token by token."""
    service, own = serve(ids_endpoint=ids_endpoint), IDS if ids_endpoint else COMPLETIONS
    wrapper = connect(service, stream=stream)
    found = wrapper.generate_tokens(PROMPTS, parse())

    check(found)
    assert {each.version for each in found} == {"7+8" if ids_endpoint else None}
    # One request for each row; without the first endpoint no more than one more for each.
    assert service.paths.count(own) == len(PROMPTS)
    assert set(service.paths) <= {IDS, own}
    # A missing endpoint is not asked for again.
    before = len(service.paths)
    check(wrapper.generate_tokens(PROMPTS[:2], parse()), PROMPTS[:2])
    assert service.paths[before:] == [own, own]


@SENDS
def test_scores_are_those_of_transformers(serve, ids_endpoint, stream):
    """Rows of ids have the log-probs of `TransformersWrapper`, in its layout."""
    ids = torch.tensor([[0, 5, 9, 11], [0, 0, 0, 7], [3, 4, 90, 2]])
    td = TensorDict({"tokens": Tokens(full=ids, batch_size=[3]), "attention_mask": ids > 0}, [3])
    options = {"input_mode": "tokens", "generate": False, "pad_output": True}
    own = TransformersWrapper(MODEL, **options)(td)["log_probs"]
    service = serve(ids_endpoint=ids_endpoint)
    wrapper = connect(service, stream=stream, **options)
    found = wrapper(td)["log_probs"]

    sent = {"echo": True, "max_tokens": 0, "logprobs": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    sent |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    assert all(body | sent == body for _, body, _ in service.requests)
    assert torch.allclose(found.full, own.full.detach(), atol=1e-5)
    assert torch.equal(found.mask, own.mask)
    rows = wrapper.score_tokens([torch.zeros(0, dtype=torch.int64), torch.tensor([4]), *PROMPTS])
    assert [row.tolist() for row in rows[:2]] == [[], [0.0]]
    assert torch.allclose(rows[2][1:], row_log_probs(MODEL, PROMPTS[0]), atol=1e-5)


def test_a_response_depends_on_its_key_and_prompt_alone(serve):
    """Alone or in a batch it is the same; other keys give others, by seeds of their own."""
    service = serve()
    wrapper, options = connect(service), parse(temperature=1.0, num_return_sequences=2, max_new_tokens=8)
    keys = tdf.random.split(tdf.random.key(3), 4)
    found = wrapper.generate_tokens(PROMPTS[:2], options, keys=keys)
    alone = wrapper.generate_tokens(PROMPTS[1:2], options, keys=keys[2:])

    assert [each.tokens.tolist() for each in found[2:]] == [each.tokens.tolist() for each in alone]
    assert found[0].tokens.tolist() != found[1].tokens.tolist()
    seeds = [body["sampling_params"]["seed"] for _, body, _ in service.requests]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_log_probs_of_draws_are_the_models(serve):
    """Raw ones, with several responses to a prompt."""
    options, keys = parse(temperature=1.0, num_return_sequences=2, max_new_tokens=8), tdf.random.key(3)
    found = connect(serve()).generate_tokens(PROMPTS[:2], options, keys=tdf.random.split(keys, 4))

    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    pairs = zip(prompts, found, strict=True)
    expected = [row_log_probs(MODEL, torch.cat([row, each.tokens]))[len(row) - 1 :] for row, each in pairs]
    torch.testing.assert_close([each.log_probs for each in found], expected, atol=1e-5, rtol=1e-5)


@SENDS
def test_draws_of_the_models_own_distribution_have_their_behaviour(serve, ids_endpoint, stream):
    """At temperature 1 without cuts and penalties it is the raw log-prob."""
    wrapper = connect(serve(ids_endpoint=ids_endpoint), stream=stream)
    options, keys = parse(temperature=1.0, max_new_tokens=4), tdf.random.split(tdf.random.key(0), 1)
    (found,) = wrapper.generate_tokens(PROMPTS[:1], options, keys=keys)

    assert torch.equal(found.behaviour, found.log_probs)


@SENDS
@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.9}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"min_new_tokens": 1}]
    + [{"repetition_penalty": 1.2}, {"logprobs": False}, {"temperature": 0.0}],
    ids=str,
)
def test_other_draws_have_no_behaviour(serve, ids_endpoint, stream, changes):
    """It is None, as for greedy responses."""
    wrapper = connect(serve(ids_endpoint=ids_endpoint), stream=stream)
    options, keys = {"temperature": 1.0, "max_new_tokens": 4}, tdf.random.split(tdf.random.key(0), 1)
    (found,) = wrapper.generate_tokens(PROMPTS[:1], parse(**{**options, **changes}), keys=keys)

    assert found.behaviour is None


def sent(service, options, keys=None):
    """The options of a request for a response with these options."""
    connect(service).generate_tokens(PROMPTS[:1], options, keys=keys)
    body = service.requests[-1][1]
    return body.get("sampling_params", body)


BOTH = pytest.mark.parametrize("ids_endpoint", [True, False])


@BOTH
def test_every_option_is_sent(serve, ids_endpoint):
    """By the names that the server has for it."""
    own = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    ends = {"min_new_tokens": 2, "stop_sequences": "x", "stop_token_ids": [4], "eos_token_ids": [5], "max_tokens": 3}
    options = parse(**own, **ends, logprobs=False)
    found = sent(serve(ids_endpoint=ids_endpoint), options, tdf.random.key(0)[None])

    expected = own | {"max_tokens": 3, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [4, 5], "ignore_eos": True}
    assert found | expected == found
    assert "logprobs" not in found


@BOTH
def test_options_that_are_off_are_sent(serve, ids_endpoint):
    """A server has defaults of its own."""
    found = sent(serve(ids_endpoint=ids_endpoint), parse(max_new_tokens=1))

    off = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
    off |= {"include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert found | off == found
    assert found["ignore_eos"] is False
    assert "seed" not in found


def test_a_server_without_token_ids_gives_texts_alone(serve):
    """Tokens, masks and log-probs are None, the reply has the server's text, and scoring raises."""
    model = make("llama", vocab_size=400)
    service = serve(model, ids_endpoint=False, token_ids=False)
    tokenizer = make_tokenizer()
    options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 2}, "input_mode": "text"}
    wrapper = connect(service, **options)
    out = wrapper(TensorDict({"text": Text(prompt=["the fox"], batch_size=[1])}, [1]))
    (response,) = wrapper.generate_tokens([torch.tensor(tokenizer("the fox").input_ids)], parse(max_new_tokens=2))

    assert response.tokens is None
    assert response.log_probs is None
    assert response.text.count("<") == 2
    assert out["text"].response == [response.text]
    assert not {"tokens", "masks", "log_probs"} & set(out.keys())
    with pytest.raises(UnsupportedError, match="only a server that returns token ids can score"):
        wrapper.score_tokens(PROMPTS)


def test_control_strings_of_a_user_stay_text(serve):
    """The ids that the server gets are those of safe encoding; the reply has the ids that it was sampled as."""
    service, tokenizer = serve(make("llama", vocab_size=400)), make_tokenizer()
    options = {"tokenizer": tokenizer, "input_mode": "history", "chat_template_name": "chatml"}
    wrapper = connect(service, generate_kwargs={"max_new_tokens": 3}, **options)
    history = History.from_chats([{"role": "user", "content": "<|im_end|>"}])
    out = wrapper(TensorDict({"history": ChatHistory(prompt=history.unsqueeze(0), batch_size=[1])}, [1]))
    ((path, body, _),) = service.requests

    assert path == IDS
    assert body["token_ids"].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert out["tokens"].prompt[0].tolist() == body["token_ids"]
    assert out["history"].response[0, 0].token_ids == out["tokens"].response[0].tolist()


@pytest.mark.parametrize(("tries", "status"), [(3, 408), (3, 429), (3, 500), (3, 503), (1, 400), (1, 401), (1, 422)])
def test_a_status_that_may_pass_is_retried(serve, tries, status):
    """The next attempt gives the response; another refusal is an error at once, with the server's explanation."""
    service = serve()
    wrapper = connect(service)
    service.faults = [refuse(status)] * tries
    with pytest.raises(RemoteError, match=f"response 0: .*did not accept(?s:.)*{status} .*refused {status}") as found:
        wrapper.generate_tokens(PROMPTS[:1], parse())

    assert found.value.status == status
    assert pickle.loads(pickle.dumps(found.value)).status == status
    assert len(service.requests) == tries
    service.faults = [refuse(status)] * (tries - 1)
    check(wrapper.generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    assert len(service.requests) == 2 * tries


@pytest.mark.parametrize("status", [403, 404, 405, 501])
def test_a_missing_model_is_refused_by_both_endpoints(serve, status):
    """These may mean the endpoint, so that the other one is tried; its answer counts."""
    service = serve()
    service.faults = [refuse(status), refuse(status)]
    with pytest.raises(RemoteError, match=f"completions did not accept(?s:.)*refused {status}"):
        connect(service).generate_tokens(PROMPTS[:1], parse())
    assert service.paths == [IDS, COMPLETIONS]


def test_an_endpoint_that_answered_is_not_missing(serve):
    """Its refusal then counts at once; before, one refusal by both does not mean that it is not there."""
    service = serve()
    wrapper = connect(service)
    service.faults = [refuse(404), refuse(404)]
    with pytest.raises(RemoteError, match="refused 404"):
        wrapper.generate_tokens(PROMPTS[:1], parse())
    service.requests.clear()
    check(wrapper.generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    service.faults = [refuse(404)]
    with pytest.raises(RemoteError, match="refused 404"):
        wrapper.generate_tokens(PROMPTS[:1], parse())
    assert service.paths == [IDS, IDS]


def test_the_time_that_a_server_gives_is_waited_for(serve):
    """In seconds; anything else counts as no time."""
    service = serve()
    service.faults = [refuse(429, Retry_After="1"), refuse(503, Retry_After="0")]
    check(connect(service, backoff_s=30.0).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])

    first, second, third = service.times
    assert 1 <= second - first < 10
    assert third - second < 1
    service.faults = [refuse(503, Retry_After="soon")]
    check(connect(service).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])


@pytest.mark.parametrize("seconds", ["61", "31536000", "9" * 400])
def test_a_long_time_that_a_server_gives_is_an_error_at_once(serve, seconds):
    """The request is not repeated, and the error has the time."""
    service = serve()
    service.faults = [refuse(429, Retry_After=seconds)]

    with pytest.raises(RemoteError, match="asks to wait .* s; waits of more than 60 s are yours") as caught:
        connect(service).generate_tokens(PROMPTS[:1], parse())
    assert caught.value.retry_after_s == float(seconds)
    assert len(service.requests) == 1


def test_a_connection_that_breaks_is_retried(serve):
    """Reset before an answer, or broken in a stream; no part of a response is ever returned."""
    service = serve()
    service.faults = [reset, reset]
    check(connect(service).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    service.faults = [cut(2, clean=False), None]
    check(connect(service, stream=True).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    assert len(service.requests) == 5

    service.faults = [cut(2, clean=False)] * 3
    with pytest.raises(RemoteError, match="did not answer(?s:.)*RemoteProtocolError"):
        connect(service, stream=True).generate_tokens(PROMPTS[:1], parse())
    service.close()
    with pytest.raises(RemoteError, match="ConnectError"):
        connect(service).generate_tokens(PROMPTS[:1], parse())


@pytest.mark.parametrize("ids_endpoint", [True, False])
@pytest.mark.parametrize("count", [0, 2])
def test_a_stream_that_is_cut_raises(serve, ids_endpoint, count):
    """A stream that ends without a reason is not a response, and is not tried again."""
    service = serve(ids_endpoint=ids_endpoint)
    wrapper = connect(service, stream=True)
    check(wrapper.generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    before = len(service.requests)
    service.faults = [cut(count, clean=True)]

    with pytest.raises(RemoteError, match="is not complete(?s:.)*the stream ended early"):
        wrapper.generate_tokens(PROMPTS[:1], parse())
    assert len(service.requests) == before + 1


def test_an_error_in_a_stream_may_pass_by_its_code(serve):
    """500 is retried."""
    service = serve()
    service.faults = [report({"message": "lost", "code": 500})]

    check(connect(service, stream=True).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    "error", [{"message": "lost", "code": 400}, {"message": "lost", "code": "none"}, "lost"], ids=str
)
def test_an_error_in_a_stream_is_that_of_its_code(serve, error):
    """400, another code and none are not retried."""
    service = serve()
    service.faults = [report(error)]
    with pytest.raises(RemoteError, match="ended without a response(?s:.)*lost"):
        connect(service, stream=True).generate_tokens(PROMPTS[:1], parse())

    assert len(service.requests) == 1


def test_a_silent_server_raises_and_a_slow_stream_does_not(serve):
    """The timeout is that of silence: a stream may take longer."""
    slow = serve(delay_s=0.6)
    with pytest.raises(RemoteError, match="ReadTimeout"):
        connect(slow, timeout_s=0.05, max_retries=1).generate_tokens(PROMPTS[:1], parse())
    assert len(slow.requests) == 2

    service = serve()
    service.faults = [lambda handler: answer(handler, pause_s=0.06)]
    check(connect(service, stream=True, timeout_s=0.3).generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])


def write_on(handler, kind, text, pause_s):
    """An answer without an end: the same text again and again, until the client is gone."""
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    for _ in range(20_000):
        handler.wfile.write(text)
        time.sleep(pause_s)


TOKEN = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}]}\n\n'
ENDLESS = {
    "a body": (False, "application/json", b" ", 0.02, "ReadTimeout"),
    "signs of life": (True, "text/event-stream", b": wait\n\n", 0.02, "ReadTimeout"),
    "an event": (True, "text/event-stream", b"data: {", 0.02, "ReadTimeout"),
    "tokens": (True, "text/event-stream", TOKEN, 0.0, "does not end"),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_an_answer_without_an_end_raises(serve, case):
    """`timeout_s` is the time of a complete response, or of the next token; a stream ends soon after its tokens."""
    stream, kind, text, pause_s, pattern = ENDLESS[case]
    service = serve(ids_endpoint=False)
    service.faults = [lambda handler: write_on(handler, kind, text, pause_s)]
    wrapper = connect(service, stream=stream, max_retries=0, timeout_s=0.5)
    wrapper._endpoint = COMPLETIONS
    began_s = time.monotonic()

    with pytest.raises(RemoteError, match=pattern):
        wrapper.generate_tokens(PROMPTS[:1], parse())
    assert time.monotonic() - began_s < 5


def test_the_limit_of_concurrency_holds_for_all_threads(serve):
    """Requests run at the same time, and no more than the limit; after an error no more begin."""
    service = serve(delay_s=0.02)
    wrapper = connect(service, max_concurrency=3)

    with ThreadPoolExecutor(3) as pool:
        for responses in pool.map(lambda _: wrapper.generate_tokens(PROMPTS, parse()), range(3), timeout=30):
            check(responses)
    assert service.most_active == 3
    service.requests.clear()
    service.faults = [lambda handler: answer(handler, pause_s=0.2), refuse(400)]
    with pytest.raises(RemoteError, match="refused 400"):
        connect(service, max_concurrency=2, stream=True).generate_tokens(PROMPTS * 5, parse())
    time.sleep(0.15)
    assert len(service.requests) <= 4


ALTERED = [
    # The prompt was cut.
    ({"prompt_token_ids": [5, 9]}, "form of its endpoint(?s:.)*a prompt of 2 tokens"),
    # A log-prob is missing, all are, or one is null.
    ({"logprobs": {"token_logprobs": [-1.0]}}, "1 log-probs of 6 tokens"),
    ({"logprobs": None}, "0 log-probs of 6 tokens"),
    ({"logprobs": {"token_logprobs": [None] * 6}}, "form of its endpoint"),
    ({"finish_reason": "abort"}, "is not complete(?s:.)*'abort'"),
    ({"token_ids": ["a"]}, "form of its endpoint"),
    ({"logprobs": {"token_logprobs": [0.5] * 6}}, "the largest 0.5"),
    ({"logprobs": {"token_logprobs": [-1.0] * 6, "tokens": ["token_id:0"] * 6}}, "of token 0 in the place of"),
    ({"logprobs": {"content": [{"token_id": 0, "logprob": -1.0}] * 6}}, "of token 0 in the place of"),
    ({"logprobs": {"token_logprobs": [-1.0] * 6, "tokens": ["a"]}}, "form of its endpoint"),
    # Ids that are none, and more of them than were asked for.
    ({"token_ids": [7.0] * 6}, "7.0 as a token"),
    ({"token_ids": [True] * 6}, "True as a token"),
    ({"token_ids": [-7] * 6}, "-7 as a token"),
    ({"token_ids": [7] * 7}, "7 tokens of 6"),
    # It is of another response, or of none.
    ({"index": 1}, "several responses"),
    ({"token_ids": None, "text": None}, "neither token ids nor a text"),
]


def altered(answer, **changes):
    """An answer with other entries in its choice."""
    return {"choices": [{**answer["choices"][0], **changes}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("change", [{"finish_reason": "eos"}, {"finish_reason": "eos_token"}, {"error": None}], ids=str)
def test_the_answers_of_other_servers_are_read(change, stream, serve):
    """Other names of the end of a response, and an error that there is not."""
    service = serve(ids_endpoint=False)

    def alter(answer):
        choice = answer["choices"][0]
        reason = choice["finish_reason"] and change.get("finish_reason", "stop")
        own = {name: value for name, value in change.items() if name == "error"}
        return {"choices": [{**choice, "finish_reason": reason}], **own}

    service.alter = alter
    (found,) = connect(service, stream=stream).generate_tokens(PROMPTS[:1], parse())
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(("change", "pattern"), ALTERED, ids=str)
def test_an_answer_that_does_not_fit_raises(serve, change, pattern):
    """No tokens or log-probs are made up or mixed up."""
    service = serve(ids_endpoint=False)
    service.alter = lambda answer: altered(answer, **change)
    with pytest.raises(RemoteError, match=pattern):
        connect(service).generate_tokens(PROMPTS[:1], parse())


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"choices": 3}', b'{"choices": [null]}', b"[]"])
def test_a_page_of_a_proxy_is_not_an_answer(serve, body):
    """Nor is another object."""
    service = serve(ids_endpoint=False)
    service.faults = [lambda handler: handler.reply(200, body)]
    with pytest.raises(RemoteError, match="form of its endpoint"):
        connect(service).generate_tokens(PROMPTS[:1], parse())


def test_infinite_log_probs_are_read(serve):
    """JSON has no infinities; servers send -9999. Tokens may be named by their texts."""
    service = serve(ids_endpoint=False)
    entries = {"token_logprobs": [None, -9999.0, -2.0], "tokens": ["a", "b", "c"]}
    service.alter = lambda answer: altered(answer, logprobs=entries)

    assert connect(service).score_tokens(PROMPTS[:1])[0].tolist() == [0.0, -math.inf, -2.0]


def test_tokens_of_zero_are_read(serve):
    """They are tokens, too."""
    service = serve(ids_endpoint=False)
    service.alter = lambda answer: altered(answer, token_ids=[0] * 6)

    assert connect(service).generate_tokens(PROMPTS[:1], parse())[0].tokens.tolist() == [0] * 6


def test_scores_of_other_tokens_raise(serve):
    """The server scored another row."""
    service = serve(ids_endpoint=False)
    content = [{"token": "token_id:0", "logprob": -1.0}] * 3
    service.alter = lambda answer: altered(answer, logprobs={"content": content})
    with pytest.raises(RemoteError, match="of token 0 in the place of 9"):
        connect(service).score_tokens(PROMPTS[:1])


def test_a_stream_whose_last_event_lacks_ids_raises(serve):
    """The response would lack its end."""
    service = serve(ids_endpoint=False)
    service.alter = lambda answer: altered(answer, token_ids=None if answer["choices"][0]["finish_reason"] else [5])
    with pytest.raises(RemoteError, match="only a part of the response"):
        connect(service, stream=True).generate_tokens(PROMPTS[:1], parse())


def test_an_answer_of_two_responses_raises(serve):
    """One was asked for."""
    service = serve(ids_endpoint=False)
    service.alter = lambda answer: {"choices": answer["choices"] * 2}
    with pytest.raises(RemoteError, match="several responses"):
        connect(service).generate_tokens(PROMPTS[:1], parse())


def response(tokens, values):
    """The bytes of an answer with these texts as tokens and log-probs."""
    logprobs = f'{{"token_logprobs": {values}}}'
    choice = f'{{"token_ids": [{tokens}], "finish_reason": "stop", "text": "", "logprobs": {logprobs}}}'
    return f'{{"choices": [{choice}]}}'.encode()


def log_prob(value):
    """The bytes of an answer with this text as the first log-prob."""
    values = f"[{value}, {', '.join(['-1.0'] * 5)}]"
    return response("7, 7, 7, 7, 7, 7", values)


def token(value):
    """The bytes of an answer with this text as a token."""
    return response(value, "[-1.0]")


HOSTILE = {
    "a token past 64 bits": token(2**70),
    "a token of 5,000 digits": token("9" * 5000),
    "an infinite token": token("1e999"),
    "a whole log-prob past float": log_prob(-(10**400)),
    "a log-prob that is NaN": log_prob("NaN"),
    "a log-prob that is true": log_prob("true"),
    "a log-prob in a list": log_prob("[-1.0]"),
    "a log-prob that is a text": log_prob('"' + "x" * 5000 + '"'),
    "lists of great depth": b"[" * 200_000,
    "objects of great depth": b'{"a":' * 200_000,
    "depth in a log-prob": log_prob("[" * 50_000 + "]" * 50_000),
    "bytes that are no text": b'{"choices": "\xff\xfe"}',
}


def reply_whole(handler, body):
    """Answer with these bytes."""
    handler.reply(200, body)


def reply_in_a_stream(handler, body):
    """Answer with a stream of one event, which has these bytes."""
    event = b"data: " + body + b"\n\n"
    handler.begin()
    handler.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
    handler.end()


@pytest.mark.parametrize(("reply", "stream"), [(reply_whole, False), (reply_in_a_stream, True)])
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_a_remote_error(serve, body, reply, stream):
    """Numbers of any size and nesting of any depth; the message is short."""
    service = serve(ids_endpoint=False)
    service.faults = [lambda handler: reply(handler, body)]

    with pytest.raises(RemoteError, match="form of its endpoint") as caught:
        connect(service, stream=stream, max_retries=0).generate_tokens(PROMPTS[:1], parse())
    assert len(str(caught.value)) < 1000


def test_the_wrapper_gives_samples_and_scores_of_prompts(serve):
    """[B, N] responses with log-probs of prompt and response, equal to a scoring of the whole."""
    service = serve()
    kwargs = {"max_new_tokens": 3, "temperature": 1.0}
    wrapper = connect(service, num_samples=2, prompt_log_probs=True, pad_output=True, generate_kwargs=kwargs)
    ids = torch.tensor([[0, 5, 9], [0, 0, 7]])
    out = wrapper(TensorDict({"tokens": Tokens(prompt=ids, batch_size=[2]), "attention_mask": ids > 0}, [2]), key=0)
    log_probs = out["log_probs"]

    shapes = [log_probs.response.shape[:2], log_probs.behaviour.shape[:2], out["tokens"].is_complete.shape]
    assert shapes == [torch.Size([2, 2])] * 3
    full, masks = out["tokens"].full.flatten(0, 1), out["masks"].all_attention_mask.flatten(0, 1)
    expected = [row_log_probs(MODEL, row[mask]) for row, mask in zip(full, masks, strict=True)]
    pairs = zip(log_probs.full.flatten(0, 1), log_probs.mask.flatten(0, 1), strict=True)
    torch.testing.assert_close([values[known] for values, known in pairs], expected, atol=1e-5, rtol=1e-5)
    assert len(service.requests) == 2 * 2 + 1


def test_no_tokens_need_no_server(serve):
    """Empty responses and empty batches make no requests."""
    service = serve()
    wrapper = connect(service)
    found = wrapper.generate_tokens(PROMPTS, parse(max_new_tokens=0))

    assert [[*each.tokens, *each.log_probs] for each in found] == [[]] * len(PROMPTS)
    assert {(each.finish_reason, each.behaviour) for each in found} == {("length", None)}
    assert wrapper.generate_tokens([], parse()) == []
    assert wrapper.score_tokens([]) == []
    assert service.requests == []


def test_a_copy_connects_by_itself(serve):
    """The wrapper is copied and pickled with its key, which is sent and not shown."""
    service = serve()
    wrapper = connect(service, api_key="s3cret", timeout_s=math.inf)
    check(wrapper.generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])
    copies = pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper), wrapper.get_new_version(pad_output=True)
    for other in copies:
        check(other.generate_tokens(PROMPTS[:1], parse()), PROMPTS[:1])

    assert {headers["Authorization"] for _, _, headers in service.requests} == {"Bearer s3cret"}
    assert "s3cret" not in repr(wrapper) + repr(vars(wrapper)) + repr(vars(wrapper._server))


FAULTS = st.lists(st.sampled_from(["answer", "reset", "busy", "cut"]), max_size=12)


@examples(0.2)
@given(FAULTS, st.booleans(), st.data())
def test_rows_keep_their_order_among_faults(faults, stream, data):
    """Each prompt has its own response, whichever requests fail on the way."""
    kinds = {"answer": None, "reset": reset, "busy": refuse(503), "cut": cut(1, clean=False)}
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(len(faults))
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]
    service = Service(MODEL)
    try:
        service.faults = [kinds[kind] if stream or kind != "cut" else reset for kind in faults]
        check(connect(service, stream=stream, max_retries=13).generate_tokens(prompts, parse()), prompts)
    finally:
        service.close()


# -- pushes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pushing(serve, tmp_path):
    """A service with other weights, its wrapper, and a function that pushes those of a model."""
    service = serve(other_weights(MODEL, 1), label="first")
    wrapper, given = connect(service), other_weights(MODEL, 2)
    lm, params, buffers = causal_lm(given)

    def push(tree=params, **options):
        return wrapper.push(tree, **{"lm": lm, "buffers": buffers, "folder": tmp_path, "version": 2, **options})

    yield service, wrapper, given, params, push
    assert list(tmp_path.iterdir()) == []


def test_a_push_to_a_server(pushing):
    """The server has the weights of the tree, and its label."""
    service, wrapper, given, _, push = pushing
    done = push(proof="full")

    assert done.version == "2"
    assert done.unread == {}
    assert done.difference < 1e-5
    torch.testing.assert_close(list(service.model.parameters()), list(given.parameters()), rtol=0, atol=0)
    (made,) = wrapper.generate_tokens(PROMPTS[:1], parse())
    assert made.version == "2"


def test_a_second_push_to_a_server(pushing):
    """It has a label and a folder of its own, and the digests of equal weights."""
    service, wrapper, given, _, push = pushing
    done = push(proof="full")
    again = push(tdf.from_module(given), buffers=None, version="three")

    assert again.version == "three"
    assert again.difference < 1e-5
    assert again.digests == done.digests
    (made,) = wrapper.generate_tokens(PROMPTS[:1], parse())
    assert made.version == "three"
    folders = [body["kwargs"]["weights_path"] for path, body, _ in service.requests if path == "/collective_rpc"]
    assert len(set(folders)) == 2


def _torn(service, folder):
    with open(f"{folder}/model.safetensors", "r+b") as file:
        file.seek(-64, 2)
        file.write(b"\1" * 64)
    service.read_weights(folder)


def _dies(service, folder):
    service.http.server_close()
    raise ConnectionError


PUSHES = {
    "stale": (lambda service, folder: None, ValueError, "log-probs of the engine and the tree differ"),
    "torn": (_torn, CorruptCheckpointError, "model.safetensors"),
    "dead": (_dies, RemoteError, "push: http.*/collective_rpc did not answer"),
}


def push_faulty(pushing, fault):
    """Push to a server that fails in a way."""
    service, *_, push = pushing
    reload, error, pattern = PUSHES[fault]
    service.reload = lambda folder: reload(service, folder)
    with pytest.raises(error, match=pattern):
        push()


@pytest.mark.parametrize("fault", PUSHES)
def test_faulty_pushes_to_a_server(pushing, fault):
    """Each raises, the tree is as it was, and the label says that the weights are not proven."""
    service, _, _, params, _ = pushing
    before = params.clone()
    push_faulty(pushing, fault)

    assert_same(params, before)
    assert service.label == "unproven: 2"


@pytest.mark.parametrize("fault", ["stale", "torn"])
def test_after_a_faulty_push_nothing_is_drawn(pushing, fault):
    """Nor scored, by no wrapper; the next push mends it."""
    service, wrapper, *_, push = pushing
    push_faulty(pushing, fault)

    refused = "are not proven(?s:.*)'2'(?s:.*)push again"
    with pytest.raises(ConcurrencyError, match=refused):
        wrapper.generate_tokens(PROMPTS, parse())
    with pytest.raises(ConcurrencyError, match=refused):
        connect(service).generate_tokens(PROMPTS, parse())
    with pytest.raises(ConcurrencyError, match="are not proven"):
        wrapper.score_tokens(PROMPTS)
    service.reload = service.read_weights
    push()
    assert wrapper.generate_tokens(PROMPTS[:1], parse())[0].version == "2"


def test_refused_pushes_to_a_server(pushing, serve, tmp_path):
    """A cache that stays, a tree with other names, and a server without the endpoints, which generates as before."""
    service, _, _, params, push = pushing
    with pytest.raises(TreeStructureError, match="lacks 'lm_head.weight'(?s:.*)nothing was sent"):
        push(params.delete(("lm_head", "weight")))
    assert service.label == "first"
    service.resets = False
    with pytest.raises(ConcurrencyError, match="did not drop its prefix cache"):
        push()
    wrapper = connect(serve())
    lm, params, buffers = causal_lm(MODEL)
    with pytest.raises(UnsupportedError, match="endpoints for weights(?s:.*)VLLM_SERVER_DEV_MODE=1"):
        wrapper.push(params, lm=lm, buffers=buffers, version=1, folder=tmp_path)
    check(wrapper.generate_tokens(PROMPTS, parse()))


CONNECTIONS = [
    ({"max_concurrency": 0}, ValueError),
    ({"max_concurrency": -1}, ValueError),
    ({"max_concurrency": 1.5}, TypeError),
    ({"max_retries": -1}, ValueError),
    ({"timeout_s": 0}, ValueError),
    ({"timeout_s": float("nan")}, ValueError),
    ({"timeout_s": None}, ValueError),
    ({"backoff_s": -1.0}, ValueError),
    ({"backoff_s": float("nan")}, ValueError),
]


@pytest.mark.parametrize(("options", "kind"), CONNECTIONS, ids=str)
def test_an_option_out_of_range_is_found_before_a_request(serve, options, kind):
    """Without connections a request would wait for ever, and another time would be an answer of a wrong form."""
    service = serve()
    (name,) = options

    with pytest.raises(kind, match=f"RemoteWrapper: {name}"):
        connect(service, **options)
