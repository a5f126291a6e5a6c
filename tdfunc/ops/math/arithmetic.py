"""Pointwise functions of several operands (clamp, lerp, ...), and those along one batch dimension (softmax, cumsum)."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.shapes import dim_index
from tdfunc.core.types import LeafFn
from tdfunc.ops.base.foreach import binary, broadcast_size, check_same, foreach_pairs, over_batch_op
from tdfunc.ops.batch.index import check_condition

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
_NUMBERS = (bool, int, float)


def map_operands(tree: T, name: str, fn: Callable[..., Any], operands: Sequence[Any]) -> T:
    """Apply `fn(leaf, *operands)`: each operand is a number, a tensor over the batch, or a tree with the same keys."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    trees = [x for x in operands if isinstance(x, TensorCollection)]
    for other in trees:
        check_same(tree, other, name)
        if broadcast_size(tree, other, name) is not None:
            raise BatchSizeError(
                f"{name}: the first tree does not have the largest batch.",
                expected=list(tree._batch_size),
                got=list(other._batch_size),
                hint="expand() the first tree.",
            )

    rest = operands[len(trees) :]
    trees_first = all(isinstance(x, TensorCollection) for x in operands[: len(trees)])
    # The common case, without sorting operands out for each leaf.
    if not tensors and trees_first:
        if fn is getattr(torch, name, None) and not trees:
            return tree._map(LeafOp(name, methodcaller(name, *rest)))
        return tree._map(LeafOp(name, lambda x, *twins: fn(x, *twins, *rest)), *trees)

    def leaf(x: Any, *given: Any) -> Any:
        # Tensors come first, then the leaves of the other trees.
        parts = iter(given[: len(tensors)])
        twins = iter(given[len(tensors) :])
        found: list[Any] = []
        for operand in operands:
            if isinstance(operand, Tensor):
                found.append(next(parts))
            elif isinstance(operand, TensorCollection):
                found.append(next(twins))
            else:
                found.append(operand)
        return fn(x, *found)

    return tree._map(over_batch_op(tree, name, leaf, *tensors), *trees)


def clamp(tree: T, low: Any, high: Any) -> T:
    """Bound every element; either bound may be missing."""
    # torch takes two numbers or two tensors.
    if (low is None) == (high is None) and isinstance(low, _NUMBERS) == isinstance(high, _NUMBERS):
        return map_operands(tree, "clamp", torch.clamp, (low, high))
    if low is not None:
        tree = binary(tree, low, "clamp_min", "_foreach_clamp_min")
    if high is None:
        return tree
    return binary(tree, high, "clamp_max", "_foreach_clamp_max")


def lerp(tree: T, end: Any, weight: Any) -> T:
    """Go from every leaf towards `end` by a weight."""
    if isinstance(end, TensorCollection) and isinstance(weight, (int, float)):
        done = foreach_pairs(tree, end, "_foreach_lerp", weight)
        if done is not None:
            return done
    return map_operands(tree, "lerp", torch.lerp, (end, weight))


def masked_fill(tree: T, mask: Tensor, value: Any) -> T:
    """Put a number where the mask over the batch holds; every leaf keeps its dtype."""
    check_condition(tree, mask, "masked_fill")
    return tree._map(over_batch_op(tree, "masked_fill", lambda x, holds: x.masked_fill(holds, value), mask))


def along(tree: T, name: str, dim: int, **options: Any) -> T:
    """Apply `torch.<name>(leaf, dim)` along a batch dimension; the shape stays."""
    fn = getattr(torch, name)
    dim = dim_index(dim, len(tree._batch_size), name)

    def bind(dim: int) -> LeafFn:
        return lambda x: fn(x, dim, **options)

    return tree._map(LeafOp(name, bind(dim), args=(dim,), bind=bind))


class ArithmeticMethods(TensorCollection):
    """Functions of several operands, and along a batch dimension."""

    __slots__ = ()

    def clamp(self, min: Any = None, max: Any = None) -> "Self":
        """Return the tree with every element bounded.

        Args:
            min: A number, a tensor over the batch, or a tree with the same keys.
            max: The same for the upper bound, which is the result if it is below `min`.

        Examples:
            >>> TensorDict({"a": torch.arange(4)}, [4]).clamp(1, max=2)["a"]
            tensor([1, 1, 2, 2])
        """
        return clamp(self, min, max)

    def lerp(self, end: Any, weight: Any) -> "Self":
        """Return the tree of `torch.lerp(leaf, end, weight)`: leaf + weight * (end - leaf).

        Both are tensors over the batch or trees with the same keys; the weight may be a number.

        Raises:
            TreeStructureError: The keys of another tree differ.
            BatchSizeError: An operand has a larger batch.

        Examples:
            >>> old, new = TensorDict({"w": torch.zeros(2)}), TensorDict({"w": torch.ones(2)})
            >>> old.lerp(new, 0.1)["w"]
            tensor([0.1000, 0.1000])
        """
        return lerp(self, end, weight)

    def addcmul(self, other1: Any, other2: Any, *, value: Any = 1) -> "Self":
        """Return the tree of `leaf + value * other1 * other2`; both are tensors over the batch or trees."""
        return map_operands(self, "addcmul", partial(torch.addcmul, value=value), (other1, other2))

    def addcdiv(self, other1: Any, other2: Any, *, value: Any = 1) -> "Self":
        """Return the tree of `leaf + value * other1 / other2`; both are tensors over the batch or trees."""
        return map_operands(self, "addcdiv", partial(torch.addcdiv, value=value), (other1, other2))

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> "Self":
        """Replace NaN and infinities with numbers, by default with the largest and least numbers of the dtype."""
        return self._map(LeafOp("nan_to_num", lambda x: torch.nan_to_num(x, nan, posinf, neginf)))

    def masked_fill(self, mask: Tensor, value: Any) -> "Self":
        """Fill the batch elements at which the mask is True with a number. Every leaf keeps its dtype.

        Raises:
            ValueError: The mask does not hold one bool for each element of the batch.
        """
        return masked_fill(self, mask, value)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> "Self":
        """Return the tree of `torch.softmax(leaf, dim)` along a batch dimension."""
        return along(self, "softmax", dim, dtype=dtype)

    def cumsum(self, dim: int, *, dtype: torch.dtype | None = None) -> "Self":
        """Return the tree of cumulative sums along a batch dimension."""
        return along(self, "cumsum", dim, dtype=dtype)

    def cumprod(self, dim: int, *, dtype: torch.dtype | None = None) -> "Self":
        """Return the tree of cumulative products along a batch dimension."""
        return along(self, "cumprod", dim, dtype=dtype)
