"""The result of a replay: what the function returned, made again around the outputs of the graph."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from tdfunc._jit.signature import Contexts, note_description
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.objects import open_objects
from tdfunc.core.pytree import flatten
from tdfunc.core.walk import make_node_maker

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN_VALUES = (*_ATOMS, torch.dtype, torch.device, torch.Size, NonTensorBase)
# Makes the result of the outputs and of the nodes among the arguments. Trees in it are noted for the next call with
# these contexts: a training loop passes the trees of one step to the next.
Build: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Contexts], Any]


def make_builder(out: Any, slots: list[Tensor], nodes: list[Any]) -> Build:
    """Return the function that makes a result like `out`; its tensors are appended to `slots`, the outputs."""
    return _make_builder(out, slots, _places_of(nodes), "the result")


def _places_of(nodes: list[Any]) -> dict[Any, int]:
    """Return the place of each node by its id, and by ("data", id) the place of each value held for a whole batch."""
    places: dict[Any, int] = {id(node): i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        if isinstance(node, NonTensorData):
            places["data", id(node.data)] = i
    return places


def _make_builder(out: Any, slots: list[Tensor], nodes: dict[Any, int], where: str) -> Build:
    if isinstance(out, Tensor):
        place = len(slots)
        slots.append(out)
        return lambda values, *_: values[place]
    if id(out) in nodes:
        same = nodes[id(out)]
        return lambda _, trees, __: trees[same]
    if isinstance(out, NonTensorData) and ("data", id(out.data)) in nodes:
        # With another batch size: the value comes from the call, which may be a list that has changed since.
        source = nodes["data", id(out.data)]
        size = out.shape
        return lambda _, trees, __: NonTensorData(trees[source].data, size)
    if isinstance(out, _PLAIN_VALUES):
        return lambda *_: out
    if isinstance(out, TensorCollection) and _is_plain(out, nodes):
        return _PlainTree(out, slots).make_noted
    return _make_node_builder(out, slots, nodes, where)


def _make_node_builder(out: Any, slots: list[Tensor], nodes: dict[Any, int], where: str) -> Build:
    """Return the builder of a tree or container, whose parts have builders."""
    kind = type(out)

    def list_parts(children: Iterable[Any]) -> list[Build]:
        return [_make_builder(child, slots, nodes, f"{where}[{i}]") for i, child in enumerate(children)]

    if isinstance(out, TensorCollection):
        children, context = flatten(out)
        parts = list_parts(children)
        node_of = make_node_maker(kind, context)
        return lambda *given: node_of(tuple([part(*given) for part in parts]))
    if isinstance(out, (tuple, list)):
        parts = list_parts(out)
        make = kind._make if hasattr(kind, "_fields") else kind
        return lambda *given: make([part(*given) for part in parts])
    if kind is dict:
        named = {key: _make_builder(item, slots, nodes, f"{where}[{key!r}]") for key, item in out.items()}
        return lambda *given: {key: part(*given) for key, part in named.items()}
    if kind in torch_pytree.SUPPORTED_NODES:
        node = torch_pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(out)
        parts = list_parts(children)
        return lambda *given: node.unflatten_fn([part(*given) for part in parts], context)
    opened = open_objects(out)
    if opened is not out:
        return _make_node_builder(opened, slots, nodes, where)
    raise UnsupportedError(
        f"jit: {where} of the function is an object that a replay cannot make again.",
        expected="tensors, trees, numbers, strings and containers of these",
        got=kind.__name__,
        hint="return its tensors, or register its class as a pytree.",
    )


def _is_plain(tree: TensorCollection, nodes: dict[Any, int]) -> bool:
    """Return whether a tree holds only tensors and new trees of this kind."""
    children, context = flatten(tree)
    if context.grafts or id(tree) in nodes:
        return False
    for child in children:
        if isinstance(child, TensorCollection):
            if not _is_plain(child, nodes):
                return False
        elif not isinstance(child, Tensor):
            return False
    return True


class _PlainTree:
    """Makes a tree that holds only outputs and such trees, which is most of what a training step returns."""

    def __init__(self, out: TensorCollection, slots: list[Tensor]) -> None:
        self._kind = type(out)
        children, self._context = flatten(out)
        self._begin = len(slots)
        # For each child its place among the outputs, or how to make it.
        self._parts: list[int | _PlainTree] = []
        for child in children:
            if isinstance(child, TensorCollection):
                self._parts.append(_PlainTree(child, slots))
            else:
                self._parts.append(len(slots))
                slots.append(child)
        self._end = len(slots)
        self._node = make_node_maker(self._kind, self._context)
        self._has_trees = any([isinstance(part, _PlainTree) for part in self._parts])
        # The parts of a key that `_list_key_parts` made, and the epoch of the contexts that it made them in.
        self._key: tuple[object, list[Any]] = (None, [])

    def make_noted(self, values: Sequence[Any], _: Sequence[Any], contexts: Contexts) -> TensorCollection:
        """Return the tree, with a note of its description."""
        nodes: list[TensorCollection] = []
        tree = self._make(values, nodes)
        epoch, parts = self._key
        if epoch is not contexts.epoch:
            epoch, parts = self._key = (contexts.epoch, self._list_key_parts(contexts))
        # Without the tree itself.
        note_description(tree, epoch, list(values[self._begin : self._end]), nodes[1:], parts)
        return tree

    def _make(self, values: Sequence[Any], nodes: list[TensorCollection]) -> TensorCollection:
        """Return the tree; it and the trees in it are appended to `nodes`, each before those in it."""
        if not self._has_trees:
            tree = self._node(tuple(values[self._begin : self._end]))
            nodes.append(tree)
            return tree
        children: list[Any] = []
        inner: list[TensorCollection] = []
        for part in self._parts:
            if isinstance(part, _PlainTree):
                children.append(part._make(values, inner))
            else:
                children.append(values[part])
        tree = self._node(tuple(children))
        nodes.append(tree)
        nodes += inner
        return tree

    def _list_key_parts(self, contexts: Contexts) -> list[Any]:
        """Return the parts of the key of a call with this tree, as `describe` makes them."""
        found: list[Any] = [contexts.number(self._kind, self._context)]
        for part in self._parts:
            if isinstance(part, _PlainTree):
                found += part._list_key_parts(contexts)
            else:
                found.append(None)
        return found
