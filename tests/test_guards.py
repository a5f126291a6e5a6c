"""A compiled function is called with one structure and then with another: it must not run what it traced before."""

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tests.helpers import quick

ZEROS, ONES = torch.zeros(3), torch.ones(3)


class Pair(TensorClass):
    x: Tensor
    y: Tensor | None = None
    note: str | None = None

    def total(self):
        return self.x if self.y is None else self.x + self.y


class Only(TensorClass["tensor_only"]):
    x: Tensor
    y: Tensor | None = None


class Outer(TensorClass):
    pair: Pair
    other: Pair | None = None


def add_fields(t):
    """The sum of fields, one of which may be empty."""
    return t.x if t.y is None else t.x + t.y


def add_entries(t):
    """The sum of entries, one of which may be missing."""
    try:
        return t["x"] + t["y"]
    except KeyError:
        return t["x"]


def add_nested(t):
    """The same, where it lies in another tree."""
    try:
        return t["x"] + t["a", "y"]
    except KeyError:
        return t["x"]


def add_rows(t):
    """The sum of the fields of a stack."""
    return t.x[0] if t.y is None or t.y[-1] is None else t.x[0] + t.y[0]


def add_lazy_entries(t):
    """The sum of the entries of a stack."""
    try:
        return t["x"][0] + t["y"][0]
    except KeyError:
        return t["x"][0]


PAIRS = (Pair(ZEROS), Pair(ZEROS, ONES))
TREES = (TensorDict({"x": ZEROS}), TensorDict({"x": ZEROS, "y": ONES}))
STACKS = tuple(tdf.lazy_stack([pair]) for pair in PAIRS)
NAMED = tuple(TensorDict({"x": ZEROS}, [3], names=names) for names in (None, ["row"]))

# A function, and two trees of which it must not take one for the other.
CASES = {
    "field": (add_fields, *PAIRS),
    "field, tensor only": (add_fields, Only(ZEROS), Only(ZEROS, ONES)),
    "field, in a method": (Pair.total, *PAIRS),
    "field, non-tensor": (lambda t: t.x if t.note is None else t.x + len(t.note), Pair(ZEROS), Pair(ZEROS, note="ab")),
    "field, nested": (lambda t: add_fields(t.pair), Outer(PAIRS[0]), Outer(PAIRS[1])),
    "field, a tree": (
        lambda t: t.pair.x if t.other is None else add_fields(t.other),
        Outer(PAIRS[0]),
        Outer(PAIRS[0], Pair(ONES, ONES)),
    ),
    "field, of a stack": (add_rows, *STACKS),
    "field, in a part of a stack": (
        add_rows,
        tdf.lazy_stack([PAIRS[1], PAIRS[0]]),
        tdf.lazy_stack([PAIRS[1], PAIRS[1]]),
    ),
    "entry": (add_entries, *TREES),
    "entry, typed": (add_entries, *PAIRS),
    "entry, nested": (add_nested, TREES[0].set("a", {}), TREES[0].set(("a", "y"), ONES)),
    "entry, in a tree": (add_nested, TREES[0], TREES[0].set(("a", "y"), ONES)),
    "entry, of a stack": (add_lazy_entries, *STACKS),
    "get": (lambda t: t["x"] + t.get("y", 0), *TREES),
    "in": (lambda t: t["x"] + t["y"] if "y" in t else t["x"], *TREES),
    "in keys": (lambda t: t["x"] + 1 if "y" in t.keys() else t["x"], *TREES),  # noqa: SIM118
    "length": (lambda t: t["x"] + len(t.keys()), *TREES),
    "values": (lambda t: sum(t.values()), *TREES),
    "leaves": (lambda t: sum(t.leaves()), *TREES),
    "select": (lambda t: sum(t.select("x", "y", strict=False).leaves()), *TREES),
    "edit": (lambda t: sum(t.set("x", t["x"] + 1).leaves()), *TREES),
    "apply": (lambda t: sum(t.apply(torch.exp).leaves()), *TREES),
    "names": (lambda t: t["x"] if t.names == [None] else t["x"] + 1, *NAMED),
    "batch size": (lambda t: t["x"] + len(t.batch_size), TREES[0], TREES[0].with_batch_size([3])),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0)], ids=["rising", "falling", "back"])
@pytest.mark.parametrize("name", quick(CASES, "field", "field, tensor only", "field, non-tensor", "entry"))
def test_other_structures(name, order):
    """A compiled function sees the entries of each call's tree, whatever an earlier call had."""
    torch.compiler.reset()
    fn, *trees = CASES[name]
    compiled = torch.compile(fn, fullgraph=True, backend="eager")

    found = [compiled(trees[i]) for i in order]

    torch.testing.assert_close(found, [fn(trees[i]) for i in order], rtol=0, atol=0)
