"""The check that a template writes all that a conversation has, by a comparison of input and output.

A field of a message is replaced by a marker, and the marker is looked for in the text. This is done once for each
template and each kind of message: its role, the role before it, and its fields. The ids of calls, and the name of the
function in the result of a tool, only connect messages. Many templates leave them out, and they are not checked.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.content import texts_of
from tdfunc.llm.messages.message import Message, read_json

_STEM = "qzxw"
# The kinds of messages that templates are known to write, by template; the oldest entries are forgotten.
_KNOWN: "dict[Hashable, set[Hashable]]" = {}
_MOST_TEMPLATES = 256
_QUESTION: Message = {"role": "user", "content": "a"}


class _Kind(NamedTuple):
    """A kind of message: what is written for one message of a kind is written for others."""

    before: str | None
    role: str
    fields: tuple[str, ...]
    # A template may write another start for tools, in place of a message.
    has_tools: bool
    # A template may write only the first call or result, or names without arguments.
    has_several_calls: bool
    has_several_responses: bool
    has_arguments: bool
    # The types of the parts of a content, of which a template may write some, or only the first.
    parts: tuple[str, ...]
    has_several_parts: bool


def known_kinds(template: Hashable) -> "set[Hashable]":
    """Return the set of kinds that a template is known to write, which `Coverage` fills."""
    found = _KNOWN.setdefault(template, set())
    if len(_KNOWN) > _MOST_TEMPLATES:
        # A list: another thread may enter one at the same time.
        for oldest in list(_KNOWN)[:-_MOST_TEMPLATES]:
            _KNOWN.pop(oldest, None)
    return found


@dataclass(frozen=True)
class Coverage:
    """The fields that a template writes.

    Args:
        render: The template, without a check: the text of a conversation.
        known: The kinds of messages that are known to be written.
    """

    render: Callable[[Conversation], str]
    known: "set[Hashable]"

    def check(self, conversations: Sequence[Conversation], *, is_prompt: bool = False) -> None:
        """Raise if the template leaves out a field of a message, or tools.

        Args:
            conversations: The conversations.
            is_prompt: A reply follows. Thinking before the last message of a user may be left out there, since most
                templates do that.

        Raises:
            UnsupportedError: The message names the field.
        """
        for conversation in conversations:
            self._check_messages(conversation, is_prompt)
            if conversation.tools:
                self._check_tools(conversation, conversation.tools)

    def _check_messages(self, conversation: Conversation, is_prompt: bool) -> None:
        messages = conversation.messages
        last_user = -1
        if is_prompt:
            last_user = max([i for i, message in enumerate(messages) if message["role"] == "user"], default=-1)
        before: str | None = None
        for i, message in enumerate(messages):
            # A reply with its ids is not rendered for them.
            fields = () if message.get("token_ids") else _fields_of(message, has_thinking=i > last_user)
            kind = _kind_of(message, before, fields, has_tools=bool(conversation.tools))
            before = message["role"]
            if kind in self.known:
                continue
            for field in fields:
                if self._loses(conversation, i, field):
                    raise lost_error(i, message, field)
            self.known.add(kind)

    def _check_tools(self, conversation: Conversation, tools: list[Any]) -> None:
        roles = [message["role"] for message in conversation.messages]
        # A template may write tools beside the first or last message, or beside a question.
        place = (*roles[:1], *roles[-1:], "user" in roles)
        # A template may write only the first schema, or names without parameters.
        kind = "tools", place, len(tools) > 1, any([_has_parameters(tool) for tool in tools])
        if kind in self.known:
            return
        markers = _Markers(conversation)
        marked = [markers.tool(tool) for tool in tools]
        without = [conversation._replace(tools=None)]
        if self._is_lost(conversation, [conversation._replace(tools=marked)], markers.made, without):
            raise UnsupportedError(
                "this template cannot render 'tools', which would be lost.",
                got=repr(tools[0])[:200],
                hint="describe them in a system message, or use a template that writes them.",
            )
        self.known.add(kind)

    def _loses(self, conversation: Conversation, i: int, field: str) -> bool:
        """Return whether a field of a message is not in the text, neither as the last message nor before others."""
        messages, tools = conversation
        markers = _Markers(conversation)
        changed = {**messages[i], field: markers.field(messages[i], field)}
        emptied = {name: value for name, value in messages[i].items() if name != field}
        if field == "content":
            emptied["content"] = ""

        def with_message(message: Message) -> list[Conversation]:
            last = Conversation([*messages[:i], message], tools)
            whole = Conversation([*messages[:i], message, *messages[i + 1 :]], tools)
            # Some templates write only the thinking behind the last question.
            if field == "reasoning_content":
                return [Conversation([_QUESTION, message], tools), last, whole]
            return [last, whole]

        if self._is_lost(conversation, with_message(changed), markers.made, with_message(emptied)):
            return True
        return field == "content" and self._loses_part(conversation, i)

    def _loses_part(self, conversation: Conversation, i: int) -> bool:
        """Return whether the text is the same without a part, such as an image, that has no text to look for."""
        messages, tools = conversation
        content = messages[i]["content"]
        others = _other_parts(content)
        if not others:
            return False
        whole = self._text(conversation)
        if whole is None:
            return False
        for place in others:
            rest = [*content[:place], *content[place + 1 :]] or [{"type": "text", "text": ""}]
            message = {**messages[i], "content": rest}
            without = Conversation([*messages[:i], message, *messages[i + 1 :]], tools)
            if self._text(without) == whole:
                return True
        return False

    def _is_lost(
        self, given: Conversation, marked: list[Conversation], made: Sequence[str], emptied: list[Conversation]
    ) -> bool:
        """Return whether no text of marked conversations has all markers.

        If the template renders none of them, its texts with and without the field are compared.
        """
        texts = [text for text in map(self._text, marked) if text is not None]
        if texts:
            return not any([_has_all(text, made) for text in texts])
        whole = self._text(given)
        without = self._text(emptied[-1])
        return whole is not None and whole == without

    def _text(self, conversation: Conversation) -> str | None:
        # A template in Jinja may raise any error.
        try:
            return self.render(conversation).lower()
        except Exception:
            return None


def lost_error(i: int, message: Message, field: str) -> UnsupportedError:
    """Return the error of a message, with its place in the conversation, of which a template leaves out a field."""
    hint = "use a template that writes it."
    if field != "content":
        hint = f"use a template that writes it; or history.set({field!r}, None) leaves it out."
    return UnsupportedError(
        f"message {i} ({message['role']}): this template cannot render {field!r}, which would be lost.",
        got=repr(message[field])[:200],
        hint=hint,
    )


def _has_all(text: str, markers: Sequence[str]) -> bool:
    return all([marker in text for marker in markers])


def _fields_of(message: Message, *, has_thinking: bool) -> tuple[str, ...]:
    """Return the fields of a message that a template has to write."""
    found: list[str] = []
    content = message.get("content")
    has_text = any([isinstance(text, str) and text.strip() for text in texts_of(content)])
    if has_text or _other_parts(content):
        found.append("content")
    thinking = message.get("reasoning_content")
    if has_thinking and thinking and thinking.strip():
        found.append("reasoning_content")
    for name in ("tool_calls", "tool_responses"):
        if message.get(name):
            found.append(name)
    if message.get("name") and message["role"] != "tool":
        found.append("name")
    return tuple(found)


# Any: the content of a message.
def _other_parts(content: Any) -> list[int]:
    """Return the places of the parts of a content that are not text."""
    if not isinstance(content, list):
        return []
    return [place for place, text in enumerate(texts_of(content)) if not isinstance(text, str)]


def _kind_of(message: Message, before: str | None, fields: tuple[str, ...], *, has_tools: bool) -> _Kind:
    calls = message.get("tool_calls") or ()
    responses = message.get("tool_responses") or ()
    has_arguments = any([call["function"]["arguments"] not in ({}, "", "{}") for call in calls])
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else []
    types = {"text" if isinstance(part, str) else str(part.get("type")) for part in parts}
    return _Kind(
        before,
        message["role"],
        fields,
        has_tools=has_tools,
        has_several_calls=len(calls) > 1,
        has_several_responses=len(responses) > 1,
        has_arguments=has_arguments,
        parts=tuple(sorted(types)),
        has_several_parts=len(parts) > 1,
    )


# Any: a schema, or a Python function.
def _has_parameters(tool: Any) -> bool:
    if not isinstance(tool, Mapping):
        return False
    schema: Mapping[str, Any] = tool
    function = schema.get("function", schema)
    parameters = None
    if isinstance(function, Mapping):
        parameters = function.get("parameters")
    return isinstance(parameters, Mapping) and bool(parameters.get("properties"))


class _Markers:
    """Markers that are in no text of a conversation, and fields that have them."""

    def __init__(self, conversation: Conversation) -> None:
        texts = repr(conversation).lower()
        self._stem = _STEM
        while self._stem in texts:
            self._stem += "q"
        self.made: list[str] = []

    def _new(self) -> str:
        self.made.append(f"{self._stem}{len(self.made)}v")
        return self.made[-1]

    # Any: a value of a message.
    def field(self, message: Message, name: str) -> Any:
        """Return a field with markers in place of its texts."""
        value = message[name]
        if name == "tool_calls":
            return [self._call(call) for call in value]
        if name == "content" and isinstance(value, list):
            return [self._part(part) for part in value]
        if isinstance(value, list):
            return [self._new() for _ in value]
        return self._new()

    def _part(self, part: Any) -> Any:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str) or not text.strip():
            return part
        if isinstance(part, str):
            return self._new()
        return {**part, "text": self._new()}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = self._new()
        arguments = self._arguments(read_json(function["arguments"]))
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            names: Mapping[str, Any] = value
            return {name: self._new() for name in names}
        if isinstance(value, str) and value.strip():
            return self._new()
        return value

    def tool(self, tool: Any) -> Any:
        """Return a schema with markers in place of the names of the function and of its parameters."""
        if not isinstance(tool, Mapping):
            return tool
        schema: Mapping[str, Any] = tool
        if isinstance(schema.get("function"), Mapping):
            return {**schema, "function": self.tool(schema["function"])}
        marked = dict(schema)
        if isinstance(marked.get("name"), str):
            marked["name"] = self._new()
        parameters = marked.get("parameters")
        if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
            marked["parameters"] = self._parameters(parameters)
        return marked

    def _parameters(self, parameters: "Mapping[str, Any]") -> dict[str, Any]:
        names = {name: self._new() for name in parameters["properties"]}
        properties = {names[name]: schema for name, schema in parameters["properties"].items()}
        marked = {**parameters, "properties": properties}
        if parameters.get("required"):
            marked["required"] = [names.get(name, name) for name in parameters["required"]]
        return marked
