"""A process that is forked while another thread has a lock: the child finds it free, and does not wait for ever."""

import os
import signal
import threading
from contextlib import ExitStack

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.ensemble.draws import run_seeded
from tdfunc.storage.safetensors.contents import Contents

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
PATIENCE_S = 20


class Gate:
    """Holds a thread up at one place of this process, not of its forks."""

    def __init__(self):
        self.process = os.getpid()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def wait(self):
        if os.getpid() == self.process and threading.current_thread() is not threading.main_thread():
            self.is_there.set()
            self.may_go.wait(PATIENCE_S)


def _record(gate, folder, stack, monkeypatch):
    @tdf.jit
    def double(x):
        gate.wait()
        return x * 2

    # What torch imports late has an import lock, which a fork may leave taken.
    double(torch.ones(3))
    return lambda: double(torch.ones(2)), lambda: double(torch.ones(2))


def _seed(gate, folder, stack, monkeypatch):
    def draw():
        return run_seeded([torch.default_generator], 1, gate.wait)

    return draw, draw


def _read(gate, folder, stack, monkeypatch):
    tdf.save(TensorDict({"x": torch.ones(3)}), folder / "tree.safetensors")
    opened = stack.enter_context(tdf.open(folder / "tree.safetensors"))
    check_open = Contents.check_open
    monkeypatch.setattr(Contents, "check_open", lambda self: (check_open(self), gate.wait()))
    return lambda: opened["x"], lambda: opened["x"]


def _read_on(gate, folder, stack, monkeypatch):
    tdf.save(TensorDict({"x": torch.ones(3)}), folder / "tree.safetensors")
    opened = stack.enter_context(tdf.open(folder / "tree.safetensors"))

    def read():
        with opened._contents.reading():
            gate.wait()

    return read, opened.close


@pytest.mark.parametrize("make", [_record, _seed, _read, _read_on])
def test_a_lock_of_another_thread_is_free_in_a_fork(make, tmp_path, monkeypatch):
    """The thread that would give it up is missing in the child: the worker of a DataLoader would hang."""
    gate = Gate()
    with ExitStack() as stack:
        in_thread, in_child = make(gate, tmp_path, stack, monkeypatch)
        thread = threading.Thread(target=in_thread)
        thread.start()
        assert gate.is_there.wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            in_child()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        gate.may_go.set()
        thread.join()
    assert status == 0
