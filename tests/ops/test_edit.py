"""Edits and the values they take: `set`, `update`, `delete`, `pop`, writes into storage."""

import numpy as np
import pytest
import torch
from torch import Size, nn

import tdfunc as tdf
from tdfunc import (
    BatchSizeError,
    ImmutableError,
    Kind,
    LeafMismatchError,
    MissingKeyError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TieError,
    from_module,
)
from tests.helpers import assert_pure, assert_trees_equal


@pytest.fixture
def td():
    """Two leaves, one nested, in a batch of three."""
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (2, torch.int64, (3,)),
        (2.5, torch.float32, (3,)),
        (True, torch.bool, (3,)),
        (1j, torch.complex64, (3,)),
        (np.float32(1), torch.float32, (3,)),
        (np.zeros((3, 2)), torch.float64, (3, 2)),
        ([1, 2, 3], torch.int64, (3,)),
        ((1.0, 2.0, 3.0), torch.float32, (3,)),
        ([[1], [2], [3]], torch.int64, (3, 1)),
        ([torch.zeros(2)] * 3, torch.float32, (3, 2)),
        (torch.zeros(3, 4, dtype=torch.bfloat16), torch.bfloat16, (3, 4)),
        (torch.nn.Parameter(torch.zeros(3)), torch.float32, (3,)),
    ],
)
def test_values_that_become_tensors(td, value, dtype, shape):
    """A number, list or array would get another dtype or shape, in the constructor or in `set`."""
    for new in (td.set("new", value), TensorDict({"new": value}, [3]), td.update({"new": value})):
        assert new["new"].dtype is dtype
        assert new["new"].shape == Size(shape)


def test_values_that_stay_values(td):
    """A string, an object or a list of them would be taken for numbers, or for one value each."""
    thing = object()
    new = td.update(
        {"s": "x", "o": thing, "l": ["a", "b", "c"], "arr": np.array(["p", "q", "r"]), "w": NonTensorData(3)}
    )

    assert (new["s"], new["o"], new["w"]) == ("x", thing, 3)
    assert new["l"] == ["a", "b", "c"]
    assert isinstance(new._get("arr"), NonTensorStack)
    assert new[1]["arr"] == "q"


def test_values_that_become_trees(td):
    """A dict or a tree with a shorter batch would not grow to the batch of its parent."""
    inner = TensorDict({"x": torch.zeros(3, 2)}, [])
    new = td.set("d", {"x": torch.zeros(3)}).set("t", inner)

    assert new["d"].batch_size == new["t"].batch_size == Size([3])
    assert inner.batch_size == Size([])
    longer = TensorDict({"x": torch.zeros(3, 2)}, [3, 2])
    assert td.set("t", longer)["t"] is longer


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(4), BatchSizeError, r"'n.new': the leading(.|\n)*\[3\](.|\n)*\[4\]"),
        ({"deep": torch.zeros(4)}, BatchSizeError, r"'n.new.deep': the leading(.|\n)*\[3\](.|\n)*\[4\]"),
        (TensorDict({"deep": torch.zeros(2)}), BatchSizeError, r"'n.new.deep': the leading(.|\n)*\[3\](.|\n)*\[2\]"),
        ([1, 2], BatchSizeError, r"'n.new': the leading(.|\n)*\[3\](.|\n)*\[2\]"),
        (["a", "b"], BatchSizeError, r"'n.new': the leading(.|\n)*\[3\](.|\n)*\[2\]"),
        (NonTensorStack("a"), BatchSizeError, r"'n.new': the leading(.|\n)*\[3\](.|\n)*\[1\]"),
        (None, TypeError, r"'n.new': None cannot be a value"),
        ([TensorDict()], TypeError, r"'n.new': a list of trees(.|\n)*1 trees"),
    ],
)
def test_values_that_are_refused(td, value, error, message):
    """A value that does not fit would be kept, or the message not name its path and both sizes."""
    with pytest.raises(error, match=message):
        td.set(("n", "new"), value)
    with pytest.raises(error, match=message):
        td.update({"n": {"new": value}})
    with pytest.raises(error, match=message):
        TensorDict({"n": {"new": value}}, [3])


