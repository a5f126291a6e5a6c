"""A lazy stack and a typed tree, in 60 lines each, over the base and the operations as they are.

They override primitives only. If a test here needs an edit of `core/collection.py` or `ops/`, the base is wrong.
"""

import optree
import pytest
import torch
from torch import Size, Tensor
from torch.utils import _pytree as pytree

from tdfunc import TensorDict
from tdfunc._tensordict import TreeMethods
from tdfunc.core.collection import Static, TensorCollection, index_op
from tdfunc.core.errors import LeafMismatchError, MissingKeyError
from tdfunc.core.pytree import _UNDECIDED, register
from tdfunc.core.shapes import as_size, dim_index
from tdfunc.ops.convert import build
from tests.helpers import assert_trees_equal


class LazyStack(TreeMethods):
    """Trees of possibly unequal shapes along a dimension that is never materialised; unequal sizes show as -1."""

    __slots__ = ()

    def __new__(cls, trees, dim=0):
        ndim = len(trees[0]._batch_size) + 1
        # Counted from the end, so that it stays right when vmap takes leading dimensions away.
        return cls._of(trees, dim_index(dim, ndim, "LazyStack") - ndim)

    @classmethod
    def _of(cls, trees, own):
        data = {str(i): tree for i, tree in enumerate(trees)}
        return cls._make(data, _stacked_size(_common_size(trees), own, len(trees)), static=Static(own=own))

    @property
    def _trees(self):
        return list(self._data.values())

    @property
    def _dim(self):
        return max(len(self._batch_size) + self._static.own, 0)

    def _dense(self):
        return torch.stack([tree._dense() if isinstance(tree, LazyStack) else tree for tree in self._trees], self._dim)

    def _keys(self):
        return [key for key in self._trees[0]._keys() if all(key in tree._keys() for tree in self._trees)]

    def _get(self, key):
        nodes = [tree._get(key) for tree in self._trees]
        if isinstance(nodes[0], TensorCollection):
            return self._of(nodes, self._static.own)
        ragged = isinstance(nodes[0], Tensor) and len({node.shape for node in nodes}) > 1
        return tuple(nodes) if ragged else torch.stack(nodes, self._dim)

    def _put(self, changes, kinds=None):
        parts = {key: node if node is None else node.unbind(self._dim) for key, node in changes.items()}
        rows = [{key: part and part[i] for key, part in parts.items()} for i in range(len(self._trees))]
        return self._of([tree._put(row) for tree, row in zip(self._trees, rows, strict=True)], self._static.own)

    def _split(self, other):
        return other._trees if isinstance(other, LazyStack) else other.unbind(self._dim)

    def _map(self, op, *others):
        if op.args or op.size is not None:
            return self._dense()._map(op, *[other._dense() for other in others])
        zipped = zip(self._trees, *map(self._split, others), strict=True)
        return self._of([tree._map(op, *rest) for tree, *rest in zipped], self._static.own)

    def _index(self, index):
        return self._shape(index_op(index, self._batch_size))

    def _shape(self, op, *others):
        if op.name == "stack":
            return LazyStack([self, *others], op.args[0])
        if op.name == "index" and (done := self._pick(op.args[0])) is not None:
            return done
        if op.size is None and not op.args:
            return self._map(op, *others)
        return self._dense()._shape(op, *[other._dense() for other in others])

    def _pick(self, parts):
        if len(parts) <= self._dim or not all(isinstance(part, int | slice) for part in parts[: self._dim + 1]):
            return None
        here, rest = parts[self._dim], (*parts[: self._dim], *parts[self._dim + 1 :])
        if isinstance(here, int):
            return self._trees[here]._index(rest)
        kept = sum(isinstance(part, slice) for part in parts[: self._dim])
        return LazyStack([tree._index(rest) for tree in self._trees[here]], kept)

    @classmethod
    def _rebuilt_size(cls, children, context):
        if not all(isinstance(child, TensorCollection) and child._cache is not _UNDECIDED for child in children):
            return None, context.device
        return _stacked_size(_common_size(children), context.static.own, len(children)), context.device


def _common_size(trees):
    return Size(
        [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*[t._batch_size for t in trees], strict=True)]
    )


def _stacked_size(size, own, count):
    dim = max(len(size) + 1 + own, 0)
    return size[:dim] + Size((count,)) + size[dim:]


register(LazyStack)


