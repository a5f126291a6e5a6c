"""Token-exact conversations: the ids of a rollout only grow, and sampled replies are never tokenised again.

A reply keeps its sampled ids (`token_ids`), and `append_messages` renders only the messages after it. Some templates
change earlier turns when a conversation continues: they drop thinking, or move tools. A rollout is then not the text
that the template renders. `is_append_only` reports such templates, `find_mismatch` returns the place, and
`to_training_rows` begins a further sequence there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

from tdfunc.core.errors import error
from tdfunc.llm.conversations.fresh import FreshReplies
from tdfunc.llm.encoding.encode import decode, encode_marked, texts_behind
from tdfunc.llm.encoding.following import Following
from tdfunc.llm.messages.columns import Conversation, conversation_in, conversation_of, per_conversation
from tdfunc.llm.messages.message import Message, as_compared
from tdfunc.llm.templates.base import (
    AbstractTemplate,
    Marked,
    control_strings,
    describe,
    from_tokenizer,
    join_marked,
    text_tokenizer,
)
from tdfunc.llm.templates.find import find_template


@final
@dataclass(frozen=True)
class TokenTemplate:
    """A chat template with the tokenizer that encodes its text.

    Args:
        tokenizer: A tokenizer of transformers; it is not changed.
        chat_template: A template, its name in `TEMPLATES`, or a Jinja text; by default the tokenizer's own template.

    Raises:
        ValueError: No template has the name.

    Examples:
        >>> from tdfunc.llm import TokenTemplate, qwen
        >>> TokenTemplate(tokenizer=None, chat_template=qwen).template.end
        '<|im_end|>'
    """

    tokenizer: Any
    chat_template: AbstractTemplate | str | None = None

    @from_tokenizer
    def template(self) -> AbstractTemplate:
        """The template, found by its name or taken from the tokenizer."""
        return find_template(self.chat_template, self.tokenizer)

    @from_tokenizer
    def text_tokenizer(self) -> Any:
        """The tokenizer of texts, taken from a processor."""
        return text_tokenizer(self.tokenizer)

    @from_tokenizer
    def control(self) -> tuple[str, ...]:
        """The strings that mark turns or have a special id."""
        return control_strings(self.tokenizer, self.template)

    @from_tokenizer
    def following(self) -> Following:
        """The encoder of texts that follow other texts."""
        return Following(self.text_tokenizer, self.control)

    @from_tokenizer
    def end_ids(self) -> list[int]:
        """The ids of the end of turn."""
        return self.following.text_ids(["a"], [self.template.end])[0]

    @from_tokenizer
    def inner_end_ids(self) -> list[int]:
        """The ids of the end of a turn that another message follows."""
        return self.following.text_ids(["a"], [self.template.inner_end])[0]

    def closed(self, ids: list[int]) -> list[int]:
        """Return ids that end with a reply and its end of turn, which is added if the reply is incomplete."""
        ends = [end for end in (self.end_ids, self.inner_end_ids) if end]
        if any([ids[-len(end) :] == end for end in ends]):
            return ids
        return ids + self.inner_end_ids

    def encode(self, marked: Marked) -> list[int]:
        """Return the ids of a text, control strings in its contents as ordinary text."""
        return encode_marked(self.text_tokenizer, marked, self.control).ids

    def marked(self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> Marked:
        """Return the rendered text of messages with the spans of contents and replies."""
        return self.template.marked(Conversation(list(messages), tools), generation_prompt=prompt)


class TokenRow(NamedTuple):
    """The ids of a conversation, for training."""

    ids: list[int]
    # True where an assistant wrote the token in this row: its replies, and their ends of turn.
    generated: list[bool]
    # The places of the messages that these are.
    replies: tuple[int, ...]
    # Any: the History of the row.
    history: Any


class TokenMismatch(NamedTuple):
    """The first token at which rendering a conversation again gives other ids than the conversation has."""

    position: int
    # The texts of the ids from there on: of the conversation, and of its render.
    kept: str
    rendered: str


def append_messages(
    template: TokenTemplate, ids: Sequence[int], new_messages: Any, *, add_generation_prompt: bool = True
) -> list[int]:
    """Append the ids of new messages to the ids of a conversation, which do not change.

    If the last reply is incomplete, its end of turn comes first. Only the new messages are rendered.

    Args:
        template: The template and tokenizer of the conversation.
        ids: The ids so far, which end with a reply.
        new_messages: A `History` of one dimension (or one message): results of tools, messages of the user.
        add_generation_prompt: End with the generation prompt.

    Raises:
        UnsupportedError: The template cannot render a message.
        ValueError: The template drops or edits a message.
    """
    new = conversation_in(new_messages)
    text = _following(template, new, add_generation_prompt)
    return template.closed(list(ids)) + template.following.ids(*text)


def _following(template: TokenTemplate, new: Conversation, prompt: bool) -> tuple[Marked, Marked]:
    """Return the text of messages that follow a reply, and a text before it, taken from behind a placeholder."""
    results: list[Message] = []
    if new.messages and new.messages[0]["role"] == "tool":
        results = [message for message in new.messages if message["role"] == "tool"]
    marked = template.marked([*_standing_in(results), *new.messages], new.tools, prompt=prompt)
    if not marked.replies:
        raise error(
            ValueError,
            "append_messages: the template drops the reply before the messages.",
            got=repr(marked.text[-80:]),
        )
    stop = marked.replies[0].stop
    end = template.template.inner_end
    # An end of turn is one token, which stays apart from what follows.
    start = stop - len(end) if marked.text.endswith(end, 0, stop) else 0
    return marked.part(start, stop), marked.part(stop)


def _standing_in(results: Sequence[Message]) -> list[Message]:
    """Return a question and a reply, or calls that the results answer, in place of the conversation so far."""
    question: Message = {"role": "user", "content": "u"}
    if not results:
        return [question, {"role": "assistant", "content": "a"}]
    calls: list[dict[str, Any]] = []
    for i, result in enumerate(results):
        call_id = result.get("tool_call_id") or f"call{i:05}"
        function = {"name": result.get("name") or "f", "arguments": {}}
        calls.append({"id": call_id, "type": "function", "function": function})
    return [question, {"role": "assistant", "tool_calls": calls}]


def chat_ids(
    template: TokenTemplate, history: Any, *, add_generation_prompt: bool = False, retokenize: bool = False
) -> Any:
    """Return the ids of each conversation; replies with `token_ids` keep exactly these ids.

    Args:
        template: The template and tokenizer.
        history: A `History`.
        add_generation_prompt: End with the generation prompt.
        retokenize: Tokenise replies whose `token_ids` do not fit their text, instead of raising an error.

    Returns:
        A list of ids, in lists nested as the batch before the messages.

    Raises:
        ValueError: The `token_ids` of a message do not decode to its text, because the message was edited.
    """

    def one(chat: Any) -> list[int]:
        conversation = conversation_in(chat)
        return grown_ids(template, conversation, 0, add_generation_prompt, retokenize)[0]

    return per_conversation(one, history)


def grown_ids(
    template: TokenTemplate, conversation: Conversation, first: int, prompt: bool, retokenize: bool
) -> tuple[list[int], list[bool]]:
    """Return ids and generated tokens; messages before `first` are rendered, replies from there on are kept."""
    growth = _Growth(template, FreshReplies(template.template, conversation), retokenize)
    return growth.ids(first, len(conversation.messages), prompt)


@dataclass(frozen=True)
class _Growth:
    """The ids of a conversation, which grow by one message after the other.

    Attributes:
        template: The template and tokenizer.
        fresh: The conversation, with its replies as they are rendered.
        retokenize: Tokenise replies whose ids do not fit their text.
    """

    template: TokenTemplate
    fresh: FreshReplies
    retokenize: bool

    def ids(self, first: int, stop: int, prompt: bool) -> tuple[list[int], list[bool]]:
        """Return the ids of the messages before `stop`, and the generated tokens.

        Messages before `first` are rendered, and replies from there on are kept.
        """
        template = self.template
        messages = self.fresh.conversation.messages[:stop]
        replies = [place for place in self.fresh.places if first <= place < stop]
        begin = replies[0] if replies else stop
        start = Conversation(messages[:begin], self.fresh.conversation.tools)
        lead = template.template.marked(start, generation_prompt=bool(replies) or prompt, replies=False)
        ids = template.encode(lead)
        generated = [False] * len(ids)
        for place, after in pairwise([*replies, stop]):
            own = self._reply_ids(place, lead, ids)
            ids += own
            generated += [True] * len(own)
            new = messages[place + 1 : after]
            wants_reply = after < stop or prompt
            if new or wants_reply:
                before, lead = _following(template, Conversation(new), wants_reply)
                ids = template.closed(ids)
                ids += template.following.ids(before, lead)
                generated += [False] * (len(ids) - len(generated))
                lead = join_marked(before, lead)
        return ids, generated

    def _reply_ids(self, place: int, lead: Marked, before: list[int]) -> list[int]:
        """Return the ids of a reply as it was sampled behind ids, or as it follows a text.

        Raises:
            ValueError: The message has other ids than the sampled ones.
        """
        message = self.fresh.conversation.messages[place]
        sampled = message.get("token_ids")
        if sampled is not None:
            if self._fits(message, place, sampled, before):
                return list(sampled)
            if not self.retokenize:
                raise error(
                    ValueError,
                    f"{describe(self.fresh.conversation, place)}: token_ids do not decode to the text of the message.",
                    expected=repr(message.get("content"))[:200],
                    got=repr(decode(self.template.text_tokenizer, sampled))[:200],
                    hint="use message.replace(token_ids=None) after an edit, or retokenize=True.",
                )
        return self.template.following.ids(lead, self.fresh.reply(place))

    def _fits(self, message: Message, place: int, ids: Sequence[int], before: list[int]) -> bool:
        """Return whether ids parse to a message, or are its render, spaces around it aside."""
        template = self.template.template
        # The text of a message that was sampled is that behind its prompt.
        texts = texts_behind(self.template.text_tokenizer, [before, ()], [ids, ids])
        # An incomplete reply may itself end with a special token.
        forms = {*texts, *[without_end(self.template, ids, text) for text in texts]}
        # The content may also be the text as it was sampled.
        readings = [template.parse_reply(form) for form in forms]
        readings += [{"role": "assistant", "content": form} for form in forms]
        compared = _compared(message)
        if any([_compared(reading) == compared for reading in readings]):
            return True
        rendered = self.fresh.reply(place).text.removesuffix(template.end or "").strip()
        return any([form.strip() == rendered for form in forms])


def without_end(template: TokenTemplate, ids: Sequence[int], text: str) -> str:
    """Return the text of a reply without its end of turn, which is the template's or another special token."""
    end = template.template.end
    if end and text.endswith(end):
        return text[: -len(end)]
    if ids:
        last = template.text_tokenizer.added_tokens_decoder.get(ids[-1])
        if last is not None and last.special:
            return text.removesuffix(last.content)
    return text