def test_set_is_pure_and_shares(td):
    """`set` would change the tree, copy what it does not change, or move an entry."""
    new = assert_pure(lambda t: t.set(("n", "b"), torch.ones(3)), td)

    assert (td["n", "b"] == 0).all()
    assert new["a"] is td["a"]
    assert list(new.keys(True, True)) == ["a", ("n", "b")]
    assert td.set("a", new["a"])["n"] is td["n"]


def test_set_below_a_leaf(td):
    """A leaf would silently become a tree."""
    for edit in (
        lambda: td.set(("a", "x"), 1),
        lambda: td.update({("a", "x"): 1}),
        lambda: td.rename_key("n", ("a", "x")),
    ):
        with pytest.raises(MissingKeyError, match="'a' is a leaf, 'a.x' cannot"):
            edit()


def test_nested_keys(td):
    """A nested key would be set as one, or an intermediate tree have another batch size."""
    new = td.set(("p", ("q", ("r",))), 1)

    assert new["p", "q", "r"].tolist() == [1, 1, 1]
    assert new["p", "q"].batch_size == Size([3])
    made = TensorDict({("p", "q"): torch.zeros(3), "p": {"r": torch.ones(3)}, ("p", "s", "t"): torch.ones(3)}, [3])
    assert set(made.keys(True, True)) == {("p", "q"), ("p", "r"), ("p", "s", "t")}
    for key in (("p", "q"), ("p", "q", "r")):
        with pytest.raises(MissingKeyError, match="'p.q' must be given once"):
            TensorDict({"p": {"q": 1}, key: 2})
    with pytest.raises(MissingKeyError, match="'p' must be given once"):
        TensorDict({("p", "q"): 1, "p": torch.zeros(())})


def test_device():
    """A value would stay on another device than the tree's."""
    td = TensorDict({"a": torch.zeros(3)}, [3], device="meta")

    assert td.set("b", torch.zeros(3))["b"].device.type == "meta"
    assert td.set(("n", "b"), 1.0)["n"].device.type == "meta"
    assert td.update(TensorDict({"c": torch.zeros(3)}, [3]))["c"].device.type == "meta"
    assert TensorDict({"d": TensorDict({"e": torch.zeros(3)})}, [3], device="meta")["d", "e"].device.type == "meta"


def test_update_merges(td):
    """`update` would replace a sub-tree that it should merge, or forget kinds."""
    other = TensorDict({"c": torch.ones(3)}, [3]).set("c", torch.ones(3), kind=Kind.BUFFER)
    new = assert_pure(lambda t: t.update({"n": other, ("n", "d"): 1}, e=2), td)

    assert set(new.keys(True, True)) == {"a", ("n", "b"), ("n", "c"), ("n", "d"), "e"}
    assert new.kind(("n", "c")) is Kind.BUFFER
    assert td.update() is td
    assert "e" not in td


def test_delete_and_pop(td):
    """An entry would stay, or one that is not there be no error."""
    assert list(td.delete("a").keys()) == ["n"]
    assert td.delete(("n", "b"))["n"].is_empty()
    value, rest = td.pop("a")
    assert value is td["a"]
    assert "a" not in rest
    assert td.pop("z", 7) == (7, td)
    for edit in (lambda: td.delete("z"), lambda: td.pop("z")):
        with pytest.raises(MissingKeyError, match="no key 'z'(.|\n)*'a', 'n'"):
            edit()


