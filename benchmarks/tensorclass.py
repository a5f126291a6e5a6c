"""Typed trees: against tensordict's, and against frozen dataclasses whose `__post_init__` makes the same checks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensordict
import torch
from torch import Size, Tensor

from benchmarks.rows import Case, Row, Suite
from tdfunc import TensorClass

BATCH, READS = 32, 100
OTHER, CHECKED, DEFAULT, BARE = "tensordict", "checked dataclass", "without tensor_only", "bare property"


class Ours(TensorClass):
    image: Tensor
    label: Tensor
    weight: Tensor
    index: Tensor


class OursOnly(TensorClass["tensor_only"]):
    image: Tensor
    label: Tensor
    weight: Tensor
    index: Tensor


class Theirs(tensordict.TensorClass):
    image: Tensor
    label: Tensor
    weight: Tensor
    index: Tensor


class TheirsOnly(tensordict.TensorClass["tensor_only"]):
    image: Tensor
    label: Tensor
    weight: Tensor
    index: Tensor


@dataclasses.dataclass(frozen=True)
class Checked:
    """What someone would write by hand: each field a tensor (or something to convert) that starts with the batch."""

    image: Tensor
    label: Tensor
    weight: Tensor
    index: Tensor
    batch_size: Size = Size(())
    device: torch.device | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self):
        size = self.batch_size
        ndim = len(size)
        for name in ("image", "label", "weight", "index"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(name)
            if value.shape[:ndim] != size:
                raise ValueError(name)


class Bare:
    """A property over a dict, and nothing more."""

    __slots__ = ("_data",)

    def __init__(self, data: dict[str, Tensor]):
        self._data = data

    @property
    def label(self) -> Tensor:
        return self._data["label"]


def typed_ways() -> dict[str, dict[str, Callable[[], Any]]]:
    image, label, weight, index = (torch.randn(BATCH, 8) for _ in range(4))
    size, rows = Size([BATCH]), torch.randint(0, BATCH, (16,))
    classes = {"tdfunc": Ours, OTHER: Theirs, CHECKED: Checked}
    made = {name: cls(image, label, weight, index, batch_size=size) for name, cls in classes.items()}
    only = {
        "tdfunc": OursOnly(image, label, weight, index, batch_size=size),
        OTHER: TheirsOnly(image, label, weight, index, batch_size=size),
    }
    a, b = made["tdfunc"], made[OTHER]
    return {
        "construct": {name: _make(cls, image, label, weight, index, size) for name, cls in classes.items()},
        "read": {name: _read(tree) for name, tree in made.items()} | {BARE: _read(Bare({"label": label}))},
        "read, tensor_only": {name: _read(tree) for name, tree in only.items()} | {DEFAULT: _read(a)},
        "replace": {"tdfunc": lambda: a.replace(label=weight), OTHER: lambda: b.replace(label=weight)},
        "index": {"tdfunc": lambda: a[rows], OTHER: lambda: b[rows]},
        "stack": {"tdfunc": lambda: torch.stack([a, a, a, a]), OTHER: lambda: torch.stack([b, b, b, b])},
    }


def _make(cls: Any, image: Tensor, label: Tensor, weight: Tensor, index: Tensor, size: Size) -> Callable[[], Any]:
    return lambda: cls(image, label, weight, index, batch_size=size)


def _read(tree: Any) -> Callable[[], Any]:
    # Many reads in one call: one is not much longer than the call.
    def read() -> None:
        for _ in range(READS // 10):
            tree.label, tree.label, tree.label, tree.label, tree.label  # noqa: B018
            tree.label, tree.label, tree.label, tree.label, tree.label  # noqa: B018

    return read


def typed_cases() -> list[Case]:
    ways = typed_ways()
    return [Case(what, each, READS if what.startswith("read") else 1) for what, each in ways.items()]


SUITE = Suite(
    "tensorclass",
    "Typed trees",
    "The instances have four fields of shape (32, 8) and batch size [32]. A read is one of 100 reads in a loop.",
    typed_cases,
    (
        Row("construct a TensorClass", CHECKED, 1.5, "at most", ("construct",)),
        Row("construct a TensorClass", OTHER, 4, "faster", ("construct",)),
        Row("read a field", OTHER, 6, "faster", ("read",)),
        Row("read a field", BARE, 1.4, "at most", ("read",), why="a read checks for absent fields and non-tensor data"),
        Row("read a field, tensor_only", DEFAULT, 1, "faster", ("read, tensor_only",)),
        Row("replace, index, stack of a TensorClass", OTHER, 1.8, "faster", ("replace", "index", "stack"), "mean"),
    ),
    (typed_ways, Bare),
)
