"""Operations that are computed in pieces only where a probe finds the bits of the whole: convolutions, batch norms.

oneDNN chooses the algorithm of a convolution by its shape, and algorithms round differently. No algorithm is chosen by
the numbers. Therefore the first and the last pieces of random operands are compared with these parts of the whole.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tdfunc._jit.memory import tensors_of
from tdfunc._jit.replay.pieces import Cut, Pieces, has_one_dtype, list_arguments, list_tensors, name_operands

aten = torch.ops.aten

# The largest operand or result of a piece: with the others it stays in the cache.
_PIECE_BYTES = 1 << 20
# malloc keeps the memory of smaller pieces.
_MAX_PIECE_BYTES = 16 << 20
# The number of sizes of pieces that are tried, from the smallest on.
_TRIED = 3
# The least count of compared numbers of a result: a few may be equal by chance.
ENOUGH = 256
# Random numbers are repeated after a prime, so that no two rows are equal.
_PERIOD = 65_537
_STATISTICS = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")


class Like(NamedTuple):
    """What a tensor is, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Like":
        """Return the description of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        """Return such a tensor of random numbers."""
        last = sum([(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)])
        generator = torch.Generator("cpu").manual_seed(last)
        numbers = torch.rand(_PERIOD, dtype=self.dtype, device="cpu", generator=generator)
        return numbers.repeat(last // _PERIOD + 1).as_strided(self.shape, self.stride)


class ProbedPieces:
    """A function of an operation's arguments that computes it in pieces, if these have the bits of the whole."""

    # Any: an overload of torch.ops.
    def __init__(self, operation: Any, cut: Cut, counts: tuple[int, ...]) -> None:
        self._operation = operation
        self._cut = cut
        # The numbers of units in a piece, to choose from.
        self._counts = counts

    # Any: as the operation takes and returns them.
    def __call__(self, *args: Any, outs: list[Tensor]) -> Any:
        """Return the results, in `outs` if they are computed in pieces."""
        pieces = self.find_pieces(args)
        if pieces is None:
            return self._operation(*args)
        return pieces(*args, outs=outs)

    def find_pieces(self, args: Sequence[Any]) -> Pieces | None:
        """Return what computes arguments like these in pieces, as torch is set now; None if no size has the bits."""
        described = tuple(map(_describe, args))
        return _find_pieces(self._operation, self._cut, self._counts, described, read_settings())


def find_probed_pieces(node: fx.Node) -> ProbedPieces | None:
    """Return the call that computes a node in pieces; None if they depend on each other, or have other bits."""
    find_cut = _CUTS.get(node.target)
    if find_cut is None or node.kwargs or not has_one_dtype(node):
        return None
    cut = find_cut(name_operands(node))
    if cut is None or len(tensors_of(node)) != len(cut.results) or cut.units == 0:
        return None
    return probe(node, cut)


def probe(node: fx.Node, cut: Cut) -> ProbedPieces | None:
    """Return the call that computes a node in pieces; None if they have other bits."""
    pieces = ProbedPieces(node.target, cut, _list_counts(node, cut))
    if pieces.find_pieces(node.args) is None:
        return None
    return pieces


def _cut_convolution(operands: dict[str, Any]) -> Cut | None:
    if operands["groups"] > 1:
        return Cut(operands["groups"], (("input", 1), ("weight", 0), ("bias", 0)), (1,), number="groups")
    # The channels of results are sums over all of the input's.
    if operands["transposed"]:
        return None
    return Cut(_size_of(operands["weight"], 0), (("weight", 0), ("bias", 0)), (1,))


def _cut_convolution_backward(operands: dict[str, Any]) -> Cut | None:
    mask = operands["output_mask"]
    # `bias_sizes` has the sizes of the whole bias.
    if mask[2]:
        return None
    results = tuple([dim for dim, is_made in zip((1, 0, 0), mask, strict=True) if is_made])
    if operands["groups"] > 1:
        cut = (("grad_output", 1), ("input", 1), ("weight", 0))
        return Cut(operands["groups"], cut, results, number="groups")
    # The gradient of the input is a sum over all channels.
    if operands["transposed"] or mask[0]:
        return None
    return Cut(_size_of(operands["weight"], 0), (("grad_output", 1), ("weight", 0)), results)


def _cut_batch_norm_backward(operands: dict[str, Any]) -> Cut:
    cut = (("grad_out", 1), ("input", 1), *[(name, 0) for name in _STATISTICS])
    results = tuple([dim for dim, is_made in zip((1, 0, 0), operands["output_mask"], strict=True) if is_made])
    return Cut(_size_of(operands["input"], 1), cut, results)


