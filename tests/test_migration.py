"""The tables of docs/migration.md: every line of the middle column runs, in the order of the page."""

import re
from pathlib import Path

import pytest

from tests.test_docs import page_module, python_blocks  # noqa: F401

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
HEADINGS = ["equinox", "optax", "orbax", "torch.func", "mergekit", "tensordict", "peft"]


def rows(text):
    """The rows of each table by heading: (their line, our line, the difference)."""
    found = {}
    for section in text.split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        cells = [re.split(r"(?<!\\) \| ", line.strip("| ") + " ") for line in lines[1:]]
        found[section.splitlines()[0]] = [[cell.strip() for cell in row] for row in cells]
    return found


TABLES = rows(PAGE.read_text())


def run(lines, module):
    """Execute lines of code in the namespace of a module, after the block of the page."""
    (block,) = python_blocks(PAGE.read_text())
    for line in [block.code, *lines]:
        exec(compile(line, str(PAGE), "exec"), vars(module))


def test_every_library_has_a_table():
    """The tables stand in the order of the headings."""
    assert list(TABLES) == HEADINGS


def test_every_row_has_a_line_of_code():
    """A row has theirs, and all of ours are Python."""
    rows = [row for table in TABLES.values() for row in table]

    assert [theirs for theirs, *_ in rows if not re.match("`.+`", theirs)] == []
    assert [ours for _, ours, *_ in rows if not re.fullmatch("`[^`]+`", ours)] == []


@pytest.mark.parametrize("heading", HEADINGS)
def test_our_lines_run(heading, page_module):  # noqa: F811
    """The lines of a table run after those of the tables above it."""
    tables = HEADINGS[: HEADINGS.index(heading) + 1]

    run([row[1].strip("`") for name in tables for row in TABLES[name]], page_module)


def test_a_line_that_does_not_run_is_found(page_module):  # noqa: F811
    """A misspelled line raises."""
    with pytest.raises(AttributeError, match="from_modle"):
        run(["params = tdf.from_modle(model)"], page_module)
