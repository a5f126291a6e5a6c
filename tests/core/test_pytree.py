"""Rebuilding trees around other leaves, and what a structure keeps as text."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tdfunc import TensorDict, lazy_stack
from tdfunc.core.walk import same_keys
from tests.core.test_ties import tied

TREE = TensorDict({"x": torch.zeros(2), "y": torch.ones(2)}, [2], names=["row"], device="cpu")


def test_the_device_is_that_of_all_leaves():
    """A rebuilt tree or lazy stack has a device only if all its leaves are still there."""
    leaves, spec = pytree.tree_flatten(lazy_stack([TREE, TREE]))
    moved = [x.to("meta") for x in leaves]

    assert pytree.tree_map(lambda x: x[:1].to("meta"), TREE).device is None
    found = [pytree.tree_unflatten([*leaves[:n], *moved[n:]], spec).device for n in (4, 3, 2)]
    assert found == [TREE.device, None, None]


@pytest.mark.parametrize("change", [torch.neg, lambda _: nn.UninitializedParameter(), lambda _: None])
@pytest.mark.parametrize(
    "reread", [lambda spec: spec, lambda spec: pytree.treespec_loads(pytree.treespec_dumps(spec))], ids=["spec", "text"]
)
def test_what_leaves_without_a_shape_keep(change, reread):
    """Batch size, names and keys stay, also by way of text, if leaves are of the same shape or of none."""
    leaves, spec = pytree.tree_flatten(TREE)
    tree = pytree.tree_unflatten(map(change, leaves), reread(spec))

    assert tree.batch_size == (2,)
    assert tree.names == ["row"]
    assert list(tree.keys()) == ["x", "y"]
    assert reread(spec).context.device == TREE.device


def test_a_number_in_place_of_a_tree():
    """A map may put a number in place of a sub-tree: tied paths into it, and those that read from it, go."""
    is_leaf = lambda node: isinstance(node, TensorDict) and "b" in node  # noqa: E731
    tree = pytree.tree_map(lambda node: 0 if is_leaf(node) else node, tied(), is_leaf=is_leaf)

    assert list(tree.keys()) == ["emb", "out"]
    assert tree["out"] == 0


def test_kinds_of_dropped_leaves_go():
    """A leaf under the key of one that a map has dropped has no kind."""
    tree = TensorDict.from_module(nn.Linear(2, 3)).apply(lambda x: x if x.dim() == 2 else None)

    assert tree.set("bias", torch.zeros(3)).kind("bias") is None


@pytest.mark.parametrize(
    "other", [{"n": {"b": 0.0}}, {"n": {"a": 0.0, "b": 0.0}}, {"n": 0.0}, {"m": {"a": 0.0}}], ids=str
)
def test_same_keys_are_those_of_inner_nodes_too(other):
    """A node is compared with the node at its place, and not with a leaf."""
    tree = TensorDict({"n": {"a": 0.0}})

    assert same_keys(tree, TensorDict({"n": {"a": 1.0}}))
    assert not same_keys(tree, TensorDict(other))
    assert not same_keys(TensorDict(other), tree)
