"""The paths of a lazy stack's leaves, which lead through the numbers of its trees."""

import pytest
import torch

import tdfunc
from tdfunc import Kind, LazyStack, MissingKeyError, TensorDict, lazy_stack
from tests.helpers import TiedLM, assert_pure, assert_trees_equal


def make(place):
    """A stack of trees with a key of one of them and text: by itself, in a tree, and in a stack of stacks."""
    lazy = lazy_stack(
        [
            TensorDict({"a": torch.ones(1), "n": {"b": torch.zeros(2)}, "s": "text"}),
            TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}, "z": torch.ones(1)}),
        ]
    )
    return {"lazy": lazy, "inside": TensorDict({"l": lazy, "o": 1}), "deep": lazy_stack([lazy, lazy], 1)}[place]


PLACES = pytest.mark.parametrize("place", ["lazy", "inside", "deep"])


@PLACES
def test_paths_are_read(place):
    """What a tree says are the paths of its leaves could not be read, or would be the paths of others."""
    tree = make(place)
    paths, leaves = tree.paths(), tree.leaves()

    assert len(paths) == len(leaves) > 4
    for path, leaf in zip(paths, leaves, strict=True):
        assert tree[path] is tree.get(path) is tree.at[path].get() is leaf
        assert path in tree
        assert tree.kind(path) is None
        assert tdfunc.partition(tree, ".".join(path))[0].leaves()[0] is leaf
    assert tree[(*paths[0][:-1], "s")] == "text"


@PLACES
def test_paths_are_selected(place):
    """`select(*paths())` would not be the tree without non-tensor data, as the page of operations says."""
    tree = make(place)
    paths = tree.paths()
    whole = tree.select(*paths)

    assert whole.paths() == paths
    assert all(mine is leaf for mine, leaf in zip(whole.leaves(), tree.leaves(), strict=True))
    assert (*paths[0][:-1], "s") in tree
    assert (*paths[0][:-1], "s") not in whole
    for i, path in enumerate(paths):
        assert tree.select(path).paths() == [path]
        assert tree.exclude(path).paths() == tree.delete(path).paths() == paths[:i] + paths[i + 1 :]
        leaf, rest = tree.pop(path)
        assert leaf is tree[path]
        assert rest.paths() == paths[:i] + paths[i + 1 :]


@PLACES
def test_paths_are_set(place):
    """A value would be cut for the trees, or get a key of the tree's number in each of them."""
    tree = make(place)
    one = tree.paths()[1]
    for change in (
        lambda t: t.set(one, torch.full((2,), 7.0)),
        lambda t: t.at[one].set(7),
        lambda t: t.at[one].add(7),
        lambda t: t.at[one].apply(lambda x: x + 7),
    ):
        new = assert_pure(change, tree)
        assert new[one].tolist() == [7.0, 7.0]
        assert new.paths() == tree.paths()
        assert [new[path] is tree[path] for path in tree.paths()].count(False) == 1
    assert_trees_equal(_dense(tree.setdefault(one, 1)), _dense(tree))
    doubled = tree
    for path in tree.paths():
        doubled = doubled.set(path, doubled[path] * 2)
    assert all(torch.equal(mine, leaf * 2) for mine, leaf in zip(doubled.leaves(), tree.leaves(), strict=True))


def _dense(tree):
    return TensorDict({".".join(path): leaf for path, leaf in zip(tree.paths(), tree.leaves(), strict=True)})


def test_names_stay():
    """A stack would lose its names when a leaf of one tree is set."""
    lazy = lazy_stack([TensorDict({"a": torch.ones(2)}, [2])] * 2).with_names(["x", "y"])

    assert lazy.set(("0", "a"), torch.zeros(2)).names == ["x", "y"]
    assert lazy.set(("0", "a"), torch.zeros(2))[0].names == ["y"]


def test_keys_go_before_numbers():
    """A key of the trees would be taken for the number of one, or a new key be refused because it looks like one."""
    lazy = lazy_stack([TensorDict({"0": {"a": i}, "a": -i}) for i in (1, 2)])

    assert [x.item() for x in lazy["0", "a"]] == [1, 2]
    assert lazy["1", "a"].item() == -2
    assert isinstance(lazy["0"], LazyStack)
    assert "1" not in lazy
    assert [x.item() for x in lazy.set(("1", "new"), 3)["1", "new"]] == [3, 3]
    for path in (("2", "a"), ("1", "z"), ("01", "a"), ("-1", "a")):
        assert path not in lazy
        with pytest.raises(MissingKeyError, match="get: no key"):
            lazy[path]


def test_kinds_and_ties_by_path():
    """The kind of a leaf in one tree would not be found, or a group of tied leaves not be written or untied."""
    lazy = lazy_stack([TensorDict.from_module(TiedLM()) for _ in range(2)])
    first, second = next(group for group in map(sorted, lazy.ties()) if group[0].startswith("1."))
    one, other = tuple(first.split(".")), tuple(second.split("."))
    new = lazy.set(one, torch.zeros_like(lazy[one]))

    assert lazy.kind(one) is Kind.PARAMETER
    assert new[other] is new[one]
    assert new[other].sum() == 0
    assert new.ties() == lazy.ties()
    alone = lazy.untie(other)
    assert alone.ties() == [group for group in lazy.ties() if first not in group]
    assert alone[other] is not alone[one]
