"""Values that a function reads while it is recorded: which a record may depend on, and their check at each call.

A read of a value that depends on nothing but integers and booleans among the arguments (tokens, masks, lengths) is
served: the part of the graph before it is computed on the real arguments. The record then holds for calls that read the
same values, and each call computes them first. Other values are refused: parameters change at each step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, fx, nn

from tdfunc._jit.memory import tensors_of, writes_of
from tdfunc.core.context import is_random, outside
from tdfunc.core.memory import storage_id

# Elements of all tensors that a check computes, since every call does.
_MOST_ELEMENTS = 1 << 16
_SHORT_BYTES = 32


class Read(NamedTuple):
    """The check of one value that a function reads, computed from the leaves among the arguments."""

    compute: Callable[..., Tensor]
    places: tuple[int, ...]
    # The code that computes it, by which reads compare.
    code: str
    line: str

    def value(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the tensor that is read."""
        with torch.no_grad():
            return self.compute(*[leaves[place] for place in self.places])

    def print_of(self, leaves: Sequence[Tensor]) -> bytes:
        """Return what differs when the values do."""
        return print_of(self.value(leaves))


def print_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor, or a checksum of many."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if len(data) <= _SHORT_BYTES:
        return data
    return xxhash.xxh3_128_digest(data)


class ReadTree:
    """The reads of the calls of one kind: the first one, and by its value those that follow."""

    def __init__(self) -> None:
        # The runs whose reads were noted.
        self.added = 0
        self._read: Read | None = None
        self._next: dict[bytes, ReadTree] = {}

    def prints(self, leaves: Sequence[Tensor]) -> tuple[bytes, ...]:
        """Return the prints of the values that a call reads, as far as they are known."""
        found: list[bytes] = []
        node: ReadTree | None = self
        while node is not None and node._read is not None:
            found.append(node._read.print_of(leaves))
            node = node._next.get(found[-1])
        return tuple(found)

    def add(self, reads: Sequence[tuple[Read, bytes]]) -> None:
        """Note the reads of a recorded run."""
        self.added += 1
        node = self
        for read, value in reads:
            if node._read is None or node._read.code != read.code:
                node._next = {}
                node._read = read
            node = node._next.setdefault(value, ReadTree())


def make_read(node: fx.Node, root: nn.Module, leaves: Sequence[Tensor], line: str) -> Read | None:
    """Return the read of a node's value; None if the value depends on more than integers among the arguments.

    Args:
        node: The node in the graph of the trace so far.
        root: The tensors that the graph holds.
        leaves: The real tensors among the arguments, in the order of the graph's placeholders.
        line: The line of the user that reads.
    """
    needed = _find_needed(node)
    placeholders = [one for one in node.graph.nodes if one.op == "placeholder"]
    held = [one for one in node.graph.nodes if one.op in ("placeholder", "get_attr")]
    given = {storage for one in held for storage in _storages_of(one)}
    if not all([_is_repeatable(one, given) for one in needed]):
        return None
    places = tuple([place for place, one in enumerate(placeholders) if one in needed])
    if any([leaves[place].is_floating_point() or leaves[place].is_complex() for place in places]):
        return None
    if sum([value.numel() for one in needed for value in tensors_of(one)]) > _MOST_ELEMENTS:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for one in needed:
        copies[one] = graph.node_copy(one, copies.__getitem__)
    graph.output(copies[node])
    module = fx.GraphModule(root, graph)
    return Read(module.forward, places, module.code, line)


def serve(read: Read, leaves: Sequence[Tensor]) -> tuple[Tensor, bytes]:
    """Return the value of a read while a trace is made, and its print."""
    with outside():
        value = read.value(leaves).clone()
        return value, print_of(value)


def _find_needed(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node's present value depends on, in their order: what it uses, and writes to that."""
    needed = {node}
    storages = _storages_of(node)
    found: list[fx.Node] = []
    for one in reversed(node.graph.nodes):
        written = {storage for target in writes_of(one) for storage in _storages_of(target)}
        if one not in needed and storages.isdisjoint(written):
            continue
        found.append(one)
        for used in one.all_input_nodes:
            needed.add(used)
            storages |= _storages_of(used)
    return found[::-1]


def _storages_of(node: fx.Node) -> set[int]:
    return set(map(storage_id, tensors_of(node)))


# Any: the target of a node.
def _is_repeatable(node: fx.Node, given: set[int]) -> bool:
    """Return whether a node may run before each replay: it draws nothing, and writes to nothing that is given."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        # Items of lists; the rest of these are calls that are left for the replay.
        return node.op in ("placeholder", "get_attr") or getattr(target, "__module__", "") == "_operator"
    written = {storage for one in writes_of(node) for storage in _storages_of(one)}
    return given.isdisjoint(written) and not is_random(target, node.args, node.kwargs)
