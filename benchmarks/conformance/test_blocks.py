"""The blocks of tensordict that undo an operation: they raise, and an operation with its inverse does the same."""

from pathlib import Path

import pytest
import torch

from tdfunc import TensorDict
from tests.helpers import assert_trees_equal
from tests.incumbent import Incumbent

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
# A block of tensordict, and the line that has its effect.
PAIRS = (
    ('with td.flatten_keys(".")', 'fn(td.flatten_keys(".")).unflatten_keys(".")'),
    ('with td.unflatten_keys(".")', 'fn(td.unflatten_keys(".")).flatten_keys(".")'),
    ("with td.unsqueeze(dim)", "fn(td.unsqueeze(dim)).squeeze(dim)"),
    ("with td.transpose(a, b)", "fn(td.transpose(a, b)).transpose(a, b)"),
    ("with td.permute(1, 2, 0)", "fn(td.permute(1, 2, 0)).permute(2, 0, 1)"),
    ("with td.view(-1)", "fn(td.view(-1)).view(td.batch_size)"),
    ("with td.unflatten(0, (2, 3))", "fn(td.unflatten(0, (2, 3))).flatten(0, 1)"),
    ("with td.flip(dim)", "fn(td.flip(dim)).flip(dim)"),
    ("with td.to(device)", "fn(td.to(device)).to(td.device)"),
)


def test_the_page_has_the_pattern():
    """The first block stands for all."""
    block, code = PAIRS[0]

    assert f"| `{block} as t:` | `td = {code}` |" in PAGE.read_text()


def tree_for(code, cls):
    """A tree that the operation can be done to."""
    size = [6, 1, 1] if "permute" in code else [6, 1]
    leaves = {"x": torch.arange(12.0).reshape(*size, 2), "n": {"y": torch.arange(6.0).reshape(size)}}
    flat = {"x": leaves["x"], "n.y": leaves["n"]["y"]}
    return cls(flat if "with td.unflatten_keys" in code else leaves, size, device="cpu")


def names(tree, fn):
    """The names in the code of the pairs."""
    return {"td": tree, "fn": fn, "dim": 1, "a": 0, "b": 1, "n": 2, "device": "cpu"}


@pytest.mark.parametrize(("block", "code"), PAIRS, ids=lambda text: text)
def test_what_to_write_instead(block, code):
    """The line undoes the operation as the block of tensordict does."""
    tree = tree_for(block, TensorDict)
    done = eval(code, names(tree, lambda t: t + 1))
    theirs = tree_for(block, Incumbent)
    exec(f"{block} as t:\n    t.update(t + 1)", names(theirs, None))

    assert_trees_equal(done, tree + 1)
    for key in tree.keys(True, True):
        assert torch.equal(theirs[key], done[key])


@pytest.mark.parametrize(("block", "code"), PAIRS, ids=lambda text: text)
def test_blocks_raise(block, code):
    """A block is Python's TypeError, since an edit in it would be lost."""
    with pytest.raises(TypeError, match="context manager protocol"):
        exec(f"{block} as t:\n    pass", names(tree_for(block, TensorDict), None))
