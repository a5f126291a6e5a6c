"""A template writes each field of a conversation, or it is refused by the name of the field: a table of both."""

import pytest

from tdfunc import UnsupportedError
from tdfunc.llm import (
    TEMPLATES,
    History,
    JinjaTemplate,
    TokenTemplate,
    append_messages,
    chat_ids,
    load_tokens,
    template_report,
    to_training_rows,
)
from tdfunc.llm.templates import jinja as module
from tests.llm.templates.test_turns import DEFAULT, FALCON, LLAMA2, LLAMA3, PHI3, THINKS
from tests.llm.tokens import CHATML, FORGETFUL, GENERATION, TEXT_ARGUMENTS, ZEPHYR, make_tokenizer

pytestmark = pytest.mark.sample(5)

LOOP = "{% for m in messages %}"
# What templates of the hub do with a field: leave it out, write a part of it, or write it for some roles.
JINJA = {
    "CHATML": CHATML,
    "GENERATION": GENERATION,
    "FORGETFUL": FORGETFUL,
    "ZEPHYR": ZEPHYR,
    "TEXT_ARGUMENTS": TEXT_ARGUMENTS,
    "DEFAULT": DEFAULT,
    "THINKS": THINKS,
    "LLAMA2": LLAMA2,
    "LLAMA3": LLAMA3,
    "PHI3": PHI3,
    "FALCON": FALCON,
    "calls in place of contents": LOOP
    + "{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
    "the first call": LOOP + "{{ m.role }}:{{ m.content }}{{ m.tool_calls[0] | tojson if m.tool_calls }}\n{% endfor %}",
    "names of calls": LOOP
    + "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}\n{% endfor %}",
    "two roles": LOOP + "{% if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }}\n{% endif %}{% endfor %}",
    "the first tool": "{{ tools[0] | tojson if tools }}" + CHATML,
    "names of tools": "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML,
    "all tools": "{{ tools | tojson if tools }}" + ZEPHYR,
    "names": LOOP + "{{ m.role }} {{ m.name }}:{{ m.content }}\n{% endfor %}",
    "upper case": LOOP + "{{ m.role }}:{{ m.content | upper }}\n{% endfor %}",
    "texts of parts": LOOP
    + "{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}"
    "{{ p.text }}{% endfor %}{% endif %}\n{% endfor %}",
    "the first part": LOOP
    + "{{ m.role }}:{{ m.content if m.content is string else m.content[0].text or '<image>' }}\n{% endfor %}",
    "images": LOOP + "{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text or '<' ~ p.type ~ 'iiii1>' }}{% endfor %}{% endif %}\n{% endfor %}",
    "the first result": LOOP + "{{ m.role }}:{{ m.content }}{{ (m.tool_responses or [''])[0] }}\n{% endfor %}",
    "tools in place of a system message": "{{ tools | tojson if tools }}"
    + LOOP
    + "{% if not tools or m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endif %}{% endfor %}",
    "tools beside a question": LOOP
    + "{{ m.role }}:{{ tools | tojson if tools and m.role == 'user' }}{{ m.content }}\n{% endfor %}",
    "cut": LOOP + "{{ m.role }}:{{ m.content[:3] }}\n{% endfor %}",
}


def call(name, **arguments):
    """A call of a function."""
    return {"type": "function", "id": "a" * 9, "function": {"name": name, "arguments": arguments}}


def schema(name, *parameters):
    """The schema of a function."""
    properties = {each: {"type": "string"} for each in parameters}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


