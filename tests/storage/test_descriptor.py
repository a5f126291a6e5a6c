"""What is open is given back, at whatever bytecode a Ctrl-C comes."""

import os
import sys

import pytest
import torch

from tdfunc import TensorDict, load, save
from tdfunc.storage import atomic
from tdfunc.storage.descriptor import Descriptor

PLACES = ("descriptor.py", "folder_commit.py", "atomic.py", "memmap.py", "mapped.py", "read.py", "folder_read.py")


def open_descriptors():
    """How many descriptors this process has."""
    return len(os.listdir("/dev/fd"))


def interrupt(call, at):
    """Call a function with a KeyboardInterrupt before its bytecode number `at` in the files above; False if it ends."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if os.path.basename(frame.f_code.co_filename) not in PLACES or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_descriptor_is_closed_once(tmp_path):
    """A number that was closed twice may mean another file by then."""
    before = open_descriptors()
    file = Descriptor(str(tmp_path / "x"), os.O_RDWR | os.O_CREAT, 0o600)
    with file as fd:
        os.write(fd, b"1")
    other = os.open(tmp_path / "x", os.O_RDONLY)
    file.close()
    del file

    assert os.fstat(other).st_size == 1
    os.close(other)
    Descriptor(str(tmp_path), os.O_RDONLY)
    assert open_descriptors() == before
    with pytest.raises(FileNotFoundError):
        Descriptor(str(tmp_path / "y"), os.O_RDONLY)


CALLS = {
    "save": lambda td, folder: save(td, folder / "x.safetensors", fsync=False),
    "save with a name": lambda td, folder: save(td, folder / "x.safetensors", fsync=False),
    "load": lambda _, folder: load(folder / "given.safetensors"),
    "memmap": lambda td, folder: td.memmap(folder / "d"),
    "memmap_like": lambda td, folder: td.memmap_like(folder / "d"),
    "load_memmap": lambda _, folder: TensorDict.load_memmap(folder / "given"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed checkpoint", "ignore:Exception ignored")
@pytest.mark.parametrize("name", CALLS)
def test_interrupts_leave_nothing_open(name, tmp_path, monkeypatch):
    """Descriptors would run out, and the locks of those that stay open keep later writes from cleaning up."""
    td = TensorDict({"x": torch.ones(3)})
    save(td, tmp_path / "given.safetensors")
    td.memmap(tmp_path / "given")
    if name == "save with a name":
        monkeypatch.setattr(atomic, "_UNNAMED", 0)
    CALLS[name](td, tmp_path)
    before, entries, at = open_descriptors(), sorted(os.listdir(tmp_path)), 1

    # An interrupt may also fall between the lines with which `torch.no_grad` remembers and restores the mode.
    with torch.set_grad_enabled(True):
        while interrupt(lambda: CALLS[name](td, tmp_path), at):
            assert open_descriptors() == before, f"at bytecode {at}"
            at += 3

    CALLS[name](td, tmp_path)
    assert at > 100
    assert sorted(os.listdir(tmp_path)) == entries
