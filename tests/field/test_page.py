"""The reports of `python -m benchmarks.field`: each has an address and a test that exists."""

import ast
import functools
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.field.__main__ import addresses, main, read_rows, reports

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)")
PLACE = re.compile(r"`((?:tests|benchmarks)/[\w/]+\.py)::(\w+)`")
ROWS = [list(row) for row in reports([])]
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


def test_the_file_has_rows():
    """The tests below compare something, and each line of a table is a row."""
    assert len(ROWS) > 80
    head = "| report | what it describes | tdfunc | test |\n|---|---|---|---|\n"
    assert read_rows(head + "| a | b | c | d |\n") == [["a", "b", "c", "d"]]


def test_addresses_are_counted():
    """A row may have several reports."""
    assert addresses() == sum(row[0].count("](https://") for row in ROWS) > len(ROWS)


def test_reports_with_a_word_are_printed(monkeypatch, capsys):
    """The address, the situation, the behaviour and the test, of the reports with all words."""
    monkeypatch.setattr(sys, "argv", ["field", "Optax", "clip"])
    main()
    printed = capsys.readouterr().out

    assert "https://github.com/google-deepmind/optax/pull/1752\nA clip to norm 0" in printed
    assert "tensordict" not in printed


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
    """A test of a report that no row names would not be found."""
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
