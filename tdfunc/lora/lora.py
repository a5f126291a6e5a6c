"""`Lora`, a choice of weights, ranks and scales as a value, and its pure functions on trees of adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch
from torch import Tensor

from tdfunc import random
from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TieError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.lora._attach import LoraApply
from tdfunc.lora.choice import Choice
from tdfunc.lora.math import change, extracted, extracted_bias, merged, start, wide_dtype
from tdfunc.lora.targets import (
    Target,
    check_scale,
    check_single,
    find_tables,
    find_targets,
    layouts_of,
    make_tree,
    module_of,
    parts_of,
    read_parts,
)
from tdfunc.modules.functional import Apply
from tdfunc.ops.base.reading import entries, get, has
from tdfunc.ops.edits.edit import set_
from tdfunc.random.draws import KeyLike, key_of

T = TypeVar("T", bound=TensorCollection)
A = TypeVar("A", bound="AbstractAttachable")
_HALF = (torch.float16, torch.bfloat16)


@runtime_checkable
class AbstractAttachable(Protocol):
    """A value around the function of a module, such as a language model, that runs with adapters."""

    # Any: the value with another function.
    def with_adapters(self, lora: "Lora", *, rows: bool = False) -> Any:
        """Return the value, whose parameters are a pair of the base's and adapters."""
        ...


