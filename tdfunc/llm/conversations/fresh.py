"""The replies of a conversation as a template renders them while each is the last message.

The number of characters that are rendered grows with the length of the conversation, not with its square: see
`windows.py`. The result is compared with renders of the whole conversation and of some of its starts. Where they
differ, as for a template that counts messages, each start is rendered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tdfunc.core.context import cached_property
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.windows import FEW_REPLIES, Window, reply_places, windows_of
from tdfunc.llm.templates.base import AbstractTemplate, Marked

# Up to this number of stretches each of them is compared with a render.
_FEW_STRETCHES = 8


class _Turn(NamedTuple):
    """A reply, and the text around it.

    Attributes:
        place: The place of the reply.
        reply: The reply with its end of turn.
        tail: The reply with all text behind it, while it is the last message.
        fits: The render with the reply starts with its prompt.
        between: The text up to the next reply, or to the end; None if that changes the text before.
    """

    place: int
    reply: Marked
    tail: str
    fits: bool
    between: str | None


@dataclass(frozen=True)
class FreshReplies:
    """The replies of a conversation, each as it is rendered while it is the last message.

    Args:
        template: The template.
        conversation: The conversation.
    """

    template: AbstractTemplate
    conversation: Conversation

    @cached_property
    def places(self) -> list[int]:
        """The places of the replies."""
        return reply_places(self.conversation)

    def reply(self, place: int) -> Marked:
        """Return a reply, from the header of a reply on, with its end of turn."""
        if self._turns is None:
            return self._rendered_reply(place)
        return self._turns[place].reply

    @cached_property
    def breaks(self) -> list[int]:
        """The places of the first reply, and of each reply whose prompt does not start with the turns before."""
        if self._turns is None:
            return self._rendered_breaks()
        found = self.places[:1]
        for turn, following in pairwise([*self.places, len(self.conversation.messages)]):
            has_more = following > turn + 1 or following < len(self.conversation.messages)
            if has_more and self._turns[turn].between is None:
                found.append(following)
        return found

    # -- from windows -------------------------------------------------------------------------------------------

    @cached_property
    def _turns(self) -> dict[int, _Turn] | None:
        """The turns of all replies; None if windows do not show them."""
        if len(self.places) <= FEW_REPLIES:
            return None
        # A template may refuse a window; then the complete renders raise the error, if there is one.
        try:
            turns = self._read_windows(windows_of(self.conversation))
            if turns is None or not self._agrees(turns):
                return None
        except Exception:
            return None
        return {turn.place: turn for turn in turns}

    def _read_windows(self, windows: Sequence[Window]) -> list[_Turn] | None:
        prompts = self.template.texts([each.prompt for each in windows], generation_prompt=True)
        turns = self.template.marked_all([each.turn for each in windows])
        followings = self.template.texts([each.following for each in windows[:-1]], generation_prompt=True)
        followings += self.template.texts([windows[-1].following])
        found: list[_Turn] = []
        for window, prompt, marked, following in zip(windows, prompts, turns, followings, strict=True):
            turn = _read_turn(window.place, prompt, marked, following)
            if turn is None:
                return None
            found.append(turn)
        return found

    def _agrees(self, turns: Sequence[_Turn]) -> bool:
        """Return whether the turns are also in renders of the conversation and of its starts."""
        # Each start has half of the replies of the one before, so that their lengths add up to twice the longest.
        n = len(turns) - 1
        while n > 0:
            if not self._agrees_at(turns, n):
                return False
            n //= 2
        starts = [0, *[n + 1 for n, turn in enumerate(turns[:-1]) if turn.between is None]]
        if len(starts) > _FEW_STRETCHES:
            return True
        stretches = pairwise([*starts, len(turns)])
        return all([self._agrees_along(turns[start:stop]) for start, stop in stretches])

    def _agrees_at(self, turns: Sequence[_Turn], n: int) -> bool:
        turn = turns[n]
        before = turns[n - 1]
        prompt = self._text(turn.place, is_prompt=True)
        if before.fits:
            earlier = self._text(before.place, is_prompt=True) + before.reply.text
            if before.between is None and prompt.startswith(earlier):
                return False
            if before.between is not None and prompt != earlier + before.between:
                return False
        text = self._text(turn.place + 1)
        if turn.fits:
            return text == prompt + turn.tail
        return text.endswith(turn.tail) and not text.startswith(prompt)

    def _agrees_along(self, turns: Sequence[_Turn]) -> bool:
        """Return whether the render of turns that follow each other has them one after the other."""
        parts = [self._text(turns[0].place, is_prompt=True)]
        for turn in turns[:-1]:
            parts += [turn.reply.text, turn.between or ""]
        last = turns[-1]
        composed = "".join([*parts, last.reply.text])
        end = last.place + 1
        if last.place == self.places[-1] and last.between is not None:
            end = len(self.conversation.messages)
            composed += last.between
            return self._text(end) == composed
        return self._text(end).startswith(composed)

    def _text(self, count: int, *, is_prompt: bool = False) -> str:
        """Return the text of the first messages."""
        messages, tools = self.conversation
        return self.template.texts([Conversation(messages[:count], tools)], generation_prompt=is_prompt)[0]

    # -- from the starts of the conversation --------------------------------------------------------------------

    def _marked(self, count: int, *, is_prompt: bool = False) -> Marked:
        messages, tools = self.conversation
        return self.template.marked(Conversation(messages[:count], tools), generation_prompt=is_prompt)

    def _rendered_reply(self, place: int) -> Marked:
        marked = self._marked(place + 1)
        prompt = self._marked(place, is_prompt=True).text
        start, stop, _ = marked.replies[-1]
        return marked.part(len(prompt) if marked.text.startswith(prompt) else start, stop)

    def _rendered_breaks(self) -> list[int]:
        found: list[int] = []
        before: str | None = None
        for place in self.places:
            prompt = self._text(place, is_prompt=True) if place else ""
            if before is None or not prompt.startswith(before):
                found.append(place)
            before = self._text(place + 1)
            if not before.startswith(prompt):
                # The reply's place is not looked for: a template may leave the thinking out of its content.
                before = None
                continue
            spans = self._marked(place + 1).replies
            if spans:
                before = before[: spans[-1].stop]
        count = len(self.conversation.messages)
        if self.places and self.places[-1] < count - 1:
            whole = self._text(count)
            if before is None or not whole.startswith(before):
                found.append(count)
        return found


def _read_turn(place: int, prompt: str, turn: Marked, following: str) -> _Turn | None:
    """Return the last reply of a window; None if it is not found.

    Args:
        place: The place of the reply in the whole conversation.
        prompt: The text of the window before the reply.
        turn: The text of the window with the reply.
        following: The text of the window with the messages that follow.
    """
    if not turn.replies:
        return None
    start, stop, _ = turn.replies[-1]
    fits = turn.text.startswith(prompt)
    if fits:
        start = len(prompt)
    if stop < start:
        return None
    between = None
    if fits and following.startswith(turn.text[:stop]):
        between = following[stop:]
    reply = turn.part(start, stop)
    # A window has other places.
    contents = [span._replace(message=place) for span in reply.contents]
    return _Turn(place, reply._replace(contents=contents), turn.text[start:], fits, between)
