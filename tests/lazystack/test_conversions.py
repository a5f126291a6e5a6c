"""Lazy stacks as one tree, and of typed trees."""

import copy
import pickle

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

import tdfunc
from tdfunc import NonTensorData, TensorDict
from tdfunc._lazystack import LazyStack, lazy_stack
from tdfunc.core.errors import ImmutableError, MissingKeyError
from tests.helpers import assert_pure
from tests.lazystack.trees import Message, assert_stacks_equal, ragged


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["right", "left"]), st.integers(0, 1))
def test_law_masks_undo_padding(lengths, side, dim):
    """Masks are True where the padded tree holds the values of the trees, and nowhere else."""
    trees = ragged(lengths)
    padded, masks = lazy_stack(trees, dim).pad(-1, side, return_mask=True)
    pairs = list(zip(padded.unbind(dim), masks.unbind(dim), strict=True))

    found = [{path: row[path][mask[path]] for path in ("x", ("n", "y"))} for row, mask in pairs]
    torch.testing.assert_close(found, [{path: t[path] for path in ("x", ("n", "y"))} for t in trees], rtol=0, atol=0)
    texts = [[s for s, real in zip(row["s"], mask["s"].tolist(), strict=True) if real] for row, mask in pairs]
    assert texts == [t["s"] for t in trees]
    fill = [row[path][~mask[path]].unique().tolist() for row, mask in pairs for path in ("x", ("n", "y"))]
    assert [values for values in fill if values not in ([], [-1])] == []
    assert padded.batch_size == masks.batch_size


def test_pad_values_by_key():
    """Each leaf or sub-tree may have its own padding value."""
    lazy = lazy_stack(ragged((1, 2)))
    padded = lazy.pad({"x": -5.0, "n": 7})

    assert padded["x"][0, 1].tolist() == [-5, -5]
    assert padded["n", "y"][0, 1].item() == 7
    assert lazy.pad({("n", "y"): 3})["x"][0, 1].tolist() == [0, 0]
    assert padded["s"][0] == ["0.0", None]


def test_pad_several_dimensions():
    """Features that differ are padded in all dimensions; each leaf has a mask of its own."""
    wide = lazy_stack([TensorDict({"x": torch.ones(2, w), "b": torch.ones(2, dtype=torch.bool)}, [2]) for w in (1, 3)])
    padded, masks = wide.pad(return_mask=True)

    assert masks["x"].tolist() == [[[True, False, False]] * 2, [[True] * 3] * 2]
    assert torch.equal(padded["x"].bool(), masks["x"])
    assert masks["b"].shape == (2, 2)


