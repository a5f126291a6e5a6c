"""The memory of a recorded graph: when each storage is written and used, and which nodes share one."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tdfunc.core.memory import storage_id

# Their schemas do not say that they update the running statistics: (index of the statistics, index of `training`, or
# None if they always do). A test searches all schemas of torch for others.
_aten = torch.ops.aten
_HIDDEN_WRITES: dict[object, tuple[int, int | None]] = {
    _aten.native_batch_norm: (3, 5),
    _aten.cudnn_batch_norm: (3, 5),
    _aten.miopen_batch_norm: (3, 5),
    _aten._batch_norm_impl_index: (3, 5),
    _aten.batch_norm_gather_stats: (3, None),
    _aten.batch_norm_gather_stats_with_counts: (3, None),
    _aten.batch_norm_update_stats: (1, None),
}
# Arguments may share memory, so they count as one storage.
_ARGUMENTS = 0


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to (tensors, or nodes of a graph)."""
    found: list[Any] = []
    hidden = _HIDDEN_WRITES.get(getattr(func, "overloadpacket", None))
    if hidden is not None and (hidden[1] is None or args[hidden[1]]):
        found += [stat for stat in args[hidden[0] : hidden[0] + 2] if stat is not None]
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if i < len(args):
                value = args[i]
            else:
                value = kwargs.get(argument.name)
            items = value if isinstance(value, (list, tuple)) else [value]
            found += [item for item in items if item is not None]
    return found


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
        # The merged ones are alive, so that no later one has the number of one of them.
        self._kept: list[Any] = []
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

    def knows(self, node: fx.Node) -> bool:
        """Return whether a node was there when the graph was read."""
        return node in self._place

    def of(self, node: fx.Node) -> set[int]:
        """Return the storages of a node's value."""
        return set(map(self.find, tensors_of(node)))

    def find(self, tensor: Tensor) -> int:
        """Return the storage of a value."""
        storage = storage_id(tensor)
        while storage in self._merged:
            storage = self._merged[storage]
        return storage

    def precedes(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether a node runs before another."""
        return self._place[node] < self._place[other]

    def is_written(self, node: fx.Node) -> bool:
        """Return whether anything writes to a node's memory."""
        return any(map(self._writes.get, self.of(node)))

    def is_private(self, node: fx.Node) -> bool:
        """Return whether nothing writes to a node's memory, and no result shares it."""
        return not self.is_written(node) and self.of(node).isdisjoint(self._returned)

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
        for tensor, other in zip(tensors_of(node), tensors_of(source), strict=True):
            old = self.find(tensor)
            new = self.find(other)
            if old != new:
                self._merged[old] = new
                self._kept.append(tensor.untyped_storage())


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the values of a node."""
    value: Any = node.meta.get("val")
    values: Any = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, Tensor)]
