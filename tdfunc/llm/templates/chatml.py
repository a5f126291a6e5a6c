"""ChatML, with the tool calls of Hermes and the thinking of Qwen: the templates `chatml` and `qwen`."""

import re
from dataclasses import dataclass
from typing import Any, final

from tdfunc.core.errors import error
from tdfunc.llm.messages.message import Message, load_json
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    arguments_text,
    interleave,
    make_call,
    plain_text,
    read_turns,
    refuse,
    to_json,
    unparsed,
)

_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_SPACE = re.compile(r"\s*")
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>(?:\n|$)", re.DOTALL)
_START = "<|im_start|>"
_END = "<|im_end|>"
_HEADER = re.compile(rf"{re.escape(_START)}([^\n]*)\n")


@final
@dataclass(frozen=True)
class ChatML(AbstractPieceTemplate):
    """ChatML: `<|im_start|>role`, a line break, the content, `<|im_end|>`.

    Thinking is written in `<think>`, calls in `<tool_call>`, and their results in `<tool_response>` of a user's turn.

    Args:
        drop_thinking: Leave out the thinking of turns before the last query of the user, and write an empty one for a
            last reply without thinking, as Qwen3 does. A longer conversation then changes earlier turns: see
            `is_append_only`.

    Source:
        The template of Qwen3, with the tool calls of Hermes 2 Pro.

    Examples:
        >>> from tdfunc.llm import History, qwen
        >>> chat = [
        ...     {"role": "user", "content": "2+2?"},
        ...     {"role": "assistant", "reasoning_content": "4", "content": "4"},
        ... ]
        >>> print(qwen.render(History.from_chats(chat)))
        <|im_start|>user
        2+2?<|im_end|>
        <|im_start|>assistant
        <think>
        4
        </think>
        <BLANKLINE>
        4<|im_end|>
        <BLANKLINE>
    """

    drop_thinking: bool = False
    _control = _START, _END
    _end = _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        found: list[Piece] = []
        queries = [i for i, message in enumerate(messages) if _is_query(message)]
        last_query = queries[-1] if queries else len(messages) - 1
        if tools and (not messages or messages[0]["role"] != "system"):
            found += [Piece(f"{_START}system\n"), *_tool_pieces(tools, None), Piece(f"{_END}\n")]
        for i, message in enumerate(messages):
            role = message["role"]
            is_open = open_end and i == len(messages) - 1
            if role == "tool":
                found += _response(conversation, i, is_open=is_open)
                continue
            is_reply = role == "assistant"
            found += interleave(i, _START, role, "\n")
            if is_reply:
                found += self._reply(conversation, i, after_query=i > last_query)
            else:
                refuse(conversation, i, "tool_calls", "reasoning_content")
                found.append(Piece(plain_text(conversation, i), i, is_content=True))
            if i == 0 and role == "system" and tools:
                found += [Piece("\n\n", i), *_tool_pieces(tools, i)]
            if not is_open:
                found += [Piece(_END, i, is_reply=is_reply), Piece("\n", i)]
        if generation_prompt:
            found.append(Piece(f"{_START}assistant\n", len(messages)))
        return found

    def _reply(self, conversation: Conversation, i: int, *, after_query: bool) -> list[Piece]:
        message = conversation.messages[i]
        text = plain_text(conversation, i)
        thinking = message.get("reasoning_content") or ""
        if self.drop_thinking:
            if not thinking and "</think>" in text:
                thinking, text = _split_thinking(text)
            is_last = i == len(conversation.messages) - 1
            # The template of Qwen3 asks before it strips: a thinking of line breaks is shown as an empty one.
            is_shown = after_query and (is_last or bool(thinking))
            if is_shown:
                thinking = thinking.strip("\n")
                text = text.lstrip("\n")
        else:
            is_shown = bool(thinking)
        found: list[Piece] = []
        if is_shown:
            found += interleave(i, "<think>\n", thinking, "\n</think>\n\n", is_reply=True)
        found.append(Piece(text, i, is_content=True, is_reply=True))
        for n, call in enumerate(message.get("tool_calls") or ()):
            start = '<tool_call>\n{"name": "'
            if n or text:
                start = "\n" + start
            name = call["function"]["name"]
            arguments = arguments_text(call)
            found += interleave(i, start, name, '", "arguments": ', arguments, "}\n</tool_call>", is_reply=True)
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        tools = None
        expected = f"{_START}role and a line break"
        for role, body, cut in read_turns(text, 0, _HEADER, _END, gap="\n", expected=expected):
            if role == "system" and not messages and _TOOLS in body and body.endswith(_CALLS):
                body, _, listed = body.partition(_TOOLS)
                tools = _read_tools(listed)
                if not body:
                    continue
                body = body.removesuffix("\n\n")
            messages += [each | cut for each in self._read_turn(role, body)]
        return Conversation(messages, tools)

    def _read_turn(self, role: str, body: str) -> list[Message]:
        if role == "assistant":
            return [self.parse_reply(body)]
        # Without an end each start would be searched for one.
        if role == "user" and _is_response(body):
            responses = [match[1] for match in _RESPONSE.finditer(body)]
            joined = "\n".join([f"<tool_response>\n{each}\n</tool_response>" for each in responses])
            if responses and joined == body:
                return [{"role": "tool", "content": each} for each in responses]
        return [{"role": role, "content": body}]

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        thinking = ""
        rest = text
        if text.lstrip().startswith("<think>") or "</think>" in text:
            before, closed, rest = text.partition("</think>")
            if not closed:
                return unparsed(text, "the thinking is not closed")
            lead, started, inside = before.partition("<think>")
            if started and lead.strip():
                return unparsed(text, "there is text before the thinking")
            # The prompt may have started it.
            thinking = inside if started else before
            thinking = thinking.strip("\n")
            rest = rest.lstrip("\n")
        content, opened, calls = rest.partition(_CALL)
        message: Message = {"role": "assistant"}
        if opened:
            try:
                message["tool_calls"] = _read_calls(opened + calls)
            except ValueError as err:
                return unparsed(text, err)
            content = content.removesuffix("\n")
        if thinking:
            message["reasoning_content"] = thinking
        if content or not opened:
            message["content"] = content
        return message


