"""The turns of a template, learned from its renders, with which its texts are parsed."""

import re
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from tdfunc.llm.messages.message import Message
from tdfunc.llm.templates.markers import MARKS

_PLACES = [f"{MARKS[0]}{i}{MARKS[1]}" for i in range(4)]


class Turns(NamedTuple):
    """The texts around the contents of conversations in which users and assistants take turns.

    Attributes:
        first: The text before a first message of the user.
        system: The texts before and after a system message at the start; None if the template cannot render one.
        to_reply: The text between a user and the assistant.
        to_user: The text between the assistant and a user.
        ends: The texts that may follow the last message, by its role.
    """

    first: str
    system: tuple[str, str] | None
    to_reply: str
    to_user: str
    ends: dict[str, tuple[str, ...]]

    def readings(self, text: str) -> list[list[Message]]:
        """Return the possible conversations of a text, whose end may be missing, the likeliest first."""
        found: list[list[Message]] = []
        if text.startswith(self.first):
            found.append(self._read(text.removeprefix(self.first)))
        if self.system is None:
            return found
        before, behind = self.system
        if text.startswith(before):
            content, closed, rest = text.removeprefix(before).partition(behind)
            if closed:
                with_system: list[Message] = [{"role": "system", "content": content}, *self._read(rest)]
                # Where the text begins alike with and without a system message, it is likelier without.
                found.insert(0 if len(before) > len(self.first) else len(found), with_system)
        return found

    def _read(self, text: str) -> list[Message]:
        messages: list[Message] = []
        # By turns: the role, and the text between it and the other role.
        turns = cycle([("user", self.to_reply), ("assistant", self.to_user)])
        role, between = next(turns)
        content, found, rest = text.partition(between)
        while found:
            messages.append({"role": role, "content": content})
            role, between = next(turns)
            content, found, rest = rest.partition(between)
        # Nothing behind a header is not a message yet.
        if content:
            messages.append(self._last(role, content))
        return messages

    def _last(self, role: str, content: str) -> Message:
        """Return the last message of a text, with its end or without."""
        for end in self.ends[role]:
            if content.endswith(end):
                return {"role": role, "content": content.removesuffix(end)}
        return {"role": role, "content": content, "is_complete": False}


def learn_turns(render: Callable[[list[Message], bool], str]) -> Turns | None:
    """Return the turns of a template, found by rendering markers; None if the texts around them are not fixed.

    Args:
        render: The template: the text of a conversation, with the header of a reply or without.
    """

    def around(*roles: str, header: bool = False) -> Sequence[str]:
        """Return the texts around the contents of messages with these roles; none if a content is not in the text."""
        places = _PLACES[: len(roles)]
        chat: list[Message] = [{"role": role, "content": place} for role, place in zip(roles, places, strict=True)]
        pattern = "(.*)".join(["", *map(re.escape, places), ""])
        match = re.fullmatch(pattern, render(chat, header), re.DOTALL)
        return match.groups() if match else ()

    # A template in Jinja may raise any error.
    try:
        first, to_reply, to_user, again, end = around("user", "assistant", "user", "assistant")
        asked = around("user")[1]
        header = around("user", header=True)[1]
        ends = {"user": (header, asked, asked.rstrip()), "assistant": (end, end.rstrip())}
    except Exception:
        return None
    try:
        before, behind, _ = around("system", "user")
        system = (before, behind)
    except Exception:
        system = None
    if to_reply == again and to_reply and to_user:
        return Turns(first, system, to_reply, to_user, ends)
    return None
