"""Functions of the public module as a type checker must read them."""

from typing import assert_type

import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict


class Batch(TensorClass):
    image: torch.Tensor


def check() -> None:
    """Types that are inferred, and a mistake."""
    model = nn.Linear(2, 3)
    apply, params, buffers = tdf.functional(model)
    stacked = tdf.stack_modules([model, model])
    batch = Batch(torch.zeros(2), batch_size=[2])
    state = tdf.optim.adam(lr=0.1).init(params)

    assert_type(apply, tdf.Apply)
    assert_type(params, TensorDict)
    assert_type(buffers, TensorDict)
    assert_type(tdf.from_module(model), TensorDict)
    assert_type(TensorDict.from_module(model), TensorDict)
    assert_type(stacked, TensorDict)
    assert_type(tdf.init_ensemble(lambda: nn.Linear(2, 3), 4), TensorDict)
    assert_type(tdf.unstack(stacked), tuple[TensorDict, ...])
    assert_type(tdf.split(stacked), tuple[TensorDict, TensorDict])
    assert_type(tdf.combine(*tdf.partition(params, "weight")), TensorDict)
    assert_type(tdf.load("params.safetensors"), TensorDict)
    assert_type(TensorDict.load("params.safetensors"), TensorDict)
    assert_type(Batch.load("batch.safetensors"), Batch)
    assert_type(state, TensorDict)
    assert_type(tdf.optim.adam(lr=0.1).update(params, params, state), tuple[TensorDict, TensorDict])
    assert_type(params.at[tdf.Filter("bias")].set(0), TensorDict)
    assert_type(params.at[0].add(1), TensorDict)
    assert_type(batch.at["image"].set(0), Batch)
    assert_type(tdf.stack([params, params]), TensorDict)
    assert_type(tdf.in_dims(params, {"*": 0}), TensorDict)
    assert_type(TensorDict.from_dict({"a": 1}), TensorDict)
    print(params.wieght)  # error: reportAttributeAccessIssue
