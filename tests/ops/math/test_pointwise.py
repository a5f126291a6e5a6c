"""Pointwise methods, operators and casts, against torch on a leaf in every dtype."""

import operator
from pathlib import Path

import numpy as np
import pytest
import torch

from tdfunc import TensorDict
from tdfunc.ops.math import pointwise, tables
from tests.ops.math import generate

pytestmark = pytest.mark.sample(2)

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
OPERATORS = (
    "add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
)  # fmt: skip
VALUES = torch.tensor([[0.0, 1.0, 2.0], [-1.0, float("nan"), 0.5]])


def leaf_of(dtype):
    """Values that every dtype can hold in its way."""
    return (VALUES if dtype.is_floating_point or dtype.is_complex else VALUES.nan_to_num().abs()).to(dtype)


def outcome(fn):
    """A result, or the class of the error."""
    try:
        return fn()
    except (RuntimeError, TypeError) as error:
        return type(error)


def assert_same_outcome(found, expected):
    """Check that both raise alike, or both give the same dtype and values."""
    if isinstance(expected, type):
        assert isinstance(found, type)
        return
    assert found["a"].dtype is found["n", "b"].dtype is expected.dtype
    assert torch.equal(found["a"], expected) or torch.allclose(found["a"], expected, rtol=0, atol=0, equal_nan=True)


def tree_of(leaf):
    """Two leaves, so that a kernel over lists is used."""
    return TensorDict({"a": leaf, "n": {"b": leaf.clone()}}, leaf.shape[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", tables.UNARY | tables.UNARY_LEAFWISE)
def test_unary_equals_torch(name, dtype):
    """A kernel over lists promotes, rounds and refuses as torch does on a leaf."""
    leaf = leaf_of(dtype)
    expected = outcome(lambda: getattr(torch, name)(leaf))

    assert_same_outcome(outcome(lambda: getattr(tree_of(leaf), name)()), expected)
    assert_same_outcome(outcome(lambda: getattr(torch, name)(tree_of(leaf))), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", tables.BINARY | tables.BINARY_LEAFWISE)
def test_binary_equals_torch(name, dtype):
    """A number, tensor or tree as operand promotes and computes as torch does on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(torch, name)
    other, rows = leaf.flip(0), torch.tensor([1.0, 2.0])
    tree = tree_of(leaf)

    assert_same_outcome(outcome(lambda: getattr(tree, name)(tree_of(other))), outcome(lambda: fn(leaf, other)))
    assert_same_outcome(outcome(lambda: getattr(tree, name)(rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))
    zero_d = torch.tensor(2.0)
    assert_same_outcome(outcome(lambda: getattr(tree, name)(zero_d)), outcome(lambda: fn(leaf, zero_d)))
    if name not in ("maximum", "minimum") and not name.startswith("logical"):
        for number in (2, 0.5, True):
            assert_same_outcome(outcome(lambda n=number: getattr(tree, name)(n)), outcome(lambda n=number: fn(leaf, n)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_torch(name, dtype):
    """An operator with the tree on either side is that of torch on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(operator, name)
    tree, rows = tree_of(leaf), torch.tensor([1.0, 2.0])

    for number in (2, 0.5, True):
        assert_same_outcome(outcome(lambda n=number: fn(tree, n)), outcome(lambda n=number: fn(leaf, n)))
        assert_same_outcome(outcome(lambda n=number: fn(n, tree)), outcome(lambda n=number: fn(n, leaf)))
    assert_same_outcome(outcome(lambda: fn(tree, rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))


def test_numbers_of_numpy_and_the_rest():
    """Arrays and numbers of numpy are operands on either side, options are torch's, and other objects are unequal."""
    tree = tree_of(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))

    assert torch.equal((np.float32(2) * tree)["a"], 2 * tree["a"])
    assert torch.equal((tree + np.float64(2))["a"], tree["a"] + 2)
    assert torch.equal((tree + np.array([1.0, 2.0], dtype=np.float32))["a"], tree["a"] + torch.tensor([[1.0], [2.0]]))
    assert torch.equal(tree.maximum(0)["a"], tree["a"].clamp_min(0))
    assert torch.equal(torch.vmap(lambda t: t.minimum(0.5))(tree)["a"], tree["a"].clamp_max(0.5))
    assert torch.equal(tree.add(tree, alpha=2)["a"], tree["a"] * 3)
    assert torch.equal(tree.div(3, rounding_mode="floor")["a"], tree["a"].div(3, rounding_mode="floor"))
    assert torch.equal((-tree)["a"], -tree["a"])
    assert torch.equal(abs(tree)["a"], tree["a"].abs())
    assert torch.equal((~(tree > 0))["a"], tree["a"] <= 0)
    assert (tree == "text") is False
    assert (tree != None) is True  # noqa: E711
    assert tree in [tree]


@pytest.mark.parametrize("name", tables.CASTS)
def test_casts(name):
    """A cast is torch's method of that name; a tree that has the dtype is returned as it is."""
    leaf = torch.tensor([[0.0, 1.5], [2.0, -3.0]])
    found = getattr(TensorDict({"a": leaf, "b": leaf.long(), "s": "x"}, [2]), name)()

    assert torch.equal(found["a"], getattr(leaf, name)())
    assert torch.equal(found["b"], getattr(leaf.long(), name)())
    assert found["s"] == "x"
    assert getattr(found, name)() is found
    assert found.type(torch.int16)["a"].dtype is torch.int16


def test_generated_file_is_up_to_date():
    """The methods are those of the table."""
    assert Path(pointwise.__file__).read_text() == generate.source()
