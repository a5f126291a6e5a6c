"""Trees that the tests of lazy stacks share, and what compares stacks."""

import torch
from torch import Tensor

from tdfunc import TensorDict
from tdfunc._lazystack import LazyStack
from tdfunc._tensorclass import TensorClass
from tdfunc.core.nontensor import NonTensorStack
from tests.helpers import assert_trees_equal


class Message(TensorClass):
    role: str
    ids: Tensor
    score: Tensor | None = None


def tree(length, seed=0, width=2):
    """A tree of `length` rows with a nested tree and non-tensor data."""
    gen = torch.Generator().manual_seed(seed + 31 * length)
    return TensorDict(
        {
            "x": torch.randn(length, width, generator=gen),
            "n": {"y": torch.randint(9, (length,), generator=gen)},
            "s": NonTensorStack(*[f"{seed}.{i}" for i in range(length)]),
        },
        [length],
    )


def ragged(lengths=(2, 4, 3)):
    """Trees of unequal lengths."""
    return [tree(n, i) for i, n in enumerate(lengths)]


def uniform(count=3, size=(4, 2)):
    """Trees of one shape with two batch dimensions."""
    return [
        TensorDict(
            {
                "x": torch.arange(3.0 * size[0] * size[1]).reshape(*size, 3) + 10 * i,
                "n": {"y": torch.arange(size[0] * size[1]).reshape(size) + i},
                "s": [[f"{i}.{j}.{k}" for k in range(size[1])] for j in range(size[0])],
            },
            size,
        )
        for i in range(count)
    ]


def tensors_only(trees):
    """The trees without non-tensor data."""
    return [t.exclude("s") for t in trees]


def assert_stacks_equal(actual, expected):
    """Check that two lazy stacks hold equal trees along one dimension."""
    assert type(actual) is type(expected)
    assert (actual.stack_dim, actual.batch_size, actual.names) == (
        expected.stack_dim, expected.batch_size, expected.names,
    )  # fmt: skip
    for mine, theirs in zip(actual.trees, expected.trees, strict=True):
        assert_alike(mine, theirs)


def assert_alike(actual, expected):
    """Check that two trees, lazy or not, are equal."""
    if isinstance(expected, LazyStack):
        assert_stacks_equal(actual, expected)
    else:
        assert_trees_equal(actual, expected)
