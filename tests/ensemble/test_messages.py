"""Errors of ensembles: each call, its class, and the parts of its message."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc as tdf
from tests.ensemble.models import Returns, ensemble_of, make_mlp
from tests.helpers import TiedLM

LAYER, X = nn.Linear(4, 2), torch.ones(5, 3, 4)
APPLY, PARAMS, _ = tdf.functional(LAYER)
TREE = tdf.stack_modules([nn.Linear(4, 2) for _ in range(3)])


def make_each(*makers):
    """A function that builds another module at each call."""
    left = iter(makers)
    return lambda: next(left)()


def untied():
    """A TiedLM whose head has weights of its own."""
    model = TiedLM()
    model.out.weight = nn.Parameter(torch.randn(7, 4))
    return model


def drawn(dtype):
    """A module of one parameter."""
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(3, dtype=dtype))
    return model


def drawn_outside(draw):
    """A layer that is initialised by Python or numpy."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.bias.fill_(draw())
    return layer


def hooked():
    """A module with a hook of the backward pass."""
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_full_backward_pre_hook(lambda module, grads: None)
    return model


class Takes(nn.Module):
    """A module whose forward has an argument of any name."""

    def __init__(self, name):
        super().__init__()
        self.forward = {"rng": lambda x, rng=1.0: x * rng, "in_dims": lambda x, in_dims=1.0: x * in_dims}[name]