USER = {"role": "user", "content": "uuuu1"}
TEXT = {"type": "text", "text": "uuuu1"}
IMAGE = {"type": "image_url", "image_url": {"url": "iiii1"}}
END = [{"role": "user", "content": "uuuu2"}, {"role": "assistant", "content": "aaaa2"}]
RESULT = {"role": "tool", "content": "rrrr1", "tool_call_id": "a" * 9}
# The fields of a conversation: the texts that must be in a render, and the conversation.
FIELDS = {
    "contents": (["uuuu1", "aaaa1"], [USER, {"role": "assistant", "content": "aaaa1"}], None),
    "a system message": (["ssss1"], [{"role": "system", "content": "ssss1"}, USER, END[1]], None),
    "a later system message": (["ssss1"], [*END, {"role": "system", "content": "ssss1"}, *END], None),
    "thinking": (["tttt1"], [USER, {"role": "assistant", "content": "aaaa1", "reasoning_content": "tttt1"}], None),
    "a call": (
        ["ffff1", "vvvv1"],
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("ffff1", a="vvvv1")]}],
        None,
    ),
    "a call with a content": (
        ["aaaa1", "ffff1"],
        [USER, {"role": "assistant", "content": "aaaa1", "tool_calls": [call("ffff1")]}],
        None,
    ),
    "two calls": (
        ["ffff1", "ffff2"],
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("ffff1"), call("ffff2")]}],
        None,
    ),
    "a result": (
        ["rrrr1"],
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call("ffff1")]},
            RESULT,
            {"role": "assistant", "content": "x"},
        ],
        None,
    ),
    "results in the message": (
        ["rrrr1"],
        [USER, {"role": "assistant", "content": "x", "tool_responses": ["rrrr1"]}],
        None,
    ),
    "a name": (["nnnn1"], [{**USER, "name": "nnnn1"}, END[1]], None),
    "tools": (["ffff1", "pppp1"], [USER, END[1]], [schema("ffff1", "pppp1")]),
    "two tools": (["ffff1", "ffff2"], [USER, END[1]], [schema("ffff1"), schema("ffff2")]),
    "a system message and tools": (
        ["ssss1", "ffff1"],
        [{"role": "system", "content": "ssss1"}, USER, END[1]],
        [schema("ffff1")],
    ),
    "tools without a question": (
        ["ffff1"],
        [{"role": "system", "content": "ssss1"}, END[1]],
        [schema("ffff1")],
    ),
    "two results in the message": (
        ["rrrr1", "rrrr2"],
        [USER, {"role": "assistant", "content": "x", "tool_responses": ["rrrr1", "rrrr2"]}],
        None,
    ),
    "two parts": (["uuuu1", "uuuu3"], [{"role": "user", "content": [TEXT, {**TEXT, "text": "uuuu3"}]}, END[1]], None),
    "an image": (["iiii1"], [{"role": "user", "content": [IMAGE]}, END[1]], None),
    "a text and an image": (["uuuu1", "iiii1"], [{"role": "user", "content": [TEXT, IMAGE]}, END[1]], None),
    "parts": (["uuuu1"], [{"role": "user", "content": [{"type": "text", "text": "uuuu1"}]}, END[1]], None),
}


def render(tokenizer, template, history):
    """The text of a conversation, or the error of a template that does not write all of it."""
    try:
        return history.apply_chat_template(tokenizer=tokenizer, chat_template=template, add_generation_prompt=False)
    except UnsupportedError as err:
        return err


@pytest.mark.parametrize("name", [*TEMPLATES, *JINJA])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_written_or_refused(field, name):
    """What goes in comes out, in any case of letters, or there is an error."""
    texts, chat, tools = FIELDS[field]
    tokenizer = make_tokenizer(JINJA.get(name, CHATML), bos_token="<s>", eos_token="</s>")
    history = History.from_chats({"messages": chat, "tools": tools})

    found = render(tokenizer, TEMPLATES.get(name), history)

    lost = [text for text in texts if not isinstance(found, UnsupportedError) and text not in found.lower()]
    assert not lost


WRITTEN = [
    ("chatml", "thinking"),
    ("qwen", "thinking"),
    ("chatml", "two calls"),
    ("chatml", "two tools"),
    ("llama", "a call"),
    ("llama", "tools"),
    ("mistral", "a call with a content"),
    ("deepseek", "a later system message"),
    ("gemma", "a system message"),
    ("FORGETFUL", "thinking"),
    ("FORGETFUL", "a call with a content"),
    ("ZEPHYR", "two calls"),
    ("TEXT_ARGUMENTS", "a call"),
    ("THINKS", "contents"),
    ("LLAMA3", "a system message"),
    ("all tools", "two tools"),
    ("names", "a name"),
    ("upper case", "contents"),
    ("names of calls", "two calls"),
    ("texts of parts", "two parts"),
    ("images", "an image"),
    ("images", "a text and an image"),
    ("all tools", "a system message and tools"),
    ("tools beside a question", "a system message and tools"),
    ("the first result", "results in the message"),
]


