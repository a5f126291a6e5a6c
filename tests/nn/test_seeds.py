"""The examples of modules in the documents that tdfunc was written from, in the immutable spelling."""

import torch
from torch import nn

from tdfunc import TensorDict
from tdfunc.nn import TensorDictModule, TensorDictSequential


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
