"""Tools and calls as data sets store them: JSON text, and records that Arrow has filled up with nulls."""

import json
import math

import numpy as np
import pytest

from tdfunc import MissingKeyError
from tdfunc.llm import TEMPLATES, History, load_jsonl, load_tokens
from tests.llm.templates.test_templates import TOOLS
from tests.llm.tokens import FORGETFUL, make_tokenizer

OTHER = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
BOTH = [*TOOLS, OTHER]
CHAT = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": "noon"}]
FORMS = {
    "dicts": BOTH,
    "JSON text": json.dumps(BOTH),
    "indented JSON text": json.dumps(BOTH, indent=2),
    "JSON texts": [json.dumps(each) for each in BOTH],
    "a tuple": tuple(BOTH),
}
NONE = {"null": "null", "empty list": "[]", "empty text": "", "None": None, "no tools": [], "NaN": math.nan}
# With a template that writes tools: one of ours, and one in Jinja.
JINJA = "{{ tools | tojson if tools else '' }}" + FORGETFUL


def loaded(tools, tokenizer, template=None):
    """The text of a record."""
    record = {"messages": CHAT, "tools": tools}
    row = load_tokens(tokenizer, [record], columns="messages", chat_template=template)[0]
    return tokenizer.decode(row["input_ids"])


def from_file(tools, folder):
    """The history of a file with one line."""
    path = folder / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "tools": tools}) + "\n")
    return load_jsonl(path)[0]


ENTRANCES = {
    "from_chats": lambda tools, folder, **how: History.from_chats(
        {"messages": CHAT, "tools": tools}
    ).apply_chat_template(add_generation_prompt=False, **how),
    "set": lambda tools, folder, **how: (
        History.from_chats(CHAT).set("tools", tools).apply_chat_template(add_generation_prompt=False, **how)
    ),
    "apply_chat_template": lambda tools, folder, **how: History.from_chats(CHAT).apply_chat_template(
        tools=tools, add_generation_prompt=False, **how
    ),
    "load_jsonl": lambda tools, folder, **how: from_file(tools, folder).apply_chat_template(
        add_generation_prompt=False, **how
    ),
    "load_tokens": lambda tools, folder, tokenizer, chat_template=None: loaded(tools, tokenizer, chat_template),
}


