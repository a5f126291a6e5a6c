"""Two versions on one core: here this one twice."""

from benchmarks import against, tensorclass
from benchmarks.page import render_summary
from benchmarks.results import Results


def test_a_version_is_compared_with_itself(monkeypatch):
    """Each case is named once, and takes time in both processes."""
    monkeypatch.setattr(against, "PASSES", 1)
    monkeypatch.setattr(against, "ROUNDS", 3)

    found = against.compare(against.ROOT, "tensorclass")

    assert [what for what, _, _ in found] == [f"tensorclass: {case.what}" for case in tensorclass.SUITE.cases()]
    assert all([before > 0 and now > 0 for _, before, now in found])


def test_the_page_names_what_became_slower():
    """The mean is geometric, and 0.95x is the limit."""
    page = render_summary(Results(against=("abc", [("trees: get", 1.0, 1.0), ("trees: set", 9.0, 10.0)])))

    assert "Against version abc, the 2 cases" in page
    assert "0.95x as fast in the mean, from 0.90x to 1.00x. Below 0.95x: trees: set (0.90x)." in page
