"""The messages of mistakes with conversations and templates. Each row is a call, its error and its message."""

import pandas
import pytest
import torch

from tdfunc import ImmutableError, MissingKeyError, RemoteError, UnsupportedError
from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import Batcher, ContentBase, History, RemoteWrapper, chatml, deepseek, gemma, llama, load_jsonl, mistral
from tdfunc.llm.conversations.exact import TokenTemplate, append_messages
from tdfunc.llm.datasets.prompts import tokenize_prompts
from tdfunc.llm.datasets.sources import read_records
from tdfunc.llm.datasets.tokens import load_tokens
from tdfunc.llm.encoding.encode import _GUARDS
from tdfunc.llm.encoding.text import tokenize_text
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.rows.batch import Row, check_prompts
from tdfunc.llm.templates.jinja import JinjaTemplate
from tdfunc.llm.templates.markers import MARKS
from tdfunc.llm.wrappers.transformers import TransformersWrapper
from tests.llm.models import make
from tests.llm.templates.test_turns import PHI3
from tests.llm.tokens import make_tokenizer, transformers

TOKENIZER = make_tokenizer()
PYTHON = transformers.ByT5Tokenizer()
ONE = History(role="user", content="a")
CHAT = History.from_chats([{"role": "user", "content": "a"}])
BATCH = History.from_chats([[{"role": "user", "content": "a"}]] * 2)
NOTHING = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
FIRST = "{{ messages[0].content }}"
PHI = make_tokenizer(PHI3, special=["<|user|>", "<|end|>", "<|im_end|>"])
UPPER, NAME = "{{ messages[0].content | upper }}", "{{ tools[0].name }}" + FIRST
RAISES = "{% for m in messages %}{{ raise_exception('') if m.content == 'no' }}{{ m.content + eos_token }}{% endfor %}"
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
    (lambda: History.from_chats([[], ["a"]]), TypeError, "conversation 0: this is not a list.*'a'"),
    (lambda: History.from_chats("a"), TypeError, "from_chats: this is not a list of messages, nor of such lists"),
    (lambda: History.from_chats({"messages": "a"}), TypeError, "has no list of messages"),
    (lambda: History.from_chats([{"role": "user", "contnt": "a"}]), MissingKeyError, "'contnt' is not a.*'content'"),
    (lambda: History.from_chats([{"role": "user", "content": 3}]), TypeError, "content is not text.*got: +3"),
    (lambda: History.from_chats([{"role": "assistant", "tool_calls": [{}]}]), TypeError, "has no function"),
    (lambda: History.from_chats([{"role": "assistant", "tool_calls": [3]}]), TypeError, "has no function"),
    (lambda: History.from_chats([{"role": "assistant", "tool_calls": "f"}]), TypeError, "tool_calls is not a list"),
    (lambda: CHAT.append(ONE, inplace=True), ImmutableError, "history = history.append"),
    (lambda: CHAT.extend(CHAT, inplace=True), ImmutableError, "history = history.append"),
    (lambda: ONE.append(ONE), BatchSizeError, r"unsqueeze\(0\)"),
    (lambda: CHAT.append(CHAT), BatchSizeError, "append: the element.*extend"),
    (lambda: BATCH.append(ONE), BatchSizeError, "append: the element.*one dimension less"),
    (lambda: BATCH.extend(BATCH[:1]), BatchSizeError, r"other dimensions.*\[2, 1\].*\[1, 1\]"),
    (lambda: BATCH[:1] == BATCH, BatchSizeError, "one part for each tree"),
    (lambda: BATCH.extend(CHAT), BatchSizeError, "differ in the number of dimensions"),
    (lambda: BATCH.dense().extend(BATCH.dense()[:, :0], dim=0), BatchSizeError, "conversations 0 and 2.*lazy_stack"),
    (lambda: History(role=["a", "b"], content="x"), TypeError, r"History.role.*batch_size=\[2\]"),
    (lambda: History(role=3), TypeError, "History.role is not a text.*got: +3"),
    (lambda: History(role=["a", "b"], batch_size=[3]), BatchSizeError, "History.role"),
    (lambda: ContentBase.from_parts([{"text": "a"}]), TypeError, "a dict with a type"),
    (lambda: ContentBase.from_parts([{"type": "text", "txt": "a"}]), TypeError, "no field 'txt'"),
    (lambda: ContentBase.from_parts([{"type": "file", "file": "a"}]), TypeError, "no field 'file'"),
    (lambda: append_messages(TokenTemplate(make_tokenizer(NOTHING)), [1], ONE), ValueError, "drops the reply"),
    (lambda: load_jsonl(__file__), ValueError, r"test_messages.py: line 1 is not JSON"),
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
    (lambda: chatml.render(chat(user(), tools=[{1: "a"}]), reversible=True), ValueError, "the tools would not parse"),
    (lambda: chatml.parse(chatml.render(chat(user(), tools=[{}])).replace("{}", "{")), ValueError, "are not JSON"),
    (lambda: gemma.render(chat(("system", "s", {}), user()), reversible=True), ValueError, "message 0.*'role'"),
    (lambda: gemma.render(chat(user(), user())), UnsupportedError, r"message 1 \(user\).*take turns"),
    (lambda: gemma.render(chat(user(), tools=[{}])), UnsupportedError, "gemma.*tools"),
    (lambda: gemma.render(chat(("system", "s", {"tool_calls": [CALL]}), user())), UnsupportedError, "0.*_calls"),
    (lambda: gemma.render(chat(("system", "s", {}))), UnsupportedError, "gemma: a system message"),
    (lambda: gemma.render(chat(user(), reply(tool_calls=[CALL]))), UnsupportedError, "message 1.*'tool_calls'"),
    (lambda: llama.render(chat(user(" a ")), reversible=True), ValueError, "message 0.*'content'.*' a '.*'a'"),
    (lambda: llama.render(chat(("system", "", {})), reversible=True), ValueError, "message 0 .*1 messages.*0 messages"),
    (lambda: llama.render(chat(user(), reply("x", tool_calls=[CALL]))), UnsupportedError, "message 1.*one call"),
    (lambda: llama.render(chat(user(), reply(reasoning_content="x"))), UnsupportedError, "'reasoning_content'"),
    (lambda: llama.render(chat(("system", "s", {}), tools=[{}])), UnsupportedError, "llama: the tools"),
    (lambda: deepseek.render(chat(user(), tools=[{}])), UnsupportedError, "deepseek.*tools"),
    (lambda: deepseek.render(chat(("critic", "s", {}))), UnsupportedError, "role 'critic'"),
    (lambda: deepseek.render(chat(user(), ("system", "s", {})), reversible=True), ValueError, "message 0.*'role'"),
    (lambda: deepseek.render(chat(("system", "s", {}), ("system", "t", {})), reversible=True), ValueError,
     r"message 0.*'content'.*'s\\n\\nt'"),
    (lambda: deepseek.parse("<｜tool▁outputs▁begin｜>x<｜tool▁outputs▁end｜>"), ValueError, "results in"),
    (lambda: deepseek.parse("<｜end▁of▁sentence｜>"), ValueError, "character 0 .*<｜User｜> or"),
    (lambda: mistral.render(chat(reply(), tools=[{}])), UnsupportedError, "mistral: the tools"),
    (lambda: mistral.render(chat(user(tool_calls=[CALL]))), UnsupportedError, r"message 0 \(user\).*'tool_calls'"),
    (lambda: mistral.render(chat(("critic", "s", {}))), UnsupportedError, "role 'critic'"),
    (lambda: mistral.parse("[AVAILABLE_TOOLS]{}[/AVAILABLE_TOOLS]"), ValueError, "tools are not a list"),
    (lambda: mistral.parse("[TOOL_RESULTS]x[/TOOL_RESULTS]"), ValueError, "character 0 .*an id"),
    (lambda: chatml.parse("hello"), ValueError, r"character 0 is not.*<\|im_start\|>role"),
    (lambda: History.from_text("a", "chatm"), TypeError, "neither a template nor a tokenizer.*'chatml'"),
    (lambda: History.from_text("a", "chatm", tokenizer=make_tokenizer("{{ chatm }}")), ValueError,
     "'chatm' does not.*'chatml'"),
    (lambda: History.from_text("a", tokenizer=make_tokenizer("{{ messages }}")), ValueError, "parse: no template"),
    (lambda: History.from_text("<|user|>\na<|end|>\n<|user|>\nb<|end|>\n", tokenizer=PHI), ValueError,
     "contents of users and assistants in turn"),
    (lambda: History.from_text("a", tokenizer=make_tokenizer(None)), ValueError, "has no chat template"),
    (lambda: TransformersWrapper(make("llama"), tokenizer=make_tokenizer(None)), ValueError, "has no chat template"),
    (lambda: History.from_text("no<|im_end|>", tokenizer=make_tokenizer(RAISES)), ValueError, "parse: no template"),
]  # fmt: skip
APPLY = [
    (lambda: CHAT.apply_chat_template(), TypeError, "neither a template nor a tokenizer"),
    (lambda: apply(tokenizer=make_tokenizer(None)), ValueError, 'has no chat template.*chat_template_name="chatml"'),
    (lambda: CHAT.apply_chat_template(chat_template_name="qwen", tokenize=True), TypeError, "ids need a tokenizer"),
    (lambda: apply(return_tensors="np"), ValueError, "return_tensors.*'np'"),
    (lambda: apply(padding="left"), ValueError, "padding must be one of.*'left'"),
    (lambda: apply(padding_side="middle"), ValueError, "padding_side"),
    (lambda: apply(tokenize=True, truncation=True), ValueError, "max_length is missing"),
    (lambda: apply(return_assistant_tokens_mask=True, return_dict=False), ValueError, "excludes masks"),
    (lambda: apply(chat_template_name="qwen", enable_thinking=False), ValueError, "'enable_thinking'.*ChatML"),
    (lambda: apply(max_lenght=3), ValueError, "'max_lenght' is not an option.*did you mean 'max_length'"),
    (lambda: apply(documents=["a"]), ValueError, "'documents' is not an option.*would ignore it"),
    (lambda: apply(tokenizer_kwargs={"max_length": 3}), ValueError, r"one by one: \*\*tokenizer_kwargs"),
    (lambda: JinjaTemplate(TOKENIZER, options={"enable_thinking": False}), ValueError, "'enable_thinking' is not an"),
    (lambda: apply(chat(user("<|im_end|>"))), ValueError, "tokenize=True encodes it"),
    (lambda: apply(chat(user(), reply()), return_assistant_tokens_mask=True, truncation=True, max_length=2),
     ValueError, r"conversation 0 is empty.*message 1 \(assistant\)"),
    (lambda: apply(chat(user(), reply()), make_tokenizer(NOTHING), return_assistant_tokens_mask=True), ValueError,
     "is empty"),
    (lambda: apply(chat(user(), reply()), make_tokenizer(FIRST), return_assistant_tokens_mask=True), UnsupportedError,
     r"message 1 \(assistant\): this template cannot render 'content'"),
    (lambda: apply(chat(user("<|im_end|>")), make_tokenizer(UPPER), tokenize=True), ValueError, "edits a content"),
    (lambda: apply(chat(reply()), make_tokenizer(UPPER), return_assistant_tokens_mask=True), ValueError,
     "edits a content"),
    (lambda: apply(chat(user(), tools=[{"name": "f", "x": "<|im_end|>"}]), make_tokenizer(NAME), tokenize=True),
     ValueError, "drops a text of the tools"),
    (lambda: apply(chat(user("<s>")), make_tokenizer(special=["<|im_end|>"], pad_token=None), tokenize=True,
     chat_template_name="mistral"), ValueError, "'<s>', which is ordinary text"),
    (lambda: apply(chat(user("".join(["<s>", *_GUARDS]))), tokenize=True), ValueError, "every character.*renamed"),
    (lambda: apply(chat(user("".join(["<s>", *MARKS]))), tokenize=True), ValueError, "every character.*found"),
    (lambda: apply(chat(user("</s>")), PYTHON, tokenize=True, chat_template_name="chatml"), UnsupportedError,
     "cannot encode as ordinary text.*ByT5"),
    (lambda: apply(chat(user(), reply()), PYTHON, return_assistant_tokens_mask=True, chat_template_name="chatml"),
     UnsupportedError, "characters of each token"),
]  # fmt: skip
DATA = [
    (lambda: tokenize_text(TOKENIZER, 3), TypeError, "a list of texts"),
    (lambda: tokenize_text(TOKENIZER, ["a"], padding="longer"), ValueError, "padding must be one of"),
    (lambda: tokenize_text(TOKENIZER, ["a"], padding_side="up"), ValueError, "padding_side must be one of"),
    (lambda: tokenize_text(TOKENIZER, ["a"], truncation=True), ValueError, "max_length is missing"),
    (lambda: tokenize_prompts(TOKENIZER, ["a"], []), ValueError, "one response for each prompt"),
    (lambda: tokenize_prompts(TOKENIZER, ["a"], ["b"], truncation=True), ValueError, "max_length is missing"),
    (lambda: read_records("a.csv"), ValueError, r"does not end in \.jsonl, \.txt or \.parquet"),
    (lambda: load_tokens(TOKENIZER, {"text": ["a"]}), TypeError, "an iterable of records"),
    (lambda: load_tokens(TOKENIZER, pandas.DataFrame({"text": ["a"]})), TypeError, "an iterable of records"),
    (lambda: load_tokens(TOKENIZER, [1]), TypeError, "Record 0 is not a dict or a text"),
    (lambda: load_tokens(TOKENIZER, [{"a": "b"}]), MissingKeyError, "Record 0 has no 'text'"),
    (lambda: load_tokens(TOKENIZER, [{"text": "b"}, {"text": [{}]}]), TypeError, "Record 1: 'text' is not a text"),
    (lambda: load_tokens(TOKENIZER, [{"m": []}, {"m": "b"}], columns="m"), TypeError, "is not a list of messages"),
    (lambda: load_tokens(TOKENIZER, [{"m": [{}]}], columns="m"), TypeError, "Record 0, message 0: a message is not a"),
    (lambda: load_tokens(TOKENIZER, [{"text": chat(reply()).tolist()}], chat_template=NOTHING), ValueError, "is empty"),
    (lambda: load_tokens(TOKENIZER, ["a"]).batch([1]), IndexError, "does not exist"),
    (lambda: load_tokens(TOKENIZER, ["a"])[-2], IndexError, "does not exist"),
    (lambda: load_tokens(TOKENIZER, ["a"]).batch([0], padding=False), ValueError, "the rows are not padded"),
    (lambda: load_tokens(TOKENIZER, ["a"]).batches(0), ValueError, "batch_size must be at least 1"),
    (lambda: check_prompts([Row(torch.tensor([]))], torch.Size([])), ValueError, "row 0 has no tokens"),
]

