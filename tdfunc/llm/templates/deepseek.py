"""The template of DeepSeek-V3."""

import re
from dataclasses import dataclass
from typing import final

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.messages.message import Message, load_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    arguments_text,
    interleave,
    make_call,
    not_rendered,
    plain_text,
    read_until,
    refuse,
    refuse_tools,
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
        found = [Piece(_BEGIN)]
        systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
        for i in systems:
            refuse(conversation, i, "tool_calls", "reasoning_content")
            found += interleave(i, "\n\n" if i != systems[0] else "", plain_text(conversation, i))
        others = [i for i in range(len(messages)) if i not in systems]
        for place, i in enumerate(others):
            role = messages[i]["role"]
            last = i == others[-1]
            before = None
            if place:
                before = messages[others[place - 1]]["role"]
            text = plain_text(conversation, i)
            refuse(conversation, i, "reasoning_content", *(() if role == "assistant" else ("tool_calls",)))
            if role == "assistant":
                found.append(Piece("" if before == "tool" else _ASSISTANT, i))
                found += [Piece(text, i, is_content=True, is_reply=True), *_call_pieces(messages[i], i)]
                if not (open_end and last):
                    found.append(Piece(_END, i, is_reply=True))
            elif role == "tool":
                start = _OUTPUT if before == "tool" else _OUTPUTS + _OUTPUT
                found += interleave(i, start, text, "" if open_end and last else _OUTPUT_END)
                if (last and not open_end) or (not last and messages[others[place + 1]]["role"] != "tool"):
                    found.append(Piece(_OUTPUTS_END, i))
            elif role == "user":
                found += interleave(i, _USER, text)
            else:
                raise UnsupportedError(f"message {i}: the template cannot render the role {role!r}.")
        if generation_prompt and not (others and messages[others[-1]]["role"] == "tool"):
            found.append(Piece(_ASSISTANT, len(messages)))
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        at = 0
        if text.startswith(_BEGIN):
            at = len(_BEGIN)
        turn = _TURN.search(text, at)
        if turn is None:
            start = len(text)
        else:
            start = turn.start()
        if start > at:
            messages.append({"role": "system", "content": text[at:start]})
        at = start
        while at < len(text):
            if text.startswith(_USER, at):
                turn = _TURN.search(text, at + len(_USER))
                if turn is None:
                    stop = len(text)
                else:
                    stop = turn.start()
                messages.append({"role": "user", "content": text[at + len(_USER) : stop]})
                at = stop
            elif text.startswith(_OUTPUTS, at):
                body, after, _ = read_until(text, at + len(_OUTPUTS), _OUTPUTS_END)
                results = _RESULTS.fullmatch(body)
                if results is None:
                    raise not_rendered(text, at, f"results in {_OUTPUT} and {_OUTPUT_END}")
                messages += [{"role": "tool", "content": each} for each in results[1].split(_OUTPUT_END + _OUTPUT)]
                at = after
            elif text.startswith(_ASSISTANT, at) or (messages and messages[-1]["role"] == "tool"):
                begin = at + len(_ASSISTANT) * text.startswith(_ASSISTANT, at)
                body, at, cut = read_until(text, begin, _END)
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
        if not closed or after:
            return unparsed(text, "the calls are not closed" if not closed else "text follows the calls")
        found: list[dict[str, object]] = []
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
        return {"role": "assistant", "tool_calls": found} | ({"content": content} if content else {})


def _call_pieces(message: Message, i: int) -> list[Piece]:
    found: list[Piece] = []
    for n, call in enumerate(message.get("tool_calls") or ()):
        if n:
            start = f"\n{_CALL}function{_NAME}"
        else:
            start = f"{_CALL}function{_NAME}"
        end = f"\n```{_CALL_END}"
        parts = start, call["function"]["name"], "\n```json\n", arguments_text(call), end
        found += interleave(i, *parts, is_reply=True)
    if found:
        found = [Piece(_CALLS, i, is_reply=True), *found, Piece(_CALLS_END, i, is_reply=True)]
    return found


deepseek: DeepSeek = DeepSeek()
"""The template of DeepSeek-V3."""
