"""Hypothesis strategies: key paths, random trees, ties, and pairs of trees that differ in one leaf."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tdfunc import Kind, NonTensorStack, TensorClass, TensorDict, lazy_stack
from tdfunc.core.collection import iter_leaves
from tdfunc.core.ties import by_identity
from tdfunc.ops.edits.edit import restore_ties

# Ordinary words, names of methods, separators, keys that a file system refuses, other alphabets.
KEYS = st.sampled_from(["a", "b", "weight", "keys", "shape", "device", "_type", "a.b", "a/b", "../x", "é", "x" * 300])
PATHS = st.lists(KEYS, min_size=1, max_size=4).map(tuple)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
SIZES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
VALUES = st.integers(-3, 3)


@st.composite
def leaves(draw, size=(), dtypes=DTYPES):
    """A tensor that starts with the batch size: dense, expanded or transposed."""
    shape = (*size, *draw(st.lists(st.integers(0, 2), max_size=2)))
    dtype = draw(dtypes)
    count = max(torch.Size(shape).numel(), 1)
    values = torch.tensor(draw(st.lists(VALUES, min_size=count, max_size=count))).to(dtype)
    layout = draw(st.sampled_from(["dense", "expanded", "transposed"]))
    if layout == "expanded" and 0 not in shape:
        return values[:1].reshape([1] * len(shape)).expand(shape)
    dense = values[: torch.Size(shape).numel()].reshape(shape)
    if layout == "transposed" and len(shape) > 1:
        return dense.transpose(0, 1).contiguous().transpose(0, 1)
    return dense


@st.composite
def trees(draw, size=None, depth=2, dtypes=DTYPES, nontensor=True, ties=True):
    """A tree: nested, empty, without batch, with non-tensor data, kinds, names and tied leaves."""
    root = size is None or depth == 2
    size = draw(SIZES) if size is None else size
    entries = {}
    for key in draw(st.lists(KEYS, unique=True, max_size=3)):
        kinds = ["leaf", "leaf"] + ["tree"] * (depth > 0) + ["word"] * nontensor
        kind = draw(st.sampled_from(kinds))
        if kind == "tree":
            longer = (*size, 2) if draw(st.booleans()) else size
            entries[key] = draw(trees(longer, depth - 1, dtypes, nontensor, False))
        elif kind == "word":
            entries[key] = draw(st.sampled_from(["red", "blue", b"bytes"]))
        else:
            entries[key] = draw(leaves(size, dtypes))
    tree = TensorDict(entries, size)
    return draw(_marked(tree, ties)) if root else tree


@st.composite
def _marked(draw, tree, ties):
    found = [path for path, _ in iter_leaves(tree)]
    if found and ties and draw(st.booleans()):
        source = draw(st.sampled_from(found))
        tree = tree.set("tied", tree[source]) if tree[source].shape[: tree.ndim] == tree.batch_size else tree
        tree = restore_ties(tree, by_identity(iter_leaves(tree)))
    if found and draw(st.booleans()):
        path = draw(st.sampled_from(found))
        tree = tree.set(path, tree[path], kind=draw(st.sampled_from(Kind)))
    if draw(st.booleans()):
        tree = tree.with_names([draw(st.sampled_from([name, None])) for name in "xyz"[: tree.ndim]])
    return tree


@st.composite
def pairs(draw, **options):
    """Two trees of one structure that differ in the values of one leaf, and its path."""
    tree = draw(trees(nontensor=False, **options).filter(lambda t: any(x.numel() for x in t.leaves())))
    paths = [path for path in tree.paths() if tree[path].numel()]
    path = draw(st.sampled_from(paths))
    leaf = tree[path]
    other = torch.logical_not(leaf) if leaf.dtype is torch.bool else leaf + 1
    return tree, tree.set(path, other.to(leaf.dtype)), path


# -- nodes of every kind ----------------------------------------------------------------------------------------


class Sample(TensorClass):
    """A typed tree for the laws."""

    a: Any = None
    b: Any = None


@st.composite
def any_trees(draw, size=None, meta=True):
    """A tree as of `trees`, and with rows of data, leaves that learn or are meta, typed and lazy sub-trees."""
    size = draw(SIZES) if size is None else size
    tree = draw(trees(size=size, depth=2))
    found = [path for path in tree.paths() if tree[path].is_floating_point() or tree[path].is_complex()]
    if found and not tree.ties() and draw(st.booleans()):
        path = draw(st.sampled_from(found))
        tree = tree.set(path, tree[path].detach().clone().requires_grad_())
    if meta and draw(st.booleans()):
        tree = tree.set("meta", torch.zeros(*size, 2, device="meta"))
    if draw(st.booleans()):
        tree = tree.set("typed", Sample(a=draw(leaves(size)), batch_size=size))
    if draw(st.booleans()):
        count = torch.Size(size).numel()
        rows = np.empty(count, dtype=object)
        rows[:] = draw(st.lists(st.sampled_from(["red", "blue"]), min_size=count, max_size=count))
        tree = tree.set("rows", NonTensorStack._wrap(rows.reshape(size))) if size and count else tree
    if size and size[-1] and draw(st.booleans()):
        inner = draw(trees(size=size[:-1], depth=0, ties=False))
        tree = tree.set("lazy", lazy_stack([inner.clone() for _ in range(size[-1])], len(size) - 1))
    return tree
