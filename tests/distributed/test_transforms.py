"""Calls of several ranks inside of transforms and recordings: all ranks raise at once, or all get constants."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError
from tests.distributed.ranks import run_ranks


def in_grad(fn, rows):
    """Call a function of a tree inside of `grad`."""
    return tdf.grad(lambda td: (fn(td), td["x"].sum())[1])(rows)


def in_vmap(fn, rows):
    """Call it inside of `vmap`."""
    return torch.vmap(lambda td: (fn(td), td)[1])(rows)


def in_jit(fn, rows):
    """Call it in a recording."""
    return tdf.jit(lambda td: (fn(td), td)[1])(rows)


def in_jitted_grad(fn, rows):
    """Call it inside of `grad` in a recording."""
    return tdf.jit(lambda td: in_grad(fn, td))(rows)


def in_fake_mode(fn, rows):
    """Call it where tensors have no values."""
    with FakeTensorMode():
        return fn(rows)


def exchange(td, rank):
    """Send a tree from rank 0 to rank 1."""
    if rank == 0:
        return td.send(1)
    return tdf.distributed.recv(0)


TRANSFORMS = {"grad": in_grad, "vmap": in_vmap}
RECORDINGS = {"jit": in_jit, "jit of grad": in_jitted_grad, "FakeTensorMode": in_fake_mode}
CALLS = {
    "all_reduce": lambda td, _: td.all_reduce(),
    "all_gather": lambda td, _: td.all_gather(),
    "broadcast": lambda td, rank: tdf.distributed.broadcast(td if rank == 0 else None, 0),
    "scatter": lambda td, rank: tdf.distributed.scatter([td, td] if rank == 0 else None, 0),
    "message": exchange,
}


def rows_of(rank):
    """Return a rank's tree."""
    return TensorDict({"x": torch.full((2,), rank + 1.0)}, [2])


def call_in_each(rank, wraps, constant):
    """Make each call in each transform or recording; the group is in step after each of them."""
    rows = rows_of(rank)
    for wrap in wraps:
        for call in CALLS.values():
            with pytest.raises(UnsupportedError):
                wrap(lambda td, call=call: call(rows if constant else td, rank), rows)
            assert rows.all_reduce()["x"].tolist() == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wraps", "constant"),
    [
        (list(TRANSFORMS.values()), False),
        (list(RECORDINGS.values()), False),
        (list(RECORDINGS.values()), True),
    ],
    ids=["transforms", "recordings", "constants of recordings"],
)
def test_a_call_that_cannot_be_made_is_refused_on_all_ranks(wraps, constant, tmp_path):
    """No rank waits for the group's timeout, which would be longer than this test may take."""
    run_ranks(call_in_each, 2, tmp_path, wraps, constant, timeout_s=600)


def call_with_constants(rank, wrap):
    """Make each call with a tree that is a constant of the transform; the first rank's values arrive."""
    rows = rows_of(rank)
    got = {}
    for name, call in CALLS.items():
        wrap(lambda td, name=name, call=call: got.update({name: call(rows, rank)}), rows)
    assert got["all_reduce"]["x"].tolist() == [3.0, 3.0]
    assert [tree["x"].tolist() for tree in got["all_gather"]] == [[1.0, 1.0], [2.0, 2.0]]
    assert got["broadcast"]["x"].tolist() == [1.0, 1.0]
    assert got["scatter"]["x"].tolist() == [1.0, 1.0]
    assert rank == 0 or got["message"]["x"].tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", list(TRANSFORMS.values()), ids=list(TRANSFORMS))
def test_constants_go_between_ranks_inside_of_a_transform(wrap, tmp_path):
    """The tensors of a message are none of the transform's."""
    run_ranks(call_with_constants, 2, tmp_path, wrap, timeout_s=600)
