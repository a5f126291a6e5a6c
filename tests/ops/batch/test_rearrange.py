"""Rows in another order or number; the law of `test_shape.py` compares their leaves with torch's."""

import torch

from tdfunc import TensorDict, pad
from tests.helpers import assert_trees_equal


def test_transforms():
    """The operations run under vmap and compile, where a tree has the dimensions that are left."""
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    mapped = torch.vmap(lambda t: t.flip(0).repeat(2))(td)
    compiled = torch.compile(lambda t: t.flip(0).repeat(1, 2), fullgraph=True, backend="eager")(td)

    assert_trees_equal(mapped, td.flip(1).repeat(1, 2))
    assert_trees_equal(compiled, td.flip(0).repeat(1, 2))
    assert td.repeat(1, 1) is td


def test_pad_keeps_one_value_for_all():
    """One string for all rows stays one, and a number that an integer can hold pads integers."""
    td = pad(TensorDict({"a": torch.ones(2, dtype=torch.int32), "s": "x"}, [2]), (0, 1), value=-1)

    assert td["a"].tolist() == [1, 1, -1]
    assert td["s"] == "x"
