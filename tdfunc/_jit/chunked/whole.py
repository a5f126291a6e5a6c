"""The result for all members, made of the results of chunks."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from tdfunc._jit.chunked.apart import check_rows
from tdfunc._jit.chunked.split import Split
from tdfunc._jit.replay.pool import MIN_BYTES, Pool
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, brief
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.ops.batch.join import cat


class Whole:
    """The result for all members, filled with the results of chunks.

    What a chunk wrote into its arguments, which are views, is in the arguments of all.
    """

    def __init__(self, split: Split, pool: Pool) -> None:
        self._split = split
        self._pool = pool
        # By place in the flat result: a tensor for all members, a list of trees with non-tensor data, or a value.
        self._parts: list[Any] = []
        # The places that rows are written to.
        self._filled: list[int] = []
        self._spec: Any = None

    def begin(self, part: tuple[Any, ...], result: Any) -> None:
        """Make room for all members, from the result of the first chunk."""
        members = self._split.members
        own = map(id, torch_pytree.tree_leaves(part))
        given = dict(zip(own, torch_pytree.tree_leaves(self._split.args), strict=True))
        leaves, self._spec = torch_pytree.tree_flatten(result, is_leaf=_is_joined)
        new = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given]
        self._pool.expect([_bytes_of(leaf, members) for leaf in new if self._is_large(leaf, members)])
        for place, leaf in enumerate(leaves):
            if id(leaf) in given:
                self._parts.append(given[id(leaf)])
            elif isinstance(leaf, Tensor):
                self._filled.append(place)
                self._parts.append(self._make(leaf, members))
            else:
                self._parts.append([] if isinstance(leaf, TensorCollection) else leaf)

    def add(self, result: Any, begin: int, end: int) -> None:
        """Write the result of a chunk to its rows."""
        leaves = torch_pytree.tree_leaves(result, is_leaf=_is_joined)
        for leaf, part in zip(leaves, self._parts, strict=True):
            if isinstance(leaf, TensorCollection):
                part.append(leaf)
            elif not isinstance(leaf, Tensor) and leaf != part:
                raise _value_error(part, leaf)
        with torch.no_grad():
            for place in self._filled:
                check_rows(leaves[place], end - begin, "a result")
                self._parts[place][begin:end].copy_(leaves[place])

    def end(self, last: Any) -> Any:
        """Return the result; what the last chunk trains is trained."""
        for part, leaf in zip(self._parts, torch_pytree.tree_leaves(last, is_leaf=_is_joined), strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not part.requires_grad:
                part.requires_grad_()
        whole = [cat(part) if isinstance(part, list) else part for part in self._parts]
        return torch_pytree.tree_unflatten(whole, self._spec)

    def _is_large(self, leaf: Tensor, members: int) -> bool:
        return leaf.device.type == "cpu" and _bytes_of(leaf, members) >= MIN_BYTES

    def _make(self, leaf: Tensor, members: int) -> Tensor:
        """Return a tensor like one of a chunk, for all members."""
        shape = (members, *leaf.shape[1:])
        stride = leaf.stride()
        # In the order of dimensions of the chunk, if it has the members in front.
        if leaf.numel() == 0 or stride[0] * leaf.shape[0] != leaf.numel():
            stride = torch.empty(shape, device="meta").stride()
        if self._is_large(leaf, members):
            return self._pool.take(shape, stride, leaf.dtype, _bytes_of(leaf, members))
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)


def _bytes_of(leaf: Tensor, members: int) -> int:
    return leaf[0].numel() * leaf.element_size() * members


def _is_joined(value: Any) -> bool:
    """Return whether a value is a tree that `cat` joins.

    Non-tensor data may differ between members, and the batch size of a tree without leaves is in no tensor.
    """
    if not isinstance(value, TensorCollection):
        return False
    return not value._data or _has_other_data(value)


def _has_other_data(tree: TensorCollection) -> bool:
    for node in tree._data.values():
        if isinstance(node, NonTensorBase):
            return True
        if isinstance(node, TensorCollection) and _has_other_data(node):
            return True
    return False


def _value_error(expected: Any, got: Any) -> UnsupportedError:
    return UnsupportedError(
        "jit: a value in the result of a function with chunk_size differs between chunks.",
        expected=brief(expected),
        got=brief(got),
        hint="return a tensor with an entry for each member.",
    )
