"""Writes into existing storage: where they go, values that share memory with leaves, lazy stacks."""

import numpy as np
import pytest
import torch
from torch import nn

from tdfunc import LeafMismatchError, TensorDict, TieError, from_module, lazy_stack


def ragged():
    """Two trees of different lengths."""
    return lazy_stack([TensorDict({"x": torch.zeros(n), "n": {"y": torch.zeros(2)}}) for n in (1, 2)])


@pytest.fixture
def stored():
    """A Parameter, two nested leaves and one of bytes."""
    inner = {"b": torch.zeros(3, 2), "c": torch.zeros(3)}
    return TensorDict({"a": nn.Parameter(torch.arange(3.0)), "n": inner, "i": torch.zeros(3, dtype=torch.uint8)}, [3])


def test_set_writes_to_the_storage(stored):
    """`set_` writes into the memory of the leaf, in its dtype, without history, and returns the tree."""
    a = stored["a"]

    assert stored.set_("a", torch.tensor([5, 6, 7])) is stored
    assert a.tolist() == [5, 6, 7]
    assert a.grad_fn is None
    assert stored.set_("i", 7)["i"].tolist() == [7, 7, 7]


def test_set_in_place_writes_to_the_storage(stored):
    """`set` with `inplace` writes into the memory of the leaf and returns the tree."""
    a = stored["a"]

    assert stored.set("a", 1.0, inplace=True) is stored
    assert a.tolist() == [1, 1, 1]


def test_set_writes_to_the_storage_of_a_tree(stored):
    """`set_` of a tree writes into its leaves."""
    b, c = stored["n", "b"], stored["n", "c"]
    b.fill_(3)

    assert stored.set_("n", {"b": torch.zeros(3, 2), "c": c}) is stored
    assert (b == 0).all()


def test_update_and_copy_write_to_the_storage(stored):
    """`update_` and `copy_` write into the memory of each leaf and return the tree."""
    a, b, c = stored["a"], stored["n", "b"], stored["n", "c"]
    stored.set_("a", 1.0)

    assert stored.update_({"n": {"b": torch.ones(3, 2)}, ("n", "c"): torch.ones(3)}) is stored
    assert stored.copy_(stored.clone() * 2) is stored
    assert a.tolist() == c.tolist() == [2, 2, 2]
    assert (b == 2).all()


def test_rows_in_place():
    """A preallocated tree is written row by row in one memory."""
    td = TensorDict({}, [4])
    td = td.at[1].set_({"a": torch.ones(2), "n": {"b": 5}, "s": "x"})
    leaf = td["a"]

    assert td.at[2].set_({"a": torch.full((2,), 3.0), "n": {"b": 6}, "s": "x"}) is td
    assert leaf.tolist() == [[0, 0], [1, 1], [3, 3], [0, 0]]
    assert td["n", "b"].tolist() == [0, 5, 6, 0]


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.update_({"a": td["b"], "b": td["a"]}),
        lambda td: td.copy_(TensorDict({"a": td["b"], "b": td["a"]}, [2])),
        lambda td: td.at[:].set_({"a": td["b"], "b": td["a"]}),
        lambda td: TensorDict({"n": td}).set_("n", TensorDict({"a": td["b"], "b": td["a"]}, [2])),
        # Inside vmap the memory of tensors cannot be compared, and values are copied.
        lambda td: torch.vmap(lambda row: row.update_({"a": row["b"], "b": row["a"]}))(td),
    ],
)
@pytest.mark.parametrize("apart", [True, False])
def test_two_leaves_can_be_swapped(write, apart):
    """Values are read before the first write."""
    both = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    td = TensorDict({"a": both[0], "b": both[1]}, [2])
    td = td.clone() if apart else td

    write(td)

    assert td["a"].tolist() == [2.0, 2.0]
    assert td["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda td: td.set_("n", {"a": torch.ones(2)}), KeyError, "different keys; nothing was written"),
        (lambda td: td.update_({"n": torch.ones(2)}), ValueError, "'n' is a tree in one tree and a leaf in the other"),
    ],
)
def test_trees_of_other_keys_are_not_written(write, error, message):
    """A sub-tree is written whole; a leaf in place of a tree is named."""
    td = TensorDict({"n": {"a": torch.zeros(2), "b": torch.zeros(2)}})

    with pytest.raises(error, match=message):
        write(td)
    assert not td["n", "a"].any()


