"""Ragged trees against their rows as arrays of numpy: three random operations on a random lazy stack."""

import random

import pytest
import torch

from tdfunc._lazystack import LazyStack
from tdfunc.core.errors import LeafMismatchError
from tests.lazystack.rows import OPERATIONS, assert_rows_equal, random_stack, rows_of

# What a lazy stack refuses, and only where its own dimension is concerned.
REFUSALS = {
    IndexError: "a lazy stack keeps one tree at least",
    LeafMismatchError: "a lazy stack has no one shape for each leaf",
}


def attempt(call):
    """The results of a call, and the error in which it ended."""
    try:
        return list(call()), None
    except (IndexError, LeafMismatchError) as err:
        return [], err


def refuses(err, tree, expected, merges):
    """Whether an error says that no tree would be left, or that rows of other shapes would be merged."""
    if REFUSALS.get(type(err), "?") not in str(err):
        return False
    if isinstance(err, IndexError):
        return any(0 in part.shape for part in expected)
    return merges or 0 in tree.batch_size


def chain(seed, given=None):
    """Run random operations on both sides; how many were compared."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tree = random_stack(rng)
    rows, compared = rows_of(tree), 0
    for i in range(3):
        usable = OPERATIONS if rows.ndim else [op for op in OPERATIONS if op.__name__ in ("rescale", "set_entry")]
        make = given if given is not None and i == 0 else rng.choice(usable)
        if not rows.ndim and make not in usable:
            break
        ours, oracle, merges = make(rng, tree, rows, rng.randint(-rows.ndim, rows.ndim - 1) if rows.ndim else 0)
        try:
            expected = oracle()
        except (RuntimeError, KeyError, IndexError):
            # Rows of other shapes or keys, or index tensors that do not fit each other.
            with pytest.raises((LeafMismatchError, RuntimeError, IndexError)):
                ours()
            break
        found, refusal = attempt(ours)
        if refusal is not None:
            assert isinstance(tree, LazyStack)
            assert refuses(refusal, tree, expected, merges), (make.__name__, tree.batch_size, refusal)
            break
        assert len(found) == len(expected), make.__name__
        for mine, theirs in zip(found, expected, strict=True):
            assert_rows_equal(rows_of(mine), theirs)
        compared += 1
        if not found:
            break
        at = rng.randrange(len(found))
        tree, rows = found[at], expected[at]
    return compared


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.__name__)
def test_operations_treat_rows_as_numpy_does(operation):
    """An operation would take another row, or another part of it, than the same one on an array of rows."""
    assert sum(chain(1000 * OPERATIONS.index(operation) + seed, operation) for seed in range(15)) > 4