def test_kinds_follow_edits(td):
    """A replaced leaf would lose its kind, or a new one inherit it."""
    new = td.set("a", td["a"], kind=Kind.PARAMETER)

    assert new.set("a", 0.0).kind("a") is Kind.PARAMETER
    assert new.delete("a").set("a", 0.0).kind("a") is None
    assert new.set("a", {"x": 1}).kind("a") is None


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda t: t.__setitem__("a", 1), r"td = td.set\('a', value\)"),
        (lambda t: t.__setitem__(0, 1), r"td = td.at\[index\].set\(value\)"),
        (lambda t: t.__delitem__("a"), r"td = td.delete\('a'\)"),
        (lambda t: setattr(t, "batch_size", []), r"td = td.with_batch_size\(value\)"),
        (lambda t: setattr(t, "field", 1), r"td = td.set\('field', value\)"),
        (lambda t: delattr(t, "field"), r"td = td.delete\('field'\)"),
        (lambda t: t.update({}, inplace=True), r"td = td.update\(other\)"),
        (lambda t: t.select("a", inplace=True), r"td = td.select\(\*keys\)"),
        (lambda t: t.exclude("a", inplace=True), r"td = td.exclude\(\*keys\)"),
        (lambda t: t.flatten_keys(inplace=True), r"td = td.flatten_keys\(separator\)"),
        (lambda t: t.unflatten_keys(inplace=True), r"td = td.unflatten_keys\(separator\)"),
        (lambda t: t.apply(torch.neg, inplace=True), r"td = td.apply\(fn\)"),
        (lambda t: t.named_apply(torch.neg, inplace=True), r"td = td.named_apply\(fn\)"),
    ],
)
def test_writes_say_what_to_write(td, call, line):
    """An assignment would go through, or its error not be the line to write instead."""
    with pytest.raises(ImmutableError, match=line) as caught:
        call(td)
    assert isinstance(caught.value, TypeError | AttributeError)


# -- writes into storage ----------------------------------------------------------------------------------------


def test_writes_reach_the_storage(td):
    """A write would go to a copy, or return another tree."""
    a, b = td["a"], td["n", "b"]

    assert td.set_("a", torch.tensor([5, 6, 7])) is td
    assert a.tolist() == [5, 6, 7]
    assert td.set("a", 1.0, inplace=True) is td
    assert td.update_({"n": {"b": torch.ones(3, 2)}}) is td
    assert td.copy_(td.clone() * 2) is td
    assert a.tolist() == [2, 2, 2]
    assert (b == 2).all()
    assert td.set_("n", {"b": torch.zeros(3, 2)}) is td
    assert (b == 0).all()


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda t: t.set_("a", torch.zeros(2)), LeafMismatchError, r"'a'(.|\n)*\[3\](.|\n)*\[2\]"),
        (lambda t: t.set_("z", 1), MissingKeyError, "set_: no key 'z'"),
        (lambda t: t.set_(("a", "z"), 1), MissingKeyError, "set_: no key 'z' under 'a'"),
        (lambda t: t.set_("s", 1), LeafMismatchError, "'s': only tensors(.|\n)*NonTensorData"),
        (lambda t: t.set_("e", 1), LeafMismatchError, r"'e': the leaf is expanded(.|\n)*\[3, 2\]"),
        (lambda t: t.update_({"a": torch.ones(3), "z": 1}), MissingKeyError, r"nothing was written(.|\n)*'z'"),
        (lambda t: t.copy_({"a": torch.ones(3)}), MissingKeyError, r"nothing was written(.|\n)*\['a'\]"),
        (
            lambda t: t.update_({"n": {"b": torch.ones(3, 3)}, "a": torch.ones(3)}),
            LeafMismatchError,
            r"'n.b'(.|\n)*\[3, 2\](.|\n)*\[3, 3\]",
        ),
    ],
)  # fmt: skip
def test_writes_that_are_refused(td, write, error, message):
    """A write that does not fit would change a part of the tree first."""
    td = td.set("s", "x").set("e", torch.zeros(1, 2).expand(3, 2))
    with pytest.raises(error, match=message):
        write(td)
    assert td["a"].tolist() == [0, 1, 2]


