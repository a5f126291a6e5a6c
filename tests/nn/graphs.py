"""Random modules of trees, built alike from the classes of tdfunc and of tensordict, and the trees that they run on."""

import operator
from functools import reduce

import torch
from hypothesis import strategies as st
from torch import nn

import tdfunc.nn as ours
from tdfunc import TensorDict
from tests.incumbent import Incumbent, tensordict

theirs = tensordict.nn
KEYS = ["a", "b", "c", "d", ("n", "x"), ("n", "y"), ("n", "m", "x")]
ROWS = 3


class Mix(nn.Module):
    """One output for each row of a matrix of weights: a combination of the inputs."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(n_out, dtype=torch.float64))

    def forward(self, *inputs, **named):
        values = (*inputs, *named.values())
        outputs = [reduce(operator.add, [w * v for w, v in zip(row, values, strict=True)], bias)
                   for row, bias in zip(self.weight, self.bias, strict=True)]  # fmt: skip
        outputs = [torch.tanh(out).expand(ROWS) for out in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


@st.composite
def modules(draw):
    """A pair of equal modules with random keys: by position or by keyword, some outputs thrown away."""
    reads = draw(st.lists(st.sampled_from(KEYS), max_size=2))
    writes = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    mix = Mix(len(reads), len(writes))
    if draw(st.integers(0, 4)) == 0:
        writes = [*writes[:-1], "_"]
    if reads and draw(st.booleans()):
        reads = {f"argument{i}": key for i, key in enumerate(reads)}
    return ours.TensorDictModule(mix, reads, writes), theirs.TensorDictModule(mix, reads, writes)


@st.composite
def sequences(draw, depth=1, named=st.booleans(), **options):  # noqa: B008
    """A pair of equal sequences of random modules and sequences, some with names."""
    each = modules() if not depth else modules() | sequences(depth=depth - 1, named=named)
    mine, other = zip(*draw(st.lists(each, min_size=1, max_size=4)), strict=True)
    if draw(named):
        mine, other = ({f"part{i}": part for i, part in enumerate(each)} for each in (mine, other))
    else:
        mine, other = list(mine), list(other)
    return ours.TensorDictSequential(mine, **options), theirs.TensorDictSequential(other, **options)


@st.composite
def inputs(draw):
    """A pair of equal trees that hold some of the keys."""
    found = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=len(KEYS)))
    values = {key: torch.randn(ROWS, dtype=torch.float64) for key in found}
    return TensorDict(values, [ROWS]), Incumbent(values, [ROWS])


def values_of(tree):
    """The leaves of a tree of either library by path."""
    pairs = tree.items(True, True)
    return {key if isinstance(key, tuple) else (key,): value for key, value in pairs}


def assert_same_entries(tree, other):
    """Check that two trees, of either library, have equal leaves at the same paths."""
    mine, expected = values_of(tree), values_of(other)
    assert mine.keys() == expected.keys()
    for path, value in mine.items():
        torch.testing.assert_close(value, expected[path], rtol=0, atol=0)


def outcome(call, *args):
    """The result of a call, or None where it raises that a key is missing or has no value."""
    try:
        return call(*args)
    except (KeyError, TypeError, ValueError):
        return None
