"""Ragged trees against their rows as arrays of numpy: three random operations on a random lazy stack."""

import random

import pytest
import torch

from tdfunc._lazystack import LazyStack
from tdfunc.core.errors import LeafMismatchError
from tests.lazystack.rows import OPERATIONS, assert_rows_equal, random_stack, rows_of

pytestmark = pytest.mark.sample(3)

# What a lazy stack refuses, and only where its own dimension is concerned.
REFUSALS = {
    IndexError: "no tree of the lazy stack is left",
    LeafMismatchError: "a lazy stack has no one tensor for each leaf",
}


def attempt(call):
    """The results of a call, and the error in which it ended."""
    try:
        return list(call()), None
    except (IndexError, LeafMismatchError) as err:
        return [], err


def refuses(err, expected, may_refuse):
    """Return whether an error is that of no tree left, or of a call that needs one tensor for each leaf."""
    if REFUSALS.get(type(err), "?") not in str(err):
        return False
    return any(0 in part.shape for part in expected) or (may_refuse and not isinstance(err, IndexError))


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
        ours, oracle, may_refuse = make(rng, tree, rows, rng.randint(-rows.ndim, rows.ndim - 1) if rows.ndim else 0)
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
            assert refuses(refusal, expected, may_refuse), (make.__name__, tree.batch_size, refusal)
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
    """An operation on a lazy stack takes the rows that the same one takes from an array of rows, or refuses."""
    assert sum(chain(1000 * OPERATIONS.index(operation) + seed, operation) for seed in range(15)) > 8
