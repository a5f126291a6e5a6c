"""`torch.vstack`, `torch.hsplit` and their kin: what torch does to a tensor of the batch size, on every leaf."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import BatchSizeError, TensorDict, UnsupportedError

STACKS = ("vstack", "hstack", "dstack", "column_stack", "row_stack")
# With the fewest dimensions that they take.
SPLITS = {"vsplit": 2, "hsplit": 1, "dsplit": 3}
SIZES = ([], [3], [2, 4], [2, 4, 6], [2, 4, 6, 1])


def tree_of(size):
    """A tree of a batch size, with the tensor that its nested leaf is."""
    x = torch.arange(float(torch.Size(size).numel())).reshape(size)
    return TensorDict({"x": torch.stack([x, -x], -1), "n": {"y": x}, "s": "word"}, size), x


def check(tree, expected):
    """Whether a tree is what torch made of the tensor."""
    assert tree.batch_size == expected.shape
    assert torch.equal(tree["n", "y"], expected)
    assert torch.equal(tree["x"][..., 1], -expected)
    assert tree.get("s") is not None


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_stacks(name, size):
    """The trees would lie along another dimension than tensors of their batch size."""
    fn, (tree, x) = getattr(torch, name), tree_of(size)

    check(fn([tree, tree]), fn([x, x]))


def test_a_column_beside_a_matrix():
    """A batch of one dimension would not be a column."""
    (matrix, x), (vector, y) = tree_of([3, 2]), tree_of([3])

    check(torch.column_stack([matrix, vector]), torch.column_stack([x, y]))


@pytest.mark.parametrize("parts", [1, 2, [1], (1, 2), [1, 9]], ids=str)
@pytest.mark.parametrize(
    ("name", "size"), [(n, s) for n, least in SPLITS.items() for s in SIZES if len(s) >= least and s != [3]], ids=str
)
def test_splits(name, size, parts):
    """The parts would not be those of a tensor of the batch size."""
    fn, (tree, x) = getattr(torch, name), tree_of(size)

    for piece, expected in zip(fn(tree, parts), fn(x, parts), strict=True):
        check(piece, expected)


@pytest.mark.parametrize(
    ("name", "size", "parts", "error", "message"),
    [
        ("vsplit", [4], 2, BatchSizeError, r"vsplit: .*\n.*2 batch dimensions or more\n.*\[4\]"),
        ("hsplit", [], 1, BatchSizeError, r"hsplit: .*\n.*1 batch dimensions or more\n.*\[\]"),
        ("dsplit", [4, 4], 2, BatchSizeError, r"dsplit: .*\n.*3 batch dimensions or more\n.*\[4, 4\]"),
        ("vsplit", [2, 4], 3, ValueError, r"vsplit: .*\n.*divides 2, the size of dimension 0\n.*3\n.*tensor_split"),
        ("hsplit", [3], 2, ValueError, r"hsplit: .*\n.*divides 3, the size of dimension 0\n.*2"),
        ("dsplit", [2, 4, 6], 0, ValueError, r"dsplit: .*\n.*divides 6, the size of dimension 2\n.*0"),
    ],
)
def test_splits_that_are_refused(name, size, parts, error, message):
    """Parts of unequal sizes would be made, or the message not say of what."""
    tree, x = tree_of(size)

    with pytest.raises(RuntimeError):
        getattr(torch, name)(x, parts)
    with pytest.raises(error, match=message):
        getattr(torch, name)(tree, parts)


def test_hints_of_what_is_not_defined():
    """The hint for a function of several tensors would be a call that hands it one."""
    tree = TensorDict({"a": torch.eye(2)})

    with pytest.raises(UnsupportedError, match=r"torch.block_diag(.|\n)*td.apply\(lambda x: torch.block_diag\(x"):
        torch.block_diag(tree)
    with pytest.raises(UnsupportedError, match=r"a.apply\(lambda x, y: torch.chain_matmul\(\(x, y\), ...\), b\)"):
        tdf.TensorDict.__torch_function__(torch.chain_matmul, (), ([tree, tree],))
