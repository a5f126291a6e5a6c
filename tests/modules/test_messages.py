"""The messages of modules/: each row is a call, the class that it raises, and a pattern of the message."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import tdfunc as tdf
from tdfunc import (
    ConcurrencyError,
    LeafMismatchError,
    LeakError,
    TensorDict,
    TieError,
    TreeStructureError,
    UnsupportedError,
    combine,
    from_module,
    functional,
    stack,
)
from tests.models import Norm, Tied, WithState, make_mlp, zeros_of
from tests.modules.test_functional import Named

X = torch.linspace(-1, 1, 15).reshape(5, 3)
MLP, NORM = make_mlp(), Norm()


def assert_raises(call, error, pattern):
    """Check that a call raises this error with this message."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call()


# -- to_module, which leaves the module untouched -----------------------------------------------------------------


def load_for_good(tree, model):
    """The call alone."""
    tree.to_module(model)


def load_in_a_block(tree, model):
    """The block alone: at a dual level the call binds nothing."""
    with torch.autograd.forward_ad.dual_level(), tree.to_module(model):
        pass


WEIGHT = ("3", "weight")
COUNT = ("norm", "num_batches_tracked")
TIED = {"emb": {"weight": torch.zeros(5, 4)}, "out": {"weight": torch.ones(5, 4)}}
SPLIT = {name: {"weight": torch.zeros(5, 4, requires_grad=True)} for name in ("emb", "out")}
LOADS = [
    (MLP, lambda t: t.set(WEIGHT, torch.zeros(7, 5)), LeafMismatchError,
     r"'3.weight' does not fit Linear.weight.*shape \(2, 4\), torch.float32.*shape \(7, 5\).*another architecture"),
    (MLP, lambda t: t.set(WEIGHT, torch.zeros(4, 2)), LeafMismatchError, r"\(2, 4\).*\(4, 2\).*transpose the leaf"),
    (MLP, lambda t: t.set(WEIGHT, t[WEIGHT].double()), LeafMismatchError, "float32.*float64.*cast the tree"),
    (MLP, lambda t: t.set(WEIGHT, t[WEIGHT].to(torch.float8_e5m2)), LeafMismatchError, "float8.*dequantize=True"),
    (MLP, lambda t: t.set(WEIGHT, t[WEIGHT].bool()), LeafMismatchError, r"torch\.bool.*cast the tree"),
    (NORM, lambda t: t.set(COUNT, t[COUNT].double()), LeafMismatchError, "int64.*float64.*cast the tree"),
    (MLP, lambda t: stack([t, t]), LeafMismatchError, r"'0.weight'.*\(2, 4, 3\).*stacked: bind one member"),
    (MLP, lambda t: t.set(WEIGHT, "text"), LeafMismatchError, r"'3.weight'.*shape \(2, 4\).*NonTensorData"),
    (MLP, lambda t: t.set(("3", "nope"), torch.zeros(1)), TreeStructureError,
     r"fit Sequential, which was not touched.*'3.nope'.*params\['0'\].to_module\(m\[0\]\)"),
    (MLP, lambda t: t.set(("5", "nope"), torch.zeros(1)), TreeStructureError, "'5.nope'"),
    (MLP, lambda t: t.delete("0").set("0", torch.zeros(1)), TreeStructureError, r"'0.weight'.*does not have: \['0'\]"),
    (nn.Linear(3, 4, bias=False), lambda t: t.set("bias", torch.zeros(4)), TreeStructureError, r"not have: \['bias'\]"),
    (MLP, lambda t: t.delete(("0", "bias")), TreeStructureError, "'0.bias'.*strict=False"),
    (MLP, lambda t: t.flatten_keys("."), TreeStructureError, r"'0.weight'.*tree.unflatten_keys\("),
    (MLP, lambda t: t.delete("0"), TreeStructureError, "'0.weight', '0.bias'.*strict=False"),
    (NORM, lambda t: functional(NORM)[1], TreeStructureError, "running_mean.*strict=False"),
    (WithState(), lambda t: t.delete("_extra_state"), TreeStructureError, "'_extra_state'"),
    (WithState(), lambda t: stack([t, t])["linear"], TreeStructureError, "'linear.weight'.*does not have"),
    (Tied(), lambda t: TensorDict(TIED), TieError, "'emb.weight' and 'out.weight' are one tensor.*tensors that differ"),
    (Tied(), lambda t: TensorDict(SPLIT), TieError, "whose gradients would be split"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "edit", "error", "pattern"), LOADS)
