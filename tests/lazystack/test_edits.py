"""Edits of lazy stacks: values are cut for each tree."""

import numpy as np
import pytest
import torch
from torch import Size

import tdfunc
from tdfunc import TensorDict
from tdfunc._lazystack import lazy_stack
from tdfunc.core.errors import BatchSizeError, ImmutableError, LeafMismatchError, MissingKeyError, TreeStructureError
from tests.helpers import assert_pure, assert_trees_equal
from tests.lazystack.trees import (
    assert_alike,
    assert_stacks_equal,
    ragged,
    settle,
    tensors_only,
    tree,
    uniform,
)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_set_cuts_values_along_the_stack(dim):
    """A dense value would be put into other rows than in the dense tree."""
    lazy, dense = lazy_stack(uniform(), dim), torch.stack(uniform(), dim)
    value = torch.randn(*dense.batch_size, 5)
    new = assert_pure(lambda t: t.set("z", value).set(("n", "w"), value).set("c", 2.5).set("t", "word"), lazy)

    expected = dense.set("z", value).set(("n", "w"), value).set("c", 2.5)
    assert_trees_equal(new.exclude("t", "s").dense(), expected.exclude("s"))
    assert new["t"] == ["word"] * 3
    assert sorted(lazy.keys()) == ["n", "s", "x"]


@pytest.mark.parametrize("wrap", [tuple, list])
def test_set_takes_a_value_for_each_tree(wrap):
    """Values of unequal lengths could not be put into a lazy stack."""
    lazy = lazy_stack(ragged())
    new = lazy.set("z", wrap([torch.zeros(n) for n in (2, 4, 3)])).set(("n", "k"), wrap([1.0, 2.0, 3.0]))

    assert [len(z) for z in new["z"]] == [2, 4, 3]
    assert [k[0].item() for k in new["n", "k"]] == [1, 2, 3]
    assert lazy.set("w", lazy["x"])["w"] == lazy["x"]
    assert lazy.set("w", lazy["n"])["w", "y"] == lazy["n", "y"]
    assert lazy.set("words", lazy["s"])["words"] == lazy["s"]


def test_set_of_arrays_and_nested_tensors():
    """A numpy array would not be cut, or a nested tensor be refused."""
    lazy = lazy_stack(ragged())
    nested = torch.nested.nested_tensor(list(lazy["x"]), layout=torch.jagged)
    rows = lazy.with_batch_size([3]).set("a", np.arange(6.0).reshape(3, 2))["a"]

    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert all(torch.equal(a, b) for a, b in zip(lazy.set("w", nested)["w"], lazy["x"], strict=True))


def test_update_delete_select_pop():
    """An edit would miss a tree, or a nested entry."""
    lazy = lazy_stack(ragged())
    new = lazy.update({"n": {"k": 1.0}, ("n", "j"): 2.0}, w=(torch.zeros(2), torch.zeros(4), torch.zeros(3)))
    value, rest = new.pop("w")

    assert set(new.keys(True, True)) == {"x", "s", ("n", "y"), ("n", "k"), ("n", "j"), "w"}
    assert [len(w) for w in value] == [2, 4, 3]
    assert "w" not in rest
    assert list(new.delete(("n", "y"))["n"].keys()) == ["k", "j"]
    assert list(new.select(("n", "k")).keys(True, True)) == [("n", "k")]
    assert list(new.exclude("n", "s", "w", "nope").keys()) == ["x"]
    assert_stacks_equal(lazy.update(lazy * 0 + 1), lazy * 0 + 1)
    assert_stacks_equal(lazy.setdefault("x", 0), lazy)


@pytest.mark.parametrize("edit", [lambda t, o: t.set("n", o), lambda t, o: t.update(o), lambda t, o: t.replace(o)])
def test_trees_of_fewer_batch_dimensions_grow(edit):
    """A tree whose leaves have the batch, but whose batch size is shorter, would fit a dense tree only."""
    lazy = lazy_stack([TensorDict({"x": torch.zeros(3)}, [3]), TensorDict({"x": torch.ones(3)}, [3])], 1)
    other = TensorDict({"x": torch.arange(6.0).reshape(3, 2), "e": {}}, [3])

    assert_trees_equal(edit(lazy, other).dense(), edit(lazy.dense(), other))
    assert_trees_equal(edit(lazy, TensorDict()).dense(), edit(lazy.dense(), TensorDict()))


