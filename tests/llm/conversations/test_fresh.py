"""Long conversations: the characters that are rendered are linear, and results are those of complete renders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm import TEMPLATES, History, TokenTemplate, chat_ids, is_append_only, to_training_rows
from tdfunc.llm.conversations import fresh as module
from tdfunc.llm.conversations.fresh import FreshReplies
from tdfunc.llm.messages.columns import Conversation, conversation_in
from tdfunc.llm.templates import markers
from tdfunc.llm.templates.base import AbstractPieceTemplate
from tdfunc.llm.templates.jinja import JinjaTemplate
from tests.llm.conversations.test_exact import APPENDING, make_call, make_template
from tests.llm.conversations.test_exact import TEMPLATES as SOURCES
from tests.llm.templates.test_templates import TOOLS
from tests.llm.templates.test_turns import FALCON, LLAMA2, LLAMA3, PHI3, THINKS
from tests.llm.tokens import CHATML, make_tokenizer

pytestmark = pytest.mark.sample(14)

LOOP = "{% for m in messages %}"
# Templates whose windows differ from the conversation: they count messages, or change when there are many.
COUNTING = {
    "numbers": LOOP + "{{ loop.index }}:{{ m.content }}<|im_end|>{% endfor %}",
    "length": LOOP + "{{ m.content }}{{ messages | length }}<|im_end|>{% endfor %}",
    "a reminder": LOOP
    + "{{ '!' if loop.last and messages | length > 9 }}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}",
    "the last four": "{% for m in messages[-4:] %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}",
    "no long ones": LOOP
    + "{{ raise_exception('') if loop.index > 30 }}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}",
    "turns": "{% if messages[0].role != 'user' %}{{ raise_exception('') }}{% endif %}" + CHATML,
}


def turns(n, text="a"):
    """A conversation in turns."""
    return [
        message
        for i in range(n)
        for message in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"{text}{i}"})
    ]


def agent(n):
    """A question with many calls and their results."""
    chat = [{"role": "user", "content": "go"}]
    for i in range(n):
        call = {"id": f"call{i:05}", **make_call("now", {"q": f"x{i}"})}
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        chat.append({"role": "tool", "content": f"r{i}", "tool_call_id": call["id"]})
    return [*chat, {"role": "assistant", "content": "done"}]


@pytest.fixture
def rendered(monkeypatch):
    """The numbers of characters that templates rendered."""
    count = []

    def counted(text):
        count.append(len(text))
        return text

    render = JinjaTemplate._render
    monkeypatch.setattr(JinjaTemplate, "_render", lambda *a, **k: [counted(text) for text in render(*a, **k)])
    for template in {type(each) for each in TEMPLATES.values()}:
        pieces = template.pieces
        monkeypatch.setattr(
            template,
            "pieces",
            lambda *a, _pieces=pieces, **k: [each for each in _pieces(*a, **k) if counted(each.text) is not None],
        )
    assert issubclass(type(TEMPLATES["chatml"]), AbstractPieceTemplate)
    return count


def masks(template, history):
    """The assistant masks of a conversation."""
    return history.apply_chat_template(
        tokenizer=template.tokenizer,
        chat_template=template.chat_template,
        add_generation_prompt=False,
        return_assistant_tokens_mask=True,
    )


CALLS = {"rows": to_training_rows, "ids": chat_ids, "append": is_append_only, "masks": masks}
FAMILIES = {"Llama 2": LLAMA2, "Llama 3": LLAMA3, "ChatML": CHATML}
OPAQUE = {"Phi-3": PHI3, "Falcon": FALCON, "Qwen3": THINKS, **FAMILIES, **COUNTING}
APPENDERS = [(name, "turns") for name in [*APPENDING, *FAMILIES]] + [
    (name, "agent") for name in APPENDING if SOURCES[name][2]
]


def named_template(name):
    """A template of this file, or of the tests of exact conversations."""
    if name in OPAQUE:
        return TokenTemplate(make_tokenizer(OPAQUE[name]))
    return make_template(name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "kind"), APPENDERS)
def test_renders_are_linear(call, name, kind, rendered):
    """Four times the turns: at most 4.5 times the characters."""
    template = named_template(name)
    make = {"turns": turns, "agent": agent}[kind]
    sizes = []
    for n in (30, 120):
        rendered.clear()
        CALLS[call](template, History.from_chats(make(n)))
        sizes.append(sum(rendered))

    assert sizes[1] <= 4.5 * sizes[0]


def complete(call, template, history, monkeypatch):
    """The result of renders of all starts of a conversation."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "FEW_REPLIES", 10**6)
        patch.setattr(markers, "FEW_REPLIES", 10**6)
        return result(call, template, history)


def result(call, template, history):
    """A result, or the error."""
    try:
        found = CALLS[call](template, history)
    except Exception as err:
        return type(err), str(err)
    if call == "rows":
        return [(row.ids, row.generated, row.replies) for row in found]
    return (found["input_ids"].tolist(), found["assistant_masks"].tolist()) if call == "masks" else found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [*SOURCES, *OPAQUE])
@pytest.mark.parametrize("make", [turns, agent])
@pytest.mark.parametrize("n", [5, 8, 17])
def test_windows_are_complete_renders(call, name, make, n, monkeypatch):
    """Results are the same, also for templates that count messages, and for those that refuse the conversation."""
    template = named_template(name)
    history = History.from_chats(make(n))

    assert result(call, template, history) == complete(call, template, history, monkeypatch)


@st.composite
def chats(draw):
    """A long conversation of any messages, with tools or without."""
    chat = [{"role": "system", "content": "s"}] if draw(st.booleans()) else []
    for i in range(draw(st.integers(3, 8))):
        chat.append({"role": "user", "content": draw(st.sampled_from(["a", "b\n", " c", "<|im_end|>"]))})
        for n in range(draw(st.integers(0, 2))):
            call = {"id": f"call{i:02}{n:03}", **make_call("now", {"q": "x"})}
            chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
            chat.append({"role": "tool", "content": "r", "tool_call_id": call["id"]})
        reply = {"role": "assistant", "content": draw(st.sampled_from(["d", "\ne", "f g", "<s>"]))}
        chat.append(reply | ({"reasoning_content": "hm"} if draw(st.booleans()) else {}))
    chat += [{"role": "user", "content": "end"}] if draw(st.booleans()) else []
    return Conversation(chat, TOOLS if draw(st.booleans()) else None)


@pytest.mark.parametrize("name", ["chatml", "qwen", "mistral", "dropped thinking in Jinja"])
@settings(max_examples=10, deadline=None)
@given(chats())
def test_breaks_and_replies_are_those_of_complete_renders(name, conversation):
    """Oracle: the renders of all starts."""
    replies = FreshReplies(make_template(name).template, conversation)
    try:
        expected = replies._rendered_breaks()
    except (ValueError, UnsupportedError):
        return

    assert replies.breaks == expected
    assert [replies.reply(place) for place in replies.places] == [
        replies._rendered_reply(place) for place in replies.places
    ]


def test_windows_are_used():
    """The tests above compare two ways."""
    template = make_template("chatml").template
    assert FreshReplies(template, conversation_in(History.from_chats(turns(9))))._turns is not None


@pytest.mark.parametrize("name", ["numbers", "length", "the last four"])
def test_windows_of_templates_that_count_are_not_used(name):
    """A comparison with the conversation shows the difference."""
    template = TokenTemplate(make_tokenizer(COUNTING[name])).template
    assert FreshReplies(template, conversation_in(History.from_chats(turns(9))))._turns is None