def _is_response(content: str) -> bool:
    """Return whether a content may be the results of tools, which are written as a turn of the user."""
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")


def _is_query(message: Message) -> bool:
    if message["role"] != "user":
        return False
    content = message.get("content")
    return not (isinstance(content, str) and _is_response(content))


def _response(conversation: Conversation, i: int, *, is_open: bool) -> list[Piece]:
    """Return the pieces of a result; results that follow each other are in one turn of the user."""
    messages = conversation.messages
    before = messages[i - 1]["role"] if i else None
    after = messages[i + 1]["role"] if i + 1 < len(messages) else None
    lead = "" if before == "tool" else f"{_START}user"
    found = interleave(i, f"{lead}\n<tool_response>\n", plain_text(conversation, i), "\n</tool_response>")
    if after != "tool" and not is_open:
        found.append(Piece(f"{_END}\n", i))
    return found


def _split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking that is written inside a content, and the rest, as the template of Qwen3 splits them."""
    parts = text.split("</think>")
    thinking = parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return thinking, parts[-1].lstrip("\n")


def _tool_pieces(tools: list[object], i: int | None) -> list[Piece]:
    found = [Piece(_TOOLS, i)]
    for tool in tools:
        found += [Piece("\n", i), Piece(to_json(tool), i, is_content=True)]
    return [*found, Piece(_CALLS, i)]


def _read_tools(text: str) -> list[Any]:
    """Return the tools in a text of lines, each behind a line break, with the text that follows them."""
    lines = text.removesuffix(_CALLS).split("\n")[1:]
    try:
        return [load_json(line) for line in lines]
    except ValueError as err:
        raise error(ValueError, f"parse: the tools are not JSON: {err}.", got=repr(text[:200])) from err


def _read_calls(text: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        # Not by one pattern: it would try each place in a run of spaces as the end of the call.
        stop = text.find(_CALL_END, at)
        if stop == -1 or not text.startswith(_CALL, at):
            raise ValueError(f"tool call {len(calls)} is not closed, or text follows it: {text[at : at + 40]!r}")
        try:
            given = load_json(text[at + len(_CALL) : stop].strip())
        except ValueError as err:
            raise ValueError(f"tool call {len(calls)}: {err}") from err
        if not isinstance(given, dict) or not {"name"} <= given.keys() <= {"name", "arguments"}:
            raise ValueError(f"tool call {len(calls)} is not an object with a name and arguments")
        calls.append(make_call(given["name"], given.get("arguments", {})))
        after = _SPACE.match(text, stop + len(_CALL_END))
        assert after is not None
        at = after.end()
    return calls


chatml: ChatML = ChatML()
"""ChatML that keeps the thinking of every turn."""

qwen: ChatML = ChatML(drop_thinking=True)
"""The template of Qwen3."""
