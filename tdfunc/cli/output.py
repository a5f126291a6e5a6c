"""What the commands print: tables and JSON, and bars on stderr; colours for terminals only."""

import io
import json
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree as RichTree

from tdfunc.cli.streams import is_terminal, takes_all_text
from tdfunc.core.types import Path
from tdfunc.ops.display.text import printable

_NO_LIMIT = 1 << 30
_MAX_CELL = 60


class Table(NamedTuple):
    """Rows of texts under a header."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    # The columns of numbers, which end at the right.
    numbers: frozenset[int] = frozenset()


def safe(text: str) -> str:
    """Return text of a file as it can be shown: control characters would act on the terminal."""
    return printable(text, _NO_LIMIT)


def short(text: str) -> str:
    """Return the beginning of a text, safe to print."""
    return safe(text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}...")


def shown(path: Path) -> str:
    """Return a path with dots, safe to print."""
    return safe(".".join(path)) if path else "(the root)"


def shown_lines(text: str) -> str:
    """Return lines that are safe to print."""
    return "\n".join(safe(line) for line in text.split("\n"))


def render(table: Table) -> str:
    """Return a table as text: as wide as the terminal, or in plain columns for whatever reads a pipe."""
    if not is_terminal("stdout"):
        return _plain(table)
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(table.header):
        made.add_column(name, justify="right" if i in table.numbers else "left", overflow="fold")
    for row in table.rows:
        # Text, because rich reads a str such as "[red]" as markup.
        made.add_row(*map(Text, row))
    return _rich(made)


def _plain(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    texts: list[str] = []
    for line in lines:
        cells = [
            c.rjust(w) if i in table.numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


class _Branch:
    """A node of a tree that is shown: the text behind its name, and what is below it."""

    def __init__(self) -> None:
        self.text, self.inner = "", dict[str, _Branch]()


def render_tree(title: str, lines: Sequence[tuple[Path, str]]) -> str:
    """Return paths as a tree, with a text behind each."""
    root = _Branch()
    for path, text in lines:
        at = root
        for key in path:
            at = at.inner.setdefault(key, _Branch())
        at.text = text
    return _rich(_rich_tree(title, root)) if is_terminal("stdout") else _plain_tree(title, root)


def _plain_tree(title: str, root: _Branch) -> str:
    texts = [title]
    stack = _below("", root)
    while stack:
        before, is_last, key, branch = stack.pop()
        tail = f"  {branch.text}" if branch.text else ""
        texts.append(f"{before}{'└── ' if is_last else '├── '}{safe(key)}{tail}")
        stack += _below(f"{before}{'    ' if is_last else '│   '}", branch)
    return "\n".join(texts)


def _below(before: str, branch: _Branch) -> list[tuple[str, bool, str, _Branch]]:
    """Return what is below a node, the last first: what goes before it, whether it is the last, its key and itself."""
    items = [(before, False, key, inner) for key, inner in branch.inner.items()]
    return [(before, True, *items[-1][2:]), *reversed(items[:-1])] if items else []


def _rich_tree(title: str, root: _Branch) -> RichTree:
    made = RichTree(Text(title))
    stack = [(made, root)]
    while stack:
        tree, branch = stack.pop()
        for key, inner in branch.inner.items():
            label = Text(safe(key))
            label.append(f"  {inner.text}" if inner.text else "", style="dim")
            stack.append((tree.add(label), inner))
    return made


# Any: what rich can render.
def _rich(what: Any) -> str:
    colours = is_terminal("stdout")
    file = io.StringIO()
    width = None if colours else 100_000
    console = Console(file=file, force_terminal=colours, width=width, no_color=None if colours else True)
    console.print(what)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


def as_json(found: Any) -> str:
    """Return JSON, in which numbers that are none (NaN, infinities) are texts."""
    # Of a stream in another encoding: what it replaces characters by is no JSON.
    escaped = not takes_all_text()
    return json.dumps(_finite(found), indent=2, ensure_ascii=escaped, allow_nan=False, default=repr)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(what: str, size_bytes: int) -> Generator[Callable[[int], object], None, None]:
    """Show a bar on stderr, if that is a terminal; yield what counts bytes."""
    if not is_terminal("stderr"):
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size_bytes)
        yield lambda count: bar.advance(task, count)
