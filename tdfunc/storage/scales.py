"""Quantized leaves: codes that mean numbers only together with other leaves, which are found by their names.

A file does not say that a leaf has codes: its name, its dtype and a scale beside it do. The rules are the names that
the programs write which quantize; `dequantize` computes the numbers of FP8 codes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from tdfunc.core.collection import LeafOp, TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.keys import Filter, FilterLike, dotted
from tdfunc.ops.edits.structure import keep_leaves, partition

T = TypeVar("T", bound=TensorCollection)
# The dtype and the shape of each leaf by its dotted name.
Specs: TypeAlias = Mapping[str, tuple[torch.dtype, Sequence[int]]]

_FP8 = frozenset([torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz])
# Codes that no cast of floating leaves changes. torch does not compute with pairs of 4-bit numbers.
_INTEGERS = frozenset(
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.float4_e2m1fn_x2]
)
_CODES = _FP8 | _INTEGERS
# The rows and columns that share a scale in DeepSeek's files, and in the files that follow them.
_BLOCK = 128
# Numbers that are computed at a time.
_COUNT = 1 << 22


class Rule(NamedTuple):
    """The names of one layout; `{stem}` is a name up to its last key, dot included, `{key}` the key."""

    layout: str
    # The dtypes of codes; None for any.
    codes: frozenset[torch.dtype] | None
    # A regular expression of the key; its group, if it has one, is `{base}`.
    key: str
    # The first that exists is the scale.
    scales: tuple[str, ...]
    # Other leaves that belong to the codes. One that ends in a dot stands for all names that begin with it.
    more: tuple[str, ...] = ()


# Scales of a layer's inputs.
_INPUTS = (
    "{stem}input_scale",
    "{stem}scale_input",
    "{stem}qscale_act",
    "{stem}activation_scale",
    "{stem}{key}_input_scale",
    "{stem}{key}_activation_scale",
)
# Scales of a layer's inputs and outputs, of which a product with numbers knows nothing (Gemma).
_ACTIVATIONS = ("{stem}input_activation_scale", "{stem}output_activation_scale")
# Leaves with which the numbers are more than codes times scale.
_MORE = (
    "{stem}{key}_zero_point",
    "{stem}{key}_scale_2",
    "{stem}{key}_global_scale",
    "{stem}{key}_g_idx",
    "{stem}input_zero_point",
)
_PACKED = (
    "{stem}{base}_zero_point",
    "{stem}{base}_global_scale",
    "{stem}{base}_shape",
    "{stem}{base}_g_idx",
    "{stem}input_global_scale",
)
# The rest of a weight, in a product of two matrices, and the factors of its columns.
_LOW_RANK = (
    "{stem}wzeros",
    "{stem}wcscales",
    "{stem}wtscale",
    "{stem}smooth_factor",
    "{stem}smooth_factor_orig",
    "{stem}proj_down",
    "{stem}proj_up",
)
# The other leaves of a tensor of torchao.
_TORCHAO = (
    "{stem}_{base}_zero_point",
    "{stem}_{base}_per_tensor_scale",
    "{stem}_{base}_act_per_tensor_scale",
    "{stem}_{base}_act_pre_scale",
)
_RULES = (
    # bitsandbytes, whose packed codes may have any dtype.
    Rule("bitsandbytes", None, r"[^.]+", ("{stem}{key}.absmax",), ("{stem}{key}.",)),
    # DeepSeek, compressed-tensors, fused experts of transformers.
    Rule("FP8", _FP8, r"[^.]+", ("{stem}{key}_scale_inv", "{stem}{key}_scale"), (*_INPUTS, *_MORE)),
    # ComfyUI, Mistral, DeepSeek's own programs.
    Rule("FP8", _FP8, r"[^.]+", ("{stem}scale_{key}", "{stem}qscale_{key}"), _INPUTS),
    Rule("FP8", _FP8, "weight", ("{stem}scale", "{stem}scale_inv"), _INPUTS),
    # Programs that divide by a number, or whose rule differs between versions: never codes times scale.
    Rule(
        "FP8 with another scale",
        _FP8,
        r"[^.]+",
        (
            "{stem}{key}_descale",
            "{stem}{key}_scaling_factor",
            "{stem}{key}s_scaling_factor",
            "{stem}{key}_inv_scale",
            "{stem}{key}_scales",
            "{stem}{key}.scale",
            "{stem}{key}.scale_inv",
            "{stem}{key}_amax",
        ),
        (*_INPUTS, *_MORE),
    ),
    Rule("FP8 with another scale", _FP8, "weight", ("{stem}scales", "{stem}inv_scale", "{stem}descale"), _INPUTS),
    # compressed-tensors, TensorRT Model Optimizer (NVFP4), Gemma.
    Rule(
        "integer",
        _INTEGERS,
        r"[^.]+",
        ("{stem}{key}_scale", "{stem}{key}_scale_inv"),
        (*_INPUTS, *_ACTIVATIONS, *_MORE),
    ),
    # In its own files.
    Rule("TensorRT Model Optimizer", _CODES, r"[^.]+", ("{stem}{key}_quantizer._scale",), ("{stem}{key}_quantizer.",)),
    # bitsandbytes (LLM.int8), ComfyUI, MLX, EETQ and Metal of transformers.
    Rule(
        "integer",
        _INTEGERS,
        "weight",
        ("{stem}SCB", "{stem}scale_weight", "{stem}scales", "{stem}scale", "{stem}weight_scales"),
        (
            *_INPUTS,
            "{stem}weight_format",
            "{stem}biases",
            "{stem}qbiases",
            "{stem}zero_point",
            "{stem}zeros",
            "{stem}tables",
            "{stem}tables2",
        ),
    ),
    Rule("integer", _INTEGERS, r"(.+)_(?:u?int[48]|q|quantized)", ("{stem}{base}_scale", "{stem}{base}_scales")),
    Rule("GPTQ or AWQ", _INTEGERS, "qweight", ("{stem}scales",), ("{stem}qzeros", "{stem}g_idx")),
    Rule("EETQ", _INTEGERS, "qweight", ("{stem}weight_scales",)),
    Rule("Nunchaku", _INTEGERS, "qweight", ("{stem}wscales",), _LOW_RANK),
    Rule(
        "VPTQ",
        _INTEGERS,
        "indices",
        ("{stem}centroids.weight",),
        (
            "{stem}res_centroids.weight",
            "{stem}outlier_centroids.weight",
            "{stem}outlier_indices",
            "{stem}weight_scale",
            "{stem}weight_bias",
            "{stem}perm",
        ),
    ),
    Rule("compressed-tensors", _INTEGERS, r"(.+)_packed", ("{stem}{base}_scale",), _PACKED),
    Rule("MXFP4", _INTEGERS, r"(.+)_blocks", ("{stem}{base}_scales",)),
    Rule("torchao", _CODES, r"_(.+)_qdata", ("{stem}_{base}_scale", "{stem}_{base}_scale_and_zero"), _TORCHAO),
    Rule("quanto", _CODES, "_data", ("{stem}_scale",), ("{stem}_shift",)),
    Rule("HQQ", _INTEGERS, "W_q", ("{stem}scale",), ("{stem}zero",)),
    Rule("EXL2", _INTEGERS, "q_weight", ("{stem}q_scale",), ("{stem}q_scale_max", "{stem}q_groups")),
    Rule("AQLM", _INTEGERS, "codes", ("{stem}codebooks",), ("{stem}scales",)),
)
# The key of a scale that no rule names; a scale of inputs, outputs, caches or of the layer itself is excluded.
_UNNAMED = re.compile(
    r"(?!(input|output|act|activation|logit|layer|q|k|v|kv)_?scale)(?!scale_(input|output|act))[^.]*(scale|absmax)[^.]*"
)
_ABSMAX = ".absmax"
# ComfyUI's mark of a file with scales.
_MARK = "scaled_fp8"


@dataclass(frozen=True)
class Scaled:
    """A leaf of codes, with the leaves that it has its meaning from; all by their dotted names."""

    name: str
    layout: str
    dtype: torch.dtype
    scale: str
    # All leaves that belong to the codes, the scale first.
    companions: tuple[str, ...]
    # The elements that share a scale, along each dimension; None if it is not known.
    blocks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.layout}, scale in {self.scale!r}"


def find_scaled(specs: Specs) -> list[Scaled]:
    """Return the leaves of codes among the leaves of a file."""
    found: list[Scaled] = []
    if not may_have_codes([dtype for dtype, _ in specs.values()], specs):
        return found
    for name in specs:
        one = _find_codes(name, specs)
        if one is not None:
            found.append(one)
    found += _find_unnamed(specs, found)
    # The scale of a scale (NVFP4) is a part of the whole, and not a leaf of codes.
    parts = {name for one in found for name in one.companions}
    return [one for one in found if one.name not in parts]


def _find_codes(name: str, specs: Specs) -> Scaled | None:
    """Return a leaf as codes by the first rule that fits; None if it has none."""
    dtype, _ = specs[name]
    stem, key = _split(name)
    for rule in _RULES:
        if rule.codes is None or dtype in rule.codes:
            one = _apply(rule, name, stem, key, specs)
            if one is not None:
                return one
    return None


def _find_unnamed(specs: Specs, found: Sequence[Scaled]) -> list[Scaled]:
    """Return FP8 leaves beside a scale whose name is of no rule: the program that wrote them is not known."""
    if _FP8.isdisjoint([dtype for dtype, _ in specs.values()]):
        return []
    taken: set[str] = set()
    for one in found:
        taken.update((one.name, *one.companions))
    scales = _group_scales(specs, taken)
    unnamed: list[Scaled] = []
    for name, (dtype, shape) in specs.items():
        if dtype not in _FP8 or name in taken:
            continue
        beside = [scale for scale in scales.get(_split(name)[0], ()) if math.prod(specs[scale][1]) < math.prod(shape)]
        if beside:
            unnamed.append(Scaled(name, "FP8 with another scale", dtype, beside[0], tuple(beside), None))
    return unnamed


def _group_scales(specs: Specs, taken: set[str]) -> dict[str, list[str]]:
    """Return the leaves that are scales by their name, by what comes before it, without those that a rule took."""
    scales: dict[str, list[str]] = {}
    for name, (dtype, _) in specs.items():
        stem, key = _split(name)
        is_wide = dtype.is_floating_point and dtype not in _CODES
        if is_wide and name not in taken and _UNNAMED.fullmatch(key):
            scales.setdefault(stem, []).append(name)
    return scales


def may_have_codes(dtypes: Iterable[torch.dtype], names: Iterable[str]) -> bool:
    """Return whether a look at the names is worth its time: most files have no leaf that could be codes."""
    return not _CODES.isdisjoint(dtypes) or any([_ABSMAX in name for name in names])


def _split(name: str) -> tuple[str, str]:
    """Return a name up to its last key, and the key."""
    at = name.rfind(".") + 1
    return name[:at], name[at:]


def _apply(rule: Rule, name: str, stem: str, key: str, specs: Specs) -> Scaled | None:
    """Return the leaf as codes of this layout; None if it has none."""
    match = re.fullmatch(rule.key, key)
    if match is None:
        return None
    base = ""
    if match.groups():
        base = match.group(1)

    def fill(pattern: str) -> str:
        return pattern.format(stem=stem, key=key, base=base)

    scales = [full for full in map(fill, rule.scales) if full in specs]
    if not scales:
        return None
    scale = scales[0]
    companions = [scale]
    for full in map(fill, rule.more):
        if full.endswith("."):
            companions += [other for other in specs if other.startswith(full) and other != scale]
        elif full in specs:
            companions.append(full)
    dtype, shape = specs[name]
    scale_dtype, scale_shape = specs[scale]
    # Powers of two are stored as their exponents.
    has_numbers = scale_dtype.is_floating_point or scale_dtype is torch.uint8
    has_more = not set(map(fill, _MORE)).isdisjoint(companions)
    # The numbers are codes times scale.
    is_product = rule.layout == "FP8" and has_numbers and not has_more
    blocks = None
    if is_product:
        blocks = find_blocks(shape, scale_shape)
    return Scaled(name, rule.layout, dtype, scale, tuple(companions), blocks)


def find_blocks(shape: Sequence[int], scale: Sequence[int]) -> tuple[int, ...] | None:
    """Return the elements that share a scale along each dimension of the codes; None if the shapes do not say it."""
    if math.prod(scale) == 1:
        return tuple(max(1, size) for size in shape)
    dims = len(scale)
    if dims < len(shape) and list(scale) == list(shape[:dims]):
        # A number for each row, or for each row of each expert.
        return (*[1] * dims, *[max(1, size) for size in shape[dims:]])
    if dims != len(shape):
        return None
    blocks: list[int] = []
    for size, count in zip(shape, scale, strict=True):
        block = _block(size, count)
        if block is None:
            return None
        blocks.append(block)
    return tuple(blocks)


def _block(size: int, count: int) -> int | None:
    """Return the elements that share one of `count` scales along a dimension; None if it is not known."""
    if count == size:
        return 1
    if count == 1:
        return max(1, size)
    if count == -(-size // _BLOCK):
        return _BLOCK
    # Other blocks are powers of two that divide the size.
    if count and size % count == 0 and (size // count).bit_count() == 1:
        return size // count
    return None


def dequantize(codes: Tensor, scale: Tensor, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the numbers of FP8 codes: codes times scale, computed in float32 at least.

    Source:
        `weight_dequant` in DeepSeek-V3's `inference/kernel.py`, for blocks at the edge as well.
    """
    codes = codes.detach()
    wide = torch.promote_types(dtype, torch.float32)
    if scale.dtype is torch.uint8:
        # Powers of two, by their exponents.
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.detach().to(wide)
    if scale.numel() == 1:
        scale = scale.reshape([1] * codes.dim())
    scale = scale.reshape([*scale.shape, *[1] * (codes.dim() - scale.dim())])
    for dim in range(1, codes.dim()):
        scale = _spread(scale, dim, blocks[dim], range(codes.shape[dim]))
    if not codes.dim():
        return (codes.to(wide) * scale).to(dtype)
    made = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    # In parts, which bound the memory beside the result.
    step = max(1, _COUNT // max(1, math.prod(codes.shape[1:])))
    for at in range(0, codes.shape[0], step):
        rows = range(at, min(at + step, codes.shape[0]))
        numbers = codes[at : rows.stop].to(wide) * _spread(scale, 0, blocks[0], rows)
        made[at : rows.stop] = numbers.to(dtype)
    return made


def _spread(scale: Tensor, dim: int, block: int, places: range) -> Tensor:
    """Return the scales of some places along a dimension."""
    if scale.shape[dim] == 1:
        return scale
    index = torch.arange(places.start, places.stop, device=scale.device) // block
    return scale.index_select(dim, index)


class Quantized(NamedTuple):
    """The leaves of codes in a file whose leaves are numbered."""

    # By the number of the leaf of codes.
    codes: Mapping[int, Scaled]
    # The numbers of all leaves that no cast changes: codes and the leaves that belong to them.
    kept: Collection[int]
    specs: Specs

    @classmethod
    def of(cls, specs: Specs, numbers: Mapping[str, int]) -> "Quantized":
        """Find the leaves of codes, given the number of each leaf."""
        found = find_scaled(specs)
        names = [name for one in found for name in (one.name, *one.companions)]
        return cls({numbers[one.name]: one for one in found}, {numbers[name] for name in names}, specs)

    def check_cast(self, call: str, wanted: Collection[int], dtype: torch.dtype, *, hint: str | None = None) -> None:
        """Raise if a cast of floating leaves would cast codes; integer codes and their scales are not cast."""
        if not self.codes:
            return
        chosen = set(wanted)
        for number, one in self.codes.items():
            is_cast = one.dtype not in _INTEGERS and one.dtype != dtype
            if number in chosen and is_cast:
                own = "dequantize=True makes numbers of codes and scales; without dtype= both are loaded as they are."
                raise refusal(call, one, self.specs, hint=hint or own)


# -- trees ------------------------------------------------------------------------------------------------------


def specs_of(tree: TensorCollection) -> Specs:
    """Return the dtype and shape of every tensor in a tree by its dotted name, tied leaves under all of theirs."""
    specs: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
    for path, leaf in iter_leaves(tree):
        if isinstance(leaf, Tensor):
            specs[dotted(path)] = (leaf.dtype, leaf.shape)
    return specs


def cast_tree(call: str, tree: T, dtype: torch.dtype, whole: TensorCollection) -> T:
    """Return a part of a whole tree with its floating leaves cast; codes and their scales keep their dtypes."""
    paths = {dotted(path): leaf for path, leaf in iter_leaves(whole)}
    quantized = Quantized.of(specs_of(whole), {name: id(leaf) for name, leaf in paths.items()})
    quantized.check_cast(call, {id(leaf) for _, leaf in iter_leaves(tree)}, dtype)

    def convert(leaf: Any) -> Any:
        if not leaf.is_floating_point() or id(leaf) in quantized.kept:
            return leaf
        return leaf.to(dtype)

    return tree._map(LeafOp("cast", convert))


def codes_in(tree: TensorCollection) -> tuple[list[Scaled], Specs]:
    """Return the leaves of codes in a tree, and its specs; a tree of ordinary dtypes costs a look at these."""
    specs: Specs = {}
    dtypes = [leaf.dtype for _, leaf in iter_leaves(tree) if isinstance(leaf, Tensor)]
    if may_have_codes(dtypes, ()):
        specs = specs_of(tree)
    return find_scaled(specs), specs


def check_unscaled(call: str, tree: TensorCollection) -> None:
    """Raise if a leaf of a tree has codes, with which the call would compute as with numbers."""
    found, specs = codes_in(tree)
    if found:
        raise refusal(call, found[0], specs)


def refusal(call: str, one: Scaled, specs: Specs, *, hint: str | None = None) -> UnsupportedError:
    """Return the error of a call that computes with numbers, for a leaf of codes."""
    dtype, shape = specs[one.name]
    how = hint or "tdf.load(path, dequantize=True), or tdfunc cast --dequantize in a shell, makes numbers of FP8 codes."
    return UnsupportedError(
        f"{call}: the leaf {one.name!r} has codes, which are numbers only together with their scale.",
        expected="numbers",
        got=f"{dtype} {list(shape)} ({one})",
        hint=how,
    )


class Dequantizing:
    """The change of (a part of) a tree with codes into a tree of numbers.

    Args:
        call: The name of the call, for messages.
        tree: The tree, with or without values.
        where: The leaves of the result; None for all.
        dtype: The dtype of all floating leaves; None for float32 where codes were, and no change elsewhere.

    Raises:
        UnsupportedError: A chosen leaf has codes of a layout that is not known.
    """

    def __init__(
        self, call: str, tree: TensorCollection, where: "FilterLike | None", dtype: torch.dtype | None
    ) -> None:
        specs = specs_of(tree)
        found = find_scaled(specs)
        chosen: TensorCollection = tree
        if where is not None:
            chosen = partition(tree, where)[0]
        beside = {name for name in specs if _split(name)[1] == _MARK}
        for one in found:
            beside.update(one.companions)
        self._dtype = dtype
        # A filter chooses tensors only, as in `partition`.
        self._keeps_plain = where is None
        # The leaves of the result, and the codes among them, by name.
        self.names: set[str] = {dotted(path) for path, _ in iter_leaves(chosen)} - beside
        self.codes: dict[str, Scaled] = {one.name: one for one in found if one.name in self.names}
        for one in self.codes.values():
            if one.blocks is None:
                hint = "the program that wrote the file dequantizes it; without dequantize= codes and scales are kept."
                raise refusal(f"{call}: dequantize", one, specs, hint=hint)

    @property
    def reads(self) -> Filter:
        """The leaves that are read: the chosen ones, and the scales of the codes among them."""
        names = self.names | {one.scale for one in self.codes.values()}
        return Filter(lambda path, leaf: dotted(path) in names)

    def apply(self, tree: T) -> T:
        """Return the tree with numbers in place of codes, and without scales."""
        paths = {path: dotted(path) for path, _ in iter_leaves(tree)}
        leaves = {paths[path]: leaf for path, leaf in iter_leaves(tree)}
        codes = {id(leaves[name]): one for name, one in self.codes.items()}

        def convert(leaf: Any) -> Any:
            one = codes.get(id(leaf))
            if one is not None:
                assert one.blocks is not None
                made = dequantize(leaf, leaves[one.scale], one.blocks, self._dtype or torch.float32)
                return _flagged(made, leaf)
            if self._dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            if leaf.dtype == self._dtype:
                return leaf
            return _flagged(leaf.detach().to(self._dtype), leaf)

        wanted = {path for path, name in paths.items() if name in self.names}
        kept = keep_leaves(tree, wanted, self._keeps_plain)
        return kept._map(LeafOp("dequantize", convert))


def _flagged(made: Tensor, leaf: Tensor) -> Tensor:
    """Return a new leaf that requires grad, and is a Parameter, as the old one."""
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, leaf.requires_grad)
    return made.requires_grad_(leaf.requires_grad)
