"""`torch.fx.symbolic_trace` of modules of trees: the graph module computes the tree that the module does."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal
from torch.fx import symbolic_trace
from torch.fx.experimental.optimization import fuse

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tdfunc.nn import (
    EnsembleModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorClassModuleBase,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)


class Shift(TensorDictModuleBase):
    """A module of a user."""

    in_keys = ["x"]
    out_keys = ["a", "b"]

    @dispatch
    def forward(self, tensordict):
        return tensordict.update({"a": tensordict["x"] + 1, "b": tensordict["x"] + 2})


class Returns(nn.Module):
    """A module that fx does not enter, with a result of a kind."""

    __module__ = "torch.nn.of_a_test"

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Point(TensorClass):
    x: torch.Tensor


class Length(TensorClassModuleBase[Point, Point]):
    def forward(self, point):
        return Point(point.x.norm(dim=-1, keepdim=True), batch_size=point.batch_size)


def linear(out_key="y"):
    """A layer with weights."""
    return TensorDictModule(nn.Linear(3, 3), ["x"], [out_key])


def normal():
    """A distribution that is drawn from."""
    return ProbabilisticTensorDictModule(["loc", "scale"], ["s"], distribution_class=Normal, return_log_prob=True)


def parameters():
    """Its parameters."""
    return TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"])


def ensemble():
    """Four members in one module."""
    apply, _, _ = tdf.functional(nn.Linear(3, 2))
    return EnsembleModule(apply, tdf.init_ensemble(lambda: nn.Linear(3, 2), 4))


MODULES = {
    "a layer": linear,
    "nested keys": lambda: linear(("n", "y")),
    "keyword arguments": lambda: TensorDictModule(lambda *, a, b: a * b, {"a": "x", "b": "w"}, "y"),
    "an output that is discarded": lambda: TensorDictModule(lambda x: (x, x.sin()), ["x"], ["_", "y"]),
    "a tuple of a layer": lambda: TensorDictModule(Returns(lambda x: (x, x * 2)), ["x"], ["y", "z"]),
    "a dict of a layer": lambda: TensorDictModule(Returns(lambda x: {"z": x, "y": x * 2}), ["x"], ["y", "z"]),
    "a module of a user": Shift,
    "a sequence": lambda: TensorDictSequential(linear(), TensorDictModule(torch.relu, ["y"], ["z"])),
    "a sequence in a sequence": lambda: TensorDictSequential(TensorDictSequential(linear(), Shift()), linear("z")),
    "selected outputs": lambda: TensorDictSequential(linear(), linear("z")).select_out_keys("z"),
    "selected outputs of a part": lambda: TensorDictSequential(Shift().select_out_keys("b"), linear()),
    "selected outputs of a user's": lambda: Shift().select_out_keys("b"),
    "a distribution": lambda: TensorDictSequential(parameters(), normal()),
    "a sequence with a distribution": lambda: ProbabilisticTensorDictSequential(parameters(), normal()),
    "an ensemble": lambda: TensorDictModule(ensemble(), ["x"], ["y"]),
    "a part that may be left out": lambda: TensorDictSequential(
        linear(), TensorDictSequential(TensorDictModule(torch.sin, "missing", "z"), partial_tolerant=True)
    ),
}  # fmt: skip


def data():
    """A new tree with all that modules read, and more."""
    return TensorDict({"x": torch.randn(5, 3), "w": torch.randn(5, 3), "kept": 3})


def seeded(module, tree):
    """The result with the same draws."""
    torch.manual_seed(0)
    return module(tree)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_the_tree_of_the_module(make):
    """The graph module returns the tree that the module returns, on data that it was not traced with."""
    module = make()
    tree = data()

    tdf.assert_close(seeded(symbolic_trace(module), tree), seeded(module, tree))


@pytest.mark.parametrize("make", [linear, MODULES["a sequence in a sequence"], MODULES["a distribution"]])
def test_a_pickle(make):
    """A graph module is pickled as those of torch are."""
    tree = data()
    traced = symbolic_trace(make())

    tdf.assert_close(seeded(pickle.loads(pickle.dumps(traced)), tree), seeded(traced, tree))


@st.composite
def chains(draw):
    """Numbers of keys for each step: what it reads and where it writes."""
    keys = st.integers(0, 4)
    return draw(st.lists(st.tuples(keys, keys, keys), min_size=1, max_size=6))


@given(chain=chains(), lead=st.integers(0, 3))
def test_any_sequence(chain, lead):
    """Steps that read and overwrite each other's keys give the same tree, for any batch size."""
    names = ["a", ("n", "b"), ("n", "c"), "d", ("n", "m", "e")]
    sequence = TensorDictSequential(
        *[
            TensorDictModule(lambda x, y, by=i: (x.sin() + y * (by + 1), x), [names[a], names[b]], [names[c], "last"])
            for i, (a, b, c) in enumerate(chain)
        ]
    )
    tree = TensorDict({}, [2] * lead)
    for name in names:
        tree = tree.set(name, torch.randn(*[2] * lead, 3))

    tdf.assert_close(symbolic_trace(sequence)(tree), sequence(tree))


