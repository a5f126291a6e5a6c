"""The interface of a chat template: a value that renders messages as text and parses the text back.

A template returns pieces of text, each with the message that it belongs to. The text of messages and the text of the
template are therefore never mixed up. Masks, safe encoding and token-exact conversations are made from pieces.
"""

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

from tdfunc.core.errors import UnsupportedError, brief, error
from tdfunc.llm.messages.columns import Conversation, conversation_in, per_conversation, without_ids
from tdfunc.llm.messages.content import text_of, texts_of
from tdfunc.llm.messages.message import UNCOMPARED, Message, as_compared
from tdfunc.llm.templates.fields import Coverage, known_kinds
from tdfunc.llm.templates.thinking import closing_tag, continue_thinking

V = TypeVar("V")


class Piece(NamedTuple):
    """A stretch of a rendered conversation."""

    text: str
    # The place of the message; None for text before the first.
    message: int | None = None
    # Text of a message or tool: control strings in it are ordinary text.
    is_content: bool = False
    # Written by the assistant: its content, calls and end of turn.
    is_reply: bool = False


class Span(NamedTuple):
    """Characters `start` to `stop` of a rendered conversation, and the message that they belong to."""

    start: int
    stop: int
    message: int | None = None


class Marked(NamedTuple):
    """A rendered conversation, the spans of its contents, and the spans that assistants wrote, in order."""

    text: str
    contents: list[Span]
    replies: list[Span]

    def part(self, start: int, stop: int | None = None) -> "Marked":
        """Return a stretch of the text, with the spans of the contents inside it."""
        end = len(self.text) if stop is None else stop
        inside: list[Span] = []
        for first, last, message in self.contents:
            first = max(first, start)
            last = min(last, end)
            if first < last:
                inside.append(Span(first - start, last - start, message))
        return Marked(self.text[start:end], inside, [])


def join_marked(first: Marked, second: Marked) -> Marked:
    """Return two texts as one text, with the spans of the contents of both."""
    by = len(first.text)
    moved = [Span(start + by, stop + by, message) for start, stop, message in second.contents]
    return Marked(first.text + second.text, [*first.contents, *moved], [])


