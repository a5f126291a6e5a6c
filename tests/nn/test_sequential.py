"""`TensorDictSequential`: order, names, parts, missing inputs."""

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.nn import TensorDictModule, TensorDictSequential
from tests.helpers import assert_trees_equal


def shift(source, target, by=1.0):
    """A module that adds a number."""
    return TensorDictModule(lambda x: x + by, [source], [target])


def test_an_empty_sequence():
    """No modules, or one of torch's that has keys: no change."""
    td, same = TensorDict({"a": torch.zeros(2)}), nn.Dropout(0.0)
    same.forward, same.in_keys, same.out_keys = (lambda td: td), [], []

    assert TensorDictSequential()(td) is TensorDictSequential(same)(td) is td
    assert TensorDictSequential([]).out_keys == []


def test_parts_by_number_name_and_slice():
    """Parts are the same modules."""
    first, second = shift("a", "b"), shift("b", "c")
    seq, named = TensorDictSequential(first, second), TensorDictSequential({"p": first, "q": second})

    assert seq[0] is named["p"] is named[0] is first
    assert seq[-1] is second
    assert seq[1:].in_keys == ["b"]
    assert list(named[1:].module) == ["q"]


def test_a_selection_inside_stays():
    """A nested sequence with selected outputs is kept whole."""
    inner = TensorDictSequential(shift("a", "b"), shift("b", "c")).select_out_keys("c")
    seq = TensorDictSequential(inner, shift("c", "d"))

    assert seq.out_keys == ["c", "d"]
    assert seq.select_subsequence(out_keys=["d"])[0] is inner
    assert seq(TensorDict({"a": torch.zeros(())})).paths() == [("a",), ("c",), ("d",)]


def test_missing_inputs_leave_modules_out():
    """A tolerant sequence runs what it can; another raises."""
    parts = shift("a", "b"), shift("missing", "c"), shift("b", "d"), shift("c", "e")
    td = TensorDict({"a": torch.zeros(2)})

    assert TensorDictSequential(*parts, partial_tolerant=True)(td).paths() == [("a",), ("b",), ("d",)]
    selected = TensorDictSequential(*parts, partial_tolerant=True, selected_out_keys=["d", "e"])
    assert selected(td).paths() == [("a",), ("d",)]
    with pytest.raises(tdf.MissingKeyError):
        TensorDictSequential(*parts)(td)


def test_missing_inputs_in_a_lazy_stack():
    """Each tree of a lazy stack is run by the modules whose inputs it has."""
    rows = [TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": torch.zeros(3), "x": torch.ones(3)}, [3])]
    seq = TensorDictSequential(shift("a", "b"), shift("x", "y"), partial_tolerant=True)
    out = seq(tdf.lazy_stack(rows))

    assert [list(tree.keys()) for tree in out.trees] == [["a", "b"], ["a", "x", "b", "y"]]
    assert_trees_equal(list(out.trees), [seq(row) for row in rows])
