"""Reading keys and leaves, rearranging them, filters over trees, and metadata."""

import pytest
import torch
from torch import Size, nn

from tdfunc import (
    BatchSizeError,
    Filter,
    FilterError,
    Kind,
    MissingKeyError,
    NonTensorData,
    TensorDict,
    combine,
    in_dims,
    partition,
)
from tests.helpers import TiedLM


@pytest.fixture
def td():
    """Two levels, an empty sub-tree and a string."""
    return TensorDict(
        {"b": torch.zeros(3), "a": {"y": torch.ones(3, 2), "x": torch.ones(3)}, "e": {}, "s": "word"}, [3]
    )


def test_keys(td):
    """Keys would come in another order, or nested, empty or non-tensor ones be missing."""
    assert list(td.keys()) == ["b", "a", "e", "s"]
    assert list(td.keys(sort=True)) == ["a", "b", "e", "s"]
    assert list(td.keys(True)) == ["b", "a", ("a", "y"), ("a", "x"), "e", "s"]
    assert list(td.keys(True, True)) == ["b", ("a", "y"), ("a", "x"), "s"]
    assert list(td.keys(True, True, sort=True)) == [("a", "x"), ("a", "y"), "b", "s"]
    assert list(td.keys(leaves_only=True)) == ["b", "s"]
    assert td.paths() == [("b",), ("a", "y"), ("a", "x")]
    assert [leaf.shape for leaf in td.leaves()] == [Size([3]), Size([3, 2]), Size([3])]


def test_keys_are_a_set(td):
    """Keys of two trees could not be compared."""
    assert td.keys() == {"a", "b", "e", "s"}
    assert td.keys() & {"a", "z"} == {"a"}
    assert td.keys() - td.exclude("s").keys() == {"s"}
    assert len(td.keys(True, True)) == 4
    assert repr(td.keys()) == "keys(['b', 'a', 'e', 's'])"


def test_membership(td):
    """A nested key would be found or missed against the view that was asked."""
    assert "a" in td
    assert ("a", ("x",)) in td
    assert ("a", "z") not in td
    assert ("b", "z") not in td
    assert 0 not in td
    assert ("a", "x") in td.keys(include_nested=True)
    assert "a" not in td.keys(True, True)
    keys = td.keys()
    assert 0 not in keys
    with pytest.raises(TypeError, match=r"\('a', 'x'\) is a nested key(.|\n)*include_nested=True"):
        assert ("a", "x") in keys


def test_reading(td):
    """A value, default or pair would be another."""
    assert td.get("b") is td["b"] is td.values()[0]
    assert td.get("z") is None
    assert td.get(("b", "z"), 5) == 5
    assert td["a", ("x",)] is td["a"]["x"]
    assert dict(td.items(True, True))["s"] == "word"
    assert not td.is_empty()
    assert TensorDict({"a": {}}).is_empty()
    for read in (lambda: td["z"], lambda: td["a", "z"], lambda: td.kind("z")):
        with pytest.raises(MissingKeyError, match="no key 'z'"):
            read()
    with pytest.raises(MissingKeyError, match=r"no key 'z' under 'b'(.|\n)*no keys"):
        td["b", "z"]


def test_none_is_there():
    """An entry that a transformation made None would count as missing."""
    tree = in_dims(TensorDict({"a": torch.zeros(1)}), None)

    assert "a" in tree
    assert list(tree.keys()) == ["a"]


def test_select_and_exclude(td):
    """A path would be kept or dropped that was not named."""
    assert list(td.select("s", ("a", "x")).keys(True)) == ["a", ("a", "x"), "s"]
    assert list(td.select("a", ("a", "x")).keys(True)) == ["a", ("a", "y"), ("a", "x")]
    assert list(td.select("b", ("z", "z"), ("a", "z"), strict=False).keys(True)) == ["b"]
    assert list(td.exclude(("a", "x"), ("b", "q"), "zz").keys(True)) == ["b", "a", ("a", "y"), "e", "s"]
    assert td.select(*td.keys()) is td
    for path in ("z", ("a", "z"), ("b", "z")):
        with pytest.raises(MissingKeyError, match="no key 'z'"):
            td.select(path)


