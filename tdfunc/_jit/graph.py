"""Cleaning a recorded graph: operations without effect, common subexpressions, dead code.

Each pass keeps the results, and the tensors that the graph writes, the same to the last bit.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tdfunc._jit.copies import join_copies
from tdfunc._jit.memory import Memory, used_by, writes_of
from tdfunc._jit.recording.tracing import Deferred
from tdfunc.core.context import is_random
from tdfunc.core.memory import storage_id

aten = torch.ops.aten

# Each returns its first argument, or a view of all of it, when shape and strides come out as they were.
_VIEWS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
    aten.reshape.default, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.t.default,
}  # fmt: skip
_FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
# Memory that calls are joined for: of more, the pieces would be alive for longer than the calls take.
_JOINED = 1 << 16
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)


def clean(graph: fx.Graph) -> Memory:
    """Simplify the graph of a trace, and return its memory."""
    memory = Memory(graph)
    _drop_no_ops(graph, memory)
    _fill_shapes(graph)
    memory.read(graph)
    _merge_common(graph, memory)
    graph.eliminate_dead_code(_has_effect)
    _drop_kept_dimensions(graph)
    memory.read(graph)
    _stack_selected(graph, memory)
    if join_copies(graph, memory, list_moved(graph)):
        graph.eliminate_dead_code(_has_effect)
        _drop_no_ops(graph, memory)
        memory.read(graph)
        _merge_common(graph, memory)
        memory.read(graph)
    _join_calls(graph, memory)
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _spell_exactly)
    return memory


class _Exact(complex):
    """A constant whose spelling in the graph's code keeps the signs of zeros: `(-1-0j)` is `-1 + 0j`."""

    def __repr__(self) -> str:
        return f"complex({self.real!r}, {self.imag!r})"


def _spell_exactly(value: Any) -> Any:
    if type(value) is complex:
        return _Exact(value)
    return value


def draws(graph: fx.Graph) -> bool:
    """Return whether a replay draws random numbers."""
    return any(_is_random(node) for node in graph.nodes)


def _drop_no_ops(graph: fx.Graph, memory: Memory) -> None:
    """Replace each node that returns the value of an earlier one by that one."""
    ones: set[fx.Node] = set()
    moved = list_moved(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.target is aten.ones_like.default or (node.target in _VIEWS and node.args[0] in ones):
            ones.add(node)
        if node.target in _VIEWS:
            source = _find_viewed(node)
        else:
            source = _find_copied(node, ones, memory)
        # A result must be another object than an argument, and than other results, which may require grad.
        if source is None or (_is_returned(node) and (source.op == "placeholder" or _is_returned(source))):
            continue
        if node in moved or source in moved:
            continue
        memory.merge(node, source)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def list_moved(graph: fx.Graph) -> set[Any]:
    """Return the nodes whose tensors get another shape or memory in place: each must be a separate object."""
    moved: set[Any] = set()
    for node in graph.nodes:
        target = _written(node)
        # `out=` of another shape is resized.
        if target is None or not (torch.Tag.inplace_view in node.target.tags or target in node.kwargs.values()):
            continue
        # The result of a write in place is the object that was written.
        while isinstance(target, fx.Node):
            moved.add(target)
            target = _written(target)
    return moved


def _written(node: fx.Node) -> Any:
    """Return the tensor that a node writes first."""
    if isinstance(node.target, torch._ops.OpOverload):
        for place, item in enumerate(node.target._schema.arguments):
            if item.is_write:
                if item.kwarg_only:
                    return node.kwargs.get(item.name)
                return node.args[place]
    return None


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _find_viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that a view, or a chain of views that ends in it, looks at unchanged."""
    source = node
    while source.target in _VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        if _same_layout(node, source):
            return source
    return None


def _find_copied(node: fx.Node, ones: set[fx.Node], memory: Memory) -> fx.Node | None:
    """Return the operand that a clone, `x * 1`, `x * ones` or `x**1` (from the derivative of x**2) is a copy of."""
    x = node.args[0]
    if node.target in _PRODUCTS or node.target is aten.pow.Tensor_Scalar:
        x, y = node.args[:2]
        if x in ones and node.target is aten.mul.Tensor:
            x, y = y, x
        if isinstance(y, fx.Node):
            # Ones that were written through a view are ones no more.
            if y not in ones or memory.version(y, node):
                return None
        elif y != 1:
            return None
    elif node.target is not aten.clone.default:
        return None
    if not isinstance(x, fx.Node) or not _same_layout(node, x):
        return None
    return x if memory.is_private(node) and memory.stays(x, node) else None


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    x = a.meta["val"]
    y = b.meta["val"]
    return (
        x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and (x.storage_offset() == y.storage_offset() or storage_id(x) != storage_id(y))
    )


def _fill_shapes(graph: fx.Graph) -> None:
    """Make `ones_like(x)` and its kind from a shape alone, so that x need not be computed."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target in _FILLS and value.is_contiguous():
            options = {"dtype": value.dtype, "device": value.device}
            with graph.inserting_before(node):
                new = graph.call_function(aten.full.default, (list(value.shape), _FILLS[node.target]), options)
            new.meta["val"] = value
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _merge_common(graph: fx.Graph, memory: Memory) -> None:
    """Compute once what is computed twice from the same values."""
    known: dict[Any, fx.Node] = {}
    moved = list_moved(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or _has_effect(node) or "empty" in str(node.target) or _is_returned(node):
            continue
        if node in moved:
            continue
        inputs = used_by(node)
        is_view = memory.of(node) <= set().union(*map(memory.of, inputs))
        # Memory that is written, or read by the caller, must be a node's own.
        if not is_view and not memory.is_private(node):
            continue
        versions = tuple([memory.version(item, node) for item in inputs])
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), versions)
        twin = known.setdefault(key, node)
        if twin is not node:
            memory.merge(node, twin)
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def _join_calls(graph: fx.Graph, memory: Memory) -> None:
    """Make one deferred call of several that read the same and return small memory, where their functions `join`."""
    # Any: nodes, with lists of nodes among their arguments.
    known: dict[Any, Any] = {}
    nodes: Any = [node for node in graph.nodes if isinstance(node.target, Deferred) and hasattr(node.target.fn, "join")]
    for node in nodes:
        (reads,) = node.args
        fn = node.target.fn
        first = known.setdefault((type(fn), *[(read, memory.version(read, node)) for read in reads]), node)
        values = [*first.meta["val"], *node.meta["val"]]
        if first is node or sum([value.numel() for value in values]) > _JOINED:
            continue
        for item in list(node.users):
            item.args = (first, item.args[1] + len(first.meta["val"]))
            first.append(item)
        first.target = Deferred(first.target.fn.join(fn))
        first.meta["val"] = values
        graph.erase_node(node)
    memory.read(graph)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _frozen(item)) for key, item in value.items()])
    # 1 == 1.0 == True and 0.0 == -0.0, which are not the same argument.
    if isinstance(value, fx.Node):
        return value
    return (type(value), repr(value))