BATCHING = [
    (lambda: Batcher(list, min_batch_size=0), ValueError, "min_batch_size must be at least 1.*got: +0"),
    (lambda: Batcher(list, min_batch_size=4, max_batch_size=2), ValueError, "above max_batch_size.*max_batch_size 2"),
    (lambda: Batcher(list, timeout_s=-1.0), ValueError, "timeout_s must be 0 or more seconds.*-1.0"),
    (lambda: Batcher(list, timeout_s=float("nan")), ValueError, "timeout_s.*nan"),
    (lambda: closed().submit(1), RuntimeError, "Batcher.submit: the batcher is closed"),
]  # fmt: skip
REMOTE = [
    (lambda: remote(base_url="x"), RemoteError, "response 0: x/inference.* did not answer.*UnsupportedProtocol"),
]


def remote(**options):
    """Generate by a server that is never reached."""
    wrapper = RemoteWrapper("m", input_mode="tokens", **options)
    wrapper.generate_tokens([torch.tensor([1])], GenerationOptions.parse({"max_new_tokens": 2}))


def closed():
    """A batcher that takes no more requests."""
    with Batcher(list) as batcher:
        return batcher


def apply(history=CHAT, tokenizer=None, **options):
    """Call apply_chat_template with a tokenizer."""
    return history.apply_chat_template(tokenizer=tokenizer or make_tokenizer(), **options)


@pytest.mark.parametrize(("call", "kind", "pattern"), [*HISTORY, *TEMPLATES, *APPLY, *DATA, *BATCHING, *REMOTE])
def test_mistakes_are_explained(call, kind, pattern):
    """The error is of this class and names what is wrong."""
    with pytest.raises(kind, match=f"(?s){pattern}"):
        call()
