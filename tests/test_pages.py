"""The pages of docs/ that programs write are current."""

import pytest

from benchmarks.pages.__main__ import WRITERS

# `make conformance` checks the page of operations, beside a newer tensordict than the one that tests install.
CHECKED = [writer for writer in WRITERS if writer.PAGE.stem != "operations"]


@pytest.mark.parametrize("writer", CHECKED, ids=lambda writer: writer.PAGE.stem)
def test_pages_are_current(writer):
    """A committed page is what its writer writes; `make pages` writes all of them."""
    assert writer.PAGE.read_text() == writer.page()
