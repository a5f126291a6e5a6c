"""A sweep in blocks on workers that die equals the sweep of one process, to the last bit."""

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, WorkerError, random, sweep
from tests.distributed.ranks import run_ranks
from tests.storage.trees import assert_same

MEMBERS, BLOCK, RUNGS = 256, 32, 3


def make():
    """The network of a member."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()


APPLY = tdf.functional(make())[0]


def begin(members=MEMBERS):
    """Members with their own weights, learning rates and keys of dropout."""
    params = tdf.init_ensemble(make, members, key=0)
    hyper = sweep.random_search(1, members, lr=sweep.log_uniform(1e-4, 1e-1))
    state = tdf.optim.adam(lr=hyper["lr"]).init(params)
    keys = random.fold_in(random.key(2), torch.arange(members))
    leaves = {"params": params, "state": state, "hyper": hyper, "key": keys, "member": torch.arange(members)}
    return TensorDict(leaves, [members])


def train(run, rung):
    """Three steps on data that torch's default generator orders."""
    x = random.normal(random.key(3), (64, 3), dtype=torch.float64)[torch.randperm(64)[:32]]
    y = x.sum(1, keepdim=True).sin()
    optimizer = tdf.optim.adam(lr=run["hyper", "lr"])

    def loss(params, key, step):
        return (APPLY(params, x, rng=random.fold_in(key, step)) - y).square().mean()

    params, state = run["params"], run["state"]
    for step in range(3):
        members = torch.vmap(torch.func.grad_and_value(loss), (0, 0, None))
        grads, scores = members(params, run["key"], 3 * rung + step)
        params, state = optimizer.update(params, grads, state)
    return run.update({"params": params, "state": state}), scores


class Deadly(NamedTuple):
    """`train` that notes its calls, and kills its process once for each of some members, at the second rung."""

    folder: Path
    members: tuple = ()
    always: bool = False

    def __call__(self, run, rung):
        """Train, or die."""
        first = int(run["member"][0])
        with open(self.folder / "calls", "a") as file:
            file.write(f"{first} {rung}\n")
        for member in self.members:
            if rung == 1 and member in run["member"] and (self.always or not (self.folder / f"{member}").exists()):
                (self.folder / f"{member}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return train(run, rung)


def in_one_process(members=MEMBERS):
    """The run and scores of all members in one block, without checkpoints."""
    run, scores = begin(members), None
    for rung in range(RUNGS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rung)
            run, scores = train(run, rung)
    return run, scores


def check(found, expected=None):
    """Compare a run and its scores with those of one process."""
    expected = in_one_process() if expected is None else expected
    assert_same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def calls_of(folder):
    """For the first member of each block the rungs at which it was trained, in order."""
    calls = defaultdict(list)
    for line in (folder / "calls").read_text().splitlines():
        first, rung = map(int, line.split())
        calls[first].append(rung)
    return calls


def _work(rank, folder):
    found = sweep.train_blocks(
        begin(), Deadly(folder, members=(40, 200)), RUNGS, folder=folder / "run", chunk_size=BLOCK
    )
    check(found)
    (folder / f"rank-{rank}").touch()


@pytest.mark.slow
def test_killed_ranks(tmp_path):
    """Four ranks, two of which are killed: the others train all members, and each has the whole result."""
    codes = run_ranks(_work, 4, tmp_path, tmp_path, join=False)

    assert sorted(codes) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert len(list(tmp_path.glob("rank-*"))) == 2
    expected = {first: [0, 1, 1, 2] if first in (32, 192) else [0, 1, 2] for first in range(0, MEMBERS, BLOCK)}
    assert calls_of(tmp_path) == expected


def test_a_job_that_starts_again(tmp_path):
    """More rungs continue from the checkpoints, in one process and with a last block that is shorter."""
    options = {"folder": tmp_path / "run", "chunk_size": 8}
    sweep.train_blocks(begin(21), train, 1, **options)
    found = sweep.train_blocks(begin(21), Deadly(tmp_path), RUNGS, **options)

    check(found, in_one_process(21))
    assert calls_of(tmp_path) == {0: [1, 2], 8: [1, 2], 16: [1, 2]}


@pytest.mark.slow
def test_a_worker_that_always_dies(tmp_path):
    """Two attempts after a death without progress it is an error, and the other blocks are trained."""
    work = Deadly(tmp_path, members=(9,), always=True)
    with pytest.raises(WorkerError, match="a worker died(?s:.*)rows"):
        sweep.train_blocks(begin(16), work, RUNGS, folder=tmp_path / "run", chunk_size=8, num_workers=1)

    assert calls_of(tmp_path) == {0: [0, 1, 2], 8: [0, 1, 1, 1, 1]}


def fail_at_37(run, rung):
    """Raise for one member at the second rung."""
    if rung == 1 and 37 in run["member"]:
        raise FloatingPointError("no")
    return train(run, rung)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_that_raises(tmp_path, num_workers):
    """The error names the member, its values and the rung; nothing is trained again."""
    run = begin(64)
    lr = f"{run['hyper', 'lr'][37].item():.6g}"
    pattern = rf"member 37 cannot be trained:(?s:.*)hyper\.lr={lr}(?s:.*)rung 1(?s:.*)FloatingPointError: no"
    with pytest.raises(WorkerError, match=pattern):
        sweep.train_blocks(run, fail_at_37, RUNGS, folder=tmp_path, chunk_size=16, num_workers=num_workers)


def _together(run, rung):
    if len(run) > 2:
        raise MemoryError("too many")
    return train(run, rung)


REFUSALS = [
    (dict(chunk_size=0), ValueError, "chunk_size must be at least 1"),
    (dict(rungs=0), ValueError, "rungs must be at least 1"),
    (dict(run=begin(8).set("key", begin(8)["key"] + 1)), ValueError, "has checkpoints of another run"),
    (dict(chunk_size=4), ValueError, "has checkpoints of another run"),
    (dict(rungs=1), ValueError, "1 rungs at most(?s:.*)2 rungs"),
    (dict(rungs=3, train=_together), WorkerError, "members 0 to 3 cannot be trained together(?s:.*)too many"),
    (
        dict(rungs=3, train=lambda run, rung: (run, torch.zeros(3))),
        tdf.BatchSizeError,
        r"scores(?s:.*)\[8\](?s:.*)\[3\]",
    ),
]


@pytest.mark.parametrize(("changed", "error", "pattern"), REFUSALS)
def test_refusals(tmp_path, changed, error, pattern):
    """A folder of another sweep, numbers out of range, and failures that are of no member alone."""
    given = {"run": begin(8), "train": train, "rungs": 2, "folder": tmp_path, "chunk_size": 8}
    sweep.train_blocks(**given)
    with pytest.raises(error, match=pattern):
        sweep.train_blocks(**given | changed)
