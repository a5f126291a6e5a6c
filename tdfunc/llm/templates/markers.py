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
            raise error(ValueError, "A content has every character by which contents are found.", got=str(MARKS))
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

    # Any: a value of a message, which keeps its structure.
    def _deep(self, value: Any, owner: int | None, is_marked: bool) -> Any:
        if isinstance(value, str):
            forged = self._control is not None and any([mark in value for mark in self._control])
            if is_marked or forged:
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
                marked[name] = [
                    # Several parts may make a control string together.
                    {**part, "text": self._deep(part["text"], i, is_reply or self._control is not None)}
                    if isinstance(part.get("text"), str)
                    else part
                    for part in value
                ]
            elif name in ("content", "reasoning_content"):
                # Templates test for blank texts, and a marker is none; without calls a content is needed for its place.
                is_needed = name == "content" and not message.get("tool_calls")
                marked[name] = self._deep(value, i, is_reply and (is_needed or bool(value and value.strip())))
            elif name in ("name", "tool_call_id", "tool_responses"):
                marked[name] = self._deep(value, i, False)
        return marked

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


def find_contents(text: str, marked: str, alignment: Alignment) -> list[Span]:
    """Return the span of each marker's content in the real text, in the order of the text.

    Raises:
        ValueError: The texts between the markers differ from those between the contents.
    """
    places = list(re.finditer(rf"{alignment.mark}(\d+){_OPEN}", marked))
    stops = [place.end() for place in places]
    starts = [place.start() for place in places]
    between = [marked[at:start] for at, start in zip([0, *stops], [*starts, len(marked)], strict=True)]
    choices = [
        list(dict.fromkeys([form for text in alignment.originals[int(place[1])] for form in _forms(text)]))
        for place in places
    ]
    spans = _align(text, between, choices)
    missing = sorted(set(range(len(alignment.originals))) - {int(place[1]) for place in places})
    if spans is None:
        raise error(
            ValueError,
            "The template edits a content, so that its place in the text cannot be found.",
            expected=repr(marked[:300]),
            got=repr(text[:300]),
            hint="use one of tdfunc.llm.TEMPLATES, or a template with {% generation %} for masks.",
        )
    dropped = [i for i in missing if alignment.originals[i][0].strip() and alignment.owners[i] is None]
    if dropped:
        raise error(
            ValueError, "The template drops a text of the tools.", got=repr(alignment.originals[dropped[0]][0])[:200]
        )
    return [Span(*span, alignment.owners[int(place[1])]) for span, place in zip(spans, places, strict=True)]


def _align(text: str, between: Sequence[str], choices: Sequence[Sequence[str]]) -> list[tuple[int, int]] | None:
    """Return the span of a choice in each place of a text, or None if there are none.

    Of several alignments it is the one that a regular expression of the choices finds. All of them are followed at
    once: contents of spaces, side by side, have more than can be tried one after the other.

    Args:
        text: The complete text.
        between: The texts before, between and after the places.
        choices: The possible texts in each place, the first preferred.
    """
    reached = [{len(between[0])} if text.startswith(between[0]) else set[int]()]
    for forms, following in zip(choices, between[1:], strict=True):
        found: set[int] = set()
        for start in reached[-1]:
            found.update([_end(text, start, form, following) for form in forms])
        found.discard(-1)
        reached.append(found)
    if len(text) not in reached[-1]:
        return None
    # Only the ways that lead to the end.
    leading = [{len(text)}]
    steps = list(zip(choices, between[1:], strict=True))
    for starts, (forms, following) in zip(reversed(reached[:-1]), reversed(steps), strict=True):
        ends = leading[-1]
        leading.append({start for start in starts if any([_end(text, start, f, following) in ends for f in forms])})
    at = len(between[0])
    spans: list[tuple[int, int]] = []
    for (forms, following), ends in zip(steps, reversed(leading[:-1]), strict=True):
        form = next(form for form in forms if _end(text, at, form, following) in ends)
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


def _forms(text: str) -> list[str]:
    """Return the forms in which a template may write a text: as it is, trimmed, or inside JSON."""
    trimmed = [text, text.strip(), text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"), text.lstrip(), text.rstrip()]
    return list(dict.fromkeys([*trimmed, *[json.dumps(each, ensure_ascii=False)[1:-1] for each in trimmed]]))


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

    # Any: an opaque template, which stands above.
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
            headed = None
            if other is not None:
                headed = self._by_markers(conversation, text, other, alignment, strict=True)
            spans = self._by_prefixes(conversation, text) if headed is None else headed
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
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            own = [n for n, span in enumerate(contents) if span.message == i]
            if not own and strict:
                return None
            if not own:
                raise error(
                    ValueError,
                    f"{describe(conversation, i)} has no place in the text: the template drops it.",
                    got=repr(text[:300]),
                )
            before = 0
            if own[0]:
                before = contents[own[0] - 1].stop
            if own[-1] + 1 < len(contents):
                after = contents[own[-1] + 1].start
            else:
                after = len(text)
            start = contents[own[0]].start
            stop = contents[own[-1]].stop
            header = self.template.header
            at = text.rfind(header, before, start) if header else -1
            if at == -1 and strict:
                return None
            first = at + len(header) if at != -1 else start
            # The end of an inner turn is found by further renders, where it is another one.
            end = self.template.end
            end = end if end in text[stop:after] else self.template.inner_end
            ended = text.find(end, stop, after) if end else -1
            replies.append(Span(first, ended + len(end) if ended != -1 else stop, i))
        return replies

    def _by_prefixes(self, conversation: Conversation, text: str) -> list[Span] | None:
        """Return the spans where each render is a prefix of the next; None where one is not."""
        if len(reply_places(conversation)) > FEW_REPLIES:
            spans = self._by_windows(conversation, text)
            if spans is not None:
                return spans
        messages, tools = conversation
        replies: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            is_open = self.open_end and i == len(messages) - 1
            try:
                prompt = self.template.texts([Conversation(messages[:i], tools)], generation_prompt=True)[0]
                turn = self.template.texts([Conversation(messages[: i + 1], tools)], open_end=is_open)[0]
            # For example for a conversation that ends with a tool call.
            except Exception:
                return None
            if len(turn) == len(prompt) or not (turn.startswith(prompt) and text.startswith(turn)):
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
            reply = turn[len(prompt) :]
            if not reply or not turn.startswith(prompt) or not text.startswith(reply, at):
                return None
            replies.append(Span(at, at + self._end_of_turn(turn, len(prompt)) - len(prompt), window.place))
            at += len(reply)
            if window.is_last:
                break
            between = following[len(turn) :]
            if not following.startswith(turn) or not text.startswith(between, at):
                return None
            at += len(between)
        return replies