def test_writes_to_parameters():
    """A write would be refused for a leaf that requires grad, or be recorded."""
    td = TensorDict({"w": torch.nn.Parameter(torch.zeros(2))})
    td.set_("w", torch.ones(2))

    assert td["w"].tolist() == [1, 1]
    assert td["w"].grad_fn is None


# -- at ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [0, -1, slice(0, 2), [0, 2], torch.tensor([2, 0]), torch.tensor([True, False, True]), Ellipsis, None, ()]
)
def test_rows(td, index):
    """Rows would be written to another place than torch writes them, or to the tree itself."""
    rows = td[index] + 10
    for new, fn in (
        (assert_pure(lambda t: t.at[index].set(rows), td), lambda x: x + 10),
        (assert_pure(lambda t: t.at[index].add(5), td), lambda x: x + 5),
        (assert_pure(lambda t: t.at[index].mul(3), td), lambda x: x * 3),
        (assert_pure(lambda t: t.at[index].apply(torch.neg), td), torch.neg),
        (assert_pure(lambda t: t.at[index].set(7), td), lambda x: torch.full_like(x, 7)),
    ):
        for path in td.paths():
            expected = td[path].clone()
            expected[index] = fn(expected[index])
            assert torch.equal(new[path], expected)
    assert_trees_equal(td.at[index].get(), td[index])


def test_rows_named_twice_add_up(td):
    """Adding to a row twice would add once, also next to a slice."""
    wide = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])

    assert td.at[[0, 0, 1]].add(1)["a"].tolist() == [2, 2, 2]
    assert wide.at[:, [0, 0]].add(1)["a"].tolist() == [[2, 0, 0]] * 2
    assert wide.at[:, [0, 0]].add(torch.tensor([1, 2]))["a"].tolist() == [[3, 0, 0]] * 2


def test_paths(td):
    """A path would not be changed by `at`."""
    assert td.at["a"].set(1)["a"].tolist() == [1, 1, 1]
    assert td.at["n", "b"].add(1)["n", "b"].sum() == 6
    assert td.at["a"].mul(2)["a"].tolist() == [0, 2, 4]
    assert td.at["n"].apply(lambda t: t + 1)["n", "b"].sum() == 6
    assert td.at["a"].get() is td["a"]
    assert td.at["a"].set_(torch.ones(3)) is td


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.at[0].set(TensorDict({"a": 1.0})), MissingKeyError, r"\['a', 'n.b'\](.|\n)*\['a'\]"),
        (lambda t: t.at[0].set(t[0].set("z", 1)), MissingKeyError, r"\['a', 'n.b', 'z'\]"),
        (lambda t: t.at[0].set(t[:1]), BatchSizeError, r"at\[...\].set(.|\n)*\[\](.|\n)*\[1\]"),
        (lambda t: t.at[0].set(t[0].set("a", torch.zeros(2))), LeafMismatchError, r"'a'(.|\n)*\[\](.|\n)*\[2\]"),
        (lambda t: t.at[0].set(t[0].to(torch.complex64)), LeafMismatchError, r"'a'(.|\n)*float32(.|\n)*complex64"),
        (lambda t: t.to(torch.int64).at[0].set(1.5), LeafMismatchError, r"'a'(.|\n)*int64(.|\n)*float32"),
        (lambda t: t.to(torch.uint8).at[0].set(300.5), LeafMismatchError, "uint8"),
        (lambda t: t.at[[0, 0]].mul(2), ValueError, r"at\[...\].mul: the index names a row twice(.|\n)*\[0, 0\]"),
        (lambda t: t.at[[1, 1]].apply(torch.neg), ValueError, r"at\[...\].apply: the index names"),
        (lambda t: t.at[0].set("x"), TypeError, r"at\[...\].set: not rows(.|\n)*str"),
        (lambda t: t.at[:2].set(torch.zeros(3)), BatchSizeError, r"broadcasts to \[2\](.|\n)*\[3\]"),
        (lambda t: t.at[3].set(1), IndexError, "3 is out of range"),
    ],
)
def test_rows_that_are_refused(td, change, error, message):
    """Rows that do not fit would be broadcast, cast or dropped in silence."""
    with pytest.raises(error, match=message):
        change(td)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