@pytest.mark.parametrize(("name", "field"), WRITTEN)
def test_what_a_template_writes_is_not_refused(name, field):
    """The table above is not empty."""
    _, chat, tools = FIELDS[field]
    tokenizer = make_tokenizer(JINJA.get(name, CHATML), bos_token="<s>", eos_token="</s>")
    assert isinstance(
        render(tokenizer, TEMPLATES.get(name), History.from_chats({"messages": chat, "tools": tools})), str
    )


REFUSED = [
    ("CHATML", "thinking", r"message 1 \(assistant\).*'reasoning_content'"),
    ("CHATML", "a call", r"message 1 \(assistant\).*'tool_calls'"),
    ("CHATML", "tools", "'tools', which would be lost"),
    ("CHATML", "results in the message", "'tool_responses'"),
    ("CHATML", "a name", r"message 0 \(user\).*'name'"),
    ("chatml", "a name", r"message 0 \(user\).*'name'"),
    ("llama", "results in the message", "'tool_responses'"),
    ("calls in place of contents", "a call with a content", "'content'"),
    ("the first call", "two calls", "'tool_calls'"),
    ("names of calls", "a call", "'tool_calls'"),
    ("two roles", "a system message", r"message 0 \(system\).*'content'"),
    ("the first tool", "two tools", "'tools'"),
    ("names of tools", "tools", "'tools'"),
    ("cut", "contents", "'content'"),
    ("CHATML", "an image", r"message 0 \(user\).*'content'.*image_url"),
    ("ZEPHYR", "a text and an image", r"message 0 \(user\).*'content'.*image_url"),
    ("texts of parts", "an image", r"message 0 \(user\).*'content'.*image_url"),
    ("texts of parts", "a text and an image", r"message 0 \(user\).*'content'.*image_url"),
    ("the first part", "two parts", "'content'"),
    ("the first result", "two results in the message", "'tool_responses'"),
    ("tools in place of a system message", "a system message and tools", r"message 0 \(system\).*'content'"),
    ("tools beside a question", "tools without a question", "'tools'"),
]


@pytest.mark.parametrize(("name", "field", "pattern"), REFUSED)
def test_a_refusal_names_the_field(name, field, pattern):
    """And the message, if it is one of a message."""
    _, chat, tools = FIELDS[field]
    tokenizer = make_tokenizer(JINJA.get(name, CHATML), bos_token="<s>", eos_token="</s>")
    history = History.from_chats({"messages": chat, "tools": tools})
    with pytest.raises(UnsupportedError, match=f"(?s){pattern}"):
        history.apply_chat_template(tokenizer=tokenizer, chat_template=TEMPLATES.get(name))


# A conversation that a template writes, and another of which it does not write all.
ONE_AFTER_ANOTHER = [
    ("the first part", "parts", "two parts"),
    ("the first result", "results in the message", "two results in the message"),
    ("the first call", "a call", "two calls"),
    ("texts of parts", "parts", "a text and an image"),
    ("tools in place of a system message", "a system message", "a system message and tools"),
    ("tools beside a question", "a system message and tools", "tools without a question"),
    ("the first tool", "tools", "two tools"),
]


@pytest.mark.parametrize(("name", "known", "other"), ONE_AFTER_ANOTHER)
def test_what_a_template_writes_of_one_is_not_assumed_of_another(name, known, other):
    """A template that is known to write a conversation is checked for each further kind."""
    tokenizer = make_tokenizer(JINJA[name], bos_token="<s>", eos_token="</s>")
    first, second = [
        History.from_chats({"messages": chat, "tools": tools}) for _, chat, tools in (FIELDS[known], FIELDS[other])
    ]
    assert isinstance(render(tokenizer, None, first), str)
    assert isinstance(render(tokenizer, None, second), UnsupportedError)


