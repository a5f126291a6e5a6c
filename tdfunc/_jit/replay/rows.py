"""Operations whose rows do not depend on each other: norms of layers, attention, pooling."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tdfunc._jit.memory import tensors_of
from tdfunc._jit.replay.kernels import pool_last, pools_faster
from tdfunc._jit.replay.pieces import Cut, Pieces, has_one_dtype, largest_bytes, list_arguments, name_operands

aten = torch.ops.aten

# The operands that have a row for each row of the results.
_ROWS: dict[Any, tuple[str, ...]] = {
    aten.native_layer_norm.default: ("input",),
    aten.native_layer_norm_backward.default: ("grad_out", "input", "mean", "rstd"),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("query", "key", "value"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        "grad_out", "query", "key", "value", "out", "logsumexp",
    ),
}  # fmt: skip
# An operand that has a row for each, or one for all, or none.
_MASK = "attn_mask"
# In attention, a product rounds otherwise if its operands begin elsewhere between two lines of the cache.
_LINE_BYTES = 64
# Of the largest result: a piece, its operands and what the kernel allocates fit into a cache of the second level.
_PIECE_BYTES = 1 << 18
# malloc keeps the memory of a piece of one row up to here.
_MAX_ROW_BYTES = 16 << 20


def find_row_pieces(node: fx.Node) -> Pieces | None:
    """Return the call that computes a node some rows at a time; None if its rows depend on each other."""
    # Any: an overload of torch.ops.
    operation: Any = node.target
    if not all([value.numel() for value in tensors_of(node)]):
        return None
    if pools_faster(node):
        return Pieces(pool_last, list_arguments(operation), _cut_rows(node, ("self",)))
    names = _ROWS.get(operation)
    if names is None or not _is_by_rows(node, names):
        return None
    return Pieces(operation, list_arguments(operation), _cut_rows(node, names))


def _cut_rows(node: fx.Node, names: Sequence[str]) -> Cut:
    made = tensors_of(node)
    rows = len(made[0])
    cut = [*names]
    if _has_rows(name_operands(node).get(_MASK), rows):
        cut.append(_MASK)
    count = max(1, _PIECE_BYTES * rows // largest_bytes(node))
    return Cut(rows, tuple([(name, 0) for name in cut]), (0,) * len(made), count)


def _is_by_rows(node: fx.Node, names: Sequence[str]) -> bool:
    """Return whether some rows have the bits that they have among all, in memory that malloc keeps."""
    operands = name_operands(node)
    # The gradients of weights are sums over rows.
    if any(operands.get("output_mask", [True])[1:]):
        return False
    made = tensors_of(node)
    rows = len(made[0])
    parts = [*made, *[operands[name].meta["val"] for name in names]]
    # A norm with other dtypes of weights returns others than the trace says.
    if any([value.shape[0] != rows for value in parts]) or not has_one_dtype(node):
        return False
    if "query" in names and not _begin_alike(operands["query"].meta["val"], parts):
        return False
    return largest_bytes(node) <= rows * _MAX_ROW_BYTES


def _begin_alike(query: Tensor, parts: list[Tensor]) -> bool:
    """Return whether attention on some rows has its rows, and its scratch memory in each thread, at whole lines."""
    sizes = [part[0].nbytes for part in parts]
    return all([size_bytes % _LINE_BYTES == 0 for size_bytes in (*sizes, query.shape[2] * query.itemsize)])


def _has_rows(mask: Any, rows: int) -> bool:
    """Return whether a mask has a row for each row of the results."""
    return mask is not None and mask.meta["val"].dim() == 4 and mask.meta["val"].shape[0] == rows
