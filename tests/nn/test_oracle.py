"""Random graphs of modules give what tensordict's modules give on the same numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc.nn as ours
from tdfunc import TensorDict
from tests.helpers import assert_pure
from tests.nn.graphs import KEYS, assert_same_entries, inputs, modules, outcome, sequences, theirs


@given(modules(), inputs())
def test_a_module(pair, trees):
    """A module reads, computes and adds the same, or misses a key in both libraries."""
    (mine, other), (tree, data) = pair, trees
    expected = outcome(other, data.clone())
    out = outcome(assert_pure, mine, tree)

    assert (out is None) == (expected is None)
    if out is not None:
        assert_same_entries(out, expected)
        assert out.batch_size == tree.batch_size


@given(sequences(), inputs())
def test_a_sequence(pair, trees):
    """So do sequences, nested ones too, whose keys and state dicts are the same."""
    (mine, other), (tree, data) = pair, trees
    expected = outcome(other, data.clone())
    out = outcome(assert_pure, mine, tree)

    assert mine.in_keys == other.in_keys
    assert mine.out_keys == other.out_keys
    assert list(mine.state_dict()) == list(other.state_dict())
    assert (out is None) == (expected is None)
    if out is not None:
        assert_same_entries(out, expected)


@given(sequences(partial_tolerant=True, depth=0), inputs())
def test_a_tolerant_sequence(pair, trees):
    """With missing keys, the modules that can run do."""
    (mine, other), (tree, data) = pair, trees

    assert_same_entries(mine(tree), other(data.clone()))


@given(sequences(), inputs(), st.data())
def test_selected_out_keys(pair, trees, data):
    """A selection leaves the input and the selected outputs, however it is made."""
    (mine, other), (tree, theirs_in) = pair, trees
    keys = [key for key in data.draw(st.lists(st.sampled_from(mine.out_keys), unique=True)) if key != "_"]
    selected = mine.select_out_keys(*keys)
    out, expected = outcome(selected, tree), outcome(other, theirs_in.clone())

    assert selected.out_keys == keys
    assert selected.out_keys_source == mine.out_keys
    assert (out is None) == (expected is None)
    if out is not None:
        assert_same_entries(out, tree.update({key: expected[key] for key in keys}))
        assert_same_entries(selected.reset_out_keys()(tree), mine(tree))
        again = ours.TensorDictSequential(mine, selected_out_keys=keys)
        assert_same_entries(again(tree), out)


# tensordict raises for a sequence of names that holds a sequence.
@given(sequences(named=st.just(False)) | sequences(depth=0), st.data())
def test_a_subsequence(pair, data):
    """The same modules are left for the same keys, in nested sequences too."""
    mine, other = pair
    chosen = [
        data.draw(st.none() | st.lists(st.sampled_from(KEYS), unique=True, min_size=1)) for _ in ("in_keys", "out_keys")
    ]
    part, expected = (outcome(each.select_subsequence, *chosen) for each in pair)

    assert (part is None) == (expected is None)
    if part is not None:
        assert list(part.state_dict()) == list(expected.state_dict())
        assert part.in_keys == expected.in_keys
        assert part.out_keys == expected.out_keys
        assert part.module._modules.keys() == expected.module._modules.keys()
        assert {*map(id, part.parameters())} <= {*map(id, mine.parameters())}


@given(sequences(), inputs())
def test_values_in_place_of_a_tree(pair, trees):
    """Called with values, in order or by keyword, a sequence returns values, but those that are thrown away."""
    (mine, other), (tree, data) = pair, trees
    if not mine.in_keys or not all(key in tree for key in mine.in_keys):
        return
    values = [tree[key] for key in mine.in_keys]
    names = ["_".join(key) if isinstance(key, tuple) else key for key in mine.in_keys]
    out = other(data.clone())
    expected = [out[key] for key in other.out_keys if key != "_"]

    in_order, by_keyword = mine(*values), mine(**dict(zip(names, values, strict=True)))
    found = [list(result) if isinstance(result, tuple) else [result] for result in (in_order, by_keyword)]
    torch.testing.assert_close(found, [expected, expected], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_reset_parameters_recursive(seed):
    """New values are drawn in the same order from torch's generator, in a module and in a tree."""

    def make(nn_of):
        net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Conv1d(2, 3, 1)), nn.LSTM(2, 3))
        return nn_of.TensorDictSequential(
            nn_of.TensorDictModule(net, ["x"], ["y"]),
            nn_of.TensorDictModule(nn.Sequential(nn.Embedding(3, 2)), ["y"], ["z"]),
        )

    def reset(module):
        torch.manual_seed(seed)
        return module.reset_parameters_recursive()

    mine, other = make(ours), make(theirs)

    assert reset(mine) is None
    assert reset(other) is None
    torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("other", [{"a": torch.ones(3)}, {"b": torch.zeros(3)}], ids=["value", "path"])
def test_entries_that_differ_are_found(other):
    """The comparison of entries fails for another value, and for another path."""
    with pytest.raises(AssertionError):
        assert_same_entries(TensorDict({"a": torch.zeros(3)}), TensorDict(other))
