"""Trees, pytrees and vmap without the faults of tensordict's.

`benchmarks/conformance/faults/` shows each fault by a test of the same name.
"""

import subprocess
import sys

import pytest
import torch
from torch import Size, nn
from torch.utils import _pytree as pytree

from tdfunc import TensorDict, from_module

A, B = torch.arange(3.0), torch.arange(6.0).reshape(3, 2)


# -- pytrees ----------------------------------------------------------------------------------------------------


def test_batch_size_is_no_structure():
    """Trees of other batch sizes map together, into the first one's."""
    assert pytree.tree_map(lambda x, _: x, TensorDict({"a": A}, [3]), TensorDict({"a": A})).batch_size == Size([3])


def test_names_after_a_map():
    """A structure gives the same names each time that a tree is built from it."""
    structure = pytree.tree_structure(TensorDict({"a": A}, [3], names=["t"]))
    pytree.tree_unflatten([A[0]], structure)

    assert pytree.tree_unflatten([A], structure).names == ["t"]


@pytest.mark.parametrize("value", [None, "x"])
def test_leaves_that_are_no_tensors(value):
    """A map to values that are not tensors keeps the tree, which can be printed."""
    tree = pytree.tree_map(lambda _: value, TensorDict({"a": A}))

    assert pytree.tree_map(lambda x: x, tree)["a"] == value
    assert f"a: {value!r}" in repr(tree)


# -- vmap and other transformations -----------------------------------------------------------------------------

FRESH = """
import torch, torch._functorch.vmap as v, tdfunc
for name in ("_create_batched_inputs", "_unwrap_batched", "_process_batched_inputs"):
    assert getattr(v, name).__module__ == "torch._functorch.vmap", name
"""


@pytest.mark.slow
def test_import_leaves_torch_alone():
    """The import of tdfunc replaces no part of torch."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], check=True)


def test_vmap_of_a_tree_without_a_batch():
    """A tree of batch size [] maps over the first dimension of its leaves."""
    assert torch.vmap(lambda t: t["a"] + 1)(TensorDict({"a": A})).tolist() == [1, 2, 3]
    assert torch.vmap(lambda t: t.apply(lambda x: x * 2))(TensorDict({"a": A}))["a"].tolist() == [0, 2, 4]


@pytest.mark.slow
def test_masks_under_the_compiler():
    """A mask as index is one graph, where it is one for a tensor."""
    mask = torch.tensor([True, False, True])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = torch._dynamo.explain(lambda t: t[mask]["a"] + 1)(TensorDict({"a": A}, [3]))
    torch._dynamo.reset()

    assert explained.graph_break_count == 0


# -- the container ----------------------------------------------------------------------------------------------


def test_lost_entry():
    """An entry can be moved under itself."""
    assert TensorDict({"a": {"b": A}}).rename_key("a", ("a", "in"))["a", "in", "b"] is A


def test_a_part_of_a_state_dict():
    """`strict=False` loads the given entries and keeps the rest."""
    model = nn.ModuleDict({"p": nn.Linear(2, 2)})

    tree = from_module(model).load_state_dict({"p.bias": torch.ones(2)}, strict=False)

    assert tree["p", "bias"].tolist() == [1, 1]
    assert torch.equal(tree["p", "weight"], model.p.weight)
