"""The turns of a template, learned from its renders, with which its texts are parsed."""

import re
from collections.abc import Callable, Sequence
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
        found = []
        if text.startswith(self.first):
            found = [self._read(text.removeprefix(self.first))]
        if self.system is not None and text.startswith(self.system[0]):
            content, closed, rest = text.removeprefix(self.system[0]).partition(self.system[1])
            if closed:
                # Where the text begins alike with and without one, it is without.
                if len(self.system[0]) > len(self.first):
                    at = 0
                else:
                    at = len(found)
                found.insert(at, [{"role": "system", "content": content}, *self._read(rest)])
        return found

    def _read(self, text: str) -> list[Message]:
        role = "user"
        other = "assistant"
        content, found, rest = text.partition(self.to_reply)
        messages: list[Message] = []
        while found:
            messages.append({"role": role, "content": content})
            role, other = other, role
            content, found, rest = rest.partition(self.to_user if role == "assistant" else self.to_reply)
        # Nothing behind a header is not a message yet.
        if content:
            tail = next((each for each in self.ends[role] if content.endswith(each)), None)
            last: Message = {"role": role, "content": content.removesuffix(tail or "")}
            messages.append(last if tail is not None else {**last, "is_complete": False})
        return messages


def learn_turns(render: Callable[[list[Message], bool], str]) -> Turns | None:
    """Return the turns of a template, found by rendering markers; None if the texts around them are not fixed.

    Args:
        render: The template: the text of a conversation, with the header of a reply or without.
    """

    def around(*roles: str, header: bool = False) -> Sequence[str]:
        places = _PLACES[: len(roles)]
        text = render([{"role": role, "content": place} for role, place in zip(roles, places, strict=True)], header)
        match = re.fullmatch("(.*)".join(["", *map(re.escape, places), ""]), text, re.DOTALL)
        if match:
            return match.groups()
        return ()

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
