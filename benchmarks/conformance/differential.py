"""The machinery of the differential test: cases, outcomes, and how two outcomes compare."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.conformance.random_trees import Branch, Lazy, stacked_words
from tdfunc._lazystack import LazyStack
from tdfunc._tensorclass import TensorClass
from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tests.incumbent import IncumbentBase, IncumbentNonTensor, tensordict


class UnfitError(Exception):
    """An operation that does not fit the tree at hand, or a tree that fits no operation."""


@dataclass
class Case:
    """One operation on given trees, spelled for both libraries."""

    name: str
    detail: Any
    inputs: list
    ours: Callable
    theirs: Callable
    # The same operation of plain torch on one leaf: (leaf, number of batch dimensions) -> leaf.
    oracle: Callable | None = None


@dataclass
class Outcome:
    """The result of a call, as it is and in a form that both libraries share, or its error."""

    value: Any = None
    error: Exception | None = None
    raw: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Tree:
    """A returned tree."""

    size: tuple
    names: tuple
    entries: dict
    typed: bool = False


@dataclass(frozen=True)
class Stack:
    """A returned lazy stack."""

    size: tuple
    dim: int
    trees: tuple


@dataclass(frozen=True)
class Words:
    """Returned non-tensor data."""

    values: Any


def outcome(fn, trees):
    """Run one side."""
    try:
        raw = fn(*trees)
        return Outcome(simplify(raw), raw=raw)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        return Outcome(error=error)


def simplify(value):
    """Return a result without the classes of its library."""
    if isinstance(value, LazyStack):
        return Stack(tuple(value.batch_size), value.stack_dim, tuple(map(simplify, value.trees)))
    if isinstance(value, TensorCollection):
        entries = {key: simplify(value._get(key)) for key in list(value._keys())}
        return Tree(tuple(value._batch_size), _names(value._names, value), entries, isinstance(value, TensorClass))
    if isinstance(value, (*IncumbentNonTensor, NonTensorBase)):
        return Words(value.tolist())
    if isinstance(value, tensordict.LazyStackedTensorDict):
        return Stack(tuple(value.batch_size), value.stack_dim, tuple(map(simplify, value.tensordicts)))
    if isinstance(value, IncumbentBase):
        entries = {key: simplify(value.get(key)) for key in list(value.keys())}
        return Tree(tuple(value.batch_size), tuple(value.names), entries)
    if tensordict.is_tensorclass(value):
        inner = simplify(value._tensordict)
        return inner if isinstance(inner, Stack) else Tree(inner.size, inner.names, inner.entries, True)
    if isinstance(value, tuple | list):
        return tuple(simplify(item) for item in value)
    if isinstance(value, Mapping):
        return {key: simplify(item) for key, item in value.items()}
    return value


def _names(names, tree):
    return tuple(names or [None] * len(tree._batch_size))


def has_deep_words(value):
    """Return True if a tree of tensordict holds non-tensor data that vary along several dimensions."""
    if isinstance(value, tensordict.LazyStackedTensorDict):
        return any(map(has_deep_words, value.tensordicts))
    if tensordict.is_tensorclass(value):
        return has_deep_words(value._tensordict)
    if not isinstance(value, IncumbentBase):
        return False
    return any(
        isinstance(node, tensordict.NonTensorStack) and len(node.batch_size) > 1
        if isinstance(node, IncumbentNonTensor)
        else has_deep_words(node)
        for node in (value.get(key) for key in value.keys())  # noqa: SIM118
    )


def describe(value):
    """Return the description of one of our trees, from which either library builds it again."""
    if isinstance(value, LazyStack):
        return Lazy(tuple(map(describe, value.trees)), value.stack_dim, value._names)
    entries = {}
    for key in value._keys():
        node = value._get(key)
        if isinstance(node, TensorCollection):
            node = describe(node)
        elif isinstance(node, NonTensorBase):
            node = _words_of(node, value._batch_size)
        entries[key] = node
    return Branch(tuple(value._batch_size), value._names or None, entries, isinstance(value, TensorClass))


def _words_of(node, size):
    """Non-tensor data as a constructor takes them: one value for the batch, or nested lists."""
    # Without elements there is no value to build one from, and lists within a list of the batch's length are values.
    if node.shape != size and (0 in node.shape or len(node.shape) > len(size)):
        raise UnfitError
    if 0 in node.shape and not isinstance(node, NonTensorData):
        raise UnfitError
    return node.value if node.shape == size else node.tolist()


def differences(a, b, at=(), rtol=0.0):
    """Yield (kind, path) for each way in which two simplified results differ."""
    if isinstance(a, Tree) and isinstance(b, Tree):
        yield from _node_differences(a, b, at, rtol)
    elif isinstance(a, Stack) and isinstance(b, Stack):
        if (a.size, a.dim) != (b.size, b.dim):
            yield "size", at
        yield from differences(a.trees, b.trees, at, rtol)
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype:
            yield "dtype", at
        if a.shape != b.shape:
            yield "shape", at
        elif a.dtype == b.dtype and not same_tensor(a, b, rtol):
            yield "value", at
        if a.requires_grad != b.requires_grad:
            yield "grad", at
    elif isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) != len(b):
            yield "count", at
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, (*at, i), rtol)
    elif isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            yield "keys" if a.keys() != b.keys() else "order", at
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], (*at, key), rtol)
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            yield "value", at
    elif type(a) is not type(b) or not (a == b or (a != a and b != b)):
        yield "class" if type(a) is not type(b) else "value", at


def _node_differences(a, b, at, rtol):
    if a.size != b.size:
        yield "size", at
    if a.typed != b.typed:
        yield "class", at
    # tensordict gives the names of a tree to the trees inside it; here names belong to one node.
    if a.names != b.names and all(isinstance(part, int) for part in at):
        yield "names", at
    if a.entries.keys() != b.entries.keys():
        yield "keys", at
    # A typed tree has the order of its fields here, and that of its construction in tensordict.
    elif list(a.entries) != list(b.entries) and not a.typed:
        yield "order", at
    for key in a.entries.keys() & b.entries.keys():
        yield from differences(a.entries[key], b.entries[key], (*at, key), rtol)


def same_tensor(a, b, rtol=0.0):
    """Equal values, NaN included; of meta tensors, equal shapes."""
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta and a.shape == b.shape
    if torch.equal(a, b):
        return True
    if a.is_complex() and a.shape == b.shape:
        # There is one infinite complex number, with any other part: kernels do not agree on it.
        a, b = (torch.where(x.isfinite(), x, torch.nan) for x in (a, b))
    return torch.allclose(a, b, rtol=rtol, atol=0, equal_nan=True)


def untyped(value):
    """A simplified result with open trees, their keys in one order, in place of typed ones."""
    if isinstance(value, tuple):
        return tuple(map(untyped, value))
    if isinstance(value, dict):
        return {key: untyped(item) for key, item in value.items()}
    if isinstance(value, Tree):
        return Tree(value.size, value.names, {key: untyped(value.entries[key]) for key in sorted(value.entries)})
    return Stack(value.size, value.dim, untyped(value.trees)) if isinstance(value, Stack) else value


def settled(value):
    """A simplified result without lazy stacks, as far as their trees have one shape."""
    if isinstance(value, tuple):
        return tuple(map(settled, value))
    if isinstance(value, dict):
        return {key: settled(item) for key, item in value.items()}
    if isinstance(value, Tree):
        entries = {key: settled(item) for key, item in value.entries.items()}
        return Tree(value.size, value.names, entries, value.typed)
    return _stacked(list(map(settled, value.trees)), value) if isinstance(value, Stack) else value


def _fits(words, size):
    """Return True if nested lists have a size."""
    return not size or (
        isinstance(words, list) and len(words) == size[0] and all(_fits(item, size[1:]) for item in words)
    )


def _stacked(nodes, stack):
    """One simplified node for several, or the lazy stack where they differ."""
    first, dim = nodes[0] if nodes else None, stack.dim
    if not nodes or not all(
        isinstance(node, Tree) and (node.size, node.entries.keys()) == (first.size, first.entries.keys())
        for node in nodes
    ):
        return stack
    entries = {}
    for key in first.entries:
        values = [node.entries[key] for node in nodes]
        if len(set(map(type, values))) > 1:
            return stack
        if isinstance(values[0], torch.Tensor):
            # tensordict's results need not have the shape of their batch size.
            if len({(value.shape, value.dtype) for value in values}) > 1 or values[0].dim() < dim:
                return stack
            entries[key] = torch.stack(values, dim)
        elif isinstance(values[0], Words):
            if len(first.size) < dim or not all(_fits(value.values, first.size) for value in values):
                return stack
            entries[key] = Words(stacked_words([value.values for value in values], first.size, dim))
        else:
            entries[key] = _stacked(values, Stack((), dim, tuple(values)))
            if isinstance(entries[key], Stack):
                return stack
    names = (*first.names[:dim], None, *first.names[dim:])
    return Tree((*first.size[:dim], len(nodes), *first.size[dim:]), names, entries, first.typed)
