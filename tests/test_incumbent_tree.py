"""What tensordict 0.14.3 gets wrong in trees, pytrees and vmap, beside what tdfunc does.

Each test shows both, so that the claim is real; should tensordict mend one, its half fails and the row can go.
"""

import subprocess
import sys

import optree
import pytest
import torch
from torch import Size
from torch.utils import _pytree as pytree

from tdfunc import (
    BatchSizeError,
    ImmutableError,
    LeafMismatchError,
    MissingKeyError,
    TensorDict,
    TreeStructureError,
    lazy_stack,
)
from tests.incumbent import Incumbent, tensordict

A, B = torch.arange(3.0), torch.arange(6.0).reshape(3, 2)


def run_fresh(code):
    """Run code in an interpreter of its own, where tensordict may replace parts of torch."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- pytrees ----------------------------------------------------------------------------------------------------


def test_order_of_keys_is_no_structure():
    """Two trees with the same keys could not be mapped together."""
    ours = TensorDict({"a": A, "b": B}), TensorDict({"b": B, "a": A})

    assert torch.equal(pytree.tree_map(torch.add, *ours)["b"], 2 * B)
    with pytest.raises(ValueError, match="Node"):
        pytree.tree_map(torch.add, Incumbent({"a": A, "b": B}), Incumbent({"b": B, "a": A}))


def test_batch_size_is_no_structure():
    """Two trees of one structure and other batch sizes could not be mapped together."""
    assert pytree.tree_map(lambda x, _: x, TensorDict({"a": A}, [3]), TensorDict({"a": A})).batch_size == Size([3])
    with pytest.raises(ValueError, match="Node"):
        pytree.tree_map(lambda x, _: x, Incumbent({"a": A}, [3]), Incumbent({"a": A}))


def test_batch_size_after_a_map():
    """A map that drops the batch would guess the new batch size from the features."""
    both = [cls({"a": torch.zeros(3, 2, 2), "b": torch.zeros(3, 2)}, [3]) for cls in (TensorDict, Incumbent)]
    ours, theirs = (pytree.tree_map(lambda x: x[0], tree) for tree in both)

    assert ours.batch_size == Size([])
    assert theirs.batch_size == Size([2])


def test_names_after_a_map():
    """One map would change the names that a later one gives."""
    spec = pytree.tree_structure(TensorDict({"a": A}, [3], names=["t"]))
    their_spec = pytree.tree_structure(Incumbent({"a": A}, [3], names=["t"]))
    for structure in (spec, their_spec):
        pytree.tree_unflatten([A[0]], structure)

    assert pytree.tree_unflatten([A], spec).names == ["t"]
    assert pytree.tree_unflatten([A], their_spec).names == [None]


def test_none_is_a_leaf():
    """A map to None would lose the whole tree."""
    assert pytree.tree_map(lambda _: None, TensorDict({"a": A}))["a"] is None
    assert pytree.tree_map(lambda _: None, Incumbent({"a": A})) is None


def test_leaves_that_are_no_tensors():
    """A tree of strings could not be printed."""
    assert "a: 'x'" in repr(pytree.tree_map(lambda _: "x", TensorDict({"a": A})))
    assert "x" not in repr(pytree.tree_map(lambda _: "x", Incumbent({"a": A})))


def test_optree():
    """Optree would see a tree as one leaf."""
    theirs = Incumbent({"a": A})

    assert optree.tree_leaves(TensorDict({"a": A}))[0] is A
    assert optree.tree_leaves(theirs)[0] is theirs


def test_import_leaves_torch_alone():
    """Importing the library would replace parts of torch."""
    code = """
import torch._functorch.vmap as v
import {0}
print(v._create_batched_inputs.__module__, v._unwrap_batched.__module__, v._process_batched_inputs.__module__)
"""

    assert run_fresh(code.format("tdfunc")) == " ".join(["torch._functorch.vmap"] * 3)
    assert "tensordict" in run_fresh(code.format("tensordict"))


def test_arithmetic_in_vmap():
    """`td + 1` would fail inside vmap."""
    code = """
