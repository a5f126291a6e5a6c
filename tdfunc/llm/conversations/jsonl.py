"""Conversations in files of JSON lines, one conversation a line, as data sets of chats are written."""

import json
import os
from typing import Any

from tdfunc.core.errors import error
from tdfunc.llm.conversations.history import History
from tdfunc.llm.messages.columns import per_conversation
from tdfunc.storage.disk.commit import replace_file


def save_jsonl(history: History, path: "str | os.PathLike[str]", *, fsync: bool = True) -> None:
    """Write each conversation as a line `{"messages": [...], "tools": [...]}`; all fields of messages are kept.

    Lines are in the order of the batch, whose nesting a file of lines does not have. The file is replaced as a whole.

    Raises:
        TypeError: A content has a value that JSON cannot hold; nothing is written.

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

    def write(fd: int) -> None:
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])

    replace_file(os.path.abspath(path), write, size_bytes=len(data), fsync=fsync)


def load_jsonl(path: "str | os.PathLike[str]") -> History:
    """Return the conversations of a file of JSON lines as a ragged history; empty lines are skipped.

    A line is a conversation: a list of messages, or a dict with `messages` and perhaps `tools`.

    Raises:
        ValueError: A line is not JSON; the error names it.
        TypeError: A line is not a conversation.
    """
    chats: list[Any] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                chat = json.loads(line)
            except ValueError as err:
                raise error(
                    ValueError, f"load_jsonl {os.fspath(path)}: line {number} must be JSON: {err}.", got=line[:100]
                ) from err
            if not isinstance(chat, (list, dict)):
                raise error(
                    TypeError,
                    f"load_jsonl {os.fspath(path)}: line {number} must be a conversation.",
                    expected='{"messages": [...]}',
                    got=line[:100],
                )
            chats.append(chat if isinstance(chat, dict) else {"messages": chat})
    return History.from_chats(chats)
