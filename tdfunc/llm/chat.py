"""`apply_chat_template`: conversations as text, ids, padded tensors, or trees with masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdfunc._lazystack import lazy_stack
from tdfunc._tensordict import TensorDict
from tdfunc.core.errors import error
from tdfunc.llm.encode import control_strings, encode_marked, encode_texts, mask_of, text_tokenizer
from tdfunc.llm.rows import per_conversation
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
    padding: bool | str
    truncation: bool | str
    max_length: int | None
    padding_side: str
    truncation_side: str
    unsafe: bool


class Row(NamedTuple):
    """The ids of a conversation, and its masks by name."""

    ids: list[int]
    masks: dict[str, list[bool]]


def apply_template(history: Any, options: ChatOptions, tools: Sequence[Any] | None) -> Any:
    """Return conversations as the options say; `tools` are those of conversations without."""
    flat: list[Conversation] = []

    def number(chat: Any) -> int:
        conversation = conversation_in(chat)
        flat.append(conversation._replace(tools=conversation.tools or (list(tools) if tools else None)))
        return len(flat) - 1

    nested = per_conversation(number, history)
    if not options.tokenize:
        if not options.unsafe:
            control = options.template.control
            if options.tokenizer is not None:
                control = control_strings(options.tokenizer, options.template)
            for conversation in flat:
                check_safe(conversation, control)
        return _map(nested, _texts(options, flat).__getitem__)
    if options.tokenizer is None:
        raise error(TypeError, "apply_chat_template: ids need a tokenizer.", hint="tokenizer=...")
    rows = [_cut(row, options) for row in _rows(options, flat)]
    if options.masks:
        for i, (row, conversation) in enumerate(zip(rows, flat, strict=True)):
            _check_mask(row, conversation, i)
    pads = options.padding not in (False, "do_not_pad")
    if pads:
        rows = _padded(rows, options)
    if not options.tensors and not options.as_tree:
        return _map(nested, lambda i: rows[i].ids)
    trees = [_tree(row) for row in rows]
    dims = len(history._batch_size) - 1
    is_ragged = not pads or -1 in history._batch_size[: max(dims, 0)]
    tree = _stacked(_map(nested, trees.__getitem__), dims, ragged=is_ragged)
    return tree if options.as_tree else tree["input_ids"]


def _texts(options: ChatOptions, conversations: Sequence[Conversation]) -> list[str]:
    return options.template.texts(conversations, generation_prompt=options.generation_prompt, open_end=options.open_end)


def _rows(options: ChatOptions, conversations: list[Conversation]) -> list[Row]:
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
        masks = {"attention_mask": [True] * len(made.ids)}
        if options.masks:
            masks["assistant_masks"] = mask_of(made, marked[i].replies)
        rows.append(Row(made.ids, masks))
    return rows


def _cut(row: Row, options: ChatOptions) -> Row:
    length = options.max_length
    if options.truncation in (False, "do_not_truncate") or length is None or len(row.ids) <= length:
        return row
    part = slice(None, length) if options.truncation_side == "right" else slice(len(row.ids) - length, None)
    return Row(row.ids[part], {name: mask[part] for name, mask in row.masks.items()})


def _check_mask(row: Row, conversation: Conversation, i: int) -> None:
    replies = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if replies and not any(row.masks["assistant_masks"]):
        raise error(
            ValueError,
            f"apply_chat_template: the assistant mask of conversation {i} would be empty.",
            expected=f"tokens of {describe(conversation, replies[0])}",
            hint="a larger max_length; a template with {% generation %} must draw its spans around replies.",
        )


def _padded(rows: list[Row], options: ChatOptions) -> list[Row]:
    longest = max([len(row.ids) for row in rows], default=0)
    width = options.max_length if options.padding == "max_length" and options.max_length is not None else longest
    tokenizer = text_tokenizer(options.tokenizer)
    # The mask tells pads apart, so that any id will do.
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    done: list[Row] = []
    for row in rows:
        gap = max(width - len(row.ids), 0)

        def filled(values: list[Any], value: Any, gap: int = gap) -> list[Any]:
            extra = [value] * gap
            return extra + values if options.padding_side == "left" else values + extra

        done.append(Row(filled(row.ids, pad), {name: filled(mask, False) for name, mask in row.masks.items()}))
    return done


def _tree(row: Row) -> TensorDict:
    masks = {name: torch.tensor(mask, dtype=torch.bool) for name, mask in row.masks.items()}
    return TensorDict({"input_ids": torch.tensor(row.ids, dtype=torch.int64), **masks})


def _stacked(nested: Any, dims: int, *, ragged: bool) -> Any:
    if dims <= 0:
        return nested
    parts = [_stacked(part, dims - 1, ragged=ragged) for part in nested]
    return lazy_stack(parts) if ragged else torch.stack(parts)  # pyright: ignore[reportArgumentType, reportCallIssue]


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
    sides = {
        name: rest.pop(name, default) for name, default in (("padding_side", "left"), ("truncation_side", "right"))
    }
    choices = {
        "padding": (given["padding"], (True, False, "longest", "max_length", "do_not_pad")),
        "truncation": (given["truncation"], (True, False, "longest_first", "do_not_truncate")),
        **{name: (value, ("left", "right")) for name, value in sides.items()},
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise error(ValueError, f"apply_chat_template: {name} must be one of {list(allowed)}.", got=repr(value))
    length = rest.pop("max_length", None)
    if length is None and (given["padding"] == "max_length" or given["truncation"] in (True, "longest_first")):
        raise error(ValueError, "apply_chat_template: max_length must be given.", got="None")
    unsafe = bool(rest.pop("unsafe", False))
    return ChatOptions(
        template=find(template, tokenizer, rest),
        tokenizer=tokenizer,
        max_length=length,
        unsafe=unsafe,
        **sides,
        **given,
    )
