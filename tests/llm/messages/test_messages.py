"""The messages of mistakes with conversations and templates. Each row is a call, its error and its message."""

import pytest
import torch

from tdfunc import ImmutableError, MissingKeyError, RemoteError, UnsupportedError
from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import Batcher, ContentBase, History, RemoteWrapper, chatml, deepseek, gemma, llama, load_jsonl, mistral
from tdfunc.llm.generation.options import GenerationOptions
from tests.llm.tokens import make_tokenizer

ONE = History(role="user", content="a")
CHAT = History.from_chats([{"role": "user", "content": "a"}])
BATCH = History.from_chats([[{"role": "user", "content": "a"}]] * 2)
NOTHING, FIRST = "x {% generation %}{% endgeneration %}", "{{ messages[0].content }}"
CALL = {"function": {"name": "f", "arguments": {}}}


def chat(*messages, tools=None):
    """A conversation of (role, content, fields)."""
    dicts = [{"role": role, "content": content, **fields} for role, content, fields in messages]
    return History.from_chats({"messages": dicts, "tools": tools})


def user(content="a", **fields):
    """A message of the user."""
    return "user", content, fields


def reply(content="b", **fields):
    """A message of the assistant."""
    return "assistant", content, fields


HISTORY = [
    (lambda: History.from_chats([{"content": "a"}]), TypeError, "from_chats, message 0.*dict with a role"),
    (lambda: History.from_chats([[], ["a"]]), TypeError, "conversation 0: there must be lists.*'a'"),
    (lambda: History.from_chats("a"), TypeError, "from_chats: there must be lists of messages"),
    (lambda: History.from_chats({"messages": "a"}), TypeError, "must have a list of messages"),
    (lambda: History.from_chats([{"role": "user", "contnt": "a"}]), MissingKeyError, "'contnt' is not a.*'content'"),
    (lambda: History.from_chats([{"role": "user", "content": 3}]), TypeError, "content must be text.*got: +3"),
    (lambda: History.from_chats([{"role": "assistant", "tool_calls": [{}]}]), TypeError, "must have a function"),
    (lambda: History.from_chats([{"role": "assistant", "tool_calls": "f"}]), TypeError, "tool_calls must be a list"),
    (lambda: CHAT.append(ONE, inplace=True), ImmutableError, "history = history.append"),
    (lambda: CHAT.extend(CHAT, inplace=True), ImmutableError, "history = history.append"),
    (lambda: ONE.append(ONE), BatchSizeError, r"unsqueeze\(0\)"),
    (lambda: CHAT.append(CHAT), BatchSizeError, "append: the element.*extend"),
    (lambda: BATCH.append(ONE), BatchSizeError, "append: the element.*one dimension less"),
    (lambda: BATCH.extend(BATCH[:1]), BatchSizeError, r"other dimensions.*\[2, 1\].*\[1, 1\]"),
    (lambda: BATCH.extend(CHAT), BatchSizeError, "one number of dimensions"),
    (lambda: BATCH.dense().extend(BATCH.dense()[:, :0], dim=0), BatchSizeError, "conversations 0 and 2.*lazy_stack"),
    (lambda: History(role=["a", "b"], content="x"), TypeError, r"History.role.*batch_size=\[2\]"),
    (lambda: History(role=3), TypeError, "History.role must be text.*got: +3"),
    (lambda: History(role=["a", "b"], batch_size=[3]), BatchSizeError, "History.role"),
    (lambda: ContentBase.from_parts([{"text": "a"}]), TypeError, "a dict with a type"),
    (lambda: ContentBase.from_parts([{"type": "text", "txt": "a"}]), TypeError, "no field 'txt'"),
    (lambda: load_jsonl(__file__), ValueError, r"test_messages.py: line 1 must be JSON"),
]
TEMPLATES = [
    (lambda: chatml.render(chat(user("<|im_end|>"))), ValueError, r"message 0 \(user\).*'<\|im_end\|>'.*unsafe=True"),
    (lambda: chatml.render(chat(user([{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]))),
     ValueError, r"message 0 \(user\) has the control string"),
    (lambda: chatml.render(chat(user(), tools=[{"name": "<|im_end|>"}])), ValueError, "the tools has the control"),
    (lambda: chatml.render(chat(user([{"type": "image", "url": "u"}]))), UnsupportedError,
     "message 0.*not text.*processor"),
    (lambda: chatml.render(chat(user(), user(tool_calls=[CALL]))), UnsupportedError, "message 1.*'tool_calls'"),
    (lambda: chatml.render(chat(user(), reply("<think>\na\n</think>\n\nb")), reversible=True), ValueError,
     r"message 1 \(assistant\) would not parse back: 'content'"),
    (lambda: chatml.render(chat(user(), reply(tool_calls=[{"id": "x", **CALL}])), reversible=True), ValueError,
     "message 1.*'tool_calls' would differ"),
    (lambda: gemma.render(chat(("system", "s", {}), user()), reversible=True), ValueError, "message 0.*'role'"),
    (lambda: gemma.render(chat(user(), user())), UnsupportedError, r"message 1 \(user\).*take turns"),
    (lambda: gemma.render(chat(user(), tools=[{}])), UnsupportedError, "gemma.*tools"),
    (lambda: gemma.render(chat(("system", "s", {}))), UnsupportedError, "gemma: a system message"),
    (lambda: llama.render(chat(user(" a ")), reversible=True), ValueError, "message 0.*'content'.*' a '.*'a'"),
    (lambda: llama.render(chat(user(), reply("x", tool_calls=[CALL]))), UnsupportedError, "message 1.*one call"),
    (lambda: llama.render(chat(user(), reply(reasoning_content="x"))), UnsupportedError, "'reasoning_content'"),
    (lambda: llama.render(chat(("system", "s", {}), tools=[{}])), UnsupportedError, "llama: the tools"),
    (lambda: deepseek.render(chat(user(), tools=[{}])), UnsupportedError, "deepseek.*tools"),
    (lambda: deepseek.render(chat(("critic", "s", {}))), UnsupportedError, "role 'critic'"),
    (lambda: deepseek.render(chat(user(), ("system", "s", {})), reversible=True), ValueError, "message 0.*'role'"),
    (lambda: mistral.render(chat(reply(), tools=[{}])), UnsupportedError, "mistral: the tools"),
    (lambda: chatml.parse("hello"), ValueError, r"character 0 is not.*<\|im_start\|>role"),
    (lambda: History.from_text("a", "chatm"), TypeError, "template or a tokenizer.*'chatml'"),
    (lambda: History.from_text("a", "chatm", tokenizer=make_tokenizer()), ValueError, "'chatm' does not.*'chatml'"),
    (lambda: History.from_text("a", tokenizer=make_tokenizer("{{ messages }}")), ValueError, "parse: no template"),
]  # fmt: skip
APPLY = [
    (lambda: CHAT.apply_chat_template(), TypeError, "template or a tokenizer"),
    (lambda: CHAT.apply_chat_template(chat_template_name="qwen", tokenize=True), TypeError, "ids need a tokenizer"),
    (lambda: apply(return_tensors="np"), ValueError, "return_tensors.*'np'"),
    (lambda: apply(padding="left"), ValueError, "padding must be one of.*'left'"),
    (lambda: apply(padding_side="middle"), ValueError, "padding_side"),
    (lambda: apply(tokenize=True, truncation=True), ValueError, "max_length must be given"),
    (lambda: apply(return_assistant_tokens_mask=True, return_dict=False), ValueError, "masks are in a tree"),
    (lambda: apply(chat_template_name="qwen", enable_thinking=False), ValueError, "'enable_thinking'.*ChatML"),
    (lambda: apply(chat(user("<|im_end|>"))), ValueError, "tokenize=True encodes it"),
    (lambda: apply(chat(user(), reply()), return_assistant_tokens_mask=True, truncation=True, max_length=2),
     ValueError, r"conversation 0 would be empty.*message 1 \(assistant\)"),
    (lambda: apply(chat(user(), reply()), make_tokenizer(NOTHING), return_assistant_tokens_mask=True), ValueError,
     "would be empty"),
    (lambda: apply(chat(user(), reply()), make_tokenizer(FIRST), return_assistant_tokens_mask=True), ValueError,
     r"message 1 \(assistant\) has no place"),
    (lambda: apply(chat(user("<|im_end|>")), make_tokenizer("{{ messages[0].content | upper }}"), tokenize=True),
     ValueError, "The template edits a content"),
]  # fmt: skip

BATCHING = [
    (lambda: Batcher(list, min_batch_size=0), ValueError, "1 <= min_batch_size <= max.*got: +min_batch_size 0"),
    (lambda: Batcher(list, min_batch_size=4, max_batch_size=2), ValueError, "sizes must be in order.*max_batch_size 2"),
    (lambda: Batcher(list, timeout_s=-1.0), ValueError, "timeout_s must be 0 or more seconds.*-1.0"),
    (lambda: Batcher(list, timeout_s=float("nan")), ValueError, "timeout_s.*nan"),
    (lambda: closed().submit(1), RuntimeError, "Batcher.submit: the batcher is closed"),
]  # fmt: skip
REMOTE = [
    (lambda: remote(base_url="x"), RemoteError, "response 0: x/inference.* must answer.*UnsupportedProtocol"),
    (lambda: remote(generation={"num_beams": 2}), UnsupportedError, "beam search is not.*num_beams=2"),
    (lambda: remote(generation={}), ValueError, "max_new_tokens must be given"),
]


def remote(generation=None, **options):
    """Generate by a server that is never reached."""
    wrapper = RemoteWrapper("m", **{"base_url": "http://x", "input_mode": "tokens", **options})
    wrapper.generate_tokens(
        [torch.tensor([1])], GenerationOptions.parse({"max_new_tokens": 2} if generation is None else generation)
    )


def closed():
    """A batcher that takes no more requests."""
    with Batcher(list) as batcher:
        return batcher


def apply(history=CHAT, tokenizer=None, **options):
    """Call apply_chat_template with a tokenizer."""
    return history.apply_chat_template(tokenizer=tokenizer or make_tokenizer(), **options)


@pytest.mark.parametrize(("call", "kind", "pattern"), [*HISTORY, *TEMPLATES, *APPLY, *BATCHING, *REMOTE])
def test_mistakes_are_explained(call, kind, pattern):
    """The error is of this class and names what is wrong."""
    with pytest.raises(kind, match=f"(?s){pattern}"):
        call()
