"""What leaves are to autograd and in memory: gradients, layout, pinned and shared memory, sizes."""

from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError
from tdfunc.core.keys import dotted
from tdfunc.ops import storage_writes
from tdfunc.ops.cast import detach
from tdfunc.ops.display.text import stored_bytes

if TYPE_CHECKING:
    from typing_extensions import Self


def tensors(tree: TensorCollection) -> list[Tensor]:
    """Return the tensor at every path; a tied one as often as it has paths."""
    return [leaf for _, leaf in iter_leaves(tree) if isinstance(leaf, Tensor)]


def counted(tree: TensorCollection, duplicates: bool) -> list[Tensor]:
    """Return the tensors to count: every path, or each tensor once."""
    found = tensors(tree)
    return found if duplicates else list({id(x): x for x in found}.values())


def _total(tree: TensorCollection, call: str, duplicates: bool, size: Callable[[Tensor], int]) -> int:
    try:
        return sum(map(size, counted(tree, duplicates)))
    except ValueError as err:
        found = next(((path, leaf) for path, leaf in iter_leaves(tree) if is_lazy(leaf)), None)
        if found is None:
            raise
        raise LeafMismatchError(
            f"{call}: {dotted(found[0])!r} is not initialised, it has no size yet.",
            expected="a tensor with a shape",
            got=type(found[1]).__name__,
            hint="call the lazy module once, before its tree is made.",
        ) from err


def grad(tree: TensorCollection) -> Any:
    """Return the tree of gradients; a leaf that has none is left out."""

    def leaf(x: Any) -> Any:
        # torch warns where it is asked for a gradient that cannot be there.
        return x.grad if isinstance(x, Tensor) and (x.is_leaf or x.retains_grad) else None

    return tree._map(LeafOp("grad", leaf, drops=True))


def is_contiguous(tree: TensorCollection) -> bool:
    """Whether every leaf is laid out row by row without gaps."""
    leaves = tree._data.values()
    if not PLAIN.issuperset(map(type, leaves)):
        leaves = tensors(tree)
    return all(map(Tensor.is_contiguous, leaves))


class MemoryMethods(TensorCollection):
    """Gradients, layout and memory of the leaves."""

    __slots__ = ()

    @property
    def requires_grad(self) -> Any:
        """Whether any leaf requires a gradient."""
        return any(x.requires_grad for x in tensors(self))

    @property
    def grad(self) -> "Self":
        """The tree of gradients that `backward` has left at the leaves; those without one are left out.

        Examples:
            >>> td = TensorDict({"w": torch.ones(2, requires_grad=True), "n": torch.arange(2)})
            >>> (td["w"] * 3).sum().backward()
            >>> list(td.grad.keys()), td.grad["w"]
            (['w'], tensor([3., 3.]))
        """
        return grad(self)

    @property
    def data(self) -> "Self":
        """The tree without its autograd history, which shares memory: what `detach` returns."""
        return detach(self)

    def contiguous(self) -> "Self":
        """Return the tree with every leaf laid out row by row; itself where all are."""
        return self if is_contiguous(self) else self._map(LeafOp("contiguous", methodcaller("contiguous")))

    def is_contiguous(self) -> bool:
        """Whether every leaf is laid out row by row without gaps."""
        return is_contiguous(self)

    def pin_memory(self) -> "Self":
        """Return the tree in page-locked memory, from which copies to an accelerator do not block.

        Raises:
            RuntimeError: There is no accelerator, from torch.
        """
        return self._map(LeafOp("pin_memory", lambda x: x.pin_memory()))

    def share_memory_(self) -> "Self":
        """Move the storage of every leaf to memory that other processes see, as `Tensor.share_memory_`; this tree.

        Raises:
            UnsupportedError: A leaf is a DTensor.
        """
        storage_writes.share(self)
        return self

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Return the bytes that the elements of all leaves take; of a sparse leaf those that it stores.

        Args:
            count_duplicates: Count a tensor once for each of its paths.

        Examples:
            >>> TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}).bytes()
            28

        Raises:
            LeafMismatchError: A parameter of a lazy module has no shape yet; the message names it.
        """
        return _total(self, "bytes", count_duplicates, stored_bytes)

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Return the number of elements of all leaves.

        Args:
            count_duplicates: Count a tensor once for each of its paths.

        Raises:
            LeafMismatchError: A parameter of a lazy module has no shape yet; the message names it.
        """
        return _total(self, "param_count", count_duplicates, Tensor.numel)
