"""The values around a module's forward decide whether a trace may be replayed."""

import math
import os
import re
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tdfunc.ensemble._globals import Globals
from tests.ensemble.models import Returns, ensemble_of, line, make_resnet, make_transformer

NUMBER = 1
SETTINGS = {"scale": [1.0]}
UNRELATED = 1


def helper(x):
    """Named by a forward, and names a global itself."""
    return x * NUMBER


class Reads(nn.Module):
    """Reads a container, a helper's global, a method's default and a closure."""

    def __init__(self, shift):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.fn = lambda y: y + shift[0]

    def forward(self, x):
        return self.fn(helper(self.linear(x)) * SETTINGS["scale"][0]) + self.offset + self.default()

    @property
    def offset(self):
        return OFFSET

    def default(self, value=(0.0,)):
        return value[0]

    def unused(self):
        return UNRELATED


OFFSET = 0.0


def rebind(monkeypatch, shift):
    """Bind a global of a helper to another value."""
    monkeypatch.setitem(globals(), "NUMBER", 2)


def rebind_in_a_property(monkeypatch, shift):
    """Bind a global of a property to another value."""
    monkeypatch.setitem(globals(), "OFFSET", 2.0)


def change_a_container(monkeypatch, shift):
    """Change what a container holds."""
    monkeypatch.setitem(SETTINGS, "scale", [2.0])


def change_a_closure(monkeypatch, shift):
    """Change what a closure's list holds."""
    shift[0] = 5.0


def change_a_default(monkeypatch, shift):
    """Give a method another default."""
    monkeypatch.setattr(Reads.default, "__defaults__", ((3.0,),))


def replace_a_function(monkeypatch, shift):
    """Bind a helper's name to another function."""
    monkeypatch.setitem(globals(), "helper", lambda x: x * 7)


CHANGES = [rebind, rebind_in_a_property, change_a_container, change_a_closure, change_a_default, replace_a_function]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_noticed(change, monkeypatch):
    """A replay would go on with the value that was read when the trace was recorded."""
    shift = [1.0]
    models = [Reads(shift) for _ in range(2)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)
    found = ensemble._globals
    for _ in range(4):
        before = ensemble(tree, x)
    token = found.token()
    # The ensemble runs a copy of the module, and of a list in its closures.
    own = next(m for m in ensemble.apply.module.modules()).fn.__closure__[0].cell_contents
    change(monkeypatch, own)
    after = found.token()

    assert token != after
    assert not torch.equal(ensemble(tree, x), before)


def test_no_change():
    """Each call would be traced anew."""
    found = Globals(Reads([1.0]))
    first = found.token()

    assert found.token() is first


def test_unused_methods_are_not_followed(monkeypatch):
    """A global that forward does not read would start a new trace."""
    found = Globals(Reads([1.0]))
    first = found.token()
    monkeypatch.setitem(globals(), "UNRELATED", 2)

    assert found.token() == first


@pytest.mark.parametrize("make", [make_transformer, lambda: nn.Linear(3, 2)], ids=["transformer", "linear"])
def test_modules_of_torch_are_not_followed(make):
    """Each call of a torch module would pay for reading torch's globals."""
    assert Globals(make())._read == []


def test_user_modules_of_torch_layers():
    """Only the user's own code is read."""
    found = Globals(make_resnet())
    found.token()

    assert len(found._read) < 10


# -- what auto must see, or must not trace ----------------------------------------------------------------------


class Config:
    """Settings that are an object, with a method."""

    kind = 1.0

    def __init__(self, value):
        self.value = value

    def scaled(self):
        return self.value * self.kind


class Slots:
    """Settings in a slot."""

    __slots__ = ("value",)


class Namespace:
    """Settings that are a class."""

    value = 1.0

    @classmethod
    def scaled(cls):
        return cls.value


class Dynamic:
    """Settings whose attributes are computed."""

    def __getattr__(self, name):
        return float(os.environ.get(name, "1"))


CONFIG, SLOTS, DYNAMIC = Config(1.0), Slots(), Dynamic()
SLOTS.value = 1.0
OTHER = types.ModuleType("otherlib")
exec("SCALE = 1.0\ndef scaled(x): return x * SCALE", vars(OTHER))


