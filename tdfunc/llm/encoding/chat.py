"""`apply_chat_template`: conversations as text, ids, padded tensors, or trees with masks."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tdfunc.core.errors import error
from tdfunc.llm.encoding.encode import Encoded, encode_marked, encode_texts, has_hidden_control, mask_of
from tdfunc.llm.encoding.padding import EncodedRow, Layout, arrange, pad_id_of
from tdfunc.llm.encoding.trained import check_masks
from tdfunc.llm.messages.columns import Conversation, conversation_in, per_conversation, without_ids
from tdfunc.llm.templates.base import (
    AbstractTemplate,
    Marked,
    Span,
    check_safe,
    control_strings,
    find_forged,
    text_tokenizer,
)
from tdfunc.llm.templates.find import find_template
from tdfunc.llm.templates.markers import has_reply


@dataclass(frozen=True)
class ChatOptions:
    """The options of one call of `apply_chat_template`."""

    template: AbstractTemplate
    tokenizer: Any
    generation_prompt: bool
    open_end: bool
    tokenize: bool
    tensors: bool
    as_tree: bool
    masks: bool
    layout: Layout
    unsafe: bool


def apply_template(history: Any, options: ChatOptions, tools: Sequence[Any] | None) -> Any:
    """Return conversations in the form of the options; `tools` are for conversations without their own tools."""
    flat: list[Conversation] = []
    # The conversations with tools, which differ from the tools of the call.
    with_others: list[int] = []

    def number(chat: Any) -> int:
        conversation = without_ids(conversation_in(chat))
        if tools and not conversation.tools:
            conversation = conversation._replace(tools=list(tools))
        elif tools and conversation.tools != list(tools):
            with_others.append(len(flat))
        flat.append(conversation)
        return len(flat) - 1

    # The place in `flat` of each conversation, nested as the batch.
    nested = per_conversation(number, history)
    if with_others:
        warnings.warn(
            f"apply_chat_template: tools= is not used for {len(with_others)} of {len(flat)} conversations, which have "
            "tools themselves.",
            stacklevel=3,
        )
    if not options.tokenize:
        texts = _render(flat, options)
        return _map(nested, texts.__getitem__)
    if options.tokenizer is None:
        raise error(TypeError, "apply_chat_template: ids need a tokenizer.", hint="tokenizer=...")
    rows = chat_rows(
        options.tokenizer,
        options.template,
        flat,
        generation_prompt=options.generation_prompt,
        open_end=options.open_end,
        masks=options.masks,
    )
    rows = [options.layout.cut(row) for row in rows]
    if options.masks:
        check_masks(rows, flat)
    pad_id = pad_id_of(text_tokenizer(options.tokenizer))
    if options.tensors or options.as_tree:
        tree = arrange(nested, rows, options.layout, pad_id, ragged=-1 in history._batch_size[:-1])
        return tree if options.as_tree else tree["input_ids"]
    ids = [row["input_ids"] for row in rows]
    if options.layout.pads:
        ids = list(options.layout.pad(rows, pad_id)["input_ids"])
    lists = [row.tolist() for row in ids]
    return _map(nested, lists.__getitem__)


def _render(conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
    """Return the texts of conversations, in which no content can forge a message unless the options allow it."""
    if not options.unsafe:
        control = options.template.control
        if options.tokenizer is not None:
            control = control_strings(options.tokenizer, options.template)
        check_safe(conversations, control)
    texts = options.template.texts(
        conversations, generation_prompt=options.generation_prompt, open_end=options.open_end
    )
    if not options.unsafe:
        _check_hidden(texts, options)
    return texts


def _check_hidden(texts: Sequence[str], options: ChatOptions) -> None:
    """Raise if the tokenizer's normalizer makes a control string of another text."""
    own = text_tokenizer(options.tokenizer)
    if getattr(getattr(own, "backend_tokenizer", None), "normalizer", None) is None:
        return
    control = control_strings(options.tokenizer, options.template)
    for i, (text, made) in enumerate(zip(texts, encode_texts(own, texts), strict=True)):
        if has_hidden_control(own, text, made.ids, control):
            raise error(
                ValueError,
                f"conversation {i} has a text of which the tokenizer makes a control string, by which it could forge a "
                "message.",
                expected="contents without control strings, also in upper case or other characters",
                got=repr(text)[:200],
                hint="tokenize=True encodes it as ordinary text; unsafe=True renders it unchanged.",
            )


