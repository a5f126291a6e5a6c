"""Laws that hold for every tree: ways there and back, and equality with plain torch leaf by leaf."""

import copy
import pickle

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tdfunc import Filter, Kind, TensorDict, combine, partition
from tdfunc.core.collection import iter_leaves
from tdfunc.core.keys import unravel
from tdfunc.ops.base.reading import entries
from tests.helpers import assert_pure, assert_trees_equal, collections
from tests.strategies import KEYS, PATHS, any_trees, leaves, pairs, trees

FLOATS = st.just(torch.float32)


def tied_alike(tree, other):
    """Whether two trees record the same groups, and hold one tensor at each path of a group."""
    same = all(tree[path] is tree[group[0]] for group in tree._ties for path in group)
    return same and tree.ties() == other.ties()


@given(trees(), st.randoms(use_true_random=False))
def test_order_of_keys_is_no_structure(tree, random):
    """Trees built in another order have one structure."""
    keys = list(tree.keys())
    random.shuffle(keys)
    other = TensorDict({key: tree._get(key) for key in keys}, tree.batch_size)
    assume(not tree.ties())

    assert pytree.tree_structure(other) == pytree.tree_structure(tree)
    assert hash(pytree.tree_structure(other)) == hash(pytree.tree_structure(tree))


@given(trees(), PATHS, st.data())
def test_set_then_get(tree, path, data):
    """`get` returns what was set, the rest of the tree stays, and the given tree does not change."""
    assume(not any(path[:i] in dict.fromkeys(p for p, _ in _nodes(tree)) for i in range(1, len(path))))
    value = data.draw(leaves(tree.batch_size))
    before = list(tree.keys(True, True))
    new = assert_pure(lambda t: t.set(path, value), tree)

    assert new[path] is value
    assert list(tree.keys(True, True)) == before
    kept = {p for p in tree.paths() if p[: len(path)] != path}
    assert kept <= set(new.paths()) | {p for group in new._ties for p in group} | _tied(tree)


def _nodes(tree, at=()):
    for key in list(tree.keys()):
        yield (*at, key), tree._get(key)
        if isinstance(tree._get(key), TensorDict):
            yield from _nodes(tree._get(key), (*at, key))


def _tied(tree):
    return {path for group in tree._ties for path in group}


@given(trees())
def test_a_deleted_entry_is_gone(tree):
    """The tree without an entry does not contain its key."""
    assert [key for key in list(tree.keys()) if key in tree.delete(key)] == []


@given(trees())
def test_delete_then_set(tree):
    """Deleting an entry and setting it again changes nothing."""
    assume(not tree.ties())

    again = {key: tree.delete(key).set(key, tree._get(key)) for key in list(tree.keys())}

    assert_trees_equal(again, dict.fromkeys(again, tree))


@given(trees())
def test_select_and_exclude_are_opposites(tree):
    """`exclude` drops exactly what `select` keeps."""
    keys = list(tree.keys())[::2]
    kept, rest = tree.select(*keys), tree.exclude(*keys)

    assert set(kept.keys()) == set(keys)
    assert set(rest.keys()) == set(tree.keys()) - set(keys)
    assert all(kept._get(key) is tree._get(key) or isinstance(tree._get(key), TensorDict) for key in keys)


@given(trees(), KEYS)
def test_partition_and_combine(tree, key):
    """The parts of a partition combine to the tree."""
    assume(tree.paths())
    where = lambda path, leaf: path[-1] == key or leaf.is_floating_point()  # noqa: E731
    first, second = partition(tree, Filter(where))
    back = combine(first, second)

    assert set(back.keys(True, True)) == set(tree.keys(True, True))
    assert pytree.tree_structure(back) == pytree.tree_structure(tree)
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(back), pytree.tree_leaves(tree), strict=True))
    assert {path: back.kind(path) for path in back.paths()} == {path: tree.kind(path) for path in back.paths()}


@given(trees())
def test_flatten_keys_and_back(tree):
    """Flat keys split into the tree that they came from."""
    assume(not any("|" in key for path in tree.keys(True) for key in ([path] if isinstance(path, str) else path)))
    paths = list(tree.keys(True, True))
    back = tree.flatten_keys("|").unflatten_keys("|")

    assert list(back.keys(True, True)) == paths
    assert tied_alike(back, tree)
    tensors = [path for path in paths if isinstance(tree[path], torch.Tensor)]
    assert [path for path in tensors if back[path] is not tree[path]] == []
    assert [path for path in paths if back[path] is None] == []
    assert [back.kind(path) for path in paths] == [tree.kind(path) for path in paths]


@given(trees(), KEYS)
def test_rename_and_back(tree, key):
    """Renaming keeps ties, kinds and the place of an entry."""
    assume(key not in tree and list(tree.keys()))
    old = next(iter(tree.keys()))
    there = tree.rename_key(old, key)

    assert list(there.keys())[0] == key
    assert_trees_equal(there.rename_key(key, old), tree)
    assert tied_alike(there.rename_key(key, old), tree)


IDENTITIES = {
    "reshape": lambda tree: tree.reshape(tree.batch_size),
    "permute": lambda tree: tree.permute(*range(tree.ndim)),
    "expand": lambda tree: tree.expand(*tree.batch_size),
    "repeat": lambda tree: tree.repeat(*[1] * tree.ndim),
    "to": lambda tree: tree.to(tree.device),
    "clone": lambda tree: tree.clone(recurse=False),
    "exclude": lambda tree: tree.exclude("not there"),
    "copy": copy.copy,
}


@given(trees())
def test_identities(tree):
    """An operation that changes nothing returns the tree itself."""
    assert [name for name, operation in IDENTITIES.items() if operation(tree) is not tree] == []


