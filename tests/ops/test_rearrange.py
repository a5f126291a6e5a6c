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
    "narrow": (lambda t: t.narrow(1, 1, 2), lambda x: x.narrow(1, 1, 2), ["r", "c"]),
    "narrow from the end": (lambda t: t.narrow(-1, -2, 1), lambda x: x.narrow(1, 1, 1), ["r", "c"]),
    "tensor_split": (lambda t: t.tensor_split(2, -1)[1], lambda x: x.tensor_split(2, 1)[1], ["r", "c"]),
    "tensor_split many": (lambda t: t.tensor_split(5, 1)[4], lambda x: x.tensor_split(5, 1)[4], ["r", "c"]),
    "tensor_split at": (lambda t: t.tensor_split([2, 1], 1)[1], lambda x: x.tensor_split([2, 1], 1)[1], ["r", "c"]),
    "tensor_split at tensor": (
        lambda t: torch.tensor_split(t, torch.tensor([-1]), 1)[1], lambda x: x.tensor_split([-1], 1)[1], ["r", "c"],
    ),
    "flip": (lambda t: t.flip(-1), lambda x: x.flip(1), ["r", "c"]),
    "flip two": (lambda t: t.flip(0, 1), lambda x: x.flip((0, 1)), ["r", "c"]),
    "torch.flip": (lambda t: torch.flip(t, (1, 0)), lambda x: x.flip((0, 1)), ["r", "c"]),
    "fliplr": (lambda t: t.fliplr(), torch.fliplr, ["r", "c"]),
    "flipud": (lambda t: t.flipud(), torch.flipud, ["r", "c"]),
    "roll": (lambda t: t.roll(4, 1), lambda x: x.roll(4, 1), ["r", "c"]),
    "roll two": (lambda t: torch.roll(t, (1, -1), (0, -1)), lambda x: x.roll((1, -1), (0, 1)), ["r", "c"]),
    "roll one twice": (lambda t: t.roll((1, 1), (1, 1)), lambda x: x.roll(2, 1), ["r", "c"]),
    "roll all": (lambda t: t.roll(2), lambda x: x.flatten(0, 1).roll(2, 0).unflatten(0, (2, 3)), [None, None]),
    "rot90": (lambda t: t.rot90(), torch.rot90, ["c", "r"]),
    "rot90 back": (lambda t: t.rot90(-1, (1, 0)), lambda x: x.rot90(-1, (1, 0)), ["c", "r"]),
    "rot90 half": (lambda t: torch.rot90(t, 6), lambda x: x.rot90(2), ["r", "c"]),
    "rot90 nothing": (lambda t: t.rot90(4), lambda x: x, ["r", "c"]),
    "repeat": (lambda t: t.repeat(2, 3), lambda x: x.repeat(2, 3, *[1] * (x.dim() - 2)), ["r", "c"]),
    "repeat none": (lambda t: t.repeat([0, 1]), lambda x: x[:0], ["r", "c"]),
    "tile": (lambda t: t.tile(2), lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2)), ["r", "c"]),
    "tile more": (
        lambda t: torch.tile(t, (2, 1, 2)), lambda x: x.repeat(2, 1, 2, *[1] * (x.dim() - 2)), [None, "r", "c"],
    ),
    "repeat_interleave": (lambda t: t.repeat_interleave(2, -1), lambda x: x.repeat_interleave(2, 1), ["r", "c"]),
    "repeat_interleave counts": (
        lambda t: torch.repeat_interleave(t, COUNTS, 1, output_size=3), lambda x: x.repeat_interleave(COUNTS, 1),
        ["r", "c"],
    ),
    "repeat_interleave all": (
        lambda t: t.repeat_interleave(2), lambda x: x.flatten(0, 1).repeat_interleave(2, 0), [None],
    ),
    "movedim": (lambda t: t.movedim(0, -1), lambda x: x.movedim(0, 1), ["c", "r"]),
    "movedim two": (lambda t: torch.moveaxis(t, (1, 0), (0, 1)), lambda x: x.movedim(1, 0), ["c", "r"]),
    "moveaxis": (lambda t: t.moveaxis(1, 1), lambda x: x, ["r", "c"]),
    "swapaxes": (lambda t: t.swapaxes(0, 1), lambda x: x.swapaxes(0, 1), ["c", "r"]),
    "swapdims": (lambda t: torch.swapdims(t, 0, -1), lambda x: x.swapdims(0, 1), ["c", "r"]),
    "atleast_1d": (lambda t: t.atleast_1d(), lambda x: x, ["r", "c"]),
    "atleast_3d": (lambda t: t.atleast_3d(), lambda x: x[:, :, None], ["r", "c", None]),
    "broadcast_to": (lambda t: t.broadcast_to((4, 2, 3)), lambda x: x.expand(4, *x.shape), [None, "r", "c"]),
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


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("name", ["atleast_1d", "atleast_2d", "atleast_3d"])
def test_dimensions_are_added_as_torch_adds_them(shape, name):
    """A new dimension would stand at another place than in torch."""
    leaf = torch.arange(int(np.prod(shape))).reshape(shape)
    found = getattr(TensorDict({"a": leaf}, shape), name)()

    assert torch.equal(found["a"], getattr(torch, name)(leaf))
    assert found.batch_size == found["a"].shape


