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
    make_call,
    not_rendered,
    plain_text,
    refuse,
    to_json,
    unparsed,
)

_BEGIN, _START, _STOP = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
_END, _MORE = "<|eot_id|>", "<|eom_id|>"
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

    Tools stand in the first message of the user; a reply is text or one call. Contents lose spaces at their ends.

    Args:
        date: The day that the system message gives.
        knowledge: The end of the training data, likewise.

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

    @property
    def control(self) -> tuple[str, ...]:  # noqa: D102 - as the interface
        return _BEGIN, _START, _STOP, _END, _MORE

    @property
    def end(self) -> str:  # noqa: D102 - as the interface
        return _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        has_system = bool(messages) and messages[0]["role"] == "system"
        first = 0 if has_system else None
        found = [
            Piece(f"{_BEGIN}{_START}system{_STOP}\n\n", first),
            Piece("Environment: ipython\n" if tools else "", first),
        ]
        found.append(Piece(f"Cutting Knowledge Date: {self.knowledge}\nToday Date: {self.date}\n\n", first))
        if has_system:
            refuse(conversation, 0, "tool_calls", "reasoning_content")
            found.append(Piece(plain_text(conversation, 0).strip(), 0, is_content=True))
        found.append(Piece(_END, first))
        if tools and (len(messages) <= has_system or messages[int(has_system)]["role"] != "user"):
            raise UnsupportedError("llama: the tools stand in a first message of the user, which there must be.")
        for i in range(int(has_system), len(messages)):
            message = messages[i]
            role = "ipython" if message["role"] == "tool" else message["role"]
            found += [Piece(_START, i), Piece(role, i, is_content=True), Piece(f"{_STOP}\n\n", i)]
            if tools and i == int(has_system):
                found.append(Piece(_TOOLS, i))
                for tool in tools:
                    found += [Piece(to_json(tool, 4), i, is_content=True), Piece("\n\n", i)]
            found += _body(conversation, i)
            if not (open_end and i == len(messages) - 1):
                found.append(Piece(_END, i, is_reply=role == "assistant"))
        if generation_prompt:
            found.append(Piece(f"{_START}assistant{_STOP}\n\n", len(messages)))
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        tools: list[Any] | None = None
        at = len(_BEGIN) if text.startswith(_BEGIN) else 0
        first_user = True
        while at < len(text):
            header = _HEADER.match(text, at)
            if header is None:
                raise not_rendered(text, at, f"{_START}role{_STOP} and two line breaks")
            stop = text.find(_END, header.end())
            role, body = header[1], text[header.end() : None if stop < 0 else stop]
            at = len(text) if stop < 0 else stop + len(_END)
            if stop < 0 and role == "assistant" and not body:
                break
            if role == "system" and not messages:
                dates = _DATES.match(body)
                body = body[dates.end() :] if dates else body
                if not body:
                    continue
            elif role == "user" and first_user:
                first_user = False
                if body.startswith(_TOOLS):
                    tools, body = _read_tools(body[len(_TOOLS) :])
            message = self._read_turn(role, body)
            messages.append({**message, "is_complete": False} if stop < 0 else message)
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
            return unparsed(text, "a call must be one object with a name and parameters")
        return {"role": "assistant", "content": text}


def _body(conversation: Conversation, i: int) -> list[Piece]:
    message = conversation.messages[i]
    refuse(conversation, i, "reasoning_content")
    text, calls = plain_text(conversation, i), message.get("tool_calls")
    is_reply = message["role"] == "assistant"
    if not calls:
        # Results of tools are JSON, text included.
        text = to_json(text) if message["role"] in ("tool", "ipython") else text.strip()
        return [Piece(text, i, is_content=True, is_reply=is_reply)]
    if len(calls) > 1 or text or not is_reply:
        raise UnsupportedError(
            f"{describe(conversation, i)}: the template renders one call, without a content.",
            got=f"{len(calls)} calls and the content {text!r}"[:200],
        )
    function = calls[0]["function"]
    return [
        Piece('{"name": "', i, is_reply=True),
        Piece(function["name"], i, is_content=True, is_reply=True),
        Piece('", "parameters": ', i, is_reply=True),
        Piece(to_json(read_json(function["arguments"])), i, is_content=True, is_reply=True),
        Piece("}", i, is_reply=True),
    ]


def _read_tools(text: str) -> tuple[list[Any], str]:
    """Return the tools at the start of a text, and the rest."""
    tools: list[Any] = []
    while text.startswith("{"):
        try:
            tool, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            break
        if not text.startswith("\n\n", end) or text[:end] != to_json(tool, 4):
            break
        tools.append(tool)
        text = text[end + 2 :]
    return tools, text


llama: Llama = Llama()
"""The template of Llama 3.1, with its default dates."""
