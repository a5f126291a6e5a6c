"""Keys that only some trees of a lazy stack have: what makes one value of each key would lose them."""

import pytest
import torch

import tdfunc
from tdfunc import LazyStack, TensorDict, TreeStructureError, lazy_stack


def some_keys(first=1, second=2):
    """A stack of which each tree has a key that the other has not."""
    return lazy_stack([TensorDict({"a": torch.ones(1), "z": first}), TensorDict({"a": torch.ones(2), "y": second})])


def places():
    """Trees with such keys, by the path of the first that is named."""
    lazy = some_keys()
    return [
        ("y", "1", lazy),
        ("n.y", "1", TensorDict({"n": lazy, "b": 1})),
        ("m.y", "1", lazy_stack([TensorDict({"m": tree}) for tree in lazy.trees])),
        ("y", "0, 1", lazy_stack([lazy, lazy], 1)),
    ]


@pytest.mark.parametrize("call", ["to_dict", "state_dict", "numpy", "to_namedtuple"])
@pytest.mark.parametrize(("path", "trees", "tree"), places())
def test_conversions_lose_no_key(call, path, trees, tree):
    """A checkpoint would lack values, which nobody would notice before they are missed."""
    what = rf"{call}: the key '{path}' is not in all trees of .*\n.*all have\n.*in trees \[{trees}\]\n.*select"
    with pytest.raises(TreeStructureError, match=what):
        getattr(tree, call)()


def test_shared_keys_are_converted():
    """What all trees have, and what each tree has, would be refused, too."""
    lazy = some_keys()

    assert [x.tolist() for x in lazy.select("a").to_dict()["a"]] == [[1.0], [1.0, 1.0]]
    assert lazy.select("a").state_dict().keys() == lazy.select("a").numpy().keys() == {"a"}
    assert [tree.to_dict().keys() for tree in lazy.trees] == [{"a", "z"}, {"a", "y"}]
    assert lazy.tolist()[1].keys() == {"a", "y"}


@pytest.mark.parametrize(("path", "trees", "tree"), places())
def test_strict_loads_see_them(path, trees, tree):
    """A value would stay as it was, though the load was said to be strict."""
    shared = {"b": torch.tensor(1)} if "b" in tree else {}
    what = rf"load_state_dict: the key '{path}' is not in all.*\n.*all have\n.*\[{trees}\]"
    with pytest.raises(TreeStructureError, match=what):
        tree.load_state_dict(shared)
    with pytest.raises(TreeStructureError, match=what):
        TensorDict(shared).load_state_dict(tree)

    loaded = tree.load_state_dict(shared, strict=False)
    assert type(loaded) is type(tree)
    assert len(loaded.leaves()) == len(tree.leaves())


def test_emptiness():
    """A stack with leaves would be called empty because its trees share none."""
    apart = lazy_stack([TensorDict({"z": 1}), TensorDict({"y": "text"})])

    assert not apart.is_empty()
    assert not TensorDict({"n": {"l": apart}}).is_empty()
    assert lazy_stack([TensorDict({"n": {}}), TensorDict({})]).is_empty()
    assert TensorDict({"n": {}}).is_empty()


def test_replacements_lose_no_key():
    """Entries that were given would not be taken."""
    lazy = some_keys()
    with pytest.raises(TreeStructureError, match=r"replace: the key 'y' is not in all.*\n.*all have\n.*\[1\]"):
        lazy.replace(some_keys(5, 6))

    assert TensorDict({"n": lazy}).replace(TensorDict({"n": some_keys(5, 6)}))["n"].trees[1]["y"] == 6
    assert lazy.update(some_keys(5, 6)).trees[0]["z"] == 5


@pytest.mark.parametrize("inside", [False, True])
def test_comparisons_see_them(inside):
    """Trees would be taken for equal of which one lacks a leaf, or has it in another tree."""

    def tree(*rows):
        made = lazy_stack([TensorDict(row) for row in rows])
        return TensorDict({"n": made}) if inside else made

    lazy = tree({"a": 1, "z": 1}, {"a": 1})
    for other in (tree({"a": 1}, {"a": 1}), tree({"a": 1}, {"a": 1, "z": 1}), tree({"a": 1, "y": 1}, {"a": 1})):
        for first, second in ((lazy, other), (other, lazy)):
            assert not torch.equal(first, second)
            with pytest.raises(TreeStructureError, match=r"assert_close: the trees have different keys"):
                tdfunc.assert_close(first, second)
            with pytest.raises(TreeStructureError, match="different keys"):
                torch.allclose(first, second)
    assert torch.equal(lazy, tree({"a": 1, "z": 1}, {"a": 1}))
    tdfunc.assert_close(lazy, tree({"a": 1, "z": 1}, {"a": 1}))


def test_parts_with_one_leaf_twice():
    """One of two leaves of `combine` would be lost; and parts that have none in common be refused."""
    lazy = some_keys()
    part = lazy_stack([TensorDict({"z": 3}), TensorDict({})])
    with pytest.raises(ValueError, match=r"combine: two parts have the leaf '0.z'"):
        tdfunc.combine(lazy, part)

    chosen, rest = tdfunc.partition(lazy, "*.z")
    whole = tdfunc.combine(rest, chosen)
    assert isinstance(whole, LazyStack)
    assert [sorted(tree.keys()) for tree in whole.trees] == [["a", "z"], ["a", "y"]]
