"""Rows in another order or number, against torch on every leaf, dense and in lazy stacks."""

import pytest
import torch

from tdfunc import BatchSizeError, LeafMismatchError, TensorDict
from tdfunc._lazystack.stack import lazy_stack
from tdfunc.ops.rearrange import pad
from tests.helpers import assert_trees_equal


# name -> (on trees, on a leaf with batch dimensions 0 and 1, names of the result)
def ragged():
    """Three rows of different length and a dense column of three."""
    return lazy_stack([TensorDict({"x": torch.arange(n), "s": f"row {n}"}, [n]) for n in (1, 2, 3)])


def test_shares_what_stays():
    """Rows that stay where they are are not copied."""
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])

    assert td.repeat(1, 1) is td


def test_transforms():
    """The operations would not trace, or see dimensions that vmap took away."""
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    mapped = torch.vmap(lambda t: t.flip(0).repeat(2))(td)
    compiled = torch.compile(lambda t: t.flip(0).repeat(1, 2), fullgraph=True, backend="eager")(td)

    assert_trees_equal(mapped, td.flip(1).repeat(1, 2))
    assert_trees_equal(compiled, td.flip(0).repeat(1, 2))


def test_pad_keeps_one_value_for_all():
    """One string for all rows would become a list of strings and None."""
    td = pad(TensorDict({"a": torch.ones(2), "s": "x"}, [2]), (0, 1), value=-1)

    assert td["a"].tolist() == [1, 1, -1]
    assert td["s"] == "x"


ONE = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
ERRORS = [
    (lambda: ONE.repeat(2), ValueError, r"repeat: .*\n.*2 numbers.*\n.*\[2\]"),
    (lambda: ONE.repeat(2, -1), ValueError, r"repeat: .*\n.*0 or more.*\n.*\[2, -1\]"),
    (lambda: ONE.repeat_interleave(torch.tensor([1, 2, 3]), 0), ValueError, r"interleave: .*\n.*2 rows\n.*\[3\]"),
    (lambda: pad(ONE, [1]), ValueError, r"pad: .*\n.*2 pairs.*\n.*\[1\]"),
    (lambda: pad(ONE, [1, -1]), ValueError, r"pad: .*\n.*\n.*\[1, -1\]"),
    (lambda: pad(ONE, [0, 0] * 3), ValueError, r"pad: .*\n.*2 pairs"),
    (lambda: pad(ragged(), [0, 0, 1, 0]), BatchSizeError, r"dimension 1 is ragged"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors_name_both_values(call, error, message):
    """A wrong call would return something, or not say what it was given."""
    with pytest.raises(error, match=message):
        call()


def test_pad_values_are_not_altered():
    """1.5 would become 1 in a leaf of integers, as torch pads it."""
    td = TensorDict({"a": torch.ones(2, dtype=torch.int32), "b": torch.ones(2)}, [2])

    with pytest.raises(LeafMismatchError, match=r"pad: the value would be altered(.|\n)*1.5 for torch.int32"):
        pad(td, [1, 0], 1.5)
    with pytest.raises(LeafMismatchError, match=r"nan for torch.int32"):
        pad(td, [1, 0], float("nan"))
    assert pad(td, [1, 0], -1)["a"].tolist() == [-1, 1, 1]
