"""What is open is given back, at whatever bytecode a Ctrl-C comes."""

import copy
import gc
import os
import pickle
import sys

import pytest
import torch

import tdfunc
from tdfunc import TensorDict, UnsupportedError, load, save
from tdfunc.storage.disk import atomic
from tdfunc.storage.disk.descriptor import Descriptor

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


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 40}], ids=["file", "shards"])
def test_what_is_open_has_one_owner(name, options, tmp_path):
    """A copy closed the number of the original, which then read whatever file got that number next."""
    path = tmp_path / ("shards" if options else "x.safetensors")
    save(TensorDict({"x": torch.full((9,), 1.0), "a": {"y": torch.full((9,), 2.0)}}), path, **options)
    save(TensorDict({"x": torch.full((9,), 7.0), "a": {"y": torch.full((9,), 7.0)}}), tmp_path / "other.safetensors")
    before = open_descriptors()

    with tdfunc.open(path) as f:
        held = open_descriptors()
        for part in (f, f["a"]):
            with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled(?s:.)*open it in each process"):
                COPIES[name](part)
        source = f._contents.sources[0]
        with pytest.raises(UnsupportedError, match=rf"{source.path}: an open file cannot be copied or pickled"):
            COPIES[name](source.data)
        with pytest.raises(UnsupportedError, match="descriptor cannot be copied or pickled"):
            COPIES[name](source.data._file)
        gc.collect()
        assert open_descriptors() == held
        with tdfunc.open(tmp_path / "other.safetensors"):
            assert f["x"].tolist() == [1.0] * 9
            assert f["a", "y"].tolist() == [2.0] * 9
    assert open_descriptors() == before
