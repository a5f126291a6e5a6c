# pyright: strict
"""Lines that users write, as pyright and mypy must read them: entries, edits, steps, files and typed trees."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tdfunc.llm import History, Text

td = TensorDict({"a": {"b": torch.zeros(4, 3)}, "s": "text"}, [4])
apply, params, buffers = tdf.functional(nn.Linear(3, 1))
optimizer = tdf.optim.adam(lr=1e-3)


class Sample(TensorClass):
    image: Tensor
    label: Tensor | None = None
    source: str = "camera"


def entries() -> None:
    """An entry may be a tensor, a tree or data."""
    assert_type(td["a"], Any)
    assert_type(td["a", "b"], Any)
    assert_type(td[0], TensorDict)
    assert_type(td[:2, None], TensorDict)
    assert_type(td[torch.tensor([0, 1])], TensorDict)
    for path, value in td.items():
        assert_type(path, str)
        assert_type(value, Any)
    assert_type(td.leaves(), list[Tensor])
    assert_type(td.paths(), list[tuple[str, ...]])
    assert_type(td.batch_size, torch.Size)
    assert_type("a" in td, bool)
    assert_type(len(td), int)


def edits() -> None:
    """An edit returns a tree of the same class."""
    assert_type(td.at["a"].set(torch.zeros(4)), TensorDict)
    assert_type(td.at["a", "b"].add(1.0), TensorDict)
    assert_type(td.at[tdf.Filter("*.b")].mul(2), TensorDict)
    assert_type(td.set("c", torch.zeros(4)), TensorDict)
    assert_type(td.update({"c": torch.zeros(4)}).delete("c"), TensorDict)
    assert_type(td.select("a").exclude("s"), TensorDict)
    assert_type(td.apply(torch.abs), TensorDict)
    assert_type(td.to("cpu").float().detach(), TensorDict)
    assert_type(tdf.partition(td, lambda path, leaf: leaf.is_floating_point()), tuple[TensorDict, TensorDict])
    assert_type(tdf.partition(td, torch.float32), tuple[TensorDict, TensorDict])


def loss(params: TensorDict, x: Tensor) -> Tensor:
    """A loss, as people annotate it."""
    return (apply(params, x) ** 2).mean()


@tdf.jit
def step(params: TensorDict, state: TensorDict, x: Tensor) -> tuple[TensorDict, TensorDict]:
    """A step of training."""
    value, grads = tdf.value_and_grad(loss)(params, x)
    assert_type(value, Tensor)
    return optimizer.update(params, grads, state)


def training() -> None:
    """Functions keep their arguments."""
    x = torch.zeros(2, 3)
    state = optimizer.init(params)
    assert_type(apply, tdf.Apply)
    assert_type(params, TensorDict)
    assert_type(buffers, TensorDict)
    assert_type(optimizer.update(params, params, state), tuple[TensorDict, TensorDict])
    assert_type(step(params, state, x), tuple[TensorDict, TensorDict])
    assert_type(tdf.checkpoint(loss)(params, x), Tensor)
    assert_type(tdf.grad(loss)(params, x), Any)
    # A forward returns anything.
    assert_type(apply(params, x), Any)
    assert_type(tdf.Ensemble(apply)(tdf.init_ensemble(lambda: nn.Linear(3, 1), 2), x), Any)
    assert_type(tdf.metrics.uncertainty(torch.zeros(2, 4, 3), kind="classification"), TensorDict)
    step(params, x=x)  # error: reportCallIssue
    tdf.grad(loss)(params)  # error: reportCallIssue
    tdf.checkpoint(loss)(params, "x")  # error: reportArgumentType


def files() -> None:
    """Files contain trees."""
    tdf.save(params, "params.safetensors")
    assert_type(tdf.load("params.safetensors"), TensorDict)
    assert_type(tdf.load("params.safetensors", like=params, where="*.weight"), TensorDict)
    assert_type(Sample.load("sample.safetensors"), Sample)
    manager = tdf.CheckpointManager("run", keep_last=2)
    assert_type(manager.load(), TensorDict)
    assert_type(manager.latest(), int | None)
    tdf.load(3)  # error: reportArgumentType


def typed_trees() -> None:
    """An editor completes fields, and marks mistakes in a constructor."""
    sample = Sample(torch.zeros(2, 3), source="phone", batch_size=[2])
    assert_type(sample.image, Tensor)
    assert_type(sample.label, Tensor | None)
    assert_type(sample.source, str)
    assert_type(sample[0], Sample)
    assert_type(sample.replace(label=torch.zeros(2)), Sample)
    assert_type(tdf.stack([sample, sample]), Sample)
    assert_type((sample == sample).all(), Any)
    Sample(3)  # error: reportArgumentType
    Sample(torch.zeros(2), colour="red")  # error: reportCallIssue


def texts() -> None:
    """Fields of a batch take a list."""
    history = History(role="user", content=["hi", "hello"], batch_size=[2])
    assert_type(history[0], History)
    assert_type(history.append(history), History)
    assert_type(Text(prompt=["Hello", "Hi"], batch_size=[2]), Text)
    History(role=3)  # error: reportArgumentType
