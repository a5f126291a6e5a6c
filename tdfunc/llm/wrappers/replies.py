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
    texts = [each.text or "" for each in responses]
    places: list[int] = []
    before: list[list[int]] = []
    ids: list[list[int]] = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if response.tokens is not None:
            places.append(i)
            before.append(prompt.ids[-CONTEXT:].tolist())
            ids.append(response.tokens.tolist())
    decoded = texts_behind(tokenizer, before, ids, skip_special_tokens=skip_special_tokens)
    for i, text in zip(places, decoded, strict=True):
        texts[i] = text
    return texts


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
    found: list[Message] = []
    for prompt, response, text in zip(prompts, responses, texts, strict=True):
        found.append(_reply_message(template, prompt, response, text, stops))
    return found


def _reply_message(
    template: TokenTemplate, prompt: str, response: Response, text: str, stops: Sequence[str]
) -> Message:
    """Return the message of one response; arguments as for `reply_messages`."""
    ids = []
    if response.tokens is not None:
        ids = response.tokens.tolist()
    content = text
    if response.finish_reason == "stop":
        content = without_end(template, ids, text)
    message = template.template.parse_after(prompt, content)
    reason: str = response.finish_reason
    # Without an end of turn in it, something else ended the response.
    if reason == "stop" and content == text and any([stop in text for stop in stops]):
        reason = "stop_string"
    if message.get("tool_calls") and reason == "stop":
        reason = "tool_calls"
    message = message | {"finish_reason": reason, "is_complete": reason != "length"}
    if ids:
        return message | {"token_ids": ids}
    return message
