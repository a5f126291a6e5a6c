"""tdfunc against tensordict on thousands of random pairs of tree and operation.

Each case compares values, dtypes, batch sizes, names, key order, memory sharing and the class of the error, checks
plain torch on every leaf, and checks that no input changed. Every way in which the two may differ is one entry of
tests/accepted.py, with the heading of docs/differences.md that explains it.
"""

import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import tdfunc._collection
from tdfunc import TensorDict
from tdfunc.ops import cast, join
from tests.accepted import ACCEPTED, RARE, tensors
from tests.differential import Tree, differences, outcome, random_case, same_tensor
from tests.incumbent import Incumbent
from tests.random_trees import Branch

PAGE = Path(__file__).parent.parent / "docs" / "differences.md"
# The errors of tdfunc, and those of tensordict for the same mistake.
ERRORS = {
    "MissingKeyError": {"KeyError", "ValueError", "AttributeError", "RuntimeError", "TypeError"},
    "BatchSizeError": {"RuntimeError"},
    "LeafMismatchError": {
        "KeyError",
        "RuntimeError",
        "AttributeError",
        "TypeError",
        "RecursionError",
        "NotImplementedError",
    },
    "TreeStructureError": {"KeyError", "RuntimeError", "TypeError", "AttributeError", "NotImplementedError"},
    "IndexError": {
        "IndexError",
        "RuntimeError",
        "ValueError",
        "TypeError",
        "KeyError",
        "RecursionError",
        "AttributeError",
    },
    "ValueError": {"ValueError", "RuntimeError", "KeyError", "IndexError"},
    "RuntimeError": {"RuntimeError", "ValueError", "AssertionError", "TypeError", "RecursionError"},
    "NotImplementedError": {"NotImplementedError", "RuntimeError", "TypeError", "AttributeError", "RecursionError"},
    "TypeError": {"TypeError"},
}


def check(case):
    """Run a case on both sides and against plain torch; return the accepted difference, if there is one.

    Raises:
        AssertionError: The sides differ in a way that is not accepted, or an input changed.
    """
    leaves = tensors(case)
    before = [(leaf._version, leaf.clone()) for leaf in leaves]
    with warnings.catch_warnings():
        # torch and tensordict warn about degrees of freedom, lists as indices and slow paths; both sides alike.
        warnings.simplefilter("ignore")
        ours, theirs = outcome(case.ours, case.inputs, TensorDict), outcome(case.theirs, case.inputs, Incumbent)
        for leaf, (version, copy) in zip(leaves, before, strict=True):
            assert leaf._version == version, "an input was written to"
            assert same_tensor(leaf, copy), "an input was changed"
        accepted = None if agree(ours, theirs) else explain_difference(case, ours, theirs)
        check_oracle(case, ours)
    if accepted is None and ours.error is None:
        assert_same_sharing(ours.value, theirs.value, leaves)
    return accepted


def agree(ours, theirs):
    """Whether both raised errors that correspond, or both returned the same."""
    if ours.error is not None and theirs.error is not None:
        return type(theirs.error).__name__ in ERRORS[_builtin_or_own(ours.error)]
    return ours.error is None and theirs.error is None and not list(differences(ours.value, theirs.value))


def _builtin_or_own(error):
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS)


def explain_difference(case, ours, theirs):
    """Return the heading under which the difference is accepted."""
    for accepted in ACCEPTED:
        if all(condition(case, ours, theirs) for condition in accepted.conditions):
            return accepted.heading
    found = sorted({kind for kind, _ in differences(ours.value, theirs.value)})
    raise AssertionError(f"{case.name}({case.detail!r}) differs in {found}:\n{ours}\n{theirs}\n{case.inputs}")


def check_oracle(case, ours):
    """Check every leaf of the first input against the same operation of plain torch."""
    if case.oracle is None or len(case.inputs) != 1 or ours.error is not None:
        return
    branch = case.inputs[0]
    for path, leaf in _walk(branch):
        expected = case.oracle(leaf, len(branch.size))
        parts = zip(ours.value, expected, strict=True) if isinstance(ours.value, tuple) else [(ours.value, expected)]
        for tree, wanted in parts:
            found = tree
            for key in path:
                found = found.entries[key]
            assert found.dtype == wanted.dtype, f"{case.name}: dtype at {path}"
            assert same_tensor(found, wanted), f"{case.name}: value at {path}"


def _walk(branch, at=()):
    for key, value in branch.entries.items():
        if isinstance(value, Branch):
            yield from _walk(value, (*at, key))
        elif isinstance(value, torch.Tensor):
            yield (*at, key), value


def assert_same_sharing(ours, theirs, leaves):
    """Check that the same results share memory with the inputs: no copy where a view will do, no alias instead."""
    if isinstance(ours, Tree):
        for key in ours.entries:
            assert_same_sharing(ours.entries[key], theirs.entries[key], leaves)
    elif isinstance(ours, tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_sharing(mine, other, leaves)
    elif isinstance(ours, torch.Tensor) and ours.numel():
        pointers = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        shared = [x.untyped_storage().data_ptr() in pointers for x in (ours, theirs)]
        assert shared[0] == shared[1], "shares memory with an input in one library only"


def run(seed, cases):
    """Check many cases; return how often each accepted difference was met."""
    met = Counter()
    for i in range(cases):
        rng = np.random.default_rng([seed, i])
        try:
            met[check(random_case(rng))] += 1
        except Exception as error:
            raise AssertionError(f"case [{seed}, {i}]: {error}") from error
    return met


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_tensordict(seed):
    """An operation would differ from tensordict, or from torch, in a way that nobody has looked at."""
    assert run(seed, 1000).total() == 1000


@pytest.mark.slow
def test_agrees_with_tensordict_at_length():
    """A rare difference would be missed, or an entry of ACCEPTED would explain nothing."""
    met = run(int(os.environ.get("TDFUNC_TEST_SEED", 100)), 60_000)

    assert {accepted.heading for accepted in ACCEPTED} - RARE <= set(met)


def test_every_difference_is_documented():
    """A user of tensordict would meet a difference that the page does not tell, or read of one that is gone."""
    page = PAGE.read_text()

    for accepted in ACCEPTED:
        assert f"\n**{accepted.heading}** " in page, accepted.heading


def _first_failure(seed, cases):
    with pytest.raises(AssertionError) as caught:
        run(seed, cases)
    return str(caught.value)


def test_finds_an_axis_off_by_one(monkeypatch):
    """Stacking along the wrong axis would pass."""
    right = join.dim_index
    monkeypatch.setattr(join, "dim_index", lambda dim, ndim, call: max(right(dim, ndim, call) - 1, 0))

    assert "stack(" in _first_failure(0, 400)


def test_finds_a_lost_name(monkeypatch):
    """Indexing that drops the names of dimensions would pass."""
    monkeypatch.setattr(tdfunc._collection, "index_names", lambda index, names: None)

    assert "index(" in _first_failure(0, 400)


def test_finds_an_aliased_output(monkeypatch):
    """A clone that shares the memory of the original would pass."""
    monkeypatch.setattr(cast, "clone", lambda tree, recurse: tree)

    assert "shares memory" in _first_failure(0, 400)
