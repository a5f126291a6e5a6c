"""Messages as dicts: the fields of a conversation, and the forms in which OpenAI's servers and data sets write them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdfunc.core.errors import MissingKeyError, brief, error
from tdfunc.core.keys import did_you_mean
from tdfunc.llm.messages.content import as_content, text_of
from tdfunc.llm.messages.sharegpt import from_sharegpt

# A message: its fields by name, without those that are None.
Message = dict[str, Any]

# In the order in which they are shown.
FIELDS = (
    "role", "content", "is_complete", "tool_calls", "tool_responses", "name", "tool_call_id", "reasoning_content",
    "tools", "finish_reason", "token_ids", "parse_error",
)  # fmt: skip
# Fields about the origin of a message, which `==` leaves out.
UNCOMPARED = frozenset(("is_complete", "token_ids", "finish_reason", "parse_error"))
# Other names of a field: OpenRouter and newer vLLM servers.
_ALIASES = {"reasoning": "reasoning_content"}
# The entries of a call beside its function, and the entries of a function.
_OF_CALLS = ("id", "type", "index")
_OF_FUNCTIONS = ("name", "arguments")
# The entry of a conversation with its messages: OpenAI's name, and the name in data sets of ShareGPT.
_MESSAGES = ("messages", "conversations")


def read_messages(given: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Return the messages of a conversation of a data set or server: every call that reads one reads it here.

    Args:
        given: The messages, in the form of OpenAI or ShareGPT.
        where: The place of the conversation, for messages of errors.

    Raises:
        TypeError: A message is not a dict with a role, or a field has a value of another type.
        MissingKeyError: An entry is not a field of a message, so that it would be lost.
        ValueError: A field has two values under two names, of which one would be lost; or an author is unknown.
    """
    messages: list[Mapping[str, Any]] = []
    read: list[Message] = []
    for i, item in enumerate(given):
        place = f"{where}, message {i}"
        message = from_sharegpt(item, place)
        messages.append(message)
        read.append(read_message(message, place))
    if _is_filled(messages):
        return [_without_filling(message) for message in read]
    return read


