# ruff: noqa: D103 - what the operations do, their names say
"""An oracle for ragged trees: the rows of a batch as an object array of numpy, whose cells are dicts of leaves.

It shares nothing with lazy stacks: what an operation does to the batch, numpy does to the array of rows.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from tdfunc import TensorDict
from tdfunc._lazystack import LazyStack, lazy_stack


class Pair(NamedTuple):
    """One operation, as ours on trees and as the oracle's on rows; both return lists."""

    ours: Any
    oracle: Any
    # Whether a lazy stack may refuse it: it needs one tensor for each leaf if the stack's dimension is concerned.
    may_refuse: bool = False


def rows_of(tree):
    """The rows of a tree, in the shape of its batch."""
    rows = np.empty(tuple(tree.batch_size), object)
    if isinstance(tree, LazyStack):
        for i, part in enumerate(tree.trees):
            found = rows_of(part)
            rows[(slice(None),) * tree.stack_dim + (i,)] = found if found.shape else found[()]
        return rows
    return cells(
        rows, lambda at, _: {path: leaf[at] for path, leaf in tree.items(include_nested=True, leaves_only=True)}
    )


def cells(rows, fn):
    """The array of `fn(place, row)`."""
    new = np.empty(rows.shape, object)
    for at in np.ndindex(*rows.shape):
        new[at] = fn(at, rows[at])
    return new


def each_leaf(rows, fn):
    """The array whose leaves are `fn(place, leaf)`."""
    return cells(rows, lambda at, row: {path: fn(at, leaf) for path, leaf in row.items()})


def assert_rows_equal(actual, expected):
    """Check that two arrays hold the same rows."""
    assert actual.shape == expected.shape
    for at in np.ndindex(*expected.shape):
        assert actual[at].keys() == expected[at].keys()
        for path, leaf in expected[at].items():
            torch.testing.assert_close(actual[at][path], leaf)


def random_stack(rng):
    """A lazy stack of trees whose features, and sometimes keys, differ."""
    size = [rng.randint(0 if rng.random() < 0.1 else 1, 3) for _ in range(rng.randint(0, 2))]
    all_same, some_keys = rng.random() < 0.2, rng.random() < 0.2

    def make_tree():
        width = 2 if all_same else rng.randint(0, 3)
        inner = [] if all_same else [2] * rng.randint(0, 1)
        entries: dict[str, Any] = {"x": torch.randn(*size, width), "n": {"y": torch.randint(9, (*size, *inner))}}
        if some_keys and rng.random() < 0.5:
            entries["extra"] = torch.randn(size)
        return TensorDict(entries, size)

    return lazy_stack([make_tree() for _ in range(rng.randint(1, 4))], rng.randint(0, len(size)))


# -- operations: each is made for a tree, its rows, a random generator, and a dimension of the batch -----------------


def index(rng, tree, rows, _):
    parts: list[Any] = []
    # torch takes numbers away first; numpy takes them for rows, which go to the front beside other rows.
    has_rows = rng.random() < 0.5
    for size in rows.shape[: rng.randint(1, max(1, rows.ndim))]:
        kinds = ["slice", "new", "mask"] + (["rows"] * 3 if has_rows else ["number"] * 2) * bool(size)
        parts.append(_index_part(rng, rng.choice(kinds), size, has_rows))
        if parts[-1] is None:
            parts.append(slice(None))
    parts += [...] * (rng.random() < 0.2)
    arrays = tuple([part.numpy() if isinstance(part, torch.Tensor) else part for part in parts])
    several = sum(isinstance(part, torch.Tensor) for part in parts) > 1
    return Pair(lambda: [tree[tuple(parts)]], lambda: [as_array(rows[arrays])], several)


def _index_part(rng, kind, size, has_rows):
    if kind == "rows":
        return torch.randint(-size, size, rng.choice([(2,), (3,), (1,), (2, 1)]))
    if kind == "mask" and has_rows:
        return torch.rand(size) < 0.7
    if kind == "number":
        return rng.randint(-size, size - 1)
    if kind == "new":
        return None
    return slice(rng.randint(-size - 1, size + 1), rng.randint(-size - 1, size + 1), rng.choice([None, 1, 2]))


def as_array(rows):
    """One row as an array without dimensions."""
    if isinstance(rows, np.ndarray):
        return rows
    new = np.empty((), object)
    new[()] = rows
    return new


def permute(rng, tree, rows, _):
    order = rng.sample(range(rows.ndim), rows.ndim)
    return Pair(lambda: [tree.permute(*order)], lambda: [rows.transpose(order)])


def flip(_, tree, rows, dim):
    return Pair(lambda: [tree.flip(dim)], lambda: [np.flip(rows, dim)])


