"""Every rule with torch's class for it and hyperparameters that both take, and runs of both."""

import pytest
import torch
from torch import nn

from tdfunc import TensorDict
from tdfunc.optim import (
    accumulate,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    apply_if_finite,
    asgd,
    chain,
    clip_by_member_norm,
    ema,
    lion,
    lookahead,
    masked,
    masters,
    multi,
    muon,
    nadam,
    radam,
    rmsprop,
    rprop,
    schedule_free,
    schedules,
    sgd,
)
from tests.helpers import quick

MEMBERS, STEPS = 3, 12
WARM = schedules.linear(0.01, 0.1, 5)
WRAPPERS = {
    "accumulate": lambda: accumulate(adam(0.1), 3),
    "accumulate scheduled": lambda: accumulate(adam(0.1), lambda steps: steps + 1),
    "apply_if_finite": lambda: apply_if_finite(adam(0.1), 2),
    "ema": lambda: ema(sgd(0.1, 0.9), 0.9),
    "ema biased": lambda: ema(sgd(0.1, 0.9), 0.9, debias=False),
    "ema scheduled": lambda: ema(sgd(0.1, 0.9), lambda count: count / (count + 2)),
    "lookahead": lambda: lookahead(adam(0.1), 2),
    "masters": lambda: masters(adam(0.1)),
    "schedule_free": lambda: schedule_free(adamw(WARM, (0.0, 0.99))),
    "nest": lambda: chain(clip_by_member_norm(1.0), ema(masters(apply_if_finite(accumulate(adam(0.1), 2), 1)), 0.9)),
    "parts": lambda: multi({"out": ema(sgd(0.1), 0.5), "*": masked(lookahead(adam(0.1), 2), "block.weight")}),
}


