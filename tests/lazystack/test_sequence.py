"""`pad_sequence` against torch's own on every leaf, against tensordict's, and against lengths that do not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor
from torch.nn.utils import rnn

import tdfunc as tdf
from tdfunc import LeafMismatchError, TensorClass, TensorDict, TreeStructureError, UnsupportedError
from tests.helpers import assert_pure, assert_trees_equal
from tests.incumbent import Incumbent, tensordict


def rows(*lengths, batch=True):
    """Trees with a leaf of features, a nested leaf of integers and one string for each tree."""
    return [
        TensorDict({"x": torch.rand(n, 2), "n": {"ids": torch.arange(n)}, "s": f"len {n}"}, [n] if batch else [])
        for n in lengths
    ]


@pytest.mark.parametrize("batch", [True, False])
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_equals_torch_on_every_leaf(batch, lengths):
    """A leaf, mask or batch size would be another than that of torch's `pad_sequence`."""
    trees = rows(*lengths, batch=batch)
    done = assert_pure(lambda *given: tdf.pad_sequence(given, return_mask=True, padding_value=7), *trees)

    for key in ("x", ("n", "ids")):
        assert torch.equal(done[key], rnn.pad_sequence([t[key] for t in trees], batch_first=True, padding_value=7))
        real = rnn.pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
        assert torch.equal(done["masks"][key], real)
    assert done.batch_size == done["n"].batch_size == Size([len(lengths), max(lengths)] if batch else [len(lengths)])
    assert done["masks"].batch_size == done.batch_size


@pytest.mark.parametrize("dim", [1, -1])
def test_a_later_dimension(dim):
    """Another dimension than the asked one would be padded, or the mask have features in it."""
    trees = [TensorDict({"x": torch.rand(2, n), "y": torch.rand(2, n + 1)}, [2]) for n in (1, 3)]
    done = tdf.pad_sequence(trees, dim, return_mask=("m", "here"))

    assert done.batch_size == Size([2, 2])
    assert torch.equal(done["x"][0], torch.cat([trees[0]["x"], torch.zeros(2, 2)], 1))
    assert done["y"].shape == done["m", "here", "y"].shape == Size([2, 2, 4])
    assert done["m", "here", "x"].tolist() == [[[True, False, False]] * 2, [[True] * 3] * 2]


def test_masks_leave_out_dimensions_between():
    """A mask would have a dimension that is neither of the batch nor padded, also where it is empty."""
    trees = [TensorDict({"x": torch.rand(0, n, 5), "y": torch.rand(4, n)}) for n in (1, 3)]
    masks = tdf.pad_sequence(trees, 1, return_mask=True)["masks"]

    assert masks["x"].tolist() == masks["y"].tolist() == [[True, False, False], [True, True, True]]


def test_leaves_without_the_dimension():
    """A number beside sequences would be refused, or its mask say that it is padding."""
    done = tdf.pad_sequence([TensorDict({"ids": torch.ones(n), "r": n}) for n in (1, 2)], return_mask=True)

    assert done["r"].tolist() == [1, 2]
    assert done["masks", "r"].tolist() == [True, True]
    assert done["ids"].tolist() == [[1.0, 0.0], [1.0, 1.0]]


class Chat(TensorClass):
    """A typed row."""

    ids: Tensor
    text: str


def test_is_a_padded_lazy_stack():
    """Two ways to the same batch would differ, in non-tensor data, too."""
    trees = rows(2, 3)

    assert_trees_equal(tdf.pad_sequence(trees), tdf.lazy_stack(trees).pad())


def test_typed_trees_and_values():
    """The result would lose its class, a value for one key be used for all, or gradients be lost."""
    leaf = torch.ones(1, requires_grad=True)
    done = tdf.pad_sequence([Chat(leaf, "a"), Chat(torch.ones(2), "b")], padding_value={"ids": -1})

    assert type(done) is Chat
    assert done.ids.tolist() == [[1.0, -1.0], [1.0, 1.0]]
    assert done.text == ["a", "b"]
    assert torch.equal(torch.autograd.grad(done.ids.sum(), leaf)[0], torch.ones(1))


def test_same_as_the_incumbent():
    """A user of tensordict would get other numbers, masks or batch sizes."""
    trees = [{"x": torch.rand(n, 3), "y": torch.arange(n)} for n in (2, 4)]
    for size in ([], None):
        ours, theirs = (
            fn([cls(t, [len(t["y"])] if size is None else size) for t in trees], return_mask=True)
            for fn, cls in ((tdf.pad_sequence, TensorDict), (tensordict.pad_sequence, Incumbent))
        )
        assert ours.batch_size == theirs.batch_size
        for key in ("x", "y", ("masks", "x"), ("masks", "y")):
            assert torch.equal(ours[key], theirs[key])


def test_errors():
    """A user could not see which leaf does not fit, or it would be padded in a dimension that was not asked for."""
    with pytest.raises(ValueError, match=r"pad_sequence: no trees"):
        tdf.pad_sequence([])
    wide = [TensorDict({"n": {"x": torch.ones(2, n)}}) for n in (1, 3)]
    with pytest.raises(LeafMismatchError, match=r"leaf 'n.x' of trees 0 and 1 .*dimension 0.\n.*\[2, 1\]\n.*\[2, 3\]"):
        tdf.pad_sequence(wide)
    with pytest.raises(LeafMismatchError, match=r"leaf 'x' of trees 0 and 1 .*\n.*\[1\]\n.*\[1, 1\]"):
        tdf.pad_sequence([TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(1, 1)})])
    sized = [TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (1, 3)]
    with pytest.raises(
        LeafMismatchError, match=r"batch size of trees 0 and 1 .*counts from the front.\n.*\[1\]\n.*\[3\]"
    ):
        tdf.pad_sequence(sized, -2)
    with pytest.raises(TreeStructureError, match=r"(?s)pad_sequence: .*'n', 's', 'x'.*'s', 'x'"):
        tdf.pad_sequence([rows(1)[0], rows(1)[0].exclude("n")])
    with pytest.raises(UnsupportedError, match=r"masks have no place.*\n.*TensorDict\n.*Chat\n.*return_mask=True"):
        tdf.pad_sequence([Chat(torch.ones(1), "a")], return_mask=True)
    inner = TensorDict({"l": tdf.lazy_stack(rows(1, 2))}, [2])
    with pytest.raises(UnsupportedError, match=r"'l' is lazy.\n.*trees\n.*LazyStack\n.*pad\(\)"):
        tdf.pad_sequence([inner, inner])
    with pytest.raises(UnsupportedError, match=r"pad_sequence: these are lazy"):
        tdf.pad_sequence([inner["l"]], return_mask=True)
    with pytest.raises(LeafMismatchError, match=r"'n.ids'.\n.*int64\n.*0.5"):
        tdf.pad_sequence(rows(1, 2), padding_value=0.5)