class TensorClass(TreeMethods):
    """A tree of named fields: an absent one reads as None, an unknown one is refused."""

    __slots__ = ()
    _fields = ()

    def __init_subclass__(cls):
        cls._fields = (*cls._fields, *cls.__annotations__)
        for name in cls.__annotations__:
            setattr(cls, name, property(lambda self, name=name: self[name] if name in self._data else None))
        register(cls)

    def __new__(cls, *values, batch_size=None, **fields):
        given = dict(zip(cls._fields, values, strict=False)) | fields
        cls._check(given)
        return build(cls, {name: v for name, v in given.items() if v is not None}, as_size(batch_size), None)

    @classmethod
    def _check(cls, names):
        unknown = [name for name in names if name not in cls._fields]
        if unknown:
            raise MissingKeyError(f"{cls.__name__} has no field {unknown[0]!r}; its fields are {cls._fields}")

    def _put(self, changes, kinds=None):
        self._check(changes)
        return super()._put(changes, kinds)


class Sample(TensorClass):
    """What the tests store."""

    __slots__ = ()

    image: Tensor
    label: Tensor
    note: str


def rows(count, size=(3,)):
    """`count` trees of one shape, with a nested tree and non-tensor data."""
    return [
        TensorDict(
            {
                "x": torch.randn(*size, 2),
                "n": {"y": torch.arange(3.0).expand(size) + i},
                "s": [f"{i}.{j}" for j in range(size[0])],
            },
            size,
        )
        for i in range(count)
    ]


def ragged():
    """Two trees of unequal length."""
    return [TensorDict({"x": torch.ones(n, 2), "n": {"y": torch.zeros(n)}}, [n]) for n in (2, 4)]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_lazy_equals_dense(dim):
    """A lazy stack would read, index or compute otherwise than the stack that it stands for."""
    trees = rows(4)
    lazy, dense = LazyStack(trees, dim), torch.stack(trees, dim)

    assert lazy.batch_size == dense.batch_size
    assert list(lazy.keys(True, True)) == list(dense.keys(True, True))
    assert lazy["s"] == dense["s"]
    assert torch.equal(lazy["n", "y"], dense["n", "y"])
    assert_trees_equal((lazy * 2 + lazy)._dense(), dense * 3)
    assert_trees_equal(lazy + torch.ones(lazy.batch_size), dense + 1)
    assert_trees_equal(lazy.reshape(-1), dense.reshape(-1))
    assert (lazy == lazy)._dense().all()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "index",
    [1, -1, slice(1, 3), (slice(None), 2), (0, 1), (Ellipsis, 0), None, torch.tensor([2, 0]), [True, False, True],
     (slice(None), torch.tensor([0, 0]))],
    ids=repr,
)  # fmt: skip
def test_lazy_index(dim, index):
    """An index would reach another row than in the dense stack."""
    trees = rows(3)
    lazy, dense = LazyStack(trees, dim), torch.stack(trees, dim)
    result = lazy[index]

    assert_trees_equal(result._dense() if isinstance(result, LazyStack) else result, dense[index])


def test_lazy_edits():
    """An edit of a lazy stack would not reach each of its trees, or would change the stack itself."""
    lazy = LazyStack(rows(2), 1)
    new = lazy.set(("n", "z"), torch.arange(6).reshape(3, 2)).update({"w": 1.0}).delete("x").exclude("s")

    assert set(new.keys(True, True)) == {("n", "y"), ("n", "z"), "w"}
    assert isinstance(new, LazyStack)
    assert new[:, 1]["n", "z"].tolist() == [1, 3, 5]
    assert list(new.select(("n", "z")).keys(True, True)) == [("n", "z")]
    assert sorted(lazy.keys()) == ["n", "s", "x"]


def test_lazy_pytree():
    """A lazy stack would lose its class, its batch size or its values in `tree_map` of either registry."""
    lazy = LazyStack(rows(2), 1)

    for mapped in (pytree.tree_map(lambda x: x + 1, lazy), optree.tree_map(lambda x: x + 1, lazy)):
        assert isinstance(mapped, LazyStack)
        assert mapped.batch_size == Size([3, 2])
        assert torch.equal(mapped["x"], lazy["x"] + 1)
    assert pytree.tree_map(lambda x: x[0], lazy).batch_size == Size([2])
    assert pytree.tree_map(lambda _: None, lazy).batch_size == Size([3, 2])
    ints = pytree.tree_map(lambda _: 0, lazy)
    assert pytree.tree_structure(ints) == pytree.tree_structure(lazy)


@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_vmap(dim):
    """Inside vmap a lazy stack would have the wrong batch size, or not come back whole."""
    lazy = LazyStack([row.exclude("s") for row in rows(2)], dim)
    seen = []

    def fn(tree):
        seen.append(tree.batch_size)
        return tree.apply(lambda x: x * 2)

    out = torch.vmap(fn)(lazy)

    # vmap takes dimension 0 of each leaf: the trees' own, not the one they are stacked along.
    assert seen == [Size([2])]
    assert out.batch_size == lazy.batch_size
    assert torch.equal(out["x"], lazy["x"] * 2)


