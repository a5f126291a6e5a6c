"""`apply_chat_template`: conversations as text, ids, padded tensors, or trees with masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdfunc.core.errors import error
from tdfunc.llm.encoding.encode import control_strings, encode_marked, encode_texts, mask_of, text_tokenizer
from tdfunc.llm.encoding.padding import Layout, Row, arrange, pad_id_of
from tdfunc.llm.messages.columns import per_conversation
from tdfunc.llm.templates.base import (
    AbstractTemplate,
    Conversation,
    check_safe,
    conversation_in,
    describe,
    is_forged,
)


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
    """Return conversations as the options say; `tools` are those of conversations without."""
    flat: list[Conversation] = []

    def number(chat: Any) -> int:
        conversation = conversation_in(chat)
        flat.append(conversation._replace(tools=list(tools)) if tools and not conversation.tools else conversation)
        return len(flat) - 1

    nested = per_conversation(number, history)
    if not options.tokenize:
        if not options.unsafe:
            control = options.template.control
            if options.tokenizer is not None:
                control = control_strings(options.tokenizer, options.template)
            check_safe(flat, control)
        return _map(nested, _texts(options, flat).__getitem__)
    if options.tokenizer is None:
        raise error(TypeError, "apply_chat_template: ids need a tokenizer.", hint="tokenizer=...")
    rows = [options.layout.cut(row) for row in chat_rows(options, flat)]
    if options.masks:
        for i, (row, conversation) in enumerate(zip(rows, flat, strict=True)):
            _check_mask(row, conversation, i)
    pad_id = pad_id_of(text_tokenizer(options.tokenizer))
    if not options.tensors and not options.as_tree:
        padded = list(options.layout.pad(rows, pad_id)["input_ids"]) if options.layout.pads else None
        lists = [ids.tolist() for ids in padded or [row["input_ids"] for row in rows]]
        return _map(nested, lists.__getitem__)
    tree = arrange(nested, rows, options.layout, pad_id, ragged=-1 in history._batch_size[:-1])
    return tree if options.as_tree else tree["input_ids"]


def _texts(options: ChatOptions, conversations: Sequence[Conversation]) -> list[str]:
    return options.template.texts(conversations, generation_prompt=options.generation_prompt, open_end=options.open_end)


def chat_rows(options: ChatOptions, conversations: Sequence[Conversation]) -> list[Row]:
    """Return the ids of each conversation; those without control strings in contents are encoded in one call."""
    tokenizer, template = options.tokenizer, options.template
    control = control_strings(tokenizer, template)
    forged = [is_forged(each, control) for each in conversations]
    places = [i for i in range(len(conversations)) if forged[i] or options.masks]
    found = template.marked_all(
        [conversations[i] for i in places],
        generation_prompt=options.generation_prompt,
        open_end=options.open_end,
        replies=options.masks,
    )
    marked = dict(zip(places, found, strict=True))
    plain = [i for i in range(len(conversations)) if not forged[i]]
    rest = iter(_texts(options, [conversations[i] for i in plain if i not in marked]))
    texts = [marked[i].text if i in marked else next(rest) for i in plain]
    encoded = dict(zip(plain, encode_texts(tokenizer, texts, offsets=options.masks), strict=True))
    rows: list[Row] = []
    for i in range(len(conversations)):
        made = encoded[i] if i in encoded else encode_marked(tokenizer, marked[i], control)
        row = {"input_ids": torch.tensor(made.ids, dtype=torch.int64)}
        if options.masks:
            row["assistant_masks"] = torch.tensor(mask_of(made, marked[i].replies), dtype=torch.bool)
        rows.append(row)
    return rows


def _check_mask(row: Row, conversation: Conversation, i: int) -> None:
    replies = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if replies and not bool(row["assistant_masks"].any()):
        raise error(
            ValueError,
            f"apply_chat_template: the assistant mask of conversation {i} would be empty.",
            expected=f"tokens of {describe(conversation, replies[0])}",
            hint="a larger max_length; a template with {% generation %} must draw its spans around replies.",
        )


# Any: nested lists of places, as deep as the batch.
def _map(nested: Any, fn: Any) -> Any:
    return [_map(part, fn) for part in nested] if isinstance(nested, list) else fn(nested)


def read_options(
    template: Any, tokenizer: Any, given: Mapping[str, Any], rest: dict[str, Any], find: Any
) -> ChatOptions:
    """Return the options of a call; those that are not ours go to the template.

    Raises:
        ValueError: An option has a value that is not allowed.
    """
    names = ("padding", "truncation")
    rest_names = ("max_length", "padding_side", "truncation_side")
    options = {name: given[name] for name in names}
    layout = Layout(**options, **{name: rest.pop(name) for name in rest_names if name in rest})
    layout.check("apply_chat_template")
    unsafe = bool(rest.pop("unsafe", False))
    others = {name: value for name, value in given.items() if name not in names}
    return ChatOptions(
        template=find(template, tokenizer, rest), tokenizer=tokenizer, layout=layout, unsafe=unsafe, **others
    )
