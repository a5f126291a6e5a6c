# pyright: strict
"""Lines of the guides as a type checker must read them: data sets, stacks, and steps of a run."""

from typing import Any, assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict


class Batch(TensorClass):
    x: torch.Tensor


tree = TensorDict({"x": torch.zeros(8, 3)}, [8])
batch = Batch(torch.zeros(8, 3), batch_size=[8])
apply, params, buffers = tdf.functional(nn.Linear(3, 1))


def load_batches() -> None:
    """A tree is a data set."""
    for rows in DataLoader(tree, batch_size=4, shuffle=True, collate_fn=tdf.collate):
        print(apply(params, rows["x"]))
    loader = DataLoader(batch, batch_size=4)
    data: Dataset[Any] = tree
    print(loader, data)


def stack_trees() -> None:
    """Functions of trees keep the class."""
    assert_type(tdf.stack([tree, tree]), TensorDict)
    assert_type(tdf.cat([tree, tree]), TensorDict)
    assert_type(tdf.stack([batch, batch]), Batch)
    assert_type(tree + tree, TensorDict)
    assert_type(params * 2, TensorDict)
    torch.stack([tree, tree])  # error: reportArgumentType


def resume() -> None:
    """The latest step may be None."""
    manager = tdf.CheckpointManager("run", keep_last=2)
    latest = manager.latest()
    assert_type(latest, int | None)
    start = 0 if latest is None else latest + 1
    manager.save(start, {"params": params}, metadata={"loss": 0.5})
    assert_type(manager.load(), TensorDict)
    number: int = manager.latest()  # error: reportAssignmentType
    print(number)


def picture() -> None:
    """Pictures are axes of matplotlib."""
    axes = tdf.plots.training_curve({"loss": torch.zeros(10, 4)})
    print(axes)
    hyper = tdf.sweep.grid(lr=[0.1, 0.01])
    assert_type(tdf.sweep.best(hyper, torch.zeros(2)), TensorDict)


def trees_of_jax() -> None:
    """A pytree becomes a tree."""
    assert_type(tdf.from_jax({}), TensorDict)
