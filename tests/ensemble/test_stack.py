"""Modules into one stacked tree and back, with everything checked that the tree cannot show."""

import enum
import functools
import random
import threading
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import tdfunc as tdf
from tdfunc.ops.batch.join import stack
from tests.ensemble.models import ensemble_of, make_mlp, make_resnet, make_transformer
from tests.helpers import TiedLM, assert_trees_equal


def detached(module):
    """A module's tree without gradient history."""
    return tdf.from_module(module).apply(lambda leaf: leaf.detach())


def make_bare():
    """A child, parameters and buffers that are None."""
    return nn.Sequential(edited(Holds(1), linear=None), nn.BatchNorm1d(3, affine=False, track_running_stats=False))


@pytest.mark.parametrize("make", [make_mlp, make_resnet, make_transformer, TiedLM, nn.ReLU, make_bare])
@pytest.mark.parametrize("members", [1, 3])
def test_equals_stacked_trees(make, members):
    """Leaves, kinds, ties and their order are those of the members' own trees."""
    models = [make() for _ in range(members)]

    assert_trees_equal(tdf.stack_modules(models), stack([detached(model) for model in models]))


def test_copies_without_gradient_history():
    """The tree's leaves share neither memory nor graph with the modules."""
    models = [make_mlp() for _ in range(2)]
    tree = tdf.stack_modules(models)
    before = tree["0", "weight"].clone()
    with torch.no_grad():
        models[0][0].weight.add_(1)

    assert torch.equal(tree["0", "weight"], before)
    assert not any(leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(tree))


class Stateful(nn.Module):
    """Keeps extra state beside a buffer that is not saved."""

    def __init__(self, state):
        super().__init__()
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.state = {"value": state}

    def get_extra_state(self):
        return self.state["value"]

    def set_extra_state(self, state):
        self.state["value"] = state

    def __eq__(self, other):
        return self is other

    __hash__ = nn.Module.__hash__


def test_extra_state_and_hidden_buffers():
    """Each member keeps its extra state, and a non-persistent buffer its kind."""
    models = [Stateful("same") for _ in range(2)]
    tree = tdf.stack_modules(models)

    assert tree["_extra_state"] == ["same", "same"]
    assert tdf.split(tree)[1]._kinds["scratch"] is tdf.Kind.NON_PERSISTENT
    other = Stateful("old")
    tree[1].to_module(other)
    assert other.get_extra_state() == "same"


def test_compiled_members_are_unwrapped():
    """Members that torch.compile wraps or marks are like others, the root and submodules."""
    models = [nn.Linear(3, 2) for _ in range(2)]
    wrapped = [torch.compile(model, backend="eager") for model in models]
    expected = tdf.stack_modules(models)
    models[1].compile(backend="eager")

    assert_trees_equal(tdf.stack_modules(wrapped), expected)
    assert_trees_equal(tdf.stack_modules([wrapped[0], models[1]]), expected)
    assert tdf.stack_modules([nn.Sequential(model) for model in wrapped])["0", "weight"].shape == (2, 2, 3)


# -- and back ---------------------------------------------------------------------------------------------------


@given(members=st.integers(1, 5), make=st.sampled_from([make_mlp, make_resnet, TiedLM]))
def test_law_unstack_undoes_stack(members, make):
    """A member comes back with its leaves, ties and kinds."""
    models = [make() for _ in range(members)]
    tree = tdf.stack_modules(models)

    assert_trees_equal(list(tdf.unstack(tree)), [detached(model) for model in models])
    assert_trees_equal(stack(tdf.unstack(tree)), tree)


# -- refusals ---------------------------------------------------------------------------------------------------


class Holds(nn.Module):
    """Has one attribute."""

    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.value = value


class Color(enum.Enum):
    RED, BLUE = 1, 2


class Plain:
    """Settings without a comparison of their own."""

    def __init__(self, value):
        self.value = value