def _compared(message: Message) -> Message:
    """Return the fields of a reply, without the ids of its calls and the spaces around its texts."""
    shown = as_compared({**message, "role": "assistant"})
    shown["tool_calls"] = [call["function"] for call in shown.get("tool_calls", ())]
    found: Message = {}
    for name, value in shown.items():
        stripped = value.strip() if isinstance(value, str) else value
        if stripped:
            found[name] = stripped
    return found


def is_append_only(template: "TokenTemplate | AbstractTemplate", history: Any) -> Any:
    """Return whether the render of each turn starts with all earlier turns, as the ids of a rollout do.

    Args:
        template: A template, with or without a tokenizer.
        history: A `History`.

    Returns:
        A bool, in lists nested as the batch before the messages.

    Examples:
        >>> from tdfunc.llm import History, chatml, is_append_only, qwen
        >>> chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "reasoning_content": "hm"}]
        >>> history = History.from_chats([*chat, *chat])
        >>> is_append_only(chatml, history), is_append_only(qwen, history)
        (True, False)
    """
    text = template.template if isinstance(template, TokenTemplate) else template
    return per_conversation(lambda chat: len(find_breaks(text, conversation_in(chat))) <= 1, history)


def find_breaks(template: AbstractTemplate, conversation: Conversation) -> list[int]:
    """Return the places of the first reply, and of each reply whose prompt does not start with the turns before."""
    return FreshReplies(template, conversation).breaks


