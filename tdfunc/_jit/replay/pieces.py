"""Operations without a kernel for given memory whose rows are independent: some rows are computed at a time.

The result of a piece is small: it has the memory of the last one, and is copied from the cache into the large result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tdfunc._jit.memory import tensors_of

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
# A norm with other dtypes of weights returns others than the trace says.
_DTYPES = (torch.float32, torch.float64)
# In attention, a product rounds otherwise if its operands begin elsewhere between two lines of the cache.
_LINE_BYTES = 64
# Of the largest result: a piece, its operands and what the kernel allocates fit into a cache of the second level.
_PIECE_BYTES = 1 << 18
# malloc keeps the memory of a piece of one row up to here.
_MAX_ROW_BYTES = 16 << 20

# A call of the operation's arguments that writes into the tensors `outs`; an item is None where the operation has none.
PiecesCall = Callable[..., list[Tensor | None]]


def find_pieces(node: fx.Node) -> PiecesCall | None:
    """Return the call that computes a node some rows at a time; None if its rows depend on each other."""
    names = _ROWS.get(node.target)
    if names is None or not _is_by_rows(node, names):
        return None
    cut = list(names)
    if _is_cut(_name_operands(node).get(_MASK), len(tensors_of(node)[0])):
        cut.append(_MASK)
    return _make_call(node, cut)


# Any: nodes and numbers.
def _name_operands(node: fx.Node) -> dict[str, Any]:
    return dict(zip(_list_arguments(node.target), node.args, strict=False)) | node.kwargs


# Any: an overload of torch.ops.
def _list_arguments(operation: Any) -> list[str]:
    return [argument.name for argument in operation._schema.arguments]


def _is_by_rows(node: fx.Node, names: Sequence[str]) -> bool:
    """Return whether some rows have the bits that they have among all, in memory that malloc keeps."""
    operands = _name_operands(node)
    # The gradients of weights are sums over rows.
    if any(operands.get("output_mask", [True])[1:]):
        return False
    made = tensors_of(node)
    rows = len(made[0])
    parts = [*made, *[operands[name].meta["val"] for name in names]]
    if any([value.shape[0] != rows for value in parts]) or not _has_one_dtype(node):
        return False
    if "query" in names and not _begin_alike(operands["query"].meta["val"], parts):
        return False
    return max([value.nbytes for value in made]) <= rows * _MAX_ROW_BYTES


def _make_call(node: fx.Node, cut: Sequence[str]) -> PiecesCall:
    """Return the call of a node that cuts these arguments."""
    # Any: an overload of torch.ops.
    operation: Any = node.target
    places = [_list_arguments(operation).index(name) for name in cut]
    made = tensors_of(node)
    rows = len(made[0])
    count = max(1, _PIECE_BYTES * rows // max([value.nbytes for value in made]))
    present = [value is not None for value in node.meta["val"]]

    def call(*args: Any, outs: list[Tensor], **kwargs: Any) -> list[Tensor | None]:
        for begin in range(0, rows, count):
            piece = slice(begin, begin + count)
            operands = [value[piece] if i in places else value for i, value in enumerate(args)]
            options = {name: value[piece] if name in cut else value for name, value in kwargs.items()}
            results = [result for result in operation(*operands, **options) if result is not None]
            for out, result in zip(outs, results, strict=True):
                out[piece].copy_(result)
        given = iter(outs)
        return [next(given) if is_there else None for is_there in present]

    return call


def _has_one_dtype(node: fx.Node) -> bool:
    dtypes = {operand.meta["val"].dtype for operand in node.all_input_nodes}
    return len(dtypes) == 1 and dtypes <= {*_DTYPES}


def _begin_alike(query: Tensor, parts: list[Tensor]) -> bool:
    """Return whether attention on some rows has its rows, and its scratch memory in each thread, at whole lines."""
    sizes = [part[0].nbytes for part in parts]
    return all([size_bytes % _LINE_BYTES == 0 for size_bytes in (*sizes, query.shape[2] * query.itemsize)])


def _is_cut(mask: Any, rows: int) -> bool:
    """Return whether a mask has a row for each row of the results."""
    return mask is not None and mask.meta["val"].dim() == 4 and mask.meta["val"].shape[0] == rows
