"""Tree operations: against tensordict, and against dict comprehensions over the same torch calls."""

from collections.abc import Callable
from typing import Any

import tensordict
import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_map

import tdfunc as tdf
from benchmarks.rows import Case, Row, Suite

BATCH = 32
LEAVES = (10, 100)
Ways = dict[str, dict[str, Callable[[], Any]]]
OTHER, RAW, CHECKED = "tensordict", "raw dict", "checked dict"


class Data:
    """The same tensors as a dict, as our tree and as tensordict's; for operations on several trees, four of each."""

    def __init__(self, n: int) -> None:
        self.raws = [{f"k{i}": torch.randn(BATCH, 8) for i in range(n)} for _ in range(4)]
        self.ours = [tdf.TensorDict(raw, [BATCH]) for raw in self.raws]
        self.theirs = [tensordict.TensorDict(raw, [BATCH]) for raw in self.raws]

    @property
    def first(self) -> tuple[dict[str, Tensor], Any, Any]:
        return self.raws[0], self.ours[0], self.theirs[0]


def edit_ways(data: Data) -> Ways:
    raw, a, b = data.first
    key, size, value = f"k{len(raw) // 2}", Size([BATCH]), torch.randn(BATCH, 8)
    return {
        "construct": {
            "tdfunc": lambda: tdf.TensorDict(raw, [BATCH]),
            OTHER: lambda: tensordict.TensorDict(raw, [BATCH]),
            CHECKED: lambda: {k: x if x.shape[:1] == size else refuse(k) for k, x in raw.items()},
        },
        "get": {"tdfunc": lambda: a[key], OTHER: lambda: b[key]},
        # tensordict's `set` writes into the tree; a copy of its dict (not of its tensors) keeps the old one.
        "set": {
            "tdfunc": lambda: a.set(key, value),
            OTHER: lambda: b.copy().set(key, value),
            RAW: lambda: {**raw, key: value},
        },
    }


def leaf_ways(data: Data) -> Ways:
    raw, a, b = data.first
    raw1, a1, b1 = data.raws[1], data.ours[1], data.theirs[1]
    return {
        "apply": {
            "tdfunc": lambda: a.apply(torch.neg),
            OTHER: lambda: b.apply(torch.neg),
            RAW: lambda: {k: torch.neg(x) for k, x in raw.items()},
        },
        "reshape": {
            "tdfunc": lambda: a.reshape(4, 8),
            OTHER: lambda: b.reshape(4, 8),
            RAW: lambda: {k: x.reshape(4, 8, *x.shape[1:]) for k, x in raw.items()},
        },
        "add": {
            "tdfunc": lambda: a + a1,
            OTHER: lambda: b + b1,
            RAW: lambda: {k: x + raw1[k] for k, x in raw.items()},
        },
        "tree_map": {
            "tdfunc": lambda: tree_map(torch.neg, a),
            OTHER: lambda: tree_map(torch.neg, b),
            RAW: lambda: tree_map(torch.neg, raw),
        },
    }


def index_ways(data: Data) -> Ways:
    raw, a, b = data.first
    rows, mask = torch.randint(0, BATCH, (16,)), torch.rand(BATCH) > 0.5
    return {
        "index int": {"tdfunc": lambda: a[3], OTHER: lambda: b[3], RAW: lambda: {k: x[3] for k, x in raw.items()}},
        "index slice": {
            "tdfunc": lambda: a[2:9],
            OTHER: lambda: b[2:9],
            RAW: lambda: {k: x[2:9] for k, x in raw.items()},
        },
        "index tensor": {
            "tdfunc": lambda: a[rows],
            OTHER: lambda: b[rows],
            RAW: lambda: {k: x[rows] for k, x in raw.items()},
        },
        "index mask": {
            "tdfunc": lambda: a[mask],
            OTHER: lambda: b[mask],
            RAW: lambda: {k: x[mask] for k, x in raw.items()},
        },
    }


def join_ways(data: Data) -> Ways:
    (r0, r1, r2, r3), ours, theirs = data.raws, data.ours, data.theirs
    return {
        "stack": {
            "tdfunc": lambda: torch.stack(ours),
            OTHER: lambda: torch.stack(theirs),
            RAW: lambda: {k: torch.stack([r0[k], r1[k], r2[k], r3[k]]) for k in r0},
        },
        "cat": {
            "tdfunc": lambda: torch.cat(ours[:2]),
            OTHER: lambda: torch.cat(theirs[:2]),
            RAW: lambda: {k: torch.cat([r0[k], r1[k]]) for k in r0},
        },
    }


SOURCES = (edit_ways, leaf_ways, index_ways, join_ways)


def tree_ways(n: int) -> Ways:
    data = Data(n)
    return {what: ways for source in SOURCES for what, ways in source(data).items()}


def refuse(key: str) -> Any:
    raise ValueError(key)


def tree_cases() -> list[Case]:
    return [Case(f"{what}, {n} leaves", ways) for n in LEAVES for what, ways in tree_ways(n).items()]


def _cases(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}, {n} leaves" for name in names for n in LEAVES)


MIDDLE = ("index int", "index slice", "index tensor", "index mask", "cat", "reshape", "add", "tree_map")
ONCE = "on 10 leaves, the work once per call is visible: read the arguments, find the function, make the tree"
MAKES = "the remaining time makes the tree: its arguments, six slots, and the types of keys and values"
SUITE = Suite(
    "trees",
    "Tree operations",
    "The trees are flat, with 10 or 100 leaves of shape (32, 8) and batch size [32].",
    tree_cases,
    (
        Row("construct", OTHER, 4, "faster", _cases("construct"), bound=CHECKED, why=MAKES),
        Row("get", OTHER, 6, "faster", _cases("get")),
        Row(
            "set",
            OTHER,
            15,
            "faster",
            _cases("set"),
            bound=RAW,
            why="`set` checks the shape of the value and makes a tree, which costs the same for any number of leaves",
        ),
        Row(
            "apply",
            OTHER,
            3,
            "faster",
            _cases("apply"),
            bound=RAW,
            why="`apply` compares the shape of each result with the batch size",
        ),
        Row(
            "stack",
            OTHER,
            3.5,
            "faster",
            _cases("stack"),
            bound=RAW,
            why="`stack` compares keys and dtypes of all trees, since torch would promote silently, and "
            "`torch.stack` itself takes microseconds to dispatch to trees",
        ),
        Row(
            "index (int, slice, tensor, mask), cat, reshape, add, tree_map",
            OTHER,
            1.8,
            "faster",
            _cases(*MIDDLE),
            "mean",
            1.0,
            bound=RAW,
            why=ONCE,
        ),
        Row("all rows that call torch", RAW, 1.3, "at most", _cases("apply", "stack", *MIDDLE), "mean"),
        Row("construct", CHECKED, 1.2, "at most", _cases("construct"), why=MAKES),
    ),
    SOURCES,
)
