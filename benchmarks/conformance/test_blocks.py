"""The blocks of tensordict that undo an operation: they raise, and the line of the documents does the same."""

import re
from pathlib import Path

import pytest
import torch

from tdfunc import TensorDict
from tests.helpers import assert_trees_equal
from tests.incumbent import Incumbent

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def pairs():
    """The code of each row of the table: (block of tensordict, line to write)."""
    section = PAGE.read_text().split("### Blocks that undo an operation")[1].split("## ")[0]
    rows = re.findall(r"^\| `(with [^`]+) as t:`.*\| `td = ([^`]+)`", section, re.M)
    assert len(rows) == 9
    return rows


def tree_for(code, cls):
    """A tree that the operation can be done to."""
    size = [6, 1, 1] if "permute" in code else [6, 1]
    leaves = {"x": torch.arange(12.0).reshape(*size, 2), "n": {"y": torch.arange(6.0).reshape(size)}}
    flat = {"x": leaves["x"], "n.y": leaves["n"]["y"]}
    return cls(flat if "with td.unflatten_keys" in code else leaves, size, device="cpu")


def names(tree, fn):
    """The names in the code of the table."""
    return {"td": tree, "fn": fn, "dim": 1, "a": 0, "b": 1, "n": 2, "device": "cpu"}


@pytest.mark.parametrize(("block", "code"), pairs(), ids=lambda text: text)
def test_what_to_write_instead(block, code):
    """The line of the page undoes the operation as the block of tensordict does."""
    tree = tree_for(block, TensorDict)
    done = eval(code, names(tree, lambda t: t + 1))
    theirs = tree_for(block, Incumbent)
    exec(f"{block} as t:\n    t.update(t + 1)", names(theirs, None))

    assert_trees_equal(done, tree + 1)
    for key in tree.keys(True, True):
        assert torch.equal(theirs[key], done[key])


@pytest.mark.parametrize(("block", "code"), pairs(), ids=lambda text: text)
def test_blocks_raise(block, code):
    """A block is Python's TypeError, since an edit in it would be lost."""
    with pytest.raises(TypeError, match="context manager protocol"):
        exec(f"{block} as t:\n    pass", names(tree_for(block, TensorDict), None))
