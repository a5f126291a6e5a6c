"""Responses of a backend as rows, as texts, and as messages of a conversation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdfunc.llm.conversations.exact import TokenTemplate, without_end
from tdfunc.llm.generation.options import Response
from tdfunc.llm.messages.message import Message
from tdfunc.llm.rows.batch import Row

# The tokens of the prompt that the text of a response is decoded with: some tokenizers drop the space in front of the
# first token of a text.
_CONTEXT = 4


def _decode_all(tokenizer: Any, rows: Sequence[Tensor], *, skip_special_tokens: bool = False) -> list[str]:
    """Return the texts of rows of ids."""
    return tokenizer.batch_decode(
        [row.tolist() for row in rows],
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def row_texts(tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    """Return the texts of rows of tokens."""
    return _decode_all(tokenizer, [row.ids for row in rows])


def reply_texts(
    tokenizer: Any, prompts: Sequence[Row], responses: Sequence[Response], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the texts of responses as they follow their prompts; for responses without tokens the backend's text."""
    with_ids = [i for i, each in enumerate(responses) if each.tokens is not None]
    texts = {i: each.text or "" for i, each in enumerate(responses) if each.tokens is None}
    tails = [prompts[i].ids[-_CONTEXT:] for i in with_ids]
    found = [responses[i].tokens for i in with_ids]
    tokens = [each.to(tail.device) for tail, each in zip(tails, found, strict=True) if each is not None]
    joined = [torch.cat(pair) for pair in zip(tails, tokens, strict=True)]
    decoded = _decode_all(tokenizer, [*tails, *joined, *tokens], skip_special_tokens=skip_special_tokens)
    count = len(with_ids)
    for place, i in enumerate(with_ids):
        before, both, alone = decoded[place], decoded[count + place], decoded[2 * count + place]
        # A token of the prompt may be part of a character.
        texts[i] = both[len(before) :] if both.startswith(before) else alone
    return [texts[i] for i in range(len(responses))]


def reply_messages(
    template: TokenTemplate,
    prompts: Sequence[str],
    responses: Sequence[Response],
    texts: Sequence[str],
    stops: Sequence[str],
) -> list[Message]:
    """Return the messages of responses, with the ids that they were sampled as.

    Args:
        template: The template, which parses a text without its end of turn.
        prompts: The texts of their prompts, which may have opened the thinking.
        responses: The responses.
        texts: Their texts, control tokens included.
        stops: The stop sequences.
    """
    all_ids = [[] if each.tokens is None else each.tokens.tolist() for each in responses]
    ended = [each.finish_reason == "stop" for each in responses]
    contents = [
        without_end(template, ids, text) if end else text for ids, text, end in zip(all_ids, texts, ended, strict=True)
    ]
    parsed = [template.template.parse_after(*each) for each in zip(prompts, contents, strict=True)]
    found: list[Message] = []
    for response, ids, text, content, message in zip(responses, all_ids, texts, contents, parsed, strict=True):
        reason: str = response.finish_reason
        if reason == "stop" and content == text and any([stop in text for stop in stops]):
            reason = "stop_string"
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        own = {"token_ids": ids} if ids else {}
        found.append(message | {"finish_reason": reason, "is_complete": reason != "length"} | own)
    return found
