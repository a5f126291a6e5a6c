"""Steps of optimizers that take the gradients of large leaves some members at a time.

The gradient of a linear layer's weights is a product of matrices for each member. A step of single elements can use the
product of a few members while it is in the cache, and its memory for the next ones: no gradient is ever whole. The
copies that a step overwrites are made on the way.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tdfunc._jit.memory import Memory
from tdfunc._jit.recording.tracing import Deferred
from tdfunc._jit.replay.pieces import FLOATS, Cut
from tdfunc._jit.replay.pool import Pool
from tdfunc._jit.replay.probed import ProbedPieces, probe
from tdfunc._jit.replay.products import erase_copy, find_turned_product

aten = torch.ops.aten

_PRODUCT = Cut(1, (("self", 0), ("mat2", 0)), (0,))
# Where a part begins: a product of matrices rounds otherwise if its operands begin elsewhere between two lines of the
# cache.
_LINE_BYTES = 64
# The elements of a member: the vectors of every processor divide them. A fused kernel rounds the rest of a leaf
# otherwise.
_VECTOR = 16


class _Large(NamedTuple):
    """A leaf that is stepped in parts."""

    leaf: int
    product: ProbedPieces
    # The gradient is the turned product.
    is_turned: bool
    # Its tensors become copies of others, which the step overwrites.
    is_copied: bool


class StepInParts:
    """The step of an optimizer whose large gradients are given as the factors of products."""

    # Any: the step, of the lists of tensors that it writes and reads; `again` returns it for tensors of other shapes.
    def __init__(self, step: Any, leaves: int, large: Sequence[_Large]) -> None:
        self._leaves = leaves
        self._large = large
        given = {each.leaf for each in large}
        self._small = [leaf for leaf in range(leaves) if leaf not in given]
        self._step_small: Callable[[list[Tensor], list[Tensor]], None] = step.again()
        self._step_parts: list[Callable[[list[Tensor], list[Tensor]], None]] = [step.again() for _ in large]

    def __call__(self, writes: list[Tensor], reads: list[Tensor], sources: list[Tensor], factors: list[Tensor]) -> None:
        """Overwrite the tensors of all leaves.

        Args:
            writes: Tensors of all leaves: the parameters, and then each slot of the state.
            reads: The gradients of small leaves, and what else the step reads.
            sources: What the tensors of large leaves become copies of, one leaf after the other.
            factors: The two factors of the gradient of each large leaf.
        """
        rest = reads[len(self._small) :]
        if self._small:
            firsts = range(0, len(writes), self._leaves)
            self._step_small([writes[first + leaf] for first in firsts for leaf in self._small], reads)
        given = iter(sources)
        for each, step, *pair in zip(self._large, self._step_parts, factors[::2], factors[1::2], strict=True):
            own = writes[each.leaf :: self._leaves]
            copied: list[Tensor] = []
            if each.is_copied:
                copied = [next(given) for _ in own]
            _step_leaf(each, step, own, copied, pair, rest)


def _step_leaf(
    large: _Large,
    step: Callable[[list[Tensor], list[Tensor]], None],
    writes: list[Tensor],
    sources: list[Tensor],
    factors: list[Tensor],
    rest: list[Tensor],
) -> None:
    pieces = large.product.find_pieces(factors)
    if pieces is None:
        if sources:
            torch._foreach_copy_(writes, sources)  # pyright: ignore[reportPrivateImportUsage]
        step(writes, [_in_order(torch.bmm(*factors), large.is_turned), *rest])
        return
    product: Tensor | None = None
    for begin in pieces.begins():
        product = torch.bmm(*[pieces.cut(factor, 0, begin) for factor in factors], out=product)
        grad = _in_order(product, large.is_turned)
        parts = [pieces.cut(value, 0, begin) for value in writes]
        if sources:
            copied = [pieces.cut(value, 0, begin) for value in sources]
            torch._foreach_copy_(parts, copied)  # pyright: ignore[reportPrivateImportUsage]
        step(parts, [grad, *rest])


def _in_order(product: Tensor, is_turned: bool) -> Tensor:
    return product.mT.contiguous() if is_turned else product


def split_steps(graph: fx.Graph, memory: Memory, pool: Pool) -> None:
    """Give the steps of optimizers the factors of large gradients in place of the gradients."""
    for node in list(graph.nodes):
        if isinstance(node.target, Deferred) and hasattr(node.target.fn, "count_apart"):
            _split(graph, node, memory, pool)
    memory.read(graph)


class _Part(NamedTuple):
    """A leaf that is stepped in parts, and the nodes of what these are made of."""

    large: _Large
    factors: tuple[fx.Node, ...]
    sources: list[fx.Node]


def _split(graph: fx.Graph, node: fx.Node, memory: Memory, pool: Pool) -> None:
    # Any: lists of nodes, and a function of a deferred call.
    args: Any = node.args
    target: Any = node.target
    writes, reads = [*args[0]], args[1]
    # A captured tensor is known at the replay only.
    if any(["val" not in each.meta for each in (*writes, *reads)]):
        return
    leaves = target.fn.count_apart([_value(each) for each in writes], [_value(each) for each in reads])
    found = [_find_part(node, leaf, leaves, memory, pool) for leaf in range(leaves)]
    parts = [part for part in found if part is not None]
    if not parts:
        return
    for part in parts:
        if part.sources:
            own = slice(part.large.leaf, None, leaves)
            writes[own] = [_leave_uncopied(graph, write) for write in writes[own]]
    _give_factors(graph, node, StepInParts(target.fn, leaves, [part.large for part in parts]), writes, parts)


def _give_factors(graph: fx.Graph, node: fx.Node, step: StepInParts, writes: list[fx.Node], parts: list[_Part]) -> None:
    """Replace the large gradients of a step by their factors."""
    # Any: lists of nodes.
    args: Any = node.args
    reads = args[1]
    grads = [reads[part.large.leaf] for part in parts]
    small = [read for read in reads if read not in grads]
    sources = [source for part in parts for source in part.sources]
    factors = [factor for part in parts for factor in part.factors]
    node.args = (writes, small, sources, factors)
    node.target = Deferred(step)
    node.meta["writes"] = writes
    for grad, part in zip(grads, parts, strict=True):
        if part.large.is_turned:
            erase_copy(graph, grad)
        else:
            graph.erase_node(grad)


def _find_part(node: fx.Node, leaf: int, leaves: int, memory: Memory, pool: Pool) -> _Part | None:
    """Return how a step takes a leaf in parts; None if it takes it as a whole."""
    # Any: lists of nodes.
    args: Any = node.args
    writes, reads = args
    own = writes[leaf::leaves]
    grad = reads[leaf]
    product = find_turned_product(grad)
    if grad.target is aten.bmm.default:
        product = grad
    is_used_elsewhere = len(grad.users) > 1 or reads.count(grad) > 1
    if product is None or is_used_elsewhere or not _is_large(product, node, own, memory, pool):
        return None
    pieces = probe(product, _PRODUCT._replace(units=len(_value(product))))
    if pieces is None:
        return None
    # Any: nodes.
    factors: Any = product.args
    # A donated leaf may be a factor of the gradient of another one.
    if any([not memory.of(factor).isdisjoint(memory.of(write)) for factor in factors for write in writes]):
        return None
    sources = [source for source in [_find_source(write, node, memory) for write in own] if source is not None]
    if len(sources) < len(own):
        sources = []
    return _Part(_Large(leaf, pieces, product is not grad, bool(sources)), factors, sources)


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _is_laid_out(value: Tensor) -> bool:
    return value.is_contiguous() and value[0].numel() % _VECTOR == 0


def _is_large(product: fx.Node, step: fx.Node, writes: list[fx.Node], memory: Memory, pool: Pool) -> bool:
    """Return whether a gradient is large, its factors are small, and all can be cut between members."""
    value = _value(product)
    # Any: nodes.
    factors: Any = product.args
    if not pool.takes(value) or value.dtype not in FLOATS or not _is_laid_out(value):
        return False
    if not all([_is_laid_out(_value(write)) for write in writes]):
        return False
    if value.nbytes < sum([_value(factor).nbytes for factor in factors]):
        return False
    begin_alike = [_value(factor).stride(0) * value.itemsize % _LINE_BYTES == 0 for factor in factors]
    stay = [memory.version(factor, product) == memory.version(factor, step) for factor in factors]
    return all(begin_alike) and all(stay)


def _find_source(write: fx.Node, step: fx.Node, memory: Memory) -> fx.Node | None:
    """Return the tensor that a step overwrites a copy of; None if it is something else, or is used before the step."""
    # Any: an argument of a node.
    copies: Any = write.args[0] if write.args else None
    if write.target is not operator.getitem or copies.target is not aten._foreach_clone.default:
        return None
    source = copies.args[0][write.args[1]]
    stays = memory.version(source, copies) == memory.version(source, step)
    if stays and not any([memory.precedes(user, step) for user in write.users]):
        return source
    return None


def _leave_uncopied(graph: fx.Graph, write: fx.Node) -> fx.Node:
    """Replace a copy by memory of any values; return it."""
    # Any: a node and its arguments.
    copies: Any = write.args[0]
    index: Any = write.args[1]
    with graph.inserting_before(copies):
        new = graph.call_function(aten.empty_like.default, (copies.args[0][index],))
    new.meta["val"] = write.meta["val"]
    write.replace_all_uses_with(new)
    graph.erase_node(write)
    copies.args = ([*copies.args[0][:index], *copies.args[0][index + 1 :]],)
    copies.meta["val"] = [*copies.meta["val"][:index], *copies.meta["val"][index + 1 :]]
    for item in list(copies.users):
        if item.args[1] > index:
            item.args = (copies, item.args[1] - 1)
    if not copies.users:
        graph.erase_node(copies)
    return new
