"""Token-exact conversations: the ids of a rollout only grow, and sampled replies are never tokenised again.

A reply keeps its sampled ids (`token_ids`), and `append_messages` renders only the messages after it. Some templates
change earlier turns when a conversation continues: they drop thinking, or move tools. A rollout is then not the text
that the template renders. `is_append_only` reports such templates, `find_mismatch` returns the place, and
`to_training_rows` begins a further sequence there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

from tdfunc.core.errors import error
from tdfunc.llm.encoding.encode import decode, encode_marked, encode_texts
from tdfunc.llm.messages.columns import Conversation, conversation_in, conversation_of, per_conversation
from tdfunc.llm.messages.message import Message, as_compared
from tdfunc.llm.templates.base import (
    AbstractTemplate,
    Marked,
    Span,
    control_strings,
    describe,
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

    @cached_property
    def template(self) -> AbstractTemplate:
        """The template, found by its name or taken from the tokenizer."""
        return find_template(self.chat_template, self.tokenizer)

    @cached_property
    def text_tokenizer(self) -> Any:
        """The tokenizer of texts, taken from a processor."""
        return text_tokenizer(self.tokenizer)

    @cached_property
    def control(self) -> tuple[str, ...]:
        """The strings that mark turns or have a special id."""
        return control_strings(self.tokenizer, self.template)

    @cached_property
    def end_ids(self) -> list[int]:
        """The ids of the end of turn."""
        return encode_texts(self.text_tokenizer, [self.template.end])[0].ids

    @cached_property
    def inner_end_ids(self) -> list[int]:
        """The ids of the end of a turn that another message follows."""
        return encode_texts(self.text_tokenizer, [self.template.inner_end])[0].ids

    def closed(self, ids: list[int]) -> list[int]:
        """Return ids that end with a reply and its end of turn, which is added if the reply is incomplete."""
        ends = [end for end in (self.end_ids, self.inner_end_ids) if end]
        return ids if any([ids[-len(end) :] == end for end in ends]) else ids + self.inner_end_ids

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
    return template.closed(list(ids)) + _following(template, new, add_generation_prompt)


def _following(template: TokenTemplate, new: Conversation, prompt: bool) -> list[int]:
    """Return the ids of messages that follow a reply, from the text after a placeholder for the reply."""
    follows_call = bool(new.messages) and new.messages[0]["role"] == "tool"
    results = [message for message in new.messages if message["role"] == "tool"] if follows_call else []
    marked = template.marked([*_standing_in(results), *new.messages], new.tools, prompt=prompt)
    if not marked.replies:
        raise error(ValueError, "append_messages: the template must render the reply before them.", got=marked.text)
    stop, end = marked.replies[0].stop, template.template.inner_end
    # The end of turn comes first, so that the tokenizer does not treat the text as the start of a text.
    lead = end if marked.text.endswith(end, 0, stop) else ""
    start = stop - len(lead)
    contents = [Span(a - start, b - start, owner) for a, b, owner in marked.contents if a >= stop]
    text = Marked(marked.text[start:], contents, [])
    found = template.encode(text)
    n = len(template.inner_end_ids)
    if found[:n] == template.inner_end_ids:
        return found[n:]
    rest = [Span(a - len(lead), b - len(lead), owner) for a, b, owner in contents]
    return template.encode(Marked(text.text[len(lead) :], rest, []))


def _standing_in(results: Sequence[Message]) -> list[Message]:
    """Return a question and a reply, or calls that the results answer, in place of the conversation so far."""
    reply: Message = {"role": "assistant", "content": "a"}
    if results:
        calls = [
            {
                "id": result.get("tool_call_id") or f"call{i:05}",
                "type": "function",
                "function": {"name": result.get("name") or "f", "arguments": {}},
            }
            for i, result in enumerate(results)
        ]
        reply = {"role": "assistant", "tool_calls": calls}
    return [{"role": "user", "content": "u"}, reply]


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
    messages, tools = conversation
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    begin = replies[0] if replies else len(messages)
    start = Conversation(messages[:begin], tools)
    ids = template.encode(template.template.marked(start, generation_prompt=bool(replies) or prompt, replies=False))
    generated = [False] * len(ids)
    for place, i in enumerate(replies):
        own = messages[i].get("token_ids")
        if own is not None and not _fits(template, messages[: i + 1], tools, own):
            if not retokenize:
                raise error(
                    ValueError,
                    f"{describe(conversation, i)}: token_ids must decode to the text of the message.",
                    expected=repr(messages[i].get("content"))[:200],
                    got=repr(decode(template.text_tokenizer, own))[:200],
                    hint="use message.replace(token_ids=None) after an edit, or retokenize=True.",
                )
            own = None
        sampled = template.encode(_reply(template, messages[: i + 1], tools)) if own is None else list(own)
        ids, generated = ids + sampled, generated + [True] * len(sampled)
        after = replies[place + 1] if place + 1 < len(replies) else len(messages)
        new, wants_reply = messages[i + 1 : after], after < len(messages) or prompt
        if new or wants_reply:
            ids = template.closed(ids) + _following(template, Conversation(new), wants_reply)
            generated += [False] * (len(ids) - len(generated))
    return ids, generated


def _reply(template: TokenTemplate, messages: Sequence[Message], tools: list[Any] | None) -> Marked:
    """Return the last message as the template renders it, from the header of a reply on."""
    marked = template.marked(messages, tools)
    prompt = template.marked(messages[:-1], tools, prompt=True).text
    start, stop, _ = marked.replies[-1]
    if marked.text.startswith(prompt):
        start = len(prompt)
    contents = [Span(max(a, start) - start, b - start, owner) for a, b, owner in marked.contents if b > start]
    return Marked(marked.text[start:stop], [span for span in contents if span.stop <= stop - start], [])


def without_end(template: TokenTemplate, ids: Sequence[int], text: str) -> str:
    """Return the text of a reply without its end of turn, which is the template's or another special token."""
    end = template.template.end
    if end and text.endswith(end):
        return text[: -len(end)]
    last = template.text_tokenizer.added_tokens_decoder.get(ids[-1]) if ids else None
    return text.removesuffix(last.content) if last is not None and last.special else text


