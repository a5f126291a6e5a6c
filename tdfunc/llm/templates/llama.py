"""The template of Llama 3.1 to 3.3."""

import json
import re
from dataclasses import dataclass
from typing import Any, final

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.messages.message import Message, read_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    describe,
    interleave,
    make_call,
    plain_text,
    read_turns,
    refuse,
    skip,
    to_json,
    unparsed,
)

_BEGIN = "<|begin_of_text|>"
_START = "<|start_header_id|>"
_STOP = "<|end_header_id|>"
_END = "<|eot_id|>"
_MORE = "<|eom_id|>"
_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
_HEADER = re.compile(rf"{re.escape(_START)}(.*?){re.escape(_STOP)}\n\n", re.DOTALL)
_DATES = re.compile(r"(?:Environment: ipython\n)?Cutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n\n")


@final
@dataclass(frozen=True)
class Llama(AbstractPieceTemplate):
    """Llama 3.1: a header with the role, two line breaks, the content, `<|eot_id|>`.

    Tools are written in the first message of the user. A reply is text or one call. Spaces around contents are removed.

    Args:
        date: The current day in the system message.
        knowledge: The end of the training data in the system message.

    Source:
        The template of Llama-3.1-8B-Instruct, with tools in the user's message.

    Examples:
        >>> from tdfunc.llm import History, llama
        >>> text = llama.render(History.from_chats([{"role": "user", "content": "hi"}]))
        >>> text[text.index("hi") :]
        'hi<|eot_id|>'
    """

    date: str = "26 Jul 2024"
    knowledge: str = "December 2023"
    _control = _BEGIN, _START, _STOP, _END, _MORE
    _end = _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        has_system = bool(messages) and messages[0]["role"] == "system"
        found = self._system_pieces(conversation, has_system=has_system)
        # The place of the first message behind the system's.
        first = int(has_system)
        if tools and (first == len(messages) or messages[first]["role"] != "user"):
            raise UnsupportedError("llama: the tools need a first message of the user, which contains them.")
        for i in range(first, len(messages)):
            role = messages[i]["role"]
            if role == "tool":
                role = "ipython"
            found += interleave(i, _START, role, f"{_STOP}\n\n")
            if tools and i == first:
                found.append(Piece(_TOOLS, i))
                for tool in tools:
                    found += interleave(i, "", to_json(tool, 4), "\n\n")
            found += _body(conversation, i)
            if not (open_end and i == len(messages) - 1):
                found.append(Piece(_END, i, is_reply=role == "assistant"))
        if generation_prompt:
            found.append(Piece(f"{_START}assistant{_STOP}\n\n", len(messages)))
        return found

    def _system_pieces(self, conversation: Conversation, *, has_system: bool) -> list[Piece]:
        """Return the system message, which the template writes even if a conversation has none."""
        place = 0 if has_system else None
        environment = "Environment: ipython\n" if conversation.tools else ""
        dates = f"Cutting Knowledge Date: {self.knowledge}\nToday Date: {self.date}\n\n"
        found = [Piece(f"{_BEGIN}{_START}system{_STOP}\n\n{environment}", place), Piece(dates, place)]
        if has_system:
            refuse(conversation, 0, "tool_calls", "reasoning_content")
            found.append(Piece(plain_text(conversation, 0).strip(), 0, is_content=True))
        return [*found, Piece(_END, place)]

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        tools: list[Any] | None = None
        at = skip(text, 0, _BEGIN)
        first_user = True
        expected = f"{_START}role{_STOP} and two line breaks"
        for role, body, cut in read_turns(text, at, _HEADER, _END, expected=expected):
            if role == "system" and not messages:
                dates = _DATES.match(body)
                if dates:
                    body = body[dates.end() :]
                if not body:
                    continue
            elif role == "user" and first_user:
                first_user = False
                if body.startswith(_TOOLS):
                    tools, body = _read_tools(body[len(_TOOLS) :])
            messages.append(self._read_turn(role, body) | cut)
        return Conversation(messages, tools)

    def _read_turn(self, role: str, body: str) -> Message:
        if role == "assistant":
            return self.parse_reply(body)
        if role == "ipython":
            given = read_json(body)
            return {"role": "tool", "content": given if isinstance(given, str) else body}
        return {"role": role, "content": body}

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        given = read_json(text.strip())
        if isinstance(given, dict) and given.keys() == {"name", "parameters"}:
            try:
                return {"role": "assistant", "tool_calls": [make_call(given["name"], given["parameters"])]}
            except ValueError as err:
                return unparsed(text, err)
        if text.lstrip().startswith('{"name"'):
            return unparsed(text, "a call is not one object with a name and parameters")
        return {"role": "assistant", "content": text}


def _body(conversation: Conversation, i: int) -> list[Piece]:
    message = conversation.messages[i]
    refuse(conversation, i, "reasoning_content")
    text = plain_text(conversation, i)
    calls = message.get("tool_calls")
    is_reply = message["role"] == "assistant"
    if not calls:
        # Results of tools are JSON, text included.
        is_result = message["role"] in ("tool", "ipython")
        text = to_json(text) if is_result else text.strip()
        return [Piece(text, i, is_content=True, is_reply=is_reply)]
    if len(calls) > 1 or text or not is_reply:
        raise UnsupportedError(
            f"{describe(conversation, i)}: the template renders one call, without a content.",
            got=f"{len(calls)} calls and the content {text!r}"[:200],
        )
    function = calls[0]["function"]
    arguments = to_json(read_json(function["arguments"]))
    return interleave(i, '{"name": "', function["name"], '", "parameters": ', arguments, "}", is_reply=True)


def _read_tools(text: str) -> tuple[list[Any], str]:
    """Return the tools at the start of a text, and the rest."""
    tools: list[Any] = []
    while text.startswith("{"):
        try:
            tool, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            break
        if not text.startswith("\n\n", end) or text[:end] != to_json(tool, 4):
            break
        tools.append(tool)
        text = text[end + 2 :]
    return tools, text


llama: Llama = Llama()
"""The template of Llama 3.1, with its default dates."""
