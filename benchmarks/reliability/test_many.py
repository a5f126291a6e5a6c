"""The programs that count kills, calls and reads find no loss, in as many as meet the rare moments of a save."""

import pytest

from benchmarks.reliability.calls import count_calls
from benchmarks.reliability.faults import share
from benchmarks.reliability.kills import KINDS, kill_saves

pytestmark = pytest.mark.slow


# A save in the background is the same in another thread.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("async_save")])
def test_every_tenth_call_of_a_save(kind, tmp_path):
    """A save that ends or fails at a call loses nothing, and no file of another program."""
    counts = count_calls(kind, tmp_path / "x", every=10)

    assert (counts["lost"], counts["not cleaned"]) == (0, 0)
    assert min(counts["killed"], counts["failed"], counts["saved"]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind, tmp_path):
    """A killed save leaves the whole old tree or the whole new one, and nothing else."""
    counts = kill_saves(kind, 100, tmp_path)

    assert (counts["lost"], counts["not cleaned"]) == (0, 0)
    assert counts["during a save"] > 75


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_reads_while_others_save(kind, tmp_path):
    """A reader sees whole trees while two processes save to one place."""
    counts = share(kind, 200, tmp_path)

    assert (counts["not whole"], counts["writers that failed"], counts["left behind"]) == (0, 0, 0)
    assert counts["trees seen"] > 5
