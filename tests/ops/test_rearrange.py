"""Rows in another order or number, against torch on every leaf, dense and in lazy stacks."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad as pad_leaf

from tdfunc import BatchSizeError, LeafMismatchError, TensorDict
from tdfunc._lazystack.stack import lazy_stack
from tdfunc.ops.rearrange import pad
from tests.helpers import assert_pure, assert_trees_equal

COUNTS = torch.tensor([1, 0, 2])


@pytest.fixture
def td():
    """A batch of two dimensions, a nested one of three, names and one string for each row."""
    leaves = {"a": torch.arange(12).reshape(2, 3, 2), "n": TensorDict({"b": torch.randn(2, 3, 4, 5)}, [2, 3, 4])}
    return TensorDict(leaves | {"s": [["p", "q", "r"], ["u", "v", "w"]]}, [2, 3], names=["r", "c"])


# name -> (on trees, on a leaf with batch dimensions 0 and 1, names of the result)
CASES = {
    "flip": (lambda t: t.flip(-1), lambda x: x.flip(1), ["r", "c"]),
    "flip two": (lambda t: t.flip(0, 1), lambda x: x.flip((0, 1)), ["r", "c"]),
    "torch.flip": (lambda t: torch.flip(t, (1, 0)), lambda x: x.flip((0, 1)), ["r", "c"]),
    "repeat": (lambda t: t.repeat(2, 3), lambda x: x.repeat(2, 3, *[1] * (x.dim() - 2)), ["r", "c"]),
    "repeat none": (lambda t: t.repeat([0, 1]), lambda x: x[:0], ["r", "c"]),
    "repeat_interleave": (lambda t: t.repeat_interleave(2, -1), lambda x: x.repeat_interleave(2, 1), ["r", "c"]),
    "repeat_interleave counts": (
        lambda t: torch.repeat_interleave(t, COUNTS, 1, output_size=3), lambda x: x.repeat_interleave(COUNTS, 1),
        ["r", "c"],
    ),
    "repeat_interleave all": (
        lambda t: t.repeat_interleave(2), lambda x: x.flatten(0, 1).repeat_interleave(2, 0), [None],
    ),
    "pad": (lambda t: pad(t, [1, 0, 0, 2]), lambda x: pad_leaf(x, [*[0, 0] * (x.dim() - 2), 0, 2, 1, 0]), ["r", "c"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_on_every_leaf(td, name):
    """A leaf, batch size, name, nested batch or string would go elsewhere than torch puts the row."""
    call, on_leaf, names = CASES[name]
    result = assert_pure(call, td)
    positions = on_leaf(torch.arange(1, 7).reshape(2, 3))

    assert torch.equal(result["a"], on_leaf(td["a"]))
    assert torch.equal(result["n", "b"], on_leaf(td["n", "b"]))
    assert result.batch_size == positions.shape
    assert result["n"].batch_size == (*positions.shape, 4)
    words = np.array([None, "p", "q", "r", "u", "v", "w"], dtype=object)
    assert result["s"] == words[positions].tolist()
    assert result.names == names


def ragged():
    """Three rows of different length and a dense column of three."""
    return lazy_stack([TensorDict({"x": torch.arange(n), "s": f"row {n}"}, [n]) for n in (1, 2, 3)])


LAZY = {
    "flip": lambda t: t.flip(0),
    "repeat": lambda t: t.repeat(2, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(COUNTS, 0),
}
ROWS = {"flip": [3, 2, 1], "repeat": [1, 2, 3, 1, 2, 3], "repeat_interleave": [1, 3, 3]}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_stack_stays_ragged(name):
    """The trees of a lazy stack would be mixed up, or have to have one shape."""
    result = LAZY[name](ragged())

    assert [tuple(tree.batch_size) for tree in result.unbind(0)] == [(n,) for n in ROWS[name]]
    assert [tree["s"] for tree in result.unbind(0)] == [f"row {n}" for n in ROWS[name]]


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
