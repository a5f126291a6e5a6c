"""Templates in Python: rendering against Jinja, parsing back, replies that cannot be parsed, and spans."""

import contextlib
import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tdfunc import UnsupportedError
from tdfunc.llm import TEMPLATES, ChatML, History, JinjaTemplate, chatml, deepseek, gemma, llama, mistral, qwen
from tdfunc.llm.messages.columns import conversation_in
from tdfunc.llm.messages.message import as_compared
from tdfunc.llm.templates.base import Conversation, make_call
from tdfunc.llm.templates.llama import _TOOLS as LLAMA_TOOLS
from tests.llm.tokens import CHATML, calls, make_tokenizer, messages

pytestmark = pytest.mark.sample(4)

ALL = {"chatml": chatml, "qwen": qwen, "llama": llama, "deepseek": deepseek, "mistral": mistral, "gemma": gemma}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
# Written for these tests, for conversations without tools.
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```<｜tool▁call▁end｜>"
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
JINJA = {"chatml": CHATML, "llama": LLAMA, "deepseek": DEEPSEEK, "mistral": MISTRAL, "gemma": GEMMA}
CONTROL = sorted({mark for template in ALL.values() for mark in template.control} | {"<think>", "</think>"})
FORGED = st.lists(st.sampled_from([*CONTROL, "user\n", "hi", "\n", " "]), max_size=4).map("".join)


@pytest.mark.parametrize("name", JINJA)
@given(messages(tools=False, thinking=False), st.booleans())
def test_render_is_jinjas(name, chat, prompt):
    """The text of conversations is the one that transformers renders."""
    tokenizer = make_tokenizer(JINJA[name])
    # Gemma writes a system message into the user's.
    chat = chat[chat[0]["role"] == "system" :] if name == "gemma" else chat
    theirs = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)

    assert ALL[name].render(History.from_chats(chat), add_generation_prompt=prompt) == theirs


@pytest.mark.parametrize("name", ALL)
@given(
    st.one_of(messages(), messages(words=FORGED), messages(tools=False, thinking=False)), st.booleans(), st.booleans()
)
def test_reversible_render_raises_or_parses_back(name, chat, tools, unsafe):
    """Whatever the contents: no text is given that would be read as another conversation."""
    template = ALL[name]
    history = History.from_chats({"messages": chat, "tools": TOOLS if tools else None})
    try:
        text = template.render(history, reversible=True, unsafe=unsafe)
    except (ValueError, UnsupportedError):
        return

    back = template.parse(text)
    assert len(back.tolist()) == len(chat)
    assert (back == history).all()


EASY = [
    {"role": "user", "content": "what time is it?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", **make_call("now", {"zone": "ü"})}]},
    {"role": "tool", "content": '{"time": [12, 30]}', "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "half past twelve"},
    {"role": "user", "content": "thanks\n"},
    {"role": "assistant", "content": "bye"},
]


def forget_ids(chat):
    """The conversation without the ids of calls."""
    ids = "id", "tool_call_id"
    return json.loads(json.dumps(chat), object_hook=lambda x: {k: v for k, v in x.items() if k not in ids})


@pytest.mark.parametrize(
    ("template", "chat", "tools"),
    [
        (chatml, [{"role": "system", "content": "s"}, *forget_ids(EASY)], TOOLS),
        (chatml, [*EASY[4:], {"role": "assistant", "content": "a", "reasoning_content": "why\nnot"}], None),
        (qwen, [*forget_ids(EASY)[:3], {"role": "assistant", "content": "x", "reasoning_content": "hm"}], TOOLS),
        (llama, [*forget_ids(EASY)[:4], {"role": "user", "content": f"{LLAMA_TOOLS}x"}], TOOLS),
        (llama, [{"role": "user", "content": "{a"}], TOOLS),
        (llama, [{"role": "user", "content": '{"a": 1}\n\nb'}], TOOLS),
        (deepseek, [{"role": "system", "content": "s"}, *forget_ids(EASY)], None),
        (mistral, [{"role": "system", "content": "s"}, *EASY], TOOLS),
        (gemma, [EASY[0], EASY[3]], None),
    ],
)
def test_ordinary_conversations_are_reversible(template, chat, tools):
    """The property above is not empty: conversations with tools and thinking do parse back."""
    history = History.from_chats({"messages": chat, "tools": tools})

    back = template.parse(template.render(history, reversible=True))

    assert [as_compared(m) for m in back.tolist()] == [as_compared(m) for m in chat]
    assert back[:1].tools == tools


@pytest.mark.parametrize("name", ALL)
def test_every_content_is_marked(name):
    """The spans hold the text of each message, which stays text though it has a control string."""
    roles = ["system", "user", "assistant"]
    marked = ALL[name].marked(Conversation([{"role": role, "content": role.upper()} for role in roles]))

    found = [marked.text[span.start : span.stop] for span in marked.contents]
    assert [text for text in found if text not in roles] == ["SYSTEM", "USER", "ASSISTANT"]


REPLIES = st.one_of(st.text(max_size=30), FORGED, calls(ids=False).map(json.dumps))


def replies_with(text):
    """A text, also behind the beginnings of calls and thoughts."""
    pieces = ["<tool_call>", "</tool_call>", "<think>", "[TOOL_CALLS]", '{"name": "f", "parameters": ', text]
    return [text, *[piece + text for piece in pieces], "".join(pieces)]


def texts_in(message):
    """The content and the thinking of a message."""
    kept = as_compared(message)
    return [kept.get("content", ""), kept.get("reasoning_content", "")]


def is_shortened(reply, message):
    """Whether a message without calls lacks more of its reply than marks and line breaks."""
    if "tool_calls" in as_compared(message):
        return False
    return sum(map(len, texts_in(message))) < len(reply) - len("<think></think>") - reply.count("\n")


@pytest.mark.parametrize("name", ALL)
@given(text=REPLIES)
def test_no_reply_is_thrown_away(name, text):
    """A reply that parses is in the message, but for marks, calls and line breaks."""
    parsed = [(reply, ALL[name].parse_reply(reply)) for reply in replies_with(text)]
    parsed = [(reply, message) for reply, message in parsed if "parse_error" not in message]

    strange = [
        (reply, part) for reply, message in parsed for part in texts_in(message) if part.strip("\n") not in reply
    ]
    assert strange == []
    assert [(reply, message) for reply, message in parsed if is_shortened(reply, message)] == []


@pytest.mark.parametrize(
    ("name", "reply"),
    [("mistral", "[TOOL_CALLS] []"), ("deepseek", "So: <｜tool▁calls▁begin｜><｜tool▁calls▁end｜>")],
)
def test_marks_of_calls_without_a_call_are_kept(name, reply):
    """A message with no calls would be written without the marks."""
    message = ALL[name].parse_reply(reply)

    assert message["content"] == reply
    assert message["parse_error"] == "there is no call between the marks of calls"


@pytest.mark.parametrize("name", ALL)
@given(text=REPLIES)
def test_a_reply_that_does_not_parse_stays_as_it_is(name, text):
    """With a reason, as a message of the assistant."""
    messages = {reply: ALL[name].parse_reply(reply) for reply in replies_with(text)}
    kept = {reply: message for reply, message in messages.items() if "parse_error" in message}

    assert {message["role"] for message in messages.values()} == {"assistant"}
    assert [message["content"] for message in kept.values()] == list(kept)
    assert [reply for reply, message in kept.items() if not message["parse_error"]] == []


# A reply of a model that repeats one token.
DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("start", ["", "<tool_call>\n", "[TOOL_CALLS]", '{"name": "f", "parameters": '])
def test_a_reply_of_one_repeated_bracket_stays_text(name, start):
    """Python cannot read JSON of such depth."""
    message = ALL[name].parse_reply(start + DEEP)

    assert message["content"] == start + DEEP


REPEATED = [*["\n", " ", "</think>", "<tool_response>\n"], *[mark for t in ALL.values() for mark in t.control]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("start", ["", "<tool_call>", "[TOOL_CALLS]", "<|im_start|>user\n", '{"name":'])
@pytest.mark.parametrize("repeated", REPEATED, ids=repr)
def test_a_text_of_one_repeated_token_is_parsed_in_time(name, start, repeated):
    """Also the line breaks of a model that never closes its call: no run is tried from each of its places."""
    text = start + repeated * 4000
    began_s = time.process_time()

    ALL[name].parse_reply(text)
    with contextlib.suppress(ValueError):
        ALL[name].parse_chat(text)

    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("template", "reply", "reason"),
    [
        (qwen, '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>', "tool call 0: Expecting"),
        (qwen, 'a\n<tool_call>\n{"name": "f"}\n</tool_call> b', "text follows"),
        (qwen, '<tool_call>\n{"name": "f"}', "not closed"),
        (qwen, '<tool_call>\n{"name": 3}\n</tool_call>', "is not text"),
        (qwen, "<tool_call>\n[]\n</tool_call>", "tool call 0 is not an object"),
        (qwen, '<tool_call>\n{"name": "f", "x": 1}\n</tool_call>', "tool call 0 is not an object"),
        (qwen, '<tool_call>\n{"name": "f", "arguments": ' + DEEP + "\n</tool_call>", "nested too deeply"),
        (qwen, "<think>\nhm", "thinking is not closed"),
        (llama, '{"name": "f", "parameters": {}', "one object"),
        (llama, '{"name": 3, "parameters": {}}', "is not text"),
        (deepseek, "<｜tool▁calls▁begin｜>x", "not closed"),
        (deepseek, "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>", "tool call 0"),
        (deepseek, DEEPSEEK_CALL + "<｜tool▁calls▁end｜>", "tool call 0: Expecting"),
        (mistral, "a[TOOL_CALLS][{", "list of objects"),
        (mistral, "[TOOL_CALLS]" + DEEP, "nested too deeply"),
        (mistral, '[TOOL_CALLS][{"name": "f"}]', "a call has a name"),
    ],
)
def test_reasons_of_raw_replies(template, reply, reason):
    """The reason says what could not be parsed."""
    message = template.parse_reply(reply)

    assert message["content"] == reply
    assert reason in message["parse_error"]


CALLED = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
PARTS = '<think>\nhm\n</think>\n\nwait\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PARTED = {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [CALLED]}


def test_parts_of_a_reply():
    """Thinking, text and calls are apart."""
    assert qwen.parse_reply(PARTS) == PARTED


@pytest.mark.parametrize("template", [qwen, JinjaTemplate(make_tokenizer())], ids=["qwen", "jinja"])
def test_thinking_may_have_begun_in_the_prompt(template):
    """The reply then lacks its first mark."""
    assert template.parse_reply(PARTS.removeprefix("<think>\n")) == PARTED


def test_parts_of_a_reply_are_rendered_as_it_was():
    """Also where the thinking is inside of the content; that of an earlier turn is left out."""
    history = History.from_chats([{"role": "user", "content": "?"}, PARTED])
    inside = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nwait", "tool_calls": [CALLED]}

    assert qwen.render(history).endswith(f"assistant\n{PARTS}<|im_end|>\n")
    assert qwen.render(history[:1].append(inside)) == qwen.render(history)
    assert "hm" not in qwen.render(history[1:])


def test_a_message_of_a_tool_and_an_empty_one_are_parsed():
    """Llama writes tools in a role of its own, Mistral a message without a mark."""
    assert llama.parse("<|start_header_id|>ipython<|end_header_id|>\n\n[1]<|eot_id|>").content == ["[1]"]
    assert mistral.parse("</s>").tolist() == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("thinking", "shown"), [("", ""), ("\n", "<think>\n\n</think>\n\n"), ("\nhm\n", "<think>\nhm\n</think>\n\n")]
)
def test_qwen_asks_for_a_thinking_before_it_strips_it(thinking, shown):
    """A reply that another message follows shows a thinking of line breaks as an empty one, as Qwen3 does."""
    reply = {"role": "assistant", "reasoning_content": thinking, "content": "b"}
    history = History.from_chats([{"role": "user", "content": "a"}, reply, {"role": "assistant", "content": "c"}])

    assert f"<|im_start|>assistant\n{shown}b<|im_end|>\n" in qwen.render(history)


@pytest.mark.parametrize("name", ALL)
def test_cut_texts_are_incomplete(name):
    """A text that ends inside a reply gives it as far as it goes; the header of a reply alone gives none."""
    template = ALL[name]
    history = History.from_chats([{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}])
    text = template.render(history)

    back = template.parse(text[: text.index("bcd") + 2])

    assert back.tolist()[-1] == {"role": "assistant", "content": "bc", "is_complete": False}
    assert template.parse(template.render(history[:1], add_generation_prompt=True)).tolist() == history[:1].tolist()
    assert template.render(history, continue_final_message=True).endswith("bcd")


@pytest.mark.parametrize("template", [deepseek, mistral])
@pytest.mark.parametrize("message", EASY[:3:2])
def test_other_messages_may_be_left_open(template, message):
    """A text or a result that continues has no end either."""
    assert template.render(History.from_chats([message]), continue_final_message=True).endswith(message["content"])


SPANNED = st.one_of(messages(), messages(tools=False, thinking=False, system=False))
WITH_CALL = [EASY[0], {**EASY[1], "tool_calls": [make_call("now", {"zone": "ü"})]}]


@pytest.mark.parametrize("name", ALL)
@given(SPANNED)
@example(WITH_CALL)
def test_replies_end_with_their_end_of_turn(name, chat):
    """Each message of the assistant has a span."""
    template, conversation = ALL[name], conversation_in(History.from_chats(chat))
    try:
        marked = template.marked(conversation)
    except UnsupportedError:
        return

    places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    assert [span.message for span in marked.replies] == places
    replies = [marked.text[span.start : span.stop] for span in marked.replies]
    assert [reply for reply in replies if not reply.endswith(template.end)] == []


@pytest.mark.parametrize("name", [name for name in ALL if name != "qwen"])
@given(SPANNED)
@example(WITH_CALL)
def test_reply_spans_are_what_follows_the_prompt(name, chat):
    """A reply begins behind the render of the messages before it; Qwen renders these otherwise."""
    template, conversation = ALL[name], conversation_in(History.from_chats(chat))
    try:
        marked = template.marked(conversation)
    except UnsupportedError:
        return

    before = [conversation._replace(messages=conversation.messages[: span.message]) for span in marked.replies]
    expected = [template.texts([each], generation_prompt=True)[0] for each in before]
    assert [marked.text[: span.start] for span in marked.replies] == expected


def test_templates_are_values():
    """They are equal by their options, and the table cannot be changed."""
    assert ChatML(drop_thinking=True) == qwen != chatml
    assert TEMPLATES["chatml_format"] is chatml
    with pytest.raises(TypeError):
        TEMPLATES["mine"] = chatml