def ragged():
    """Three rows of different length and a dense column of three."""
    return lazy_stack([TensorDict({"x": torch.arange(n), "s": f"row {n}"}, [n]) for n in (1, 2, 3)])


LAZY = {
    "narrow": lambda t: t.narrow(0, 1, 2),
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1, 0),
    "repeat": lambda t: t.repeat(2, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(COUNTS, 0),
    "tensor_split": lambda t: t.tensor_split([1], 0)[1],
}
ROWS = {
    "narrow": [2, 3], "flip": [3, 2, 1], "roll": [3, 1, 2], "repeat": [1, 2, 3, 1, 2, 3],
    "repeat_interleave": [1, 3, 3], "tensor_split": [2, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_lazy_stack_stays_ragged(name):
    """The trees of a lazy stack would be mixed up, or have to have one shape."""
    result = LAZY[name](ragged())

    assert [tuple(tree.batch_size) for tree in result.unbind(0)] == [(n,) for n in ROWS[name]]
    assert [tree["s"] for tree in result.unbind(0)] == [f"row {n}" for n in ROWS[name]]


def test_lazy_stack_moves_dimensions():
    """The stack dimension would not follow."""
    assert ragged().movedim(0, 1).batch_size == (-1, 3)
    assert ragged().swapaxes(0, 1).batch_size == (-1, 3)
    with pytest.raises(BatchSizeError, match=r"dimension 1 is ragged"):
        ragged().flip(1)


def test_shares_what_stays():
    """Rows that stay where they are would be copied."""
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])

    assert td.repeat(1, 1) is td
    assert td.rot90(0) is td
    assert td.narrow(0, 1, 1)["a"].data_ptr() == td["a"][1:].data_ptr()
    assert td.tensor_split(2, 1)[0]["a"].data_ptr() == td["a"].data_ptr()


def test_transforms():
    """The operations would not trace, or see dimensions that vmap took away."""
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    mapped = torch.vmap(lambda t: t.flip(0).roll(1, 0))(td)
    compiled = torch.compile(lambda t: t.flip(0).roll(1, 1).repeat(1, 2), fullgraph=True, backend="eager")(td)

    assert_trees_equal(mapped, td.flip(1).roll(1, 1))
    assert_trees_equal(compiled, td.flip(0).roll(1, 1).repeat(1, 2))


def test_pad_keeps_one_value_for_all():
    """One string for all rows would become a list of strings and None."""
    td = pad(TensorDict({"a": torch.ones(2), "s": "x"}, [2]), (0, 1), value=-1)

    assert td["a"].tolist() == [1, 1, -1]
    assert td["s"] == "x"


ONE = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
ERRORS = [
    (lambda: ONE.narrow(1, 2, 2), IndexError, r"narrow: .*\n.*rows in 0..3\n.*start 2, length 2"),
    (lambda: ONE.tensor_split(0), ValueError, r"tensor_split: .*\n.*1 or more\n.*0"),
    (lambda: ONE.flip((0, -2)), ValueError, r"flip: .*twice.*\n.*once\n.*\[0, -2\]"),
    (lambda: ONE.roll((1, 2)), ValueError, r"roll: .*\n.*dims\n.*\(1, 2\)"),
    (lambda: ONE.roll((1, 2), 0), ValueError, r"roll: .*\n.*1 shifts.*\n.*\[1, 2\]"),
    (lambda: ONE.rot90(1, (0,)), ValueError, r"rot90: .*\n.*2\n.*\[0\]"),
    (lambda: ONE.repeat(2), ValueError, r"repeat: .*\n.*2 numbers.*\n.*\[2\]"),
    (lambda: ONE.repeat(2, -1), ValueError, r"repeat: .*\n.*0 or more.*\n.*\[2, -1\]"),
    (lambda: ONE.repeat_interleave(torch.tensor([1, 2, 3]), 0), ValueError, r"interleave: .*\n.*2 rows\n.*\[3\]"),
    (lambda: ONE.movedim((0, 1), 0), ValueError, r"movedim: .*\n.*\n.*2 and 1"),
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
