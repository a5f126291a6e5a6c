"""The table of the first pages is the one that machines have measured."""

import pytest

from benchmarks import headline, training
from benchmarks.rows import OURS


@pytest.mark.parametrize("path", headline.PAGES, ids=str)
def test_the_first_pages_have_the_table_that_is_kept(path):
    """README and first page would show other numbers than a machine has measured."""
    assert headline.BEGIN + headline.render(headline.load()) + headline.END in path.read_text()


def headline_run(processor, ours, loop, jax=None):
    """Return the times of a machine, the same in each row."""
    times = {training.LOOP: loop, training.STACKED: 1.0, OURS: ours}
    if jax is not None:
        times[training.EQUINOX] = jax
    return headline.Run(processor, "torch 2.13", {f"{model} {width}": times for model, width in headline.ROWS})


@pytest.mark.parametrize(
    ("runs", "row"),
    [
        ([headline_run("A", 1.0, 41.0)], "| MLP | 16 | **41x** | 1.00x | not measured |"),
        ([headline_run("A", 1.0, 41.0), headline_run("B", 0.5, 8.25)], "| MLP | 16 | **16 to 41x** | 1.00 to 2.0x |"),
        ([headline_run("A", 2.0, 1.0, 3.0)], "| MLP | 16 | 0.50x | 0.50x | **1.50x** |"),
    ],
)
def test_the_first_table_shows_the_range_over_machines(runs, row):
    """A gain is bold where each machine has it."""
    assert row in headline.render(runs)


def test_machines_with_other_versions_have_their_own():
    """A row that was measured earlier is not one of the present version."""
    run = headline_run("A", 1.0, 2.0)
    later = headline_run("B", 1.0, 2.0)._replace(versions="torch 2.14, tensordict 0.14")

    assert "*One thread of an A and of an B; torch 2.13.*" in headline.render(
        [run, later._replace(versions="torch 2.13")]
    )
    assert "*One thread of an A (torch 2.13) and of an B (torch 2.14).*" in headline.render([run, later])


def test_a_machine_replaces_its_own_row(tmp_path, monkeypatch):
    """Another one is kept beside it."""
    monkeypatch.setattr(headline, "KEPT", tmp_path / "headline.json")
    for run in (headline_run("A", 1.0, 2.0), headline_run("B", 1.0, 3.0), headline_run("A", 1.0, 4.0)):
        headline.keep(run)

    assert [(run.processor, run.rows["MLP 16"][training.LOOP]) for run in headline.load()] == [("A", 4.0), ("B", 3.0)]
