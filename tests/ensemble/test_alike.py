"""Members that hold equal things besides their weights stack; where these differ, the message shows how."""

import copy
import functools
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm

import tdfunc as tdf
from tdfunc.nn import EnsembleModule


class Holder(nn.Module):
    """A layer that holds a value."""

    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.value = value

    def forward(self, x):
        return self.linear(x)


@dataclass
class Options:
    """Options of a layer."""

    rate: float
    names: list


class Plain:
    """An object with an attribute."""

    def __init__(self, number):
        self.number = number

    def method(self, x):
        """Return a sum."""
        return x + self.number


def add(x, number=0):
    """Return a sum."""
    return x + number


def closing(number):
    """Return a function over a number in a list."""
    kept = [number]
    return lambda x: x + kept[0]


def apply_of(width):
    """Return a pure function of a layer."""
    return tdf.functional(nn.Linear(2, int(width)))[0]


def called(apply):
    """Return a pure function that has run."""
    apply(tdf.from_module(nn.Linear(2, apply.module.out_features)).detach(), torch.ones(2))
    return apply


# Made by a number, anew for each member.
VALUES = {
    "partial": lambda n: functools.partial(add, number=n),
    "partial of torch": lambda n: functools.partial(F.gelu, approximate=["none", "tanh"][n % 2]),
    "partial of a built-in": lambda n: functools.partial(torch.fft.fftn, dim=(n,)),
    "partial of tensors": lambda n: functools.partial(add, number=torch.full((2,), float(n))),
    "bound method": lambda n: Plain(n).method,
    "closure": closing,
    "dataclass": lambda n: Options(0.5, [n]),
    "object": Plain,
    "mapping": lambda n: types.MappingProxyType({"n": n}),
    "apply": apply_of,
    "apply that has run": lambda n: called(apply_of(n)),
    "ensemble": lambda n: tdf.Ensemble(apply_of(n)),
    "jitted": lambda n: tdf.jit(functools.partial(add, number=n)),
    "dropout passes": lambda n: tdf.MCDropout(tdf.functional(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))[0], n),
    "optimizer": lambda n: tdf.optim.adam(0.1 * n),
    "cached": lambda n: functools.lru_cache(n)(add),
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_stack(name):
    """Values that are made alike, but are other objects, do not tell members apart."""
    members = [Holder(VALUES[name](1)) for _ in range(2)]

    assert tdf.stack_modules(members).batch_size == (2,)


@pytest.mark.parametrize("name", VALUES)
def test_a_difference_is_shown(name):
    """Values of another content are refused, and the two lines of the message differ."""
    members = [Holder(VALUES[name](n)) for n in (1, 2)]

    with pytest.raises(tdf.TreeStructureError, match="'value' of the root") as caught:
        tdf.stack_modules(members)

    expected, got = [line.split(":", 1)[1].strip() for line in str(caught.value).splitlines()[1:3]]
    assert expected != got


NUMBERS = {
    "tensor": lambda: torch.randn(2000),
    "tensors": lambda: [torch.randn(30, 30) for _ in range(50)],
    "tensors of a dict": lambda: {"a": torch.randn(300, 3)},
    "tensor of a tuple": lambda: (torch.randn(30, 10).double(),),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_message_has_no_pages_of_numbers(name):
    """Values with many numbers are shown by their shapes."""
    with pytest.raises(tdf.TreeStructureError) as caught:
        tdf.stack_modules([Holder(NUMBERS[name]()) for _ in range(2)])

    assert len(str(caught.value)) < 1000


def halved(layer):
    """A recurrent layer with a parametrization of a bias."""
    parametrize.register_parametrization(layer, "bias_hh_l0", Halved())
    return layer


def cut(layer):
    """A recurrent layer with a pruned weight."""
    prune.random_unstructured(layer, "weight_hh_l0", 0.5)
    return layer


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x / 2


COMPUTED = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, "weight_hh_l0"),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer, "weight_ih_l0"),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer, "weight_hh_l0"),
    "own": halved,
    "weight_norm by a hook": lambda layer: old_weight_norm(layer, "weight_hh_l0"),
    "spectral_norm by a hook": lambda layer: nn.utils.spectral_norm(layer, "weight_hh_l0"),
    "pruning": cut,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("name", COMPUTED)
def test_recurrent_layers_with_computed_weights(name, kind):
    """The old tensors in the layers' own lists do not tell members apart, and the ensemble is the layers."""
    layers = [COMPUTED[name](kind(2, 3, num_layers=2, dtype=torch.float64)).eval() for _ in range(3)]
    x = torch.randn(4, 2, dtype=torch.float64)
    layers[1](x)

    out, _ = tdf.Ensemble(tdf.functional(layers[0])[0])(tdf.stack_modules(layers), x)

    torch.testing.assert_close(out, torch.stack([layer(x)[0] for layer in layers]))


def test_fresh_recurrent_layers_with_computed_weights():
    """`init_ensemble` makes them."""
    tree = tdf.init_ensemble(lambda: parametrizations.weight_norm(nn.GRU(2, 3), "weight_hh_l0"), 3)

    assert tree.batch_size == (3,)


def test_what_cannot_be_compared_is_said():
    """Two objects of one text that have no parts to compare are named as such."""

    class Opaque:
        __slots__ = ()

        def __repr__(self):
            return "Opaque()"

        def __reduce_ex__(self, protocol):
            raise TypeError

    with pytest.raises(tdf.TreeStructureError, match="two such objects are not compared"):
        tdf.stack_modules([Holder([Opaque()]) for _ in range(2)])


@pytest.mark.parametrize("called", [False, True])
def test_what_ran_before_does_not_matter(called):
    """A jitted function, an ensemble or a pure function of one member that has run is like another."""
    values = [(tdf.jit(add), tdf.Ensemble(apply_of(2)), apply_of(2)) for _ in range(2)]
    jitted, ensemble, apply = values[0]
    tree = tdf.stack_modules([nn.Linear(2, 2) for _ in range(3)])
    if called:
        jitted(torch.ones(2))
        ensemble(tree, torch.ones(2))
        apply(tree[0], torch.ones(2))

    assert tdf.stack_modules([Holder(value) for value in values]).batch_size == (2,)


class Model(nn.Module):
    """A trunk, and an ensemble of heads inside."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # noqa: E731
        self.trunk = nn.Linear(3, 4)
        self.heads = EnsembleModule(tdf.functional(make())[0], tdf.stack_modules([make() for _ in range(3)]))

    def forward(self, x):
        return self.heads(self.trunk(x)).mean(0)


@pytest.mark.parametrize("how", ["vmap", "loop", "traced"])
def test_an_ensemble_of_models_with_ensembles(how):
    """Stacked models that hold ensembles compute as each of them alone."""
    models, x = [Model().eval() for _ in range(2)], torch.randn(5, 3)
    apply, _, _ = tdf.functional(models[0])

    out = tdf.Ensemble(apply, how)(tdf.stack_modules(models), x)

    torch.testing.assert_close(out, torch.stack([model(x) for model in models]))


class Active(nn.Module):
    """A layer that holds its own function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.act = functools.partial(F.leaky_relu, negative_slope=0.2)

    def forward(self, x):
        return self.act(self.layer(x))


@pytest.mark.parametrize("look", [tdf.functional, copy.deepcopy, lambda model: vars(model.act)])
def test_a_look_at_one_member_does_not_make_it_another(look):
    """A partial function has no attributes until somebody asks for them."""
    models = [Active(), Active()]
    look(models[0])

    assert tdf.stack_modules(models).batch_size == torch.Size([2])
