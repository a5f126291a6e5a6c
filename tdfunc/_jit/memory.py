"""The memory of a recorded graph: when each storage is written and used, and which nodes share one."""

import operator
from typing import Any

from torch import Tensor, fx

from tdfunc._jit.tracing import written_by
from tdfunc.core.memory import storage_id

# Arguments may share memory, so they count as one storage.
_ARGUMENTS = 0


def writes_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node writes to."""
    if node.op != "call_function":
        return []
    return node.meta.get("writes", written_by(node.target, node.args, node.kwargs))


def used_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node uses: the item that it takes from a list, and not the whole list."""
    # A step of an optimizer has thousands of results, and a node that takes each.
    if node.target is operator.getitem:
        return [node]
    return node.all_input_nodes


class Memory:
    """The writes and uses of each storage of a graph, by the places of nodes.

    Storages belong to the fake tensors that the trace has left in `node.meta["val"]`. A storage that a pass has merged
    into another counts as the other.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._merged: dict[int, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self._merged |= dict.fromkeys(map(storage_id, tensors_of(node)), _ARGUMENTS)
        self.read(graph)

    def read(self, graph: fx.Graph) -> None:
        """Count places, writes and uses, after nodes have come or gone."""
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._writes: dict[int, list[int]] = {}
        self._last_use: dict[int, int] = {}
        self._returned: set[int] = set()
        for node, place in self._place.items():
            for target in writes_of(node):
                for storage in self.of(target):
                    self._writes.setdefault(storage, []).append(place)
            for operand in used_by(node):
                own = self.of(operand)
                self._last_use.update(dict.fromkeys(own, place))
                if node.op == "output":
                    self._returned |= own

    def of(self, node: fx.Node) -> set[int]:
        """Return the storages of a node's value."""
        return set(map(self.find, tensors_of(node)))

    def find(self, tensor: Tensor) -> int:
        """Return the storage of a value."""
        storage = storage_id(tensor)
        while storage in self._merged:
            storage = self._merged[storage]
        return storage

    def is_private(self, node: fx.Node) -> bool:
        """Return whether nothing writes to a node's memory, and no result shares it."""
        own = self.of(node)
        return not any(map(self._writes.get, own)) and own.isdisjoint(self._returned)

    def dies_at(self, value: fx.Node, node: fx.Node) -> bool:
        """Return whether nothing uses a value's memory after a node."""
        place = self._place[node]
        own = self.of(value)
        return all([self._last_use[storage] <= place for storage in own]) and own.isdisjoint(self._returned)

    def version(self, node: fx.Node, at: fx.Node) -> int:
        """Return how many writes there are to a node's memory before another node."""
        place = self._place[at]
        return sum([write < place for storage in self.of(node) for write in self._writes.get(storage, ())])

    def stays(self, source: fx.Node, copy: fx.Node) -> bool:
        """Return whether nothing writes to the memory of a copy's source as long as the copy is used."""
        begin = self._place[copy]
        end = max([self._last_use.get(storage, 0) for storage in self.of(copy)])
        return not any(begin < write <= end for s in self.of(source) for write in self._writes.get(s, ()))

    def merge(self, node: fx.Node, source: fx.Node) -> None:
        """Replace the storages of a node, which is to be erased, and of its views by the storages of another node."""
        for old, new in zip(tensors_of(node), tensors_of(source), strict=True):
            old = self.find(old)
            new = self.find(new)
            if old != new:
                self._merged[old] = new


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the values of a node."""
    value: Any = node.meta.get("val")
    values: Any = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, Tensor)]
