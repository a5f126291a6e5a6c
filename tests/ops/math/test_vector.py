"""`ravel`: a tree as one vector and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc import LeafMismatchError, TensorDict, ravel
from tests.helpers import assert_pure, assert_trees_equal
from tests.strategies import trees

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])


@given(trees(dtypes=DTYPES))
def test_there_and_back(tree):
    """The vector holds the leaves in order, and gives the tree with its dtypes, batch sizes, ties and data."""
    vector, unravel = assert_pure(ravel, tree)
    leaves = [leaf.reshape(-1) for leaf in tree_leaves(tree)]

    torch.testing.assert_close(vector, torch.cat(leaves) if leaves else torch.zeros(0), rtol=0, atol=0, equal_nan=True)
    assert_trees_equal(unravel(vector), tree)
    assert unravel(vector).ties() == tree.ties()


def test_under_transforms():
    """Gradients, hessians, stacked trees and traces of functions of the vector."""
    apply, params, _ = tdf.functional(nn.Linear(3, 2).double())
    x = torch.randn(5, 3, dtype=torch.float64)
    vector, unravel = ravel(params)

    def loss(params, x):
        return apply(params, x).square().sum()

    def on_vector(vector, x):
        return loss(unravel(vector), x)

    expected = ravel(torch.func.grad(loss)(params, x))[0]
    torch.testing.assert_close(torch.func.grad(on_vector)(vector, x), expected)
    torch.testing.assert_close(tdf.jit(torch.func.grad(on_vector))(vector, x), expected)
    assert torch.func.hessian(on_vector)(vector, x).shape == (8, 8)
    many = tdf.stack([params, params * 2])
    matrix = torch.vmap(lambda tree: ravel(tree)[0])(many)
    torch.testing.assert_close(matrix[1], vector * 2)
    assert_trees_equal(torch.vmap(unravel)(matrix), many)


def test_several_trees_at_once():
    """Tuples and dicts of trees and tensors are one vector, which gives them back."""
    vector, unravel = ravel(({"a": TensorDict({"w": torch.ones(2, 3)}, [2])}, [torch.tensor(2.0)]))
    back = unravel(vector * 2)

    assert vector.tolist() == [1.0] * 6 + [2.0]
    assert back[0]["a"].batch_size == (2,)
    assert back[1][0] == 4.0


def test_complex_and_real_leaves():
    """A vector of complex numbers gives each leaf its dtype back."""
    vector, unravel = ravel({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.complex64)})

    assert unravel(vector * 1j)["b"] == 1j
    assert unravel(vector)["a"].tolist() == [1.0, 1.0]


def test_integers_beside_floats():
    """A vector holds whole numbers exactly, and gives each leaf its dtype back."""
    vector, unravel = ravel([torch.ones(1).double(), torch.tensor([2**31 - 1], dtype=torch.int32)])
    real, whole = unravel(vector)

    assert real.dtype is torch.float64
    assert real.item() == 1
    assert whole.dtype is torch.int32
    assert whole.item() == 2**31 - 1


def test_no_leaves():
    """No leaves are a vector of none, which gives the tree back."""
    vector, unravel = ravel(TensorDict({}, [3]))

    assert vector.shape == (0,)
    assert unravel(vector).batch_size == (3,)


LONG = TensorDict({"w": torch.ones(2), "n": torch.tensor([2**40])})
PLAIN = TensorDict({"w": torch.ones(2)})
MESSAGES = [
    (lambda: ravel(LONG), LeafMismatchError, r"round the leaf \['n'\](.|\n)*torch.int64(.|\n)*partition"),
    (lambda: ravel(TensorDict({"w": torch.ones(2).half(), "n": torch.ones(1).short()})), LeafMismatchError, "round"),
    (lambda: ravel((PLAIN, 3)), TypeError, r"the leaf \[1\] is not a tensor(.|\n)*int"),
    (lambda: ravel(PLAIN)[1](torch.ones(3)), LeafMismatchError, r"shape \(2,\), torch.float32(.|\n)*shape \(3,\)"),
    (lambda: ravel(PLAIN)[1](torch.ones(2).double()), LeafMismatchError, "does not fit(.|\n)*float64"),
    (lambda: ravel(PLAIN)[1](torch.ones(3, 2)), LeafMismatchError, r"torch.vmap\(unravel\)"),
]


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Rounding and vectors of another tree are refused."""
    with pytest.raises(error, match=pattern):
        call()
