"""A default device of the user's is where new tensors of the user go, and never where tdfunc counts and indexes."""

import random

import numpy as np
import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.optim import adam, chain, clip_by_global_norm


@pytest.fixture(autouse=True)
def _elsewhere():
    """Let tensors be made on the meta device, which loses all numbers, unless a device is named."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def make_tree():
    """Rows on the CPU, with words beside them."""
    x = torch.arange(6.0, device="cpu").reshape(3, 2)
    return TensorDict({"a": x, "s": tdf.NonTensorStack("p", "q", "r")}, [3])


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ([True, False, True], [0, 2]),
        ([2, 0], [2, 0]),
        (range(2), [0, 1]),
        (np.array([False, True, True]), [1, 2]),
        (np.array([2]), [2]),
    ],
)
def test_lists_and_arrays_index(index, rows):
    """A list or array indexes rows on the CPU."""
    found = make_tree()[index]

    assert found["a"].tolist() == [[2.0 * i, 2.0 * i + 1] for i in rows]
    assert found["s"] == ["pqr"[i] for i in rows]


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (lambda t: t.flip(0), [2, 1, 0]),
        (lambda t: t.repeat(2), [0, 1, 2, 0, 1, 2]),
        (lambda t: t.repeat_interleave(2, 0), [0, 0, 1, 1, 2, 2]),
        (lambda t: t.gather(0, torch.tensor([1, 1], device="cpu")), [1, 1]),
    ],
)
def test_rearrangements(call, rows):
    """Rows of non-tensor data are counted on the CPU."""
    found = call(make_tree())

    assert found["a"][:, 0].tolist() == [2.0 * i for i in rows]
    assert found["s"] == ["pqr"[i] for i in rows]


def test_a_step_of_an_optimizer():
    """The step count and the learning rate are where the parameters are."""
    params = make_tree().select("a")
    rule = chain(clip_by_global_norm(1.0), adam(lr=0.5))
    found, _ = rule.update(params, params, rule.init(params))

    assert found["a"].device.type == "cpu"
    assert torch.allclose(found["a"], params["a"] - 0.5 * (params["a"] > 0))


def test_states_of_generators_keep_their_numbers():
    """The state of Python's generator is saved and restored with its numbers."""
    state = tdf.get_rng_state()
    first = random.random()
    tdf.set_rng_state(state)

    assert random.random() == first


def test_empty_leaves_of_a_memmap(tmp_path):
    """A leaf without bytes, which has no mapping, is on the CPU."""
    TensorDict({"a": torch.zeros(0, 2, device="cpu")}).memmap(tmp_path)

    assert TensorDict.load_memmap(tmp_path)["a"].device.type == "cpu"
