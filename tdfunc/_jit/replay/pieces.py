"""Operations without a kernel for given memory that are computed in pieces: some rows, or some groups of channels.

The result of a piece is small: it has the memory of the last one, and is copied from the cache into the large result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tdfunc._jit.memory import tensors_of

FLOATS = (torch.float32, torch.float64)


class Cut(NamedTuple):
    """How an operation is computed in pieces of some of its `units`, which do not depend on each other."""

    units: int
    # The dimension of each operand, and of each result, that has all units one after the other.
    operands: tuple[tuple[str, int], ...]
    results: tuple[int, ...]
    # The number of units in a piece.
    at_once: int = 1
    # The argument that is the number of units.
    number: str | None = None


class Pieces:
    """A function of an operation's arguments that computes it in pieces, into the tensors `outs`."""

    # Any: an overload of torch.ops, or a function of its arguments.
    def __init__(self, fn: Callable[..., Any], names: Sequence[str], cut: Cut) -> None:
        self._fn = fn
        self._cut = cut
        # By the names and the places of arguments: they are given in both ways.
        self._dims: dict[str | int, int] = dict(cut.operands)
        self._dims |= {names.index(name): dim for name, dim in cut.operands}
        self._number = None
        if cut.number is not None:
            self._number = names.index(cut.number)

    def __call__(self, *args: Any, outs: list[Tensor], **kwargs: Any) -> Any:
        """Return `outs` as the operation returns its results."""
        results: Any = None
        for begin in self.begins():
            results = self.compute(begin, *args, **kwargs)
            for out, dim, result in zip(outs, self._cut.results, list_tensors(results), strict=True):
                self.cut(out, dim, begin).copy_(result)
        if isinstance(results, Tensor):
            return outs[0]
        given = iter(outs)
        return [None if result is None else next(given) for result in results]

    def begins(self) -> range:
        """Return the first unit of each piece."""
        return range(0, self._cut.units, self._cut.at_once)

    def compute(self, begin: int, *args: Any, **kwargs: Any) -> Any:
        """Return the results of one piece."""
        operands = [self._cut_operand(i, value, begin) for i, value in enumerate(args)]
        options = {name: self._cut_operand(name, value, begin) for name, value in kwargs.items()}
        if self._number is not None:
            operands[self._number] = self._count_at(begin)
        return self._fn(*operands, **options)

    def cut(self, value: Tensor, dim: int, begin: int) -> Tensor:
        """Return the part of an operand or a result that belongs to the piece that begins at a unit."""
        size = value.shape[dim] // self._cut.units
        return value.narrow(dim, begin * size, self._count_at(begin) * size)

    def _count_at(self, begin: int) -> int:
        return min(self._cut.at_once, self._cut.units - begin)

    # Any: an argument.
    def _cut_operand(self, key: str | int, value: Any, begin: int) -> Any:
        dim = self._dims.get(key)
        if dim is None or value is None:
            return value
        part = self.cut(value, dim, begin)
        # Kernels for whole memory are others than kernels for parts of it. Rows are whole.
        return part.contiguous() if dim else part


# Any: the results of an operation.
def list_tensors(results: Any) -> list[Tensor]:
    """Return the tensors among the results, which may be None."""
    if isinstance(results, Tensor):
        return [results]
    return [result for result in results if result is not None]


# Any: an overload of torch.ops.
def list_arguments(operation: Any) -> list[str]:
    """Return the names of an operation's arguments."""
    return [argument.name for argument in operation._schema.arguments]


# Any: nodes and numbers.
def name_operands(node: fx.Node) -> dict[str, Any]:
    """Return the arguments that a node gives, by their names."""
    return dict(zip(list_arguments(node.target), node.args, strict=False)) | node.kwargs


def has_one_dtype(node: fx.Node) -> bool:
    """Return whether all operands have one dtype, of 32 or 64 bits."""
    dtypes = {operand.meta["val"].dtype for operand in node.all_input_nodes}
    return len(dtypes) == 1 and dtypes <= {*FLOATS}


def largest_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's largest result."""
    return max([value.nbytes for value in tensors_of(node)])
