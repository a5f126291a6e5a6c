"""The tables of docs/models.md, written from the kept results."""

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.models.checks import RIGHT, WRONG
from benchmarks.models.results import CHECKS, TABLES, Entry, load, versions
from benchmarks.page import table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = ("model", "forward", "gradient", "training", "`jit`", "runs", "speed")
# Checks in words.
_NAMES = dict(zip(CHECKS, ("forward", "gradient", "training", "`jit`"), strict=True))


def page() -> str:
    """Return the page with its present results."""
    text = PAGE.read_text()
    results = load()
    for name in TABLES:
        entries = results.get(name, {})
        text = put(text, f"{name}: counts", counts(entries))
        text = put(text, name, rows(entries))
        text = put(text, f"{name}: reasons", reasons(entries))
    return put(text, "versions", measured_with())


def put(text: str, name: str, content: str) -> str:
    """Return a text with other content between the comments of this name."""
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n\n).*?(\n*<!-- end of {re.escape(name)} -->)", re.DOTALL)
    assert place.search(text), f"docs/models.md has no place for {name}"
    return place.sub(lambda match: f"{match[1]}{content}\n\n<!-- end of {name} -->", text)


def rows(entries: dict[str, Entry]) -> str:
    """Return the table of a library."""
    lines: list[list[str]] = []
    for name, entry in entries.items():
        speed = "" if entry.speed is None else f"{entry.speed:.1f}x"
        lines.append([name, *_cells(entry), speed])
    return table(_HEAD, lines)


def _cells(entry: Entry) -> list[str]:
    found = entry.found
    cells: list[str] = []
    for check in CHECKS:
        result = getattr(found, check)
        cells.append({RIGHT: "yes", WRONG: "**wrong**"}.get(result, "refused"))
    way = {"vmap": "stacked", "loop": "loop"}.get(found.way, "")
    return [*cells, f"{way}, torch warns" if found.warns else way]


def counts(entries: dict[str, Entry]) -> str:
    """Return a sentence with how many rows are right."""
    found = [entry.found for entry in entries.values()]

    def count(holds: Callable[..., bool]) -> int:
        return sum(map(holds, found))

    by_check = [f"{count(lambda one, c=check: getattr(one, c) == RIGHT)} ({_NAMES[check]})" for check in CHECKS]
    right = f"{', '.join(by_check[:-1])} and {by_check[-1]}"
    return (
        f"Of {len(found)} models, {right} are right. {count(lambda one: one.way == 'vmap')} run stacked, "
        f"{count(lambda one: one.way == 'loop')} run as a loop."
    )


def reasons(entries: dict[str, Entry]) -> str:
    """Return the models that something refuses or that run as a loop, and why."""
    lines: list[str] = []
    for name, (found, _) in entries.items():
        by_text: dict[str, list[str]] = {}
        for check in CHECKS:
            text = getattr(found, check)
            if text == WRONG:
                text = "the module has other results"
            if text != RIGHT:
                by_text.setdefault(text, []).append(_NAMES[check])
        if found.reason:
            by_text.setdefault(found.reason, []).append("loop")
        lines += [f"| {name} | {', '.join(what)} | {_as_code(text)} |" for text, what in by_text.items()]
    if not lines:
        return "Nothing is refused."
    return "\n".join(["| model | what | reason |", "|---|---|---|", *lines])


def _as_code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def measured_with() -> str:
    """Return a sentence with the versions of the packages."""
    named = [f"{name} {version}" for name, version in versions().items()]
    return f"Measured with {', '.join(named)}."
