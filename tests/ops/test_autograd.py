"""Leaves in autograd and in memory: gradients of trees, layout, shared memory, bytes."""

import warnings

import pytest
import torch
from torch import Size, nn

from tdfunc import TensorDict, lazy_stack


def test_gradients_are_read():
    """`grad` has the gradients that are there, without a warning about those that cannot be."""
    w = torch.ones(2, requires_grad=True)
    tree = TensorDict({"w": w, "n": {"b": torch.zeros(3)}, "y": w * 2}, [])
    tree["y"].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tree.grad

    assert found["w"] is w.grad
    assert list(found.keys(True)) == ["w", "n"]
    assert [tree.requires_grad, tree.data.requires_grad] == [True, False]
    assert tree.data["w"].data_ptr() == w.data_ptr()


@pytest.fixture
def params():
    """Two leaves that take gradients, one of them nested."""
    w, b = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    return TensorDict({"w": w, "n": {"b": b}})


def test_gradients_of_trees(params):
    """`torch.autograd.grad` gives a tree for a tree, without an unused leaf."""
    found = torch.autograd.grad((params["w"] ** 2).sum(), params, allow_unused=True)

    assert found.paths() == [("w",)]
    assert torch.equal(found["w"], 2 * params["w"])


def test_gradients_of_unused_leaves(params):
    """An unused leaf has zeros if they are asked for."""
    filled = torch.autograd.grad((params["w"] ** 2).sum(), params, materialize_grads=True)

    assert torch.equal(filled["n", "b"], torch.zeros(2))


def test_gradients_of_trees_and_tensors(params):
    """Trees and tensors may be inputs together."""
    pair = torch.autograd.grad((params["w"] ** 2).sum(), (params.select("w"), params["w"]), torch.tensor(1.0))

    assert torch.equal(pair[0]["w"], pair[1])


def test_gradients_of_trees_of_outputs(params):
    """A tree of outputs is weighted by a tree, whatever the order of its keys."""
    weights = TensorDict({"n": {"b": torch.ones(2)}, "w": torch.arange(3.0)})
    mapped, (alone,) = [torch.autograd.grad(params * 3, inputs, weights) for inputs in (params, params["w"])]

    assert mapped["w"].tolist() == alone.tolist() == [0, 3, 6]
    assert torch.equal(mapped["n", "b"], torch.full((2,), 3.0))


def test_batched_gradients_of_trees(params):
    """Weights with a batch give a batch of gradients."""
    eye = TensorDict({"w": torch.eye(3)}, [3])
    jacobian = torch.autograd.grad(params.select("w") * 2, params, eye, allow_unused=True, is_grads_batched=True)

    assert jacobian.batch_size == Size([3])
    assert jacobian.paths() == [("w",)]
    assert torch.equal(jacobian["w"], 2 * torch.eye(3))


class Twice(nn.Module):
    """One parameter under two names."""

    def __init__(self, w):
        super().__init__()
        self.a = self.b = nn.Parameter(w.detach())


def test_gradients_of_ties_and_lazy_stacks():
    """A tied leaf is differentiated once, and a ragged tree tree by tree."""
    tied = TensorDict.from_module(Twice(torch.randn(3)))
    found = torch.autograd.grad((tied["a"] * tied["b"]).sum(), tied)
    rows = [TensorDict({"x": torch.ones(n, requires_grad=True)}, [n]) for n in (1, 2)]
    ragged = torch.autograd.grad(torch.cat((lazy_stack(rows) * 3)["x"]).sum(), lazy_stack(rows))

    assert found.ties() == tied.ties() == [["a", "b"]]
    assert torch.equal(found["b"], 2 * tied["a"])
    assert [x.tolist() for x in ragged["x"]] == [[3.0], [3.0, 3.0]]


def test_layout():
    """`contiguous` copies the leaves that have gaps and no others."""
    leaf = torch.arange(6).reshape(2, 3).T
    tree = TensorDict({"a": leaf, "b": torch.zeros(3), "s": "x"}, [3])

    assert [tree.is_contiguous(), tree.contiguous().is_contiguous()] == [False, True]
    assert torch.equal(tree.contiguous()["a"], leaf)
    assert tree.contiguous()["b"] is tree["b"]
    dense = tree.exclude("a")
    assert dense.contiguous() is dense


def test_shared_memory():
    """The storage of a leaf moves in place, as torch's does, so that a worker process sees its writes."""
    leaf = torch.zeros(3)
    tree = TensorDict({"a": leaf, "s": "x"}, [3])

    assert tree.share_memory_() is tree
    assert leaf.is_shared()
    assert TensorDict({"s": "x"}).pin_memory()["s"] == "x"


def test_bytes_of_sparse_leaves():
    """A sparse leaf counts its stored values and indices."""
    eye = torch.eye(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        leaves = {"coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc(), "dense": eye}
    stored = {"coo": 100 * (4 + 2 * 8), "csr": 100 * 12 + 101 * 8, "csc": 100 * 12 + 101 * 8, "dense": 40_000}
    tree = TensorDict(leaves)

    assert {key: TensorDict({key: leaf}).nbytes for key, leaf in leaves.items()} == stored
    assert tree.nbytes == tree.summary().size_bytes == sum(stored.values())
