"""Two versions on one core: here this one twice."""

from benchmarks import against, tensorclass
from benchmarks.page import render, render_summary
from benchmarks.results import Results


def test_a_version_is_compared_with_itself(monkeypatch):
    """Each case is named once, and takes time in both processes."""
    monkeypatch.setattr(against, "PASSES", 1)
    monkeypatch.setattr(against, "ROUNDS", 3)

    found = against.compare(against.ROOT, "tensorclass")

    assert [what for what, _, _ in found] == [f"tensorclass: {case.what}" for case in tensorclass.SUITE.cases()]
    assert all([before > 0 and now > 0 for _, before, now in found])


RESULTS = Results(against=("abc", [("trees: get", 1.0, 1.0), ("trees: set", 9.0, 10.0)]))


def test_the_page_counts_what_became_slower():
    """The mean is geometric, and 0.95x is the limit."""
    page = render_summary(RESULTS)

    assert "Against version abc, the 2 cases" in page
    assert "0.95x as fast in the mean, from 0.90x to 1.00x. 1 are below 0.95x" in page


def test_each_case_is_printed():
    """The count of the page would have no rows behind it."""
    assert "| trees: set | 9.00 us | 10.0 us | 0.90x |" in render(RESULTS)["against"]
