"""Conversations in files of JSON lines, one conversation a line, as data sets of chats are written."""

import json
import os
from collections.abc import Iterator
from typing import Any

from tdfunc.core.errors import brief, error
from tdfunc.llm.conversations.history import History
from tdfunc.llm.messages.columns import per_conversation
from tdfunc.llm.messages.message import is_message, load_json
from tdfunc.storage.disk.commit import replace_file
from tdfunc.storage.disk.raw import write_all


def save_jsonl(history: History, path: "str | os.PathLike[str]", *, fsync: bool = True) -> None:
    """Write each conversation as a line `{"messages": [...], "tools": [...]}`; all fields of messages are kept.

    Lines are in the order of the batch; the nesting of the batch is not stored. The file is replaced as a whole.

    Raises:
        TypeError: A content has a value that JSON cannot represent; nothing is written.
        ValueError: A number is NaN or infinite; nothing is written.

    Examples:
        >>> import tempfile
        >>> history = History.from_chats([[{"role": "user", "content": "hi"}]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_jsonl(history, f"{folder}/chats.jsonl")
        ...     bool((load_jsonl(f"{folder}/chats.jsonl") == history).all())
        True
    """
    lines: list[str] = []

    def write_line(chat: Any) -> None:
        made = chat.to_chats()
        line = made if isinstance(made, dict) else {"messages": made}
        lines.append(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    per_conversation(write_line, history)
    data = memoryview("".join(lines).encode())
    replace_file(os.path.abspath(path), lambda fd: write_all(fd, data), size_bytes=len(data), fsync=fsync)


def load_jsonl(path: "str | os.PathLike[str]") -> History:
    """Return the conversations of a file of JSON lines as a ragged history; empty lines are skipped.

    A line is a conversation: a list of messages, or a dict with `messages` and perhaps `tools`. Lines of ShareGPT,
    `{"conversations": [{"from": "human", "value": ...}, ...]}`, are read as well.

    Raises:
        ValueError: A line is not JSON; the error names it.
        TypeError: A line is not a conversation; the error has its number among the conversations.
    """
    chats: list[Any] = []
    name = f"load_jsonl {os.fspath(path)}"
    for _, _, chat in json_lines(path, name):
        is_whole = isinstance(chat, dict) and not is_message(chat)
        chats.append(chat if is_whole else {"messages": chat})
    return History.from_chats(chats)


# Any: JSON.
def json_lines(path: "str | os.PathLike[str]", name: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the number, the text and the value of each line of a file that is not empty; errors begin with `name`."""
    # Programs of Windows begin a file with a mark, which is not text.
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, line, load_json(line)
            except ValueError as err:
                raise error(ValueError, f"{name}: line {number} is not JSON: {err}.", got=brief(line)) from err
