"""`add_weighted`: several adapters of one base as one adapter, whose change is their weighted sum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, as_count, check_choice, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.lora._attach import LoraApply
from tdfunc.lora.lora import Lora
from tdfunc.lora.math import change, factors, split_matrix, wide_dtype
from tdfunc.lora.selection import by_value, filter_of
from tdfunc.lora.targets import Layout, Target, layouts_of, make_tree, module_of, read_parts
from tdfunc.modules.functional import Apply
from tdfunc.ops.base.reading import entries

Combination = Literal["svd", "linear", "cat"]


@dataclass(frozen=True)
class _Changes:
    """The changes of one weight by several adapters.

    Attributes:
        target: The weight.
        parts: The leaves of each adapter.
        weights: The factor of each change: its weight times its scale.
    """

    target: Target
    parts: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    weights: list[float] = field(default_factory=list[float])


def add_weighted(
    params: TensorCollection,
    adapters: Sequence[tuple[Lora, TensorCollection]],
    weights: Sequence[float],
    *,
    combination_type: Combination = "svd",
    rank: int | None = None,
    apply: "Apply | LoraApply | None" = None,
) -> tuple[Lora, TensorDict]:
    """Return one adapter in place of several adapters of one base, with the weighted sum of their changes.

    Args:
        params: The base.
        adapters: For each adapter the pair (lora, tree), as `tdf.lora.load` returns it. A weight that some of them do
            not adapt gets the sum of the others.
        weights: A factor for each adapter, of either sign.
        combination_type: "cat" concatenates the factors, which is exact; the rank is the sum of the ranks. "svd" is the
            closest adapter of `rank` to the sum. "linear" adds the factors themselves, each by the root of its weight:
            a rough approximation, because it adds products of different adapters.
        rank: The rank for "svd", by default the largest rank of the adapters of a weight.
        apply: The function of the base, as for `init`. For "linear" with negative weights, the layers decide which
            factor gets the sign: the factor at the inputs. Without it they count as linear layers.

    Returns:
        The pair (lora, tree). Its scale is 1, because the factors contain the scales and weights.

    Raises:
        ValueError: The numbers of weights and adapters differ, both are 0, or `combination_type` is unknown.
        LeafMismatchError: The ranks of a weight differ, for "linear"; or an adapter does not fit the base.
        UnsupportedError: An adapter is not a sum: it has magnitudes of DoRA, or leaves that are trained whole.

    Source:
        PEFT's `LoraModel.add_weighted_adapter`.

    Examples:
        >>> params = TensorDict({"fc": {"weight": torch.zeros(2, 3)}})
        >>> lora = tdf.lora.Lora("fc.weight", rank=1)
        >>> ones = lora.init(params, key=0).apply(torch.ones_like)
        >>> both, tree = tdf.lora.add_weighted(params, [(lora, ones), (lora, ones)], [0.5, 2.0], combination_type="cat")
        >>> both.rank, both.merge(params, tree)["fc", "weight"][0]
        (2, tensor([2.5000, 2.5000, 2.5000]))
    """
    check_choice("add_weighted: combination_type", combination_type, ("svd", "linear", "cat"))
    if rank is not None:
        if combination_type != "svd":
            raise error(
                ValueError,
                "add_weighted: rank is an option of combination_type='svd'.",
                got=f"{combination_type!r}, which has the rank of its adapters",
            )
        rank = as_count("add_weighted: rank", rank)
    if not adapters or len(adapters) != len(weights):
        raise error(
            ValueError,
            "add_weighted: there is not one weight for each adapter.",
            expected=f"{len(adapters)} weights, for 1 or more adapters",
            got=len(weights),
        )
    _check_sums([lora for lora, _ in adapters])
    layouts = None
    if apply is not None:
        layouts = layouts_of(module_of(apply))
    changes = _read_changes(params, adapters, weights, layouts)
    has_bias = any([lora.bias for lora, _ in adapters])
    leaves: dict[Path, Tensor] = {}
    ranks: dict[Path, int] = {}
    for path, found in changes.items():
        a, b = _combined(found, combination_type, rank)
        dtype = _dtype_of(found)
        leaves[(*path, "A")] = a.to(dtype).contiguous()
        leaves[(*path, "B")] = b.to(dtype).contiguous()
        ranks[path] = b.shape[-1]
        if has_bias:
            leaves[(*path, "bias")] = _bias_of(found).to(dtype)
    base = entries(params)
    made = Lora(filter_of(ranks, base), rank=by_value(ranks, base), bias=has_bias)
    return made, make_tree(leaves)


def _check_sums(loras: Sequence[Lora]) -> None:
    """Raise if an adapter is not a change that can be added to others."""
    for i, lora in enumerate(loras):
        got = None
        if lora.dora:
            got = "magnitudes of DoRA"
        elif lora.whole is not None:
            got = "leaves that are trained whole"
        elif lora.trainable_token_indices is not None:
            got = "rows of tokens, which replace rows"
        if got is not None:
            raise UnsupportedError(
                f"add_weighted: adapter {i} is more than a change that can be added.",
                expected="factors A and B",
                got=got,
                hint="merge it, and average the merged parameters: tdf.average, or tdfunc.weights.",
            )


def _read_changes(
    params: TensorCollection,
    adapters: Sequence[tuple[Lora, TensorCollection]],
    weights: Sequence[float],
    layouts: Callable[[Path], Layout] | None,
) -> dict[Path, _Changes]:
    """Return the changes of each weight that an adapter changes."""
    changes: dict[Path, _Changes] = {}
    for (lora, tree), weight in zip(adapters, weights, strict=True):
        found, _ = read_parts(lora, params, tree, "add_weighted")
        for target, parts in found:
            if layouts is not None:
                target = target._replace(layout=layouts(target.path))
            own = changes.setdefault(target.path, _Changes(target))
            own.parts.append(parts)
            own.weights.append(weight * target.scale)
    return changes


def _combined(found: _Changes, combination_type: str, rank: int | None) -> tuple[Tensor, Tensor]:
    """Return the factors of the sum of changes."""
    pairs = [factors(parts) for parts in found.parts]
    if combination_type == "svd":
        ranks = [b.shape[-1] for _, b in pairs]
        return _closest(found, rank or max(ranks))
    if combination_type == "linear":
        return _added(found, pairs)
    # The ranks of A are the first dimension in a convolution, else the dimension before the last.
    dim = 0 if pairs[0][1].ndim == 2 else -2
    scaled = [a * weight for (a, _), weight in zip(pairs, found.weights, strict=True)]
    return torch.cat(scaled, dim), torch.cat([b for _, b in pairs], -1)


def _closest(found: _Changes, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a rank whose product is closest to the sum of changes."""
    leaf = found.target.leaf.detach()
    total = torch.zeros_like(leaf, dtype=wide_dtype(leaf.dtype, _dtype_of(found)))
    for parts, weight in zip(found.parts, found.weights, strict=True):
        total = total + change(leaf, parts, weight)
    a_like = found.parts[0]["A"]
    is_convolution = found.parts[0]["B"].ndim < leaf.ndim
    a, b = split_matrix(total.flatten(1) if is_convolution else total, rank)
    if is_convolution:
        a = a.reshape(rank, *a_like.shape[1:])
    return a, b


