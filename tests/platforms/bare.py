"""Runs other tests without the calls that Windows lacks: `python -m pytest -p tests.platforms.bare tests/storage`.

Tests of those calls themselves are left out, each with its reason.
"""

from fnmatch import fnmatch

from tests.platforms.less import take_away

# The harness forks; tdfunc does not.
take_away("bare", keep_fork=True)

# What a test is about, by the names of tests.
LEFT_OUT = {
    "it takes away calls that are not there": (
        "*test_commit.py::*", "*test_races.py::*exchang*", "*test_races.py::*two_steps*",
    ),
    "it expects the locks of killed processes to tell leftovers from saves": (),
}  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Leave out tests that do not apply."""
    patterns = [pattern for group in LEFT_OUT.values() for pattern in group]
    gone = [item for item in items if any(fnmatch(item.nodeid, pattern) for pattern in patterns)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]
