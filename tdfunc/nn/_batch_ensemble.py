"""Ensembles whose members share their weights and differ by vectors: BatchEnsemble and TabM.

A member's weight is W * outer(scale_out, scale_in). It is never made: inputs and outputs are scaled instead, so a layer
costs one matrix product for all members. E is the number of members, B the batch (any dimensions).
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tdfunc import random
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, as_count, brief, error
from tdfunc.core.keys import Filter
from tdfunc.core.types import Path
from tdfunc.modules.functional import functional
from tdfunc.nn.ensemble import EnsembleModule
from tdfunc.ops.base.reading import get, iter_items
from tdfunc.ops.edits import maps
from tdfunc.ops.edits.structure import combine, partition
from tdfunc.random.draws import KeyLike, key_of

Init: TypeAlias = Literal["signs", "normal", "ones"]
Size2: TypeAlias = "int | tuple[int, int]"
_INITS = ("signs", "normal", "ones")


class BatchEnsembleLinear(nn.Module):
    """A linear layer for all members, who share the weight; each member has its own scales and bias.

    Args:
        in_features: The size of an input.
        out_features: The size of an output.
        members: E; None makes the layer of one member, whose scales have no member dimension.
        bias: Add a bias, which is equal for all members at first.
        init: The first values of the scales: `signs`, 1 or -1 at random; `normal`, around 1 with a deviation of 0.5;
            or `ones`. BatchEnsemble uses the first two. A pair has one for the inputs and one for the outputs; TabM
            uses ("signs", "ones") in its first layer and `ones` in the others.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Shapes:
        (E, *B, in_features) becomes (E, *B, out_features); an input (1, *B, in_features) is the same for all members.
        The layer of one member takes (*B, in_features).

    Raises:
        ValueError: `init` names no initialisation, or `members` is below 1.

    Source:
        Wen et al., "BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning" (2020);
        Gorishniy et al., "TabM: advancing tabular deep learning with parameter-efficient ensembling" (2024).

    Examples:
        >>> layer = BatchEnsembleLinear(3, 2, members=4)
        >>> layer(torch.zeros(1, 5, 3)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([4, 5, 2]), 34)
    """

    scale_in: nn.Parameter
    scale_out: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        members: int | None,
        *,
        bias: bool = True,
        init: Init | tuple[Init, Init] = "signs",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.members = members
        plain = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight: Tensor = plain.weight
        self.scale_in, self.scale_out, self.bias = _vectors(
            self.weight, members, (in_features, out_features), plain.bias, init
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' outputs."""
        _check_members(self, x, 2)
        out = F.linear(x * _spread(self.scale_in, x, 1), self.weight)
        out = out * _spread(self.scale_out, out, 1)
        if self.bias is None:
            return out
        return out + _spread(self.bias, out, 1)

    def extra_repr(self) -> str:
        """Return the sizes, for the repr."""
        return f"{self.in_features}, {self.out_features}, members={self.members}, bias={self.bias is not None}"


