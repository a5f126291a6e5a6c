"""docs/field.md: each row has an address of a report and a test that exists."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)")
PLACE = re.compile(r"`((?:tests|benchmarks)/[\w/]+\.py)::(\w+)`")
HEAD = ["report", "what it describes", "tdfunc", "test"]


def read_rows(text):
    """The cells of the rows of all tables of a page."""
    lines = [line for line in text.splitlines() if line.startswith("|") and set(line) - set("|-")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row != HEAD]


ROWS = read_rows((ROOT / "docs/field.md").read_text())
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition("]")[0].lstrip("["))


@functools.cache
def names_in(file):
    """The names of the tests of a file, without an import of it."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def missing_tests(cell):
    """The places of a cell that are not tests of their files."""
    places = PLACE.findall(cell)
    return [place for place in places if not (ROOT / place[0]).is_file() or place[1] not in names_in(place[0])]


def is_list_of(pattern, cell):
    """Whether a cell is one or more matches of a pattern, with commas between them."""
    return re.fullmatch(rf"(?:{pattern.pattern})(?:, (?:{pattern.pattern}))*", cell) is not None


def test_the_page_has_rows():
    """The tests below compare something."""
    assert len(ROWS) > 80


@each_row
def test_a_row_has_four_cells(row):
    """None is empty."""
    assert [bool(cell) for cell in row] == [True] * 4


@each_row
def test_a_row_has_well_formed_addresses(row):
    """Links to issues and pull requests, and nothing else."""
    assert is_list_of(ADDRESS, row[0])


@each_row
def test_the_text_of_an_address_is_its_link(row):
    """Repository and number are those of the address."""
    assert [(name, number) for name, number, *_ in ADDRESS.findall(row[0])] == [
        (name, number) for *_, name, number in ADDRESS.findall(row[0])
    ]


@each_row
def test_a_row_has_places_of_tests(row):
    """Files and functions, and nothing else."""
    assert is_list_of(PLACE, row[3])


@each_row
def test_the_tests_of_a_row_exist(row):
    """As functions of their files."""
    assert missing_tests(row[3]) == []


def test_no_report_has_two_rows():
    """Each address is in one row, once."""
    counts = Counter(f"{name}#{number}" for row in ROWS for *_, name, number in ADDRESS.findall(row[0]))

    assert [name for name, count in counts.items() if count > 1] == []


def test_each_test_of_this_folder_has_a_row():
    """A test of a report that the page does not name would not be found."""
    named = {name for row in ROWS for file, name in PLACE.findall(row[3]) if file.startswith("tests/field/")}
    files = [path.relative_to(ROOT) for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    found = {name for file in files for name in names_in(file) if name.startswith("test_")}

    assert found - named == set()


@pytest.mark.parametrize("cell", ["`tests/field/test_page.py::test_none`", "`tests/field/test_none.py::test_x`"])
def test_a_missing_test_is_found(cell):
    """A function, or a file, that is not there."""
    assert missing_tests(cell) != []


@pytest.mark.parametrize(
    "cell",
    ["", "pytorch/pytorch#1", "[a/b#1](https://github.com/a/b/commit/1)", "[a/b#1](http://github.com/a/b/pull/1)"],
)
def test_a_malformed_address_is_found(cell):
    """No link, no number, and another kind of page."""
    assert not is_list_of(ADDRESS, cell)