class Slotted:
    """Settings in a slot."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Equal(Plain):
    """Settings whose comparison does not look."""

    def __eq__(self, other):
        return True

    __hash__ = None


class Number(float):
    """A number of a class of its own."""


def times(scale):
    """A hook with a closure."""
    return lambda module, args, out: out * scale


def keyword(value):
    """A function with a keyword default and an attribute."""

    def fn(x, *, scale=value):
        return x * scale

    return fn


def marked(value):
    """A function with an attribute."""
    fn = times(1.0)
    fn.value = value
    return fn


def cyclic(value):
    """Settings that hold themselves."""
    made = Plain([value])
    made.value.append(made)
    return made


# Of a number: what holds it.
HOLDERS = [
    lambda x: x, lambda x: x + 1j, lambda x: str(x), lambda x: (1, (x,)), lambda x: [x], lambda x: {"a": x},
    lambda x: {x: 1}, lambda x: {x}, lambda x: bytes([int(x)]), Number, Plain, Slotted, Equal, cyclic, keyword, times,
    marked, lambda x: [Plain(x)], lambda x: {"a": (Slotted(x),)}, lambda x: Plain(Slotted(x)),
    lambda x: Plain(x).__init__, lambda x: functools.partial(F.elu, alpha=x), lambda x: torch.full((2,), x),
    lambda x: np.full(2, x), lambda x: np.float64(x), lambda x: [nn.LeakyReLU(x)],
    lambda x: {"a": nn.Parameter(torch.full((2,), x))}, lambda x: functools.partial(nn.LeakyReLU(x)),
    lambda x: torch.full((2,), x, requires_grad=True), lambda x: torch.full((2,), x, requires_grad=True).exp(),
    lambda x: torch.Generator().manual_seed(int(x)), lambda x: random.Random(x), lambda x: deque([x]),
    lambda x: slice(x),
]  # fmt: skip
# Values that are equal, or of one class, and do not compute the same.
UNLIKE = [
    (1, True), (1, 1.0), (0.0, -0.0), ((0.0,), (-0.0,)), (0.0, float("nan")), ([1, 2], [1, 2, 3]), ((1,), [1]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (None, 1), (Color.RED, Color.BLUE), (torch.float32, torch.float64),
    (F.relu, F.gelu), (torch.relu, torch.sigmoid), (nn.ReLU, nn.GELU), (np.zeros(2), np.zeros(2, np.float32)),
    (torch.zeros(2), -torch.zeros(2)), ((x for x in ()), (x for x in ())), (1, object()),
    *[(torch.zeros(2), x) for x in (torch.zeros(1, 2), torch.zeros(2).int(), torch.zeros(2).to_sparse())],
    (torch.zeros(2), torch.zeros(2, device="meta")), (torch.ones(2, device="meta"), torch.ones(2)),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(HOLDERS) + len(UNLIKE)))
def test_hyperparameters_that_differ_are_named(i):
    """Everything that forward may read in an attribute is compared, at any depth; the message shows both values."""
    n = len(HOLDERS)
    values = (lambda: HOLDERS[i](1.0), lambda: HOLDERS[i](5.0)) if i < n else [lambda x=x: x for x in UNLIKE[i - n]]
    first, same, second = values[0](), values[0](), values[1]()

    with pytest.raises(tdf.TreeStructureError) as caught:
        tdf.stack_modules([Holds(first), Holds(same), Holds(second)])
    assert "member 2 differs from member 0 in 'value' of the root" in str(caught.value)
    assert f"expected: {first!r}" in str(caught.value)
    assert f"got:      {second!r}" in str(caught.value)


@pytest.mark.parametrize("make", [object, torch.Generator, threading.Lock, lambda: float("nan"), lambda: None])
def test_hyperparameters_without_numbers_are_alike(make):
    """Sentinels, locks and fresh generators, made for each member, are alike."""
    assert tdf.stack_modules([Holds(make()) for _ in range(3)]).batch_size == (3,)


class Refers(nn.Module):
    """Lists its own submodules and weights besides registering them."""

    def __init__(self, swapped=False):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.order = [self.b, self.a] if swapped else [self.a, self.b]
        self.refs = [weakref.ref(self.a.weight), self.a.weight]


def test_registered_modules_are_compared_by_their_paths():
    """A list of submodules or weights is alike where the same paths stand in it, whatever their values."""
    assert tdf.stack_modules([Refers(), Refers()]).batch_size == (2,)
    with pytest.raises(tdf.TreeStructureError, match="'order' of the root"):
        tdf.stack_modules([Refers(), Refers(swapped=True)])


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm, nn.utils.spectral_norm, lambda m: prune.random_unstructured(m, "weight", 0.5),
        # It makes a class for each module.
        parametrizations.weight_norm,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_computed_weights_may_differ(change):
    """A weight that a hook before forward, or a parametrization, computes anew is not a hyperparameter."""
    models = [change(nn.Linear(3, 2)) for _ in range(2)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)

    assert_close(ensemble(tree, x), torch.stack([model(x) for model in models]))


class Scaled(nn.Linear):
    """A layer whose scale is computed once, outside of any hook."""

    def __init__(self, scale):
        super().__init__(3, 2)
        self.scale = torch.full((2,), scale, requires_grad=True) * 1
        self.register_forward_pre_hook(leave)

    def forward(self, x):
        return super().forward(x) * self.scale


def leave(module, args):
    """A hook that computes nothing."""


def test_computed_tensors_that_no_hook_recomputes_must_agree():
    """A tensor that no hook recomputes is compared, in a module with other hooks too."""
    assert tdf.stack_modules([Scaled(2.0), Scaled(2.0)]).batch_size == (2,)
    with pytest.raises(tdf.TreeStructureError, match="'scale' of the root"):
        tdf.stack_modules([Scaled(2.0), Scaled(3.0)])


HOOKS = {
    "second": (lambda m: None, lambda m: m.register_forward_hook(times(5.0)), "_forward_hooks"),
    "first": (lambda m: m.register_forward_hook(times(5.0)), lambda m: None, "_forward_hooks"),
    "closure": (*[lambda m, s=s: m.register_forward_hook(times(s)) for s in (1.0, 5.0)], "_forward_hooks"),
    "keywords": (
        *[lambda m, k=k: m.register_forward_pre_hook(Plain.__init__, with_kwargs=k) for k in (True, False)],
        "_forward_pre_hooks",
    ),
}


@pytest.mark.parametrize(("first", "second", "name"), HOOKS.values(), ids=HOOKS)
def test_hooks_that_differ(first, second, name):
    """Members with different hooks, or hooks that are called in another way, are refused."""
    models = [nn.Sequential(nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)]
    first(models[0][1])
    second(models[1][1])

    with pytest.raises(tdf.TreeStructureError, match=rf"(?s)member 1 differs.*'{name}' of '1'.*expected:.*got:"):
        tdf.stack_modules(models)


def test_hooks_made_apart_are_alike():
    """Hooks made for each member, functions or objects, are alike."""
    models = [nn.Linear(3, 2) for _ in range(3)]
    for model in models:
        model.register_forward_pre_hook(Plain(1.0).__init__)
        model.register_forward_hook(times(2.0))

    assert tdf.stack_modules(models).batch_size == (3,)


def edited(module, **values):
    """A module with other attributes."""
    for name, value in values.items():
        setattr(module, name, value)
    return module


def make_local():
    """A module of a class that is defined anew."""

    class Net(nn.Module):
        pass

    return Net()


DIFFERENT = {
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2), r"'p' of '1'.*expected: 0\.1.*got:      0\.2"),
    "class": (nn.ReLU(), nn.GELU(), r"'class' of '1'.*activation\.ReLU.*activation\.GELU"),
    "mode": (nn.ReLU(), nn.ReLU().eval(), r"'training' of '1'.*True.*False.*train\(\) or eval\(\)"),
    "absent": (
        nn.Linear(3, 2), nn.Linear(3, 2, bias=False),
        r"'bias' of '1'.*expected: a tensor.*got:      None",
    ),
    "deep": (
        nn.Sequential(nn.Sequential(nn.ELU(1.0))), nn.Sequential(nn.Sequential(nn.ELU(2.0))),
        r"'alpha' of '1\.0\.0'.*1\.0.*2\.0",
    ),
    "order": (
        nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.Tanh())), nn.Sequential(OrderedDict(b=nn.Tanh(), a=nn.ReLU())),
        r"'modules' of '1'.*\['a', 'b'\].*\['b', 'a'\]",
    ),
    "same name": (make_local(), make_local(), r"'class' of '1'.*Net.*Net \(another class\)"),
    "children": (
        nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU()),
        r"'modules' of '1'.*\['0'\].*\['0', '1'\]",
    ),
    "child": (Holds(1), edited(Holds(1), linear=None), r"'modules\.linear' of '1'.*Linear.*None"),
    "no child": (edited(Holds(1), linear=None), Holds(1), r"'modules\.linear' of '1'.*None.*Linear"),
    "attribute": (nn.ReLU(), edited(nn.ReLU(), scale=2.0), r"'scale' of '1'.*no such attribute.*2\.0"),
    "attributes": (edited(nn.ReLU(), one=1), edited(nn.ReLU(), two=1), r"'one' of '1'.*1.*no such attribute"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_modules_that_differ(name):
    """A module of another structure is refused, with the first difference."""
    first, second, message = DIFFERENT[name]

    with pytest.raises(tdf.TreeStructureError, match=f"(?s)member 1 differs from member 0 in {message}"):
        tdf.stack_modules([nn.Sequential(nn.ReLU(), module) for module in (first, second)])


class Reshaped(nn.Module):
    """Its hyperparameters do not show its shape."""

    def __init__(self, *shape, dtype=None, device=None):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (Reshaped(3, 2), r"shape \(3, 2\), torch\.float32 on cpu"),
        (Reshaped(2, 3, dtype=torch.float64), r"shape \(2, 3\), torch\.float64 on cpu"),
        (Reshaped(2, 3, device="meta"), r"shape \(2, 3\), torch\.float32 on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_leaves_that_differ(other, got):
    """A leaf of another shape, dtype or device is named."""
    with pytest.raises(
        tdf.LeafMismatchError, match=rf"(?s)leaf 'w' of member 1.*shape \(2, 3\), torch\.float32 on cpu.*{got}"
    ):
        tdf.stack_modules([Reshaped(2, 3), other])


def test_a_stack_of_stacks():
    """An ensemble of ensembles runs under vmap."""
    trees = [tdf.stack_modules([nn.Linear(3, 2) for _ in range(2)]) for _ in range(3)]
    apply, _, _ = tdf.functional(nn.Linear(3, 2))
    out = torch.vmap(lambda tree: tdf.Ensemble(apply)(tree, torch.ones(5, 3)))(stack(trees))

    assert out.shape == (3, 2, 5, 2)
    assert_close(out[1, 0], apply(trees[1][0], torch.ones(5, 3)))