def test_numbers_that_keep_their_value(dtype):
    """Zeroing rows of a tree of mixed dtypes would be refused."""
    td = TensorDict({"a": torch.ones(3).to(dtype)}, [3])

    assert td.at[0].set(0)["a"].tolist() == [0, 1, 1]
    assert td.at[0].set(0)["a"].dtype is dtype


def test_rows_in_transformations(td):
    """Rows could not be written under vmap or grad."""

    def loss(x):
        return td.at[1].set(td[0].apply(lambda v: v * 0 + x))["a"].sum()

    assert torch.func.grad(loss)(torch.tensor(2.0)) == 1
    stacked = torch.stack([td, td + 1])
    rows = torch.vmap(lambda t: t.at[0].set(t[2]))(stacked)
    assert rows["a"][:, 0].tolist() == [2, 3]


def test_rows_in_place():
    """A preallocated tree would be copied for each row, or a late key be zero in earlier rows."""
    td = TensorDict({}, [4])
    td = td.at[1].set_({"a": torch.ones(2), "n": {"b": 5}, "s": "x"})
    leaf = td["a"]

    assert td.at[2].set_({"a": torch.full((2,), 3.0), "n": {"b": 6}, "s": "x"}) is td
    assert leaf.tolist() == [[0, 0], [1, 1], [3, 3], [0, 0]]
    assert td["n", "b"].tolist() == [0, 5, 6, 0]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"a": torch.zeros(2)}, MissingKeyError, r"nothing was written(.|\n)*\['a', 'n.b'\](.|\n)*\['a'\]"),
        ({"a": torch.zeros(2), "n": {"b": 1}, "z": 1}, MissingKeyError, r"'z'(.|\n)*new_zeros"),
        (
            {"a": torch.zeros(3), "n": {"b": 1}},
            LeafMismatchError,
            r"'a': the values do not fit(.|\n)*\[2\](.|\n)*\[3\]",
        ),
        (
            {"a": torch.zeros(2), "n": {"b": 1}, "s": "y"},
            LeafMismatchError,
            r"'s' is no tensor(.|\n)*data=x(.|\n)*data=y",
        ),
    ],
)
def test_rows_in_place_that_are_refused(row, error, message):
    """A row that does not fit would be written in part."""
    td = TensorDict({}, [4]).at[0].set_({"a": torch.ones(2), "n": {"b": 5}, "s": "x"})
    with pytest.raises(error, match=message):
        td.at[1].set_({"s": "x"} | row)
    assert td["a"][1].tolist() == [0, 0]


