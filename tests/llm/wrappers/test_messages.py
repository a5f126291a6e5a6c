"""The errors of wrappers, one line each."""

import pytest
import torch

from tdfunc import ImmutableError, LeafMismatchError, MissingKeyError, TensorDict, UnsupportedError
from tdfunc.llm import ChatHistory, GenerationOptions, History, RemoteWrapper, Text, Tokens, TransformersWrapper
from tests.llm.models import make
from tests.llm.tokens import make_tokenizer
from tests.llm.wrappers.fake import FakeWrapper

TOKENIZER = make_tokenizer()
IDS = torch.ones(2, 3, dtype=torch.int64)
TOKENS = TensorDict({"tokens": Tokens(prompt=IDS, full=IDS, batch_size=[2])}, [2])
TEXTS = TensorDict({"text": Text(prompt=["a", ""], batch_size=[2])}, [2])
CHAT = History.from_chats([{"role": "user", "content": "a"}])
ASKED = TensorDict(
    {"history": ChatHistory(prompt=History.from_chats([[{"role": "user", "content": "a"}]]), batch_size=[1])}, [1]
)
SHORT = {"truncation": True, "max_length": 3}
SAID = TensorDict({"history": History.from_chats([[{"role": "assistant", "content": "a"}]])}, [1])
EDITED = TensorDict({"history": History.from_chats([[{"role": "assistant", "content": "a", "token_ids": [5]}]])}, [1])
EMPTY = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
SAMPLER = TransformersWrapper(make("llama"), input_mode="tokens", generate_kwargs={"n": 1, "max_tokens": 1})
SCORER = TransformersWrapper(make("gpt2", n_positions=5), input_mode="tokens", generate=False)
REMOTE = RemoteWrapper("tiny", base_url="http://none", input_mode="tokens", generate=False)
HOT = {"temperature": 1.0}


def made(mode="tokens", **options):
    """A wrapper that scores."""
    return FakeWrapper(tokenizer=TOKENIZER, input_mode=mode, **{"generate": False} | options)


def sent(**options):
    """Nothing, for no prompts, but the options are read first."""
    return REMOTE.generate_tokens([], GenerationOptions.parse({"max_new_tokens": 2} | options))


CASES = [
    (lambda: made("words"), ValueError, "input_mode must be one of"),
    (lambda: made(inplace=True), ImmutableError, "trees are never written"),
    (lambda: made(inplace="empty"), ImmutableError, "tensordict_out="),
    (lambda: FakeWrapper(input_mode="text"), TypeError, "needs a tokenizer"),
    (lambda: made(no_such=1), TypeError, "no_such"),
    (lambda: made(layout=torch.sparse_coo), ValueError, "layout must be"),
    (lambda: made("text", tokenizer_kwargs={"padding": True}), ValueError, "has 'padding'"),
    (lambda: made("text", tokenizer_kwargs={"no_such": 1}), ValueError, "has 'no_such'(?s:.)*add_special_tokens"),
    (lambda: made(tokenizer_kwargs={"no_such": 1}), ValueError, "has 'no_such', which input_mode='tokens'"),
    (lambda: made("text", tokenizer_kwargs={"truncation": True}), ValueError, "max_length is missing"),
    (lambda: made("history", chat_template_name="no such"), ValueError, "does not exist"),
    (lambda: made("history", chat_template=EMPTY)(SAID), ValueError, "mask of conversation 0 is empty"),
    (lambda: made("history", generate=True, tokenizer_kwargs=SHORT)(ASKED), ValueError, "remove the end of the prompt"),
    (lambda: made("history")(EDITED), ValueError, r"message 0 \(assistant\): token_ids do not decode"),
    (lambda: made(batching=False, max_batch_size=2), ValueError, "excludes batch sizes"),
    (lambda: made(min_batch_size=3, max_batch_size=2), ValueError, "min_batch_size is above max_batch_size"),
    (lambda: made(num_samples=2, generate_kwargs={"n": 3, "temperature": 1.0}), ValueError, "num_samples"),
    (lambda: setattr(made(), "pad_output", True), ImmutableError, "get_new_version"),
    (lambda: made().select_out_keys("text"), MissingKeyError, "not an out key"),
    (lambda: made()(TEXTS), MissingKeyError, "tokens.full"),
    (lambda: made("text")(TOKENS), MissingKeyError, "text.full"),
    (lambda: made(layout=torch.jagged)(TOKENS.reshape(2, 1)), LeafMismatchError, "nested: a lazy stack"),
    (lambda: made("text")(TensorDict({"text": IDS}, [2])), LeafMismatchError, "a text for each element"),
    (lambda: made("history")(TensorDict({"history": CHAT}, [1])), LeafMismatchError, "dimension of"),
    (lambda: made("text", generate=True)(TEXTS), ValueError, "row 1 has no tokens"),
    (lambda: made(generate=True)(TOKENS, training=True), ValueError, "excludes generate=True"),
    (lambda: made(generate=True, generate_kwargs=HOT)(TOKENS), ValueError, "sampling has no random key"),
    (lambda: sent(num_beams=2), UnsupportedError, "RemoteWrapper: beam search is not(?s:.)*num_beams=2"),
    (lambda: sent(temperature=1.0, top_p=0.9, min_p=0.1), UnsupportedError, "RemoteWrapper: top_p with min_p is not"),
    (lambda: sent(max_new_tokens=None), ValueError, "max_new_tokens is missing"),
    (lambda: made()(TOKENS, logits_only=True), UnsupportedError, "returns no logits"),
    (lambda: made().get_dist(TOKENS), UnsupportedError, "returns no logits"),
    (lambda: SCORER.get_dist(TOKENS.reshape(2, 1), as_nested_tensor=True), UnsupportedError, "one batch dimension"),
    (lambda: REMOTE(TOKENS, training=True), UnsupportedError, "a server has no dropout"),
    (lambda: made().get_dist(TOKENS, TOKENS), UnsupportedError, "cannot contain a distribution"),
    (
        lambda: made().get_dist(TOKENS, as_nested_tensor=True, as_padded_tensor=True),
        ValueError,
        "padded and nested results exclude",
    ),
    (lambda: made().get_dist(TOKENS, padding_side="up"), ValueError, "one of 'left', 'right'"),
    (
        lambda: made().get_dist(TOKENS.set("x", IDS[:, :2, None]), logits_key="x"),
        LeafMismatchError,
        "the logits and the tokens differ",
    ),
    (lambda: TransformersWrapper(torch.nn.Linear(1, 1), input_mode="tokens"), TypeError, "language model of transform"),
    (lambda: torch.func.grad(lambda x: SAMPLER(TOKENS) and x)(torch.ones(())), UnsupportedError, "inside a transform"),
]


@pytest.mark.parametrize("case", CASES, ids=[pattern for *_, pattern in CASES])
def test_messages(case):
    """Each mistake raises its class, and names what is wrong."""
    call, kind, pattern = case

    with pytest.raises(kind, match=pattern):
        call()
