"""Keys selected, flattened and renamed; filters over trees; batch size, names and dicts."""

import pytest
import torch
from torch import Size, nn

from tdfunc import Filter, Kind, MissingKeyError, NonTensorData, TensorDict, combine, in_dims, partition
from tests.helpers import TiedLM


@pytest.fixture
def td():
    """Two levels, an empty sub-tree and a string."""
    return TensorDict(
        {"b": torch.zeros(3), "a": {"y": torch.ones(3, 2), "x": torch.ones(3)}, "e": {}, "s": "word"}, [3]
    )


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda td: td.select("s", ("a", "x")), ["a", ("a", "x"), "s"]),
        (lambda td: td.select("a", ("a", "x")), ["a", ("a", "y"), ("a", "x")]),
        (lambda td: td.select("b", ("z", "z"), ("a", "z"), strict=False), ["b"]),
        (lambda td: td.exclude(("a", "x"), ("b", "q"), "zz"), ["b", "a", ("a", "y"), "e", "s"]),
    ],
    ids=["select", "select a tree and its leaf", "select what is not there", "exclude"],
)
def test_select_and_exclude(td, change, keys):
    """The named paths are kept or dropped, in the order of the tree."""
    assert list(change(td).keys(True)) == keys


FLAT = TensorDict({key: torch.zeros(2) for key in "abcd"}, [2])


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda td: td.select("d", "b", "b"), ["b", "d"]),
        (lambda td: td.select("d", "x", "a", strict=False), ["a", "d"]),
        (lambda td: td.exclude("c", "a", "x"), ["b", "d"]),
    ],
    ids=["select", "select what is not there", "exclude"],
)
def test_select_and_exclude_in_a_flat_tree(change, keys):
    """The named keys are kept or dropped, in the order of the tree."""
    assert list(change(FLAT).keys()) == keys


def test_selecting_all_is_the_tree_itself(td):
    """A tree that keeps all entries is returned as it is."""
    assert td.select(*td.keys()) is td
    assert FLAT.select("b", "a", "d", "c") is FLAT
    assert FLAT.exclude("x") is FLAT


def test_flat_keys(td):
    """Flat keys hold every entry and split again; a key with an empty part stays whole."""
    flat = td.flatten_keys("/")

    assert list(flat.keys()) == ["b", "a/y", "a/x", "s"]
    assert list(flat.unflatten_keys("/").keys(True, True)) == list(td.keys(True, True))
    assert list(TensorDict({"a..b": 1, ".c": 1, "d.": 1}).unflatten_keys().keys()) == ["a..b", ".c", "d."]


def test_flat_keys_beside_a_tree():
    """Split keys, and trees under them, go into a tree that is there."""
    new = TensorDict({"a": {"x": 1}, "a.y": 2, "a.n.z": 3, "a.n": {"e": {}}}).unflatten_keys(".")

    assert list(new.keys(True)) == ["a", ("a", "x"), ("a", "y"), ("a", "n"), ("a", "n", "e"), ("a", "n", "z")]


@pytest.mark.parametrize("inner", [2, {}, {"e": {}}, {"y": 2}], ids=str)
@pytest.mark.parametrize(
    "entries_of",
    [
        lambda inner: {"a": {"x": 1}, "a.x": inner},
        lambda inner: {"a.x": inner, "a": {"x": 1}},
        lambda inner: {"a": {"x": "red"}, "a.x": inner},
        lambda inner: {"a": 1, "a.x": inner},
        lambda inner: {"a.x": inner, "a": 1},
        lambda inner: {"a": {"x": 1}, "a.x.y": inner},
    ],
)
def test_flat_keys_that_clash(inner, entries_of):
    """A key that would be both a leaf and a tree, even one without leaves, is refused."""
    with pytest.raises(MissingKeyError, match="unflatten_keys: two keys become the entry 'a', or one"):
        TensorDict(entries_of(inner)).unflatten_keys(".")


def test_flat_keys_that_clash_below():
    """The path of the entry that two keys become is named."""
    with pytest.raises(MissingKeyError, match="unflatten_keys: two keys become the entry 'a.x', or one"):
        TensorDict({"a.x.y": 1, "a.x": 1}).unflatten_keys(".")


