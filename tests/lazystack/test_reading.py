"""Reading, construction and indices of lazy stacks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from tdfunc import TensorDict
from tdfunc._lazystack import LazyStack, lazy_stack
from tdfunc.core.errors import BatchSizeError, MissingKeyError, TreeStructureError, UnsupportedError
from tests.helpers import assert_trees_equal
from tests.lazystack.trees import (
    Message,
    assert_alike,
    assert_stacks_equal,
    ragged,
    settle,
    tensors_only,
    tree,
    uniform,
)
from tests.random_index import random_index


@pytest.mark.parametrize("lengths", [(2, 4, 3), (3, 3, 3)], ids=["ragged", "equal"])
def test_reading_does_not_depend_on_lengths(lengths):
    """The type of what a key gives would change when lengths happen to agree."""
    lazy = lazy_stack(ragged(lengths))

    assert type(lazy["x"]) is tuple
    assert [x.shape[0] for x in lazy["x"]] == list(lengths)
    assert lazy["x"][1] is lazy.trees[1]["x"]
    assert lazy["s"] == [t["s"] for t in lazy.trees]
    assert isinstance(lazy["n"], LazyStack)
    assert lazy["n", "y"][2] is lazy.trees[2]["n", "y"]
    assert lazy.get("x") == lazy["x"]
    assert lazy.get("missing") is None
    assert list(lazy.keys()) == ["x", "n", "s"]
    assert list(lazy.keys(True, True)) == ["x", ("n", "y"), "s"]


@pytest.mark.parametrize(("dim", "size"), [(0, [3, -1]), (1, [-1, 3]), (-1, [-1, 3]), (-2, [3, -1])])
def test_batch_size(dim, size):
    """Unequal lengths would not show as -1, or the stack dimension would be elsewhere."""
    lazy = lazy_stack(ragged(), dim)

    assert lazy.batch_size == lazy.shape == Size(size)
    assert lazy.stack_dim == size.index(3)
    assert lazy.numel() == 9
    assert (lazy.ndim, lazy.batch_dims) == (2, 2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_law_rows_are_the_trees(lengths):
    """`lazy_stack(trees)[i]` would be another tree than `trees[i]`, or a loop would miss one."""
    trees = ragged(lengths)
    lazy = lazy_stack(trees)

    assert len(lazy) == len(trees)
    for i, (row, mine, slow) in enumerate(zip(lazy, trees, lazy.unbind(0), strict=True)):
        assert row is mine
        assert slow is mine
        assert lazy[i] is mine
        assert lazy[i - len(trees)] is mine


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_law_dense_is_torch_stack(dim):
    """`dense()` of equal trees would differ from torch.stack of them."""
    lazy = lazy_stack(uniform(), dim)

    assert_trees_equal(lazy.dense(), torch.stack(uniform(), dim))
    assert lazy.batch_size == lazy.dense().batch_size


def test_keys_of_some_trees():
    """A key that only some trees have would be read as if all had it, or be lost."""
    lazy = lazy_stack(
        [TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2]), TensorDict({"a": torch.zeros(3)}, [3])]
    )

    assert list(lazy.keys()) == ["a"]
    assert "b" not in lazy
    assert lazy.trees[0]["b"].tolist() == [1, 1]
    assert (lazy * 2).trees[0]["b"].tolist() == [2, 2]
    assert "b: in trees [0]" in repr(lazy)
    assert list(lazy.update({"b": 0.0}).keys()) == ["a", "b"]
    assert list(lazy.select("a").trees[0].keys()) == ["a"]
    assert list(lazy.exclude("b").trees[0].keys()) == ["a"]


def test_unequal_shapes_and_dtypes_of_a_key():
    """Trees whose leaves differ in features or dtype would be refused, or cast in silence."""
    lazy = lazy_stack(
        [TensorDict({"x": torch.zeros(2, 3)}, [2]), TensorDict({"x": torch.ones(2, 5, dtype=torch.int64)}, [2])]
    )

    assert lazy.batch_size == Size([2, 2])
    assert [x.dtype for x in (lazy + 1)["x"]] == [torch.float32, torch.int64]
    assert [x.shape for x in lazy[:, :1]["x"]] == [(1, 3), (1, 5)]


def test_repr():
    """The text would hide that sizes differ, or which trees have a key."""
    text = repr(lazy_stack(ragged((2, 4)), 0).with_names(["b", "t"]))

    assert "x: 2 x Tensor(shape=torch.Size([-1, 2]), device=cpu, dtype=torch.float32)" in text
    assert "s: [['0.0', '0.1'], ['1.0', '1.1', '1.2', '1.3']]" in text
    assert "batch_size=torch.Size([2, -1])" in text
    assert "stack_dim=0,\n    names=['b', 't']" in text
    assert "(Tensor(shape=torch.Size([2])" in repr(
        lazy_stack([TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2, dtype=torch.int64)})])
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: lazy_stack([]), ValueError, "no trees were given.*\n.*one or more"),
        (lambda: lazy_stack([tree(2), {}]), TypeError, "all must be trees.*\n.*trees\n.*dict at 1"),
        (
            lambda: lazy_stack([tree(2), Message(role="a", ids=torch.zeros(2))]),
            TreeStructureError,
            "different classes.*\n.*TensorDict\n.*Message",
        ),
        (lambda: lazy_stack([tree(2), tree(2)[0]]), BatchSizeError, r"numbers of batch dimensions.*\n.*\[2\]\n.*\[\]"),
        (lambda: lazy_stack([tree(2)], 2), IndexError, "dimension 2 does not exist.*\n.*-2 <= dim < 2"),
        (
            lambda: lazy_stack([TensorDict({"n": {"a": torch.zeros(1)}}), TensorDict({"n": {"a": "text"}})]),
            TreeStructureError,
            "'n.a' is not the same in trees 0 and 1.*\n.*a tensor\n.*non-tensor data",
        ),
        (lambda: type("Mine", (LazyStack,), {}), UnsupportedError, "Mine cannot subclass it"),
        (lambda: TensorDict(lazy_stack(ragged())), UnsupportedError, "no one shape.*\n.*\n.*LazyStack\n.*dense"),
        (lambda: tree(3).update(lazy_stack(ragged())), TreeStructureError, "update: the entries of a lazy stack"),
        (
            lambda: TensorDict({"l": lazy_stack(ragged())}, [3]).update(
                {"l": 1.0, "m": lazy_stack(ragged()), "k": lazy_stack(ragged((1, 2)))}
            ),
            BatchSizeError,
            "'k",
        ),
        (
            lambda: TensorDict({"l": lazy_stack(ragged())}, [3]).rename_key(("l", "x"), "x"),
            TreeStructureError,
            "'l.x' has no one shape.*\n.*one tensor\n.*3 tensors",
        ),
    ],
)
def test_bad_construction(make, error, text):
    """Trees that do not belong together would be stacked."""
    with pytest.raises(error, match=text):
        make()


def test_constructor_is_lazy_stack():
    """The class called directly would give something else than the function."""
    assert_stacks_equal(LazyStack(ragged(), 1), lazy_stack(ragged(), 1))
    assert type(LazyStack([Message(role="a", ids=torch.zeros(2))])) is type(
        lazy_stack([Message(role="a", ids=torch.zeros(2))])
    )


def test_names():
    """Names would be lost, or not reach the trees."""
    trees = [t.with_names(["time"]) for t in ragged()]
    lazy = lazy_stack(trees, 0)
    named = lazy.with_names(["batch", "t"])

    assert lazy.names == [None, "time"]
    assert named.names == ["batch", "t"]
    assert named[0].names == ["t"]
    assert named.permute(1, 0).names == ["t", "batch"]
    assert (named * 2)[:2].names == ["batch", "t"]
    assert named.exclude("n", "s").sum(1).names == ["batch"]
    assert named.with_names(None)[0].names == [None]
    assert named.pad().names == ["batch", "t"]
    assert lazy_stack(uniform(), 1).with_names(["a", "b", "c"]).dense().names == ["a", "b", "c"]
    assert named.unsqueeze(0).names == [None, "batch", "t"]


def test_with_batch_size():
    """The trees would keep another batch size than the stack shows."""
    lazy = lazy_stack(uniform())

    assert lazy.with_batch_size([3, 4])[0].batch_size == Size([4])
    assert lazy.with_batch_size([3]).exclude("s").with_batch_size([3, 4, 2]).batch_size == Size([3, 4, 2])
    assert lazy_stack(ragged()).with_batch_size([3]).batch_size == Size([3])


INDICES = [
    1,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    (slice(None), 2),
    (0, 1),
    (0, 1, 1),
    (Ellipsis, 0),
    None,
    (None, 1),
    (1, None),
    (slice(None), None),
    [2, 0],
    torch.tensor([2, 0, 2]),
    torch.tensor([[0, 1], [2, 0]]),
    torch.tensor(1),
    np.array([1]),
    [True, False, True],
    (slice(None), torch.tensor([0, 1])),
    (slice(None), slice(0, 2), torch.tensor([0, 1])),
    (torch.tensor([0, 1]), torch.tensor([1, 0])),
    (torch.tensor([0, 1]), slice(None), torch.tensor([1, 0])),
    (torch.tensor([[0], [1]]), torch.tensor([1, 0])),
    (0, torch.tensor([1, 0])),
    (torch.tensor([1, 0]), 0),
    True,
    (1, slice(None), None, torch.tensor([0, 1])),
    range(2),
    (torch.tensor([0, 1]), 1, torch.tensor([0, 1])),
]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_index_is_that_of_the_dense_tree(dim, index):
    """An index would reach another element than in the dense tree, or place a dimension elsewhere."""
    # All three dimensions have at least three rows, whatever the position of the stack.
    trees = uniform(3, (4, 2)) if dim < 2 else [t.reshape(4, 2) for t in uniform(3)]
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    index = _shrunk(index, dense.batch_size)
    result = lazy[index]

    assert_trees_equal(settle(result), dense[index])
    assert result.batch_size == dense[index].batch_size


def _shrunk(index, size):
    """The index with as many bools as the first dimension has rows, and no row that the second lacks."""
    if isinstance(index, list) and isinstance(index[0], bool):
        return [i % 2 == 0 for i in range(size[0])]
    if repr(index) == "(slice(None, None, None), 2)" and size[1] < 3:
        return (slice(None), 1)
    return index


@pytest.mark.parametrize("dim", range(4))
def test_rows_on_both_sides_of_the_stack(dim):
    """Rows that the stack's own slice stands between lie side by side in its trees, and would stay in place there."""
    trees = [TensorDict({"x": torch.arange(48.0).reshape(2, 3, 4, 2) + 100 * i}, [2, 3, 4]) for i in range(3)]
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    rows = torch.tensor([1, 0])

    for index in [(slice(None), rows, slice(None), rows), (rows, None, slice(0, 2), slice(None), rows)]:
        assert_trees_equal(settle(lazy[index]), dense[index])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_mask_of_several_dimensions(dim):
    """A mask over the stack dimension and others would pick other elements."""
    lazy, dense = lazy_stack(uniform(), dim), torch.stack(uniform(), dim)
    for n in (1, 2, 3):
        mask = torch.arange(dense.batch_size[:n].numel()).reshape(dense.batch_size[:n]) % 3 != 1

        assert_trees_equal(settle(lazy[mask]), dense[mask])
        assert_trees_equal(settle(lazy.masked_select(mask)), dense[mask])


