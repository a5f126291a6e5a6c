"""Random trees for the differential test: descriptions that tdfunc and tensordict are both built from."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import tdfunc
from tdfunc import TensorClass, TensorDict
from tests.incumbent import Incumbent, tensordict

SIZES = ((), (3,), (1,), (0,), (4,), (2, 3), (3, 1), (1, 1), (3, 3), (2, 0), (2, 3, 2), (1, 2, 3))
FEATURES = ((), (), (2,), (1,), (0,), (2, 3))
DTYPES = (
    torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
KEYS = ("a", "b", "c", "keys", "shape", "x.y", "a/b")
# The fields of a typed tree.
FIELDS = ("a", "b", "c")


class Sample(TensorClass):
    """A typed tree of tdfunc; tensordict's has the same fields."""

    a: Any = None
    b: Any = None
    c: Any = None


@tensordict.tensorclass
class IncumbentSample:
    """A typed tree of tensordict."""

    a: Any = None
    b: Any = None
    c: Any = None


TYPED = {TensorDict: Sample, Incumbent: IncumbentSample}
LAZY = {TensorDict: tdfunc.lazy_stack, Incumbent: tensordict.lazy_stack}


@dataclass(frozen=True)
class Branch:
    """A tree: its batch size, names of dimensions, and entries by key; open or typed."""

    size: tuple
    names: tuple | None
    entries: dict
    typed: bool = False

    def leaves(self):
        """Every tensor in it."""
        for value in self.entries.values():
            if isinstance(value, Branch | Lazy):
                yield from value.leaves()
            elif isinstance(value, torch.Tensor):
                yield value

    def build(self, cls):
        """This tree in the library of an open class; tensors are shared, not copied."""
        data = {k: _built(v, cls) for k, v in self.entries.items()}
        names = None if self.names is None else list(self.names)
        if self.typed:
            return TYPED[cls](**data, batch_size=list(self.size), names=names)
        return cls(data, batch_size=list(self.size), names=names)


def _built(value, cls):
    if isinstance(value, Branch | Lazy):
        return value.build(cls)
    # tensordict's constructor takes nested lists of non-tensor data for something else.
    if cls is Incumbent and isinstance(value, list) and value and isinstance(value[0], list):
        return tensordict.NonTensorStack.from_list(value)
    return value


@dataclass(frozen=True)
class Lazy:
    """A lazy stack of trees along a dimension."""

    branches: tuple
    dim: int
    names: tuple | None = None

    @property
    def size(self):
        """The batch size, with the smallest of sizes that differ."""
        inner = list(map(min, zip(*[branch.size for branch in self.branches], strict=True)))
        return (*inner[: self.dim], len(self.branches), *inner[self.dim :])

    @property
    def entries(self):
        """The entries of the first tree under the keys that all have."""
        first, *rest = self.branches
        return {k: v for k, v in first.entries.items() if all(k in branch.entries for branch in rest)}

    @property
    def is_ragged(self):
        """Return True if the trees could not be stacked."""
        return len({shape_of(branch) for branch in self.branches}) > 1

    def leaves(self):
        """Every tensor in it."""
        for branch in self.branches:
            yield from branch.leaves()

    def build(self, cls):
        """This stack in the library of an open class."""
        return LAZY[cls]([branch.build(cls) for branch in self.branches], self.dim)


def shape_of(node):
    """The properties that must agree for trees to be stacked."""
    if isinstance(node, Lazy):
        return ("lazy", node.dim, tuple(map(shape_of, node.branches)))
    if isinstance(node, Branch):
        return (node.typed, node.size, tuple(sorted((k, shape_of(v)) for k, v in node.entries.items())))
    return (tuple(node.shape), str(node.dtype)) if isinstance(node, torch.Tensor) else "words"


def parts(node):
    """Every branch of a tree, itself included."""
    yield node
    inner = node.branches if isinstance(node, Lazy) else node.entries.values()
    for value in inner:
        if isinstance(value, Branch | Lazy):
            yield from parts(value)


