"""The template of DeepSeek-V3."""

import re
from dataclasses import dataclass
from typing import Any, final

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.messages.message import Message, load_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    arguments_text,
    interleave,
    make_call,
    make_reply,
    not_rendered,
    plain_text,
    read_until,
    refuse,
    refuse_tools,
    skip,
    unparsed,
)

_BEGIN = "<｜begin▁of▁sentence｜>"
_END = "<｜end▁of▁sentence｜>"
_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"
_CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_NAME = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_OUTPUTS = "<｜tool▁outputs▁begin｜>"
_OUTPUTS_END = "<｜tool▁outputs▁end｜>"
_OUTPUT = "<｜tool▁output▁begin｜>"
_OUTPUT_END = "<｜tool▁output▁end｜>"
_ONE_CALL = re.compile(rf"\n?{_CALL}function{_NAME}([^\n]*)\n```json\n(.*?)\n```{_CALL_END}", re.DOTALL)
_RESULTS = re.compile(f"{_OUTPUT}(.*){_OUTPUT_END}", re.DOTALL)
_TURN = re.compile(f"{_USER}|{_ASSISTANT}|{_OUTPUTS}|{_END}")


@final
@dataclass(frozen=True)
class DeepSeek(AbstractPieceTemplate):
    """DeepSeek-V3: all system messages first, `<｜User｜>`, `<｜Assistant｜>`, and an end after each reply.

    A reply to the results of tools follows them without a header. The template cannot render schemas of tools.

    Source:
        The template of DeepSeek-V3, with the brackets around results closed wherever they end.

    Examples:
        >>> from tdfunc.llm import History, deepseek
        >>> deepseek.render(History.from_chats([{"role": "user", "content": "hi"}]), add_generation_prompt=True)
        '<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>'
    """

    _control = (
        _BEGIN, _END, _USER, _ASSISTANT, _CALLS, _CALLS_END, _CALL, _NAME, _CALL_END, _OUTPUTS, _OUTPUTS_END, _OUTPUT,
        _OUTPUT_END,
    )  # fmt: skip
    _end = _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        refuse_tools(tools, "deepseek")
        found = [Piece(_BEGIN), *_system_pieces(conversation)]
        others = [i for i, message in enumerate(messages) if message["role"] != "system"]
        roles = [messages[i]["role"] for i in others]
        # `before` and `after` are the roles of the messages around one; None at the ends.
        neighbours = zip(others, [None, *roles][:-1], roles, [*roles, None][1:], strict=True)
        for i, before, role, after in neighbours:
            is_open = open_end and i == others[-1]
            text = plain_text(conversation, i)
            refuse(conversation, i, "reasoning_content")
            if role != "assistant":
                refuse(conversation, i, "tool_calls")
            if role == "assistant":
                found += _reply_pieces(messages[i], i, text, follows_tool=before == "tool", is_open=is_open)
            elif role == "tool":
                found += _result_pieces(i, text, is_first=before != "tool", is_last=after != "tool", is_open=is_open)
            elif role == "user":
                found += interleave(i, _USER, text)
            else:
                raise UnsupportedError(f"message {i}: the template cannot render the role {role!r}.")
        if generation_prompt and roles[-1:] != ["tool"]:
            found.append(Piece(_ASSISTANT, len(messages)))
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        at = skip(text, 0, _BEGIN)
        start = _next_turn(text, at)
        if start > at:
            messages.append({"role": "system", "content": text[at:start]})
        at = start
        while at < len(text):
            if text.startswith(_USER, at):
                start = skip(text, at, _USER)
                at = _next_turn(text, start)
                messages.append({"role": "user", "content": text[start:at]})
            elif text.startswith(_OUTPUTS, at):
                results, at = _read_results(text, at)
                messages += results
            elif text.startswith(_ASSISTANT, at) or (messages and messages[-1]["role"] == "tool"):
                body, at, cut = read_until(text, skip(text, at, _ASSISTANT), _END)
                # A header at the end asks for a reply.
                if cut and not body:
                    break
                messages.append(self.parse_reply(body) | cut)
            else:
                raise not_rendered(text, at, f"{_USER} or {_ASSISTANT}")
        return Conversation(messages)

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        content, opened, calls = text.partition(_CALLS)
        if not opened:
            return {"role": "assistant", "content": text}
        body, closed, after = calls.partition(_CALLS_END)
        if not closed:
            return unparsed(text, "the calls are not closed")
        if after:
            return unparsed(text, "text follows the calls")
        found: list[dict[str, Any]] = []
        at = 0
        while at < len(body):
            match = _ONE_CALL.match(body, at)
            if match is None:
                return unparsed(text, f"tool call {len(found)} is not closed: {body[at : at + 40]!r}")
            try:
                found.append(make_call(match[1], load_json(match[2])))
            except ValueError as err:
                return unparsed(text, f"tool call {len(found)}: {err}")
            at = match.end()
        return make_reply(text, found, content)


def _system_pieces(conversation: Conversation) -> list[Piece]:
    """Return the system messages, which come first wherever they are in the conversation."""
    found: list[Piece] = []
    for i, message in enumerate(conversation.messages):
        if message["role"] == "system":
            refuse(conversation, i, "tool_calls", "reasoning_content")
            found += interleave(i, "\n\n" if found else "", plain_text(conversation, i))
    return found


def _reply_pieces(message: Message, i: int, text: str, *, follows_tool: bool, is_open: bool) -> list[Piece]:
    """Return a reply; one to the results of tools follows them without a header."""
    header = "" if follows_tool else _ASSISTANT
    found = [Piece(header, i), Piece(text, i, is_content=True, is_reply=True), *_call_pieces(message, i)]
    if not is_open:
        found.append(Piece(_END, i, is_reply=True))
    return found


def _result_pieces(i: int, text: str, *, is_first: bool, is_last: bool, is_open: bool) -> list[Piece]:
    """Return the result of a tool; brackets surround all results that follow each other."""
    start = _OUTPUTS + _OUTPUT if is_first else _OUTPUT
    end = "" if is_open else _OUTPUT_END
    found = interleave(i, start, text, end)
    if is_last and not is_open:
        found.append(Piece(_OUTPUTS_END, i))
    return found


def _next_turn(text: str, start: int) -> int:
    """Return the place of the next start or end of a turn; the end of the text if there is none."""
    turn = _TURN.search(text, start)
    return len(text) if turn is None else turn.start()


def _read_results(text: str, at: int) -> tuple[list[Message], int]:
    """Return the results of tools in brackets that open at a place, and the place behind the brackets."""
    body, after, _ = read_until(text, skip(text, at, _OUTPUTS), _OUTPUTS_END)
    results = _RESULTS.fullmatch(body)
    if results is None:
        raise not_rendered(text, at, f"results in {_OUTPUT} and {_OUTPUT_END}")
    return [{"role": "tool", "content": each} for each in results[1].split(_OUTPUT_END + _OUTPUT)], after


def _call_pieces(message: Message, i: int) -> list[Piece]:
    calls = message.get("tool_calls")
    if not calls:
        return []
    found = [Piece(_CALLS, i, is_reply=True)]
    for n, call in enumerate(calls):
        start = f"{_CALL}function{_NAME}"
        if n:
            start = "\n" + start
        end = f"\n```{_CALL_END}"
        name = call["function"]["name"]
        found += interleave(i, start, name, "\n```json\n", arguments_text(call), end, is_reply=True)
    return [*found, Piece(_CALLS_END, i, is_reply=True)]


deepseek: DeepSeek = DeepSeek()
"""The template of DeepSeek-V3."""
