"""Modules as pure functions: the swap alone, whole calls, and stacking several modules into one tree."""

import copy
from collections.abc import Callable
from typing import Any

import tensordict
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import tdfunc as tdf
from benchmarks.measure import Fresh
from benchmarks.models.small import ResNet, Still, leaves_of
from benchmarks.rows import Case, Row, Suite
from tdfunc.ensemble.stack import stack_modules

BARE = "bare loop"
MAKE, INIT, MEMBERS = "make()", "init_ensemble, a member of 64", 64
CALL, OTHER, PLAIN = "functional_call", "tensordict", "module(x)"
STATE, MODULES = "stack_module_state", "TensorDict.from_modules"


def swap_cases(what: str, inner: nn.Module) -> list[Case]:
    module, x = Still(inner).eval(), torch.zeros(1)
    apply, params, buffers = tdf.functional(module)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    theirs = tensordict.TensorDict.from_module(module).data

    def swapped(tree: Any) -> None:
        with tree.to_module(module):
            module(x)

    bare = bare_swap(module, x)
    # The state of a call is the same each time; a new tree is one that `apply` has not seen.
    rivals = {CALL: lambda: functional_call(module, weights, (x,)), OTHER: lambda: swapped(theirs)}
    again = {"tdfunc": lambda: apply(params, x, buffers=buffers), **rivals, BARE: lambda: bare(check=False)}
    fresh = {
        "tdfunc": Fresh(
            lambda: (params.apply(same), buffers.apply(same)), lambda trees: apply(trees[0], x, buffers=trees[1])
        ),
        **rivals,
        BARE: lambda: bare(check=True),
    }
    n = leaves_of(module)
    return [Case(f"{what}, the same tree", again, n), Case(f"{what}, a new tree", fresh, n)]


def bare_swap(module: nn.Module, x: Tensor) -> Callable[..., None]:
    """Return a loop that puts leaves into their slots, calls, and puts the originals back."""
    tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
    slots: list[tuple[Any, str, Any]] = [
        (table, name, leaf) for table in tables for name, leaf in table.items() if leaf is not None
    ]
    leaves = [leaf.detach().clone() for _, _, leaf in slots]
    shapes = [leaf.shape for leaf in leaves]

    def call(*, check: bool) -> None:
        if check and [leaf.shape for leaf in leaves] != shapes:
            raise ValueError
        try:
            for (table, name, _), leaf in zip(slots, leaves, strict=True):
                table[name] = leaf
            module(x)
        finally:
            for table, name, old in slots:
                table[name] = old

    return call


def same(leaf: Any) -> Any:
    return leaf


def whole_cases() -> list[Case]:
    x = torch.randn(2, 3, 16, 16)
    # The trees carry no gradients, so neither does the module: autograd would be recorded on one side only.
    module = ResNet().eval().requires_grad_(False)
    apply, params, buffers = tdf.functional(module)
    training = copy.deepcopy(module).train()
    train, train_params, train_buffers = tdf.functional(training)
    return [
        Case("whole call, eval", {"tdfunc": lambda: apply(params, x, buffers=buffers), PLAIN: lambda: module(x)}),
        Case(
            "whole call, train with buffers",
            {"tdfunc": lambda: train.with_buffers(train_params, train_buffers, x), PLAIN: lambda: training(x)},
        ),
    ]


def stack_cases() -> list[Case]:
    members = [ResNet() for _ in range(4)]
    # What stack_module_state returns has no history either.
    trees = [tdf.from_module(member).detach() for member in members]
    columns = list(zip(*[tree.leaves() for tree in trees], strict=True))
    rivals = {
        BARE: lambda: [torch.stack(leaves) for leaves in columns],
        STATE: lambda: stack_module_state(members),
        MODULES: lambda: tensordict.TensorDict.from_modules(*members, as_module=False),
    }
    return [
        Case("torch.stack of 4 extracted trees", {"tdfunc": lambda: torch.stack(trees), **rivals}),
        Case("stack_modules of 4", {"tdfunc": lambda: stack_modules(members), **rivals}),
    ]