def test_renaming_and_flattening():
    """Keys would be changed in some trees only, or not at all."""
    lazy = lazy_stack(ragged())

    assert list(lazy.rename_key("x", "z").keys()) == ["z", "n", "s"]
    assert list(lazy.rename_key(("n", "y"), "y").keys()) == ["x", "n", "s", "y"]
    assert list(lazy.flatten_keys().keys()) == ["x", "n.y", "s"]
    assert_stacks_equal(lazy.flatten_keys().unflatten_keys(), lazy)
    assert lazy.to_dict()["n"]["y"] == lazy["n", "y"]


def test_partition_keeps_the_number_of_trees():
    """A part in which a tree keeps nothing would have fewer trees, and a smaller batch."""
    lazy = lazy_stack([tree(2).set("b", torch.ones(2)), tree(3)])
    left, right = tdfunc.partition(lazy, "*.b")

    assert [list(t.keys()) for t in left.trees] == [["b"], []]
    assert left.batch_size == right.batch_size == lazy.batch_size
    assert_stacks_equal(tdfunc.combine(right, left).select("x", "n", "s"), lazy.exclude("b"))
    assert tdfunc.combine(right, left).trees[0]["b"].tolist() == [1, 1]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "index",
    [0, slice(1, 3), (slice(None), 0), [0, 1], (0, 1), (slice(None), slice(0, 1)), (slice(0, 2), [1, 0])],
    ids=repr,
)
def test_at_is_that_of_the_dense_tree(dim, index):
    """A write at an index would change other rows than in the dense tree."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    rows = dense[index] * 0 + 5

    assert_trees_equal(lazy.at[index].set(rows).dense(), dense.at[index].set(rows))
    assert_trees_equal(lazy.at[index].set(7).dense(), dense.at[index].set(7))
    assert_trees_equal(lazy.at[index].add(rows).dense(), dense.at[index].add(rows))
    assert_trees_equal(lazy.at[index].mul(3).dense(), dense.at[index].mul(3))
    assert_trees_equal(lazy.at[index].apply(lambda x: x + 1).dense(), dense.at[index].apply(lambda x: x + 1))
    assert_trees_equal(lazy.at[index].set(settle(lazy[index]) * 2).dense(), dense.at[index].set(dense[index] * 2))


def test_empty_stacks_are_dropped():
    """A lazy stack without a leaf would stay where an empty tree goes, or one with a leaf in some trees would go."""
    empty = TensorDict({"deep": {}}, [2])
    bare, some = lazy_stack([empty, empty]), lazy_stack([empty.set("x", 1.0), empty])
    tree = TensorDict({"a": 1.0, "bare": bare, "twice": lazy_stack([bare, bare], 1), "some": some}, [2])

    for kept in (tree.split_keys(["a"])[1], tree.delete("a").apply(lambda x: x, filter_empty=True)):
        assert list(kept.keys()) == ["some"]
        assert [list(t.keys()) for t in kept["some"].trees] == [["x"], []]
    assert [len(part.trees) for part in bare.split_keys()] == [2]


def test_at_broadcasts_tensors():
    """A tensor over the rows would be cut along another dimension."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, 1), torch.stack(trees, 1)
    value = torch.tensor([3, 4])

    assert_trees_equal(lazy.at[1:3].set(value).dense(), dense.at[1:3].set(value))
    assert_trees_equal(lazy.at[:, [0, 2]].set(value).dense(), dense.at[:, [0, 2]].set(value))


