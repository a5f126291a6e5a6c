"""The table of faults of other libraries names tests that exist, run both sides, and leaves none of them out."""

import ast
import functools
from pathlib import Path

import pytest

from benchmarks.conformance.faults.rows import CONTAINER, FOLDERS, MODULES, OURS, ROWS, SWAPPING, TRANSFORMS

ROOT = Path(__file__).parents[3]
NAMED = {place for place in ROWS.values() if "::" in place}
# How a test runs what is not ours.
THEIRS = (
    "Incumbent", "tensordict", "Their", "theirs", "functional_call", "stack_module_state", "torch.optim",
    "torch._foreach", "clip_grad_norm_", "run_fresh", "F.linear", "inner_weights", "interleave", "_orig_mod", "Holder",
    "copy.deepcopy",
)  # fmt: skip


@functools.cache
def sources(file):
    """The source of each test of a file, by name."""
    text = (ROOT / file).read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes if node.name.startswith("test_")}


@pytest.mark.parametrize("file", sorted({place.split("::")[0] for place in NAMED}))
def test_rows_name_the_tests_of_a_file(file):
    """Every row names a test that is there, and every test has a row."""
    named = {place.split("::")[1] for place in NAMED if place.startswith(f"{file}::")}
    ours_only = {"test_two_threads_in_one_block"}

    assert named == set(sources(file)) - ours_only


@pytest.mark.parametrize("place", sorted(NAMED))
def test_rows_run_theirs(place):
    """Every test of a row runs the other library."""
    file, name = place.split("::")
    source = sources(file)[name]

    assert any(word in source for word in THEIRS)
    assert '"""' in source


def test_rows_have_tests_of_ours():
    """Each fault that a row names has a test in tests/."""
    ours = {name for file in (ROOT / "tests").rglob("test_*.py") for name in sources(file)}
    theirs = {place.split("::")[1] for place in NAMED}

    assert {name for name in theirs if OURS.get(name, name) not in ours} == set()
    assert theirs >= OURS.keys()


def test_rows_that_run_nothing_say_why():
    """A row without a test gives the reason."""
    reasons = [place for place in ROWS.values() if "::" not in place]

    assert all(len(reason.split()) > 2 or (ROOT / reason).is_file() for reason in reasons)
    assert sum(map(len, (SWAPPING, MODULES, FOLDERS, TRANSFORMS, CONTAINER))) == len(ROWS)