def make_mlp() -> nn.Module:
    """Five layers, four of them 64 wide."""
    wide = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), *wide, nn.Linear(64, 4))


def init_cases() -> list[Case]:
    ways = {"tdfunc": lambda: tdf.init_ensemble(make_mlp, MEMBERS), MAKE: lambda: [make_mlp() for _ in range(MEMBERS)]}
    return [Case(INIT, dict(ways), MEMBERS)]


def module_cases() -> list[Case]:
    many = nn.ModuleList(nn.Linear(4, 4) for _ in range(61))
    swaps = [*swap_cases("swap, 62 parameters and 60 buffers", ResNet()), *swap_cases("swap, 122 parameters", many)]
    return [*swaps, *whole_cases(), *stack_cases(), *init_cases()]


SAME = ("swap, 62 parameters and 60 buffers, the same tree", "swap, 122 parameters, the same tree")
NEW = ("swap, 62 parameters and 60 buffers, a new tree", "swap, 122 parameters, a new tree")
SERVES = (
    "a mode intercepts each torch call in `make()`, which takes a third more time; random keys and the "
    "comparison of the modules take the rest"
)
SWAPS = (
    "the swap takes 43 us (see *swap*, the same tree) of 4,300; the lower quartiles of wall time differ by 4 %, and a "
    "run on a faster processor gave 1.06x"
)
LOOKS = "after each call, `apply` checks for changes by `forward` (slots, hooks, modes, attributes)"
READS = "reading the nodes of a new tree takes a sixth of the time, and comparing the shapes takes a third"
COMPARES = "`stack` compares keys, kinds and dtypes of all trees, node by node"
ALIKE = "half of the time compares the classes, hyperparameters, modes and slots of all submodules"
SUITE = Suite(
    "modules",
    "Modules as functions",
    "The model has the structure of ResNet-18, 4 channels wide: 62 parameters and 60 buffers. In the rows "
    "*swap*, `forward` returns its input, so the time is the time to insert the leaves and to remove them, "
    "per leaf. The bare loop does the same work for one fixed module without checks.",
    module_cases,
    (
        Row("apply, swap alone, the same tree again", CALL, 25, "faster", SAME, why=LOOKS, bound=BARE),
        Row("apply, swap alone, the same tree again", OTHER, 40, "faster", SAME, why=LOOKS, bound=BARE),
        Row("apply, swap alone, a new tree each call", CALL, 15, "faster", NEW, why=f"{READS}; {LOOKS}", bound=BARE),
        Row("apply, swap alone, a new tree each call", OTHER, 20, "faster", NEW, why=f"{READS}; {LOOKS}", bound=BARE),
        Row("apply, whole call, eval", PLAIN, 1.1, "at most", ("whole call, eval",), why=SWAPS),
        Row("apply, whole call, train mode with buffers", PLAIN, 1.15, "at most", ("whole call, train with buffers",)),
        Row(
            "torch.stack of 4 extracted trees",
            STATE,
            2.5,
            "faster",
            ("torch.stack of 4 extracted trees",),
            why=COMPARES,
            bound=BARE,
        ),
        Row(
            "torch.stack of 4 extracted trees",
            MODULES,
            7,
            "faster",
            ("torch.stack of 4 extracted trees",),
            why=COMPARES,
            bound=BARE,
        ),
        Row("stack_modules of 4 modules", STATE, 1.3, "faster", ("stack_modules of 4",), why=ALIKE, bound=BARE),
        Row("stack_modules of 4 modules", MODULES, 4, "faster", ("stack_modules of 4",), why=ALIKE, bound=BARE),
        Row("init_ensemble, a member", MAKE, 2, "at most", (INIT,), why=SERVES),
    ),
    (swap_cases, bare_swap, whole_cases, stack_cases, init_cases),
)