@pytest.mark.parametrize("load", [load_for_good, load_in_a_block])
def test_loads(load, model, edit, error, pattern):
    """A tree that does not fit is named by its leaf, before the first write."""
    before, tree = [*model.parameters(), *model.buffers()], edit(zeros_of(model))
    assert_raises(lambda: load(tree, model), error, pattern)

    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], before, strict=True))


# -- apply --------------------------------------------------------------------------------------------------------


def run(edit, model=MLP):
    """Call the model on the trees that `edit` makes of its own."""
    apply, params, buffers = functional(model)
    params, buffers = edit(params, buffers)
    return apply(params, X, buffers=buffers)


TREES = [
    (MLP, lambda p, b: (p.set(("0", "weight"), torch.zeros(7, 5)), b), LeafMismatchError,
     r"leaf '0.weight' does not fit the module.*shape \(4, 3\).*shape \(7, 5\).*architecture"),
    (NORM, lambda p, b: (p, b.set(("norm", "running_mean"), torch.zeros(9))), LeafMismatchError,
     r"'norm.running_mean' does not fit the module.*shape \(9,\).*a buffer keeps its shape.*in its full size"),
    (MLP, lambda p, b: (stack([p, p]), b), LeafMismatchError, r"\(4, 3\).*\(2, 4, 3\).*tdfunc.Ensemble\(apply\)"),
    (MLP, lambda p, b: (p.set(("0", "weight"), torch.zeros(3)), b), LeafMismatchError, r"\(4, 3\).*\(3,\).*expand"),
    (MLP, lambda p, b: (tree_map(lambda _: 1, p), b), LeafMismatchError, r"'0.weight'.*shape \(4, 3\).*int"),
    (MLP, lambda p, b: (p.delete(("0", "bias")), b), TreeStructureError, "Sequential: '0.bias' is missing.*3 of them"),
    (nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), lambda p, b: (TensorDict(), b), TreeStructureError,
     r"10 leaves, also \['0.weight', .*'4.bias'\]\n"),
    (nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)]), lambda p, b: (TensorDict(), b), TreeStructureError,
     r"'4.bias'\] and 2 more"),
    (MLP, lambda p, b: (p.set(("0", "nope"), torch.zeros(1)), b), TreeStructureError,
     r"'0.nope' is not one of its leaves.*4 leaves.*unknown leaves \['0.nope'\]"),
    (MLP, lambda p, b: (p.flatten_keys("."), b), TreeStructureError, r"'0.weight' is missing.*tree.unflatten_keys\("),
    (MLP, lambda p, b: (p["0"], b), TreeStructureError, r"'0.weight' is missing.*unknown leaves \['weight', 'bias'\]"),
    (MLP, lambda p, b: (dict(p.items()), b), TypeError, r"params is not a tree.*got: +dict.*TensorDict\(d\) makes"),
    (MLP, lambda p, b: (p["0", "bias"], b), TypeError, "params is not a tree.*got: +Tensor.*buffers=buffers"),
    (NORM, lambda p, b: (p, X), TypeError, "buffers is not a tree.*got: +Tensor"),
    (NORM, lambda p, b: (p, None), TreeStructureError, "'norm.running_mean' is missing.*pass buffers=buffers"),
    (NORM, lambda p, b: (p, b.delete(("norm", "running_var"))), TreeStructureError, "running_var' is missing.*6 of"),
    (NORM, lambda p, b: (p, combine(p.clone(), b)), TreeStructureError, r"'linear.weight' is in params and in buffers"),
    (NORM, lambda p, b: (b, p), TreeStructureError, "the parameter 'linear.weight' is in buffers.*swapped"),
    (Tied(), lambda p, b: (TensorDict(TIED).to("meta"), b), TieError, "apply: 'emb.weight' and 'out.weight' are"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "edit", "error", "pattern"), TREES)
def test_trees(model, edit, error, pattern):
    """Trees that do not fit a module are named by their leaf."""
    assert_raises(lambda: run(edit, model), error, pattern)


