"""Output of the commands: tables and JSON on stdout, notes and bars on stderr; colours for terminals only."""

import io
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from tdfunc.core.types import Path
from tdfunc.ops.display.text import printable

_NO_LIMIT = 1 << 30
MAX_CELL = 60
_MAX_LINES = 10
# The width for a pipe, whose columns are never cut.
_WIDE = 100_000


class Table(NamedTuple):
    """Rows of texts under a header."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    # The columns of numbers, which are aligned at the right.
    numbers: frozenset[int] = frozenset()


def note(text: str) -> None:
    """Print a line to stderr."""
    print(f"tdfunc: {text}", file=sys.stderr)


def safe(text: str) -> str:
    """Return text of a file that is safe to print: control characters would act on the terminal."""
    return printable(text, _NO_LIMIT)


def short(text: str) -> str:
    """Return the beginning of a text, safe to print."""
    if len(text) > MAX_CELL:
        text = f"{text[:MAX_CELL]}..."
    return safe(text)


def shown(path: Path) -> str:
    """Return a path with dots, safe to print."""
    if path:
        return safe(".".join(path))
    return "(the root)"


def listed(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a list for a message, and the number of the others."""
    more = len(lines) - _MAX_LINES
    if more > 0:
        return [*lines[:_MAX_LINES], f"and {more} more"]
    return list(lines)


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal, or in plain columns for a pipe."""
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(table.header):
        justify = "right" if i in table.numbers else "left"
        made.add_column(name, justify=justify, overflow="fold")
    for row in table.rows:
        # Text, because rich reads a str such as "[red]" as markup.
        made.add_row(*map(Text, row))
    _print(made)


def print_tree(title: str, lines: Sequence[tuple[Path, str]]) -> None:
    """Print paths as a tree, with a text behind each."""
    nodes: dict[Path, Tree] = {(): Tree(Text(title))}
    texts = dict(lines)
    for path, _ in lines:
        for depth in range(1, len(path) + 1):
            at = path[:depth]
            if at in nodes:
                continue
            label = Text(safe(at[-1]))
            if at in texts:
                label.append(f"  {texts[at]}", style="dim")
            nodes[at] = nodes[at[:-1]].add(label)
    _print(nodes[()])


# Any: an object that rich can render.
def _print(what: Any) -> None:
    file = io.StringIO()
    if sys.stdout.isatty():
        console = Console(file=file, force_terminal=True)
    else:
        console = Console(file=file, force_terminal=False, width=_WIDE, no_color=True)
    console.print(what)
    lines = file.getvalue().rstrip("\n").split("\n")
    print("\n".join(line.rstrip() for line in lines))


# Any: an object that rich can render.


def print_json(found: Any) -> None:
    """Print JSON in ASCII, in which NaN and infinities are texts."""
    print(json.dumps(_finite(found), indent=2, allow_nan=False, default=repr))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextmanager
def progress(what: str, size_bytes: int) -> Generator[Callable[[int], object], None, None]:
    """Show a bar on stderr, if that is a terminal; yield a function that counts bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size_bytes)
        yield lambda count: bar.advance(task, count)
