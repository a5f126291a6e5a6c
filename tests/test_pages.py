"""The pages of docs/ that programs write are current."""

import pytest

from benchmarks.pages.__main__ import WRITERS


# `make conformance` checks the pages of operations, beside a newer tensordict than the one that tests install.
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.PAGE.stem)
def test_pages_are_current(writer):
    """A committed page is what its writer writes; `make pages` writes all of them."""
    assert writer.PAGE.read_text() == writer.page()