@given(pairs())
def test_equality_sees_one_leaf(pair):
    """Two trees that differ in one value are not equal, there and only there."""
    tree, other, path = pair

    assert not (tree == other).all()
    assert (tree != other).any()
    assert not (tree == other)[path].all()
    assert ((tree == other).delete(path).all()) or len(tree._ties) > 0


ARITHMETIC = {
    "add": lambda x: x + 1,
    "subtract from": lambda x: 2 - x,
    "multiply": lambda x: x * x,
    "divide": lambda x: x / 3,
    "negate": lambda x: -x,
    "compare": lambda x: x > 0,
    "power of": lambda x: 2**x,
}


@given(trees(dtypes=FLOATS))
def test_arithmetic_equals_torch(tree):
    """Arithmetic equals torch's on each leaf, and writes to none."""
    results = {name: assert_pure(fn, tree) for name, fn in ARITHMETIC.items()}
    cases = [(name, path) for name in results for path in tree.paths()]

    wrong = [(name, path) for name, path in cases if not torch.equal(results[name][path], ARITHMETIC[name](tree[path]))]
    assert wrong == []
    assert [name for name, result in results.items() if not tied_alike(result, tree)] == []


@given(trees(), st.sampled_from(Kind))
def test_kinds_follow(tree, kind):
    """A map keeps the kinds of leaves."""
    assume(tree.paths())
    path = tree.paths()[0]
    marked = tree.set(path, tree[path], kind=kind)
    maps = {
        "clone": marked.clone(),
        "apply": marked.apply(lambda x: x),
        "tree_map": pytree.tree_map(lambda x: x, marked),
        "detach": marked.detach(),
    }

    assert {name: new.kind(path) for name, new in maps.items()} == dict.fromkeys(maps, kind)
    assert pytree.tree_structure(marked) == pytree.tree_structure(tree)


# -- trees with nodes of every kind -----------------------------------------------------------------------------


@given(any_trees())
def test_flatten_and_unflatten_any_tree(tree):
    """Both registries give back ties, typed trees, lazy stacks, meta leaves and leaves that require gradients."""
    children, spec = pytree.tree_flatten(tree)
    back = pytree.tree_unflatten(children, spec)
    assert_same(back, tree)
    assert tied_alike(back, tree)

    children, spec = optree.tree_flatten(tree, none_is_leaf=True)
    assert_same(optree.tree_unflatten(spec, children), tree)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), lambda t: t.clone()])
@given(tree=any_trees())
def test_copies_of_any_tree(copier, tree):
    """A copy keeps classes, requires_grad, devices, values, ties, kinds and names in its own memory."""
    new = copier(tree)

    assert_same(new, tree)
    assert tied_alike(new, tree)
    assert [entry.kind for entry in entries(new)] == [entry.kind for entry in entries(tree)]
    one, other = ({x.data_ptr() for x in t.leaves() if x.numel() and not x.is_meta} for t in (new, tree))
    assert not one & other


@given(any_trees(size=(3,)), st.integers(-3, 2))
def test_a_row_is_the_row_of_each_leaf(tree, i):
    """An index reaches the same row of every leaf."""
    row = tree[i]
    pairs = zip(iter_leaves(row), iter_leaves(tree), strict=False)

    assert row.batch_size == ()
    shared = [(path, leaf, whole) for (path, leaf), (other, whole) in pairs if path == other]
    assert [path for path, leaf, whole in shared if not same_leaf(leaf, whole[i])] == []


@given(any_trees(size=(2, 3)), st.integers(0, 1))
def test_unbind_and_stack_any_tree(tree, dim):
    """The rows of a tree stack to the tree, in its classes."""
    parts = tree.unbind(dim)
    # A tree that is cut along its lazy stack is dense there, and stacks as such.
    tree, parts = tree.exclude("lazy"), [part.exclude("lazy") for part in parts]
    back = torch.stack(parts, dim)

    assert tied_alike(back, tree)
    assert pytree.tree_structure(back.exclude(*words(tree))) == pytree.tree_structure(tree.exclude(*words(tree)))
    assert back.batch_size == tree.batch_size
    assert [path for path in tree.paths() if not same_leaf(back[path], tree[path])] == []


@given(any_trees())
def test_dicts_and_back(tree):
    """`from_dict` reads what `to_dict` writes."""
    tree = tree.exclude("typed", "lazy")
    back = TensorDict.from_dict(tree.to_dict(), batch_size=tree.batch_size)

    assert list(back.keys(True, True)) == list(tree.keys(True, True))
    assert [path for path in tree.paths() if back[path] is not tree[path]] == []


def words(tree):
    """The paths of non-tensor data, whose kind a stack may change."""
    leaves = {path for path, _ in iter_leaves(tree)}
    return [path for path in tree.keys(True, True) if unravel(path) not in leaves]


def same_leaf(leaf, other):
    """Equal values, dtype, device and requires_grad; of meta tensors, equal shapes."""
    if (leaf.dtype, leaf.device, leaf.shape) != (other.dtype, other.device, other.shape):
        return False
    return leaf.requires_grad == other.requires_grad and (leaf.is_meta or torch.equal(leaf, other))


def assert_same(actual, expected):
    """Check two trees that may hold meta tensors, typed trees and lazy stacks."""
    assert type(actual) is type(expected)
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    for (_, node), (_, other) in zip(collections(actual), collections(expected), strict=True):
        assert node.batch_size == other.batch_size
        assert node.names == other.names
        assert node.device == other.device
    pairs = list(zip(iter_leaves(actual), iter_leaves(expected), strict=True))
    assert all(path == other and same_leaf(a, b) for (path, a), (other, b) in pairs)
