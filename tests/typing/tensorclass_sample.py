"""Typed trees as a type checker must read them; test_typing.py reads the expected errors from the comments."""

from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar, assert_type

import torch
from torch import Tensor

from tdfunc._tensorclass import TensorClass, tensorclass
from tdfunc._tensordict import TensorDict
from tdfunc.ops.batch.join import stack
from tdfunc.storage.api import load
from tdfunc.storage.manager.manager import CheckpointManager

T = TypeVar("T")


class Inner(TensorClass):
    y: Tensor


class Batch(TensorClass):
    image: Tensor
    label: Tensor | None = None
    note: str = "plain"
    inner: Inner = field(default_factory=lambda: Inner(torch.zeros(1)))
    late: int = field(default=0, kw_only=True)
    unit: ClassVar[str] = "m"

    def __post_init__(self) -> "Batch":
        return self.replace(note="checked")

    def first(self) -> Tensor:
        return self.image[0]


class Options(TensorClass, nocast=True):
    count: int


class Bracketed(TensorClass["autocast"]):
    count: int


@tensorclass
class Decorated:
    x: Tensor


class Box(TensorClass, Generic[T]):
    value: T


x = torch.zeros(2, 3)
inner = Inner(x, batch_size=[2])
batch = Batch(x, x, "note", inner, batch_size=[2], device="cpu", names=["row"], late=1)
assert_type(batch, Batch)
assert_type(batch.image, Tensor)
assert_type(batch.label, Tensor | None)
assert_type(batch.note, str)
assert_type(batch.inner.y, Tensor)
assert_type(batch.first(), Tensor)
assert_type(batch.unit, str)
assert_type(batch.replace(note="other"), Batch)
assert_type(Batch.from_tensordict(batch.to_tensordict()), Batch)
assert_type(batch.batch_size, torch.Size)
assert_type(batch.device, torch.device | None)
assert_type(batch.names, list[str | None])
assert_type(Options(1, batch_size=2).count, int)
assert_type(Bracketed(count=1, batch_size=()).count, int)
assert_type(Box(3).value, int)
assert_type(Box[str]("a").value, str)
# Operations keep the class.
assert_type(batch.reshape(-1).unsqueeze(0).permute(1, 0), Batch)
assert_type(batch.to("cpu").clone().detach().float(), Batch)
assert_type(batch[0], Batch)
assert_type(batch[:1, None], Batch)
assert_type(batch[..., [0, 1]], Batch)
assert_type(batch[batch.image.sum(-1) > 0], Batch)
assert_type(batch[torch.tensor([0])].image, Tensor)
assert_type(batch["image"], Any)
assert_type(batch["inner", "y"], Any)
assert_type(batch.split(1), tuple[Batch, ...])
assert_type(batch.unbind()[0], Batch)
assert_type([row.image for row in batch], list[Tensor])
assert_type(batch + 1, Batch)
assert_type(2 * batch.exp(), Batch)
assert_type(batch.apply(torch.abs), Batch)
assert_type(batch.set("image", x).update({"image": x}), Batch)
assert_type(batch.new_zeros(4), Batch)
assert_type(batch.cumsum(0), Batch)
assert_type(batch.where(torch.tensor(True), batch), Batch)
assert_type(stack([batch, batch]), Batch)
assert_type(TensorDict({"a": x}, [2]).flip(0)[0], TensorDict)
# A checker cannot infer that a decorator adds a base class, so it is given no type.
assert_type(Decorated(x, batch_size=[2]).x, Any)


def loaded() -> None:
    """Trees out of files."""
    assert_type(load("batch.safetensors"), TensorDict)
    assert_type(CheckpointManager("run").load(), TensorDict)
    assert_type(Batch.load("batch.safetensors"), Batch)
    assert_type(batch.load_("batch.safetensors"), Batch)
    assert_type(TensorDict.load_memmap("batch", mode="r+"), TensorDict)


def refused() -> None:
    """Mistakes that an editor marks."""
    Batch()  # error: reportCallIssue
    Batch(x, colour=1)  # error: reportCallIssue
    Batch("text")  # error: reportArgumentType
    Batch(x, x, "note", inner, 1)  # error: reportCallIssue
    Batch(x, batch_size="two")  # error: reportArgumentType
    batch.image = x  # error: reportAttributeAccessIssue
    batch.batch_size = [3]  # error: reportAttributeAccessIssue
    print(batch.colour)  # error: reportAttributeAccessIssue