def plain(node):
    """The same tree without typed trees."""
    return _mapped(node, plain, typed=False)


def dense(node, once=True):
    """The same tree without lazy stacks; None where trees do not have one shape.

    With `once`, non-tensor data that are equal in all trees are one value for all.
    """
    if isinstance(node, Lazy):
        made = [dense(branch, once) for branch in node.branches]
        if None in made or len(set(map(shape_of, made))) > 1:
            return None
        return _stacked(made, node.dim, once)
    entries = {k: dense(v, once) if isinstance(v, Branch | Lazy) else v for k, v in node.entries.items()}
    return None if any(v is None for v in entries.values()) else replace(node, entries=entries)


def _stacked(branches, dim, once):
    first = branches[0]
    entries = {}
    for key, value in first.entries.items():
        values = [branch.entries[key] for branch in branches]
        if isinstance(value, Branch):
            entries[key] = _stacked(values, dim, once)
        elif isinstance(value, torch.Tensor):
            entries[key] = torch.stack(values, dim)
        else:
            entries[key] = stacked_words(values, first.size, dim, once)
    return replace(first, size=(*first.size[:dim], len(branches), *first.size[dim:]), entries=entries, names=None)


def stacked_words(values, size, dim, once=False):
    """Nested lists of non-tensor data for those of several trees of one size; one value stands for a whole tree."""
    arrays = []
    for value in values:
        array = np.empty(size, dtype=object)
        flat = _flat(value, len(size)) if isinstance(value, list) else [value] * array.size
        array.reshape(-1)[:] = flat
        arrays.append(array)
    whole = np.stack(arrays, dim)
    # One value for all is the only non-tensor data of several dimensions that tensordict's constructor takes.
    found = list(whole.flat)
    if once and not found:
        return next((v for v in values if not isinstance(v, list)), "red")
    if once and not isinstance(found[0], list) and all(value == found[0] for value in found):
        return found[0]
    return whole.tolist()


def _flat(value, depth):
    return [x for item in value for x in _flat(item, depth - 1)] if depth else [value]


def _mapped(node, fn, **changes):
    if isinstance(node, Lazy):
        return replace(node, branches=tuple(map(fn, node.branches)))
    entries = {k: fn(v) if isinstance(v, Branch | Lazy) else v for k, v in node.entries.items()}
    return replace(node, entries=entries, **changes)


def random_leaf(rng, size, dtype=None):
    """A tensor that starts with the batch size: contiguous, transposed or expanded."""
    dtype = DTYPES[rng.integers(len(DTYPES))] if dtype is None else dtype
    shape = (*size, *FEATURES[rng.integers(len(FEATURES))])
    layout = rng.integers(6)
    if layout == 0 and shape:
        return _values(rng, shape[-1:], dtype).expand(shape)
    if layout == 1 and len(shape) > 1:
        return _values(rng, (shape[1], shape[0], *shape[2:]), dtype).transpose(0, 1)
    values = _values(rng, shape, dtype)
    learns = dtype.is_floating_point or dtype.is_complex
    return values.requires_grad_() if learns and layout == 2 and rng.random() < 0.3 else values


def _values(rng, shape, dtype):
    if dtype is torch.bool:
        return torch.from_numpy(rng.random(shape) < 0.5) if shape else torch.tensor(bool(rng.random() < 0.5))
    values = torch.as_tensor(rng.integers(-4, 5, size=shape).astype(np.float32))
    if dtype.is_floating_point and rng.random() < 0.1:
        values = torch.where(values == 0, torch.nan, values)
    return (values.abs() if dtype is torch.uint8 else values).to(dtype)


