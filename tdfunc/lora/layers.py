"""Layers with adapters: a layer of a skeleton gets a class that computes `x @ W + (x @ A) @ B * s`.

A layer keeps its weights, hooks and hyperparameters. Its new class is between its own class and torch's, so that a
forward that scales `super().forward(x)` also scales the adapter's part. The leaves of the adapter are parameters called
`weight:A`. A read of `weight` from outside returns poison, so a forward that uses it without the adapter raises.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tdfunc.core.errors import LeafMismatchError, LeakError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.lora.math import factors, gain
from tdfunc.modules.poison import Poison

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


class Setting(NamedTuple):
    """The use of the adapter of one weight in a layer."""

    path: Path
    names: tuple[str, ...]
    scale: float
    dropout: float
    rows: bool


# Any: the function of torch that reads the poison.
def _pass_by(path: Path, func: Any) -> NoReturn:
    raise LeakError(
        f"lora: forward uses the weight {dotted(path)!r} without its adapter ({func}).",
        expected="a call of the layer",
        got="a read of its weight by another module, as nn.MultiheadAttention reads out_proj",
        hint="leave this weight out of `where`.",
    )


# Any: a layer of a class that is made at run time.
def _weight(self: Any, name: str) -> Any:
    """Return the poison that outsiders read in the place of a weight."""
    return Poison.of(self._parameters[name], self._lora[name].path, _pass_by)


@functools.cache
def layer_class(cls: type[Any]) -> type[Any]:
    """Return the class of a layer with an adapter."""
    # transformers' `Conv1D` is known by its name, because transformers is optional.
    base = next(b for b in cls.__mro__ if b in _MIXINS or b.__name__ == "Conv1D")
    mixin = _MIXINS.get(base, _Transposed)
    core = type(f"Lora{base.__name__}", (mixin, base), {"weight": property(lambda self: _weight(self, "weight"))})
    if cls is base:
        return core
    return type(cls.__name__, (cls, core), {})


class Adapted(_Module):
    """A layer with adapters, and their settings by the name of the weight."""

    _lora: dict[str, Setting]


class _Layer(Adapted):
    """The part that all layers have; `_run` is the layer with a given weight, `_low` multiplies by the factors."""

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _low(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        raise NotImplementedError

    def _by_channel(self, values: Tensor) -> Tensor:
        """Return values of the outputs in a shape that broadcasts with a result."""
        return values

    def forward(self, input: Tensor) -> Tensor:
        setting = self._lora["weight"]
        parts: dict[str, Any] = {name: self._parameters[f"weight:{name}"] for name in setting.names}
        dropped = input
        if setting.dropout and self.training and input.is_floating_point():
            dropped = F.dropout(input, setting.dropout)
        if not setting.rows:
            return self._adapted(input, dropped, parts)
        check_rows(setting.path, input, parts["A"])
        return torch.vmap(self._adapted, randomness="different")(input, dropped, parts)

    def _adapted(self, x: Tensor, dropped: Tensor, parts: dict[str, Tensor]) -> Tensor:
        weight: Any = self._parameters["weight"]
        scale = self._lora["weight"].scale
        out = self._run(x, weight, self._parameters.get("bias"))
        a, b = factors(parts)
        # Factors and inputs meet in the wider dtype of the two.
        wide = torch.promote_types(a.dtype, out.dtype)
        inputs = dropped.to(wide) if dropped.is_floating_point() else dropped
        low = self._low(inputs, a.to(wide), b.to(wide), scale)
        if "bias" in parts:
            bias = parts["bias"].to(torch.promote_types(parts["bias"].dtype, wide))
            low = low + self._by_channel(bias) * scale
        if "magnitude" in parts:
            c = self._by_channel(gain(weight, parts, scale))
            low = c * low + (c - 1) * self._product(dropped, weight)
        return self._sum(x, out, low)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of inputs and a weight, in the part of the adapter."""
        return self._run(x, weight, None)

    def _sum(self, x: Tensor, out: Tensor, low: Tensor) -> Tensor:
        """Return the result of the layer: the weight's part and the adapter's, in the dtype of the weight's."""
        return (out + low).to(out.dtype)


class _Linear(_Layer):
    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _low(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return F.linear(F.linear(x, a) * scale, b)


class _Transposed(_Layer):
    # transformers names the input so.
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.mT, bias)

    def _low(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return (x @ b * scale) @ a


class _Embedding(_Layer):
    """A table whose rows are looked up changed: what torch does to a row is done to the changed row."""

    num_embeddings: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Without `max_norm`: the bound holds for the changed rows.
        return F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse)

    def _low(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return F.embedding(x, b) * scale @ a

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(x, weight)

    def _sum(self, x: Tensor, out: Tensor, low: Tensor) -> Tensor:
        # The gradient of a row of the table is divided by its count, and the gradient of the row of pads is zero.
        if self.scale_grad_by_freq:
            low = _with_gradient(low, low / _counts(x, self.num_embeddings))
        if self.padding_idx is not None:
            low = torch.where((x == self.padding_idx)[..., None], low.detach(), low)
        out = super()._sum(x, out, low)
        if self.max_norm is None:
            return out
        # As torch.embedding_renorm_, through which no gradient flows.
        rows = out.detach()
        norm = torch.linalg.vector_norm(rows, self.norm_type, dim=-1, keepdim=True)
        bounded = rows * (self.max_norm / (norm + 1e-7))
        return _with_gradient(torch.where(norm > self.max_norm, bounded, rows), out)


def _with_gradient(value: Tensor, source: Tensor) -> Tensor:
    """Return a value with the gradient of another tensor."""
    return value.detach() + (source - source.detach())


def _counts(ids: Tensor, size: int) -> Tensor:
    """Return for each id the number of times that it occurs among them, with a last dimension of 1."""
    flat = ids.flatten()
    counts = torch.zeros(size, dtype=flat.dtype, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    return counts[ids][..., None]


class _Conv(_Layer):
    groups: int
    kernel_size: tuple[int, ...]
    _conv_forward: Callable[..., Tensor]

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def _low(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        groups = self.groups
        if groups > 1:
            # Each group of channels has the same A.
            a = a.repeat(groups, *[1] * (a.ndim - 1))
        inner = self._conv_forward(x, a, None) * scale
        size = inner.shape[-len(self.kernel_size) :]
        inner = inner.flatten(-len(size)).unflatten(-2, (groups, -1))
        out = b.unflatten(0, (groups, -1)) @ inner
        return out.flatten(-3, -2).unflatten(-1, size)

    def _by_channel(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * len(self.kernel_size))


_MIXINS: dict[Any, type[_Layer]] = {
    nn.Linear: _Linear, nn.Embedding: _Embedding, nn.Conv1d: _Conv, nn.Conv2d: _Conv, nn.Conv3d: _Conv,
}  # fmt: skip


def check_rows(path: Path, x: Tensor, a: Tensor) -> None:
    """Raise unless the first dimension of a layer's input has the rows of the adapters."""
    if x.shape[:1] != a.shape[:1]:
        raise LeafMismatchError(
            f"lora: the input of {dotted(path[:-1])!r} does not have a row for each adapter.",
            expected=f"{a.shape[0]} rows, in the first dimension",
            got=f"shape {tuple(x.shape)}",
            hint="stack an adapter for each row, many[which]; a model that folds the batch into another dimension "
            "runs by torch.vmap instead.",
        )
