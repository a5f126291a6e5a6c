"""A key that is a leaf in one tree and a tree in the other: which key, and what it is in either."""

import numpy as np
import pytest
import torch

import tdfunc as tdf
from tdfunc import LeafMismatchError, NonTensorData, TensorDict, TreeStructureError
from tdfunc.core.walk import Difference

MASK = torch.ones(2, dtype=torch.bool)
# Of two trees, every operation that zips or merges them.
CALLS = {
    "stack": lambda a, b: tdf.stack([a, b]),
    "cat": lambda a, b: tdf.cat([a, b]),
    "add": lambda a, b: a + b,
    "eq": lambda a, b: a == b,
    "where": lambda a, b: a.where(MASK, b),
    "apply": lambda a, b: a.apply(torch.add, b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "clamp": lambda a, b: a.clamp(b, b),
    "mse_loss": torch.nn.functional.mse_loss,
    "assert_close": tdf.assert_close,
    "combine": tdf.combine,
    "update_": lambda a, b: a.update_(b),
    "copy_": lambda a, b: a.copy_(b),
    "set_": lambda a, b: a.set_("k", b["k"]),
    r"at\[\.\.\.\].set": lambda a, b: a.at[0].set(b[0]),
    r"at\[\.\.\.\].add": lambda a, b: a.at[0].add(b[0]),
    r"at\[\.\.\.\].set_": lambda a, b: a.at[0].set_(b[0]),
}


def leaf_and_tree():
    """Two trees with one key, which is a leaf in the first."""
    return TensorDict({"k": torch.zeros(2)}, [2]), TensorDict({"k": {"y": torch.zeros(2)}}, [2])


@pytest.mark.parametrize("call", CALLS)
def test_a_leaf_against_a_tree(call):
    """The message would list keys, or speak of dtypes, where one key is of two kinds; or the leaf be lost."""
    leaf, tree = leaf_and_tree()
    tensor, keys = r"a tensor of shape \[2?\], torch.float32", r"a TensorDict with the keys \['y'\]"

    with pytest.raises(TreeStructureError, match=rf"^{call}: 'k' is a leaf in one.*a tree in.*\n.*{tensor}\n.*{keys}"):
        CALLS[call](leaf, tree)
    with pytest.raises(TreeStructureError, match=rf"^{call}: 'k' is a tree in one.*a leaf in.*\n.*{keys}\n.*{tensor}"):
        CALLS[call](tree, leaf)


def test_a_tree_as_the_number_of_masked_fill():
    """Users would be told that no handler took the call."""
    leaf, _ = leaf_and_tree()

    with pytest.raises(TypeError, match=r"masked_fill(.|\n)*a number\n(.|\n)*TensorDict\n(.|\n)*td.where"):
        leaf.masked_fill(MASK, leaf)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (torch.zeros(2, 3), "a tensor of shape [2, 3], torch.float32"),
        (torch.nn.UninitializedParameter(), "a tensor of no shape, torch.float32"),
        (TensorDict({"b": 1, "a": 2}), "a TensorDict with the keys ['a', 'b']"),
        (NonTensorData("x" * 999), "non-tensor data NonTensorData(data=" + "x" * 165),
        (None, "a NoneType"),
    ],
)
def test_described(node, text):
    """A message would not say what an entry is, or be as long as its value."""
    shown = str(Difference(("k",), "kind", node, TensorDict()).error("call")).splitlines()[1]

    assert shown.startswith("  expected: " + text)
    assert len(shown) <= 212


@pytest.mark.parametrize("where", ["x", ("n", "x")])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**80, 2**30000], ids=int.bit_length)
def test_integers_of_more_than_64_bits(number, where):
    """The message names the key."""
    name = where if isinstance(where, str) else ".".join(where)
    tree = TensorDict({where: torch.zeros(2, dtype=torch.int64)}, [2])
    rest = r": numbers must have a dtype of torch.\n.*\n.*NonTensorData"
    calls = [
        (f"'{name}'", lambda: TensorDict({where: number})),
        (f"'{name}'", lambda: TensorDict({where: [1, number]}, [2])),
        (f"'{name}'", lambda: tree.set(where, number)),
        (f"'{name}'", lambda: tree.update({where: number})),
        (f"'{name}'", lambda: TensorDict.fromkeys([where], number)),
        (f"set_ '{name}'", lambda: tree.set_(where, number)),
        (r"at\[...\].set", lambda: tree.at[0].set(number)),
        (r"at\[...\].set_", lambda: tree.at[0].set_(number)),
        (r"at\[.*x'\)?\].set", lambda: tree.at[where].set(number)),
    ]

    for start, call in calls:
        with pytest.raises(LeafMismatchError, match=start + rest):
            call()


def test_large_integers_that_a_tensor_can_hold():
    """A float leaf would refuse an integer that a float is near to, and numpy's numbers would be refused."""
    tree = TensorDict({"x": torch.zeros(2, dtype=torch.float64)}, [2])

    assert tree.at[0].set(2**80)["x"].tolist() == [2.0**80, 0.0]
    assert tree.at["x"].set(2**80)["x"].tolist() == [2.0**80] * 2
    with pytest.raises(LeafMismatchError, match="dtype of torch"):
        tree.at[0].set(2**1999)
    assert TensorDict({"u": np.uint64(2**64 - 1)})["u"].dtype is torch.uint64
    assert TensorDict({"u": np.uint64(2**64 - 1)})["u"].numpy() == 2**64 - 1
