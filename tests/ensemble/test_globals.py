"""The values around a module's forward decide whether a trace may be replayed."""

import pytest
import torch
from torch import nn

from tdfunc.ensemble._globals import Globals
from tests.ensemble.models import ensemble_of, make_resnet, make_transformer

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
