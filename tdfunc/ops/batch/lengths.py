"""`pad_to`: one dimension padded to one of a few lengths, so that calls of many lengths have few shapes."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Size, Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, as_count, check_choice, error
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.ops.base.cast import keeps_number
from tdfunc.ops.batch.rearrange import pad_values, same_names

# Any: a tensor, a tree, or containers of them that torch's pytree knows.
T = TypeVar("T")
_MOST_SHOWN = 5


def pad_to(
    tree: T,
    sizes: int | Sequence[int] | None = None,
    *,
    dim: int,
    multiple_of: int | None = None,
    value: float = 0,
    side: str = "right",
) -> tuple[T, Tensor]:
    """Pad a dimension to the next of a few sizes.

    `tdf.jit`, `torch.compile` and CUDA graphs prepare a function for each shape. Padding to a few sizes keeps the
    number of shapes small. Every tensor that has the dimension is padded, and tensors with fewer dimensions stay as
    they are. The padded tensors are contiguous, so that equal shapes also have equal strides.

    Args:
        tree: A tensor, a tree, or a dict, list or tuple of them.
        sizes: The sizes to choose from, or one size. The smallest that is not below the length is used.
        dim: The dimension of each tensor. A negative number is possible for one tensor.
        multiple_of: A number whose next multiple is the size, in place of `sizes`.
        value: The value of the new elements.
        side: Where the new elements go, "right" or "left".

    Returns:
        The padded tree, and a mask that is True where the data are.

    Shapes:
        A tensor (*B, T, *S) becomes (*B, P, *S), T <= P. The mask is (P,).

    Raises:
        ValueError: Neither or both of `sizes` and `multiple_of` are given; the length is above all sizes; or no tensor
            has the dimension.
        LeafMismatchError: The tensors have different lengths, or a dtype cannot hold the value.

    Source:
        `pad_to_multiple_of` of the tokenizers of transformers, `bucket_by_sequence_length` of tf.data.

    Examples:
        >>> padded, mask = tdf.pad_to(torch.ones(2, 3), [2, 4, 8], dim=1)
        >>> padded
        tensor([[1., 1., 1., 0.],
                [1., 1., 1., 0.]])
        >>> mask
        tensor([ True,  True,  True, False])
    """
    check_choice("pad_to: side", side, ("right", "left"))
    if isinstance(tree, Tensor) and dim < 0:
        dim = range(tree.dim())[dim]
    first, length = _find_length(tree, dim)
    size = _next_size(length, sizes, multiple_of)
    pair = (0, size - length) if side == "right" else (size - length, 0)
    here = torch.arange(size, device=first.device)
    mask = here < length if side == "right" else here >= size - length

    def grown(old: Size) -> Size:
        if len(old) <= dim:
            return old
        return Size([*old[:dim], size, *old[dim + 1 :]])

    def leaf(x: Any) -> Any:
        if isinstance(x, NonTensorBase):
            if len(x.shape) <= dim:
                return x
            return pad_values(x, [(0, 0)] * dim + [pair], grown(x.shape))
        if not isinstance(x, Tensor) or x.dim() <= dim:
            return x
        _check_value(value, x.dtype)
        padded = torch.nn.functional.pad(x, [*[0, 0] * (x.dim() - dim - 1), *pair], value=value)
        return padded.contiguous()

    def node(x: Any) -> Any:
        if isinstance(x, TensorCollection):
            return x._shape(LeafOp("pad_to", leaf, grown, same_names, True, (size, dim, value, side)))
        return leaf(x)

    return tree_map(node, tree, is_leaf=lambda x: isinstance(x, TensorCollection)), mask


def _find_length(tree: Any, dim: int) -> tuple[Tensor, int]:
    """Return a tensor that has the dimension, and the length that it has in all of them."""
    if dim < 0:
        raise error(
            ValueError,
            "pad_to: a negative dimension is another one in tensors of other dimensions.",
            expected="dim of 0 or more for a tree",
            got=dim,
        )
    found = [
        (keystr(path), x) for path, x in tree_flatten_with_path(tree)[0] if isinstance(x, Tensor) and x.dim() > dim
    ]
    if not found:
        raise error(
            ValueError,
            f"pad_to: no tensor has dimension {dim}.",
            expected="tensors, trees, and dicts, lists and tuples of them",
            got=type(tree).__name__,
            hint="dict(encoding) is the dict of a tokenizer's result; lazy.pad() makes one tree of a lazy stack.",
        )
    lengths = {name: x.shape[dim] for name, x in found}
    if len(set(lengths.values())) > 1:
        shown = [f"{name}: {length}" for name, length in lengths.items()]
        raise LeafMismatchError(
            f"pad_to: dimension {dim} has different lengths.",
            expected="one length in all tensors that have this dimension",
            got=", ".join(shown[:_MOST_SHOWN]),
            hint="pad the tensors that belong together, each group in its own call.",
        )
    return found[0][1], found[0][1].shape[dim]


def _next_size(length: int, sizes: int | Sequence[int] | None, multiple_of: int | None) -> int:
    if (sizes is None) == (multiple_of is None):
        raise error(
            ValueError,
            "pad_to: the sizes are not given in one way.",
            expected="sizes or multiple_of=",
            got="neither" if sizes is None else "both",
            hint="pad_to(x, [32, 64, 128], dim=1) or pad_to(x, multiple_of=32, dim=1).",
        )
    if multiple_of is not None:
        step = as_count("pad_to: multiple_of", multiple_of)
        return -(-length // step) * step
    given = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    counts = [as_count("pad_to: a size", size, 0) for size in given]
    fitting = [size for size in counts if size >= length]
    if not fitting:
        raise error(
            ValueError,
            f"pad_to: length {length} is above all sizes.",
            expected=f"a length of at most {max(counts, default=0)}",
            got=length,
            hint="shorten the data, or add a larger size.",
        )
    return min(fitting)


def _check_value(value: float, dtype: torch.dtype) -> None:
    if not keeps_number(value, dtype):
        raise LeafMismatchError(
            "pad_to: the value would be altered.",
            got=f"{value!r} for {dtype}",
            hint="pad tensors of other dtypes in a call with their own value.",
        )