def _fits(template: TokenTemplate, messages: Sequence[Message], tools: list[Any] | None, ids: Sequence[int]) -> bool:
    """Return whether ids parse to the last message, or are its render, spaces around it aside."""
    text = decode(template.text_tokenizer, ids)
    # An incomplete reply may itself end with a special token.
    forms = {text, without_end(template, ids, text)}
    message = _compared(messages[-1])
    if any([_compared(template.template.parse_reply(form)) == message for form in forms]):
        return True
    rendered = _reply(template, messages, tools).text
    return any([form.strip() == rendered.removesuffix(template.template.end or "").strip() for form in forms])


def _compared(message: Message) -> Message:
    """Return the fields of a reply, without the ids of its calls and the spaces around its texts."""
    shown = as_compared({**message, "role": "assistant"})
    shown["tool_calls"] = [call["function"] for call in shown.get("tool_calls", ())]
    stripped = {name: value.strip() if isinstance(value, str) else value for name, value in shown.items()}
    return {name: value for name, value in stripped.items() if value}


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
    messages, tools = conversation
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found: list[int] = []
    before: str | None = None
    for i in replies:
        prompt = template.texts([Conversation(messages[:i], tools)], generation_prompt=True)[0] if i else ""
        if before is None or not prompt.startswith(before):
            found.append(i)
        turn = Conversation(messages[: i + 1], tools)
        before = template.texts([turn])[0]
        if not before.startswith(prompt):
            # The reply's place is not looked for: a template may leave the thinking out of its content.
            before = None
        elif spans := template.marked(turn).replies:
            before = before[: spans[-1].stop]
    if replies and replies[-1] < len(messages) - 1:
        whole = template.texts([conversation])[0]
        found += [len(messages)] if before is None or not whole.startswith(before) else []
    return found


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
        starts = [i for i in find_breaks(template.template, conversation) if i < count] or [count]
        rows: list[TokenRow] = []
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            replies = [i for i in range(start, stop) if messages[i]["role"] == "assistant"]
            # The last row continues to the end; others end with their last reply.
            last = count if stop == count else replies[-1] + 1
            part = Conversation(messages[:last], tools)
            ids, generated = grown_ids(template, part, start, False, False)
            kept = [{**message, "tools": tools} for message in part.messages] if tools else part.messages
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
        marked = template.template.marked(conversation, replies=False)
        rendered = template.encode(marked)
        shared = min(len(kept), len(rendered))
        at = next((i for i in range(shared) if kept[i] != rendered[i]), shared)
        # The line break after the last end of turn is not part of a rollout.
        is_whole = at == len(kept) and not decode(template.text_tokenizer, rendered[at:]).strip()
        texts = [decode(template.text_tokenizer, ids[at : at + 20]) for ids in (kept, rendered)]
        return None if is_whole else TokenMismatch(at, *texts)

    return per_conversation(one, history)
