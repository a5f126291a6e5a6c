"""Edits of lazy stacks: values are cut for each tree."""

import pytest
import torch
from torch import Size

import tdfunc
from tdfunc import TensorDict
from tdfunc._lazystack import lazy_stack
from tdfunc.core.errors import BatchSizeError, LeafMismatchError
from tests.helpers import assert_pure, assert_trees_equal
from tests.lazystack.trees import assert_alike, assert_stacks_equal, ragged, tensors_only, tree, uniform


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_set_cuts_values_along_the_stack(dim):
    """A dense value is cut along the dimension of the stack."""
    lazy, dense = lazy_stack(uniform(), dim), torch.stack(uniform(), dim)
    value = torch.randn(*dense.batch_size, 5)
    new = assert_pure(lambda t: t.set("z", value.numpy()).set(("n", "w"), value).set("c", 2.5).set("t", "word"), lazy)

    expected = dense.set("z", value).set(("n", "w"), value).set("c", 2.5)
    assert_trees_equal(new.exclude("t", "s").dense(), expected.exclude("s"))
    assert new["t"] == ["word"] * 3
    assert_alike(TensorDict({"l": lazy, ("l", "z"): value}, dense.batch_size)["l"], lazy.set("z", value))
    assert sorted(lazy.keys()) == ["n", "s", "x"]


@pytest.mark.parametrize("wrap", [tuple, list])
def test_set_takes_a_value_for_each_tree(wrap):
    """A tuple or list gives each tree its value."""
    lazy = lazy_stack(ragged())
    new = lazy.set("z", wrap([torch.zeros(n) for n in (2, 4, 3)])).set(("n", "k"), wrap([1.0, 2.0, 3.0]))

    assert [len(z) for z in new["z"]] == [2, 4, 3]
    assert [k[0].item() for k in new["n", "k"]] == [1, 2, 3]
    assert lazy.set("w", lazy["x"])["w"] == lazy["x"]
    assert lazy.set("w", lazy["n"])["w", "y"] == lazy["n", "y"]
    assert lazy.set("words", lazy["s"])["words"] == lazy["s"]


def test_partition_keeps_the_number_of_trees():
    """A tree that keeps nothing stays as an empty one, and `combine` fills it again."""
    lazy = lazy_stack([tree(2).set("b", torch.ones(2)), tree(3)])
    left, right = tdfunc.partition(lazy, "*.b")

    assert [list(t.keys()) for t in left.trees] == [["b"], []]
    assert left.batch_size == right.batch_size == lazy.batch_size
    assert_stacks_equal(tdfunc.combine(right, left).select("x", "n", "s"), lazy.exclude("b"))
    assert tdfunc.combine(right, left).trees[0]["b"].tolist() == [1, 1]


