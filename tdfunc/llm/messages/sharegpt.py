"""The form of ShareGPT's data sets: `{"conversations": [{"from": "human", "value": ...}, ...]}`."""

from collections.abc import Mapping
from typing import Any

from tdfunc.core.errors import brief, error

# Axolotl, LLaMA-Factory and TRL name them so.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_NAMES = {"from": "role", "value": "content"}


# Any: JSON.
def from_sharegpt(given: Any, where: str) -> Any:
    """Return a message of ShareGPT in OpenAI's form; anything else unchanged.

    Args:
        given: A message.
        where: The place of the message, for messages of errors.

    Raises:
        ValueError: The author of the message is unknown.
    """
    if not isinstance(given, Mapping) or "role" in given or "from" not in given:
        return given
    entries: Mapping[str, Any] = given
    message = {_NAMES.get(name, name): value for name, value in entries.items()}
    author = entries["from"]
    if author not in _ROLES:
        raise error(
            ValueError,
            f"{where}: the author in 'from' is unknown.",
            expected=f"one of {list(_ROLES)}",
            got=brief(author),
            hint="write the message as {'role': ..., 'content': ...}; calls of tools are its 'tool_calls'.",
        )
    return {**message, "role": _ROLES[author]}
