"""The rows of docs/models.md are complete, its tables are those of its results, and its checks find faults."""

import json
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.models import checks, page, results
from benchmarks.models.checks import RIGHT, WRONG, Found
from benchmarks.models.layers import LEFT_OUT, ROWS
from benchmarks.models.results import TABLES, Entry
from benchmarks.models.rows import Example, Row

GOOD = Found(RIGHT, RIGHT, RIGHT, RIGHT, "vmap", "", False)


@pytest.mark.parametrize("table", TABLES)
def test_each_row_has_a_result(table):
    """A row that was added is on the page, and one that is gone is not."""
    assert list(results.load()[table]) == [row.name for row in TABLES[table]]


def test_each_class_of_torch_has_a_row_or_a_reason():
    """A class of torch.nn is a row, or named among those that have none."""
    with_row = {row.name for row in ROWS}
    without = {name for names in LEFT_OUT.values() for name in names}

    assert set(nn.modules.__all__) - with_row - without == set()
    assert with_row & without == set()


@pytest.mark.parametrize("table", TABLES)
def test_names_of_rows_are_unique(table):
    """A name is the key of a result."""
    names = [row.name for row in TABLES[table]]

    assert len(set(names)) == len(names)


def test_each_model_of_transformers_is_in_one_family():
    """The page names each model once."""
    named = [name for names in page.FAMILIES.values() for name in names]

    assert sorted(named) == sorted(results.load()["transformers"])


def test_each_family_of_torch_begins_with_a_row():
    """A row that is gone would give its family to the one before."""
    assert page.FIRST.keys() <= results.load()["torch.nn"].keys()
    assert next(iter(results.load()["torch.nn"])) == next(iter(page.FIRST))


def test_each_model_that_fails_a_check_has_advice():
    """The page names the models that are refused or run as a loop, and no others."""
    entries = {name: entry for kept in results.load().values() for name, entry in kept.items()}
    failing = [name for name, entry in entries.items() if not all(results.claims(entry.found).values())]

    assert sorted(failing) == sorted(page.ADVICE)


def test_a_family_counts_what_runs_stacked():
    """A loop is counted, and speeds have a median and a range."""
    loop = GOOD._replace(way="loop")
    entries = [Entry(GOOD, 2.0), Entry(GOOD, 6.0), Entry(GOOD, 3.0), Entry(loop, None)]

    assert page._family(entries) == ("3 of 4", "3.0x (2.0x to 6.0x)")
    assert page._family(entries[:3])[0] == "all"


@pytest.mark.parametrize("table", TABLES)
def test_all_rows_can_be_printed(table):
    """Each row and each reason is in the table that is printed."""
    text = page.parts()[table]

    assert [name for name in results.load()[table] if f"\n| {name} | " not in text] == []


def test_results_are_read_as_they_were_stored(tmp_path):
    """An entry is the same after a round trip through JSON, with and without a speed."""
    first, second = [row.name for row in ROWS[:2]]
    entries = {first: Entry(GOOD, 1.5), second: Entry(GOOD._replace(jit="TypeError: no", way="loop"), None)}
    results.store({"torch.nn": entries}, {"torch": "1"}, tmp_path / "r.json")

    assert results.load(tmp_path / "r.json")["torch.nn"] == entries


def test_rows_that_are_gone_are_dropped(tmp_path):
    """An entry without a row is not kept."""
    results.store({"torch.nn": {"no such row": Entry(GOOD, None)}}, {}, tmp_path / "r.json")

    assert json.loads((tmp_path / "r.json").read_text())["tables"]["torch.nn"] == {}


def test_a_row_of_the_table():
    """Checks are words, and a speed is blank where it was not measured."""
    found = GOOD._replace(gradient=WRONG, jit="TypeError: no", way="loop", warns=True)
    lines = page.rows({"A": Entry(GOOD, 2.0), "B": Entry(found, None)}).splitlines()

    assert lines[2:] == [
        "| A | yes | yes | yes | yes | stacked | 2.0x |",
        "| B | yes | **wrong** | yes | refused | loop, torch warns |  |",
    ]


def test_reasons_name_what_is_refused():
    """Checks with one reason share a line, and a loop has its own."""
    found = GOOD._replace(training="TypeError: no", jit="TypeError: no", way="loop", reason="a value is read")
    lines = page.reasons({"A": Entry(GOOD, None), "B": Entry(found, None)}).splitlines()

    assert lines[2:] == ["| B | training, `jit` | `TypeError: no` |", "| B | loop | `a value is read` |"]


def test_content_is_put_between_its_comments():
    """Other text of the page stays, and a second time changes nothing."""
    text = "a\n\n<!-- x -->\n\nold\n\n<!-- end of x -->\n\nb"
    once = page.put(text, "x", "new \\1")

    assert once == "a\n\n<!-- x -->\n\nnew \\1\n\n<!-- end of x -->\n\nb"
    assert page.put(once, "x", "new \\1") == once


# -- the checks find faults ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer between dropout and batch norm."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x)))


ROW = Row("net", Net, lambda: Example((torch.randn(5, 3),)))


def test_a_good_model_is_right():
    """Nothing is found in a model that runs."""
    assert checks.check(ROW) == GOOD


class Global(Net):
    """A layer whose number of calls changes what it returns."""

    calls = 0

    def forward(self, x):
        Global.calls += 1
        return super().forward(x) + Global.calls


class Reads(Net):
    """A branch on a value."""

    def forward(self, x):
        return super().forward(x) if x.sum() < 1e9 and self.layer.weight.sum() < 1e9 else x


@pytest.mark.parametrize("check", ["forward", "gradient", "training"])
def test_a_forward_of_another_function_is_wrong(check):
    """Outputs, gradients and steps that differ from the modules' are found."""
    assert getattr(checks.check(ROW._replace(make=Global)), check) == WRONG


def test_a_loop_is_called_so():
    """A forward that reads values runs as a loop, with the reason, and vmap and jit refuse it."""
    found = checks.check(ROW._replace(make=Reads))

    assert found.way == "loop"
    assert found.forward == RIGHT
    assert found.training == RIGHT
    assert "data-dependent control flow" in found.reason
    assert found.jit.startswith("UnsupportedError")


def test_masks_that_differ_are_wrong(monkeypatch):
    """A training step whose members draw from other keys than the modules is found."""
    served = checks.seeded
    monkeypatch.setattr(checks, "seeded", lambda key: served(key + 1))

    assert checks.check(ROW).training == WRONG


def test_a_warning_of_torch_is_noted():
    """A function that vmap runs one member after the other makes torch warn."""

    class Warns(Net):
        def forward(self, x):
            warnings.warn("There is a performance drop because ...", stacklevel=1)
            return super().forward(x)

    assert checks.check(ROW._replace(make=Warns)).warns
