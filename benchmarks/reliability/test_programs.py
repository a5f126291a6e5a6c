"""The programs that count see every fault that they count: a reader or a tree with the fault is found."""

import os
import signal
import subprocess

import pytest
import torch

from benchmarks.reliability import damage, hostile, loads
from benchmarks.reliability.kills import tree_of, value_of
from tdfunc import TensorDict, save
from tests.storage.trees import same_bytes


def load_badly(path):
    """A reader with every fault that the judge must see."""
    text = path.read_bytes()
    if text == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == b"write":
        path.write_bytes(b"other")
    if text == b"raise":
        raise KeyError("w")
    return {"w": torch.zeros(1)}


def test_the_judge_sees_every_fault(tmp_path):
    """The judge finds a crash, a write, another error and other values."""
    path = tmp_path / "f"
    library = damage.Library(lambda path: None, load_badly, (ValueError,))

    def attempt(raw):
        path.write_bytes(raw)
        return damage.judge(library, path)

    assert damage.survey([b"fine", b"kill", b"write", b"raise", b"fine"], attempt) == {
        "wrong": 2, "crashed": 1, "wrote": 1, damage.OTHER: 1,
    }  # fmt: skip


def _touch(path):
    (path / "new").write_text("")
    return {}


FAULTS = {
    "code": (lambda path: subprocess.run(["true"]) and {}, "ran code"),
    "elsewhere": (lambda path: open("/etc/hostname").close() or {}, "left the folder"),
    "writes": (_touch, "wrote"),
}


@pytest.mark.parametrize(("call", "says"), FAULTS.values(), ids=FAULTS)
def test_the_watch_sees_what_a_load_does(call, says, tmp_path):
    """The watch notes code that runs, files that are opened elsewhere, and writes."""
    report = hostile.watch(lambda: call(tmp_path), (ValueError,), tmp_path)

    assert says in " ".join(report.tried)


def test_the_watch_sees_how_a_load_ends(tmp_path):
    """The watch notes a crash, another error, values that are not in the files, and a hang."""
    calls = [lambda: os.kill(os.getpid(), 9), lambda: {}["w"], lambda: {"w": torch.zeros(10_000)}, signal.pause]

    found = [hostile.watch(call, (ValueError,), tmp_path, timeout_s=1).result for call in calls]

    assert found[0] == "crashed"
    assert found[1].startswith("another error: KeyError")
    assert found[2:] == ["larger than the files", "hung"]


def test_a_mixture_of_two_trees_shows():
    """The check of the tests below finds a tree that was put together from two."""
    whole, other = tree_of(1), tree_of(2)
    mixed = whole.set(("n", "3"), other["n", "3"])
    short = whole.set("n", whole["n"].exclude("3"))

    assert value_of(whole) == 1
    for broken in (mixed, short, whole.set("note", "2")):
        with pytest.raises(AssertionError):
            value_of(broken)


def test_the_checks_see_other_values(tmp_path):
    """The check of the mutations finds values that are in no file."""
    path = tmp_path / "input.safetensors"
    save(TensorDict({"w": torch.ones(3)}), path)

    with pytest.raises(AssertionError, match="safetensors does not see"):
        loads._compare_with_safetensors(path, TensorDict({"w": torch.zeros(3)}))
    assert same_bytes(loads.load(path)["w"], torch.ones(3))