def test_rename(td):
    """A renamed entry keeps its place; the entry that had the new name goes."""
    assert list(td.rename_key("a", "z").keys()) == ["b", "z", "e", "s"]
    assert list(td.rename_key("b", "s").keys()) == ["s", "a", "e"]
    assert list(td.rename_key(("a", "x"), ("a", "z"))["a"].keys()) == ["y", "z"]
    assert td.rename_key("b", ("n", "m"))["n", "m"] is td["b"]
    assert td.rename_key("a", "a") is td


def test_rename_to_a_tied_leaf():
    """A leaf that is replaced by a renamed one leaves its tie."""
    tree = TensorDict.from_module(TiedLM())

    assert tree.rename_key(("norm", "weight"), ("out", "weight")).ties() == []


def test_rename_keeps_the_kind(td):
    """A renamed entry keeps its kind, at its place and in another tree."""
    td = td.set("b", 0.0, kind=Kind.BUFFER)

    assert td.rename_key("b", "c").kind("c") is Kind.BUFFER
    assert td.rename_key("b", ("n", "m")).kind(("n", "m")) is Kind.BUFFER


def test_batch_size_and_names():
    """Names follow the batch size, and nested trees keep a longer one."""
    wide = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}, "s": "x"}, [3], names=["t"])
    grown = wide.with_batch_size([3, 4])

    assert grown.batch_size == grown["n"].batch_size == grown._get("s").shape == Size([3, 4])
    assert grown.names == ["t", None]
    assert grown.with_batch_size([]).names == []
    assert grown.with_batch_size([])["n"].batch_size == Size([3, 4])
    assert [wide.with_names(names).names for names in (["q"], None)] == [["q"], [None]]
    assert wide.with_names([None])._names is None


def test_state_dict():
    """A tree's state dict is its module's, detached unless its variables are kept."""
    model = TiedLM()
    params = TensorDict.from_module(model)

    assert list(params.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(params.state_dict(), dict(model.state_dict()), rtol=0, atol=0)
    assert not params.state_dict()["emb.weight"].requires_grad
    assert params.state_dict(keep_vars=True)["emb.weight"] is model.emb.weight


def test_state_dict_with_a_prefix_or_target():
    """Keys begin with the prefix, and are written to the dict that is given."""
    model, target = TiedLM(), {"other": 1}
    params = TensorDict.from_module(model)

    assert list(params.state_dict(prefix="m."))[0] == "m.emb.weight"
    assert params.state_dict(target) is target
    assert list(target) == ["other", *model.state_dict()]


def test_state_dict_of_other_entries():
    """Buffers that are not saved, and values, are left out."""
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("hidden", torch.zeros(1), persistent=False)

    assert list(TensorDict.from_module(norm).state_dict()) == list(norm.state_dict())
    assert list(TensorDict({"s": NonTensorData(1), "a": torch.zeros(1)}).state_dict()) == ["a"]


def test_state_dict_in_levels():
    """With `flatten=False` a sub-tree is a dict, and a dotted key that would clash is kept apart."""
    params = TensorDict.from_module(TiedLM())

    assert params.state_dict(flatten=False)["norm"]["weight"].shape == Size([4])
    assert TensorDict({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}).state_dict(flatten=False)["a.b"] == 1


def test_partition_keeps_everything(td):
    """Non-tensor data and empty sub-trees go to the rest, and the sides combine again."""
    chosen, rest = partition(td, "a.*")

    assert list(chosen.keys(True)) == ["a", ("a", "y"), ("a", "x")]
    assert list(rest.keys()) == ["b", "e", "s"]
    assert td.partition(Filter("b"))[0].paths() == [("b",)]
    assert combine(chosen, rest).keys(True) == td.keys(True)
    assert combine(td) is td


def test_in_dims(td):
    """Each leaf is mapped over the dimension of its filter."""
    tree = td.exclude("s", "e")
    dims = in_dims(tree, {"a.*": None, "*": 0})

    assert dims["b"] == 0
    assert dims["a", "x"] is None
    assert dims.batch_size == td.batch_size
    assert in_dims(tree, 1)["a", "y"] == 1
    out = torch.vmap(lambda t: t["b"] + t["a", "x"].sum(), in_dims=(dims,))(tree)
    assert out.tolist() == [3, 3, 3]