@dataclass(frozen=True)
class Lora(Choice):
    """A choice of weights for adapters of low rank, as a value.

    The layer of a weight W computes with `W + scale * B @ A`, without making that sum. `init` returns the adapters of
    a base as a separate tree: `adapters["layers", "0", "weight"]` has `A` and `B`. Such trees are stacked, saved,
    filtered and optimised like any other tree. `attach` returns a function of both trees.

    Args:
        where: The weights, as a glob or filter. They belong to linear layers, GPT2's `Conv1D`, convolutions,
            embeddings, or fused experts of transformers. A tied weight has one adapter.
        rank: The rank R, or a dict of ranks by filter. The first filter that matches counts.
        alpha: The scale times the rank, or a dict by filter; without it the scale is 1.
        rslora: Divide alpha by the root of the rank.
        dora: Scale each output to a trained magnitude.
        bias: Add a trained bias to the change of a layer.
        dropout: The probability with which inputs of adapters are zero in training mode.
        start: The initial values of the factors. `"kaiming"` samples one and sets the other to zero. `"pissa"` and
            `"olora"` take both from the weight, and subtract this start, so that the base does not change.
        whole: The leaves that are trained themselves, such as a new head, norms or biases. Their values in the adapters
            replace the values of the base.
        trainable_token_indices: The rows of tables that are trained themselves, by filter of the table, such as new
            tokens: `{"*.embed_tokens.weight": [32000, 32001]}`. The adapters have these rows as `rows`, and they
            replace the rows of the base. A tied table has one set of rows.

    Raises:
        ValueError: A number is out of range.

    Source:
        Hu et al., "LoRA: low-rank adaptation of large language models" (2021); Kalajdzievski, "A rank stabilization
        scaling factor" (2023).

    Examples:
        >>> apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> lora = tdf.lora.Lora("*.weight", rank=2)
        >>> adapters = lora.init(params, key=0)
        >>> adapters["0", "weight", "A"].shape, adapters["0", "weight", "B"].shape
        (torch.Size([2, 4]), torch.Size([8, 2]))
        >>> run = lora.attach(apply)
        >>> run((params, adapters), torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    def init(
        self,
        params: TensorCollection,
        *,
        key: KeyLike,
        apply: "Apply | LoraApply | None" = None,
        dtype: torch.dtype | None = None,
    ) -> TensorDict:
        """Return new adapters for a base, which do not change its function, like `tdf.lora.init`."""
        return init(self, params, key=key, apply=apply, dtype=dtype)

    @overload
    def attach(self, apply: Apply, *, rows: bool = False) -> LoraApply: ...

    @overload
    def attach(self, apply: A, *, rows: bool = False) -> A: ...

    def attach(self, apply: Any, *, rows: bool = False) -> Any:
        """Return `run((params, adapters), *inputs)`: `apply` with adapters in its layers, like `tdf.lora.attach`."""
        return attach(self, apply, rows=rows)

    def merge(self, params: T, adapters: TensorCollection) -> T:
        """Return the base with the adapters in its weights, like `tdf.lora.merge`."""
        return merge(self, params, adapters)

    def unmerge(self, merged: T, adapters: TensorCollection) -> T:
        """Return the base from the result of `merge`, like `tdf.lora.unmerge`."""
        return unmerge(self, merged, adapters)

    def extract(self, base: TensorCollection, tuned: TensorCollection, *, apply: Apply | None = None) -> TensorDict:
        """Return the adapters that bring a base as close to a tuned model as they can, like `tdf.lora.extract`."""
        return extract(self, base, tuned, apply=apply)


def init(
    lora: Lora,
    params: TensorCollection,
    *,
    key: KeyLike,
    apply: "Apply | LoraApply | None" = None,
    dtype: torch.dtype | None = None,
) -> TensorDict:
    """Return new adapters for a base, which do not change its function.

    Args:
        lora: The choice.
        params: The base.
        key: A random key, or a seed.
        apply: The function of the base, which contains the layers of the weights. Without it, a weight of 2
            dimensions belongs to a linear layer, (outputs, inputs), and a weight of 4 or 5 to a convolution.
        dtype: The dtype of the adapters. By default the dtype of the weight, and float32 for weights of 16 bits.

    Returns:
        A tree of new leaves. It also contains the start of `"pissa"` and `"olora"` as buffers `A0` and `B0`, which
        get no gradient. `tdf.split` separates them from the trained leaves.

    Raises:
        FilterError: A pattern matches no leaf of the base.
        LeafMismatchError: The shape of a chosen leaf does not fit the weight of a layer.
        UnsupportedError: A chosen weight belongs to a layer that cannot have adapters.
        BatchSizeError: The base is an ensemble, and a convolution of it is chosen.
        ValueError: `dtype` is one of integers.
    """
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
        # The first numbers of an adapter would be rounded to 0.
        raise error(ValueError, "lora: dtype is not a floating-point one.", expected="torch.bfloat16, ...", got=dtype)
    layouts = None
    if apply is not None:
        layouts = layouts_of(module_of(apply))
    targets, whole = find_targets(lora, entries(params), layouts)
    check_single("init", params, targets)
    if lora.start == "pissa":
        for target in targets:
            check_scale("init", target)
    # A choice of only whole leaves has no targets, and zero keys cannot be split.
    keys = random.split(key_of(key), max(1, len(targets)))
    leaves: dict[Path, Tensor] = {}
    for target, own in zip(targets, keys, strict=False):
        parts = start(target, parts_of(lora, target), lora.start, own, dtype or _adapter_dtype(target.leaf))
        leaves |= {(*target.path, name): part for name, part in parts.items()}
    for entry in whole:
        leaves[entry.paths[0]] = entry.leaf.detach().clone()
    for table in find_tables(lora, entries(params)):
        leaves[table.key] = table.rows_in(table.leaf.detach()).to(dtype or _adapter_dtype(table.leaf))
    return make_tree(leaves)


@overload
def attach(lora: Lora, apply: Apply, *, rows: bool = False) -> LoraApply: ...


@overload
def attach(lora: Lora, apply: A, *, rows: bool = False) -> A: ...


def attach(lora: Lora, apply: Any, *, rows: bool = False) -> Any:
    """Return `run((params, adapters), *inputs)`, which is `apply` with adapters in its layers.

    Gradients, `vmap` over adapters, `tdf.jit` and `rng=` work as with `apply`. Many adapters of one base take
    one `torch.vmap(run, ((None, 0), 0))`, in which no tensor is as large as all their weights.

    Args:
        lora: The choice.
        apply: The function of `functional`, or of its `train` and `eval`. Of a `CausalLM` the result is a
            `CausalLM`, whose parameters are the pair `(params, adapters)`.
        rows: Run row i of a batch with adapter i. The first dimension of each adapter's leaf are the rows, such as
            in `many[which]`. The first dimension of the inputs of all layers with adapters must be the rows; the
            tokens of experts must come row by row.

    Raises:
        FilterError: A pattern matches no leaf of the module.
        UnsupportedError: A chosen weight belongs to a layer that cannot have adapters, or with `rows` a leaf is
            trained whole.
    """
    if isinstance(apply, AbstractAttachable):
        return apply.with_adapters(lora, rows=rows)
    module_of(apply)
    return LoraApply(lora, apply, rows)


def merge(lora: Lora, params: T, adapters: TensorCollection) -> T:
    """Return the base with the adapters in its weights.

    Raises:
        TreeStructureError: The adapters and the choice have different leaves.
        LeafMismatchError: An adapter does not fit its weight, or has a bias and its layer has none.

    Examples:
        >>> params = TensorDict({"fc": {"weight": torch.zeros(2, 3)}})
        >>> lora = tdf.lora.Lora("fc.weight", rank=1)
        >>> adapters = lora.init(params, key=0).apply(torch.ones_like)
        >>> lora.merge(params, adapters)["fc", "weight"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    found, whole = read_parts(lora, params, adapters, "merge")
    new = params
    for path, leaf in whole.items():
        new = set_(new, path, leaf)
    for table in find_tables(lora, entries(params)):
        new = set_(new, table.path, table.with_rows(table.leaf, get(adapters, table.key)))
    biases = _Biases(params, found)
    for target, parts in found:
        changed = merged(target.leaf, parts, target.scale)
        new = set_(new, target.path, changed.weight)
        if changed.bias is not None:
            new = biases.add(new, target, changed.bias)
    return new


def unmerge(lora: Lora, merged: T, adapters: TensorCollection) -> T:
    """Return the base from the result of `merge`.

    Raises:
        UnsupportedError: The adapters belong to DoRA, or leaves were trained whole: the merged tree has lost the
            norms and values of the base.
        TreeStructureError: The adapters and the choice have different leaves.
        LeafMismatchError: An adapter does not fit its weight.
    """
    if lora.dora:
        raise _lost_base("magnitudes of DoRA, which replace its norms")
    if lora.whole is not None:
        raise _lost_base("leaves that were replaced whole")
    if lora.trainable_token_indices is not None:
        raise _lost_base("rows of tokens that were replaced")
    found, _ = read_parts(lora, merged, adapters, "unmerge")
    biases = _Biases(merged, found)
    new = merged
    for target, parts in found:
        delta = change(target.leaf, parts, target.scale)
        weight = target.leaf.to(delta.dtype) - delta
        new = set_(new, target.path, weight.to(target.leaf.dtype))
        if "bias" in parts:
            new = biases.add(new, target, parts["bias"].to(delta.dtype) * -target.scale)
    return new


def extract(lora: Lora, base: TensorCollection, tuned: TensorCollection, *, apply: Apply | None = None) -> TensorDict:
    """Return the adapters that bring a base as close to a tuned model as their rank allows.

    Args:
        lora: The choice.
        base: The parameters before the tuning.
        tuned: The parameters after it.
        apply: The function of the base, as for `init`.

    Raises:
        FilterError: A pattern matches no leaf of the base.
        TreeStructureError: `tuned` does not have a leaf.
        LeafMismatchError: A leaf has another shape in `tuned`.
        TieError: A tied leaf of the base has several values in `tuned`.
        UnsupportedError: `start` is not `"kaiming"`: these adapters are relative to a start.

    Source:
        Eckart and Young, "The approximation of one matrix by another of lower rank" (1936).

    Examples:
        >>> base, lora = TensorDict({"w": torch.zeros(4, 3)}), tdf.lora.Lora("w", rank=1)
        >>> tuned = TensorDict({"w": torch.ones(4, 3)})
        >>> adapters = lora.extract(base, tuned)
        >>> tdf.assert_close(lora.merge(base, adapters), tuned)
    """
    if lora.start != "kaiming":
        raise UnsupportedError(
            "extract: adapters with a start cannot be extracted.", expected="start='kaiming'", got=repr(lora.start)
        )
    layouts = None
    if apply is not None:
        layouts = layouts_of(module_of(apply))
    targets, whole = find_targets(lora, entries(base), layouts)
    check_single("extract", base, targets)
    leaves: dict[Path, Tensor] = {}
    for target in targets:
        check_scale("extract", target)
        old = target.leaf.detach()
        new = _twin(tuned, target.paths, target.leaf).detach()
        parts = extracted(old, new, parts_of(lora, target), target)
        if lora.bias:
            delta = _bias_change(base, tuned, target)
            parts["bias"] = extracted_bias(old, delta, parts, target.scale)
        dtype = _adapter_dtype(old)
        leaves |= {(*target.path, name): part.to(dtype).contiguous() for name, part in parts.items()}
    for entry in whole:
        leaves[entry.paths[0]] = _twin(tuned, entry.paths, entry.leaf).detach().clone()
    for table in find_tables(lora, entries(base)):
        leaves[table.key] = table.rows_in(_twin(tuned, table.paths, table.leaf).detach())
    return make_tree(leaves)


def _adapter_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the adapter of a weight: factors of 16 bits would lose small updates."""
    if weight.dtype in _HALF:
        return torch.float32
    return weight.dtype


def _lost_base(got: str) -> UnsupportedError:
    return UnsupportedError(
        "unmerge: the merged weights do not contain the base.",
        got=got,
        hint="keep the parameters: merge does not change them.",
    )


def _twin(tuned: TensorCollection, paths: Sequence[Path], leaf: Tensor) -> Tensor:
    """Return the leaf of the tuned model for one of the base, given all of its paths.

    Raises:
        LeafMismatchError: It has another shape.
        TieError: The tuned model has other values at another of the paths, which one adapter cannot give.
    """
    path = paths[0]
    other = get(tuned, path)
    if not isinstance(other, Tensor) or other.shape != leaf.shape:
        got = type(other).__name__
        if isinstance(other, Tensor):
            got = f"shape {tuple(other.shape)}"
        raise LeafMismatchError(
            f"extract: the leaf {dotted(path)!r} of the tuned model does not fit the base.",
            expected=f"shape {tuple(leaf.shape)}",
            got=got,
        )
    # A file may have a tied leaf under its first name alone.
    for name in paths[1:]:
        second = get(tuned, name, other)
        if second is not other and not torch.equal(second, other):
            raise TieError(
                f"extract: {dotted(path)!r} and {dotted(name)!r} are one leaf of the base, and differ in `tuned`.",
                expected="equal values, because a tied weight has one adapter",
                got="two leaves that were tuned apart",
                hint=f"base.untie({name!r}) is a base with two leaves, for an adapter of each.",
            )
    return other


def _bias_paths(params: TensorCollection, target: Target) -> list[Path]:
    """Return the paths of the biases of all layers of a weight.

    Raises:
        LeafMismatchError: A layer has no bias.
    """
    paths = [(*path[:-1], "bias") for path in target.paths]
    for path in paths:
        if not has(params, path):
            raise LeafMismatchError(
                f"lora: the adapter of {dotted(target.path)!r} has a bias, and its layer has none.",
                expected=f"a leaf {dotted(path)!r}",
                hint="lora.attach(apply) runs such adapters; they cannot be merged.",
            )
    return paths


def _bias_change(base: TensorCollection, tuned: TensorCollection, target: Target) -> Tensor:
    """Return the difference of the biases of a weight's layers, which is one for all layers.

    Raises:
        UnsupportedError: The biases of two layers changed differently.
    """
    changes: list[Tensor] = []
    # The rounding of a difference of two biases.
    rounding = 0.0
    for path in _bias_paths(base, target):
        before = get(base, path).detach()
        after = _twin(tuned, [path], before).detach()
        wide = wide_dtype(before.dtype, after.dtype)
        changes.append(after.to(wide) - before.to(wide))
        eps = max(torch.finfo(before.dtype).eps, torch.finfo(after.dtype).eps)
        rounding = max(rounding, 4 * eps * float(after.abs().max()))
    if any(not torch.allclose(changes[0], other, rtol=0, atol=rounding) for other in changes[1:]):
        raise UnsupportedError(
            f"extract: the biases of the layers of {dotted(target.path)!r} changed differently.",
            expected="one change, because a tied weight has one adapter with one bias",
            got=", ".join(dotted(path) for path in target.paths),
            hint="Lora(..., bias=False, whole=...) trains the biases themselves.",
        )
    return changes[0]


class _Biases:
    """The biases of layers with adapters, and the layers that use each."""

    def __init__(self, params: TensorCollection, found: Sequence[tuple[Target, dict[str, Tensor]]]) -> None:
        # The paths of each bias, under each of them.
        self._paths: dict[Path, tuple[Path, ...]] = {}
        if any("bias" in parts for _, parts in found):
            for entry in entries(params):
                self._paths |= dict.fromkeys(entry.paths, entry.paths)

    def add(self, params: T, target: Target, delta: Tensor) -> T:
        """Return parameters with a change of the biases of a weight's layers.

        Raises:
            LeafMismatchError: A layer has no bias.
            UnsupportedError: A bias is also the bias of a layer that does not have this adapter.
        """
        own = _bias_paths(params, target)
        # Tied biases are one leaf, which changes once.
        for paths in {self._paths[path] for path in own}:
            others = set(paths) - set(own)
            if others:
                raise UnsupportedError(
                    f"lora: the bias {dotted(paths[0])!r} is the bias of several layers.",
                    expected=f"a bias only of the layers of {dotted(target.path)!r}",
                    got=f"also {dotted(min(others))!r}",
                    hint="lora.attach(apply) runs such adapters; they cannot be merged.",
                )
            old = get(params, paths[0])
            new = old.to(wide_dtype(old.dtype, delta.dtype)) + delta
            params = set_(params, paths[0], new.to(old.dtype))
        return params
