"""Values for each row under vmap: moved as the leaves are, repeated where they were made inside, or refused."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import BatchSizeError, TensorDict


def grid(*size):
    """A tree whose word for each element is the number that its leaf holds there."""
    numbers = torch.arange(torch.Size(size).numel(), dtype=torch.float64).reshape(size)
    words = np.array([str(int(number)) for number in numbers.flatten()], dtype=object).reshape(size).tolist()
    return TensorDict({"x": numbers, "n": {"s": words, "m": {"s": words}}, "s": words}, size)


def words_of(numbers):
    """The words that belong to numbers, as a nested list."""
    return np.vectorize(lambda number: str(int(number)), otypes=[object])(numbers.numpy()).tolist()


def assert_paired(tree):
    """Check that each word is beside its number, and that all sub-trees have the batch size."""
    assert tree["s"] == tree["n", "s"] == tree["n", "m", "s"] == words_of(tree["x"])
    assert tree.batch_size == tree["n"].batch_size == tree["n", "m"].batch_size == tree["x"].shape


DIMS = st.integers(-2, 1)


@given(st.tuples(*[st.integers(1, 3)] * 3), DIMS, DIMS, st.sampled_from([None, 1, 2]))
def test_words_move_with_leaves(size, taken, to, chunk):
    """Words would stay where they were while the rows move: silently if sizes are equal."""
    # A chunk of one row is no more than any other dimension of size 1.
    assume(chunk is None or taken % 3 == to % 3 == 0 or 1 not in (*size[:2], chunk))
    out = torch.vmap(lambda t: t * 1, taken, to, chunk_size=chunk)(grid(*size))

    assert_paired(out)
    assert torch.equal(out["x"], torch.vmap(lambda x: x, taken, to)(grid(*size)["x"]))


@given(DIMS, DIMS, DIMS, DIMS)
def test_words_move_through_two_levels(outer, back, inner, inner_back):
    """Words would come back to the wrong one of two mapped dimensions."""
    size = torch.Size((3, 3, 3))
    inside = torch.vmap(lambda t: t * 1, inner, inner_back)

    assert_paired(torch.vmap(inside, outer, back)(grid(*size)))


@pytest.mark.parametrize("transform", [lambda fn: fn, tdf.jit, torch.func.functionalize])
def test_words_move_in_other_transforms(transform):
    """Words would stay where they were in a vmap that is traced, or inside another transform."""
    assert_paired(transform(lambda t: torch.vmap(lambda row: row * 1, 0, 1)(t))(grid(3, 3)))


def test_words_of_lazy_stacks_move():
    """Words inside the trees of a lazy stack would stay where they were."""
    out = torch.vmap(lambda t: t * 1, 1, 0)(tdf.lazy_stack([grid(3, 3), grid(3, 3)], 2))

    for tree in out.trees:
        assert_paired(tree)


MADE = {
    "stack": (lambda t: torch.stack([t.set("r", word) for word in ("p", "q")]), ["p", "q"]),
    "set": (lambda t: TensorDict({"x": t["x"].expand(2)}, [2]).set("r", ["p", "q"]), ["p", "q"]),
    "constant": (lambda t: TensorDict({"x": torch.ones(2), "r": ["p", "q"]}, [2]), ["p", "q"]),
}


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("name", MADE)
def test_words_made_inside(name, chunk, tmp_path):
    """A tree with words made inside vmap could not be read, indexed, saved or written out."""
    fn, words = MADE[name]
    out = torch.vmap(fn, chunk_size=chunk)(TensorDict({"x": torch.arange(4.0)}, [4]))
    tdf.save(out, tmp_path / "out.safetensors")

    for tree in (out, tdf.load(tmp_path / "out.safetensors")):
        assert tree["r"] == tree.to_dict()["r"] == [words] * 4
        assert tree[0]["r"] == words
        assert tree[:, 1]["r"] == ["q"] * 4


@pytest.mark.parametrize(("place", "expected"), [(0, [["w", "w"]] * 4), (1, [["w"] * 4] * 2)])
def test_stack_of_words_inside(place, expected):
    """The stack of trees with one word could not be read outside of vmap."""
    out = torch.vmap(lambda t: torch.stack([t, t * 2]), out_dims=place)(TensorDict({"x": torch.ones(4), "s": "w"}, [4]))

    assert out["s"] == expected


def test_words_made_inside_go_where_the_rows_go():
    """Words made inside would be repeated along another dimension than the rows lie along."""
    numbers = torch.arange(9.0).reshape(3, 3)
    names = ["p", "q", "r"]

    for place, expected in ((0, [names] * 3), (1, [[name] * 3 for name in names])):
        out = torch.vmap(lambda x: TensorDict({"x": x, "s": names}, [3]), out_dims=place)(numbers)
        assert out["s"] == expected
    inner = torch.vmap(lambda x: TensorDict({"x": x * numbers[0], "s": names}, [3]), out_dims=1)
    assert torch.vmap(inner, out_dims=1)(numbers)["s"] == [[[name] * 3] * 3 for name in names]


def test_captured_words():
    """The words of a tree that vmap did not map would be taken for values of its rows, or be lost."""
    held = TensorDict({"x": torch.arange(3.0), "s": ["a", "b", "c"]}, [3])

    assert torch.vmap(lambda x: held)(torch.ones(3))["s"] == [["a", "b", "c"]] * 3
    assert torch.vmap(lambda x: held * x)(torch.ones(2))["s"] == [["a", "b", "c"]] * 2
    out = torch.vmap(lambda row: torch.vmap(lambda x: row * x)(torch.ones(3)))(held)
    assert out["s"] == [["a"] * 3, ["b"] * 3, ["c"] * 3]
    assert (
        torch.vmap(lambda row: torch.vmap(lambda x: row * x)(torch.ones(3)), out_dims=1)(held)["s"]
        == [["a", "b", "c"]] * 3
    )


def test_words_beside_mapped_features():
    """Words would be read beside features that vmap put where the rows were."""
    tree = TensorDict({"x": torch.arange(9.0).reshape(3, 3), "s": ["a", "b", "c"]}, [3])

    assert torch.vmap(lambda t: t * 2, 1, 1)(tree)["s"] == ["a", "b", "c"]
    with pytest.raises(BatchSizeError, match=r"'s' holds(.|\n)*exclude\(\) it before vmap"):
        torch.vmap(lambda t: t * 2, 1, 0)(tree)["s"]


WORDS = [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("taken", [0, 1])
def test_refused_where_expanded_leaves_do_not_tell(taken):
    """Words would be read at one of two places, by chance: a leaf that is the same everywhere does not say which."""
    tree = TensorDict({"x": torch.ones(1).expand(2, 2), "s": WORDS}, [2, 2])
    out = torch.vmap(lambda t: t, taken, 1)(tree)

    with pytest.raises(BatchSizeError, match=r"'s' holds(.|\n)*shape \[2, 2\](.|\n)*clone\(\) expanded leaves"):
        out["s"]
    assert torch.vmap(lambda t: t, taken, 1)(tree.clone())["s"] is not None
    same = TensorDict({"x": torch.ones(1).expand(2, 2), "s": [["a", "a"]] * 2}, [2, 2])
    assert torch.vmap(lambda t: t, taken, 1)(same)["s"] == [["a", "a"]] * 2


def test_refused_where_leaves_contradict():
    """Words would follow one of two leaves whose different dimensions vmap took."""
    tree = TensorDict({"x": torch.arange(4.0).reshape(2, 2), "y": torch.ones(2, 2), "s": WORDS}, [2, 2])
    dims = tdf.in_dims(tree, {"x": 0, "y": 1})

    with pytest.raises(BatchSizeError, match="'s' holds"):
        torch.vmap(lambda t: t * 2, (dims,))(tree)["s"]


def test_refused_to_stack_mapped_words():
    """Words of a mapped row would be stacked with all others, as a value of the new batch."""
    tree = TensorDict({"x": torch.ones(3), "s": ["a", "b", "c"]}, [3])
    word = TensorDict({"x": torch.tensor(1.0), "s": "w"})

    with pytest.raises(BatchSizeError, match=r"stack: non-tensor data(.|\n)*\[\](.|\n)*\[3\](.|\n)*exclude\(\) them"):
        torch.vmap(lambda t: torch.stack([word, t]))(tree)


def test_rows_of_loops():
    """Words that every step of `map` or `scan` makes would be those of another batch in the result."""
    tree = TensorDict({"x": torch.arange(9.0).reshape(3, 3)}, [3, 3])
    names = ["p", "q", "r"]

    assert tdf.map(lambda row: row.set("s", names), tree)["s"] == [names] * 3
    for dim, expected in ((0, [names] * 3), (1, [[name] * 3 for name in names])):
        out = tdf.scan(lambda carry, row: (carry, row.set("s", names)), torch.ones(()), tree, dim=dim)[1]
        assert out["s"] == expected
    assert_paired(tdf.map(lambda row: row * 1, grid(3, 3)))
    assert_paired(tdf.scan(lambda carry, row: (carry, row * 1), torch.ones(()), grid(3, 3), dim=1)[1])


def test_leaves_without_strides():
    """A tree with words could not be rebuilt if a leaf has no sizes or no strides."""
    sparse = torch.eye(2).to_sparse()
    tree = TensorDict({"x": sparse, "s": ["a", "b"]}, [2])
    assert pytree.tree_map(lambda x: x * 2, tree)["s"] == ["a", "b"]
    with pytest.raises(BatchSizeError, match="'s' holds"):
        pytree.tree_map(lambda x: x.to_dense()[None], tree)["s"]


def test_words_that_no_vmap_moves_come_back():
    """A change of leaves and the way back would lose words; half of the way would show words of other rows."""
    tree = grid(3, 3)
    row = pytree.tree_map(lambda x: x[0], tree)

    with pytest.raises(BatchSizeError, match=r"'s' holds(.|\n)*\[3\](.|\n)*\[3, 3\](.|\n)*tree_map"):
        row["s"]
    assert pytree.tree_map(lambda x: x.expand(3, 3), row)["s"] == tree["s"]
