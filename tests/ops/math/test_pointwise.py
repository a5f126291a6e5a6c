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
    """A tensor or tree as operand promotes and computes as torch does on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(torch, name)
    other, rows, zero_d = leaf.flip(0), torch.tensor([1.0, 2.0]), torch.tensor(2.0)
    tree = tree_of(leaf)

    assert_same_outcome(outcome(lambda: getattr(tree, name)(tree_of(other))), outcome(lambda: fn(leaf, other)))
    assert_same_outcome(outcome(lambda: getattr(tree, name)(rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))
    assert_same_outcome(outcome(lambda: getattr(tree, name)(zero_d)), outcome(lambda: fn(leaf, zero_d)))


# torch's take no numbers.
WITH_NUMBERS = [
    name
    for name in tables.BINARY | tables.BINARY_LEAFWISE
    if name not in ("maximum", "minimum") and not name.startswith("logical")
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("number", [2, 0.5, True])
def test_binary_with_numbers_equals_torch(name, dtype, number):
    """A number as operand promotes and computes as torch does on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(torch, name)
    tree = tree_of(leaf)

    assert_same_outcome(outcome(lambda: getattr(tree, name)(number)), outcome(lambda: fn(leaf, number)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("number", [2, 0.5, True])
def test_operators_with_numbers_equal_torch(name, dtype, number):
    """An operator with the tree on either side of a number is that of torch on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(operator, name)
    tree = tree_of(leaf)

    assert_same_outcome(outcome(lambda: fn(tree, number)), outcome(lambda: fn(leaf, number)))
    assert_same_outcome(outcome(lambda: fn(number, tree)), outcome(lambda: fn(number, leaf)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_torch(name, dtype):
    """An operator with the tree on either side of a tensor is that of torch on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(operator, name)
    tree, rows = tree_of(leaf), torch.tensor([1.0, 2.0])

    assert_same_outcome(outcome(lambda: fn(tree, rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))


@pytest.fixture
def signs():
    """A tree of positive and negative numbers."""
    return tree_of(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))


def test_numbers_of_numpy(signs):
    """Arrays and numbers of numpy are operands on either side."""
    x = signs["a"]

    assert torch.equal((np.float32(2) * signs)["a"], 2 * x)
    assert torch.equal((signs + np.float64(2))["a"], x + 2)
    assert torch.equal((signs + np.array([1.0, 2.0], dtype=np.float32))["a"], x + torch.tensor([[1.0], [2.0]]))


def test_bounds_that_are_numbers(signs):
    """`maximum` and `minimum` take a number, inside vmap as well, which torch's do not."""
    assert torch.equal(signs.maximum(0)["a"], signs["a"].clamp_min(0))
    assert torch.equal(torch.vmap(lambda t: t.minimum(0.5))(signs)["a"], signs["a"].clamp_max(0.5))


def test_options_are_torchs(signs):
    """`alpha` and `rounding_mode` are torch's options."""
    assert torch.equal(signs.add(signs, alpha=2)["a"], signs["a"] * 3)
    assert torch.equal(signs.div(3, rounding_mode="floor")["a"], signs["a"].div(3, rounding_mode="floor"))


def test_operators_of_one_tree(signs):
    """Negation, absolute value and inversion are torch's."""
    assert torch.equal((-signs)["a"], -signs["a"])
    assert torch.equal(abs(signs)["a"], signs["a"].abs())
    assert torch.equal((~(signs > 0))["a"], signs["a"] <= 0)


def test_other_objects_are_unequal(signs):
    """A tree is unequal to text and None, and is found in a list."""
    assert (signs == "text") is False
    assert (signs != None) is True  # noqa: E711
    assert signs in [signs]


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