def test_pad_several_levels():
    """Stacks of stacks are padded in all dimensions."""
    deep = lazy_stack([lazy_stack(ragged((1, 2))), lazy_stack(ragged((3,)))])
    padded, masks = deep.pad(9, "left", return_mask=True)

    assert padded.batch_size == Size([2, 2, 3])
    assert masks["x"].long().tolist() == [[[0, 0, 1], [0, 1, 1]], [[0, 0, 0], [1, 1, 1]]]
    assert (padded["x"][~masks["x"]] == 9).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    """Nested tensors hold the rows of the trees."""
    lazy = lazy_stack(ragged()).set("r", (1.0, 2.0, 3.0)).with_batch_size([3])
    nested = lazy.nested(layout)

    assert nested["x"].layout is layout
    assert nested["x"].is_nested
    assert nested["n", "y"].is_nested
    torch.testing.assert_close(list(nested["x"].unbind()), list(lazy["x"]), rtol=0, atol=0)
    assert nested["s"] == lazy["s"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("count", [3, 1])
def test_batch_size_of_nested_tensors(layout, count):
    """A tree of nested tensors has the number of trees as its batch size."""
    lazy = lazy_stack(ragged()).set("r", (1.0, 2.0, 3.0)).with_batch_size([3])

    assert lazy[:count].nested(layout).batch_size == Size([count])


def test_lists_and_arrays():
    """Lists are nested as the batch, with a dict for each element; `numpy()` gives the array of each tree."""
    lazy = lazy_stack(ragged((1, 2)))
    arrays = lazy.numpy()
    rows = lazy.tolist(convert_tensors=True)

    assert [len(row) for row in rows] == [1, 2]
    assert rows[1][0] == {"x": lazy[1, 0]["x"].tolist(), "n": {"y": lazy[1, 0]["n", "y"].item()}, "s": "1.0"}
    assert torch.equal(lazy.tolist()[1][1]["x"], lazy[1, 1]["x"])
    assert [(type(x).__name__, len(x)) for x in (*arrays["x"], *arrays["n"]["y"])] == [
        ("ndarray", 1),
        ("ndarray", 2),
    ] * 2
    assert lazy_stack([t[0] for t in lazy], 0).tolist(convert_tensors=True) == [rows[0][0], rows[1][0]]


@pytest.fixture
def chats():
    """Ragged conversations of a typed tree."""
    return [Message(role=[f"{i}"] * n, ids=torch.arange(n) + i, batch_size=[n]) for i, n in enumerate((1, 3))]


def test_typed_stack_is_of_the_class(chats):
    """A stack of typed trees is an instance of their class, one class for all of them."""
    lazy = lazy_stack(chats)

    assert isinstance(lazy, Message)
    assert isinstance(lazy, LazyStack)
    assert type(lazy) is type(lazy_stack([chats[0]])) is type(lazy_stack([lazy, lazy]))
    assert "LazyStack[Message](" in repr(lazy)


def test_a_tree_of_a_typed_stack_is_of_the_class(chats):
    """An element is an instance, and no stack."""
    row = lazy_stack(chats)[1]

    assert isinstance(row, Message)
    assert not isinstance(row, LazyStack)


def test_fields_of_a_typed_stack(chats):
    """A stack of typed trees reads and lists the fields of their class."""
    lazy = lazy_stack(chats)

    assert lazy.role == [["0"], ["1"] * 3]
    assert [ids.tolist() for ids in lazy.ids] == [[0], [1, 2, 3]]
    assert lazy.score is None
    assert [f.name for f in lazy.fields()] == ["role", "ids", "score"]


def test_typed_edits(chats):
    """Edits keep the class."""
    lazy = lazy_stack(chats)
    new = lazy.replace(score=(torch.zeros(1), torch.ones(3))).set("role", [["x"], ["y", "z", "w"]])

    assert type(new) is type(lazy)
    assert new.score[1].tolist() == [1, 1, 1]
    assert new.role == [["x"], ["y", "z", "w"]]
    assert new.replace({"score": None}).score is new.__replace__(score=None).score is None


def test_optional_fields_of_some_trees(chats):
    """An optional field that only some trees have reads as a tuple with None."""
    scored = chats[1].replace(score=torch.ones(3))
    none, score = lazy_stack([chats[0], scored]).score

    assert none is None
    assert score is scored.score


def test_typed_edits_that_are_refused(chats):
    """A stack of typed trees refuses other fields and assignments, as an instance does."""
    lazy = lazy_stack(chats)

    with pytest.raises(MissingKeyError, match="Message has no field 'colour'"):
        lazy.set("colour", 1)
    with pytest.raises(ImmutableError, match="ids"):
        lazy.ids = 1


def test_typed_padding(chats):
    """Padding makes an instance, and masks that are an open tree."""
    padded, masks = lazy_stack(chats).pad(-1, return_mask=True)

    assert type(padded) is Message
    assert padded.ids.tolist() == [[0, -1, -1], [1, 2, 3]]
    assert padded.role[0] == ["0", None, None]
    assert type(masks) is TensorDict


def test_typed_conversions(chats):
    """Stacks of one kind keep the class, and an open tree leaves it."""
    lazy = lazy_stack(chats)

    assert type(lazy.exclude("role").nested()) is Message
    assert type(lazy_stack([chats[1], chats[1] + 1]).dense()) is Message
    assert type(lazy.to_tensordict(retain_none=False)) is LazyStack


@pytest.mark.parametrize(
    "copied",
    [
        lambda lazy: pytree.tree_map(lambda x: x, lazy),
        lambda lazy: optree.tree_map(lambda x: x, lazy),
        lambda lazy: lazy * 1,
        copy.deepcopy,
        lambda lazy: pickle.loads(pickle.dumps(lazy)),
        lambda lazy: torch.cat([lazy, lazy])[2:],
    ],
    ids=["torch's pytree", "optree", "arithmetic", "deepcopy", "pickle", "cat"],
)
def test_typed_copies(chats, copied):
    """Copies and transformations keep the class."""
    assert_stacks_equal(copied(lazy_stack(chats)), lazy_stack(chats))


def stack_with_value(value):
    """Two trees without dimensions, each with a value; that of the second is given."""
    return lazy_stack(
        [TensorDict({"x": torch.ones(n), "r": n, "s": NonTensorData(s)}) for n, s in ((2, "a"), (3, value))]
    )


PADDINGS = {
    "pad": lambda lazy: lazy.pad(return_mask=True)[0],
    "pad on the left": lambda lazy: lazy.pad(side="left"),
    "nested": lambda lazy: lazy.nested(),
    "pad_sequence": lambda lazy: tdfunc.pad_sequence(lazy.trees),
}


@pytest.mark.parametrize("value", ["b", [1, [2]], {"k": 1}], ids=str)
@pytest.mark.parametrize("padded", PADDINGS.values(), ids=PADDINGS)
def test_padding_keeps_values_of_trees_without_dimensions(value, padded):
    """A value of a tree without dimensions stays as it is, as in `dense()` and `nested()`."""
    tree = padded(stack_with_value(value))

    assert repr(tree["s"]) == repr(["a", value])
    assert tree["r"].tolist() == [2, 3]


@pytest.mark.parametrize("value", ["b", [1, [2]], {"k": 1}], ids=str)
def test_masks_and_levels_of_values_without_dimensions(value):
    """A value of a tree without dimensions is not padded: its mask is True, also in a stack of stacks."""
    lazy = stack_with_value(value)

    assert lazy.pad(return_mask=True)[1]["s"].tolist() == [True, True]
    assert repr(lazy_stack([lazy, lazy]).pad()["s"]) == repr([["a", value]] * 2)


# -- pad_sequence -------------------------------------------------------------------------------------------------


def rows(*lengths, batch=True):
    """Trees with a leaf of features, a nested leaf of integers and one string for each tree."""
    return [
        TensorDict({"x": torch.rand(n, 2), "n": {"ids": torch.arange(n)}, "s": f"len {n}"}, [n] if batch else [])
        for n in lengths
    ]


@pytest.mark.parametrize("batch", [True, False])
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_pad_sequence_is_that_of_torch_on_every_leaf(batch, lengths):
    """`tdf.pad_sequence` pads each leaf, and sizes each mask and batch, as torch's `pad_sequence`."""
    trees, keys = rows(*lengths, batch=batch), ("x", ("n", "ids"))
    done = assert_pure(lambda *given: tdfunc.pad_sequence(given, return_mask=True, padding_value=7), *trees)

    expected = [pad_sequence([t[key] for t in trees], batch_first=True, padding_value=7) for key in keys]
    real = pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
    torch.testing.assert_close([done[key] for key in keys], expected, rtol=0, atol=0)
    torch.testing.assert_close([done["masks"][key] for key in keys], [real, real], rtol=0, atol=0)
    assert done.batch_size == done["n"].batch_size == Size([len(lengths), max(lengths)][: 1 + batch])


@pytest.mark.parametrize("dim", [1, -1])
def test_pad_sequence_of_a_later_dimension(dim):
    """Only the asked dimension is padded, and a leaf without it is stacked as it is."""
    trees = [TensorDict({"x": torch.rand(2, n), "y": torch.rand(2, n + 1)}, [2]) for n in (1, 3)]
    done = tdfunc.pad_sequence(trees, dim, return_mask=("m", "here"))

    assert done.batch_size == Size([2, 2])
    assert torch.equal(done["x"][0], torch.cat([trees[0]["x"], torch.zeros(2, 2)], 1))
    assert done["y"].shape == done["m", "here", "y"].shape == Size([2, 2, 4])
    assert done["m", "here", "x"].tolist() == [[[True, False, False]] * 2, [[True] * 3] * 2]
    assert tdfunc.pad_sequence([TensorDict({"ids": torch.ones(n), "r": n}) for n in (1, 2)])["r"].tolist() == [1, 2]