@given(st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_law_random_indices(seed, dim):
    """Some index that the dense tree takes would give a lazy stack something else."""
    rng = np.random.default_rng(seed)
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    index = random_index(rng, tuple(dense.batch_size))
    try:
        expected = dense[index]
    except (IndexError, ValueError, TypeError, RuntimeError):
        with pytest.raises((IndexError, ValueError, TypeError, RuntimeError)):
            lazy[index]
        return
    # An index that leaves no tree is refused; nothing else is.
    try:
        result = settle(lazy[index])
    except IndexError:
        assert 0 in expected.batch_size
        return

    assert_trees_equal(result, expected)


RAGGED_INDICES = [
    ((0, 1), lambda trees: trees[0][1]),
    ((slice(0, 2), 0), lambda trees: lazy_stack([trees[0][0], trees[1][0]])),
    ((slice(None), slice(0, 1)), lambda trees: lazy_stack([t[:1] for t in trees])),
    (([2, 1], [0, 1]), lambda trees: lazy_stack([trees[2][0], trees[1][1]])),
    ((Ellipsis, 1), lambda trees: lazy_stack([t[1] for t in trees])),
    ((None, 1), lambda trees: lazy_stack([t[None] for t in trees], 1)[:, 1]),
    ([True, False, True], lambda trees: lazy_stack([trees[0], trees[2]])),
    ([[0, 1], [2, 0]], lambda trees: lazy_stack([lazy_stack(trees[:2]), lazy_stack([trees[2], trees[0]])])),
]


@pytest.mark.parametrize(("index", "loop"), RAGGED_INDICES, ids=[repr(index) for index, _ in RAGGED_INDICES])
def test_index_of_ragged_trees(index, loop):
    """An index along and across the stack would not be what the trees themselves give."""
    assert_alike(lazy_stack(ragged())[index], loop(ragged()))


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (3, IndexError, "3 is out of range.*\n.*-3 <= index < 3"),
        ([0, 5], IndexError, r"5 is out of range.*\n.*-3 <= index < 3\n.*tensor\(\[0, 5\]\)"),
        (slice(3, None), IndexError, "one tree at least.*\n.*an index of none"),
        ((0, 7), IndexError, "7 is out of range.*\n.*-2 <= index < 2"),
        ((0, 0, 0), IndexError, "too many indices"),
        ([True, False], IndexError, r"mask does not fit.*\n.*\[3\]\n.*\[2\]"),
        ("nope", MissingKeyError, "no key 'nope'"),
    ],
)
def test_bad_index(index, error, text):
    """An index that does not exist would give something."""
    with pytest.raises(error, match=text):
        lazy_stack(ragged())[index]


def test_key_of_some_trees_says_where_it_is():
    """Reading a key that only some trees have would not say which."""
    lazy = lazy_stack([tree(2).set("b", torch.ones(2)), tree(2)])

    with pytest.raises(MissingKeyError, match=r"'b' is not in all trees.*\n.*trees \[0\]"):
        lazy._get("b")
    with pytest.raises(MissingKeyError, match="no key 'b'"):
        lazy["b", "c"]


@pytest.mark.parametrize("place", [(None, -1), (True, -1), (-1, None)])
def test_one_value_for_a_tree_stays_one(place):
    """An index that adds dimensions would give a tree other values than the tree that it chooses."""
    lazy = lazy_stack([TensorDict({"s": "a"}), TensorDict({"s": "b"})])
    row = lazy[place]

    assert row.batch_size == Size([1])
    assert row["s"] == lazy.trees[1][None]["s"] == "b"
    assert row.tolist() == lazy.dense()[place].tolist() == [{"s": "b"}]