def unsqueeze(_, tree, rows, dim):
    return Pair(lambda: [tree.unsqueeze(dim)], lambda: [np.expand_dims(rows, dim)])


def squeeze(_, tree, rows, __):
    return Pair(lambda: [tree.squeeze()], lambda: [rows.reshape([size for size in rows.shape if size != 1])])


def expand(rng, tree, rows, _):
    size = (rng.randint(1, 3), *rows.shape)
    return Pair(lambda: [tree.expand(*size)], lambda: [np.broadcast_to(rows, size)])


def repeat(rng, tree, rows, _):
    counts = [rng.randint(1, 2) for _ in rows.shape]
    return Pair(lambda: [tree.repeat(*counts)], lambda: [np.tile(rows, counts)])


def repeat_interleave(rng, tree, rows, dim):
    count = rng.randint(0, 3)
    return Pair(lambda: [tree.repeat_interleave(count, dim)], lambda: [np.repeat(rows, count, dim)])


def split(rng, tree, rows, dim):
    size, total = rng.randint(1, 3), rows.shape[dim]
    return Pair(lambda: tree.split(size, dim), lambda: np.split(rows, range(size, max(total, 1), size), dim))


def unbind(_, tree, rows, dim):
    count = rows.shape[dim]
    return Pair(lambda: tree.unbind(dim), lambda: [as_array(rows.take(i, dim)) for i in range(count)])


def reshape(rng, tree, rows, _):
    total = rows.size
    sizes = [(total,), (1, total), (*rows.shape, 1), rows.shape[::-1], (total, 1, 1)]
    sizes += [(total // 2, 2), (2, total // 2)] if total % 2 == 0 else []
    size = rng.choice(sizes)
    return Pair(lambda: [tree.reshape(*size)], lambda: [rows.reshape(size)], may_refuse=True)


def flatten(rng, tree, rows, _):
    start = rng.randint(0, rows.ndim - 1)
    end = rng.randint(start, rows.ndim - 1)
    size = (*rows.shape[:start], int(np.prod(rows.shape[start : end + 1])), *rows.shape[end + 1 :])
    merges_front = isinstance(tree, LazyStack) and start < tree.stack_dim <= end
    return Pair(lambda: [tree.flatten(start, end)], lambda: [rows.reshape(size)], merges_front)


def unflatten(rng, tree, rows, dim):
    dim, total = dim % rows.ndim, rows.shape[dim]
    sizes = rng.choice([(1, total), (total, 1)])
    size = (*rows.shape[:dim], *sizes, *rows.shape[dim + 1 :])
    return Pair(lambda: [tree.unflatten(dim, sizes)], lambda: [rows.reshape(size)])


def cat(_, tree, rows, dim):
    return Pair(lambda: [torch.cat([tree, tree], dim)], lambda: [np.concatenate([rows, rows], dim)])


def stack(_, tree, rows, dim):
    return Pair(lambda: [torch.stack([tree, tree.flip(0)], dim)], lambda: [np.stack([rows, np.flip(rows, 0)], dim)])


def stack_lazily(_, tree, rows, dim):
    return Pair(lambda: [lazy_stack([tree.flip(0), tree], dim)], lambda: [np.stack([np.flip(rows, 0), rows], dim)])


def masked_fill(_, tree, rows, __):
    mask = torch.rand(rows.shape) < 0.5
    return Pair(
        lambda: [tree.masked_fill(mask, 3)],
        lambda: [each_leaf(rows, lambda at, x: torch.full_like(x, 3) if mask[at] else x)],
    )


def where(_, tree, rows, __):
    mask = torch.rand(rows.shape) < 0.5
    return Pair(
        lambda: [torch.where(mask, tree, tree * 2)], lambda: [each_leaf(rows, lambda at, x: x if mask[at] else x * 2)]
    )


def rescale(_, tree, rows, __):
    factor = torch.randn(rows.shape)
    # Of numbers and tensors of no dimensions, the dtype would come from the leaf.
    return Pair(lambda: [tree * factor], lambda: [each_leaf(rows, lambda at, x: x.to(torch.float32) * factor[at])])


def set_entry(_, tree, rows, __):
    value = torch.randn(*rows.shape, 2)
    return Pair(
        lambda: [tree.set(("n", "z"), value)], lambda: [cells(rows, lambda at, row: {**row, ("n", "z"): value[at]})]
    )


OPERATIONS = (
    index, permute, flip, unsqueeze, squeeze, expand, repeat, repeat_interleave, split, unbind, reshape, flatten,
    unflatten, cat, stack, stack_lazily, masked_fill, where, rescale, set_entry,
)  # fmt: skip