def read_message(given: Mapping[str, Any], where: str) -> Message:
    """Return the fields of a message of a data set or server; empty entries are left out.

    Raises:
        TypeError: The message is not a dict with a role, or a field has a value of another type.
        MissingKeyError: An entry is not a field of a message, so that it would be lost.
        ValueError: A field has two values under two names, of which one would be lost.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise error(
            TypeError,
            f"{where}: a message is not a dict with a role.",
            expected="{'role': 'user', 'content': ...}",
            got=repr(given)[:200],
        )
    message: Message = {}
    for key, value in given.items():
        if value is None:
            continue
        name = _ALIASES.get(key, key)
        if name in FIELDS:
            message[name] = _only_value(message.get(name), value, name, where)
        elif value not in ("", [], {}):
            raise MissingKeyError(
                f"{where}: {key!r} is not a field of a message.",
                expected=f"one of {list(FIELDS)}",
                got=repr(value)[:200],
                hint=did_you_mean(key, FIELDS) or "leave it out, because a History would lose it.",
            )
    if "content" in message:
        message["content"] = _read_content(message["content"], where)
    if "tool_calls" in message:
        message["tool_calls"] = read_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


# Any: values of a field.
def _only_value(known: Any, value: Any, name: str, where: str) -> Any:
    """Return the value of a field that a message may have under two names; an empty one replaces nothing."""
    if not known or known == value:
        return value
    if not value:
        return known
    raise error(
        ValueError,
        f"{where}: {name!r} has two values, under two names.",
        expected=repr(known)[:200],
        got=repr(value)[:200],
        hint="leave one of them out, because a History would lose it.",
    )


def _read_content(given: Any, where: str) -> Any:
    """Return a content as text or a list of parts."""
    content = as_content(given)
    # Parts have no entries that are None: a template may ask whether a part has an entry.
    if isinstance(content, list):
        return without_nulls(content)
    if not isinstance(content, str):
        raise error(TypeError, f"{where}: the content is not text, a list of parts, or None.", got=repr(content)[:200])
    return content


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form; arguments stay a dict or JSON text.

    Raises:
        TypeError: The calls are not a list, or a call has no function with a name.
        MissingKeyError: A function has another entry than a name and arguments, which would be lost.
    """
    # Data sets store nested values as JSON text.
    calls = read_json(calls)
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise error(TypeError, f"{where}: tool_calls is not a list.", got=repr(calls)[:200])
    return [_read_call(call, where) for call in calls]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    # A call may also be its function alone, as in data sets of Hermes.
    if isinstance(call, Mapping) and "function" not in call:
        call = _with_function(call)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise error(
            TypeError,
            f"{where}: a tool call has no function with a name.",
            expected="{'type': 'function', 'function': {'name': ..., 'arguments': ...}}",
            got=repr(call)[:200],
        )
    _check_function(function, where)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    given: Mapping[str, Any] = call
    rest = {key: value for key, value in given.items() if value is not None and key not in ("function", "type")}
    return {
        **rest,
        "type": given.get("type") or "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _with_function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose function is apart from the entries of the call."""
    call = {key: given[key] for key in _OF_CALLS if key in given}
    function = {key: value for key, value in given.items() if key not in _OF_CALLS}
    return {**call, "function": function}


def _check_function(function: Mapping[str, Any], where: str) -> None:
    """Raise if a function has an entry that is neither its name nor its arguments.

    Servers and data sets also name the arguments "args", "input" or "parameters".
    """
    for key, value in function.items():
        if key not in _OF_FUNCTIONS and value not in (None, "", [], {}):
            raise MissingKeyError(
                f"{where}: {key!r} is not an entry of the function of a tool call.",
                expected="{'name': ..., 'arguments': ...}",
                got=repr(value)[:200],
                hint=did_you_mean(key, _OF_FUNCTIONS) or "rename it to 'arguments', or leave it out.",
            )


# Any: a value of a data set.
def as_lists(value: Any) -> Any:
    """Return a value with lists in place of numpy's arrays, as which pandas reads the lists of parquet files."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        items: list[Any] = value
        return [as_lists(item) for item in items]
    if isinstance(value, dict):
        entries: dict[Any, Any] = value
        return {key: as_lists(item) for key, item in entries.items()}
    return value


# Any: a value of a data set.
def read_tools(given: Any, where: str, *, is_filled: bool = True) -> list[Any] | None:
    """Return the schemas of tools as dicts; None without tools.

    Tools may be a list of dicts, a list of JSON texts, or one JSON text of a list. A null in JSON text stays.

    Args:
        given: The tools.
        where: The place, for messages.
        is_filled: Dicts may be of Arrow: their entries that are None count as missing.

    Raises:
        TypeError: The tools are something else.
    """
    # A table of pandas has NaN where a record has no tools.
    is_missing = given == "" or (isinstance(given, float) and given != given)
    value = None if is_missing else read_json(given)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        hint = "put a single schema into a list: [schema]." if isinstance(value, Mapping) else None
        raise error(
            TypeError,
            f"{where}: `tools` is not a list of schemas.",
            expected="a list of dicts, or the JSON text of such a list",
            got=repr(given)[:200],
            hint=hint,
        )
    has_filling = is_filled and not isinstance(given, str)
    tools = [_read_tool(tool, where, has_filling) for tool in value]
    return tools or None


def _read_tool(given: Any, where: str, has_filling: bool) -> Any:
    tool = read_json(given)
    # transformers makes a schema of a Python function.
    if callable(tool):
        return tool
    if not isinstance(tool, Mapping):
        raise error(
            TypeError,
            f"{where}: a schema in `tools` is not a dict.",
            expected="{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}, or its JSON text",
            got=repr(given)[:200],
        )
    # A null in JSON text was written there by somebody.
    if has_filling and not isinstance(given, str):
        return without_nulls(tool)
    return dict(tool)


# Any: a nested value.
def without_nulls(value: Any) -> Any:
    """Return a value without the entries of dicts that are None.

    Arrow gives all records of a list the same entries and fills up with nulls, so that they stand for missing ones.
    """
    if isinstance(value, Mapping):
        given: Mapping[Any, Any] = value
        return {key: without_nulls(item) for key, item in given.items() if item is not None}
    if isinstance(value, list):
        items: list[Any] = value
        return [without_nulls(item) for item in items]
    return value


def _without_filling(message: Message) -> Message:
    """Return a message whose calls have no arguments that are None, as Arrow fills them up; JSON text is unchanged."""
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": without_nulls(function["arguments"])}})
    return {**message, "tool_calls": calls}


def _is_filled(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages have the form of Arrow's records: the same entries, which are null where one is missing.

    A message with an entry for calls that is not of the assistant shows it, because nobody writes one.
    """
    entries = {frozenset(message) for message in messages}
    if len(entries) != 1:
        return False
    return any([message["role"] != "assistant" and "tool_calls" in message for message in messages])


def show_message(message: Message) -> Message:
    """Return the dict of a message as `from_chats` reads it: fields in order, without fields at their defaults."""
    return {name: message[name] for name in FIELDS if name != "tools" and message.get(name) is not None}


def is_message(item: Any) -> bool:
    """Return whether a dict is one message, or an item in its place; otherwise it is a complete conversation."""
    return isinstance(item, Mapping) and messages_entry(item) is None


def messages_entry(conversation: Mapping[str, Any]) -> str | None:
    """Return the entry of a complete conversation that contains its messages; None if it has none."""
    return next((name for name in _MESSAGES if name in conversation), None)


def with_system(messages: list[Message], conversation: Mapping[str, Any], where: str) -> list[Message]:
    """Return messages behind the message of the entry `system` of their conversation, which data sets of ShareGPT have.

    Args:
        messages: The messages of the conversation.
        conversation: A complete conversation, or a record that contains one.
        where: The place of the conversation, for messages of errors.

    Raises:
        TypeError: The entry is not a text.
        ValueError: The messages begin with another system message.
    """
    text = conversation.get("system")
    if text is None or text == "":
        return messages
    if not isinstance(text, str):
        raise error(TypeError, f"{where}: the entry 'system' is not a text.", got=brief(text))
    if messages and messages[0].get("role") == "system":
        raise error(
            ValueError,
            f"{where}: the conversation has an entry 'system', and begins with a system message.",
            expected="one of the two",
            got=brief([text, messages[0].get("content")]),
        )
    return [{"role": "system", "content": text}, *messages]


def as_compared(message: Mapping[str, Any]) -> Message:
    """Return the fields by which messages are compared, in one form.

    A missing content counts as empty, text parts as their text, and JSON text of arguments as its value.
    """
    shown = {name: value for name, value in message.items() if value and name not in UNCOMPARED}
    text = text_of(shown.get("content"))
    if text is not None:
        shown["content"] = text
    if "tool_calls" in shown:
        calls: list[dict[str, Any]] = []
        for call in shown["tool_calls"]:
            function = call["function"]
            calls.append({**call, "function": {**function, "arguments": read_json(function["arguments"])}})
        shown["tool_calls"] = calls
    return shown


# Any: JSON.
def load_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply for Python, as a reply that repeats a bracket.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def read_json(value: Any) -> Any:
    """Return the value of a JSON text; anything else, and other text, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except ValueError:
        return value