def test_lazy_ragged():
    """Unequal lengths would be padded, truncated or refused without a word."""
    lazy = LazyStack(ragged())
    doubled = lazy * 2

    assert lazy.batch_size == Size([2, -1])
    assert [part.shape[0] for part in doubled["x"]] == [2, 4]
    assert lazy[1].batch_size == Size([4])
    assert pytree.tree_map(lambda x: x, lazy).batch_size == Size([2, -1])
    with pytest.raises(LeafMismatchError, match="batch sizes differ"):
        lazy.reshape(-1)


def test_lazy_inside_a_tree():
    """A lazy stack as an entry would not follow indexing and stacking of the tree around it."""
    lazy = LazyStack([row.exclude("s") for row in rows(2)], 0)
    tree = TensorDict({"lazy": lazy, "a": torch.arange(2)}, [2])

    assert_trees_equal(tree[1]["lazy"], lazy[1])
    assert torch.stack([tree, tree])["lazy"].batch_size == Size([2, 2, 3])
    assert torch.equal(torch.stack([tree, tree])[1]["lazy", "x"], lazy["x"])
    assert pytree.tree_map(lambda x: x, tree)["lazy"].batch_size == Size([2, 3])


def test_lazy_stacks():
    """Stacking lazy stacks would lose a dimension or mix up rows."""
    a, b = LazyStack(rows(2)), LazyStack(rows(2))
    both = torch.stack([a, b], 1)

    assert both.batch_size == Size([2, 2, 3])
    assert torch.equal(both[:, 1]["x"], b["x"])


@pytest.fixture
def sample():
    """A typed tree of four rows."""
    return Sample(torch.randn(4, 3), label=torch.arange(4), note="kept", batch_size=[4])


def test_typed_fields(sample):
    """A field would not read as itself, or an unknown one would be accepted."""
    assert sample.label.tolist() == [0, 1, 2, 3]
    assert Sample(torch.zeros(2)).label is None
    with pytest.raises(MissingKeyError, match="'colour'"):
        sample.set("colour", 1)
    with pytest.raises(MissingKeyError, match="'colour'"):
        Sample(colour=1)


@pytest.mark.parametrize("index", [1, slice(1, 3), torch.tensor([2, 0]), [True, False, True, False], None, Ellipsis])
def test_typed_index(sample, index):
    """An index would lose the class or a row."""
    rows_ = sample[index]

    assert type(rows_) is Sample
    assert torch.equal(rows_.image, sample.image[index])
    assert rows_.batch_size == sample.label[index].shape
    assert rows_.note == "kept"


def test_typed_edits(sample):
    """An edit would lose the class, write to the original, or keep a deleted field."""
    new = sample.set("label", torch.zeros(4)).delete("image")

    assert type(new) is Sample
    assert new.image is None
    assert new.label.dtype == torch.float32
    assert sample.label.dtype == torch.int64
    assert sample.at[0].set(sample[1]).label.tolist() == [1, 1, 2, 3]


def test_typed_operations(sample):
    """Stack, arithmetic, maps or shapes would return another class or other numbers."""
    stacked = torch.stack([sample, sample + 1], 1)

    assert type(stacked) is Sample
    assert stacked.batch_size == Size([4, 2])
    assert torch.equal(stacked.label[:, 1], sample.label + 1)
    assert type(sample.apply(lambda x: x * 2)) is Sample
    assert type(sample.exclude("note").reshape(2, 2).sum(0)) is Sample
    assert stacked.note == [["kept", "kept"]] * 4


def test_typed_pytree_and_vmap(sample):
    """A typed tree would come back from a transformation as another class, or with another batch size."""
    seen = []

    def fn(tree):
        seen.append((type(tree), tree.batch_size))
        return tree.set("image", tree.image.sum())

    out = torch.vmap(fn)(sample)

    assert seen == [(Sample, Size([]))]
    assert type(out) is Sample
    assert out.batch_size == Size([4])
    assert torch.equal(out.image, sample.image.sum(-1))
    assert type(optree.tree_map(lambda x: x[0], sample)) is Sample
    grads = torch.func.grad(lambda tree: (tree.image**2).sum())(sample.delete("label"))
    assert torch.equal(grads.image, 2 * sample.image)


def test_typed_inside_a_tree(sample):
    """A typed tree as an entry would lose its class when the tree around it is indexed, stacked or printed."""
    tree = TensorDict({"s": sample, "a": torch.zeros(4)}, [4])

    assert type(tree[1:]["s"]) is Sample
    assert type(torch.stack([tree, tree])["s"]) is Sample
    assert tree["s", "note"] == "kept"
    assert "s: Sample(" in repr(tree)