def test_rows_in_place_of_another_batch():
    """Rows of another batch size would be broadcast, and an expanded leaf be written as a whole."""
    with pytest.raises(BatchSizeError, match=r"set_: the rows(.|\n)*\[\](.|\n)*\[2\]"):
        TensorDict({"a": torch.zeros(3)}, [3]).at[0].set_(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(LeafMismatchError, match="'a': the leaf is expanded"):
        TensorDict({"a": 0.0}, [3]).at[0].set_({"a": 1.0})


def test_at_fills_one_place_with_one_value():
    """A row's string would be put in as an array, or a number would change the shape of a leaf."""
    td = TensorDict({"s": ["p", "q", "r"], "x": torch.ones(3, 2)}, [3])

    assert td.at[0].set(td[1])["s"] == ["q", "q", "r"]
    assert td.at[-1].set(td[0])["s"] == ["p", "q", "p"]
    assert torch.equal(td.at["x"].set(0)["x"], torch.zeros(3, 2))


def test_augmented_assignment_says_what_it_did():
    """A leaf that `+=` has changed would be reported as unchanged."""
    td = TensorDict({"a": torch.zeros(3)}, [3])

    with pytest.raises(ImmutableError, match=r"td = td\.at\['a'\]\.add\(value\).*already written"):
        td["a"] += 1
    td = td.set("b", torch.ones(3))
    with pytest.raises(ImmutableError) as caught:
        td["a"] = td["b"]
    assert "already written" not in str(caught.value)


def test_writes_alter_no_value():
    """A number would wrap around, or lose its fraction, in silence."""
    td = TensorDict({"a": torch.zeros(2, dtype=torch.uint8)}, [2])

    with pytest.raises(LeafMismatchError, match=r"'a' do not fit(.|\n)*uint8(.|\n)*int64"):
        td.at[0].set(300)
    with pytest.raises(LeafMismatchError, match=r"uint8 can hold(.|\n)*float32"):
        td.set_("a", torch.tensor([1.5, 300.0]))
    with pytest.raises(LeafMismatchError, match=r"uint8 can hold(.|\n)*int64"):
        td.update_({"a": torch.tensor([1, 2])})
    with pytest.raises(LeafMismatchError, match=r"uint8 can hold(.|\n)*float32"):
        td.at[0].set_({"a": torch.tensor(1.5)})
    with pytest.raises(LeafMismatchError, match=r"uint8 can hold(.|\n)*int64"):
        td.set_("a", 300)
    assert td["a"].tolist() == [0, 0]
    assert td.clone().set_("a", 7)["a"].tolist() == [7, 7]
    assert td.at[0].set(255)["a"].tolist() == [255, 0]


def test_tied_paths_take_one_value():
    """The last of two values would win in silence."""
    layer = nn.Linear(2, 2, bias=False)
    both = nn.ModuleDict({"a": layer})
    both.b = layer
    td = from_module(both).detach().clone()

    with pytest.raises(TieError, match=r"'a.weight' and 'b.weight' are given different values; nothing was written"):
        td.update_({"a": {"weight": torch.zeros(2, 2)}, "b": {"weight": torch.ones(2, 2)}})


@pytest.mark.parametrize("of", [lambda tree: tree, lambda tree: tdf.lazy_stack([tree])])
def test_a_block_has_nothing_to_write_back(of):
    """Edits in a block that tensordict writes back at its end would be lost in silence."""
    tree = of(TensorDict({"a": torch.zeros(2)}))
    message = r"with: a tree is never written to.*\n.*with a .*\n.*td = flat.unflatten_keys"

    with pytest.raises(ImmutableError, match=message), tree.flatten_keys("."):
        pass


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (torch.ones(2, dtype=torch.bool), r"td\[index\] = value"),
        ((0, torch.tensor([0])), r"td\[0, index\] = value"),
        (slice(1, 2), r"td\[slice\(1, 2, None\)\] = value"),
    ],
)
def test_an_assignment_to_rows_does_not_print_them(index, shown):
    """A mask of a million rows would be the error's text."""
    with pytest.raises(ImmutableError, match=shown + r"(.|\n)*td = td\.at\[index\]\.set\(value\)"):
        TensorDict({"a": torch.ones(2, 2)}, [2, 2])[index] = 1


@pytest.mark.parametrize("name", ["lock", "non_blocking", "auto_batch_size"])
def test_options_of_tensordict_are_no_entries(name):
    """`TensorDict(d, lock=True)` raises instead of making an entry."""
    with pytest.raises(TypeError, match=rf"TensorDict: '{name}' is no option(.|\n)*{name}=True(.|\n)*'{name}': value"):
        TensorDict({"a": torch.ones(2)}, [2], **{name: True})
    with pytest.raises(TypeError, match=f"'{name}' is no option"):
        TensorDict(TensorDict({"a": 1}), **{name: False})

    assert TensorDict(**{name: True})[name]
    assert TensorDict({name: True, "a": 1})[name]


