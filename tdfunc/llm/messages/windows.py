"""Short conversations in which each reply of a long one is the last message.

To render each reply with all messages before it takes time that grows with the square of their number. A window has
only the messages before the first reply, the reply before, and the messages between. What a window shows is compared
with renders of the whole conversation, by those who use it.
"""

from typing import NamedTuple

from tdfunc.llm.messages.columns import Conversation

# Up to this number of replies all messages before a reply are rendered.
FEW_REPLIES = 4


class Window(NamedTuple):
    """The window of a reply.

    Attributes:
        place: The place of the reply in the whole conversation.
        prompt: The messages before the reply.
        turn: These with the reply.
        following: These with the messages up to the next reply, or to the end.
        is_last: No reply follows.
    """

    place: int
    prompt: Conversation
    turn: Conversation
    following: Conversation
    is_last: bool


def reply_places(conversation: Conversation) -> list[int]:
    """Return the places of the replies of a conversation."""
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def windows_of(conversation: Conversation) -> list[Window]:
    """Return the window of each reply, in order."""
    messages, tools = conversation
    places = reply_places(conversation)
    ends = [*places[1:], len(messages)]
    found: list[Window] = []
    for n, (place, end) in enumerate(zip(places, ends, strict=True)):
        head = messages[: places[0]]
        # From the reply before; the first has none.
        start = places[max(n - 1, 0)]
        prompt = [*head, *messages[start:place]]
        turn = [*prompt, messages[place]]
        following = [*turn, *messages[place + 1 : end]]
        found.append(
            Window(
                place,
                Conversation(prompt, tools),
                Conversation(turn, tools),
                Conversation(following, tools),
                is_last=n == len(places) - 1,
            )
        )
    return found