def _drop_kept_dimensions(graph: fx.Graph) -> None:
    """Sum without `keepdim` where a view takes the kept dimensions away."""
    for node in list(graph.nodes):
        total = None
        if node.target is aten.view.default:
            total = node.args[0]
        if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) > 1:
            continue
        # Any: arguments of aten.sum.
        operands: Any = total.args
        x, dims = operands[:2]
        value = node.meta["val"]
        if len(total.args) != 3 or total.kwargs or not dims or not value.is_contiguous():
            continue
        reduced = {dim % x.meta["val"].dim() for dim in dims}
        if list(value.shape) == [size for i, size in enumerate(x.meta["val"].shape) if i not in reduced]:
            with graph.inserting_before(total):
                new = graph.call_function(aten.sum.dim_IntList, (x, dims))
            new.meta["val"] = value
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            graph.erase_node(total)


def _stack_selected(graph: fx.Graph, memory: Memory) -> None:
    """Stack gradients of all that was selected along a dimension, which are padded by zeros and added else."""
    for node in reversed(list(graph.nodes)):
        # Any: arguments of aten.select_backward.
        parts: Any = _list_added(node)
        kinds = {str(part.args[1:3]) for part in parts}
        if len(parts) < 2 or len(kinds) > 1 or {part.target for part in parts} != {aten.select_backward.default}:
            continue
        _, shape, dim, _ = parts[0].args
        value = node.meta["val"]
        by_index = {part.args[3] % shape[dim]: part.args[0] for part in parts}
        stays = all([memory.version(part.args[0], part) == memory.version(part.args[0], node) for part in parts])
        if not len(by_index) == len(parts) == shape[dim] or not stays or not value.is_contiguous():
            continue
        with graph.inserting_before(node):
            stacked = graph.call_function(aten.stack.default, ([by_index[i] for i in range(shape[dim])], dim))
            # -0.0 + 0 is 0.0
            new = graph.call_function(aten.add.Tensor, (stacked, 0))
        with value.fake_mode:
            stacked.meta["val"] = torch.empty_like(value)
        new.meta["val"] = value
        node.replace_all_uses_with(new)
        graph.eliminate_dead_code(_has_effect)
    memory.read(graph)


def _list_added(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum of sums that have no other use, or the node if it is not a sum."""
    if node.target is not aten.add.Tensor or node.kwargs or not all([isinstance(x, fx.Node) for x in node.args]):
        return [node]
    terms: Any = node.args
    return [term for x in terms for term in (_list_added(x) if len(x.users) == 1 else [x])]


def _has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay although nothing uses its result, and must not be merged with another."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    # An operation without results checks its arguments: `_assert_async`, `_linalg_check_errors`.
    checks = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
    return checks or bool(writes_of(node)) or _is_random(node)


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_random(node.target, node.args, node.kwargs)