def test_at_of_ragged_trees():
    """A row of a ragged stack could not be written, or a tree not be replaced by one of another length."""
    lazy = lazy_stack(tensors_only(ragged()))
    longer = lazy[1]

    assert lazy.at[0].set(longer).batch_size == Size([3, -1])
    assert lazy.at[0].set(longer)[0] is longer
    assert lazy.at[:, 0].set(0)["x"][2][0].tolist() == [0, 0]
    assert lazy.at[1, 1:].add(1)["n", "y"][1].tolist() == (longer["n", "y"] + torch.tensor([0, 1, 1, 1])).tolist()
    assert lazy.at["x"].get() == lazy["x"]
    assert lazy.at[0].set({"x": torch.zeros(2, 2), "n": {"y": torch.zeros(2, dtype=torch.int64)}})["x"][0].sum() == 0


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (
            lambda t: t.set("z", torch.zeros(4, 2)),
            BatchSizeError,
            r"dimension along which.*\n.*3 at dimension 0\n.*shape \[4, 2\]",
        ),
        (lambda t: t.set("z", torch.zeros(())), BatchSizeError, r"3 at dimension 0\n.*shape \[\]"),
        (lambda t: t.set("z", TensorDict({}, [4])), BatchSizeError, r"3 at dimension 0\n.*batch size \[4\]"),
        (lambda t: t.update(TensorDict({"z": torch.zeros(2)})), BatchSizeError, r"'z': the lead.*\n.*\[3\].*\n.*\[2\]"),
        (lambda t: t.set("z", (1.0, 2.0)), BatchSizeError, "one for each tree.*\n.*3 values\n.*2"),
        (lambda t: t.set("z", torch.zeros(3, 2)), BatchSizeError, r"'z': the leading dim.*\n.*\[4\].*\n.*\[2\]"),
        (lambda t: t.set("z", None), TypeError, "'z': None cannot be a value"),
        (lambda t: t.set(("x", "z"), 1), MissingKeyError, "'x' is a leaf"),
        (lambda t: t.delete("nope"), MissingKeyError, "no key 'nope'"),
        (lambda t: t.select("nope"), MissingKeyError, "no key 'nope'"),
        (lambda t: t.rename_key("nope", "x"), MissingKeyError, "no key 'nope'"),
        (lambda t: t.rename_key("x", "s", safe=True), MissingKeyError, "'s' exists.*\n.*'x'"),
        (lambda t: t.at[0].set(t[0].exclude("x")), MissingKeyError, r"other keys.*\n.*'x'.*\n"),
        (lambda t: t.at[0].set(t[1].exclude("x")), TreeStructureError, r"different keys.*\n.*'x'\]\n.*\['n', 's'\]"),
        (
            lambda t: t.at[0].set(t[1].set("x", torch.zeros(4, 2).double())),
            LeafMismatchError,
            "'x' do not fit.*\n.*float32\n.*float64",
        ),
        (lambda t: t.at[0].set(TensorDict({}, [2, 2])), BatchSizeError, r"numbers of batch dim.*\n.*\[2\]\n.*\[2, 2\]"),
        (
            lambda t: t.at[:2].set(t.exclude("s")),
            BatchSizeError,
            r"another batch size.*\n.*2 at dimension 0\n.*\[3, -1\]",
        ),
        (lambda t: t.at[:2].set(torch.zeros(5, 1)), BatchSizeError, r"another shape.*\n.*2 at dimension 0\n.*\[5, 1\]"),
        (lambda t: t.at[9].set(0), IndexError, "9 is out of range"),
        (lambda t: t.at[[0, 0]].mul(2), ValueError, "names a row twice"),
        (lambda t: t.at[:, [0]].mul(2), BatchSizeError, r"dimension 1 is ragged.*\n.*one size\n.*\[3, -1\]"),
        (lambda t: t.with_batch_size([2]), BatchSizeError, r"trees must stay.*\n.*3 at dimension 0\n.*\[2\]"),
        (
            lambda t: t._replace({"a": 1}),
            TreeStructureError,
            r"entries are in its trees.*\n.*'0', '1', '2'\]\n.*\['a'\]",
        ),
        (lambda t: t.set_("s", 0), LeafMismatchError, "only tensors have storage"),
    ],
)
def test_bad_edit(edit, error, text):
    """An edit that does not fit every tree would be done to some, or in part."""
    with pytest.raises(error, match=text):
        edit(lazy_stack(ragged()))


