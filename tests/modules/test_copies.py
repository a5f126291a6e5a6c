"""The private copies of a module do not depend on the call that needs one: traces, transforms, modes, inference."""

import traceback
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import tdfunc as tdf
from tests.helpers import quick


class Constant(nn.Module):
    """A layer with a tensor that is an attribute and no buffer; it keeps its copy by returning a method of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.start = torch.arange(3.0)

    def forward(self, x):
        return self.linear(x) * self.start, self.extra_repr


class Watched(TorchFunctionMode):
    """Passes every call on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def run(apply, params, x):
    """Return the output alone."""
    return apply(params, x)[0].sum()


# How another copy comes to be needed: within a function of the parameters and the input.
PLACES = {
    "plain": lambda f: f,
    "jit": lambda f: tdf.jit(f, captures="constants"),
    "jit of grad": lambda f: tdf.jit(torch.func.grad(f), captures="constants"),
    "jit of vmap": lambda f: tdf.jit(torch.vmap(f, (None, 0)), captures="constants"),
    "grad": torch.func.grad,
    "vmap": lambda f: torch.vmap(f, (None, 0)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f), (None, 0)),
    "make_fx": lambda f: lambda p, x: make_fx(f)(p, x)(p, x),
}
MODES = {
    "no mode": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "a default device": lambda: torch.device("meta"),
    "a function mode": Watched,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def outcome(fn, *args):
    """Return the numbers of a result, or the class of an error."""
    try:
        return [leaf.float().tolist() for leaf in torch.utils._pytree.tree_leaves(fn(*args))]
    except Exception as err:
        return type(err).__name__


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", quick(PLACES, "plain", "jit", "jit of grad", "vmap of grad"))
def test_a_first_call_does_as_a_later_one(place, mode, generator):
    """A call anywhere has the same result whether or not the module was called before."""
    torch.manual_seed(0)
    module = Constant()
    x = torch.randn(2, 3, generator=generator)
    found = []
    for warm in (True, False):
        apply, params, _ = tdf.functional(module)
        if warm:
            run(apply, params, x)
        fn = PLACES[place](lambda p, x, apply=apply: run(apply, p, x))
        with MODES[mode]():
            found.append(outcome(fn, params, x))
        # A copy that was made there serves calls of all kinds afterwards.
        found.append(outcome(torch.func.grad(lambda p, apply=apply: run(apply, p, x)), params))

    assert found[:2] == found[2:]


@pytest.mark.parametrize("mode", ["inference", "no_grad", "a function mode"])
def test_a_copy_made_in_a_mode_is_trained_later(mode):
    """A tensor of a copy that was made under inference mode is no inference tensor."""
    apply, params, _ = tdf.functional(Constant())
    x = torch.ones(2, 3)
    with MODES[mode]():
        run(apply, params, x)
        run(apply, params, x)
    leaf = params["linear", "weight"].requires_grad_()

    run(apply, params.set("linear", params["linear"].set("weight", leaf)), x).backward()

    assert leaf.grad is not None


@pytest.mark.parametrize("change", [lambda apply: apply.eval(), lambda apply: apply.train()])
def test_a_mode_is_set_inside_a_trace(change):
    """`apply.eval()` inside a jitted function copies as outside."""
    apply, params, _ = tdf.functional(Constant())
    fn = tdf.jit(lambda p, x: run(change(apply), p, x), captures="constants")

    torch.testing.assert_close(fn(params, torch.ones(2, 3)), run(apply, params, torch.ones(2, 3)))


def test_a_copy_is_made_for_fake_tensors():
    """A call on fake tensors, the first of all, gives a fake result."""
    apply, params, _ = tdf.functional(Constant())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = params.apply(mode.from_tensor)
        shapes = [run(apply, fake, torch.ones(2, 3)).shape for _ in range(2)]

    assert shapes == [torch.Size([])] * 2


class Breaks(nn.Module):
    """A forward that vmap cannot run, and that then fails for a reason of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        if self.linear(x).sum() > -1e9:
            raise KeyError("the second error")
        return x


def test_both_errors_of_an_ensemble_are_shown():
    """Where vmap cannot run a forward, and the loop fails after it, the traceback holds both errors."""
    models = [Breaks(), Breaks()]
    apply, _, _ = tdf.functional(models[0])

    with pytest.raises(KeyError) as caught:
        tdf.Ensemble(apply)(tdf.stack_modules(models), torch.ones(2, 3))

    shown = "".join(traceback.format_exception(caught.value))
    assert "data-dependent control flow" in shown
    assert "the second error" in shown
