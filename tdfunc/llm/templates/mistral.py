"""The template of Mistral's instruct models since November 2024 (their seventh tokenizer)."""

import re
from dataclasses import dataclass
from typing import Any, final

from tdfunc.core.errors import UnsupportedError, brief, error
from tdfunc.llm.messages.message import Message, load_json, read_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    interleave,
    make_call,
    make_reply,
    not_rendered,
    plain_text,
    read_until,
    refuse,
    skip,
    to_json,
    unparsed,
)

_BEGIN = "<s>"
_END = "</s>"
_SYSTEM = "[SYSTEM_PROMPT]"
_SYSTEM_END = "[/SYSTEM_PROMPT]"
_TOOLS = "[AVAILABLE_TOOLS]"
_TOOLS_END = "[/AVAILABLE_TOOLS]"
_USER = "[INST]"
_USER_END = "[/INST]"
_RESULT = "[TOOL_RESULTS]"
_RESULT_TEXT = "[TOOL_CONTENT]"
_RESULT_END = "[/TOOL_RESULTS]"
_CALLS = "[TOOL_CALLS]"
_BRACKETS = {_SYSTEM: _SYSTEM_END, _TOOLS: _TOOLS_END, _USER: _USER_END, _RESULT: _RESULT_END}
_OPEN = re.compile("|".join(re.escape(each) for each in _BRACKETS))


@final
@dataclass(frozen=True)
class Mistral(AbstractPieceTemplate):
    """Mistral: `[INST]`, the user's text, `[/INST]`, the reply, `</s>`.

    The tools are written before the last message of the user. With tools, a further message of the user therefore
    changes earlier turns: see `is_append_only`.

    Source:
        `InstructTokenizerV7` of mistral-common.

    Examples:
        >>> from tdfunc.llm import History, mistral
        >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        >>> mistral.render(History.from_chats(chat))
        '<s>[INST]hi[/INST]hello</s>'
    """

    _control = (_BEGIN, _END, _CALLS, _RESULT_TEXT, *_BRACKETS, *_BRACKETS.values())
    _end = _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        found = [Piece(_BEGIN)]
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if tools and not users:
            raise UnsupportedError("mistral: the tools need a message of the user, which follows them.")
        for i, message in enumerate(messages):
            role = message["role"]
            text = plain_text(conversation, i)
            refuse(conversation, i, "reasoning_content")
            if role != "assistant":
                refuse(conversation, i, "tool_calls")
            if role == "assistant":
                found.append(Piece(text, i, is_content=True, is_reply=True))
                found += _call_pieces(message, i)
                end = Piece(_END, i, is_reply=True)
            elif role == "tool":
                call_id = message.get("tool_call_id") or ""
                found += interleave(i, _RESULT, call_id, _RESULT_TEXT, text)
                end = Piece(_RESULT_END, i)
            elif role == "user":
                # `users` has this message.
                if tools and i == users[-1]:
                    found += interleave(i, _TOOLS, to_json(tools), _TOOLS_END)
                found += interleave(i, _USER, text)
                end = Piece(_USER_END, i)
            elif role == "system":
                found += interleave(i, _SYSTEM, text)
                end = Piece(_SYSTEM_END, i)
            else:
                raise UnsupportedError(f"message {i}: the template cannot render the role {role!r}.")
            is_open = open_end and i == len(messages) - 1
            if not is_open:
                found.append(end)
        # A reply follows without a header.
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        tools: list[Any] | None = None
        at = skip(text, 0, _BEGIN)
        while at < len(text):
            start = at
            bracket = _OPEN.match(text, start)
            if bracket is None:
                body, at, cut = read_until(text, start, _END)
                messages.append(self.parse_reply(body) | cut)
                continue
            kind = bracket[0]
            body, at, cut = read_until(text, bracket.end(), _BRACKETS[kind])
            if kind == _TOOLS:
                tools = read_json(body)
                if not isinstance(tools, list):
                    raise error(ValueError, "parse: the tools are not a list in JSON.", got=repr(body[:200]))
            elif kind == _RESULT:
                call_id, found, content = body.partition(_RESULT_TEXT)
                if not found:
                    raise not_rendered(text, start, f"{_RESULT}, an id, {_RESULT_TEXT}")
                result: Message = {**cut, "role": "tool", "content": content}
                if call_id:
                    result["tool_call_id"] = call_id
                messages.append(result)
            else:
                role = "user" if kind == _USER else "system"
                messages.append({**cut, "role": role, "content": body})
        return Conversation(messages, tools)

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        content, opened, body = text.partition(_CALLS)
        if not opened:
            return {"role": "assistant", "content": text}
        try:
            calls = [_read_call(call) for call in load_json(body)]
        except (ValueError, TypeError) as err:
            return unparsed(text, f"the calls are not a list of objects in JSON: {err}")
        return make_reply(text, calls, content)


def _call_pieces(message: Message, i: int) -> list[Piece]:
    given: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = {"name": function["name"], "arguments": read_json(function["arguments"])}
        if call.get("id"):
            shown["id"] = call["id"]
        given.append(shown)
    if given:
        return interleave(i, _CALLS, to_json(given), is_reply=True)
    return []


def _read_call(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not {"name", "arguments"} <= given.keys() <= {"name", "arguments", "id"}:
        raise ValueError(f"a call has a name, arguments and an id, got {brief(given)}")
    call = make_call(given["name"], given["arguments"])
    if "id" in given:
        return {"id": given["id"], **call}
    return call


mistral: Mistral = Mistral()
"""The template of Mistral's seventh tokenizer."""
