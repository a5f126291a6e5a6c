"""Every family of tree operations against tensordict: one expression, which means the same in both libraries.

Where it means the same on each tensor, too, a dict comprehension of it is the bare work.
"""

from collections.abc import Callable
from typing import Any

import tensordict
import torch

import tdfunc as tdf
from benchmarks.rows import Case, Row, Suite
from benchmarks.trees import ONCE

ROWS, COLUMNS = 8, 4
LEAVES = (10, 100)
OTHER, RAW = "tensordict", "raw dict"

# Family -> operation -> what it does to a tree `t`, and a second one of the same structure.
FAMILIES: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "index": {
        "row of each": lambda t, u: t[:, 1],
        "ellipsis": lambda t, u: t[..., None],
        "list": lambda t, u: t[[0, 3, 1]],
        "two tensors": lambda t, u: t[torch.tensor([0, 1]), torch.tensor([1, 2])],
        "gather": lambda t, u: t.gather(0, torch.zeros(2, COLUMNS, dtype=torch.int64)),
        "masked_select": lambda t, u: t.masked_select(torch.eye(ROWS, COLUMNS, dtype=torch.bool)),
        "where": lambda t, u: t.where(torch.eye(ROWS, COLUMNS, dtype=torch.bool), u),
    },
    "shape": {
        "view": lambda t, u: t.view(-1),
        "flatten": lambda t, u: t.flatten(0, 1),
        "unflatten": lambda t, u: t.unflatten(0, (2, 4)),
        "permute": lambda t, u: t.permute(1, 0),
        "transpose": lambda t, u: t.transpose(0, 1),
        "unsqueeze": lambda t, u: t.unsqueeze(0),
        "squeeze": lambda t, u: t[:1].squeeze(0),
        "expand": lambda t, u: t.expand(3, ROWS, COLUMNS),
    },
    "pieces": {
        "split": lambda t, u: t.split(3),
        "chunk": lambda t, u: t.chunk(2),
        "unbind": lambda t, u: t.unbind(1),
        "stack along 1": lambda t, u: torch.stack([t, u], 1),
        "cat along 1": lambda t, u: torch.cat([t, u], 1),
        "repeat_interleave": lambda t, u: t.repeat_interleave(2, dim=0),
        "repeat": lambda t, u: t.repeat(2, 1),
    },
    "pointwise": {
        "neg": lambda t, u: -t,
        "exp": lambda t, u: t.exp(),
        "clamp": lambda t, u: t.clamp(0.0, 1.0),
        "add number": lambda t, u: t + 1.0,
        "mul": lambda t, u: t * u,
        "div": lambda t, u: t / u,
        "pow": lambda t, u: t**2,
        "lerp": lambda t, u: t.lerp(u, 0.5),
        "equal": lambda t, u: t == u,
        "greater": lambda t, u: t > 0,
    },
    "reduce": {
        "sum": lambda t, u: t.sum(),
        "mean over a dimension": lambda t, u: t.mean(dim=0),
        "std over a dimension": lambda t, u: t.std(dim=0),
        "amax over a dimension": lambda t, u: t.amax(dim=0),
        "all": lambda t, u: t.isfinite().all(),
    },
    "cast and memory": {
        "clone": lambda t, u: t.clone(),
        "detach": lambda t, u: t.detach(),
        "to a dtype": lambda t, u: t.to(torch.float64),
        "contiguous": lambda t, u: t.contiguous(),
        "zeros_like": lambda t, u: torch.zeros_like(t),
        "new_zeros": lambda t, u: t.new_zeros(ROWS, COLUMNS),
    },
    "structure": {
        "select": lambda t, u: t.select("k0", "k3"),
        "exclude": lambda t, u: t.exclude("k0", "k3"),
        "keys": lambda t, u: list(t.keys(True, True)),
        "flatten_keys": lambda t, u: t.flatten_keys("."),
        "to_dict": lambda t, u: t.to_dict(),
        "named_apply": lambda t, u: t.named_apply(lambda name, x: x),
    },
}  # fmt: skip

# What these do to a tree is not what they do to each tensor: features stay as they are, or keys are meant.
OWN = {
    "ellipsis", "gather", "masked_select", "where", "view", "permute", "expand", "repeat", "sum", "all", "new_zeros",
    *FAMILIES["structure"],
}  # fmt: skip


def family_ways(n: int) -> dict[str, dict[str, Callable[[], Any]]]:
    raws = [{f"k{i}": torch.rand(ROWS, COLUMNS, 3) + 0.5 for i in range(n)} for _ in range(2)]
    t, u = (tdf.TensorDict(raw, [ROWS, COLUMNS]) for raw in raws)
    a, b = (tensordict.TensorDict(raw, [ROWS, COLUMNS]) for raw in raws)
    ways: dict[str, dict[str, Callable[[], Any]]] = {}
    for family, operations in FAMILIES.items():
        for what, fn in operations.items():
            name = f"{family}: {what}"
            ways[name] = {"tdfunc": _call(fn, t, u), OTHER: _call(fn, a, b)}
            if what not in OWN:
                ways[name][RAW] = _each(fn, *raws)
    return ways


def _each(fn: Callable[[Any, Any], Any], first: dict[str, Any], second: dict[str, Any]) -> Callable[[], Any]:
    return lambda: {key: fn(x, second[key]) for key, x in first.items()}


def _call(fn: Callable[[Any, Any], Any], first: Any, second: Any) -> Callable[[], Any]:
    return lambda: fn(first, second)


def family_cases() -> list[Case]:
    return [Case(f"{what}, {n} leaves", ways) for n in LEAVES for what, ways in family_ways(n).items()]


def _row(family: str) -> Row:
    cases = tuple(f"{family}: {what}, {n} leaves" for n in LEAVES for what in FAMILIES[family])
    return Row(f"{family} operations", OTHER, 1.8, "faster", cases, "mean", floor=1.0, bound=RAW, why=ONCE)


SUITE = Suite(
    "families",
    "Families of tree operations",
    "The trees are flat, with 10 or 100 leaves of shape (8, 4, 3) and batch size [8, 4].",
    family_cases,
    tuple(map(_row, FAMILIES)),
    (family_ways,),
)