class BatchEnsembleConv2d(nn.Module):
    """A convolution for all members, who share the kernel; each member has its own scales and biases of the channels.

    Args:
        in_channels: The channels of an input.
        out_channels: The channels of an output.
        kernel_size: The size of the kernel, as in `nn.Conv2d`.
        members: E, or None, as in `BatchEnsembleLinear`.
        stride: The stride of the kernel.
        padding: The width of the zeros around an input.
        dilation: The dilation of the kernel.
        groups: The number of groups of channels.
        bias: Add a bias.
        init: The first values of the scales, as in `BatchEnsembleLinear`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Shapes:
        (E, B, in_channels, H, W) becomes (E, B, out_channels, H', W'); an input of shape (1, ...) is the same for all
        members. The layer of one member takes (B, in_channels, H, W).

    Examples:
        >>> layer = BatchEnsembleConv2d(3, 8, 3, members=4, padding=1)
        >>> layer(torch.zeros(1, 5, 3, 6, 6)).shape
        torch.Size([4, 5, 8, 6, 6])
    """

    scale_in: nn.Parameter
    scale_out: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size2,
        members: int | None,
        *,
        stride: Size2 = 1,
        padding: "Size2 | str" = 0,
        dilation: Size2 = 1,
        groups: int = 1,
        bias: bool = True,
        init: Init | tuple[Init, Init] = "signs",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.members = members
        # Any: torch's own options, passed on.
        self.options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        plain = nn.Conv2d(in_channels, out_channels, kernel_size, bias=bias, device=device, dtype=dtype, **self.options)
        self.weight: Tensor = plain.weight
        self.scale_in, self.scale_out, self.bias = _vectors(
            self.weight, members, (in_channels, out_channels), plain.bias, init
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' outputs."""
        _check_members(self, x, 5)
        scaled = x * _spread(self.scale_in, x, 3)
        lead = scaled.shape[:-3]
        out = F.conv2d(scaled.reshape(lead.numel(), *scaled.shape[-3:]), self.weight, **self.options)
        out = out.reshape(*lead, *out.shape[1:])
        out = out * _spread(self.scale_out, out, 3)
        if self.bias is None:
            return out
        return out + _spread(self.bias, out, 3)

    def extra_repr(self) -> str:
        """Return the sizes, for the repr."""
        return f"{self.scale_in.shape[-1]}, {self.scale_out.shape[-1]}, members={self.members}, {self.options}"


class EnsembleLinear(nn.Module):
    """A linear layer for each member, such as the heads of TabM.

    Args:
        in_features: The size of an input.
        out_features: The size of an output.
        members: E.
        bias: Add a bias.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Shapes:
        (E, *B, in_features) becomes (E, *B, out_features); an input (1, *B, in_features) is the same for all members.

    Examples:
        >>> EnsembleLinear(3, 2, 4)(torch.zeros(4, 5, 3)).shape
        torch.Size([4, 5, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        members: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.members = members
        bound = 1 / math.sqrt(max(in_features, 1))
        weight = torch.empty(members, out_features, in_features, device=device, dtype=dtype)
        self.weight: nn.Parameter = nn.Parameter(nn.init.uniform_(weight, -bound, bound))
        self.bias: nn.Parameter | None = (
            nn.Parameter(nn.init.uniform_(weight.new_empty(members, out_features), -bound, bound)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' outputs."""
        _check_members(self, x, 2)
        out = torch.einsum("e...i,eoi->e...o", x, self.weight)
        if self.bias is None:
            return out
        return out + _spread(self.bias, out, 1)

    def extra_repr(self) -> str:
        """Return the sizes, for the repr."""
        return f"{self.weight.shape[-1]}, {self.weight.shape[-2]}, members={self.members}, bias={self.bias is not None}"


class TabM(nn.Module):
    """A perceptron for tables with E members in one: they share weights, and each has its own scales and head.

    Train with the mean of the members' losses, and predict with the mean of their probabilities or values.

    Args:
        in_features: The features of an example.
        out_features: The logits or values of a prediction.
        members: E.
        hidden_layer_sizes: The sizes of the hidden layers.
        dropout: The probability of dropout; each member has its own masks.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Shapes:
        (*B, in_features) becomes (E, *B, out_features).

    Source:
        Gorishniy et al., "TabM" (2024): the scales of the first layer's inputs begin as random signs, all others as 1.

    Examples:
        >>> model = TabM(10, 3, members=8, hidden_layer_sizes=(64,))
        >>> logits = model(torch.zeros(5, 10))
        >>> logits.shape
        torch.Size([8, 5, 3])
        >>> tdf.metrics.uncertainty(logits, "classification").batch_size
        torch.Size([5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        members: int = 32,
        *,
        hidden_layer_sizes: Sequence[int] = (512, 512, 512),
        dropout: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden_layer_sizes]
        layers: list[nn.Module] = []
        for i, (below, above) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            init: Any = "ones" if i else ("signs", "ones")
            layers += [
                BatchEnsembleLinear(below, above, members, init=init, device=device, dtype=dtype),
                nn.ReLU(),
                nn.Dropout(dropout),
            ]
        self.body: nn.Sequential = nn.Sequential(*layers)
        self.heads: EnsembleLinear = EnsembleLinear(sizes[-1], out_features, members, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' outputs."""
        return self.heads(self.body(x.unsqueeze(0)))


def batch_ensemble(
    model: nn.Module, members: int, key: KeyLike, *, init: Init | tuple[Init, Init] = "signs"
) -> EnsembleModule:
    """Return the BatchEnsemble of a model: members that share its weights and differ by vectors.

    Each `nn.Linear` and `nn.Conv2d` gets scales and a bias for each member; the bias begins as the model's. Members
    share the other parameters, and each has its own buffers, such as the statistics of BatchNorm. All parameters
    train, including frozen parameters of the model.

    Args:
        model: Any module, new or trained, which stays as it is.
        members: E.
        key: A random key, a seed or a generator for the scales.
        init: The first values of the scales, as in `BatchEnsembleLinear`; `ones` starts all members at the model.

    Returns:
        An `nn.Module` that computes all members at once.

    Shapes:
        A forward that gives (B, *F) gives (E, B, *F).

    Raises:
        UnsupportedError: The model has no such layer, or an `nn.TransformerEncoderLayer`, which reads weights itself.
        ValueError: `init` names no initialisation, or `members` is below 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> many = batch_ensemble(model, 4, 0)
        >>> many(torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    if any(isinstance(part, nn.TransformerEncoderLayer) for part in model.modules()):
        raise UnsupportedError(
            "batch_ensemble: the model has a layer that does not call the forward of its parts.",
            got="nn.TransformerEncoderLayer, whose fast path reads the weights of its layers",
            hint="write the block with nn.MultiheadAttention and nn.Linear, or take a model of another library.",
        )
    kinds = _check_init(members, init)
    shell, layers = _with_scales(model)
    if not layers:
        raise UnsupportedError(
            "batch_ensemble: the model has no layer that takes scales.",
            expected="nn.Linear or nn.Conv2d",
            got=brief(sorted({type(part).__name__ for part in model.modules()})),
        )
    apply, params, buffers = functional(shell)
    paths = {(*layer, name) for layer in layers for name in (*_SCALES, "bias")}
    own = Filter(partial(_is_in, frozenset({*paths, *(path for path, _ in iter_items(buffers, True, True))})))
    mine, shared = partition(combine(params, buffers), own)
    mine = maps.apply(mine, lambda x: x.expand(members, *x.shape).clone(), (), batch_size=[members])
    keys = random.split(key_of(key), (len(layers), 2))
    for layer, pair in zip(layers, keys, strict=True):
        for name, kind, own_key in zip(_SCALES, kinds, pair, strict=True):
            scale = get(mine, (*layer, name))
            mine = mine.set((*layer, name), _draw(own_key.to(scale.device), scale.shape, kind).to(scale.dtype))
    return EnsembleModule(apply, combine(shared, mine), shared=~own)


# -- layers -----------------------------------------------------------------------------------------------------

_SCALES = ("scale_in", "scale_out")


def _with_scales(model: nn.Module) -> tuple[nn.Module, list[Path]]:
    """Return a copy of a model with the layers of one member, and the paths of these layers."""
    model = copy.deepcopy(model)
    paths = list[Path]()
    # Any: the class of a layer changes, and nothing else of it, such as its hooks.
    named: Any = model.named_modules()
    for name, layer in named:
        kind = type(layer)
        # Classes made of these may do anything with the weight.
        if kind is nn.Linear:
            sizes = (layer.in_features, layer.out_features)
            layer.__class__ = BatchEnsembleLinear
        elif kind is nn.Conv2d:
            if layer.padding_mode != "zeros":
                raise UnsupportedError(
                    "batch_ensemble: a convolution does not pad with zeros.", expected="zeros", got=layer.padding_mode
                )
            layer.options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
            sizes = (layer.in_channels, layer.out_channels)
            layer.__class__ = BatchEnsembleConv2d
        else:
            continue
        layer.members = None
        for scale, size in zip(_SCALES, sizes, strict=True):
            setattr(layer, scale, nn.Parameter(layer.weight.detach().new_ones(size)))
        paths.append(tuple(name.split(".")) if name else ())
    return model, paths


def _is_in(paths: frozenset[Path], path: Path, leaf: Any) -> bool:
    return path in paths


def _vectors(
    weight: Tensor, members: int | None, sizes: tuple[int, int], bias: Tensor | None, init: Any
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]:
    """Return scales of the inputs and of the outputs, and for each member a copy of the bias."""
    kinds = _check_init(members, init)
    lead = ()
    if members is not None:
        lead = (members,)
    # From the default generator, as all layers of torch.
    keys = random.split(random.key(torch.randint(1 << 62, (), device="cpu")))
    scale_in, scale_out = (
        nn.Parameter(_draw(key, (*lead, size), kind).to(weight))
        for kind, key, size in zip(kinds, keys, sizes, strict=True)
    )
    return scale_in, scale_out, None if bias is None else nn.Parameter(bias.detach().expand(*lead, -1).clone())


def _check_init(members: int | None, init: Any) -> tuple[Init, Init]:
    kinds = init if isinstance(init, tuple) else (init, init)
    if len(kinds) != 2 or any(kind not in _INITS for kind in kinds):
        raise error(
            ValueError,
            "BatchEnsemble: init does not name a way in which scales begin.",
            expected=f"{' | '.join(map(repr, _INITS))}, or a pair of them",
            got=brief(init),
        )
    if members is not None:
        as_count("BatchEnsemble: members", members)
    return kinds


def _draw(key: Tensor, shape: Sequence[int], kind: Init) -> Tensor:
    if kind == "ones":
        return torch.ones(tuple(shape), device=key.device)
    if kind == "normal":
        return 1 + 0.5 * random.normal(key, tuple(shape))
    return random.bernoulli(key, 0.5, tuple(shape)) * 2.0 - 1.0


def _spread(scale: Tensor, x: Tensor, own: int) -> Tensor:
    """Return values of (E, C), or (C) for one member, shaped to multiply (E, *B, C, ...); `own` counts C and after."""
    scale = scale.reshape(*scale.shape, *[1] * (own - 1))
    lead = scale.dim() - own
    return scale.reshape(*scale.shape[:lead], *[1] * (x.dim() - own - lead), *scale.shape[lead:])


def _check_members(layer: Any, x: Tensor, dims: int) -> None:
    if layer.members is not None and (x.dim() < dims or x.shape[0] not in (1, layer.members)):
        raise LeafMismatchError(
            f"{type(layer).__name__}: the first dimension of the input does not count the members.",
            expected=f"{dims} or more dimensions, {layer.members} or 1 entries in the first",
            got=f"shape {list(x.shape)}",
            hint="x.unsqueeze(0) is the same input for all members.",
        )
