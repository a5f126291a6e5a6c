"""The template of Mistral's instruct models since November 2024 (their seventh tokenizer)."""

import re
from dataclasses import dataclass
from typing import Any, final

from tdfunc.core.errors import UnsupportedError, error
from tdfunc.llm.messages.message import Message, load_json, read_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    interleave,
    make_call,
    not_rendered,
    plain_text,
    read_until,
    refuse,
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
        last_user = max([i for i, message in enumerate(messages) if message["role"] == "user"], default=-1)
        if tools and last_user < 0:
            raise UnsupportedError("mistral: the tools must come with a message of the user, which follows them.")
        for i, message in enumerate(messages):
            role = message["role"]
            text = plain_text(conversation, i)
            refuse(conversation, i, "reasoning_content", *(() if role == "assistant" else ("tool_calls",)))
            close = not (open_end and i == len(messages) - 1)
            if role == "assistant":
                found.append(Piece(text, i, is_content=True, is_reply=True))
                found += _call_pieces(message, i)
                found.append(Piece(_END if close else "", i, is_reply=True))
            elif role == "tool":
                call = message.get("tool_call_id") or ""
                end = _RESULT_END if close else ""
                found += interleave(i, _RESULT, call, _RESULT_TEXT, text, end)
            elif role in ("user", "system"):
                if tools and i == last_user:
                    found += interleave(i, _TOOLS, to_json(tools), _TOOLS_END)
                start = _USER if role == "user" else _SYSTEM
                found += interleave(i, start, text, _BRACKETS[start] if close else "")
            else:
                raise UnsupportedError(f"message {i}: the template cannot render the role {role!r}.")
        # A reply follows without a header.
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        tools: list[Any] | None = None
        at = 0
        if text.startswith(_BEGIN):
            at = len(_BEGIN)
        while at < len(text):
            start = _OPEN.match(text, at)
            if start is None:
                body, at, message = read_until(text, at, _END)
                messages.append(self.parse_reply(body) | message)
                continue
            body, at, message = read_until(text, start.end(), _BRACKETS[start[0]])
            if start[0] == _TOOLS:
                tools = read_json(body)
                if not isinstance(tools, list):
                    raise error(ValueError, "parse: the tools must be a list in JSON.", got=repr(body[:200]))
                continue
            if start[0] == _RESULT:
                call, found, content = body.partition(_RESULT_TEXT)
                if not found:
                    raise not_rendered(text, start.start(), f"{_RESULT}, an id, {_RESULT_TEXT}")
                message |= {"role": "tool", "content": content, **({"tool_call_id": call} if call else {})}
            else:
                message |= {"role": "user" if start[0] == _USER else "system", "content": body}
            messages.append(message)
        return Conversation(messages, tools)

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        content, opened, body = text.partition(_CALLS)
        if not opened:
            return {"role": "assistant", "content": text}
        try:
            calls = [_read_call(call) for call in load_json(body)]
        except (ValueError, TypeError) as err:
            return unparsed(text, f"the calls must be a list of objects in JSON: {err}")
        return {"role": "assistant", "tool_calls": calls} | ({"content": content} if content else {})


def _call_pieces(message: Message, i: int) -> list[Piece]:
    given: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        one = {"name": function["name"], "arguments": read_json(function["arguments"])}
        given.append(one | ({"id": call["id"]} if call.get("id") else {}))
    if given:
        return interleave(i, _CALLS, to_json(given), is_reply=True)
    return []


def _read_call(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not {"name", "arguments"} <= given.keys() <= {"name", "arguments", "id"}:
        raise ValueError(f"a call has a name, arguments and an id, got {given!r}")
    call = make_call(given["name"], given["arguments"])
    if "id" in given:
        return {"id": given["id"], **call}
    return call


mistral: Mistral = Mistral()
"""The template of Mistral's seventh tokenizer."""
