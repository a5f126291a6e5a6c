"""A replayed step equals the step after every change of values: each hyperparameter of the state and each argument."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.optim import AbstractOptimizer, Optimizer
from tests.helpers import quick
from tests.optim.table import FAST, RULES, WRAPPERS, make_optimizer

pytestmark = pytest.mark.sample(9)

MEMBERS = 4
# From 0 and to 0, another sign, nan, a whole number, a fraction: in the state, and so for the first replay.
ORDERS = {"from 0": [0.0, 0.3, float("nan"), 1.0, -0.2], "to 0": [0.3, 0.0, 1.0, -0.2, float("nan"), 0.3]}
# The rows whose matrices of members are one computation need a batch size for numbers of members.
BATCHED = ("adafactor", "muon")
EVERY = quick([*RULES, *WRAPPERS], *FAST, *WRAPPERS)


def hold_tensors(opt, make):
    """Return an optimizer, of others too, whose hyperparameters are tensors: `make(name, value)`."""
    if isinstance(opt, Optimizer):
        numbers = {name: x for name, x in opt.hyper.items() if not callable(x)}
        return replace(opt, hyper={**opt.hyper, **{name: make(name, x) for name, x in numbers.items()}})
    changed = {}
    for field in fields(opt):
        value = getattr(opt, field.name)
        if isinstance(value, AbstractOptimizer):
            changed[field.name] = hold_tensors(value, make)
        elif isinstance(value, Mapping):
            changed[field.name] = {key: hold_tensors(item, make) for key, item in value.items()}
    return replace(opt, **changed)


def hyper_names(opt):
    """Return the names of all hyperparameters of an optimizer and of those inside it."""
    if isinstance(opt, Optimizer):
        return set(opt.hyper)
    parts = [getattr(opt, field.name) for field in fields(opt)]
    parts += [item for part in parts if isinstance(part, Mapping) for item in part.values()]
    return set().union(*[hyper_names(part) for part in parts if is_dataclass(part) and hasattr(part, "init")])


def alone(name, value):
    """Return one number."""
    return torch.tensor(value, dtype=torch.float64)


def rate_by_member(name, value):
    """Return a learning rate for each member, and one number for all others."""
    return all_by_member(name, value) if name == "lr" else alone(name, value)


def all_by_member(name, value):
    """Return a number for each member."""
    return alone(name, value) * torch.linspace(0.5, 1.0, MEMBERS, dtype=torch.float64)


# (batch size, elements of a member's leaf, hyperparameters): where small members share a kernel, and large have each
# their own.
LAYOUTS = {
    "one tree": ((), 7, alone),
    "rates": ((), 7, rate_by_member),
    "rates of large members": ((), 1600, rate_by_member),
    "rates of a batch": ((MEMBERS,), 7, rate_by_member),
    "all by member": ((MEMBERS,), 7, all_by_member),
}


def random_leaves(name, batch, size, generator):
    """Return a tree of two leaves of members; for Muon of matrices."""
    shape = (MEMBERS, size, 2) if name.startswith("muon") and batch else (MEMBERS, size)
    out, weight = torch.randn((2, *shape), generator=generator)
    return TensorDict({"out": out, "block": {"weight": weight}}, batch)


def changed_states(state, path, order):
    """Yield states in which a hyperparameter has one value after the other: all of it, then one member of it."""
    # Corrections of bias divide by 1 - beta.
    allowed = [value for value in order if value != 1.0] if path[-1].startswith("beta") else order
    for value in allowed:
        yield state.set(path, torch.full_like(state[path], value))
        if state[path].dim() and any(state[path].stride()):
            row = state[path].clone()
            row[1] = value
            yield state.set(path, row)


def same(left, right):
    """Return whether two trees are equal to the last bit, and nan in the same places."""
    pairs = zip(left.leaves(), right.leaves(), strict=True)
    return all([torch.equal(x.nan_to_num(0.12345), y.nan_to_num(0.12345)) for x, y in pairs])


def find_stale(opt, params, grads, path, order):
    """Return the values of a hyperparameter for which a replayed step differs from the step."""
    state = opt.init(params)
    jitted = tdf.jit(opt.update)
    stale = []
    for i, now in enumerate(changed_states(state, path, order)):
        if not all(map(same, jitted(params, grads, now), opt.update(params, grads, now))):
            stale.append((path, i, now[path].tolist()))
    assert jitted.cache_info().misses == 1, "the values must be replayed, not recorded"
    return stale


def hyper_paths(opt, state):
    """Return the paths of the hyperparameters in a state, and of its step counts."""
    names = hyper_names(opt)
    return [path for path in state.paths() if path[-1] in names and isinstance(state[path], Tensor)]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", quick(LAYOUTS, "rates"))
def test_a_replay_follows_each_hyperparameter(name, order, layout, generator):
    """No value of a hyperparameter at the first replay, or later, decides how other values are computed."""
    batch, size, make = LAYOUTS[layout]
    if name.startswith(BATCHED) and not batch:
        batch = (MEMBERS,)
    opt = hold_tensors(make_optimizer(name), make)
    params, grads = [random_leaves(name, batch, size, generator) for _ in range(2)]
    paths = hyper_paths(opt, opt.init(params))

    stale = [found for path in paths for found in find_stale(opt, params, grads, path, ORDERS[order])]

    assert paths
    assert stale == []


# Of the leaves that a step reads, and of the mask of members.
CHANGES = {
    "as before": lambda tree: tree,
    "zeros": lambda tree: tree * 0,
    "another sign": lambda tree: -tree,
    "nan in one member": lambda tree: tree.at[1].set(float("nan")),
    "infinity in one member": lambda tree: tree.at[2].set(float("inf")),
    "a member of zeros": lambda tree: tree.at[0].mul(0.0),
}
MASKS = [[True] * 4, [False] * 4, [True, False, False, False], [False, True, True, True]]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("argument", ["params", "grads", "active"])
def test_a_replay_follows_each_argument(name, argument, generator):
    """No value of an argument at the first replay decides how other values are computed."""
    opt = hold_tensors(make_optimizer(name), rate_by_member)
    given = {key: random_leaves(name, (MEMBERS,), 7, generator) for key in ("params", "grads")}
    given |= {"state": opt.init(given["params"]), "active": torch.tensor(MASKS[0])}
    jitted = tdf.jit(opt.update)
    values = map(torch.tensor, MASKS) if argument == "active" else [make(given[argument]) for make in CHANGES.values()]

    calls = [{**given, argument: value} for value in values]
    equal = [all(map(same, jitted(**call), opt.update(**call))) for call in calls]

    assert equal == [True] * len(calls)


@pytest.mark.parametrize("rates", [[0.1], [0.1, 0.2, 0.3, 0.4]], ids=["one", "by member"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [7, 1600])
def test_momentum_may_become_0(rates, nesterov, size, generator):
    """Momentum that is switched off and on in the state is the formula of SGD with momentum, in float64."""
    lr = torch.tensor(rates, dtype=torch.float64)
    opt = tdf.optim.sgd(lr if len(rates) > 1 else lr[0], momentum=torch.tensor(0.9), nesterov=nesterov)
    grad, w = torch.randn(2, MEMBERS, size, generator=generator)
    params, buffer, expected = TensorDict({"w": w}), 0.0, w.double()
    state = opt.init(params)
    for momentum in (0.9, 0.0, 0.0, 0.5):
        params, state = opt.update(params, TensorDict({"w": grad}), state.set("momentum", torch.tensor(momentum)))
        buffer = momentum * buffer + grad.double()
        step = grad.double() + momentum * buffer if nesterov else buffer
        expected = expected - lr[:, None] * step

    torch.testing.assert_close(params["w"].double(), expected, rtol=1e-5, atol=1e-5)
