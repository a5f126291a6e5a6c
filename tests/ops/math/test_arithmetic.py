"""Functions of several operands and along dimensions, against torch on every leaf."""

import pytest
import torch

from tdfunc import TensorDict
from tests.helpers import assert_pure, assert_trees_equal

A = torch.tensor([[[1.0, -2.0], [3.0, 0.5], [-4.0, 2.0]], [[0.0, 5.0], [1.0, 1.0], [2.5, -1.0]]])
B = A.flip(2) * 2 + 1
ROWS = torch.tensor([[0.5, 1.0, 2.0], [1.5, -1.0, 0.25]])
MASK = ROWS > 0.5
NAN = A.masked_fill(A == 1, torch.nan).masked_fill(A == 5, torch.inf).masked_fill(A == -4, -torch.inf)


def tree_of(leaf):
    """The leaf, a string, and the leaf in a nested tree with a batch dimension of its own."""
    nested = TensorDict({"b": leaf[..., None]}, [2, 3, 2])
    return TensorDict({"a": leaf, "n": nested, "s": "x"}, [2, 3], names=["r", "c"])


td, other = tree_of(A), tree_of(B)
WIDE = ROWS[..., None]

OPERANDS = {
    "clamp": (lambda: td.clamp(-1, 2.5), A.clamp(-1, 2.5)),
    "clamp min, clamp max": (lambda: torch.clamp(td.clamp(0.5), max=1.5), A.clamp(0.5).clamp(max=1.5)),
    "clamp between trees": (lambda: td.clamp(other, other + 1), A.clamp(B, B + 1)),
    "clamp between rows": (lambda: td.clamp(ROWS, ROWS + 1), A.clamp(WIDE, WIDE + 1)),
    "clamp rows and tree": (lambda: td.clamp(ROWS, other), A.clamp(WIDE, B)),
    "clamp number and tree": (lambda: td.clamp(-1, other), A.clamp(min=-1).clamp(max=B)),
    "lerp": (lambda: td.lerp(other, 0.25), A.lerp(B, 0.25)),
    "addcmul, addcdiv": (lambda: td.addcmul(other, ROWS).addcdiv(other, ROWS), A.addcmul(B, WIDE).addcdiv(B, WIDE)),
    "torch.addcmul": (lambda: torch.addcmul(td, other, ROWS, value=2), A.addcmul(B, WIDE, value=2)),
    "torch.addcdiv": (lambda: torch.addcdiv(td, other, ROWS, value=2), A.addcdiv(B, WIDE, value=2)),
    "lerp by rows": (lambda: torch.lerp(td, other, ROWS), A.lerp(B, WIDE)),
    "lerp to rows": (lambda: td.lerp(ROWS, 0.25), A.lerp(WIDE.expand_as(A), 0.25)),
    "lerp by a tree to rows": (lambda: td.lerp(ROWS, other), A.lerp(WIDE.expand_as(A), B)),
    "fmod": (lambda: td.fmod(other), A.fmod(B)),
    "atan2": (lambda: td.atan2(ROWS), A.atan2(WIDE)),
    "masked_fill": (lambda: td.masked_fill(MASK, 7), A.masked_fill(MASK[..., None], 7)),
    "torch.masked_fill": (lambda: torch.masked_fill(td, MASK[:, :1], 7), A.masked_fill(MASK[:, :1, None], 7)),
    "nan_to_num": (lambda: tree_of(NAN).nan_to_num(9, posinf=8, neginf=-7), NAN.nan_to_num(9, 8, -7)),
    "nan_to_num by default": (lambda: tree_of(NAN).nan_to_num(), NAN.nan_to_num()),
    "softmax": (lambda: td.softmax(-1), A.softmax(1)),
    "torch.softmax": (lambda: torch.softmax(td, 0, dtype=torch.float64), A.softmax(0, torch.float64)),
    "cumsum": (lambda: td.cumsum(-1), A.cumsum(1)),
    "cumprod": (lambda: torch.cumprod(td, 0), A.cumprod(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_equal_torch(name):
    """An operand meets the batch of every leaf, and batch sizes and names stay."""
    call, expected = OPERANDS[name]
    found = assert_pure(lambda *_: call(), td, other)

    assert torch.equal(found["a"], expected)
    assert torch.equal(found["n", "b"][..., 0], expected)
    assert found["s"] == "x"
    assert found.names == ["r", "c"]
    assert found["n"].batch_size == (2, 3, 2)


def test_transforms():
    """The functions run under vmap and compile, where a tree has the dimensions that are left."""

    def fn(t):
        return t.clamp(-1, 2).lerp(t * 2, 0.5).softmax(0).max(0).values

    tree = td.exclude("n", "s")
    alone = torch.stack([fn(row) for row in tree])

    assert_trees_equal(torch.vmap(fn)(tree).with_names(None), alone.with_names(None), atol=1e-6)
    assert_trees_equal(torch.compile(fn, fullgraph=True, backend="eager")(tree), fn(tree))