AT = {
    "set rows": lambda t, rows: t.set(rows),
    "set a number": lambda t, rows: t.set(7),
    "add": lambda t, rows: t.add(rows),
    "mul": lambda t, rows: t.mul(3),
    "apply": lambda t, rows: t.apply(lambda x: x + 1),
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "index", [0, slice(1, 3), (slice(None), 0), [0, 1], (0, 1), (slice(None), slice(0, 1)), (0, [1, 0])], ids=repr
)
@pytest.mark.parametrize("change", AT.values(), ids=AT)
def test_at_is_that_of_the_dense_tree(dim, index, change):
    """A pure write at an index changes the rows that it changes of the dense tree."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    rows = dense[index] * 0 + 5

    assert_trees_equal(change(lazy.at[index], rows).dense(), change(dense.at[index], rows))


def without_leaves():
    """A lazy stack without a leaf."""
    empty = TensorDict({"deep": {}}, [2])
    return lazy_stack([empty, empty])


@pytest.mark.parametrize(
    "drop",
    [lambda t: t.split_keys(["a"])[1], lambda t: t.delete("a").apply(lambda x: x, filter_empty=True)],
    ids=["split_keys", "apply"],
)
def test_empty_stacks_are_dropped(drop):
    """A lazy stack without a leaf goes where an empty tree goes."""
    bare, empty = without_leaves(), TensorDict({"deep": {}}, [2])
    some = lazy_stack([empty.set("x", 1.0), empty])
    kept = drop(TensorDict({"a": 1.0, "bare": bare, "twice": lazy_stack([bare, bare], 1), "some": some}, [2]))

    assert list(kept.keys()) == ["some"]
    assert [list(t.keys()) for t in kept["some"].trees] == [["x"], []]


def test_an_empty_stack_is_its_own_rest():
    """Without keys to split at, a lazy stack without a leaf is the one part."""
    assert [len(part.trees) for part in without_leaves().split_keys()] == [2]


def test_a_tree_is_replaced_by_one_of_another_length():
    """The tree at a number may be replaced by one of another length, or by a dict of leaves."""
    lazy = lazy_stack(tensors_only(ragged()))
    longer = lazy[1]

    assert lazy.at[0].set(longer).batch_size == Size([3, -1])
    assert lazy.at[0].set(longer)[0] is longer
    assert lazy.at[0].set({"x": torch.zeros(2, 2), "n": {"y": torch.zeros(2, dtype=torch.int64)}})["x"][0].sum() == 0


def test_at_of_ragged_trees():
    """Rows of ragged trees are read and written; nothing is written in place."""
    lazy = lazy_stack(tensors_only(ragged()))
    longer = lazy[1]

    assert lazy.at[:, 0].set(0)["x"][2][0].tolist() == [0, 0]
    assert lazy.at[1, 1:].add(1)["n", "y"][1].tolist() == (longer["n", "y"] + torch.tensor([0, 1, 1, 1])).tolist()
    assert lazy.at["x"].get() == lazy["x"]
    with pytest.raises(LeafMismatchError, match=r"at\[...\].set_: a lazy stack has no one tensor"):
        lazy.at[0].set_(longer)


def test_errors_name_the_tree():
    """An error notes the number of the tree."""
    with pytest.raises(BatchSizeError) as caught:
        lazy_stack(ragged()).set("z", (torch.zeros(2), torch.zeros(4), torch.zeros(5)))

    assert "In tree 2 of the lazy stack." in caught.value.__notes__


@pytest.fixture
def around():
    """A tree with a ragged entry beside a dense one."""
    return TensorDict({"lazy": lazy_stack(tensors_only(ragged())), "w": torch.arange(3.0)}, [3])


@pytest.mark.parametrize(
    "index", [1, slice(1, 3), [2, 0], [True, False, True], None, (None, 1), (slice(None), None)], ids=repr
)
def test_child_follows_an_index(around, index):
    """A lazy stack inside a tree is indexed with it."""
    result = around[index]["lazy"]
    expected = around["lazy"][index]

    assert_alike(result, expected)


SHAPES = {
    "reshape": (lambda t: t.reshape(3, 1), [3, 1, -1]),
    "reshape there and back": (lambda t: t.reshape(1, 3).reshape(3), [3, -1]),
    "unsqueeze": (lambda t: t.unsqueeze(0), [1, 3, -1]),
    "expand": (lambda t: t.expand(2, 3), [2, 3, -1]),
    "permute": (lambda t: t.unsqueeze(0).permute(1, 0), [3, 1, -1]),
    "stack": (lambda t: torch.stack([t, t]), [2, 3, -1]),
    "cat": (lambda t: torch.cat([t, t[:1]]), [4, -1]),
    "with_batch_size": (lambda t: t.with_batch_size([]), [3, -1]),
}


@pytest.mark.parametrize(("change", "size"), SHAPES.values(), ids=SHAPES)
def test_child_follows_shapes(around, change, size):
    """Shape operations on a tree reach a lazy stack in it."""
    assert change(around)["lazy"].batch_size == Size(size)


def test_child_follows_parts(around):
    """Parts and rows of a tree have those of a lazy stack in it."""
    assert [t["lazy"].batch_size for t in around.split(2)] == [Size([2, -1]), Size([1, 3])]
    assert [t["lazy"].batch_size for t in around] == [Size([2]), Size([4]), Size([3])]


def test_one_ragged_tree_is_expanded(around):
    """A lazy stack of one tree is expanded to several; -1 is the length of that tree."""
    assert around["lazy"][:1].expand(4, -1).batch_size == Size([4, 2])


def test_a_batch_size_that_a_child_has_not_is_refused():
    """A batch size of a tree must agree with the trees of a lazy stack in it."""
    tree = TensorDict({"l": lazy_stack([TensorDict({"a": torch.zeros(2, 3)}) for _ in range(3)])})

    with pytest.raises(BatchSizeError, match=r"does not agree with the trees"):
        tree.with_batch_size([2, 3])


def test_child_follows_arithmetic(around):
    """Arithmetic and comparisons of a tree reach a lazy stack in it."""
    scaled = around * torch.tensor([1.0, 10.0, 100.0])

    assert torch.equal(scaled["lazy", "x"][2], around["lazy", "x"][2] * 100)
    assert (around == around).all()


KEY_EDITS = {
    "set and update": (
        lambda t: t.set(("lazy", "z"), (torch.zeros(2), torch.zeros(4), torch.zeros(3))).update({"lazy": {"k": 1.0}}),
        ["x", "n", "z", "k"],
    ),
    "rename": (lambda t: t.rename_key(("lazy", "x"), ("lazy", "q")), ["q", "n"]),
    "flatten_keys": (lambda t: t.flatten_keys(), ["x", "n.y"]),
    "delete and select": (lambda t: t.delete(("lazy", "x")).select(("lazy", "n")), ["n"]),
}


@pytest.mark.parametrize(("edit", "keys"), KEY_EDITS.values(), ids=KEY_EDITS)
def test_child_follows_edits(around, edit, keys):
    """Edits of keys of a tree reach a lazy stack in it."""
    assert list(edit(around)["lazy"].keys()) == keys


def test_keys_are_renamed_between_levels(around):
    """A leaf or tree of a lazy stack goes to another level by its new name."""
    words = TensorDict({"l": lazy_stack(ragged())})

    assert list(around.rename_key(("lazy", "x"), ("lazy", "n", "q"))["lazy", "n"].keys()) == ["y", "q"]
    assert words.rename_key(("l", "s"), ("l", "n", "t"))["l", "n", "t"] == words["l", "s"]
    assert_stacks_equal(words.rename_key(("l", "n"), "m")["m"], words["l", "n"])


def test_child_follows_at(around):
    """A row that is written in a tree is written in a lazy stack in it, and no other row is."""
    written = around.at[1].set(around[1] * 0)

    assert written["lazy", "x"][1].abs().sum() == 0
    assert torch.equal(written["lazy", "x"][0], around["lazy", "x"][0])


def test_leaves_of_a_child_have_no_kind(around):
    """A leaf of a lazy stack in a tree has no kind."""
    assert around.kind(("lazy", "n", "y")) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_changes_at_a_key(depth):
    """`at[key]` adds to, multiplies, fills and maps the leaf of each tree, also through a tree around the stack."""
    lazy = lazy_stack([TensorDict({"x": torch.arange(float(n)), "s": f"{n}"}) for n in (2, 3)])
    tree, path = (lazy, "x") if depth == 1 else (TensorDict({"l": lazy}), ("l", "x"))

    assert [x.tolist() for x in tree.at[path].add(torch.tensor(3.0))[path]] == [[3, 4], [3, 4, 5]]
    assert [x.tolist() for x in tree.at[path].mul(torch.tensor([2.0, 5.0]))[path]] == [[0, 2], [0, 5, 10]]
    assert [x.tolist() for x in tree.at[path].set(7)[path]] == [[7, 7], [7, 7, 7]]
    assert [x.tolist() for x in tree.at[path].apply(lambda x: x[:1])[path]] == [[0], [0]]
    with pytest.raises(TypeError, match=r"at\[...\].add: '(l.)?s'"):
        tree.at[(*path[:-1], "s") if depth == 2 else "s"].add(2)
