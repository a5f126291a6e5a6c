"""Cleaning a recorded graph: operations without effect, common subexpressions, dead code, faster spellings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from tdfunc._jit.tracing import written_by
from tdfunc.core.memory import storage_id

aten = torch.ops.aten

# Each returns its first argument, or a view of all of it, when shape and strides come out as they were.
_VIEWS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
    aten.reshape.default, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.t.default,
}  # fmt: skip
_FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
# torch's own bindings of these take the same arguments and are called faster than an OpOverload.
_SPELLED_ALIKE = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar neg.default abs.default
    mm.default bmm.default addmm.default baddbmm.default t.default transpose.int permute.default unsqueeze.default
    squeeze.dim select.int cat.default stack.default index_select.default gather.default where.self full.default
    clone.default sum.default sum.dim_IntList mean.default mean.dim amax.default exp.default log.default sqrt.default
    rsqrt.default square.default reciprocal.default sign.default pow.Tensor_Scalar tanh.default sigmoid.default
    relu.default maximum.default minimum.default eq.Tensor eq.Scalar gt.Scalar ge.Scalar lt.Scalar le.Scalar
    lerp.Scalar addcmul.default addcdiv.default native_layer_norm.default
"""


_FASTER: dict[Any, Callable[..., Any]] = {
    getattr(getattr(aten, name), kind): getattr(torch, name)
    for name, kind in [spelling.split(".") for spelling in _SPELLED_ALIKE.split()]
    if hasattr(torch, name)
}
_METHODS = {aten.view.default: "view", aten._unsafe_view.default: "view", aten.expand.default: "expand"}


def clean(module: fx.GraphModule, *, faster: bool) -> None:
    """Simplify the graph of a trace; its results and the tensors that it writes stay the same to the last bit.

    Args:
        module: The recorded module.
        faster: Call torch's bindings instead of aten overloads, where they are the same.
    """
    graph = module.graph
    # Memory that is written or returned: two nodes of it are not the same value at all times.
    fixed: set[int] = set()
    for node in graph.nodes:
        for target in [*_writes(node), *(node.all_input_nodes if node.op == "output" else [])]:
            fixed |= _storages(target.meta.get("val"))
    _drop_no_ops(graph, fixed)
    # `ones_like(x)` and its kind of a shape alone, so that x need not be computed.
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target in _FILLS and value.is_contiguous():
            options = {"dtype": value.dtype, "device": value.device}
            with graph.inserting_before(node):
                new = graph.call_function(aten.full.default, (list(value.shape), _FILLS[node.target]), options)
            new.meta["val"] = value
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    _merge_common(graph, fixed)
    graph.eliminate_dead_code(_has_effect)
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _spell_exactly)
        if faster and node.op == "call_function" and node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
        elif faster and node.op == "call_function":
            node.target = _FASTER.get(node.target, node.target)
    module.recompile()


class _Exact(complex):
    """A constant whose spelling in the graph's code keeps the signs of zeros: `(-1-0j)` is `-1 + 0j`."""

    def __repr__(self) -> str:
        return f"complex({self.real!r}, {self.imag!r})"


def _spell_exactly(value: Any) -> Any:
    return _Exact(value) if type(value) is complex else value


def draws(graph: fx.Graph) -> bool:
    """Return whether a replay draws random numbers."""
    return any(_is_random(node) for node in graph.nodes)


def _storages(value: Any) -> set[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return {storage_id(item) for item in values if isinstance(item, Tensor)}


def _writes(node: fx.Node) -> list[fx.Node]:
    if node.op != "call_function":
        return []
    return node.meta.get("writes", written_by(node.target, node.args, node.kwargs))


def _drop_no_ops(graph: fx.Graph, fixed: set[int]) -> None:
    """Replace each node that returns the value of an earlier one by that one."""
    ones: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.target is aten.ones_like.default or (node.target in _VIEWS and node.args[0] in ones):
            ones.add(node)
        source = _find_viewed(node) if node.target in _VIEWS else _find_equal(node, ones, fixed)
        # A result must be another object than an argument, which may require grad.
        if source is None or (source.op == "placeholder" and any(user.op == "output" for user in node.users)):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _find_viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that a view, or a chain of views that ends in it, looks at unchanged."""
    source = node
    while source.target in _VIEWS and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        if _same_layout(node, source):
            return source
    return None


def _find_equal(node: fx.Node, ones: set[fx.Node], fixed: set[int]) -> fx.Node | None:
    """Return the operand that `x**1` (from the derivative of x**2), `x * 1` and `x * ones` are copies of."""
    if node.target is aten.pow.Tensor_Scalar or node.target in (aten.mul.Tensor, aten.mul.Scalar):
        x, y = node.args[:2]
        if x in ones and node.target is aten.mul.Tensor:
            x, y = y, x
        neutral = y in ones if isinstance(y, fx.Node) else y == 1
        if neutral and isinstance(x, fx.Node) and _same_layout(node, x):
            # Ones that are written through a view are ones no more.
            involved = [item for item in (node, x, y) if isinstance(item, fx.Node)]
            free = not any([_storages(item.meta["val"]) & fixed for item in involved])
            return x if free else None
    return None


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return (
        x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and (x.storage_offset() == y.storage_offset() or storage_id(x) != storage_id(y))
    )


def _merge_common(graph: fx.Graph, fixed: set[int]) -> None:
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _has_effect(node) or "empty" in str(node.target):
            continue
        involved = [node, *node.all_input_nodes]
        if any(_storages(item.meta.get("val")) & fixed for item in involved):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        twin = known.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _frozen(item)) for key, item in value.items()])
    # 1 == 1.0 == True and 0.0 == -0.0, which are not the same argument.
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def _has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay although nothing uses its result, and must not be merged with another."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    # An operation without results checks its arguments: `_assert_async`, `_linalg_check_errors`.
    checks = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
    return checks or bool(_writes(node)) or _is_random(node)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for i, argument in enumerate(target._schema.arguments):
        # Attention is tagged as random whether it drops anything or not.
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return not isinstance(given, float) or given != 0.0
    return True
