"""How cost grows: with the number of leaves, and with how deep they lie."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import tdfunc as tdf
from benchmarks.measure import Effort, Fresh, Line, Way, fit_line, measure
from benchmarks.models.small import Still

LEAVES = (10, 30, 100, 300, 1000, 3000, 10_000)
QUICK_LEAVES = (10, 100, 1000)
# A power of the number of leaves up to which growth counts as linear: 10,000 leaves no longer fit into the caches.
LINEAR = 1.1
OPERATIONS = ("construct", "set", "tree_map", "add", "index int", "stack of 4", "swap")


class Growth(NamedTuple):
    """One operation: its cost at each number of leaves, and the line through them."""

    what: str
    cost_us: dict[int, float]
    line: Line

    @property
    def linear(self) -> bool:
        return self.line.exponent <= LINEAR


class Depth(NamedTuple):
    """One operation on 1024 leaves in 32 nodes that lie side by side, and in a chain of 32."""

    what: str
    flat_us: float
    wide_us: float
    deep_us: float


def tree_ways(tree: Any) -> dict[str, Way]:
    source = tree.to_dict()
    leaf = torch.zeros(4, 2)
    return {
        "construct": lambda: tdf.TensorDict(source, [4]),
        "set": lambda: tree.set("new", leaf),
        "tree_map": lambda: tree_map(torch.neg, tree),
        "add": lambda: tree + tree,
        "index int": lambda: tree[1],
        "stack of 4": lambda: torch.stack([tree, tree, tree, tree]),
    }


class Weights(nn.Module):
    """One parameter, and perhaps modules like it below."""

    def __init__(self, children: list[nn.Module], leaves: int = 1) -> None:
        super().__init__()
        for i in range(leaves):
            self.register_parameter(f"w{i}", nn.Parameter(torch.zeros(2)))
        for i, child in enumerate(children):
            self.add_module(f"m{i}", child)


def swap_way(module: nn.Module) -> Way:
    """Return the swap with a new tree at each call: reading it, checking it, putting the leaves in."""
    apply, params, _ = tdf.functional(Still(module))
    x = torch.zeros(1)
    return Fresh(lambda: params.apply(same), lambda tree: apply(tree, x))


def same(leaf: Tensor) -> Tensor:
    return leaf


def flat_tree(n: int) -> Any:
    return tdf.TensorDict({f"k{i}": torch.randn(4, 2) for i in range(n)}, [4])


def wide_tree(nodes: int, each: int) -> Any:
    return tdf.TensorDict({f"n{j}": {f"k{i}": torch.randn(4, 2) for i in range(each)} for j in range(nodes)}, [4])


def deep_tree(nodes: int, each: int) -> Any:
    data: dict[str, Any] = {}
    for _ in range(nodes):
        data = {**{f"k{i}": torch.randn(4, 2) for i in range(each)}, **({"n": data} if data else {})}
    return tdf.TensorDict(data, [4])


def deep_module(nodes: int, each: int) -> nn.Module:
    module = Weights([], each)
    for _ in range(nodes - 1):
        module = Weights([module], each)
    return module


def growth(leaves: tuple[int, ...], effort: Effort, say: Callable[[str], None]) -> list[Growth]:
    found: dict[str, dict[int, float]] = {what: {} for what in OPERATIONS}
    for n in leaves:
        ways = tree_ways(flat_tree(n)) | {"swap": swap_way(Weights([], n))}
        for what, way in ways.items():
            found[what][n] = measure({what: way}, effort)[what].cpu_us
        say(f"{n} leaves measured")
    return [Growth(what, cost, fit_line(list(cost), list(cost.values()))) for what, cost in found.items()]


def depth(effort: Effort) -> list[Depth]:
    nodes, each = 32, 32
    flat, wide, deep = flat_tree(nodes * each), wide_tree(nodes, each), deep_tree(nodes, each)
    ways = [tree_ways(tree) for tree in (flat, wide, deep)]
    modules = [
        Weights([], nodes * each),
        Weights([Weights([], each) for _ in range(nodes)], 0),
        deep_module(nodes, each),
    ]
    for way, module in zip(ways, modules, strict=True):
        way["swap"] = swap_way(module)
    rows: list[Depth] = []
    for what in OPERATIONS:
        found = measure({str(i): way[what] for i, way in enumerate(ways)}, effort)
        rows.append(Depth(what, *[found[str(i)].cpu_us for i in range(3)]))
    return rows
