"""Trees from and to pandas, against tensordict's and against data that a frame or numpy cannot hold."""

import builtins

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor

import tdfunc as tdf
from tdfunc import BatchSizeError, LeafMismatchError, MissingKeyError, TensorClass, TensorDict, TreeStructureError
from tests.helpers import assert_trees_equal
from tests.incumbent import Incumbent

TREE = TensorDict(
    {
        "i": torch.tensor([3, 1]),
        "n": {"f": torch.tensor([0.5, 2.0]), "b": torch.tensor([True, False])},
        "s": ["p", "q"],
    },
    [2],
)


class Row(TensorClass):
    """A typed row."""

    x: Tensor
    name: str


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(allow_nan=True, width=32), st.text()), max_size=5))
def test_round_trip(rows):
    """A value, dtype, nested key or row would be lost on the way."""
    ints, floats, texts = ([row[i] for row in rows] for i in range(3))
    leaves = {"i": torch.tensor(ints, dtype=torch.int64), "n": {"f": torch.tensor(floats, dtype=torch.float32)}}
    strings = tdf.NonTensorStack(*texts) if texts else torch.zeros(0)
    tree = TensorDict({**leaves, ("n", "s"): strings}, [len(rows)])
    frame = tree.to_pandas(separator="/")

    assert list(frame.columns) == ["i", "n/f", "n/s"]
    assert_trees_equal(TensorDict.from_pandas(frame, separator="/"), tree)


def test_same_as_the_incumbent():
    """A user of tensordict would get another frame, or another tree from one."""
    data = {"i": torch.tensor([3, 1]), "n": {"f": torch.tensor([0.5, 2.0])}}
    frame = TensorDict(data, [2]).to_pandas(separator=".")
    theirs = Incumbent(data, [2]).to_pandas(separator=".")

    pd.testing.assert_frame_equal(frame, theirs, check_index_type=False)
    ours, back = (cls.from_pandas(theirs, separator=".", dtype=torch.float64) for cls in (TensorDict, Incumbent))
    assert ours.batch_size == back.batch_size
    for key in ("i", ("n", "f")):
        assert torch.equal(ours[key], back[key])
        assert ours[key].dtype is back[key].dtype


def test_kinds_of_trees():
    """A typed tree, a lazy one, one value for all rows or a leaf with a history would be refused."""
    frame = Row(torch.ones(2, requires_grad=True), "all", batch_size=[2]).to_pandas()
    lazy = tdf.lazy_stack([TensorDict({"x": torch.tensor(i)}) for i in range(3)])

    assert frame["name"].tolist() == ["all", "all"]
    assert frame["x"].tolist() == [1.0, 1.0]
    assert lazy.dense().to_pandas()["x"].tolist() == [0, 1, 2]
    assert len(TensorDict({}, [3]).to_pandas()) == 3
    assert TensorDict({"z": torch.tensor([1j, 2])}, [2]).to_pandas()["z"].tolist() == [1j, 2 + 0j]


def test_columns_of_other_things():
    """Dates, categories or lists would be cast, a missing number be a number, or a frame's own memory be shared."""
    column = np.arange(2)
    frame = pd.DataFrame({"i": column, "d": pd.to_datetime(["2020-01-01", "2021-01-01"]), "l": [[1, 2], [3]]})
    frame["c"], frame["m"] = pd.Categorical(["u", "v"]), pd.array([1, None], dtype="Int64")
    tree = TensorDict.from_pandas(frame)
    tree["i"].add_(1)

    assert frame["i"].tolist() == column.tolist() == [0, 1]
    assert tree["d"] == [pd.Timestamp("2020-01-01"), pd.Timestamp("2021-01-01")]
    assert tree["c"] == ["u", "v"]
    assert tree["l"] == [[1, 2], [3]]
    assert str(tree["m"].tolist()) == "[1.0, nan]"
    assert TensorDict.from_pandas(frame[["i"]], batch_size=[], device="cpu").batch_size == Size([])
    assert TensorDict.from_pandas(frame[["i"]], names=["row"]).names == ["row"]