def test_tied_paths_take_one_value():
    """Two values for one tensor are refused, and equal ones are written."""
    layer = nn.Linear(2, 2, bias=False)
    tree = from_module(nn.ModuleDict({"a": layer, "b": layer})).detach()
    stacked, leaf = torch.stack([tree, tree]), torch.zeros(2)

    with pytest.raises(TieError, match=r"'a.weight' and 'b.weight' are given different values; nothing was written"):
        tree.update_({"a": {"weight": torch.zeros(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    with pytest.raises(TieError, match=r"'a.weight' and 'b.weight' are given different values; nothing was written"):
        stacked.at[0].set_({"a": {"weight": torch.zeros(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    stacked.at[0].set_({"a": {"weight": torch.ones(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    assert stacked["b", "weight"][0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    # Without a tie it is still one tensor.
    with pytest.raises(TieError, match=r"'a' and 'b' are given different values"):
        TensorDict({"a": leaf, "b": leaf}).update_({"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    assert leaf.tolist() == [0.0, 0.0]


def around(stack):
    """A tree with a dense leaf and a lazy stack of two trees side by side, and one deeper down."""
    return TensorDict({"a": torch.zeros(2, 3), "l": stack, "d": {"l": ragged()}}, [2])


def test_a_number_and_a_tensor_as_a_row():
    """`at[i].set_` takes the rows that `at[i].set` takes."""
    assert TensorDict({"x": torch.zeros(2, 3)}, [2]).at[0].set_(5)["x"].tolist() == [[5.0] * 3, [0.0] * 3]
    assert TensorDict({"x": torch.zeros(2, 2)}, [2]).at[:].set_(torch.arange(2.0))["x"].tolist() == [[0, 0], [1, 1]]
    with pytest.raises(LeafMismatchError, match="altered(.|\n)*int64"):
        TensorDict({"x": torch.zeros(2, dtype=torch.int64)}, [2]).at[0].set_(0.5)


def test_rows_with_the_values_that_are_there():
    """A row with the non-tensor values that are there can be written back."""
    tree = TensorDict({"x": torch.zeros(2), "s": ["a", "b"], "t": "all"}, [2])

    assert tree.at[0].set_(tree[0] + 1)["x"].tolist() == [1.0, 0.0]
    with pytest.raises(LeafMismatchError, match=r"'s' is not a tensor(.|\n)*'a', 'b'(.|\n)*data=b"):
        tree.at[0].set_(tree[1])


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.set_(("l", "x"), [torch.ones(1), torch.full((2,), 2.0)]),
        lambda t: t.update_({"l": {"x": [torch.ones(1), torch.full((2,), 2.0)]}}),
        lambda t: t.update_({("l", "x"): (torch.ones(1), torch.full((2,), 2.0))}),
        lambda t: t.update_({"l": lazy_stack([TensorDict({"x": torch.full((n,), float(n))}) for n in (1, 2)])}),
        lambda t: t.set_("l", ragged().set("x", [torch.ones(1), torch.full((2,), 2.0)])),
        lambda t: t.set_("l", [t["l"][i].set("x", torch.full((i + 1,), i + 1.0)) for i in (0, 1)]),
        lambda t: t["l"].set_("x", [torch.ones(1), torch.full((2,), 2.0)]),
        lambda t: t["l"].update_({"x": [torch.ones(1), torch.full((2,), 2.0)]}),
        lambda t: t["l"].set_("x", torch.tensor([[1.0], [2.0]])),
    ],
)
def test_writes_to_every_tree_of_a_lazy_stack(write):
    """A key of a lazy stack is a tuple of tensors, and a write reaches each of them."""
    tree = around(ragged())
    storage = tree["l", "x"]

    write(tree)

    assert [x.tolist() for x in storage] == [[1.0], [2.0, 2.0]]
    assert not tree["d", "l", "x"][1].any()


def test_writes_to_a_lazy_stack_change_nothing_or_all():
    """The values for all trees are checked before the first write."""
    tree = around(ragged())

    with pytest.raises(LeafMismatchError, match=r"set_ 'l.1.x'(.|\n)*shape \[2\](.|\n)*shape \[7\]"):
        tree.set_(("l", "x"), [torch.ones(1), torch.ones(7)])
    with pytest.raises(LeafMismatchError, match=r"'l.1.x': the values do not fit(.|\n)*\[2\](.|\n)*\[7\]"):
        tree.update_({"l": {"x": [torch.ones(1), torch.ones(7)]}})
    with pytest.raises(LeafMismatchError, match=r"only tensors have storage(.|\n)*NonTensorData"):
        lazy_stack([TensorDict({"s": "a"}), TensorDict({"s": "b"})]).set_("s", "c")
    assert not tree["l", "x"][0].any()


@pytest.mark.parametrize("call", ["update_", "copy_"])
def test_lazy_and_dense_trees_in_place(call):
    """A dense tree fills a lazy stack, and not the other way round."""
    dense = TensorDict({"n": TensorDict({"x": torch.zeros(2, 3)}, [2])}, [2])
    rows = lazy_stack([row["n"] + 1 for row in dense.unbind(0)])
    stack = lazy_stack([row["n"].clone() for row in dense.unbind(0)])

    with pytest.raises(LeafMismatchError, match=rf"^{call}: a lazy stack has no one tensor.* at 'n'."):
        getattr(dense, call)({"n": rows})
    with pytest.raises(LeafMismatchError, match=rf"^{call}: a lazy stack has no one tensor.* at 'n'.\n"):
        getattr(dense, call)(dense.set("n", rows))
    with pytest.raises(LeafMismatchError, match=r"^at\[...\].set_?: a lazy stack has no one tensor"):
        getattr(dense["n"].at[:], "set_" if call == "copy_" else "set")(rows)
    getattr(TensorDict({"n": stack}, [2]), call)(dense + 4)
    assert [x.tolist() for x in stack["x"]] == [[4.0] * 3] * 2
    assert not dense["n", "x"].any()


# -- values in memory that is written to ------------------------------------------------------------------------


def shift_tree(write):
    """Write rows 0 to 3 of a leaf to its rows 1 to 4 beside another leaf, and return both leaves."""
    both, other = torch.arange(5.0), torch.zeros(4)
    write(TensorDict({"a": other, "b": both[1:]}, [4]), TensorDict({"a": torch.ones(4), "b": both[:-1]}, [4]))
    return other.tolist(), both.tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda td, new: td.update_(new),
        lambda td, new: td.copy_(new),
        lambda td, new: td.at[:].set_(new),
        lambda td, new: td.at[torch.arange(4)].set_(new),
        lambda td, new: TensorDict({"n": td}).set_("n", new),
        lambda td, new: td.set_("a", new["a"]).set_("b", new["b"]),
    ],
)
def test_values_that_overlap_their_leaf(write):
    """A value that lies partly in its leaf's own memory is copied before."""
    assert shift_tree(write) == ([1.0] * 4, [0.0, 0.0, 1.0, 2.0, 3.0])


def test_one_file_mapped_twice(tmp_path):
    """Two mappings of one file are at two addresses, and their overlap is found by file."""
    td = TensorDict({"x": torch.arange(100_000.0)}, [100_000]).memmap(tmp_path / "d")
    again = TensorDict.load_memmap(tmp_path / "d", mode="r+")

    td[1:].update_(again[:-1])

    assert torch.equal(td["x"][1:], torch.arange(99_999.0))
    assert td["x"][0] == 0


def leaves_of_zeros():
    """Two leaves of four rows, one nested."""
    return TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4])


each_wrong_index = pytest.mark.parametrize(
    "index", [torch.tensor([0, 7]), [0, -5], torch.tensor([[0], [4]], dtype=torch.int32)]
)


@each_wrong_index
def test_positions_are_checked_before_the_first_write(index):
    """A position that is out of range is found before any leaf is written."""
    td = leaves_of_zeros()
    row = td[:1] + 1

    with pytest.raises(IndexError, match=r"index: (7|-5|4) is out of range for batch dimension 0.\n.*-4 <= index < 4"):
        td.at[index].set_(row.expand(*np.shape(index)))
    assert not td.any()


@each_wrong_index
@pytest.mark.parametrize(("trees", "dim"), [(2, 1), (4, 0)], ids=["in each tree", "of trees"])
def test_positions_in_lazy_stacks_are_checked_before_the_first_write(index, trees, dim):
    """A position that is out of range in a lazy stack is found before any leaf is written."""
    td = leaves_of_zeros()
    row, stack = td[:1] + 1, lazy_stack([td, *[td.clone() for _ in range(trees - 1)]], dim)
    size = {1: trees, 0: 4}[dim]

    with pytest.raises(IndexError, match=r"index: (7|-5|4) is out of range for batch dimension 0"):
        stack.at[index].set_(row.expand(*np.shape(index), size))
    assert not td.any()


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda td: td.update_({"a": torch.ones(4), "n": {"b": torch.ones(4)}}), "'n.b'"),
        (lambda td: td.copy_(td + 1), "'n.b'"),
        (lambda td: td.at[0].set_(1.0), r"at\[...\].set_ 'n.b'"),
        (lambda td: td.set_(("n", "b"), torch.ones(4)), "set_ 'n.b'"),
    ],
)
def test_inference_tensors_are_found_before_the_first_write(write, where):
    """A leaf that torch refuses to write to is found before any leaf is written."""
    with torch.inference_mode():
        made = torch.zeros(4)
    td = TensorDict({"a": torch.zeros(4), "n": {"b": made}}, [4])

    with pytest.raises(LeafMismatchError, match=where + r": the leaf was made in inference mode(.|\n)*td.clone\(\)"):
        write(td)
    assert td["a"].tolist() == [0.0] * 4
    with torch.inference_mode():
        write(td)
    assert td["n", "b"][0] == 1.0


def frozen(shape):
    """An array that cannot be written to, as `np.load(mmap_mode="r")` gives."""
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda td: td.update_({"a": torch.ones(4), "n": {"b": torch.ones(4)}}), "'n.b'"),
        (lambda td: td.copy_(td + 1), "'n.b'"),
        (lambda td: td.at[0].set_(1.0), r"at\[...\].set_ 'n.b'"),
        (lambda td: td.set_(("n", "b"), torch.ones(4)), "set_ 'n.b'"),
        (lambda td: td[2:].set_(("n", "b"), torch.ones(2)), "set_ 'n.b'"),
        (lambda td: td.view(2, 2).detach().update_({"n": {"b": torch.ones(2, 2)}}), "'n.b'"),
    ],
)
def test_read_only_arrays_are_found_before_the_first_write(write, where):
    """A write to a read-only map would end the process, also through a view."""
    array = frozen(4)
    td = TensorDict({"a": torch.zeros(4), "n": {"b": array}}, [4])

    with pytest.raises(LeafMismatchError, match=where + r": the leaf is on a read-only array(.|\n)*td.clone\(\)"):
        write(td)
    assert td["a"].tolist() == [0.0] * 4
    assert array.tolist() == [0.0] * 4


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "copy",
    [
        lambda td: td.clone(),
        lambda td: td.to(torch.float64),
        lambda td: td + 0,
        lambda td: td.share_memory_(),
        lambda td: TensorDict({"n": {"b": np.zeros(4, np.float32)}}, [4]),
        lambda td: TensorDict({"n": {"b": frozen(4)[::-1]}}, [4]),
        lambda td: TensorDict({"n": {"b": frozen(4).astype(">f4")}}, [4]),
    ],
)
def test_copies_of_read_only_arrays_can_be_written_to(copy):
    """What has memory of its own is not the array."""
    td = copy(TensorDict({"n": {"b": frozen(4)}}, [4]))

    assert td.set_(("n", "b"), torch.ones(4))["n", "b"].tolist() == [1.0] * 4