@pytest.mark.parametrize("make", [list, iter, lambda pairs: dict(pairs).items()], ids=["list", "iterator", "items"])
def test_update_takes_pairs(make):
    """Pairs, which `dict.update` takes, would end in words about attributes, or run out after one tree of a stack."""
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    pairs = [(("n", "b"), torch.ones(2)), ("c", 3.0), ("a", torch.ones(2))]

    assert_trees_equal(td.update(make(pairs)), td.update(dict(pairs)))
    assert_trees_equal(td.replace(make(pairs)), td.replace(dict(pairs)))
    rows = tdf.lazy_stack([td[0], td[1]])
    assert_trees_equal(rows.update(make(pairs)).to_tensordict(), rows.update(dict(pairs)).to_tensordict())
    assert_trees_equal(td.update(iter(())), td)


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("call", ["add", "mul", "set"])
def test_at_takes_masks_of_bytes(call, mask):
    """A mask of uint8, which reading takes, would be positions, or end in torch's words about masks."""
    td = TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, [3])
    mask = torch.tensor(mask, dtype=torch.uint8)

    assert_trees_equal(getattr(td.at[mask], call)(5), getattr(td.at[mask.bool()], call)(5))


@pytest.mark.parametrize(
    "name", ["clone", "keys_to_update", "non_blocking", "is_leaf", "ignore_lock", "update_batch_size"]
)
def test_options_of_another_update_are_no_entries(name):
    """`td.update(other, clone=True)`, as tensordict has it, would add a key called "clone" in silence."""
    td = TensorDict({"a": torch.zeros(2)})

    with pytest.raises(TypeError, match=rf"update: '{name}' is no option(.|\n)*{name}=True(.|\n)*'{name}': value"):
        td.update({"b": torch.ones(2)}, **{name: True})
    assert list(td.update({"b": 1.0, name: 2.0}).keys()) == ["a", "b", name]
    assert list(td.update(**{name: 2.0}).keys()) == ["a", name]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e5m2])
def test_rows_of_types_that_torch_puts_nowhere_by_index(dtype):
    """Trees with such leaves could be written in place only."""
    leaf, row = torch.tensor([[1, 2], [4, 8], [16, 32]]).to(dtype), torch.tensor([64, 128]).to(dtype)
    tree = TensorDict({"x": leaf}, [3])

    by_row = tree.at[1].set(TensorDict({"x": row}, []))["x"]
    by_mask = tree.at[torch.tensor([True, False, True])].apply(lambda x: x.flip(0))["x"]

    assert by_row.dtype is dtype
    assert by_row.float().tolist() == [[1, 2], [64, 128], [16, 32]]
    assert by_mask.float().tolist() == [[16, 32], [4, 8], [1, 2]]
    assert leaf.float().tolist() == [[1, 2], [4, 8], [16, 32]]


@pytest.mark.parametrize(
    "array", [np.arange(6)[::-2], np.arange(3, dtype=">i4"), np.arange(6.0).reshape(3, 2).astype(">f8")[:, ::-1]]
)
def test_arrays_of_another_layout_are_copied(array):
    """A reversed array, or one read from a file of another machine, would raise without naming its key."""
    leaf = TensorDict({"x": array}, [3])["x"]

    assert leaf.tolist() == array.tolist()
    assert leaf.dtype is getattr(torch, array.dtype.name)


def test_arrays_that_torch_has_no_dtype_for_are_named():
    """The error would not say which of many entries is meant, nor how to keep it."""
    times = np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]")
    with pytest.raises(LeafMismatchError, match=r"'a.t'[\s\S]*datetime64[\s\S]*NonTensorData\(value\)"):
        TensorDict({"a": {"t": times}}, [2])

    assert TensorDict({"t": NonTensorData(times)}, [2])["t"] is times
