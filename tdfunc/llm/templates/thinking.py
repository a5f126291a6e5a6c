"""Replies to prompts that opened the thinking: their text begins inside of it."""

import re
from collections.abc import Callable

from tdfunc.llm.messages.message import Message

# The end of a prompt behind which a reply thinks, with the name of the tag.
_OPENED = re.compile(r"(?:<(?P<angle>[\w:]*(?:think|thought|reason)\w*)>|\[(?P<square>THINK)\])\s*\Z", re.IGNORECASE)
_REASON = "the thinking is not closed"


def closing_tag(prompt: str) -> str | None:
    """Return the tag that ends the thinking which a prompt opened; None if it opened none."""
    found = _OPENED.search(prompt[-200:])
    if found is None:
        return None
    if found["angle"]:
        return f"</{found['angle']}>"
    return f"[/{found['square']}]"


def continue_thinking(text: str, closing: str, parse: Callable[[str], Message]) -> Message:
    """Return the message of a reply that began inside of a thinking.

    Args:
        text: The reply, without its end of turn.
        closing: The tag that ends the thinking.
        parse: The parser of replies, which need not know thinking.
    """
    before, closed, after = text.partition(closing)
    if not closed:
        return {"role": "assistant", "content": text, "parse_error": _REASON}
    parsed = parse(text)
    if "parse_error" in parsed or "reasoning_content" in parsed:
        return parsed
    rest = parse(after.lstrip("\n"))
    if "parse_error" in rest:
        return {**rest, "content": text}
    thinking = before.strip("\n")
    if thinking:
        return {**rest, "reasoning_content": thinking}
    return rest