def _added(found: _Changes, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the sums of the factors, each by the root of its weight; the factor at the inputs gets its sign."""
    ranks = [b.shape[-1] for _, b in pairs]
    if len(set(ranks)) > 1:
        raise LeafMismatchError(
            f"add_weighted: the adapters of {dotted(found.target.path)!r} have different ranks.",
            expected="one rank, for combination_type='linear'",
            got=ranks,
            hint="'cat' and 'svd' take adapters of different ranks.",
        )
    a_parts: list[Tensor] = []
    b_parts: list[Tensor] = []
    for (a, b), weight in zip(pairs, found.weights, strict=True):
        root = math.sqrt(abs(weight))
        signed = math.copysign(root, weight)
        if found.target.layout.has_output_last:
            a_parts.append(a * root)
            b_parts.append(b * signed)
        else:
            a_parts.append(a * signed)
            b_parts.append(b * root)
    return torch.stack(a_parts).sum(0), torch.stack(b_parts).sum(0)


def _bias_of(found: _Changes) -> Tensor:
    """Return the sum of the changes of a bias; an adapter without a bias does not change it."""
    total = found.parts[0]["B"].new_zeros(())
    size = next((parts["bias"].shape for parts in found.parts if "bias" in parts), None)
    if size is None:
        raise UnsupportedError(
            f"add_weighted: no adapter of {dotted(found.target.path)!r} has a bias, as others have.",
            expected="biases in all adapters, or in none",
            hint="a Lora with bias=True has one for each weight.",
        )
    for parts, weight in zip(found.parts, found.weights, strict=True):
        if "bias" in parts:
            total = total + parts["bias"] * weight
    return total.expand(size).clone()


def _dtype_of(found: _Changes) -> torch.dtype:
    """Return the widest dtype of the adapters of a weight."""
    dtype = found.parts[0]["A"].dtype
    for parts in found.parts[1:]:
        dtype = torch.promote_types(dtype, parts["A"].dtype)
    return dtype