class Base(nn.Module):
    """Computes fn(linear(x)) with a class attribute, which subclasses read."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.finish(self.linear(x))

    def finish(self, y):
        return y


class OfClass(Base):
    """Reads an attribute of its class."""

    def finish(self, y):
        return y * self.factor


class OfObject(Base):
    """Reads an attribute of a global object."""

    def finish(self, y):
        return y * CONFIG.value


class OfMethod(Base):
    """Calls a method of a global object."""

    def finish(self, y):
        return y * CONFIG.scaled()


class OfSlot(Base):
    """Reads a slot of a global object."""

    def finish(self, y):
        return y * SLOTS.value


class OfNamespace(Base):
    """Reads an attribute of a global class."""

    def finish(self, y):
        return y * Namespace.value


class OfClassMethod(Base):
    """Calls a class method of a global class."""

    def finish(self, y):
        return y * Namespace.scaled()


class OfModule(Base):
    """Reads a global of another module."""

    def finish(self, y):
        return y * OTHER.SCALE


class OfTorch(Base):
    """Names a function of torch."""

    def finish(self, y):
        return F.relu(y) * math.pi


class OfConvolution(nn.Conv1d):
    """Overrides a method that torch's forward calls."""

    scale = 1.0

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias) * self.scale


SEEN = {
    "class": (OfClass, Base, "factor", 5.0),
    "subclass": (OfClass, OfClass, "factor", 5.0),
    "object": (OfObject, CONFIG, "value", 5.0),
    "method": (OfMethod, CONFIG, "value", 5.0),
    "class of an object": (OfMethod, Config, "kind", 5.0),
    "slot": (OfSlot, SLOTS, "value", 5.0),
    "namespace": (OfNamespace, Namespace, "value", 5.0),
    "class method": (OfClassMethod, Namespace, "value", 5.0),
    "module": (OfModule, OTHER, "SCALE", 5.0),
    "torch": (OfTorch, F, "relu", torch.sigmoid),
    "replaced method": (OfClass, OfClass, "finish", lambda self, y: y * 7),
    "replaced forward": (OfClass, OfClass, "forward", lambda self, x: self.linear(x) * 7),
    "called by torch": (lambda: OfConvolution(5, 2, 1), OfConvolution, "scale", 5.0),
}


@pytest.mark.parametrize("name", SEEN)
def test_auto_sees_a_change(name, monkeypatch):
    """A replay that nobody asked for would go on with the old value."""
    make, owner, attribute, value = SEEN[name]
    ensemble, tree = ensemble_of([make() for _ in range(3)])
    x = torch.arange(15.0).reshape(5, 3).sin()
    for _ in range(4):
        before = ensemble(tree, x)
    assert line(ensemble).startswith("traced")
    monkeypatch.setattr(owner, attribute, value, raising=False)
    for _ in range(4):
        out = ensemble(tree, x)

        torch.testing.assert_close(out, type(ensemble)(ensemble.apply, "loop")(tree, x))
    assert not torch.allclose(out, before)
    assert line(ensemble).startswith("traced")


UNSEEN = {
    "environment": (lambda y: y * float(os.environ.get("TDFUNC_TEST_SCALE", "1")), "os.environ"),
    "time": (lambda y: y * time.time(), "time.time"),
    "file": (lambda y: y if open else y, r"open\(\)"),
    "another package": (lambda y: OTHER.scaled(y), "OTHER.scaled of otherlib"),
    "computed attribute": (lambda y: y * DYNAMIC.scale, r"Dynamic\.__getattr__"),
    "getattr": (lambda y: y * getattr(CONFIG, "val" + "ue"), r"getattr\(\)"),
    "a module outside": (lambda y: OUTSIDE(y), "OUTSIDE, a Dropout"),
}
OUTSIDE = nn.Dropout(0.0)


@pytest.mark.parametrize("name", UNSEEN)
def test_auto_does_not_trace_what_it_cannot_see(name):
    """A replay that nobody asked for would miss a change of the environment, the clock or another package."""
    fn, what = UNSEEN[name]
    ensemble, tree = ensemble_of([Returns(fn) for _ in range(3)])
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))

    assert re.search(what, line(ensemble))
    assert line(ensemble).startswith("vmap, 3 members: forward may read ")
    assert line(ensemble).endswith(", which a replay would not.")


def test_a_new_function_is_looked_into(monkeypatch):
    """The globals of a function that replaced another would not be watched."""
    ensemble, tree = ensemble_of([OfClass() for _ in range(3)])
    for _ in range(3):
        ensemble(tree, torch.ones(5, 3))
    monkeypatch.setattr(OfClass, "finish", lambda self, y: y * time.time())
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))

    assert line(ensemble).startswith("vmap, 3 members: forward may read time.time")
