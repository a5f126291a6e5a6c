"""Copies of turned products of matrices: a product of the turned factors has no copy.

The gradient of a stacked linear layer's weights is `(x^T g)^T`, and an optimizer needs it in the order of the weights.
`g^T x` is in this order. It has the same bits where a kernel adds in the same order, which a probe finds out.
"""

import functools
from typing import Any

import torch
from torch import Tensor, fx

from tdfunc._jit.replay.pieces import FLOATS
from tdfunc._jit.replay.probed import ENOUGH, Like, read_settings

aten = torch.ops.aten


def turn_products(graph: fx.Graph) -> None:
    """Compute copies of turned products as products of the turned factors, where these have the same bits."""
    for node in list(graph.nodes):
        product = _find_product(node)
        if product is None:
            continue
        # Any: nodes.
        factors: Any = product.args
        with graph.inserting_before(product):
            turned = [_turn(graph, factor) for factor in reversed(factors)]
            new = graph.call_function(aten.bmm.default, tuple(turned))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        erase_copy(graph, node)


def _find_product(node: fx.Node) -> fx.Node | None:
    """Return the product that a node is a turned copy of, if the product of the turned factors has its bits."""
    product = find_turned_product(node)
    if product is None:
        return None
    value = node.meta["val"]
    if value.device.type != "cpu" or value.dtype not in FLOATS or value.numel() < ENOUGH:
        return None
    # Any: nodes.
    factors: Any = product.args
    first, second = [Like.of(factor.meta["val"]) for factor in factors]
    return product if _has_turned_bits(first, second, read_settings()) else None


def find_turned_product(node: fx.Node) -> fx.Node | None:
    """Return the product for each member that a node is a turned copy of, if nothing else uses it."""
    if node.target is not aten.clone.default or not node.meta["val"].is_contiguous():
        return None
    # Any: arguments of nodes.
    view: Any = node.args[0]
    if not is_turned(view) or len(view.users) > 1:
        return None
    product: Any = view.args[0]
    if product.target is not aten.bmm.default or len(product.users) > 1:
        return None
    return product


def erase_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a turned copy, the view that it copies, and the product."""
    # Any: arguments of nodes.
    view: Any = node.args[0]
    product: Any = view.args[0]
    for each in (node, view, product):
        graph.erase_node(each)


def is_turned(node: fx.Node) -> bool:
    """Return whether a node is the view of matrices that are turned."""
    # Any: the dimensions.
    dims: Any = node.args[1:]
    return node.target is aten.transpose.int and node.meta["val"].dim() == 3 and {dim % 3 for dim in dims} == {1, 2}


def _turn(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    """Return a node that is the factor turned."""
    turned = factor.meta["val"].mT
    if is_turned(factor):
        # Any: what the factor is a view of.
        source: Any = factor.args[0]
        if source.meta["val"].stride() == turned.stride():
            return source
    new = graph.call_function(aten.transpose.int, (factor, 1, 2))
    new.meta["val"] = turned
    return new


@functools.lru_cache(1024)
def _has_turned_bits(first: Like, second: Like, _settings: tuple[Any, ...]) -> bool:
    """Return whether a turned product has the bits of the product of the turned factors, for random numbers."""
    a: Tensor = first.make()
    b: Tensor = second.make()
    return torch.equal(torch.bmm(a, b).mT, torch.bmm(b.mT, a.mT))