def to_training_rows(template: TokenTemplate, history: Any) -> Any:
    """Split conversations into sequences of ids for training, in which each reply follows its rendered prompt once.

    If the template only appends to a conversation, the conversation is one sequence. Where the template changes earlier
    turns, a further sequence begins with the prompt as it is rendered then, and continues with the later replies.

    Args:
        template: The template and tokenizer.
        history: A `History`.

    Returns:
        A list of `TokenRow`, in lists nested as the batch before the messages.

    Raises:
        ValueError: The `token_ids` of a message do not decode to its text.
    """

    def one(chat: Any) -> list[TokenRow]:
        conversation = conversation_in(chat)
        messages, tools = conversation
        count = len(messages)
        fresh = FreshReplies(template.template, conversation)
        growth = _Growth(template, fresh, retokenize=False)
        starts = [i for i in fresh.breaks if i < count] or [count]
        rows: list[TokenRow] = []
        for start, stop in pairwise([*starts, count]):
            replies = [i for i in fresh.places if start <= i < stop]
            # The last row continues to the end; others end with their last reply.
            last = count if stop == count else replies[-1] + 1
            ids, generated = growth.ids(start, last, False)
            kept = messages[:last]
            if tools:
                kept = [{**message, "tools": tools} for message in kept]
            rows.append(TokenRow(ids, generated, tuple(replies), conversation_of(type(chat), kept)))
        return rows

    return per_conversation(one, history)


def find_mismatch(template: TokenTemplate, history: Any) -> Any:
    """Return the first place at which tokenising the rendered conversation again gives other ids; None without one.

    Args:
        template: The template and tokenizer.
        history: A `History` whose replies have `token_ids`.

    Returns:
        A `TokenMismatch` or None, in lists nested as the batch before the messages.
    """

    def one(chat: Any) -> TokenMismatch | None:
        conversation = conversation_in(chat)
        kept = grown_ids(template, conversation, 0, False, False)[0]
        rendered = template.encode(template.template.marked(conversation, replies=False))
        at = 0
        while at < min(len(kept), len(rendered)) and kept[at] == rendered[at]:
            at += 1
        tokenizer = template.text_tokenizer
        # The line break after the last end of turn is not part of a rollout.
        if at == len(kept) and not decode(tokenizer, rendered[at:]).strip():
            return None
        return TokenMismatch(at, decode(tokenizer, kept[at : at + 20]), decode(tokenizer, rendered[at : at + 20]))

    return per_conversation(one, history)