# Templates that print a list of parts as Python does, or fail.
TEXT_ONLY = {
    "prints": CHATML,
    "marks": GENERATION,
    "prints in capitals": JINJA["upper case"],
    "joins": LOOP + "{{ '[' + m.role + ']' + m.content }}\n{% endfor %}",
    "trims": LOOP + "{{ m.role }}:{{ m.content.strip() }}\n{% endfor %}",
}
ROLES = {
    "system": ([], END),
    "user": ([], END[1:]),
    "assistant": (END[:1], END),
    "tool": (END, END),
    "developer": ([], END),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", TEXT_ONLY)
def test_parts_are_text_where_a_template_writes_only_text(name, role):
    """OpenAI's parts of text are the text, as in the templates of this package."""
    tokenizer = make_tokenizer(TEXT_ONLY[name])
    before, after = ROLES[role]

    def rows_of(content):
        chat = [*before, {"role": role, "content": content}, *after]
        (row,) = load_tokens(tokenizer, [{"m": chat}], columns="m")
        return row["input_ids"].tolist(), row["assistant_masks"].tolist()

    assert rows_of([TEXT, {**TEXT, "text": " uuuu3"}]) == rows_of("uuuu1 uuuu3")


def test_a_lossy_template_writes_the_text_beside_an_image():
    """Not the image's dict."""
    history = History.from_chats([{"role": "user", "content": [TEXT, IMAGE]}])
    text = JinjaTemplate(make_tokenizer(CHATML), lossy=True).render(history)
    assert text == "<|im_start|>user\nuuuu1<|im_end|>\n"


THINKING = History.from_chats(FIELDS["thinking"][1])
ENTRANCES = {
    "text": lambda tokenizer: THINKING.apply_chat_template(tokenizer=tokenizer),
    "ids": lambda tokenizer: THINKING.apply_chat_template(tokenizer=tokenizer, tokenize=True),
    "masks": lambda tokenizer: THINKING.apply_chat_template(tokenizer=tokenizer, return_assistant_tokens_mask=True),
    "render": lambda tokenizer: JinjaTemplate(tokenizer).render(THINKING),
    "load_tokens": lambda tokenizer: load_tokens(tokenizer, [{"m": THINKING.tolist()}], columns="m"),
    "chat_ids": lambda tokenizer: chat_ids(TokenTemplate(tokenizer), THINKING),
    "to_training_rows": lambda tokenizer: to_training_rows(TokenTemplate(tokenizer), THINKING),
    "append_messages": lambda tokenizer: append_messages(
        TokenTemplate(tokenizer), [1], History(role="user", content="a", name="b")
    ),
    "with ids of the reply": lambda tokenizer: THINKING.append(
        {"role": "assistant", "content": "a", "reasoning_content": "b", "token_ids": [5]}
    ).apply_chat_template(tokenizer=tokenizer),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("source", [CHATML, GENERATION])
def test_every_call_refuses(entrance, source):
    """The check is part of the template."""
    with pytest.raises(UnsupportedError, match="which would be lost"):
        ENTRANCES[entrance](make_tokenizer(source))


def test_thinking_of_earlier_turns_is_the_templates_to_drop():
    """In the prompt of a next reply, even by a template that never writes it."""
    history = THINKING.append({"role": "user", "content": "b"})
    assert "tttt1" not in history.apply_chat_template(tokenizer=make_tokenizer(CHATML))


def test_replies_with_their_ids_need_no_field():
    """A rollout is its ids, whatever the template writes."""
    template = TokenTemplate(make_tokenizer(CHATML))
    ids = template.tokenizer("<think>\ntttt1\n</think>\n\naaaa1")["input_ids"] + template.end_ids
    history = THINKING[:1].append({**THINKING.tolist()[1], "token_ids": ids})

    (row,) = to_training_rows(template, history)

    assert [i for i, own in zip(row.ids, row.generated, strict=True) if own] == ids


def test_a_lossy_template_renders():
    """A way out, which the report of a template uses."""
    tokenizer = make_tokenizer(CHATML)

    text = JinjaTemplate(tokenizer, lossy=True).render(THINKING)

    assert text == tokenizer.apply_chat_template(THINKING.tolist(), tokenize=False)
    assert template_report(tokenizer)["thinking"].good is None


def test_a_template_is_rendered_once_for_each_kind_of_message(monkeypatch):
    """Rows of known kinds cost no further render."""
    tokenizer = make_tokenizer(CHATML + "{# counted #}")
    history = History.from_chats([FIELDS["contents"][1]] * 50)
    count = []
    render_jinja = module.JinjaTemplate._render_jinja
    monkeypatch.setattr(
        module.JinjaTemplate,
        "_render_jinja",
        lambda *args, **how: count.append(len(args[1])) or render_jinja(*args, **how),
    )

    history.apply_chat_template(tokenizer=tokenizer)
    first = sum(count)
    history.apply_chat_template(tokenizer=tokenizer)

    assert first <= 50 + 8
    assert sum(count) - first == 50
