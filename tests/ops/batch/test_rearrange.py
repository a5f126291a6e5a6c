"""Rows in another order or number; the law of `test_shape.py` compares their leaves with torch's."""

import torch

from tdfunc import TensorDict, pad


def test_pad_keeps_one_value_for_all():
    """One string for all rows stays one, and a number that an integer can hold pads integers."""
    td = pad(TensorDict({"a": torch.ones(2, dtype=torch.int32), "s": "x"}, [2]), (0, 1), value=-1)

    marks = pad(TensorDict({"b": torch.zeros(1, dtype=torch.bool), "c": torch.zeros(1) * 1j}, [1]), (0, 1), 1)
    assert td["a"].tolist() == [1, 1, -1]
    assert td["s"] == "x"
    assert [leaf.tolist() for leaf in marks.leaves()] == [[False, True], [0, 1]]
