"""Responses of a backend as rows, as texts, and as messages of a conversation."""

from collections.abc import Sequence
from typing import Any

from tdfunc.llm.conversations.exact import TokenTemplate, without_end
from tdfunc.llm.encoding.encode import CONTEXT, texts_behind
from tdfunc.llm.generation.options import Response
from tdfunc.llm.messages.message import Message
from tdfunc.llm.rows.batch import Row


def row_texts(tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    """Return the texts of rows of tokens."""
    return texts_behind(tokenizer, [()] * len(rows), [row.ids.tolist() for row in rows])


def reply_texts(
    tokenizer: Any, prompts: Sequence[Row], responses: Sequence[Response], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the texts of responses as they follow their prompts; for responses without tokens the backend's text."""
    with_ids = [i for i, each in enumerate(responses) if each.tokens is not None]
    texts = {i: each.text or "" for i, each in enumerate(responses) if each.tokens is None}
    before = [prompts[i].ids[-CONTEXT:].tolist() for i in with_ids]
    found = [each.tokens.tolist() for each in responses if each.tokens is not None]
    decoded = texts_behind(tokenizer, before, found, skip_special_tokens=skip_special_tokens)
    texts |= zip(with_ids, decoded, strict=True)
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
        own = {}
        if ids:
            own = {"token_ids": ids}
        found.append(message | {"finish_reason": reason, "is_complete": reason != "length"} | own)
    return found
