"""The tables that threads share: one forgets its oldest entry while others enter theirs."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tdfunc.llm.templates.fields import known_kinds


@pytest.fixture
def many_switches():
    """Threads take turns after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_more_templates_than_are_kept_in_threads():
    """Each thread gets a set of its own for its template, and no KeyError or RuntimeError."""
    with ThreadPoolExecutor(4) as pool:
        found = [len(kinds) for part in pool.map(_know_many, range(4)) for kinds in part]
    assert found == [0] * len(found)


def _know_many(thread):
    return [known_kinds((thread, i)) for i in range(20_000)]