import torch
from {0} import TensorDict
print(torch.vmap(lambda t: t + 1)(TensorDict({{"a": torch.zeros(3)}}, [3]))["a"].tolist())
"""

    assert run_fresh(code.format("tdfunc")) == "[1.0, 1.0, 1.0]"
    with pytest.raises(AssertionError, match="Batching rule not implemented for aten::_foreach_add"):
        run_fresh(code.format("tensordict"))


# -- the container ----------------------------------------------------------------------------------------------


def test_iterating_without_a_batch():
    """Iterating over a tree of batch size [] would not say why it cannot."""
    with pytest.raises(TypeError, match=r"batch size \[\] has no rows"):
        list(TensorDict({"a": A}))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Incumbent({"a": A}))


@pytest.mark.parametrize("key", [0, ()])
def test_bad_keys(key):
    """A key that is no str would raise about something else."""
    with pytest.raises(TypeError, match="A key must be a str"):
        TensorDict({key: A})
    with pytest.raises((IndexError, TypeError, KeyError)) as caught:
        Incumbent({key: A})
    assert "key must be" not in str(caught.value).lower()


def test_keys_named_like_arguments():
    """A key could not be called as an argument of the constructor."""
    tree = TensorDict({"batch_size": A, "keys": A}, [3]).set("names", A)

    assert set(tree.keys()) == {"batch_size", "keys", "names"}
    assert tree["batch_size"] is A


@pytest.mark.parametrize("key", ["a..b", ".a", "a."])
def test_unflatten_makes_no_empty_keys(key):
    """Splitting at a separator would make keys of no letters."""
    assert list(TensorDict({key: A}).unflatten_keys(".").keys()) == [key]
    assert any("" in path for path in Incumbent({key: A}).unflatten_keys(".").keys(True, True))


def test_set_in_place_checks_shapes():
    """A value that does not fit would be refused by one and cut by the other."""
    with pytest.raises(LeafMismatchError, match=r"shape \[3\](.|\n)*shape \[2\]"):
        TensorDict({"a": A.clone()}).set_("a", torch.zeros(2))


def test_index_assignment_is_refused():
    """An assignment to rows would write into the caller's tensor."""
    mine, theirs = A.clone(), A.clone()
    with pytest.raises(ImmutableError, match=r"td.at\[index\].set"):
        TensorDict({"a": mine}, [3])[0] = TensorDict({"a": torch.tensor(9.0)})
    Incumbent({"a": theirs}, [3])[0] = Incumbent({"a": torch.tensor(9.0)})

    assert mine[0] == 0
    assert theirs[0] == 9


def test_locked_is_not_immutable():
    """A tree that says it cannot change would change."""
    theirs = Incumbent({"a": A.clone()}, [3]).lock_()
    theirs.batch_size = []
    theirs.zero_()

    assert theirs["a"].sum() == 0
    with pytest.raises(ImmutableError, match="with_batch_size"):
        TensorDict({"a": A}, [3]).batch_size = []


def test_tensor_operands_meet_the_batch():
    """A tensor operand would meet the batch dimensions of one library and the features of the other."""
    ours, theirs = (cls({"b": B}, [3]) + A for cls in (TensorDict, Incumbent))

    assert torch.equal(ours["b"], B + A[:, None])
    assert torch.equal(theirs["b"], ours["b"])
    with pytest.raises(BatchSizeError, match=r"broadcasts to \[3\](.|\n)*shape \[2\]"):
        TensorDict({"b": B}, [3]) + torch.zeros(2)


def test_comparing_trees_with_other_keys():
    """Comparing would not say which keys differ; and a tree could not be put in a set."""
    with pytest.raises(TreeStructureError, match=r"\['a'\](.|\n)*\['b'\]"):
        assert TensorDict({"a": A}) == TensorDict({"b": A})
    with pytest.raises(KeyError):
        assert Incumbent({"a": A}) == Incumbent({"b": A})

    assert len({TensorDict({"a": A}), TensorDict({"a": A})}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Incumbent({"a": A}))


def test_preallocation_has_no_silent_zeros():
    """A key that first comes with a later row would be zero in the earlier ones."""
    ours, theirs = TensorDict({}, [2]), Incumbent({}, [2])
    ours = ours.at[0].set_({"a": 1.0})
    theirs[0] = Incumbent({"a": torch.tensor(1.0)})
    theirs[1] = Incumbent({"a": torch.tensor(1.0), "new": torch.tensor(1.0)})

    assert theirs["new"].tolist() == [0, 1]
    with pytest.raises(MissingKeyError, match=r"\['a'\](.|\n)*\['a', 'new'\]"):
        ours.at[1].set_({"a": 1.0, "new": 1.0})


def test_missing_dimensions_of_reductions():
    """A reduction over a dimension that cannot be would raise about strings and ints."""
    with pytest.raises(TypeError, match="'<' not supported"):
        Incumbent({"a": B}, [3]).sum(dim="x")
    with pytest.raises(ValueError, match="'feature'(.|\n)*'x'"):
        TensorDict({"a": B}, [3]).sum(dim="x")


def test_lost_entry():
    """Moving an entry under itself would lose it."""
    tree = {"a": {"b": A}}

    assert TensorDict(tree).rename_key("a", ("a", "in"))["a", "in", "b"] is A
    assert Incumbent(tree).rename_key_("a", ("a", "in")).is_empty()


def test_silent_broadcast():
    """Leaves of two trees would be aligned batch against features, and give numbers."""
    square, row = torch.arange(9.0).reshape(3, 3), torch.arange(3.0)

    assert torch.equal((Incumbent({"a": square}, [3]) + Incumbent({"a": row}, [3]))["a"], square + row)
    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*\[3, 3\](.|\n)*\[3\]"):
        TensorDict({"a": square}, [3]) + TensorDict({"a": row}, [3])


# -- ragged data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_a_ragged_field_reads_alike_whatever_the_lengths(lengths):
    """Code that works on one batch would fail on the next, as in tensordict, where it is a tensor or an error."""
    ours = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in lengths])
    theirs = tensordict.lazy_stack([Incumbent({"x": torch.zeros(n)}, []) for n in lengths])

    assert [len(x) for x in ours["x"]] == list(lengths)
    assert type(ours["x"]) is tuple
    assert reads(theirs, "x") == (len(set(lengths)) == 1)


def reads(tree, key):
    """Whether a key can be read."""
    try:
        tree[key]
    except RuntimeError:
        return False
    return True