@pytest.mark.parametrize("template", [None, "chatml", "qwen", "llama", "mistral"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_tools_are_read_in_any_form(entrance, form, template, tmp_path):
    """The text is that of a list of dicts."""
    how = {"tokenizer": make_tokenizer(JINJA), "chat_template": template}

    found = ENTRANCES[entrance](FORMS[form], tmp_path, **how)

    history = History.from_chats({"messages": CHAT, "tools": BOTH})
    assert found == history.apply_chat_template(add_generation_prompt=False, **how)


def test_tools_of_the_call_that_are_not_used_are_counted():
    """A conversation keeps its own tools; the others get those of the call."""
    history = History.from_chats([{"messages": CHAT, "tools": TOOLS}, CHAT])
    with pytest.warns(UserWarning, match="not used for 1 of 2 conversations"):
        history.apply_chat_template(tokenizer=make_tokenizer(JINJA), tools=[OTHER])


@pytest.mark.parametrize("form", NONE)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_no_tools_in_any_form(entrance, form, tmp_path):
    """The text is that of a conversation without tools."""
    how = {"tokenizer": make_tokenizer(JINJA), "chat_template": "chatml"}

    found = ENTRANCES[entrance](NONE[form], tmp_path, **how)

    assert found == TEMPLATES["chatml"].render(History.from_chats(CHAT))


@pytest.mark.parametrize("tools", ["now", '{"name": "now"}', OTHER, [3], ["now"], [[OTHER]], 3, "[1]"])
@pytest.mark.parametrize("entrance", ["from_chats", "set", "apply_chat_template", "load_tokens"])
def test_other_values_are_refused(entrance, tools, tmp_path):
    """No value is taken apart: the message names the tools."""
    how = {"tokenizer": make_tokenizer(JINJA), "chat_template": "chatml"}
    with pytest.raises(TypeError, match="`tools`"):
        ENTRANCES[entrance](tools, tmp_path, **how)


@pytest.mark.parametrize("calls", [json.dumps([{"type": "function", "function": {"name": "f", "arguments": {}}}])])
def test_calls_may_be_json_text(calls):
    """As tools."""
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    assert History.from_chats(chat).tool_calls[1] == json.loads(calls)


@pytest.mark.parametrize("calls", ["null", "[]"])
def test_no_calls_as_json_text(calls):
    """A reply without calls."""
    assert History.from_chats([{**CHAT[1], "tool_calls": calls}]).tool_calls is None


def call(name, **arguments):
    """A call with arguments as a dict."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def fill(*records):
    """Records as Arrow returns them: each has all entries of all of them, at every depth, None where it had none."""
    if all(isinstance(each, dict) or each is None for each in records) and any(records):
        names = dict.fromkeys(name for each in records if each for name in each)
        columns = {name: fill(*[each.get(name) if each else None for each in records]) for name in names}
        return [None if each is None else {name: columns[name][i] for name in names} for i, each in enumerate(records)]
    if any(isinstance(each, list) for each in records):
        flat = iter(fill(*[item for each in records if each for item in each]))
        return [None if each is None else [next(flat) for _ in each] for each in records]
    return list(records)


AGENT = {
    "messages": [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [call("now", zone="x"), call("find", q="y", deep={"a": 1})]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "noon"},
    ],
    "tools": BOTH,
}
(FILLED,) = fill(AGENT)


def test_the_oracle_fills():
    """The records of this test have nulls in arguments, tools and messages."""
    assert FILLED["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"zone": "x", "q": None, "deep": None}
    assert FILLED["tools"][0]["function"]["parameters"]["properties"] == {"q": None}
    assert FILLED["messages"][0]["tool_calls"] is None


@pytest.mark.parametrize("template", [None, "chatml", "qwen", "mistral"])
def test_filled_records_are_rendered_without_nulls(template):
    """A data set of Arrow gives the ids of the records that were put into it."""
    tokenizer = make_tokenizer(JINJA)
    options = {"columns": "messages", "chat_template": template}

    found = load_tokens(tokenizer, [FILLED], **options)[0]["input_ids"]

    assert found.tolist() == load_tokens(tokenizer, [AGENT], **options)[0]["input_ids"].tolist()


def test_filled_records_are_read_without_nulls():
    """A history of such a record is the history of the record that was put in."""
    assert History.from_chats(FILLED).to_chats() == AGENT


@pytest.mark.parametrize("arguments", ['{"zone": null}', {"zone": None}])
def test_a_null_that_was_written_stays(arguments):
    """A dict in a program, and JSON text anywhere, may have one."""
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call("f")]}]
    chat[1]["tool_calls"][0]["function"]["arguments"] = arguments

    text = TEMPLATES["chatml"].render(History.from_chats(chat))

    assert '"arguments": {"zone": null}' in text


def test_a_null_that_was_written_stays_in_tokens():
    """A data set has the ids of the history of the same records."""
    chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call("f", zone=None)]}]
    tokenizer = make_tokenizer(JINJA)

    found = load_tokens(tokenizer, [{"messages": chat}], columns="messages")[0]["input_ids"].tolist()

    history = History.from_chats(chat)
    assert found == history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False, tokenize=True)


def test_records_without_a_user_are_read_without_nulls():
    """Arrow also fills up the message of a system and the result of a tool."""
    (filled,) = fill({**AGENT, "messages": AGENT["messages"][1:]})

    assert History.from_chats(filled).to_chats()["messages"] == AGENT["messages"][1:]


def test_parts_have_no_nulls():
    """A template may ask whether a part has an image."""
    parts = [{"type": "text", "text": "a", "image_url": None}]
    assert History.from_chats([{"role": "user", "content": parts}]).content == [[{"type": "text", "text": "a"}]]


NULL = '{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": null}}}}}'
READ = {
    "to_chats": lambda tools: json.dumps(History.from_chats({"messages": CHAT, "tools": tools}).to_chats()),
    "rendered": lambda tools: TEMPLATES["chatml"].render(History.from_chats({"messages": CHAT, "tools": tools})),
    "load_tokens": lambda tools: loaded(tools, make_tokenizer(JINJA), "chatml"),
}


@pytest.mark.parametrize("tools", [f"[{NULL}]", [NULL]], ids=["one text", "a text for each"])
@pytest.mark.parametrize("entrance", READ)
def test_a_null_in_the_text_of_a_tool_stays(entrance, tools):
    """Arrow fills up dicts, not texts."""
    assert '"default": null' in READ[entrance](tools)


# The names that other servers give to arguments.
RENAMED = {
    "LangChain": {"type": "tool_call", "id": "1", "name": "f", "args": {"x": 1}},
    "Llama 3": {"name": "f", "parameters": {"x": 1}},
    "Anthropic": {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
    "in a function": {"type": "function", "function": {"name": "f", "args": {"x": 1}}},
    "beside the arguments": {"type": "function", "function": {"name": "f", "arguments": {}, "strict": True}},
}


@pytest.mark.parametrize("form", RENAMED)
def test_arguments_under_another_name_are_refused(form):
    """They would be lost, and the call would have none."""
    with pytest.raises(MissingKeyError, match=r"(?s)message 0: '(args|parameters|input|strict)'.*arguments"):
        History.from_chats([{"role": "assistant", "tool_calls": [RENAMED[form]]}])


@pytest.mark.parametrize("extra", [{"index": 0}, {"description": None, "args": {}}])
def test_a_function_alone_is_a_call(extra):
    """As in data sets of Hermes; Arrow fills up what other records have."""
    history = History.from_chats([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}, **extra}]}])
    assert history.tool_calls[0][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize("other", [None, "", "hm"])
@pytest.mark.parametrize("first", ["reasoning", "reasoning_content"])
def test_thinking_under_two_names_is_kept(first, other):
    """Some servers send both; an empty one replaces nothing."""
    second = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}[first]
    history = History.from_chats([{"role": "assistant", "content": "a", first: "hm", second: other}])
    assert history.reasoning_content == ["hm"]


def test_two_thinkings_are_refused():
    """One would be lost."""
    with pytest.raises(ValueError, match="two values"):
        History.from_chats([{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}])


def test_other_entries_of_a_conversation_are_named(tmp_path):
    """They are no part of a history, and a file of it does not have them."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": 1, "messages": CHAT, "functions": [{"name": "f"}], "tools": None, "x": None}))
    with pytest.warns(UserWarning, match=r"\['id', 'functions'\] of a conversation are left out"):
        history = load_jsonl(path)
    assert history.to_chats() == [CHAT]


