"""The methods of a tree that talk to other ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tdfunc.core.collection import TensorCollection
from tdfunc.distributed import collectives, messages
from tdfunc.distributed.messages import PendingMessage

if TYPE_CHECKING:
    from typing_extensions import Self


class DistributedMethods(TensorCollection):
    """Messages and collectives of torch.distributed."""

    __slots__ = ()

    def send(self, dst: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> None:
        """Send the tree to a rank; see `tdfunc.distributed.send`."""
        messages.send(self, dst, group=group, tag=tag, timeout_s=timeout_s)

    def isend(self, dst: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> PendingMessage:
        """Start to send the values that the tree has now; `wait()` of the result waits until they are through."""
        return messages.isend(self, dst, group=group, tag=tag, timeout_s=timeout_s)

    def recv(self, src: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> "Self":
        """Return the tree that a rank sends, which must have the paths, shapes and dtypes of this one.

        This tree is not written to. `tdfunc.distributed.recv` takes trees of any structure.
        """
        return messages.recv(src, self, group=group, tag=tag, timeout_s=timeout_s)

    def irecv(self, src: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> PendingMessage:
        """Start to receive a tree like this one; `wait()` of the result returns it."""
        return messages.irecv(src, self, group=group, tag=tag, timeout_s=timeout_s)

    def recv_(self, src: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> "Self":
        """Receive values into the leaves of this tree, and return it; non-tensor data stay."""
        got: Any = messages.recv_into(self, src, wait=True, group=group, tag=tag, timeout_s=timeout_s)
        return got

    def irecv_(self, src: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> PendingMessage:
        """Start to receive values into the leaves of this tree, which `wait()` of the result returns."""
        got: Any = messages.recv_into(self, src, wait=False, group=group, tag=tag, timeout_s=timeout_s)
        return got

    def broadcast(self, src: int, *, group: Any = None, timeout_s: float | None = None) -> "Self":
        """Return the tree of one rank, which all ranks have in the same shape; see `tdfunc.distributed.broadcast`."""
        return collectives.broadcast(self, src, group=group, timeout_s=timeout_s)

    def scatter(
        self,
        src: int,
        trees: Sequence[TensorCollection] | None = None,
        *,
        group: Any = None,
        timeout_s: float | None = None,
    ) -> "Self":
        """Return this rank's tree of those that rank `src` gives; it must be like this tree."""
        return collectives.scatter(trees, src, self, group=group, timeout_s=timeout_s)

    def gather_to(
        self, dst: int, *, group: Any = None, strict: bool = True, timeout_s: float | None = None
    ) -> "list[Self] | None":
        """Return the trees of all ranks on rank `dst`, None elsewhere; `gather` is the operation along a dimension."""
        return collectives.gather(self, dst, group=group, strict=strict, timeout_s=timeout_s)

    def all_gather(self, *, group: Any = None, strict: bool = True, timeout_s: float | None = None) -> "list[Self]":
        """Return the trees of all ranks, in their order; see `tdfunc.distributed.all_gather`."""
        return collectives.all_gather(self, group=group, strict=strict, timeout_s=timeout_s)

    def reduce(self, dst: int, op: str = "sum", *, group: Any = None, timeout_s: float | None = None) -> "Self | None":
        """Return the sums of each leaf over all ranks on rank `dst`, None elsewhere."""
        return collectives.reduce(self, dst, op, group=group, timeout_s=timeout_s)

    def all_reduce(self, op: str = "sum", *, group: Any = None, timeout_s: float | None = None) -> "Self":
        """Return the sums of each leaf over all ranks; see `tdfunc.distributed.all_reduce`."""
        return collectives.all_reduce(self, op, group=group, timeout_s=timeout_s)
