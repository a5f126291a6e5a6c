"""Saves that are killed, or refused by the system, at any call, in folders where other programs have files too."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability.calls import (
    CODES,
    FOREIGN,
    INDICES,
    MODES,
    Disturbance,
    check,
    disturb,
    prepare,
    strays,
)
from benchmarks.reliability.kills import KINDS
from tests.helpers import examples

# A save in the background is the same in another thread.
WRITERS = [kind for kind in KINDS if not kind.endswith("async_save")]
PLANS = st.builds(Disturbance, st.integers(1, 150), st.sampled_from(MODES), st.sampled_from(CODES), st.booleans())


@pytest.mark.slow
@given(
    kind=st.sampled_from(WRITERS),
    foreign=st.sets(st.sampled_from(sorted(FOREIGN))).map(lambda names: {name: FOREIGN[name] for name in names}),
    index=st.none() | st.sampled_from(INDICES),
    saves=st.lists(st.tuples(st.integers(0, 3), PLANS), min_size=1, max_size=3),
)
@examples(2)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_save_removes_files_of_others_or_the_tree(kind, foreign, index, saves):
    """After each disturbed save the old tree or the new one is there, whole, and every file of another program.

    A save that raises has left the old tree. The next save that is left alone removes what the others left.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        prepare(kind, folder, foreign, index)
        now = 1
        for value, plan in saves:
            _, ending = disturb(kind, folder, value, plan)
            now = check(kind, folder, foreign, now, value, ending)
        KINDS[kind](folder, 8).save(2, fsync=False)
        check(kind, folder, foreign, now, 2, "saved")
        assert strays(kind, folder, foreign) == []
    finally:
        shutil.rmtree(folder)