def test_flat_keys(td):
    """Flat keys would lose an entry, or two paths become one key."""
    flat = td.flatten_keys("/")

    assert list(flat.keys()) == ["b", "a/y", "a/x", "s"]
    assert list(flat.unflatten_keys("/").keys(True, True)) == list(td.keys(True, True))
    assert list(TensorDict({"a..b": 1, ".c": 1}).unflatten_keys().keys()) == ["a..b", ".c"]
    with pytest.raises(MissingKeyError, match=r"two paths become the key 'a.b'(.|\n)*\('a.b',\) and \('a', 'b'\)"):
        TensorDict({"a.b": 1, "a": {"b": 1}}).flatten_keys(".")


@pytest.mark.parametrize("keys", [["a", "a.b"], ["a.b", "a"], ["a.b.c", "a.b"]])
def test_flat_keys_that_clash(keys):
    """A key would become a leaf and a tree."""
    with pytest.raises(MissingKeyError, match=f"unflatten_keys: the key '{keys[1]}' cannot become(.|\n)*separator '.'"):
        TensorDict(dict.fromkeys(keys, 1)).unflatten_keys(".")


def test_flat_keys_beside_a_tree():
    """A tree that stands where split keys go would be overwritten, or refuse them."""
    new = TensorDict({"a": {"x": 1}, "a.y": 2, "a.n.z": 3}).unflatten_keys(".")

    assert set(new.keys(True, True)) == {("a", "x"), ("a", "y"), ("a", "n", "z")}
    for key in ("a.x", "a.x.y"):
        with pytest.raises(MissingKeyError, match="another key has taken"):
            TensorDict({"a": {"x": 1}, key: 2}).unflatten_keys(".")


@pytest.mark.parametrize("inner", [{}, {"e": {}}, {"y": 2}])
def test_a_tree_takes_the_place_of_no_leaf(inner):
    """A tree under a flat key, even one without leaves, would replace a leaf in silence."""
    for entries in ({"a": {"x": 1}, "a.x": inner}, {"a.x": inner, "a": {"x": 1}}, {"a": {"x": "red"}, "a.x": inner}):
        with pytest.raises(MissingKeyError, match=r"'x.*another key has taken"):
            TensorDict(entries).unflatten_keys(".")
    assert TensorDict({"a": {"x": {"z": 1}}, "a.x": inner}).unflatten_keys(".")["a", "x", "z"] == 1


def test_rename(td):
    """An entry would lose its place, its kind or what is in it; or overwrite another unasked."""
    assert list(td.rename_key("a", "z").keys()) == ["b", "z", "e", "s"]
    assert list(td.rename_key("b", "s").keys()) == ["s", "a", "e"]
    assert list(td.rename_key(("a", "x"), ("a", "z"))["a"].keys()) == ["y", "z"]
    assert td.rename_key("b", ("n", "m"))["n", "m"] is td["b"]
    assert td.rename_key("a", "a") is td
    assert td.set("b", 0.0, kind=Kind.BUFFER).rename_key("b", ("n", "m")).kind(("n", "m")) is Kind.BUFFER
    assert td.set("b", 0.0, kind=Kind.BUFFER).rename_key("b", "c").kind("c") is Kind.BUFFER
    with pytest.raises(MissingKeyError, match=r"rename_key: 'a' exists(.|\n)*'b'"):
        td.rename_key("b", "a", safe=True)
    with pytest.raises(MissingKeyError, match="no key 'z'"):
        td.rename_key("z", "a")


