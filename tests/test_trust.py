"""The numbers of docs/reliability.md hold, and its tables can be printed."""

import re

import pytest

from benchmarks import results
from benchmarks.trust import __main__ as trust
from benchmarks.trust.counts import (
    COLLECTED,
    ORACLES,
    ROOT,
    cases_of,
    claim,
    collected,
    holds,
    missing_tests,
    of_the_tree,
)

EXACT = {"laws"}


def test_counts_of_the_tree_are_current():
    """Functions of tests, random inputs and files of other programs are about as many as the page claims."""
    kept, found = trust.kept(), of_the_tree()

    assert [name for name in found if not holds(claim(kept[name]), found[name])] == []
    assert {name: kept[name] for name in EXACT} == {name: found[name] for name in EXACT}


@pytest.mark.slow  # A collection takes a minute.
@pytest.mark.parametrize("name", COLLECTED)
def test_collected_counts_are_current(name):
    """Pytest collects about as many cases as the page claims."""
    assert holds(claim(trust.kept()[name]), collected(name))


@pytest.mark.parametrize(
    ("count", "claimed"), [(19806, 19000), (19001, 19000), (19000, 18000), (240, 230), (41, 40), (7, 6)]
)
def test_a_claim_is_less_than_the_count(count, claimed):
    """Two digits of it, so that a new test does not change the page."""
    assert claim(count) == claimed
    assert holds(claimed, count)


@pytest.mark.parametrize("count", [19000, 18000, 25000])
def test_a_claim_that_does_not_hold_is_found(count):
    """Tests were taken away, or so many were added that the page is old."""
    assert not holds(19000, count)


@pytest.mark.parametrize(
    ("printed", "count"),
    [("a::b\n\n3 tests collected in 1s\n", 3), ("\n19806/35827 tests collected (16021 deselected) in 57s\n", 19806)],
)
def test_the_end_of_a_collection_is_read(printed, count):
    """With and without cases that are deselected."""
    assert cases_of(printed) == count


def test_a_collection_that_fails_is_an_error():
    """An error of a file would count as no tests."""
    with pytest.raises(ValueError, match="pytest collected nothing"):
        cases_of("ERROR tests/test_x.py")


def test_the_tests_of_laws_exist():
    """As files, or as folders."""
    assert missing_tests(trust.LAWS.read_text()) == []
    assert missing_tests("`tests/test_none.py`, `tests/test_trust.py`") == ["tests/test_none.py"]


@pytest.mark.parametrize("name", ORACLES)
def test_the_tests_of_oracles_exist(name):
    """A program that results are compared with has a file that does."""
    assert (ROOT / ORACLES[name]).exists()


def test_no_gpu_has_results():
    """The page says that nothing ran on a GPU; a result of one changes that sentence."""
    text = trust.PAGE.read_text()

    assert ("No test or benchmark has run on a GPU." in text) == (results.load([]).gpus == ())


def test_the_counted_runs_did_no_harm():
    """Rows of kills, damage and hostile input begin with 0, and so do the p-values that fail."""
    found = {what: result for what, _, result in trust.rows()}
    harmless = [what for what in found if re.match("saves|ranks|reads|damaged|hostile|fuzzed|faulty|p-values", what)]

    assert len(harmless) == 10
    assert [what for what in harmless if not found[what].startswith("0 ")] == []


def test_the_page_names_parts_that_can_be_shown():
    """Each `--show` of the page is a table."""
    named = set(re.findall(r"`(?:python -m benchmarks\.trust )?--show (\w+)`", trust.PAGE.read_text()))

    assert {"laws", "random", "damage"} <= named
    assert named <= trust.parts().keys()


@pytest.mark.parametrize("name", trust.parts())
def test_a_part_is_printed(name, capsys):
    """With its heading, and without a place that nothing fills."""
    trust.main(["--show", name])
    printed = capsys.readouterr().out

    assert len(printed) > 200
    assert "{{" not in printed


def test_an_unknown_part_lists_the_known_ones():
    """The message has the names."""
    with pytest.raises(SystemExit, match=r"there is no part x; parts: laws random about kills"):
        trust.main(["--show", "x"])
