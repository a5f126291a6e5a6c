"""A signal handler that saves in the middle of a save: both are whole, or one is refused at once."""

import ast

import pytest

from tests.storage.handlers import KINDS
from tests.storage.scripts import ended, run

pytestmark = pytest.mark.sample(3)

SCRIPT = """
    import pathlib, sys
    from tests.storage.handlers import main
    main(sys.argv[1], pathlib.Path(sys.argv[2]), *map(int, sys.argv[3:]))
"""


def count(kind, folder, *, seed, lines, times):
    """Interrupt saves in another process, and return what came of them."""
    return ast.literal_eval(ended(run(SCRIPT, kind, folder, seed, lines, times)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Shards", "SaverQueue", "ManagerKeeps"])
def test_a_handler_that_saves_during_a_save(kind, tmp_path):
    """At random lines of tdfunc and of the standard library, and at random times."""
    counts = count(kind, tmp_path, seed=0, lines=16, times=4)

    assert counts["calls"] >= 16
    assert {name: counts[name] for name in ("not whole", "lost", "slow")} == {"not whole": 0, "lost": 0, "slow": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_saves_at_many_lines(kind, tmp_path):
    """Saves of every kind, at many lines."""
    counts = count(kind, tmp_path, seed=1, lines=150, times=50)

    assert counts["calls"] >= 150
    assert {name: counts[name] for name in ("not whole", "lost", "slow")} == {"not whole": 0, "lost": 0, "slow": 0}