def test_it_has_one_argument():
    """The graph takes the tree alone: options of forward have no place in it."""
    traced = symbolic_trace(TensorDictSequential(linear()))

    assert [node.name for node in traced.graph.find_nodes(op="placeholder")] == ["tensordict"]
    with pytest.raises(TypeError, match="interaction_type"):
        traced(data(), interaction_type="mean")


def test_layers_are_nodes():
    """Layers keep their names, so that passes over the graph find them."""
    traced = symbolic_trace(TensorDictSequential(linear(), TensorDictModule(nn.ReLU(), ["y"], ["z"])))

    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["module.0.module", "module.1.module"]


def test_a_pass_of_torch():
    """The fusion of BatchNorm in torch runs on it."""
    layers = [nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)]
    module = TensorDictSequential(
        TensorDictModule(nn.Sequential(*layers), ["x"], ["y"]), TensorDictModule(torch.relu, ["y"], ["z"])
    )
    with torch.no_grad():
        layers[1](torch.randn(20, 4, 6))
    module.eval()
    fused = fuse(symbolic_trace(module))
    tree = TensorDict({"x": torch.randn(2, 3, 6)}, [2])

    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in fused.modules())
    tdf.assert_close(fused(tree), module(tree), atol=1e-5, rtol=1e-5)


def test_a_pure_function_of_it():
    """`functional` takes a graph module, also under `vmap` of gradients."""
    module = TensorDictSequential(linear(), TensorDictModule(torch.tanh, ["y"], ["z"]))
    tree = data().exclude("kept")
    found = []
    for each in (symbolic_trace(module), module):
        apply, params, _ = tdf.functional(each)
        many = tdf.stack([params, params * 2])
        found.append(torch.vmap(tdf.grad(lambda p, apply=apply: apply(p, tree)["z"].sum()))(many))

    torch.testing.assert_close(*[tdf.ravel(each)[0] for each in found])


def test_typed_modules():
    """A module of typed trees is one node."""
    typed = Length().as_td_module()
    module = TensorDictSequential(typed, TensorDictModule(torch.sin, ["x"], ["y"]))
    tree = TensorDict({"x": torch.randn(5, 3)}, [5])

    tdf.assert_close(symbolic_trace(module)(tree), module(tree))


ALONE = {"distribution": normal, "tolerant": lambda: TensorDictSequential(linear(), partial_tolerant=True)}


@pytest.mark.parametrize("make", ALONE.values(), ids=ALONE)
def test_modules_that_decide_by_values(make):
    """By itself such a module has no graph; the message says where it may be."""
    with pytest.raises(tdf.UnsupportedError, match="(?s)symbolic_trace: .*decides.*expected.*TensorDictSequential"):
        symbolic_trace(make())


def test_errors_of_a_graph():
    """A missing key, and too few outputs, are found when the graph runs."""
    traced = symbolic_trace(linear())
    short = symbolic_trace(TensorDictModule(Returns(lambda x: (x,)), ["x"], ["y", "z"]))

    with pytest.raises(tdf.MissingKeyError, match="'x'"):
        traced(TensorDict({"y": torch.zeros(3)}))
    with pytest.raises(tdf.TreeStructureError, match="1 values for 2 out keys"):
        short(data())