def test_errors_name_the_tree():
    """An error in one tree of many would not say in which."""
    with pytest.raises(BatchSizeError) as caught:
        lazy_stack(ragged()).set("z", (torch.zeros(2), torch.zeros(4), torch.zeros(5)))

    assert "In tree 2 of the lazy stack." in caught.value.__notes__


def test_immutable():
    """An assignment would change a lazy stack that others hold."""
    lazy = lazy_stack(ragged())

    with pytest.raises(ImmutableError, match=r"td = td.set\('x', value\)"):
        lazy["x"] = 1
    with pytest.raises(ImmutableError, match=r"td = td.delete\('x'\)"):
        del lazy["x"]


@pytest.fixture
def around():
    """A tree with a ragged entry beside a dense one."""
    return TensorDict({"lazy": lazy_stack(tensors_only(ragged())), "w": torch.arange(3.0)}, [3])


@pytest.mark.parametrize(
    "index", [1, slice(1, 3), [2, 0], [True, False, True], None, (None, 1), (slice(None), None)], ids=repr
)
def test_child_follows_an_index(around, index):
    """A lazy stack inside a tree would not be indexed with it."""
    result = around[index]["lazy"]
    expected = around["lazy"][index]

    assert_alike(result, expected)


def test_child_follows_shapes(around):
    """A shape operation on a tree would leave a lazy stack in it behind."""
    assert around.reshape(3, 1)["lazy"].batch_size == Size([3, 1, -1])
    assert around.reshape(1, 3).reshape(3)["lazy"].batch_size == Size([3, -1])
    assert around.unsqueeze(0)["lazy"].batch_size == Size([1, 3, -1])
    assert around.expand(2, 3)["lazy"].batch_size == Size([2, 3, -1])
    assert around.unsqueeze(0).permute(1, 0)["lazy"].batch_size == Size([3, 1, -1])
    assert [t["lazy"].batch_size for t in around.split(2)] == [Size([2, -1]), Size([1, 3])]
    assert [t["lazy"].batch_size for t in around] == [Size([2]), Size([4]), Size([3])]
    assert torch.stack([around, around])["lazy"].batch_size == Size([2, 3, -1])
    assert torch.cat([around, around[:1]])["lazy"].batch_size == Size([4, -1])
    assert around.with_batch_size([])["lazy"].batch_size == Size([3, -1])
    with pytest.raises(BatchSizeError, match=r"that of its trees.*\n.*\[3, 2, 3\]\n.*\[2, 3\]"):
        TensorDict({"l": lazy_stack([TensorDict({"a": torch.zeros(2, 3)}) for _ in range(3)])}).with_batch_size([2, 3])


def test_child_follows_edits_and_values(around):
    """An edit or operation on a tree would not reach a lazy stack in it, or reach the wrong tree of it."""
    scaled = around * torch.tensor([1.0, 10.0, 100.0])
    edited = around.set(("lazy", "z"), (torch.zeros(2), torch.zeros(4), torch.zeros(3))).update({"lazy": {"k": 1.0}})

    assert torch.equal(scaled["lazy", "x"][2], around["lazy", "x"][2] * 100)
    assert list(edited["lazy"].keys()) == ["x", "n", "z", "k"]
    assert list(around.rename_key(("lazy", "x"), ("lazy", "q"))["lazy"].keys()) == ["q", "n"]
    assert list(around.rename_key(("lazy", "x"), ("lazy", "n", "q"))["lazy", "n"].keys()) == ["y", "q"]
    assert list(around.flatten_keys()["lazy"].keys()) == ["x", "n.y"]
    assert list(around.delete(("lazy", "x")).select(("lazy", "n"))["lazy"].keys()) == ["n"]
    assert around.at[1].set(around[1] * 0)["lazy", "x"][1].abs().sum() == 0
    assert torch.equal(around.at[1].set(around[1] * 0)["lazy", "x"][0], around["lazy", "x"][0])
    assert around.sum()["lazy", "x"].shape == ()
    assert around.kind(("lazy", "n", "y")) is None
    assert (around == around).all()


