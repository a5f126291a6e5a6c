"""The places of contents and replies in the text of an opaque template, found from further renders.

A conversation is rendered a second time with a marker in place of each content. If the texts between the markers equal
the texts between the contents, the markers show the place of each content. They also prove that the template neither
edits nor drops a content.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tdfunc.core.errors import error
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.message import Message, read_json
from tdfunc.llm.messages.windows import FEW_REPLIES, reply_places, windows_of
from tdfunc.llm.templates.base import Span, describe, strings_in

# First characters of markers: of the private use areas, which no tokenizer or template gives a meaning.
MARKS = ("\ue0b7", "\uf2a1", "\U000f3c09")
_OPEN = "\ue0b8"
# A string in a JSON text, and the colon behind a key.
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')


class Alignment:
    """A conversation with markers in place of contents, and the text that each marker replaces.

    Args:
        conversation: The messages.
        control: Control strings.
        everything: Mark all texts with a control string, including tools; otherwise only the texts of assistants.
    """

    def __init__(self, conversation: Conversation, control: tuple[str, ...] = (), *, everything: bool = False) -> None:
        texts = "".join(strings_in(conversation._asdict()))
        self.mark: str | None = next((mark for mark in MARKS if mark not in texts), None)
        if self.mark is None:
            raise error(ValueError, "a content has every character by which contents are found.", got=str(MARKS))
        # The text that each marker stands for, in the forms in which it was given.
        self.originals: list[tuple[str, ...]] = []
        self.owners: list[int | None] = []
        self._control = control if everything else None
        messages = [self._marked_message(i, message) for i, message in enumerate(conversation.messages)]
        tools = conversation.tools and [self._deep(tool, None, False) for tool in conversation.tools]
        self.marked: Conversation = Conversation(messages, tools)

    def _marker(self, text: str, owner: int | None) -> str:
        self.originals.append((text,))
        self.owners.append(owner)
        return f"{self.mark}{len(self.originals) - 1}{_OPEN}"

    def _is_forged(self, text: str) -> bool:
        return self._control is not None and any([mark in text for mark in self._control])

    # Any: a value of a message, which keeps its structure.
    def _deep(self, value: Any, owner: int | None, is_marked: bool) -> Any:
        if isinstance(value, str):
            if is_marked or self._is_forged(value):
                return self._marker(value, owner)
            return value
        if isinstance(value, list):
            return [self._deep(item, owner, is_marked) for item in value]
        if isinstance(value, dict):
            return {self._deep(key, owner, False): self._deep(item, owner, is_marked) for key, item in value.items()}
        return value

    def _marked_message(self, i: int, message: Message) -> Message:
        is_reply = message["role"] == "assistant" and self._control is None
        marked: Message = dict(message)
        for name, value in message.items():
            if name == "tool_calls":
                marked[name] = [self._marked_call(i, call, is_reply) for call in value]
            elif name == "content" and isinstance(value, list):
                # Several parts may make a control string together.
                is_marked = is_reply or self._control is not None
                marked[name] = [self._marked_part(i, part, is_marked) for part in value]
            elif name in ("content", "reasoning_content"):
                # Templates test for blank texts, and a marker is none; without calls a content is needed for its place.
                is_needed = name == "content" and not message.get("tool_calls")
                marked[name] = self._deep(value, i, is_reply and (is_needed or _has_text(value)))
            elif name in ("name", "tool_call_id", "tool_responses"):
                marked[name] = self._deep(value, i, False)
        return marked

    def _marked_part(self, i: int, part: dict[str, Any], is_marked: bool) -> dict[str, Any]:
        if isinstance(part.get("text"), str):
            return {**part, "text": self._deep(part["text"], i, is_marked)}
        return part

    def _marked_call(self, i: int, call: dict[str, Any], is_reply: bool) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        name = self._deep(function["name"], i, is_reply)
        if isinstance(arguments, str) and isinstance(read_json(arguments), (dict, list)):
            # Its spaces, numbers and escapes stay: a template may write the text as it is.
            given = _JSON_STRING.sub(lambda match: self._marked_string(match, i, is_reply), arguments)
        else:
            given = self._deep(arguments, i, is_reply)
        return {**call, "function": {**function, "name": name, "arguments": given}}

    def _marked_string(self, match: "re.Match[str]", i: int, is_reply: bool) -> str:
        """Return a string in a JSON text with a marker inside, where it is to have one."""
        inside, colon = match.groups()
        text = json.loads(f'"{inside}"')
        marked = self._deep(text, i, is_reply and not colon)
        if marked == text:
            return match[0]
        self.originals[-1] = text, inside
        return f'"{marked}"{colon or ""}'


def _has_text(value: str | None) -> bool:
    return bool(value and value.strip())


def find_contents(text: str, marked: str, alignment: Alignment) -> list[Span]:
    """Return the span of each marker's content in the real text, in the order of the text.

    Raises:
        ValueError: The texts between the markers differ from those between the contents.
    """
    places = list(re.finditer(rf"{alignment.mark}(\d+){_OPEN}", marked))
    # The number of the marker in each place.
    numbers = [int(place[1]) for place in places]
    stops = [place.end() for place in places]
    starts = [place.start() for place in places]
    between = [marked[at:start] for at, start in zip([0, *stops], [*starts, len(marked)], strict=True)]
    spans = _align(text, between, [_forms(alignment.originals[n]) for n in numbers])
    if spans is None:
        raise error(
            ValueError,
            "the template edits a content, so that its place in the text cannot be found.",
            expected=repr(marked[:300]),
            got=repr(text[:300]),
            hint="use one of tdfunc.llm.TEMPLATES, or a template with {% generation %} for masks.",
        )
    written = set(numbers)
    for n, (forms, owner) in enumerate(zip(alignment.originals, alignment.owners, strict=True)):
        # The texts of messages may be left out: `Coverage` checks them.
        if n not in written and owner is None and forms[0].strip():
            raise error(ValueError, "the template drops a text of the tools.", got=repr(forms[0])[:200])
    return [Span(*span, alignment.owners[n]) for span, n in zip(spans, numbers, strict=True)]


def _align(text: str, between: Sequence[str], choices: Sequence[Sequence[str]]) -> list[tuple[int, int]] | None:
    """Return the span of a choice in each place of a text, or None if there are none.

    Of several alignments it is the one that a regular expression of the choices finds. All of them are followed at
    once: contents of spaces, side by side, have more than can be tried one after the other.

    Args:
        text: The complete text.
        between: The texts before, between and after the places.
        choices: The possible texts in each place, the first preferred.
    """
    begin = len(between[0])
    if not text.startswith(between[0]):
        return None
    # A step is a choice and the text that follows it. It leads from the starts of one step to the starts of the next.
    steps = list(zip(choices, between[1:], strict=True))
    reached = [{begin}]
    for forms, following in steps:
        reached.append(_ends(text, reached[-1], forms, following))
    if len(text) not in reached[-1]:
        return None
    # Backwards: the starts of each step from which a way leads to the end.
    leading = [{len(text)}]
    for starts, (forms, following) in zip(reversed(reached[:-1]), reversed(steps), strict=True):
        ends = leading[-1]
        leading.append({start for start in starts if _preferred(text, start, forms, following, ends) is not None})
    leading.reverse()
    # Forwards: the preferred way.
    at = begin
    spans: list[tuple[int, int]] = []
    for (forms, following), ends in zip(steps, leading[1:], strict=True):
        form = _preferred(text, at, forms, following, ends)
        assert form is not None
        spans.append((at, at + len(form)))
        at += len(form) + len(following)
    return spans


def _end(text: str, start: int, form: str, following: str) -> int:
    """Return the place after a form and the text that follows it, or -1 if they are not at this place."""
    middle = start + len(form)
    is_here = text.startswith(form, start) and text.startswith(following, middle)
    if is_here:
        return middle + len(following)
    return -1


def _ends(text: str, starts: set[int], forms: Sequence[str], following: str) -> set[int]:
    """Return the places to which a step leads from any of the starts."""
    found: set[int] = set()
    for start in starts:
        found.update([_end(text, start, form, following) for form in forms])
    found.discard(-1)
    return found


def _preferred(text: str, start: int, forms: Sequence[str], following: str, ends: set[int]) -> str | None:
    """Return the first form with which a step leads from a start to one of the ends, or None if there is none."""
    for form in forms:
        if _end(text, start, form, following) in ends:
            return form
    return None


def _forms(originals: Sequence[str]) -> list[str]:
    """Return the forms in which a template may write a text: as it was given, trimmed, or inside JSON."""
    found: list[str] = []
    for text in originals:
        trimmed = [
            text, text.strip(), text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"), text.lstrip(), text.rstrip()
        ]  # fmt: skip
        found += trimmed
        found += [json.dumps(each, ensure_ascii=False)[1:-1] for each in trimmed]
    return list(dict.fromkeys(found))


def has_reply(conversation: Conversation) -> bool:
    """Return whether a conversation has a reply."""
    return any([message["role"] == "assistant" for message in conversation.messages])


class ReplySearch(NamedTuple):
    """The search for replies: each from its generation prompt to its end of turn, which is included.

    Attributes:
        template: A template with a `header`.
        generation_prompt: As its `texts` takes it.
        open_end: As its `texts` takes it.
    """

    # Any: an opaque template, from a higher layer.
    template: Any
    generation_prompt: bool
    open_end: bool

    def find(self, conversations: Sequence[Conversation], texts: Sequence[str]) -> list[list[Span]]:
        """Return the spans of the replies of each conversation.

        Raises:
            ValueError: A reply cannot be found.
        """
        alignments = [Alignment(each) for each in conversations]
        options = {"generation_prompt": self.generation_prompt, "open_end": self.open_end}
        try:
            marked: Sequence[str | None] = self.template.texts([each.marked for each in alignments], **options)
        # A template in Jinja may raise any error.
        except Exception:
            marked = [None] * len(texts)
        found: list[list[Span]] = []
        for conversation, text, alignment, other in zip(conversations, texts, alignments, marked, strict=True):
            spans = None
            if other is not None:
                spans = self._by_markers(conversation, text, other, alignment, strict=True)
            if spans is None:
                spans = self._by_prefixes(conversation, text)
            if spans is None:
                other = self.template.texts([alignment.marked], **options)[0]
                spans = self._by_markers(conversation, text, other, alignment, strict=False)
                assert spans is not None
            found.append(spans)
        return found

    def _by_markers(
        self, conversation: Conversation, text: str, marked: str, alignment: Alignment, *, strict: bool
    ) -> list[Span] | None:
        """Return the spans around the contents of replies; if `strict`, None where a header or content is not found."""
        try:
            contents = find_contents(text, marked, alignment)
        except ValueError:
            if strict:
                return None
            raise
        replies: list[Span] = []
        for i in reply_places(conversation):
            own = [n for n, span in enumerate(contents) if span.message == i]
            if not own and not strict:
                raise error(
                    ValueError,
                    f"{describe(conversation, i)} has no place in the text: the template drops it.",
                    got=repr(text[:300]),
                )
            reply = self._around(text, contents, own, strict=strict) if own else None
            if reply is None:
                return None
            replies.append(reply)
        return replies

    def _around(self, text: str, contents: Sequence[Span], own: Sequence[int], *, strict: bool) -> Span | None:
        """Return the reply around its contents, from behind its header to its end of turn.

        Without a header it starts with its first content; if `strict`, it is None.

        Args:
            text: The text.
            contents: The spans of all contents.
            own: The places in `contents` of the reply's, without gaps.
            strict: The reply must have a header.
        """
        first = own[0]
        last = own[-1]
        start = contents[first].start
        stop = contents[last].stop
        # The reply is between the contents of other messages.
        before = contents[first - 1].stop if first else 0
        after = contents[last + 1].start if last + 1 < len(contents) else len(text)
        header = self.template.header
        header_at = text.rfind(header, before, start) if header else -1
        if header_at != -1:
            start = header_at + len(header)
        elif strict:
            return None
        # The end of an inner turn is found by further renders, where it is another one.
        end = self.template.end
        if end not in text[stop:after]:
            end = self.template.inner_end
        end_at = text.find(end, stop, after) if end else -1
        if end_at != -1:
            stop = end_at + len(end)
        return Span(start, stop, contents[first].message)

    def _by_prefixes(self, conversation: Conversation, text: str) -> list[Span] | None:
        """Return the spans where each render is a prefix of the next; None where one is not."""
        if len(reply_places(conversation)) > FEW_REPLIES:
            spans = self._by_windows(conversation, text)
            if spans is not None:
                return spans
        messages, tools = conversation
        replies: list[Span] = []
        for i in reply_places(conversation):
            is_open = self.open_end and i == len(messages) - 1
            try:
                prompt = self.template.texts([Conversation(messages[:i], tools)], generation_prompt=True)[0]
                turn = self.template.texts([Conversation(messages[: i + 1], tools)], open_end=is_open)[0]
            # For example for a conversation that ends with a tool call.
            except Exception:
                return None
            is_prefix = len(prompt) < len(turn) and turn.startswith(prompt) and text.startswith(turn)
            if not is_prefix:
                return None
            replies.append(Span(len(prompt), self._end_of_turn(turn, len(prompt)), i))
        return replies

    def _end_of_turn(self, turn: str, start: int) -> int:
        """Return the place behind the end of turn of a reply that starts at a place."""
        end = self.template.end
        ended = turn.rfind(end, start) if end else -1
        if ended != -1:
            return ended + len(end)
        return len(turn)

    def _by_windows(self, conversation: Conversation, text: str) -> list[Span] | None:
        """Return the spans of replies whose windows follow each other in the text; None if they do not."""
        windows = windows_of(conversation)
        is_open = self.open_end and windows[-1].place == len(conversation.messages) - 1
        try:
            prompts = self.template.texts([each.prompt for each in windows], generation_prompt=True)
            turns = self.template.texts([each.turn for each in windows[:-1]])
            turns += self.template.texts([windows[-1].turn], open_end=is_open)
            followings = self.template.texts([each.following for each in windows[:-1]], generation_prompt=True)
        # For example for a window that ends with a tool call.
        except Exception:
            return None
        at = len(prompts[0])
        if not text.startswith(prompts[0]):
            return None
        replies: list[Span] = []
        for window, prompt, turn, following in zip(windows, prompts, turns, [*followings, ""], strict=True):
            # The window may have another length before the reply than the text.
            moved = at - len(prompt)
            reply = turn[len(prompt) :]
            if not reply or not turn.startswith(prompt) or not text.startswith(reply, at):
                return None
            replies.append(Span(at, self._end_of_turn(turn, len(prompt)) + moved, window.place))
            at += len(reply)
            if window.is_last:
                break
            between = following[len(turn) :]
            if not following.startswith(turn) or not text.startswith(between, at):
                return None
            at += len(between)
        return replies
