"""The template of Gemma 1 to 3."""

import re
from dataclasses import dataclass
from typing import final

from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.messages.message import Message
from tdfunc.llm.templates.base import (
    AbstractPieceTemplate,
    Conversation,
    Piece,
    describe,
    interleave,
    plain_text,
    read_turns,
    refuse,
    refuse_tools,
    skip,
)

_BEGIN = "<bos>"
_START = "<start_of_turn>"
_END = "<end_of_turn>"
_HEADER = re.compile(rf"{_START}(user|model)\n")


@final
@dataclass(frozen=True)
class Gemma(AbstractPieceTemplate):
    r"""Gemma: `<start_of_turn>user` or `model`, a line break, the content, `<end_of_turn>`.

    A system message is written at the start of the user's first message, so that it does not parse back. The template
    cannot render tools. Users and assistants take turns. Spaces around contents are removed.

    Source:
        The template of Gemma 3.

    Examples:
        >>> from tdfunc.llm import History, gemma
        >>> gemma.render(History.from_chats([{"role": "user", "content": "hi"}]), add_generation_prompt=True)
        '<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n'
    """

    _control = _BEGIN, _START, _END
    _end = _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        refuse_tools(tools, "gemma")
        has_system = bool(messages) and messages[0]["role"] == "system"
        first = int(has_system)
        found = [Piece(_BEGIN)]
        for i in range(first, len(messages)):
            is_reply = (i - first) % 2 == 1
            role = "assistant" if is_reply else "user"
            refuse(conversation, i, "tool_calls", "reasoning_content")
            if messages[i]["role"] != role:
                raise UnsupportedError(
                    f"{describe(conversation, i)}: users and assistants do not take turns.", expected=role
                )
            found.append(Piece(f"{_START}model\n" if is_reply else f"{_START}user\n", i))
            if has_system and i == first:
                refuse(conversation, 0, "tool_calls", "reasoning_content")
                found += interleave(0, "", plain_text(conversation, 0), "\n\n")
            found.append(Piece(plain_text(conversation, i).strip(), i, is_content=True, is_reply=is_reply))
            if not (open_end and i == len(messages) - 1):
                found += [Piece(_END, i, is_reply=is_reply), Piece("\n", i)]
        if has_system and len(messages) == 1:
            raise UnsupportedError("gemma: a system message needs a message of the user, which contains it.")
        if generation_prompt:
            found.append(Piece(f"{_START}model\n", len(messages)))
        return found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        at = skip(text, 0, _BEGIN)
        expected = f"{_START}user or model, and a line break"
        turns = read_turns(text, at, _HEADER, _END, gap="\n", expected=expected)
        roles = {"user": "user", "model": "assistant"}
        return Conversation([{"role": roles[role], "content": body} | cut for role, body, cut in turns])

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        return {"role": "assistant", "content": text}


gemma: Gemma = Gemma()
"""The template of Gemma 1 to 3."""
