"""One step of each rule of `tdfunc.optim`, alone: members with learning rates of their own, against a loop."""

from typing import Any

import torch
from torch import nn

import tdfunc as tdf
from benchmarks.models.small import mlp
from benchmarks.rows import Case, Row, Suite, Way
from tdfunc import optim
from tdfunc.ensemble.stack import stack_modules

LOOP = "loop of torch.optim"
# Rules of which torch has a fused kernel on the CPU.
FUSED = ("adam", "adamw", "sgd", "adagrad")
MEMBERS = 16
# Those whose arithmetic is a few operations for each element; Muon multiplies matrices.
RULES: dict[str, tuple[Any, Any]] = {
    "adadelta": (optim.adadelta, torch.optim.Adadelta),
    "adagrad": (optim.adagrad, torch.optim.Adagrad),
    "adam": (optim.adam, torch.optim.Adam),
    "adamax": (optim.adamax, torch.optim.Adamax),
    "adamw": (optim.adamw, torch.optim.AdamW),
    "asgd": (optim.asgd, torch.optim.ASGD),
    "nadam": (optim.nadam, torch.optim.NAdam),
    "radam": (optim.radam, torch.optim.RAdam),
    "rmsprop": (optim.rmsprop, torch.optim.RMSprop),
    "rprop": (optim.rprop, torch.optim.Rprop),
    "sgd": (optim.sgd, torch.optim.SGD),
    "adafactor": (optim.adafactor, torch.optim.Adafactor),
}


def rule_ways(name: str) -> dict[str, Way]:
    models = [mlp(16, 64, 64, 1) for _ in range(MEMBERS)]
    rates = torch.logspace(-4, -2, MEMBERS).tolist()
    return {"tdfunc": ours(name, models, rates), LOOP: loop(name, models, rates)}


def ours(name: str, models: list[nn.Module], rates: list[float]) -> Way:
    params, _ = tdf.split(stack_modules(models))
    opt = RULES[name][0](lr=torch.tensor(rates))
    grads = params * 0.1
    now = [params, opt.init(params)]

    def call() -> None:
        now[:] = opt.update(now[0], grads, now[1])

    return call


def loop(name: str, models: list[nn.Module], rates: list[float]) -> Way:
    members = [[nn.Parameter(leaf.detach().clone()) for leaf in model.parameters()] for model in models]
    for leaf in [leaf for member in members for leaf in member]:
        leaf.grad = leaf.detach() * 0.1
    options = {"fused": True} if name in FUSED else {}
    optimizers = [RULES[name][1](member, lr=rate, **options) for member, rate in zip(members, rates, strict=True)]

    def call() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return call


def optimizer_cases() -> list[Case]:
    return [Case(name, rule_ways(name)) for name in RULES]


SUITE = Suite(
    "optimizers",
    "Optimizer steps",
    "A row is one optimizer step without its gradient, for 16 members of 16-64-64-1. Each member has its own "
    "learning rate. tdfunc updates the stack out of place. The loop updates in place with one optimizer per "
    "member, fused where torch has a fused kernel.",
    optimizer_cases,
    # A step of plain SGD is one operation, for which the loop calls little else.
    (
        Row(
            "a step of any rule with a state, 16 members",
            LOOP,
            3,
            "faster",
            tuple(name for name in RULES if name != "sgd"),
        ),
    ),
    (rule_ways, ours, loop),
)