class Lion(torch.optim.Optimizer):
    """Program 1 of "Symbolic Discovery of Optimization Algorithms", which torch lacks."""

    def __init__(self, params, foreach=False, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        """Do a step."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for x in group["params"]:
                m = self.state[x].setdefault("m", torch.zeros_like(x))
                update = torch.sign(beta1 * m + (1 - beta1) * x.grad) + group["weight_decay"] * x
                m.copy_(beta2 * m + (1 - beta2) * x.grad)
                x.sub_(lr * update)


TORCH = torch.optim
RULES = {
    "sgd": (sgd, TORCH.SGD, {"lr": 0.1}),
    "sgd decay": (sgd, TORCH.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (sgd, TORCH.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (sgd, TORCH.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": (sgd, TORCH.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "adam": (adam, TORCH.Adam, {"lr": 0.01}),
    "adam decay": (adam, TORCH.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-4}),
    "amsgrad": (adam, TORCH.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    "adamw": (adamw, TORCH.AdamW, {"lr": 0.01}),
    "adamw amsgrad": (adamw, TORCH.AdamW, {"lr": 0.01, "weight_decay": 0.2, "amsgrad": True, "maximize": True}),
    "adadelta": (adadelta, TORCH.Adadelta, {"lr": 0.5}),
    "adadelta decay": (adadelta, TORCH.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1, "maximize": True}),
    "adagrad": (adagrad, TORCH.Adagrad, {"lr": 0.1}),
    "adagrad decay": (
        adagrad, TORCH.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True},
    ),
    "adamax": (adamax, TORCH.Adamax, {"lr": 0.1}),
    "adamax decay": (adamax, TORCH.Adamax, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
    "asgd": (asgd, TORCH.ASGD, {"lr": 0.1}),
    "asgd averaged": (asgd, TORCH.ASGD, {"lr": 0.1, "lambd": 0.1, "t0": 2.0, "weight_decay": 0.1, "maximize": True}),
    "nadam": (nadam, TORCH.NAdam, {"lr": 0.1}),
    "nadam decay": (nadam, TORCH.NAdam, {"lr": 0.1, "weight_decay": 0.1, "momentum_decay": 0.1, "maximize": True}),
    "nadamw": (nadam, TORCH.NAdam, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (radam, TORCH.RAdam, {"lr": 0.1}),
    "radam decay": (radam, TORCH.RAdam, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "radamw": (
        radam, TORCH.RAdam, {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.1, "decoupled_weight_decay": True}
    ),
    "rmsprop": (rmsprop, TORCH.RMSprop, {"lr": 0.1}),
    "rmsprop centered": (
        rmsprop, TORCH.RMSprop,
        {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True},
    ),
    "rprop": (rprop, TORCH.Rprop, {"lr": 0.1}),
    "rprop sizes": (rprop, TORCH.Rprop, {"lr": 0.1, "etas": (0.3, 1.5), "step_sizes": (0.05, 0.2), "maximize": True}),
    "adafactor": (adafactor, TORCH.Adafactor, {"lr": 0.1}),
    "adafactor decay": (
        adafactor, TORCH.Adafactor,
        {"lr": 0.3, "beta2_decay": -0.5, "eps": (0.5, 0.1), "d": 1.5, "weight_decay": 0.1, "maximize": True},
    ),
    "muon": (muon, TORCH.Muon, {"lr": 0.1}),
    "muon rms": (muon, TORCH.Muon, {"lr": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "lion": (lion, Lion, {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}),
}  # fmt: skip
FUSED = (TORCH.SGD, TORCH.Adam, TORCH.AdamW, TORCH.Adagrad)
PATHS = [("block", "bias"), ("block", "weight"), ("out",), ("one",)]
# A row of each rule with many options; the others take their time.
FAST = [*{make: name for name, (make, *_) in RULES.items()}.values(), "momentum", "nesterov", "adam", "adafactor"]
# Of parameters that are meant to be rounded at each step.
rounds_steps = pytest.mark.filterwarnings("ignore:.*rounding parameters to 16 bits")
each_rule = pytest.mark.parametrize("name", quick(RULES, *FAST))
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)
each_optimizer = pytest.mark.parametrize("name", quick([*RULES, *WRAPPERS], *FAST, *WRAPPERS))


def make_optimizer(name, **more):
    """Return the rule of a row, with more options, or a wrapper."""
    return WRAPPERS[name]() if name in WRAPPERS else RULES[name][0](**RULES[name][2] | more)


def random_tree(generator, dtype=torch.float32, batch=(MEMBERS,), *, name=""):
    """Return a tree of an awkward number of elements, keys not in sorted order; for Muon of matrices only."""
    make = lambda *shape: torch.randn((*batch, *shape), generator=generator, dtype=dtype)  # noqa: E731
    row, column = ((2,), (1,)) if name.startswith("muon") else ((), ())
    block = {"weight": make(5, 3), "bias": make(5, *column)}
    return TensorDict({"out": make(7, *row), "block": block, "one": make(*row, *column)}, batch)


def train(update, state, params, grads):
    """Return params and state after one step for each gradient."""
    for grad in grads:
        params, state = update(params, grad, state)
    return params, state


def train_torch(cls, options, params, grads, fused):
    """Train plain Parameters with torch.optim and return them and their states by path."""
    leaves = [nn.Parameter(params[path].clone()) for path in PATHS]
    kernels = {"fused": fused} if cls in FUSED else {}
    optimizer = cls(leaves, **({} if cls is TORCH.Muon else {"foreach": False}), **kernels, **options)
    for grad in grads:
        for leaf, path in zip(leaves, PATHS, strict=True):
            leaf.grad = grad[path].clone()
        optimizer.step()
    by_path = dict(zip(PATHS, leaves, strict=True))
    return {path: x.detach() for path, x in by_path.items()}, {path: optimizer.state[x] for path, x in by_path.items()}


def assert_leaves(tree, expected, **tolerance):
    """Check the leaves, to the last bit unless a tolerance is given."""
    found, wanted = [{path: each[path] for path in PATHS} for each in (tree, expected)]
    torch.testing.assert_close(found, wanted, **(tolerance or {"rtol": 0, "atol": 0}))
