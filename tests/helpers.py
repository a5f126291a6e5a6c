"""Checks and modules that many tests share."""

import threading

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves


def assert_trees_equal(actual, expected, *, rtol=0.0, atol=0.0):
    """Check that two trees have the same structure, batch sizes, names, devices and leaves."""
    assert type(actual) is type(expected)
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    for (path, node), (_, other) in zip(collections(actual), collections(expected), strict=True):
        for attribute in ("batch_size", "names", "device"):
            assert getattr(node, attribute) == getattr(other, attribute), f"{attribute} at {path}"
    leaves, others = pytree.tree_flatten_with_path(actual)[0], tree_leaves(expected)
    for (path, leaf), other in zip(leaves, others, strict=True):
        where = f"leaf {pytree.keystr(path)}"
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(
                leaf, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, where=where: f"{where}: {text}"
            )
        else:
            assert leaf == other, where


def collections(tree, path=()):
    """Every tree inside `tree`, itself included, with its path: pytree contexts do not compare batch sizes."""
    if hasattr(tree, "batch_size"):
        yield path, tree
        children = [(key, tree[key]) for key in sorted(tree.keys())]
    elif isinstance(tree, dict):
        children = list(tree.items())
    elif isinstance(tree, list | tuple):
        children = list(enumerate(tree))
    else:
        children = []
    for key, child in children:
        yield from collections(child, (*path, key))


def assert_pure(fn, *trees):
    """Call fn and check that it wrote to none of the leaves it was given."""
    leaves = [leaf for tree in trees for leaf in tree_leaves(tree)]
    before = [(leaf._version, leaf.clone()) for leaf in leaves]
    out = fn(*trees)
    # The version misses writes through .data; the copy misses writes of an equal value.
    for leaf, (version, copy) in zip(leaves, before, strict=True):
        assert leaf._version == version
        assert torch.equal(leaf, copy)
    return out


class TinyMLP(nn.Module):
    """Two linear layers: features (B, 3) to logits (B, 2)."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


class TiedLM(nn.Module):
    """A language model whose output layer is its embedding: ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocabulary=7, width=4):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, ids):
        return self.out(self.norm(self.emb(ids)))


def examples(share):
    """A share of the profile's examples, for a test each of whose examples takes long."""
    return settings(max_examples=round(settings.default.max_examples * share))


def quick(names, *kept):
    """The names as parameters of a test, all but the `kept` marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


def run_in_threads(work, values):
    """Call `work` with each value, in a thread each, and wait for all."""
    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