def two_levels():
    """A ragged stack in a tree, and one of stacks."""
    lazy = lazy_stack(
        [TensorDict({"x": torch.arange(float(n)), "s": f"{n}", "n": {"y": torch.ones(n)}}) for n in (2, 3)]
    )
    return TensorDict({"l": lazy}), lazy_stack([lazy, lazy])


@pytest.mark.parametrize("call", ["add", "mul"])
def test_arithmetic_at_a_key(call):
    """The tuple of a key would be added to, or repeated, and not its tensors."""
    around, deep = two_levels()
    lazy, fn = around["l"], getattr(torch, call)
    x, y = lazy["x"]

    def at(tree, key, value):
        return assert_pure(lambda t: getattr(t.at[key], call)(value), tree).get(key)

    for value in (3, np.float32(3), torch.tensor(3.0)):
        for mine, old in zip(at(lazy, "x", value), (x, y), strict=True):
            assert torch.equal(mine, fn(old, 3.0))
    assert torch.equal(at(around, ("l", "x"), (2, y))[1], fn(y, y))
    assert torch.equal(at(lazy, "x", torch.tensor([2.0, 5.0]))[1], fn(y, 5.0))
    assert torch.equal(at(lazy, "n", 4)["y"][0], fn(torch.ones(2), 4.0))
    assert torch.equal(at(deep, "x", [[1, 2], [3, 4]])[1][0], fn(x, 3.0))
    with pytest.raises(BatchSizeError, match=r"one for each tree.\n.*2 values\n.*1"):
        getattr(lazy.at["x"], call)([1])
    with pytest.raises(MissingKeyError, match="'z'"):
        getattr(lazy.at["z"], call)(1)


@pytest.mark.parametrize("call", ["add", "mul"])
def test_arithmetic_of_values(call):
    """Text would be joined, or lists repeated, where numbers are meant."""
    around, _ = two_levels()
    for td, key in ((around, ("l", "s")), (around["l"], "s"), (TensorDict({"s": "a"}), "s")):
        what = rf"at\[...\].{call}: '(l.)?s' is no tensor.\n.*a tensor or tree\n.*str"
        with pytest.raises(TypeError, match=what):
            getattr(td.at[key], call)(2)


def test_apply_and_numbers_at_a_key():
    """A function would get the tuple of a key, and a number replace the tensors by one without their shape."""
    around, deep = two_levels()
    cut = around.at["l", "x"].apply(lambda x: x[:1])

    assert [x.tolist() for x in cut["l", "x"]] == [[0.0], [0.0]]
    assert around.at["l", "s"].apply(lambda s: s * 2)["l", "s"] == ["22", "33"]
    assert [x.shape for x in deep.at["x"].apply(lambda x: x[:, None])["x"][1]] == [Size([2, 1]), Size([3, 1])]
    assert around.at["l", "n"].apply(lambda n: n.rename_key("y", "z"))["l", "n", "z"][0].shape == Size([2])
    assert [x.tolist() for x in around.at["l", "x"].set(7)["l", "x"]] == [[7.0] * 2, [7.0] * 3]
    assert around.at["l", "new"].set(1)["l", "new"][0].shape == Size([])
    with pytest.raises(TypeError, match="'x': None cannot be a value"):
        around["l"].at["x"].apply(lambda _: None)


@pytest.mark.parametrize("index", [(True, [1, 0]), (True, [[1, 0]]), ([1], True), (None, [1, 0]), (True, 0)])
def test_rows_beside_a_bool(index):
    """The bool would be asked of each tree, whose rows it does not make."""
    trees = [TensorDict({"x": torch.tensor([float(i)])}) for i in range(2)]
    lazy, dense = lazy_stack(trees), torch.stack(trees)

    for call, value in (("set", settle(lazy[index]) + 5), ("set", 7), ("apply", lambda x: x + 5)):
        assert_trees_equal(getattr(lazy.at[index], call)(value).dense(), getattr(dense.at[index], call)(value))
    written = lazy.clone()
    written.at[index].set_(lazy[index] + 5)
    assert_trees_equal(written.dense(), dense.at[index].set(dense[index] + 5))
    assert lazy.at[False, [1]].set(3)["x"][1] is lazy["x"][1]
