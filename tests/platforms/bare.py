"""Runs other tests without the calls that Windows lacks: `python -m pytest -p tests.platforms.bare tests/storage`.

Tests of those calls themselves are left out, each group with its reason.
"""

import fcntl
import sys
from fnmatch import fnmatch

from tests.platforms.less import take_away

# The tests fork processes and lock files; tdfunc does neither.
take_away("bare", keep_fork=True)

import tdfunc  # noqa: E402, F401

sys.modules["fcntl"] = fcntl

LEFT_OUT = {
    "the test takes the same calls away, or disturbs them": ("*test_deletion.py::*",),
}


def pytest_collection_modifyitems(config, items):
    """Leave out tests that do not apply."""
    patterns = [pattern for group in LEFT_OUT.values() for pattern in group]
    gone = [item for item in items if any(fnmatch(item.nodeid, pattern) for pattern in patterns)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]
