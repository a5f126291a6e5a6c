"""Values that become nodes: numbers and arrays of numpy that torch takes in another form, or not at all."""

import numpy as np
import pytest
import torch

from tdfunc import NonTensorData, TensorDict

RECORDS = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f8")])


@pytest.mark.parametrize("rows", [slice(0), slice(1), slice(2)])
def test_fields_of_packed_records(rows):
    """A field whose elements lie in steps of no whole element would end in an error of numpy."""
    array = RECORDS[rows]
    expected = torch.tensor(array["b"].tolist(), dtype=torch.float64)

    assert torch.equal(TensorDict({"b": array["b"]})["b"], expected)
    assert torch.equal(TensorDict.from_struct_array(array)["b"], expected)
    assert torch.equal(TensorDict.from_any({"r": array})["r", "b"], expected)


def test_whole_steps_share_memory():
    """An array that torch can take as it lies would be copied."""
    array = np.arange(6.0)

    assert TensorDict({"a": array[::2]})["a"].data_ptr() == array.ctypes.data
    assert torch.equal(TensorDict({"a": array[::-2]})["a"], torch.tensor([5.0, 3.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("value", "got", "hint"),
    [
        (np.longdouble(1), f"a number of {np.dtype(np.longdouble)}", r"astype\(np.float64\)"),
        (np.zeros(2, "V0"), r"an array of \|V0", r"value.astype\(\.\.\.\)"),
        (np.zeros(2, np.clongdouble), f"an array of {np.dtype(np.clongdouble)}", r"astype\(np.complex128\)"),
        (np.timedelta64(1, "s"), r"a number of timedelta64\[s\]", r"astype\(...\)"),
        (np.zeros(2, "M8[s]"), r"an array of datetime64\[s\]", r"astype\(...\)"),
    ],
)
def test_numbers_that_torch_does_not_have(value, got, hint):
    """The error would not name the key, or not say what to do."""
    what = rf"'n.k': torch has no dtype for these numbers.\n  expected: bools, .*\n  got:      {got}\n  hint: .*{hint}"
    with pytest.raises(TypeError, match=what):
        TensorDict({"n": {"k": value}})

    assert TensorDict({"k": NonTensorData(value)})["k"] is value
