"""Messages of errors from values and conversions: call, class, pattern."""

import numpy as np
import pandas as pd
import pytest
import torch

import tdfunc as tdf
from tdfunc import (
    BatchSizeError,
    LeafMismatchError,
    MissingKeyError,
    TensorDict,
    TieError,
    TreeStructureError,
    UnsupportedError,
)
from tests.helpers import TiedLM

A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
ONE = TensorDict({"a": A, "b": B, "s": "x"}, [2])
NESTED = TensorDict({"n": {"x": torch.ones(2)}}, [2])


def lacking(kind="Int64", **options):
    """A frame whose column lacks a value, as a tree."""
    return TensorDict.from_pandas(pd.DataFrame({"i": pd.array([2**53 + 1, None], dtype=kind)}), **options)


def tied(value):
    """A tree of tied leaves loaded from values that differ."""
    state = TiedLM().state_dict()
    return TensorDict.from_module(TiedLM()).load_state_dict(state | {"out.weight": state["emb.weight"] + value})


ERRORS = [
    # values
    (lambda: TensorDict({"n": {"k": np.longdouble(1)}}), LeafMismatchError, r"'n.k': numbers must have .*longdouble"),
    (lambda: TensorDict({"k": np.zeros(2, np.clongdouble)}), LeafMismatchError, r"'k': numbers .*clongdouble"),
    (lambda: TensorDict({"k": np.zeros(2, "M8[s]")}), LeafMismatchError, r"'k': numbers .*datetime64.*NonTensorData"),
    (lambda: TensorDict({"k": 2**70}), LeafMismatchError, r"'k': numbers must have a dtype of torch.*Overflow"),
    (lambda: TensorDict({"k": [1, 2**70]}), LeafMismatchError, r"'k': numbers must have a dtype of torch.*Overflow"),
    (lambda: TensorDict({"k": [A, B]}), LeafMismatchError, r"'k': the tensors of a list .*\[2, 3\] .*\[2\]"),
    # from
    (lambda: TensorDict.from_any(3), TypeError, r"from_any: .*a dict.*int"),
    (
        lambda: TensorDict.from_dict({"a": A}, auto_batch_size=True, batch_size=[2]),
        TypeError, r"from_dict: .*auto_batch_size.*both",
    ),
    (lambda: TensorDict.from_dict({"a": A}, batch_dims=1, batch_size=[2]), TypeError, r"from_dict: .*batch_dims"),
    (lambda: TensorDict.from_dict({"a": A}, batch_size=[3]), BatchSizeError, r"'a'.*\[3\].*\[2, 3\]"),
    (lambda: TensorDict.from_any((A, torch.ones(5)), batch_size=[2]), BatchSizeError, "'1': the leading"),
    (lacking, LeafMismatchError, r"'i' lacks values.*Int64.*fillna"),
    (lambda: lacking("Float64", dtype=torch.int64), LeafMismatchError, r"'i' lacks values.*Float64.*fillna"),
    (
        lambda: TensorDict.from_pandas(pd.DataFrame([[1, 2]], columns=["a", "a"])),
        MissingKeyError, r"names of columns must differ.*'a', 'a'",
    ),
    # to
    (
        lambda: TensorDict({"n": {"x": torch.ones(2, dtype=torch.bfloat16)}}).numpy(),
        UnsupportedError, r"numpy: 'n.x' must .*torch.bfloat16, torch.strided, on cpu.*float32",
    ),
    (
        lambda: TensorDict({"x": torch.ones(2, device="meta")}, [2]).to_pandas(),
        UnsupportedError, r"to_pandas: 'x' must .*on meta$",
    ),
    (lambda: TensorDict({"x": torch.eye(2).to_sparse()}).numpy(), UnsupportedError, r"'x' must .*torch.sparse_coo"),
    (lambda: ONE.unsqueeze(1).to_pandas(), BatchSizeError, r"rows are the batch.*\[2, 1\].*reshape"),
    (lambda: NESTED.to_pandas(), TreeStructureError, r"'n' must be a leaf.*TensorDict.*separator"),
    (lambda: ONE.to_pandas(), LeafMismatchError, r"'a' must have one value.*\[2, 3\]"),
    # state dicts
    (
        lambda: ONE.load_state_dict({"a": A, "c": B}), MissingKeyError,
        r"load_state_dict: .*\['a', 'b'\].*missing \['b'\], unexpected \['c'\]",
    ),
    (lambda: ONE.load_state_dict({"a": B, "b": B}), LeafMismatchError, r"'a' must have the shape.*\[2, 3\].*\[2\]"),
    (lambda: ONE.load_state_dict({"a": 3, "b": B}), LeafMismatchError, r"'a' must have the shape.*\[2, 3\].*int"),
    (lambda: tied(1), TieError, r"'emb.weight' and 'out.weight' are one tensor"),
    # batches
    (
        lambda: tdf.collate([TensorDict({"x": torch.ones(n)}) for n in (1, 2)]),
        LeafMismatchError, r"stack: leaf 'x' differs.*\[1\].*\[2\].*lazy_stack",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors_name_the_leaf_and_both_values(call, error, message):
    """A wrong call raises an error that names the leaf, the values and a way out."""
    with pytest.raises(error, match=f"(?s){message}"):
        call()
