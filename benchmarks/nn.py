"""Modules on trees: the cost of a call around the function that it wraps."""

from typing import Any

import tensordict.nn
import torch
from tensordict import TensorDict as Theirs
from torch import nn

import tdfunc as tdf
import tdfunc.nn
from benchmarks.rows import Case, Row, Suite

OTHER = "tensordict"
WHAT = (
    "TensorDictModule of a function",
    "nested out key",
    "called with a tensor",
    "a sequence of 3",
    "selected outputs",
)


def same(x: Any) -> Any:
    return x


def module_ways(modules: Any, tree: Any) -> list[Any]:
    """Return the calls with the classes of one library."""
    module = modules.TensorDictModule
    names = zip("xyz", "yzw", strict=True)
    parts = [module(same, [read], [write]) for read, write in names]
    linear = module(nn.Linear(4, 4).requires_grad_(False), ["x"], ["y"])
    one, nested = module(same, ["x"], ["y"]), module(same, ["x"], [("n", "y")])
    sequence = modules.TensorDictSequential(*parts)
    selected = modules.TensorDictSequential(*parts).select_out_keys("w")
    x = tree["x"]
    return [
        lambda: one(tree), lambda: nested(tree), lambda: one(x), lambda: sequence(tree), lambda: selected(tree),
        lambda: linear(tree),
    ]  # fmt: skip


def module_cases() -> list[Case]:
    x = torch.randn(8, 4)
    ours = module_ways(tdfunc.nn, tdf.TensorDict({"x": x}, [8]))
    theirs = module_ways(tensordict.nn, Theirs({"x": x}, [8]))
    names = (*WHAT, "TensorDictModule of nn.Linear(4, 4)")
    return [Case(what, {"tdfunc": a, OTHER: b}) for what, a, b in zip(names, ours, theirs, strict=True)]


SUITE = Suite(
    "nn",
    "Modules on trees",
    "The tree has one leaf of shape (8, 4) and batch size [8]. The function either returns its argument, so "
    "that only the time of the module remains, or is a layer without gradients.",
    module_cases,
    (
        Row("call a module on a tree", OTHER, 1.6, "faster", WHAT),
        Row("call TensorDictModule(nn.Linear)", OTHER, 1.6, "faster", ("TensorDictModule of nn.Linear(4, 4)",)),
    ),
    (module_cases, module_ways),
)