def test_batch_size_and_names(td):
    """A batch size would be taken that a leaf does not have, or names not follow it."""
    wide = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}, "s": "x"}, [3], names=["t"])
    grown = wide.with_batch_size([3, 4])

    assert grown.batch_size == grown["n"].batch_size == grown._get("s").shape == Size([3, 4])
    assert grown.names == ["t", None]
    assert grown.with_batch_size([]).names == []
    assert grown.with_batch_size([])["n"].batch_size == Size([3, 4])
    assert wide.with_names(["q"]).names == ["q"]
    assert wide.with_names(None).names == [None]
    with pytest.raises(BatchSizeError, match=r"'a.x'(.|\n)*\[3, 2\](.|\n)*\[3\]"):
        td.exclude("b").with_batch_size([3, 2])
    with pytest.raises(ValueError, match=r"1 names(.|\n)*\('a', 'b'\)"):
        wide.with_names(["a", "b"])


def test_dicts(td):
    """A dict would hold wrappers, or not be nested."""
    assert td.to_dict()["s"] == "word"
    assert td.to_dict()["a"]["x"] is td["a", "x"]
    assert TensorDict(td.to_dict(), [3]).keys(True) == td.keys(True)


def test_state_dict():
    """A tree's state dict would differ from its module's."""
    model = TiedLM()
    params = TensorDict.from_module(model)
    target = {"other": 1}

    assert list(params.state_dict()) == list(model.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(params.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert list(params.state_dict(prefix="m."))[0] == "m.emb.weight"
    assert params.state_dict(target) is target
    assert list(target)[0] == "other"
    assert params.state_dict(keep_vars=True)["emb.weight"] is model.emb.weight
    assert not params.state_dict()["emb.weight"].requires_grad
    assert params.state_dict(flatten=False)["norm"]["weight"].shape == Size([4])
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("hidden", torch.zeros(1), persistent=False)
    assert list(TensorDict.from_module(norm).state_dict()) == list(norm.state_dict())
    assert list(TensorDict({"s": NonTensorData(1), "a": torch.zeros(1)}).state_dict()) == ["a"]


def test_partition_keeps_everything(td):
    """Non-tensor data or an empty sub-tree would be on neither side."""
    chosen, rest = partition(td, "a.*")

    assert list(chosen.keys(True)) == ["a", ("a", "y"), ("a", "x")]
    assert list(rest.keys()) == ["b", "e", "s"]
    assert td.partition(Filter("b"))[0].paths() == [("b",)]
    assert combine(chosen, rest).keys(True) == td.keys(True)
    with pytest.raises(FilterError, match="matches no leaf"):
        partition(td, "nothing")


def test_combine_refuses_overlap(td):
    """One part would overwrite the other in silence."""
    with pytest.raises(ValueError, match="two parts have the leaf 'a.x'"):
        combine(td.select("a"), TensorDict({"a": {"x": torch.zeros(3)}}, [3]))
    assert combine(td) is td


def test_in_dims(td):
    """A leaf would be mapped over another dimension than its filter says."""
    tree = td.exclude("s", "e")
    dims = in_dims(tree, {"a.*": None, "*": 0})

    assert dims["b"] == 0
    assert dims["a", "x"] is None
    assert dims.batch_size == td.batch_size
    assert in_dims(tree, 1)["a", "y"] == 1
    out = torch.vmap(lambda t: t["b"] + t["a", "x"].sum(), in_dims=(dims,))(tree)
    assert out.tolist() == [3, 3, 3]
    with pytest.raises(FilterError, match=r"in_dims: no filter matches the leaf 'b'(.|\n)*\['a.\*'\]"):
        in_dims(tree, {"a.*": 0})


def test_state_dict_refuses_two_paths_of_one_name():
    """A leaf would be lost in silence."""
    td = TensorDict({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})

    with pytest.raises(MissingKeyError, match=r"two paths become the key 'a\.b'"):
        td.state_dict()
    assert td.state_dict(flatten=False)["a.b"] == 1


def test_combine_takes_trees():
    """A list would come back as it is."""
    with pytest.raises(TypeError, match=r"combine: the arguments must be trees(.|\n)*list"):
        combine([TensorDict({"a": torch.zeros(1)})])
    with pytest.raises(TypeError, match=r"the source must be a mapping(.|\n)*Tensor"):
        TensorDict(torch.ones(2))
