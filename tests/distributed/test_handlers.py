"""A signal handler that calls in the middle of a call of all ranks: it is refused at once, and nobody waits for it."""

import os
import signal
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tdfunc as tdf
from tdfunc import ConcurrencyError, TensorDict
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.sample(4)

TIMEOUT_S = 20
ONE = TensorDict({"x": torch.ones(2)})
CALLS = {
    "save": lambda sharded, home: tdf.save(sharded, home / "tree.safetensors"),
    "manager": lambda sharded, home: tdf.CheckpointManager(home / "run").save(1, sharded),
    "all_reduce": lambda sharded, home: ONE.all_reduce(),
    "broadcast": lambda sharded, home: ONE.broadcast(0),
    "scatter": lambda sharded, home: tdf.distributed.scatter([ONE, ONE], 0),
    "gather": lambda sharded, home: ONE.gather_to(0),
}


def _interrupt(rank, home, outer, inner):
    """Rank 0 waits in one call for rank 1, and its handler makes another."""
    sharded = tdf.distributed.shard(TensorDict({"w": torch.arange(8.0)}), init_device_mesh("cpu", (2,)))
    refusals = []

    def handle(*_):
        began_s = time.monotonic()
        with pytest.raises(ConcurrencyError, match="in another call of the group(?s:.)*signal handler"):
            CALLS[inner](sharded, home)
        refusals.append(time.monotonic() - began_s)

    if rank:
        while not (home / "handled").exists():
            time.sleep(0.01)
        CALLS[outer](sharded, home)
    else:
        signal.signal(signal.SIGALRM, lambda *_: (handle(), (home / "handled").touch()))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        CALLS[outer](sharded, home)
        assert refusals[0] < 2
    assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]
    if outer == "save":
        assert tdf.load(home / "tree.safetensors")["w"].tolist() == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("save", "save"), ("save", "all_reduce"), ("manager", "manager"), *[(name, "save") for name in list(CALLS)[2:]]],
)
def test_a_handler_in_the_middle_of_a_call(tmp_path, outer, inner):
    """The pre-emption of a job: the handler's call raises, the other one ends, and the next works."""
    run_ranks(_interrupt, 2, tmp_path, tmp_path, outer, inner, timeout_s=TIMEOUT_S)


def _preempt(rank, home):
    """Both ranks get a signal; only rank 0 is in a call."""
    sharded = tdf.distributed.shard(TensorDict({"w": torch.arange(8.0)}), init_device_mesh("cpu", (2,)))
    errors = []

    def handle(*_):
        try:
            tdf.save(sharded, home / "tree.safetensors")
        except Exception as err:
            errors.append(type(err))
        (home / f"handled-{rank}").touch()

    signal.signal(signal.SIGALRM, handle)
    began_s = time.monotonic()
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(ValueError, match="different calls"):
            ONE.all_reduce()
    else:
        while not (home / "handled-0").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGALRM)
    assert errors == [ValueError if rank else ConcurrencyError]
    assert time.monotonic() - began_s < 5
    assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]


def test_a_signal_to_all_ranks(tmp_path):
    """The rank outside of the call meets it with its handler's save: both raise, and the next call works."""
    run_ranks(_preempt, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)
    assert not os.path.exists(tmp_path / "tree.safetensors")


def _send_in_a_handler(rank):
    """Rank 0 waits in `send` for rank 1, and its handler sends to the same rank."""
    sent, refusals = TensorDict({"x": torch.arange(3.0)}), []

    def handle(*_):
        with pytest.raises(ConcurrencyError, match="in another message to rank 1(?s:.)*signal handler"):
            ONE.send(1)
        refusals.append(True)

    if rank:
        # Past the signal, which Python handles when the first frame has been received.
        time.sleep(1)
        assert sent.recv(0)["x"].tolist() == [0, 1, 2]
        assert ONE.recv(0)["x"].tolist() == [1, 1]
    else:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        sent.send(1)
        assert refusals
        ONE.send(1)


@pytest.mark.slow
def test_a_handler_in_the_middle_of_a_message(tmp_path):
    """The frames of two messages are not mixed: the handler's call raises, and the next message works."""
    run_ranks(_send_in_a_handler, 2, tmp_path, timeout_s=TIMEOUT_S)