def draw_inside():
    """A layer that is initialised by an operation which takes no key."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.bias.copy_(torch.poisson(torch.ones(2)))
    return layer


def run(modules, how, **options):
    """Call an ensemble of modules in training mode."""
    ensemble, tree = ensemble_of([module.train() for module in modules], how)
    return ensemble(tree, torch.ones(5, 3), **options)


def evaluate(fn):
    """Call an ensemble of modules in evaluation mode."""
    ensemble, tree = ensemble_of([Returns(fn).eval() for _ in range(2)])
    return ensemble(tree, torch.ones(5, 3))


def share_statistics():
    """Train members with running statistics that they share."""
    norms = tdf.stack_modules([nn.BatchNorm1d(4)] * 3)
    tree = tdf.combine(tdf.partition(norms[0], "running_*")[0], tdf.partition(norms, "running_*")[1])
    return tdf.Ensemble(tdf.functional(nn.BatchNorm1d(4))[0], shared="running_*").with_buffers(tree, None, X)


MESSAGES = [
    # Stacking.
    (lambda: tdf.stack_modules([]), ValueError, "`modules` is empty", "at least one", "[]"),
    (lambda: tdf.stack_modules(LAYER), TypeError, "modules is not a list", "Linear", "init_ensemble"),
    (lambda: tdf.stack_modules([nn.Sequential(nn.LazyLinear(2)) for _ in range(2)]), tdf.UnsupportedError,
     "stack_modules: '0.weight' of LazyLinear", "example input"),
    (lambda: tdf.unstack(tdf.from_module(LAYER)), IndexError, "batch dimension 0 does not exist"),
    (lambda: tdf.init_ensemble(nn.ReLU, 0), ValueError, "members must be at least 1", "0"),
    (lambda: tdf.init_ensemble(lambda: LAYER, 3), ValueError, "members 0 and 1 are equal", "differ",
     "make() must build"),
    (lambda: tdf.init_ensemble(make_each(make_mlp, nn.ReLU), 2), tdf.TreeStructureError, "init_ensemble: member 1",
     "'class'"),
    (lambda: tdf.init_ensemble(make_each(lambda: drawn(torch.float32), lambda: drawn(torch.float64)), 2),
     tdf.LeafMismatchError, "'w' of member 1", "float32", "float64"),
    (lambda: tdf.init_ensemble(make_each(lambda: drawn(torch.float32), lambda: drawn(torch.float32).to("meta")), 2),
     tdf.LeafMismatchError, "'w' of member 1", "cpu", "meta"),
    (lambda: tdf.init_ensemble(make_each(TiedLM, untied), 2), tdf.TieError,
     "member 1", "emb.weight", "out.weight", "none"),
    (lambda: tdf.init_ensemble(draw_inside, 2), tdf.UnsupportedError, "past the key", "torch.nn.init", "takes no key",
     "stack_modules"),
    (lambda: tdf.init_ensemble(lambda: drawn_outside(np.random.rand), 2), tdf.UnsupportedError, "past the key",
     "numpy's"),
    (lambda: tdf.init_ensemble(lambda: drawn_outside(random.random), 2), tdf.UnsupportedError, "past the key",
     "Python's"),
    # Making an ensemble.
    (lambda: tdf.MCDropout(APPLY, 4), tdf.UnsupportedError, "no dropout layer", "Linear"),
    (lambda: tdf.MCDropout(tdf.functional(nn.Dropout())[0], 0), ValueError, "members must be at least 1", "0"),
    (lambda: tdf.Ensemble(APPLY, "vmapp"), ValueError, "'loop', 'vmap'", "'vmapp'"),
    (lambda: tdf.Ensemble(LAYER), TypeError, "Apply", "Linear", "functional(model)"),
    (lambda: tdf.Ensemble(tdf.functional(Takes("in_dims"))[0]), tdf.UnsupportedError, "called 'in_dims'",
     "wrap the module"),
    (lambda: tdf.Ensemble(tdf.functional(Takes("rng"), call_only=True)[0]), tdf.UnsupportedError, "called 'rng'",
     "'buffers'"),
    # Calling it.
    (lambda: tdf.Ensemble(APPLY)(PARAMS, X), tdf.BatchSizeError, "batch size [E]", "batch size []", "stack_modules"),
    (lambda: tdf.Ensemble(APPLY, chunk_size=0), ValueError, "chunk_size must be at least 1", "0"),
    (lambda: tdf.Ensemble(APPLY)(TREE[:0], X), tdf.BatchSizeError, "E > 0", "batch size [0]"),
    (lambda: tdf.Ensemble(APPLY)(TREE, X, in_dims=(0, 0)), ValueError, "1 entries", "(0, 0)"),
    (lambda: tdf.Ensemble(APPLY)(TREE, X, in_dims={"x": 0}), ValueError, "a tuple of them", "'x'"),
    (lambda: tdf.Ensemble(APPLY)(TREE, X, in_dims=0), ValueError, "dimension 0", "3 members there", "(5, 3, 4)"),
    (lambda: tdf.Ensemble(APPLY)(TREE, X, in_dims=7), ValueError, "dimension 7", "3 members there", "(5, 3, 4)"),
    (lambda: tdf.Ensemble(APPLY)({"weight": X}, X), tdf.BatchSizeError, "dict", 'unflatten_keys(".")'),
    (lambda: tdf.Ensemble(APPLY, shared="*")(TREE, X), tdf.BatchSizeError, "leaves no leaf to the members",
     "2 shared leaves"),
    (lambda: tdf.Ensemble(APPLY, shared="trunk.*")(TREE, X), tdf.FilterError, "'trunk.*' matches no leaf"),
    (lambda: tdf.Ensemble(APPLY, shared="bias")(TREE, X), tdf.LeafMismatchError, "'bias'", "(2,)", "(3, 2)"),
    (lambda: share_statistics(), tdf.UnsupportedError, "share buffers", "Filter('running_*')", "Kind.PARAMETER"),
    (lambda: run([Returns(lambda y: y * y.sum().item()) for _ in range(3)], "vmap"), RuntimeError, "item"),
    (lambda: run([Returns(torch.ones(2).add)] * 3, "traced"), tdf.CaptureError, "a tensor"),
    (lambda: tdf.Ensemble(APPLY, "traced")(TREE.apply(lambda x: x.clone().requires_grad_()), X), tdf.UnsupportedError,
     "requires grad"),
    (lambda: run([make_mlp(0.5)], "auto"), tdf.UnsupportedError, "no rng was given", "rng=key", "rng=None",
     "apply.eval"),
    (lambda: evaluate(lambda y: y + torch.randn(2)), tdf.UnsupportedError, "no rng was given",
     "pass rng: forward draws in evaluation mode too."),
    (lambda: run([hooked() for _ in range(2)], "vmap"), tdf.UnsupportedError, "hooks of ['0'] do not run", "vmap",
     'how="loop"'),
    (lambda: run([hooked() for _ in range(2)], "traced"), tdf.UnsupportedError, "hooks of ['0'] do not run", "vmap",
     'how="loop"'),
    (lambda: run([Returns(lambda y: torch.poisson(y.exp())) for _ in range(2)], "vmap", rng=0), tdf.UnsupportedError,
     "past its member's key", "default generator", 'how="loop"'),
    (lambda: run([Returns(lambda y: y * random.random())] * 2, "vmap"), tdf.UnsupportedError, "once for all members",
     "Python's generator", 'how="loop"'),
    (lambda: run([Returns(lambda y: y * random.random())] * 2, "auto", rng=0), tdf.UnsupportedError, "past rng="),
    (lambda: run([Returns(lambda y: y * random.random())] * 2, "traced"), tdf.UnsupportedError, "draws while",
     "Python's"),
    (lambda: run([Returns(lambda y: torch.poisson(y.exp()))], "traced", rng=0), tdf.UnsupportedError,
     "past rng=", "aten.poisson", 'how="loop"'),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(MESSAGES)))
def test_errors_say_what_must_hold(i):
    """Each mistake raises its class, with the parts of the message in order."""
    call, error, *parts = MESSAGES[i]

    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()