def _cut_group_norm(operands: dict[str, Any]) -> Cut:
    return Cut(operands["N"], (("input", 0),), (0, 0, 0), number="N")


def _cut_group_norm_backward(operands: dict[str, Any]) -> Cut | None:
    # The gradients of weights are sums over rows.
    if any(operands["output_mask"][1:]):
        return None
    cut = (("grad_out", 0), ("input", 0), ("mean", 0), ("rstd", 0))
    return Cut(operands["N"], cut, (0,), number="N")


def _cut_upsample(operands: dict[str, Any]) -> Cut:
    return Cut(_size_of(operands["self"], 0), (("self", 0),), (0,))


def _size_of(node: fx.Node, dim: int) -> int:
    return node.meta["val"].shape[dim]


_CUTS: dict[Any, Callable[[dict[str, Any]], Cut | None]] = {
    aten.convolution.default: _cut_convolution,
    aten.convolution_backward.default: _cut_convolution_backward,
    aten.native_batch_norm_backward.default: _cut_batch_norm_backward,
    aten.native_group_norm.default: _cut_group_norm,
    aten.native_group_norm_backward.default: _cut_group_norm_backward,
    aten.upsample_nearest1d.default: _cut_upsample,
    aten.upsample_nearest2d.default: _cut_upsample,
    aten.upsample_nearest3d.default: _cut_upsample,
    aten.upsample_linear1d.default: _cut_upsample,
    aten.upsample_bilinear2d.default: _cut_upsample,
    aten.upsample_trilinear3d.default: _cut_upsample,
}


def _list_counts(node: fx.Node, cut: Cut) -> tuple[int, ...]:
    """Return numbers of units in a piece, all of one size: oneDNN may choose another algorithm for a smaller rest."""
    operands = name_operands(node)
    given = [operands[name].meta["val"] for name, _ in cut.operands if operands[name] is not None]
    unit_bytes = max([value.nbytes for value in (*given, *tensors_of(node))]) / cut.units
    divisors = [count for count in range(1, cut.units) if cut.units % count == 0]
    kept = [count for count in divisors if count * unit_bytes <= _MAX_PIECE_BYTES]
    large = [count for count in kept if count * unit_bytes >= _PIECE_BYTES]
    return tuple((large or kept[-1:])[:_TRIED])


# Any: an argument, or the node of one.
def _describe(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, Tensor):
        return Like.of(value)
    return tuple(value) if isinstance(value, list) else value


def read_settings() -> tuple[Any, ...]:
    """Return what chooses the algorithms of convolutions, besides the shapes."""
    # Private: the public name opens a context to read it.
    is_enabled = torch._C._get_mkldnn_enabled()
    convolutions: Any = torch.backends.mkldnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_num_threads(), is_enabled, convolutions.fp32_precision, is_deterministic


# Any: an overload of torch.ops; descriptions of arguments; settings.
@functools.lru_cache(1024)
def _find_pieces(
    operation: Any, cut: Cut, counts: tuple[int, ...], described: tuple[Any, ...], _settings: tuple[Any, ...]
) -> Pieces | None:
    """Return pieces that have the bits that they have in the whole, for random operands."""
    if not counts:
        return None
    args = [each.make() if isinstance(each, Like) else each for each in described]
    whole = list_tensors(operation(*args))
    names = list_arguments(operation)
    for count in counts:
        pieces = Pieces(operation, names, cut._replace(at_once=count))
        begins = _choose_begins(pieces, whole)
        if begins and all([_is_part(pieces, begin, args, whole, cut.results) for begin in begins]):
            return pieces
    return None


def _choose_begins(pieces: Pieces, whole: list[Tensor]) -> list[int]:
    """Return the pieces to compare, from both ends, so that no result has few numbers; none if it has few in all."""
    begins = list(pieces.begins())
    fewest = min([value.numel() for value in whole])
    if fewest < ENOUGH:
        return []
    compared = max(2, math.ceil(ENOUGH * len(begins) / fewest))
    return sorted({*begins[: compared // 2], *begins[-math.ceil(compared / 2) :]})


# Any: arguments of the operation.
def _is_part(pieces: Pieces, begin: int, args: list[Any], whole: list[Tensor], dims: tuple[int, ...]) -> bool:
    """Return whether a piece has the bits that it has in the whole."""
    piece = list_tensors(pieces.compute(begin, *args))
    parts = [pieces.cut(value, dim, begin) for value, dim in zip(whole, dims, strict=True)]
    return all(map(torch.equal, piece, parts))