class AbstractTemplate(ABC):
    """A chat template: it renders and parses conversations, and finds the spans for masks and encoding."""

    # The class that `parse` makes; `history.py`, in a higher layer, sets it once.
    _history: ClassVar[Any] = None

    @property
    @abstractmethod
    def control(self) -> tuple[str, ...]:
        """Return the strings by which the template marks turns."""

    @property
    @abstractmethod
    def end(self) -> str:
        """Return the end of an assistant's turn."""

    @property
    def inner_end(self) -> str:
        """Return the end of an assistant's turn that another message follows."""
        return self.end

    @abstractmethod
    def texts(
        self, conversations: Sequence[Conversation], *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[str]:
        """Return the texts of conversations.

        Args:
            conversations: Their messages and tools.
            generation_prompt: End with the header of a reply.
            open_end: Leave the last message without its end.

        Raises:
            UnsupportedError: The template cannot render a message, or leaves out a field; the error names it.
        """

    @abstractmethod
    def marked_all(
        self,
        conversations: Sequence[Conversation],
        *,
        generation_prompt: bool = False,
        open_end: bool = False,
        replies: bool = True,
    ) -> list[Marked]:
        """Return the texts of conversations with the spans of contents and (with `replies`) of replies.

        The result has at least the contents with a control string.

        Raises:
            ValueError: The spans cannot be found: the template edits or drops a content.
        """

    def marked(
        self,
        conversation: Conversation,
        *,
        generation_prompt: bool = False,
        open_end: bool = False,
        replies: bool = True,
    ) -> Marked:
        """Return `marked_all` of one conversation."""
        options = {"generation_prompt": generation_prompt, "open_end": open_end, "replies": replies}
        return self.marked_all([conversation], **options)[0]

    @abstractmethod
    def parse_chat(self, text: str) -> Conversation:
        """Return the conversation of a rendered text; its last message may be incomplete.

        Raises:
            ValueError: The text is not a render of this template.
        """

    @abstractmethod
    def parse_reply(self, text: str) -> Message:
        """Return the message of a reply, given without its end of turn.

        It never raises. If a part cannot be parsed, `content` is the complete reply, and `parse_error` the reason.
        """

    def parse_after(self, prompt: str, text: str) -> Message:
        """Return the message of a reply to a prompt, given without its end of turn.

        It differs from `parse_reply` if the prompt ends inside of a thinking, as the prompts of some models do. If the
        reply does not close it, `content` is the complete reply, and `parse_error` the reason.

        Args:
            prompt: The text before the reply, or its end.
            text: The reply.
        """
        closing = closing_tag(prompt)
        if closing is None:
            return self.parse_reply(text)
        return continue_thinking(text, closing, self.parse_reply)

    def render(
        self,
        history: Any,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        reversible: bool = False,
        unsafe: bool = False,
    ) -> Any:
        r"""Return the rendered text of each conversation.

        Args:
            history: A `History`.
            add_generation_prompt: End with the generation prompt.
            continue_final_message: Leave the last message open.
            reversible: Raise an error if `parse` would not return the same history.
            unsafe: Allow control strings in contents, with which an author can forge messages.

        Returns:
            A text, or lists of texts nested as the batch before the messages.

        Raises:
            ValueError: A content has a control string, or the text would not parse back; the error names the message.
            UnsupportedError: The template cannot render a message.

        Examples:
            >>> from tdfunc.llm import History, chatml
            >>> chatml.render(History.from_chats([{"role": "user", "content": "hi"}]))
            '<|im_start|>user\nhi<|im_end|>\n'
        """

        def one(chat: Any) -> str:
            conversation = without_ids(conversation_in(chat))
            options = {"generation_prompt": add_generation_prompt, "open_end": continue_final_message}
            text = self.texts([conversation], **options)[0]
            if not unsafe:
                check_safe([conversation], self.control)
            if reversible:
                self._check_reversible(text, conversation)
            return text

        return per_conversation(one, history)

    def parse(self, text: Any) -> Any:
        r"""Return the `History` of a rendered conversation, or a ragged `History` for (nested) lists of texts.

        Raises:
            ValueError: The text is not a render of this template.

        Examples:
            >>> from tdfunc.llm import chatml
            >>> chatml.parse("<|im_start|>user\nhi<|im_end|>\n").content
            ['hi']
        """
        return self._history.from_text(text, chat_template=self)

    def _check_reversible(self, text: str, conversation: Conversation) -> None:
        try:
            back = self.parse_chat(text)
        except ValueError as err:
            raise error(ValueError, f"render: the text would not parse back: {err}") from err
        if as_compared({"tools": back.tools}) != as_compared({"tools": conversation.tools}):
            raise error(ValueError, "render: the tools would not parse back.", got=repr(back.tools)[:200])
        given = [as_compared(message) for message in conversation.messages]
        found = [as_compared(message) for message in back.messages]
        for i, (message, other) in enumerate(zip(given, found)):  # noqa: B905 - the count is compared below
            name = _first_difference(message, other)
            if name is not None:
                raise error(
                    ValueError,
                    f"render: {describe(conversation, i)} would not parse back: {name!r} would differ.",
                    expected=repr(message.get(name))[:200],
                    got=repr(other.get(name))[:200],
                    hint="render(h) without reversible= returns the text nevertheless.",
                )
        if len(given) != len(found):
            first_unequal = min(len(found), len(given) - 1)
            raise error(
                ValueError,
                f"render: {describe(conversation, first_unequal)} would not parse back.",
                expected=f"{len(given)} messages",
                got=f"{len(found)} messages",
            )


def _first_difference(message: Message, other: Message) -> str | None:
    """Return the name of the first field in which two messages differ."""
    for name in {**message, **other}:
        if message.get(name) != other.get(name):
            return name
    return None


def describe(conversation: Conversation, i: int) -> str:
    """Return the place and role of a message, for errors."""
    return f"message {i} ({conversation.messages[i].get('role')})"


@functools.lru_cache(maxsize=64)
def _pattern(control: tuple[str, ...]) -> "re.Pattern[str]":
    """Return the pattern of control strings, the longest first where several start at one place."""
    longest_first = sorted(control, key=len, reverse=True)
    matches_nothing = "(?!)"
    return re.compile("|".join(map(re.escape, longest_first)) or matches_nothing)


def controls_in(text: str, control: tuple[str, ...]) -> "Iterator[re.Match[str]]":
    """Yield the control strings in a text."""
    return _pattern(control).finditer(text)


def check_safe(conversations: Sequence[Conversation], control: tuple[str, ...]) -> None:
    """Raise if a text of a message or tool has a control string."""
    # Almost always there is none, and one search of all texts shows it.
    messages = [message for each in conversations for message in each.messages]
    tools = [each.tools for each in conversations if each.tools]
    if not is_forged(Conversation(messages, tools), control):
        return
    for each in conversations:
        for i, message in enumerate(each.messages):
            _check_texts(message, describe(each, i), control)
        _check_texts({"tools": each.tools}, "the tools", control)


def _check_texts(message: Message, where: str, control: tuple[str, ...]) -> None:
    """Raise if a text in a message, or its parts together, has a control string."""
    for text in [*strings_in(message), _joined(message)]:
        match = next(controls_in(text, control), None)
        if match is not None:
            raise error(
                ValueError,
                f"{where} has the control string {match[0]!r} in its text, by which it could forge a message.",
                expected="contents without control strings",
                got=repr(text[max(0, match.start() - 20) : match.end() + 20]),
                hint="tokenize=True encodes it as ordinary text; unsafe=True renders it unchanged.",
            )


def is_forged(conversation: Conversation, control: tuple[str, ...]) -> bool:
    """Return whether a text of a message or tool has a control string, its parts taken together."""
    messages = conversation.messages
    texts: list[str] = []
    # Values that contain texts: contents of parts, calls, tools.
    nested: list[Any] = [conversation.tools]
    for message in messages:
        for name, value in message.items():
            if name in UNCOMPARED:
                continue
            if isinstance(value, str):
                texts.append(value)
            else:
                nested.append(value)
        if isinstance(message.get("content"), list):
            texts.append(_joined(message))
    texts += strings_in(nested)
    return _has_control(texts, control)


def _joined(message: Message) -> str:
    """Return the texts in a content together: several parts may make a control string."""
    return "".join([text for text in texts_of(message.get("content")) if isinstance(text, str)])


def find_forged(conversations: Sequence[Conversation], control: tuple[str, ...]) -> list[int]:
    """Return the places of the conversations that `is_forged`."""
    return [i for i, each in enumerate(conversations) if is_forged(each, control)]


def _has_control(texts: Sequence[str], control: tuple[str, ...]) -> bool:
    # No control string spans the null between two texts.
    return _pattern(control).search("\0".join(texts)) is not None


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a message, including keys of dicts; fields that are not rendered are left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in UNCOMPARED:
                yield from strings_in(key)
                yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


class AbstractPieceTemplate(AbstractTemplate):
    """A template that gives the pieces of a conversation, each with the message that it belongs to."""

    # The values of `control` and `end`.
    _control: ClassVar[tuple[str, ...]]
    _end: ClassVar[str]

    @property
    def control(self) -> tuple[str, ...]:  # noqa: D102 - as the interface
        return self._control

    @property
    def end(self) -> str:  # noqa: D102 - as the interface
        return self._end

    @abstractmethod
    def pieces(
        self, conversation: Conversation, *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[Piece]:
        """Return the pieces of a rendered conversation; the options are the options of `texts`."""

    def texts(  # noqa: D102 - as the interface
        self, conversations: Sequence[Conversation], *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[str]:
        self._coverage.check(conversations, is_prompt=generation_prompt)
        ends = {"generation_prompt": generation_prompt, "open_end": open_end}
        texts: list[str] = []
        for conversation in conversations:
            pieces = self.pieces(conversation, **ends)
            texts.append("".join([piece.text for piece in pieces]))
        return texts

    @property
    def _coverage(self) -> Coverage:
        def render(conversation: Conversation) -> str:
            return "".join([piece.text for piece in self.pieces(conversation)])

        return Coverage(render, known_kinds(self))

    def marked_all(  # noqa: D102 - as the interface
        self,
        conversations: Sequence[Conversation],
        *,
        generation_prompt: bool = False,
        open_end: bool = False,
        replies: bool = True,
    ) -> list[Marked]:
        self._coverage.check(conversations, is_prompt=generation_prompt)
        ends = {"generation_prompt": generation_prompt, "open_end": open_end}
        return [_marked(self.pieces(each, **ends)) for each in conversations]


def _marked(pieces: Sequence[Piece]) -> Marked:
    """Return the text of pieces with its spans; the pieces of a reply that follow each other are one span."""
    contents: list[Span] = []
    replies: list[Span] = []
    stop = 0
    for piece in pieces:
        if not piece.text:
            continue
        start = stop
        stop += len(piece.text)
        if piece.is_content:
            contents.append(Span(start, stop, piece.message))
        if piece.is_reply:
            last = replies[-1] if replies else None
            if last is not None and last.stop == start and last.message == piece.message:
                replies[-1] = last._replace(stop=stop)
            else:
                replies.append(Span(start, stop, piece.message))
    return Marked("".join([piece.text for piece in pieces]), contents, replies)


# -- parts that several templates share ---------------------------------------------------------------------------


def interleave(i: int, *texts: str, is_reply: bool = False) -> list[Piece]:
    """Return texts as pieces of a message: by turns of the template and of the message, the template's first."""
    return [Piece(text, i, n % 2 == 1, is_reply) for n, text in enumerate(texts)]


def skip(text: str, at: int, token: str) -> int:
    """Return the place behind a token, or the same place if the token is not there."""
    if text.startswith(token, at):
        return at + len(token)
    return at


def read_until(text: str, start: int, end: str) -> tuple[str, int, Message]:
    """Return the text up to an end, the place behind the end, and `is_complete` for a message without an end."""
    stop = text.find(end, start)
    if stop == -1:
        return text[start:], len(text), {"is_complete": False}
    return text[start:stop], stop + len(end), {}


def read_turns(
    text: str, at: int, header: "re.Pattern[str]", end: str, *, gap: str = "", expected: str
) -> Iterator[tuple[str, str, Message]]:
    """Yield the role and the body of each turn of a text, and `is_complete` for a turn without an end.

    Args:
        text: The text.
        at: The place of the first header.
        header: The pattern of a header, whose first group is the role.
        end: The end of a turn.
        gap: A text that may follow an end.
        expected: The form of a header, for messages.

    Raises:
        ValueError: A turn has no header.
    """
    while at < len(text):
        found = header.match(text, at)
        if found is None:
            raise not_rendered(text, at, expected)
        body, at, cut = read_until(text, found.end(), end)
        at = skip(text, at, gap)
        role = found[1]
        # A header at the end asks for a reply.
        is_prompt = cut and not body and role in ("assistant", "model")
        if not is_prompt:
            yield role, body, cut


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as `tojson` of transformers' templates writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def plain_text(conversation: Conversation, i: int) -> str:
    """Return the content of a message, which must be text.

    Raises:
        UnsupportedError: It has a part that is not text.
    """
    text = text_of(conversation.messages[i].get("content"))
    if text is None:
        raise UnsupportedError(
            f"{describe(conversation, i)} has parts that are not text.",
            got=repr(conversation.messages[i]["content"])[:200],
            hint="the template of the model's own processor renders images and audio: chat_template=None.",
        )
    return text


def refuse(conversation: Conversation, i: int, *fields: str) -> None:
    """Raise if a message has a field that a template cannot render."""
    for name in fields:
        if conversation.messages[i].get(name):
            raise UnsupportedError(
                f"{describe(conversation, i)}: this template cannot render {name!r}, which would be lost.",
                hint="history.set(field, None) leaves it out.",
            )


def refuse_tools(tools: list[Any] | None, name: str) -> None:
    """Raise if a conversation has tools, for a template that cannot render them."""
    if tools:
        raise UnsupportedError(f"{name}: the template cannot render tools.", hint="describe them in a system message.")


def arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments of a call as JSON text; text stays as it is."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return arguments
    return to_json(arguments)


def make_call(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form.

    Raises:
        ValueError: The name is not text.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of the function is not text: {brief(name)}")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def make_reply(text: str, calls: Sequence[dict[str, Any]], content: str) -> Message:
    """Return a reply with calls, and with a content unless it is empty; raw text if marks of calls have none."""
    if not calls:
        return unparsed(text, "there is no call between the marks of calls")
    message: Message = {"role": "assistant", "tool_calls": list(calls)}
    if content:
        message["content"] = content
    return message


def unparsed(text: str, reason: object) -> Message:
    """Return a reply as raw text with the reason."""
    return {"role": "assistant", "content": text, "parse_error": str(reason)}


def not_rendered(text: str, at: int, expected: str) -> ValueError:
    """Return the error for a text that a template does not render."""
    return error(
        ValueError,
        f"parse: the text at character {at} is not a render of the template.",
        expected=expected,
        got=repr(text[at : at + 40]),
    )


# Any: transformers is optional.
def special_strings(tokenizer: Any) -> tuple[str, ...]:
    """Return the strings with a special id; tokenizers in Python do not mark all of them as special."""
    own = text_tokenizer(tokenizer)
    special = set(own.all_special_tokens)
    added = [each.content for each in own.added_tokens_decoder.values() if each.special or each.content in special]
    return tuple(dict.fromkeys([each for each in added if each.strip()]))


def control_strings(tokenizer: Any, template: AbstractTemplate) -> tuple[str, ...]:
    """Return the strings that mark turns for a template or have a special id in a tokenizer."""
    return tuple(dict.fromkeys([*template.control, *special_strings(tokenizer)]))


# Any: transformers is optional.
def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor, or the tokenizer."""
    return getattr(tokenizer, "tokenizer", tokenizer)


# Any: transformers is optional.
def _state_of(tokenizer: Any) -> Any:
    """Return what shows that a tokenizer got another chat template, or other special tokens."""
    own = text_tokenizer(tokenizer)
    # Any: a text, or texts by name.
    template: Any = getattr(tokenizer, "chat_template", None)
    # Copies: both may be changed in place.
    kept = dict[Any, Any](template) if isinstance(template, Mapping) else template
    special = repr(getattr(own, "special_tokens_map", None))
    token_count = len(own) if hasattr(own, "__len__") else None
    return kept, special, token_count


class _Read(NamedTuple):
    """The properties that were read from a tokenizer in one state."""

    state: Any
    values: dict[str, Any]


class from_tokenizer(Generic[V]):  # noqa: N801 - used as `property` is
    """A property that is read from a tokenizer once, and again after the tokenizer has changed.

    A program may add tokens, or another chat template, to a tokenizer that templates and wrappers have in use.

    Args:
        make: A function of an object with a `tokenizer`.
    """

    def __init__(self, make: Callable[[Any], V]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "from_tokenizer[V]": ...
    @overload
    def __get__(self, instance: Any, owner: Any = None) -> V: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        state = _state_of(instance.tokenizer)
        kept = instance.__dict__
        known: _Read | None = kept.get("_read")
        if known is None or known.state != state:
            known = _Read(state, {})
            kept["_read"] = known
        if self._name not in known.values:
            known.values[self._name] = self._make(instance)
        return known.values[self._name]
