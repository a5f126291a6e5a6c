"""Markdown for a terminal: columns of tables are padded, and links are their texts."""

import re
import sys
from collections.abc import Iterable, Mapping

# A backslash before a bar keeps it in its cell.
_BAR = re.compile(r"(?<!\\)\|")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def plain(text: str) -> str:
    """Return a page of Markdown as text to read in a terminal."""
    lines: list[str] = []
    rows: list[str] = []
    for line in [*_LINK.sub(r"\1", text).splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
            continue
        if rows:
            lines += _padded(rows)
            rows = []
        lines.append(line)
    return "\n".join(lines[:-1])


def _padded(lines: list[str]) -> list[str]:
    """Return the rows of a table with columns of equal width, numbers to the right as the table asks."""
    head, rule, *rows = ([cell.strip() for cell in _BAR.split(line.strip())[1:-1]] for line in lines)
    cells = [[cell.replace("\\|", "|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [one.endswith(":") for one in rule]
    cells.insert(1, ["-" * width for width in widths])
    return [_line(row, widths, numbers) for row in cells]


def _line(row: list[str], widths: list[int], numbers: list[bool]) -> str:
    parts = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(row, widths, numbers, strict=True)
    ]
    return "  ".join(parts).rstrip()


def show(names: Iterable[str], parts: Mapping[str, str], program: str) -> None:
    """Print the parts of these names, or list all parts; an unknown name ends the program with their list."""
    names = list(names)
    known = f"parts: {' '.join(parts)}"
    unknown = [name for name in names if name not in parts]
    if unknown:
        sys.exit(f"{program}: there is no part {', '.join(unknown)}; {known}")
    print("\n\n".join(plain(parts[name]) for name in names) or known)