class Calls(nn.Linear):
    """A layer and a function after it; any attributes."""

    def __init__(self, fn=None, **attributes):
        super().__init__(3, 4)
        self.fn = fn
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.fn(super().forward(x))


class Forgets(nn.Linear):
    """Takes its buffer away while it runs."""

    def __init__(self):
        super().__init__(3, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale = None
        return super().forward(x)


class Copied(nn.Linear):
    """A module with a copy of its own."""

    def __init__(self, make):
        super().__init__(3, 4)
        self.make = make

    def __deepcopy__(self, memo):
        return self.make(self)


def make_quantized():
    """A layer whose weights lie packed in an object of C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that quantized tensors will go
        return nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(2, 2))


def over_members(model):
    """Run two members under vmap, with buffers that they share."""
    apply, params, buffers = functional(model)
    return torch.vmap(lambda p: apply(p, X, buffers=buffers))(stack([params, params]))


def draw(model, rng=0):
    """Run with a seed."""
    return functional(model)[0](functional(model)[1], X, rng=rng)


def trace(rng, model=nn.Dropout(0.5)):  # noqa: B008
    """Draw in a traced function."""
    apply, params, _ = functional(model.train())
    return tdf.jit(lambda params, x, rng: apply(params, x, rng=rng))(params, X, rng)


def enter_twice():
    """Enter a handle that is closed."""
    handle = zeros_of(MLP).to_module(MLP)
    with handle:
        pass
    handle.__enter__()


def call_in_cached():
    """Call inside a cache of computed weights."""
    with nn.utils.parametrize.cached():
        run(lambda p, b: (p, b), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


def members_of_two_states(*states):
    """Run members whose extra state differs."""
    models = [WithState(), WithState()]
    models[0].state, models[1].state = states
    tdf.Ensemble(functional(models[0])[0])(torch.stack([from_module(model) for model in models]), X)


LOOP = 'how="loop"'
CALLS = {
    "packed": (lambda: from_module(make_quantized()), UnsupportedError,
               r"LinearPackedParams keeps its weights packed.*got: +torch.ao.*from_module\(model.head\)"),
    "packed, to_module": (lambda: TensorDict().to_module(make_quantized()), UnsupportedError, "packed"),
    "packed, stack_modules": (lambda: tdf.stack_modules([make_quantized()]), UnsupportedError, "packed"),
    "scripted": (lambda: from_module(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))), UnsupportedError,
                 "ScriptModule are in compiled code.*scripted or traced from"),
    "lazy": (lambda: from_module(nn.Sequential(nn.LazyLinear(3))), UnsupportedError,
             "'0.weight' of LazyLinear is uninitialised.*run the module once"),
    "split": (lambda: tdf.split(TensorDict({"a": X})), UnsupportedError, "does not record the kinds.*partition"),
    "a Python generator": (lambda: functional(Calls(value=[(i for i in ())], kept={"it": (i for i in ())})),
                           UnsupportedError, "Calls cannot be copied.*cannot pickle 'generator'.*__deepcopy__"),
    "no copies": (lambda: functional(Copied({}.pop)), UnsupportedError, "Copied cannot be copied.*KeyError"),
    "its own copy": (lambda: functional(Copied(lambda m: m)), UnsupportedError,
                     r"is not independent of it.*\['weight', 'bias'\].*memo"),
    "another copy": (lambda: functional(Copied(lambda m: nn.Linear(3, 4))), UnsupportedError, "is not independent"),
    "reserved names": (lambda: functional(Named()), UnsupportedError, "called 'buffers'.*call_only=True"),
    "reserved names, apply": (lambda: functional(Named(), call_only=True)[0](None, X), UnsupportedError,
                              r"'buffers' and 'rng'.*apply.call\("),
    "reserved names, with_buffers": (lambda: functional(Named(), call_only=True)[0].with_buffers(None, None),
                                     UnsupportedError, "called 'rng'"),
    "cached": (call_in_cached, UnsupportedError, r"parametrize.cached\(\).*leave the"),
    "a buffer gone": (lambda: functional(Forgets())[0].with_buffers(combine(*functional(Forgets())[1:]), None, X),
                      UnsupportedError, "Forgets left no tensor in the buffer 'scale'"),
    "states of members": (lambda: members_of_two_states({"scale": 1.0}, {"scale": 9.0}), UnsupportedError,
                          "'_extra_state' of a member.*'scale': 1.0.*'scale': 9.0.*one by one"),
    "tensors as states": (lambda: members_of_two_states(X, X + 1), UnsupportedError, "'_extra_state' of a member"),
    "norm": (lambda: over_members(Norm()), RuntimeError, "batched tensor.*its own statistics.*apply.eval"),
    "forward": (lambda: functional(MLP)[0](functional(MLP)[1], X[:, :2]), RuntimeError, "mat1 and mat2 shapes"),
    "probability": (lambda: draw(Calls(lambda y: F.dropout(y, 1.5))), ValueError, "between 0 and 1, but got 1.5"),
    "rng, bool": (lambda: draw(MLP, True), TypeError, "a seed or a torch.Generator.*True"),
    "rng, text": (lambda: draw(MLP, "0"), TypeError, "a seed or a torch.Generator.*'0'"),
    "rng, several": (lambda: draw(MLP, tdf.random.split(tdf.random.key(0), 3)), TypeError,
                     r"one key.*int64 of shape \(3, 2\).*Ensemble"),
    "drawing torch.dropout": (lambda: draw(Calls(lambda y: torch.dropout(y, 0.5, True))), UnsupportedError, "dropout"),
    "drawing poisson": (lambda: draw(Calls(lambda y: torch.poisson(y.exp()))), UnsupportedError,
                        f"past rng=.*F.dropout.*generator by aten.poisson.*test_messages.py.*without rng=.*{LOOP}"),
    "drawing by numpy": (lambda: draw(Calls(lambda y: y * np.random.rand())), UnsupportedError, "past rng=.*numpy's"),
    "drawing by Python": (lambda: draw(Calls(lambda y: y * random.random())), UnsupportedError, "past rng=.*Python's"),
    "drawing, traced": (lambda: trace(tdf.random.key(0), Calls(lambda y: torch.native_dropout(y, 0.5, True)[0])),
                        UnsupportedError, "past rng=.*aten.native_dropout"),
    "traced generator": (lambda: trace(torch.Generator()), UnsupportedError,
                         r"Generator cannot be drawn from inside.*tdfunc.random.key\(seed\).*as an argument"),
    "mapped generator": (lambda: torch.vmap(lambda p: functional(MLP)[0](p, X, rng=torch.Generator()))(
                            torch.stack([functional(MLP)[1]] * 2)), UnsupportedError, "inside a transform"),
    "entered twice": (enter_twice, ConcurrencyError, r"entered before.*closed.*call params.to_module"),
    "a numpy view": (lambda: functional(Calls(view=[MLP[0].weight.detach().numpy().T], layer=MLP[0])), LeakError,
                     "numpy array '0' shares the memory of a weight.*'layer.weight'.*inside forward"),
    "a kept weight": (lambda: run(lambda p, b: (p, b), keeping()), LeakError,
                      "used the weight 'weight'.*a reference kept elsewhere.*inside forward"),
}  # fmt: skip


def keeping():
    """A layer that reads its weight from a list."""
    model = Calls(None)
    model.kept = [model.weight]
    model.fn = lambda y: y + model.kept[0].sum()
    return model


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    """Each refusal names the call, the values and the way out."""
    assert_raises(*CALLS[name])


def test_evaluation_mode_draws_nothing():
    """Functions that are refused with `rng=` run where they draw nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.LSTM(4, 4, 2, dropout=0.5)).eval()

    assert torch.equal(draw(model)[0], model(X)[0])


def test_a_seed_set_in_forward_is_a_draw(monkeypatch):
    """A default generator that moves without an operation is refused, unless another thread can have moved it."""
    model = Calls(lambda y: (torch.manual_seed(torch.initial_seed() + 1), y)[1])

    monkeypatch.setattr("threading.active_count", lambda: 2)
    assert torch.equal(draw(model)[0], model(X)[0])
    twice = Calls(lambda y: torch.poisson(torch.poisson(y.exp())))
    assert_raises(lambda: draw(twice), UnsupportedError, r"got: [^;]*aten.poisson[^;]*\n")
    monkeypatch.setattr("threading.active_count", lambda: 1)
    assert_raises(lambda: draw(model), UnsupportedError, "torch's default generator by an operation")
