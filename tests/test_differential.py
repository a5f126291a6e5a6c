"""A sample of the comparison with tensordict; `make conformance` runs it at length."""

import pytest

from benchmarks.conformance.runs import run_cases, run_sequences


@pytest.mark.slow
def test_random_operations_agree_with_tensordict():
    """Operations on dense, lazy and typed trees, alone and in sequences, give what tensordict and plain torch give."""
    assert run_cases(0, 300).total() > 200
    assert run_cases(0, 150, kinds=True).total() > 100
    assert run_sequences(0, 20).total() > 40
