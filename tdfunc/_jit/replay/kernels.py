"""Other kernels of torch that compute the same bits in less time."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64)
EXACT_DTYPES = (*_FLOATS, torch.int64)
# Of more numbers, the copies leave the cache; pieces do not.
_MAX_POOLED = 1 << 22
# Below, the copies take as long as the rows.
_MIN_ROWS = 96
# Of more classes, torch's kernel computes a vector of a row at a time.
_MAX_CLASSES = 32
# A multiple of the numbers in any vector: kernels treat the rest of a column apart.
_WHOLE = 16


def find_kernel(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function of a node's arguments that computes the node, and is faster than its operation."""
    target = node.target
    if pools_faster(node) and _operand(node).numel() <= _MAX_POOLED:
        return _pool
    if target is aten._log_softmax.default and _has_short_rows(node):
        return _log_softmax
    if target is aten._log_softmax_backward_data.default and _has_short_rows(node):
        return _log_softmax_backward
    return None


def pool_last(x: Tensor, *args: list[int]) -> tuple[Tensor, Tensor]:
    """Pool with channels last, which torch's kernel compares a vector at a time, to the same values and indices."""
    return aten.max_pool2d_with_indices.default(x.contiguous(memory_format=torch.channels_last), *args)


def _pool(x: Tensor, *args: list[int]) -> tuple[Tensor, Tensor]:
    largest, indices = pool_last(x, *args)
    return largest.contiguous(), indices.contiguous()


def pools_faster(node: fx.Node) -> bool:
    """Return whether a node is pooling that is faster with channels last."""
    if node.target is not aten.max_pool2d_with_indices.default:
        return False
    x = _operand(node)
    plain = x.dim() == 4 and x.device.type == "cpu" and x.is_contiguous() and x.dtype in EXACT_DTYPES
    return plain and x.shape[1] >= 8 and x.numel() >= 1 << 13


def _operand(node: fx.Node) -> Tensor:
    # Any: an argument of a node.
    operand: Any = node.args[0]
    return operand.meta["val"]


def _has_short_rows(node: fx.Node) -> bool:
    """Return whether a softmax over the last dimension has many rows of a few numbers, and the same bits by columns.

    torch's kernel adds the numbers of a row that is shorter than a vector one by one, and waits for each.
    """
    # Any: arguments of a node.
    args: Any = node.args
    dim = args[1] if node.target is aten._log_softmax.default else args[2]
    x = _operand(node)
    value: Tensor = node.meta["val"]
    if x.device.type != "cpu" or x.dtype not in _FLOATS or value.dtype != x.dtype or x.dim() < 2:
        return False
    classes = x.shape[-1]
    is_last = dim % x.dim() == x.dim() - 1
    if not is_last or not value.is_contiguous() or not 1 < classes <= _MAX_CLASSES or x.numel() < _MIN_ROWS * classes:
        return False
    return _is_same_by_columns(x.dtype, classes)


@functools.cache
def _is_same_by_columns(dtype: torch.dtype, classes: int) -> bool:
    """Return whether a softmax by columns and its derivative have the bits of one by rows.

    They add in one order if a vector has more numbers than a row, which depends on the processor.
    """
    numbers = torch.arange(16.0 * _WHOLE * classes, dtype=dtype, device="cpu")
    x = numbers.sin().mul(4).view(-1, classes)
    grad = numbers.mul(0.7).cos().view(-1, classes)
    by_rows = aten._log_softmax.default(x, -1, False)
    if not torch.equal(by_rows, _log_softmax(x, -1, False)):
        return False
    expected = aten._log_softmax_backward_data.default(grad, by_rows, -1, dtype)
    return torch.equal(expected, _log_softmax_backward(grad, by_rows, -1, dtype))


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    def compute(part: Tensor, dim: int) -> Tensor:
        return aten._log_softmax.default(part, dim, half_to_float)

    return _by_columns(compute, x)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    def compute(grad: Tensor, output: Tensor, dim: int) -> Tensor:
        return aten._log_softmax_backward_data.default(grad, output, dim, dtype)

    return _by_columns(compute, grad, output)


def _by_columns(compute: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return a function of rows, computed for the columns of the transposed operands, a vector of them at a time."""
    shape = operands[0].shape
    # With three dimensions: of two, torch transposes blocks, which takes longer for a few columns.
    rows = [operand.reshape(1, -1, shape[-1]) for operand in operands]
    count = rows[0].shape[1]
    whole = count - count % _WHOLE
    columns = compute(*[operand[:, :whole].mT.contiguous() for operand in rows], 1)
    if whole == count:
        return columns.mT.contiguous().view(shape)
    rest = compute(*[operand[:, whole:] for operand in rows], 2)
    return torch.cat([columns.mT, rest], 1).view(shape)