def as_pandas(value):
    """A value as pandas reads it of a parquet file: lists are arrays."""
    if isinstance(value, dict):
        return {key: as_pandas(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), dtype=object)
    array[:] = [as_pandas(item) for item in value]
    return array


TABLES = {
    "from_chats": lambda record: History.from_chats([record]),
    "load_tokens": lambda record: load_tokens(
        make_tokenizer(JINJA), [record], columns="messages", chat_template="chatml"
    )[0]["input_ids"].tolist(),
}


@pytest.mark.parametrize("entrance", TABLES)
def test_records_of_pandas_are_read(entrance):
    """The hint of `load_tokens` for a table gives them: `frame.to_dict("records")`."""
    reply = {"role": "assistant", "content": "", "tool_calls": [call("f", x=[1, 2])]}
    record = {"messages": [CHAT[0], reply], "tools": BOTH}
    read = TABLES[entrance]
    assert str(read(as_pandas(record))) == str(read(record))


def test_records_of_pandas_have_a_cache(tmp_path):
    """Its name is made of the records."""
    how = {"columns": "messages", "chat_template": "chatml", "cache_dir": tmp_path}
    data = load_tokens(make_tokenizer(JINJA), [as_pandas({"messages": CHAT})], **how)
    assert len(data) == 1
