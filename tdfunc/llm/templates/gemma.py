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
    not_rendered,
    plain_text,
    refuse,
)

_BEGIN, _START, _END = "<bos>", "<start_of_turn>", "<end_of_turn>"
_HEADER = re.compile(rf"{_START}(user|model)\n")


@final
@dataclass(frozen=True)
class Gemma(AbstractPieceTemplate):
    r"""Gemma: `<start_of_turn>user` or `model`, a line break, the content, `<end_of_turn>`.

    A system message stands at the start of the user's first one, so that it does not parse back. There is no form for
    tools; users and assistants take turns. Contents lose spaces at their ends.

    Source:
        The template of Gemma 3.

    Examples:
        >>> from tdfunc.llm import History, gemma
        >>> gemma.render(History.from_chats([{"role": "user", "content": "hi"}]), add_generation_prompt=True)
        '<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n'
    """

    @property
    def control(self) -> tuple[str, ...]:  # noqa: D102 - as the interface
        return _BEGIN, _START, _END

    @property
    def end(self) -> str:  # noqa: D102 - as the interface
        return _END

    def pieces(  # noqa: D102 - as the interface
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        messages, tools = conversation
        if tools:
            raise UnsupportedError(
                "gemma: the template has no form for tools.", hint="describe them in a system message."
            )
        has_system = bool(messages) and messages[0]["role"] == "system"
        found = [Piece(_BEGIN)]
        for i in range(int(has_system), len(messages)):
            role = "user" if (i - has_system) % 2 == 0 else "assistant"
            refuse(conversation, i, "tool_calls", "reasoning_content")
            if messages[i]["role"] != role:
                raise UnsupportedError(
                    f"{describe(conversation, i)}: users and assistants must take turns.", expected=role
                )
            found.append(Piece(f"{_START}{'user' if role == 'user' else 'model'}\n", i))
            if has_system and i == 1:
                refuse(conversation, 0, "tool_calls", "reasoning_content")
                found += [Piece(plain_text(conversation, 0), 0, is_content=True), Piece("\n\n", 0)]
            is_reply = role == "assistant"
            found.append(Piece(plain_text(conversation, i).strip(), i, is_content=True, is_reply=is_reply))
            if not (open_end and i == len(messages) - 1):
                found += [Piece(_END, i, is_reply=is_reply), Piece("\n", i)]
        if has_system and len(messages) == 1:
            raise UnsupportedError("gemma: a system message stands in the user's first one, which there must be.")
        return [*found, Piece(f"{_START}model\n", len(messages))] if generation_prompt else found

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        messages: list[Message] = []
        at = len(_BEGIN) if text.startswith(_BEGIN) else 0
        while at < len(text):
            header = _HEADER.match(text, at)
            if header is None:
                raise not_rendered(text, at, f"{_START}user or model, and a line break")
            stop = text.find(_END, header.end())
            body = text[header.end() : None if stop < 0 else stop]
            at = len(text) if stop < 0 else stop + len(_END)
            at += text.startswith("\n", at)
            if stop < 0 and header[1] == "model" and not body:
                break
            message: Message = {"role": "user" if header[1] == "user" else "assistant", "content": body}
            messages.append({**message, "is_complete": False} if stop < 0 else message)
        return Conversation(messages)

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        return {"role": "assistant", "content": text}


gemma: Gemma = Gemma()
"""The template of Gemma 1 to 3."""