def random_tree(rng, size=None, depth=2, dtype=None, nontensor=True, kinds=False):
    """A tree: nested, empty, 0-d, with a nested batch size that may be longer, names, and non-tensor data.

    With `kinds`, also typed trees and lazy stacks, inside one another.
    """
    if kinds and depth and rng.random() < 0.25:
        return _random_lazy(rng, size, depth, dtype, nontensor)
    size = SIZES[rng.integers(len(SIZES))] if size is None else size
    names = tuple("xyzuvw"[: len(size)]) if size and depth == 2 and rng.random() < 0.3 else None
    entries = {}
    typed = bool(kinds and rng.random() < 0.3)
    for key in rng.permutation(FIELDS if typed else KEYS)[: rng.integers(0, 4)]:
        kind = rng.random()
        if kind < 0.2 and depth:
            longer = size + (2,) if rng.random() < 0.3 else size
            entries[str(key)] = random_tree(rng, longer, depth - 1, dtype, nontensor, kinds)
        elif kind < 0.3 and nontensor:
            entries[str(key)] = _words(rng, size)
        else:
            entries[str(key)] = random_leaf(rng, size, dtype)
    return Branch(size, names, entries, typed)


def _random_lazy(rng, size, depth, dtype, nontensor):
    if size is None:
        inner, count = SIZES[rng.integers(1, 9)], int(rng.integers(1, 4))
        dim = int(rng.integers(0, len(inner) + 1))
    elif size and 0 not in size:
        dim = int(rng.integers(0, len(size)))
        inner, count = (*size[:dim], *size[dim + 1 :]), size[dim]
    else:
        return random_tree(rng, size, depth, dtype, nontensor)
    first = random_tree(rng, inner, depth - 1, dtype, nontensor, rng.random() < 0.5)
    if rng.random() < 0.3 and size is None and inner and isinstance(first, Branch) and not _nested(first):
        sizes = [(int(rng.integers(1, 4)), *inner[1:]) for _ in range(count)]
        return Lazy(tuple(_resized(rng, first, n) for n in sizes), dim)
    return Lazy((first, *[like(rng, first) for _ in range(count - 1)]), dim)


def _nested(branch):
    return any(isinstance(value, Branch | Lazy) for value in branch.entries.values())


def _resized(rng, branch, size):
    n = len(size)
    entries = {
        key: _values(rng, (*size, *value.shape[n:]), value.dtype) if isinstance(value, torch.Tensor) else "red"
        for key, value in branch.entries.items()
    }
    return replace(branch, size=size, entries=entries)


def _words(rng, size):
    if len(size) == 1 and size[0] and rng.random() < 0.5:
        return [str(rng.choice(["red", "blue"])) for _ in range(size[0])]
    return str(rng.choice(["red", "blue"]))


def like(rng, branch, *, change=False):
    """A tree of the same structure with other values and, with `change`, one difference somewhere in it."""
    paths = list(_paths(branch))
    target = paths[rng.integers(len(paths))] if change and paths else None
    return _like(rng, branch, (), target)


def _paths(branch, at=()):
    if isinstance(branch, Lazy):
        for i, inner in enumerate(branch.branches):
            yield from _paths(inner, (*at, i))
        return
    for key, value in branch.entries.items():
        yield (*at, key)
        if isinstance(value, Branch | Lazy):
            yield from _paths(value, (*at, key))


def _like(rng, branch, at, target):
    if isinstance(branch, Lazy):
        return replace(branch, branches=tuple(_like(rng, b, (*at, i), target) for i, b in enumerate(branch.branches)))
    entries = {}
    for key, value in branch.entries.items():
        here = (*at, key)
        if here == target:
            if rng.random() < 0.5:
                continue
            value = random_leaf(rng, branch.size)
        if isinstance(value, Branch | Lazy):
            entries[key] = _like(rng, value, here, target)
        elif isinstance(value, torch.Tensor):
            entries[key] = _values(rng, tuple(value.shape), value.dtype)
        else:
            entries[key] = value
    return replace(branch, entries=entries)
