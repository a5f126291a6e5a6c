"""Leaves in autograd and in memory: gradients, layout, pinned and shared memory, sizes."""

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, iter_leaves, leaf_items
from tdfunc.ops.base.cast import detach
from tdfunc.ops.base.foreach import check_same
from tdfunc.ops.base.reading import check_trees
from tdfunc.ops.display.text import stored_bytes
from tdfunc.ops.edits import storage_writes

if TYPE_CHECKING:
    from typing_extensions import Self


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """Return the gradients of `outputs` with respect to `inputs`.

    For one tree the result is a tree; otherwise it is a tuple with one entry for each input. A leaf without a
    gradient (`allow_unused=True`) is dropped.
    """
    sources = _items(outputs)
    targets = _items(inputs)
    given = None
    if grad_outputs is not None:
        given = _leaves_of(_weights(sources, _items(grad_outputs)))
    # Any: torch's annotations leave out the None of an unused leaf.
    found: Any = torch.autograd.grad(_leaves_of(sources), _leaves_of(targets), given, **options)
    grads = iter(found)
    # Gradients of a batch of weights have its dimension in front.
    if options.get("is_grads_batched"):
        lead = next(x.shape[:1] for x in found if x is not None)
    else:
        lead = Size()
    made = tuple([_around(item, lambda _: next(grads), lead) for item in targets])
    if len(made) == 1 and isinstance(targets[0], TensorCollection):
        return made[0]
    return made


def _items(given: Any) -> Sequence[Any]:
    if isinstance(given, (Tensor, TensorCollection)):
        return (given,)
    return tuple(given)


def _leaves_of(items: Sequence[Any]) -> list[Any]:
    leaves: list[Any] = []
    for item in items:
        leaves += [leaf for _, leaf in leaf_items(item)] if isinstance(item, TensorCollection) else [item]
    return leaves


def _weights(sources: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
    """Return `grad_outputs` laid out as the outputs: a tree for each tree, with the same keys in the same order."""
    made: list[Any] = []
    for source, item in zip(sources, given, strict=True):
        if isinstance(source, TensorCollection):
            check_trees("grad: grad_outputs of a tree", item)
            check_same(source, item, "grad")
            item = source._map(LeafOp("grad", lambda _, weight: weight), item)
        made.append(item)
    return made


def _around(item: Any, leaf: Callable[[Any], Any], lead: Size) -> Any:
    if not isinstance(item, TensorCollection):
        return leaf(item)
    if not lead:
        return item._map(LeafOp("grad", leaf, drops=True))
    return item._map(LeafOp("grad", leaf, lambda old: lead + old, lambda names: (None, *names), drops=True))


def tensors(tree: TensorCollection) -> list[Tensor]:
    """Return the tensor at every path; a tied one as often as it has paths."""
    return [leaf for _, leaf in iter_leaves(tree) if isinstance(leaf, Tensor)]


def _grad_of(leaf: Any) -> Any:
    # Reading the gradient of a tensor inside the graph warns.
    return leaf.grad if isinstance(leaf, Tensor) and (leaf.is_leaf or leaf.retains_grad) else None


def is_contiguous(tree: TensorCollection) -> bool:
    """Return True if every leaf is laid out row by row without gaps."""
    leaves = tree._data.values()
    if not PLAIN.issuperset(map(type, leaves)):
        leaves = tensors(tree)
    return all(map(Tensor.is_contiguous, leaves))


class MemoryMethods(TensorCollection):
    """Gradients, layout and memory of the leaves."""

    __slots__ = ()

    @property
    def requires_grad(self) -> Any:
        """Return True if any leaf requires a gradient."""
        return any(x.requires_grad for x in tensors(self))

    @property
    def grad(self) -> "Self":
        """The tree of gradients that `backward` has left at the leaves; leaves without a gradient are left out.

        Examples:
            >>> td = TensorDict({"w": torch.ones(2, requires_grad=True), "n": torch.arange(2)})
            >>> (td["w"] * 3).sum().backward()
            >>> list(td.grad.keys()), td.grad["w"]
            (['w'], tensor([3., 3.]))
        """
        return self._map(LeafOp("grad", _grad_of, drops=True))

    @property
    def data(self) -> "Self":
        """The tree that `detach` returns: without autograd history, sharing memory."""
        return detach(self)

    def contiguous(self) -> "Self":
        """Return the tree with every leaf laid out row by row; the tree itself if all are."""
        if is_contiguous(self):
            return self
        return self._map(LeafOp("contiguous", methodcaller("contiguous")))

    def is_contiguous(self) -> bool:
        """Return True if every leaf is laid out row by row without gaps."""
        return is_contiguous(self)

    def pin_memory(self) -> "Self":
        """Return the tree in page-locked memory, from which copies to an accelerator do not block.

        Raises:
            RuntimeError: torch finds no accelerator.
        """
        return self._map(LeafOp("pin_memory", lambda x: x.pin_memory()))

    def share_memory_(self) -> "Self":
        """Move the storage of every leaf to shared memory, as `Tensor.share_memory_`, and return this tree.

        Raises:
            UnsupportedError: A leaf is a DTensor.
        """
        storage_writes.share(self)
        return self

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of all leaves; a sparse leaf counts with the values and indices that it stores.

        A tied leaf counts once for each of its paths.

        Examples:
            >>> TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}).nbytes
            28
        """
        return sum(map(stored_bytes, tensors(self)))
