"""The examples of modules in the documents that tdfunc was written from, in the immutable spelling."""

import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential


def two_outputs():
    """The module of two outputs that the examples begin with, and its input."""
    module = TensorDictModule(lambda x, y: (x + 2, y + 2), in_keys=["a", "b"], out_keys=["c", "d"])
    return module, TensorDict({"a": torch.zeros(()), "b": torch.ones(())}, [])


def two_steps():
    """The sequence of the examples."""
    return TensorDictSequential(
        TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=["y"]),
        TensorDictModule(lambda x: x + 1, in_keys=["y"], out_keys=["z"]),
    )


def test_a_training_loop_of_trees():
    """The model and the loss read trees and return trees; torch's optimizer learns."""
    inputs = torch.randn(20, 8, 3)
    dataset = TensorDict({"x": inputs, "y": inputs @ torch.tensor([[1.0], [-2.0], [0.5]])}, [20, 8])
    model = TensorDictModule(nn.Linear(3, 1), in_keys=["x"], out_keys=["prediction"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def loss_module(data):
        return torch.nn.functional.mse_loss(data["prediction"], data["y"])

    losses = []
    for data in dataset:
        data = model(data)
        loss = loss_module(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < 0.05 * losses[0]


def test_select_out_keys():
    """Only the selected output is in the result, also of a call with values."""
    mod, td = two_outputs()
    assert mod(td).paths() == [("a",), ("b",), ("c",), ("d",)]
    mod = mod.select_out_keys("d")

    assert mod(td).paths() == [("a",), ("b",), ("d",)]
    assert mod(torch.zeros(()), torch.ones(())) == 3
    assert mod.out_keys_source == ["c", "d"]


def test_reset_out_keys():
    """The reset module writes all outputs again."""
    mod, td = two_outputs()
    mod = mod.select_out_keys("d")
    mod = mod.reset_out_keys()

    assert mod(td).paths() == [("a",), ("b",), ("c",), ("d",)]
    assert mod.out_keys == ["c", "d"]


def test_select_out_keys_of_a_sequence():
    """Intermediate results are not in the result."""
    seq, td = two_steps(), TensorDict({"x": torch.zeros(())}, [])

    assert seq(td).paths() == [("x",), ("y",), ("z",)]
    seq = seq.select_out_keys("z")
    assert seq(td).paths() == [("x",), ("z",)]
    assert seq(td)["z"] == 2


def test_reset_parameters_of_the_module():
    """Without a tree the module's parameters are new."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    old_param = net[0].weight.clone()
    module = TensorDictModule(net, in_keys=["bork"], out_keys=["dork"])
    module.reset_parameters_recursive()

    assert not (old_param == net[0].weight).any()


def test_reset_parameters_of_a_tree():
    """Given a tree, new parameters are returned, and the old ones stay."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    module = TensorDictModule(net, in_keys=["bork"], out_keys=["dork"])
    params = TensorDict.from_module(module)
    old_params = params.clone(recurse=True)
    new_params = module.reset_parameters_recursive(params)

    assert not (old_params == new_params).any()
    assert (old_params == params).all()
    assert (tdf.from_module(module) == params).all()


def test_is_tdmodule_compatible():
    """A module is compatible by its keys."""
    assert TensorDictModuleBase.is_tdmodule_compatible(two_steps())
    assert TensorDictModule.is_tdmodule_compatible(two_outputs()[0])
    assert not TensorDictModuleBase.is_tdmodule_compatible(nn.Linear(1, 1))


def test_methods_of_torch():
    """Casts, modes, state dicts and applied functions are torch's own."""
    seq = TensorDictSequential(TensorDictModule(nn.Linear(2, 2), ["x"], ["y"]))
    seen = []

    assert seq.apply(seen.append) is seq
    assert len(seen) == 4
    assert seq.double().get_parameter("module.0.module.weight").dtype == torch.float64
    assert not seq.eval().module[0].module.training
    assert seq.requires_grad_(False)(TensorDict({"x": torch.ones(2).double()}))["y"].grad_fn is None
    assert [name for name, _ in seq.named_children()] == ["module"]