def chat_rows(
    tokenizer: Any,
    template: AbstractTemplate,
    conversations: Sequence[Conversation],
    *,
    generation_prompt: bool = False,
    open_end: bool = False,
    masks: bool = False,
    prompts: Sequence[int] | None = None,
) -> list[EncodedRow]:
    """Return the ids of each conversation, with assistant masks or without.

    Conversations without control strings in contents are encoded in one call.

    Args:
        tokenizer: A tokenizer or processor.
        template: The template.
        conversations: The conversations.
        generation_prompt: End with the header of a reply.
        open_end: Leave the last message without its end.
        masks: Add assistant masks.
        prompts: The number of messages of each conversation that are its prompt: masks are False at their replies.
    """
    conversations = [without_ids(each) for each in conversations]
    own = text_tokenizer(tokenizer)
    control = control_strings(tokenizer, template)
    forged = set(find_forged(conversations, control))
    ends = {"generation_prompt": generation_prompt, "open_end": open_end}
    # By the place of the conversation: all with masks, else those with control strings in contents.
    to_mark = [i for i in range(len(conversations)) if masks or i in forged]
    marked = _marked_at(template, conversations, to_mark, replies=masks, **ends)
    texts = {i: each.text for i, each in marked.items() if i not in forged}
    texts |= _texts_at(template, conversations, [i for i in range(len(conversations)) if i not in marked], **ends)
    # One call for all texts.
    encoded = dict(zip(texts, encode_texts(own, list(texts.values()), offsets=masks), strict=True))
    for i, text in texts.items():
        if has_hidden_control(own, text, encoded[i].ids, control):
            encoded[i] = encode_marked(own, Marked(text, [], []), control)
    for i in forged:
        encoded[i] = encode_marked(own, marked[i], control)
    if not masks:
        return [_row_of(encoded[i], None) for i in range(len(conversations))]
    skipped = _count_replies(template, conversations, prompts or [0] * len(conversations))
    return [_row_of(encoded[i], marked[i].replies[skipped[i] :]) for i in range(len(conversations))]


def _marked_at(
    template: AbstractTemplate, conversations: Sequence[Conversation], places: Sequence[int], **options: bool
) -> dict[int, Marked]:
    """Return the marked texts of the conversations at some places."""
    if not places:
        return {}
    found = template.marked_all([conversations[i] for i in places], **options)
    return dict(zip(places, found, strict=True))


def _texts_at(
    template: AbstractTemplate, conversations: Sequence[Conversation], places: Sequence[int], **options: bool
) -> dict[int, str]:
    """Return the texts of the conversations at some places."""
    if not places:
        return {}
    return dict(zip(places, template.texts([conversations[i] for i in places], **options), strict=True))


def _count_replies(
    template: AbstractTemplate, conversations: Sequence[Conversation], sizes: Sequence[int]
) -> list[int]:
    """Return the number of stretches that assistants wrote in the first messages of each conversation."""
    counts = [0] * len(conversations)
    asked: list[int] = []
    prompts: list[Conversation] = []
    for i, (conversation, size) in enumerate(zip(conversations, sizes, strict=True)):
        prompt = conversation._replace(messages=conversation.messages[:size])
        if has_reply(prompt):
            asked.append(i)
            prompts.append(prompt)
    if prompts:
        for i, marked in zip(asked, template.marked_all(prompts), strict=True):
            counts[i] = len(marked.replies)
    return counts


def _row_of(made: Encoded, replies: Sequence[Span] | None) -> EncodedRow:
    """Return the ids of a conversation, with the mask of the replies if they are given."""
    row = {"input_ids": torch.tensor(made.ids, dtype=torch.int64)}
    if replies is not None:
        row["assistant_masks"] = torch.tensor(mask_of(made, replies), dtype=torch.bool)
    return row


# Any: nested lists of places, as deep as the batch.
def _map(nested: Any, fn: Any) -> Any:
    if isinstance(nested, list):
        return [_map(part, fn) for part in nested]
    return fn(nested)


def read_options(template: Any, tokenizer: Any, given: Mapping[str, Any], rest: dict[str, Any]) -> ChatOptions:
    """Return the options of a call; `rest` has the layout, `unsafe`, and options of the template.

    Raises:
        ValueError: An option has an invalid value.
    """
    names = [each.name for each in fields(Layout) if each.name in rest]
    layout = Layout(**{name: rest.pop(name) for name in names})
    layout.check("apply_chat_template")
    unsafe = bool(rest.pop("unsafe", False))
    found = find_template(template, tokenizer, rest)
    return ChatOptions(template=found, tokenizer=tokenizer, layout=layout, unsafe=unsafe, **given)