def test_missing_values():
    """An integer beside a missing value would be another one, or a missing value be a number or False."""
    frame = pd.DataFrame({"i": pd.array([2**53, None, -(2**60)], dtype="Int64")})
    flags = pd.DataFrame({"b": pd.array([True, None], dtype="boolean"), "u": pd.array([2**63, 2**63 + 1], "UInt64")})
    tree, other = TensorDict.from_pandas(frame), TensorDict.from_pandas(flags)

    assert tree["i"].dtype is torch.float64
    assert tree["i"][[0, 2]].tolist() == [2**53, -(2**60)]
    assert tree["i"][1].isnan()
    assert other["b"] == [True, pd.NA]
    assert other["u"].tolist() == [2**63, 2**63 + 1]
    for name, value in (("Int64", 2**53 + 1), ("Int64", -(2**53) - 1), ("Int64", 2**63 - 1), ("UInt64", 2**64 - 1)):
        wide = pd.DataFrame({"f": pd.array([1, value, None], dtype=name)})
        with pytest.raises(LeafMismatchError, match=rf"'f' lacks values.*\n.*2\*\*53\n.*{value}\n.*fillna"):
            TensorDict.from_pandas(wide)
        assert TensorDict.from_pandas(wide[:2])["f"].tolist() == [1, value]
    for lacking in (frame, pd.DataFrame({"i": [1.0, float("nan")]})):
        with pytest.raises(LeafMismatchError, match=r"'i' lacks values.*\n.*with NaN\n.*torch.int64\n.*dropna"):
            TensorDict.from_pandas(lacking, dtype=torch.int64)
    assert TensorDict.from_pandas(frame, dtype=torch.float32)["i"].dtype is torch.float32


def test_errors():
    """A user could not see which leaf or column does not fit."""
    with pytest.raises(BatchSizeError, match=r"the rows are the batch.\n.*one batch dim.*\n.*\[2, 1\]\n.*reshape"):
        TREE.unsqueeze(1).to_pandas(separator=".")
    with pytest.raises(BatchSizeError, match=r"the rows are the batch.\n.*\n.*\[\]"):
        TREE[0].to_pandas(separator=".")
    with pytest.raises(TreeStructureError, match=r"'n' is a tree.\n.*a leaf\n.*a tree\n.*separator"):
        TREE.to_pandas()
    with pytest.raises(LeafMismatchError, match=r"'x' has features.*\n.*the batch\n.*\[2, 3\]"):
        TensorDict({"x": torch.ones(2, 3)}, [2]).to_pandas()
    with pytest.raises(LeafMismatchError, match=r"'x' is no array of numpy.\n.*of numpy\n.*bfloat16 on cpu\n.*float32"):
        TensorDict({"x": torch.ones(2, dtype=torch.bfloat16)}, [2]).to_pandas()
    with pytest.raises(LeafMismatchError, match=r"'x' is no array.*\n.*values in\n?.*\n.*float32 on meta$"):
        TensorDict({"x": torch.ones(2, device="meta")}, [2]).to_pandas()
    with pytest.raises(TypeError, match=r"name of a column is no str.\n.*a str\n.*0\n.*columns=str"):
        TensorDict.from_pandas(pd.DataFrame([[1, 2]]))
    with pytest.raises(MissingKeyError, match=r"two columns are called 'a'.\n.*differ\n.*'a'"):
        TensorDict.from_pandas(pd.DataFrame([[1, 2]], columns=["a", "a"]))


def test_without_pandas(monkeypatch):
    """The message would not say what to install."""
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"to_pandas: pandas is not installed.\n.*pip install pandas"):
        TREE.to_pandas(separator=".")


def test_an_empty_separator():
    """The error would be Python's, of a text that the user did not split."""
    with pytest.raises(ValueError, match=r"from_pandas: nothing .* an empty text.\n.*one character or more\n.*''"):
        TensorDict.from_pandas(pd.DataFrame({"a": [1]}), separator="")
