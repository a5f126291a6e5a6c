"""Saves in the background: the same files, no lost errors, no needless copies, and an exit that waits."""

import gc
import os
import sys
import threading
import time
import warnings
import weakref
from concurrent import futures
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from tdfunc import AsyncSaver, ConcurrencyError, Kind, NonTensorData, TensorDict, UnsupportedError, jit, load, save
from tdfunc.storage.manager import background
from tests.helpers import run_in_threads
from tests.storage.scripts import run
from tests.storage.trees import tied_trees, trees

TREE = TensorDict({"w": torch.arange(6.0), "n": {"b": torch.ones(2, 3)}})


@pytest.fixture
def gate(monkeypatch):
    """An event that background saves wait for before they write."""
    event, real = threading.Event(), background.save_outline

    def write(*args, **kwargs):
        assert event.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(background, "save_outline", write)
    yield event
    event.set()


@pytest.fixture
def failing(gate, monkeypatch):
    """Background saves fail, once this event is set, as it is at first."""

    def write(*_, **__):
        assert gate.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background, "save_outline", write)
    gate.set()
    return gate


# -- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [None, True, False])
@given(tree=trees() | tied_trees())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_the_file_is_that_of_save(copy, tree, tmp_path):
    """A tree saved in the background is the file of one saved at once, byte by byte."""
    save(tree, tmp_path / "a.safetensors", fsync=False)
    with AsyncSaver() as saver:
        handle = saver.save(tree, tmp_path / "b.safetensors", fsync=False, copy=copy)

    assert handle.result() == tmp_path / "b.safetensors"
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_shards_are_of_one_moment(tmp_path, monkeypatch):
    """A tree is saved in shards as it was; if a leaf changes meanwhile, the old shards stay."""
    tree = TensorDict({str(i): torch.randn(1000) for i in range(10)})
    saver, real, before = AsyncSaver(), background.save_outline, tree.clone()
    saver.save(tree, tmp_path / "model", max_shard_size=8000).result()

    def change(*args, **kwargs):
        tree["7"][500] = 3
        real(*args, **kwargs)

    monkeypatch.setattr(background, "save_outline", change)
    with pytest.raises(ConcurrencyError, match=r'model: leaf "7" changed'):
        saver.save(tree, tmp_path / "model", max_shard_size=8000).result()

    assert (load(tmp_path / "model") == before).all()
    assert len(os.listdir(tmp_path / "model")) == 6


def copied(tree, copy):
    """Dotted names of the leaves that a snapshot does not share memory with."""
    out = background.outline(tree)
    snapshot = background.take_snapshot(tree, copy)
    pairs = zip(out.names, out.leaves, snapshot.outline.leaves, strict=True)
    names = {name.strip('"') for name, old, new in pairs if old.data_ptr() != new.data_ptr()}
    assert names.isdisjoint(name.strip('"') for name in snapshot.digests())
    return names


def test_only_what_others_write_to_is_copied():
    """Parameters and buffers of modules are copied, other leaves are not; `copy=` copies all or none."""
    module = TensorDict.from_module(nn.BatchNorm1d(3))
    tree = TensorDict({"m": module, "updated": module.apply(lambda x: x + 1), "plain": torch.ones(3)})
    tree = tree.set("state", NonTensorData(torch.ones(2))).set("extra", NonTensorData(torch.ones(2)))
    tree = tree._replace(tree._data, kinds={"extra": Kind.EXTRA_STATE})
    live = {"m.weight", "m.bias", "extra"} | {
        f"{node}.{key}" for node in ("m", "updated") for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    everything = live | {"updated.weight", "updated.bias", "plain", "state"}

    assert copied(tree, None) == live
    assert copied(tree, True) == everything
    assert copied(tree, False) == set()


def test_tensors_in_plain_objects_are_copied():
    """Tensors in a list or dict are copied, because their owner may write to them; leaves of trees in it are not."""
    state = [torch.ones(2), {"step": torch.ones(1), "tree": TensorDict({"w": torch.ones(4)})}]
    tree = TensorDict({"plain": torch.ones(3)}).set("state", NonTensorData(state))
    before = background.outline(tree).leaves

    after = background.take_snapshot(tree, None).outline.leaves

    is_copied = {len(old): old.data_ptr() != new.data_ptr() for old, new in zip(before, after, strict=True)}
    assert is_copied == {1: True, 2: True, 3: False, 4: False}


ROADS = {
    "in place": lambda leaf: leaf.add_,
    "a view": lambda leaf: leaf[1:].add_,
    ".data": lambda leaf: leaf.data.add_,
    "numpy": lambda leaf: leaf.numpy().__iadd__,
    "DLPack": lambda leaf: torch.from_dlpack(leaf).add_,
}


@pytest.mark.parametrize("road", ROADS.values(), ids=list(ROADS))
@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "leaf", [torch.zeros(4), torch.zeros(50, 1000), torch.zeros(400, 50).t()], ids=["small", "large", "strided"]
)
def test_a_leaf_that_changes_fails_the_save_by_name(leaf, is_early, road, gate, tmp_path, monkeypatch):
    """A leaf that is written to before its digest is taken, however the writer came by it, fails the save by name."""
    path, late, real = tmp_path / "t.safetensors", threading.Event(), background._digests_of_private
    monkeypatch.setattr(background, "_digests_of_private", lambda leaves: late.wait(60) and real(leaves))
    save(TREE, path)
    saver = AsyncSaver()
    tree = TensorDict({"a": torch.ones(3), "b": {"c": leaf.clone()}})
    write = road(tree["b", "c"]) if is_early else None
    handle = saver.save(tree, path)
    (write or road(tree["b", "c"]))(1)
    late.set()
    gate.set()

    with pytest.raises(ConcurrencyError, match=r't\.safetensors.*leaf "b\.c" changed.*\n(.*\n){2}.*copy=True'):
        handle.result()
    assert (load(path) == TREE).all(), "the old file stays"


def test_a_value_that_changes_after_its_digest_fails_the_save(gate, tmp_path, monkeypatch):
    """Once its digest is taken, a leaf cannot change by a bit."""
    begun, real = [], background._begin
    monkeypatch.setattr(background, "_begin", lambda work: begun.append(real(work)) or begun[0])
    saver, tree = AsyncSaver(), TensorDict({"w": torch.zeros(50_000)})
    handle = saver.save(tree, tmp_path / "t.safetensors")
    begun[0].result()
    tree["w"].data[7] = 1
    gate.set()

    with pytest.raises(ConcurrencyError, match=r'leaf "w" changed.*\n.*the digest [0-9a-f]{16}\n.*[0-9a-f]{16}\n'):
        handle.result()


@pytest.mark.parametrize(
    ("share", "is_private"),
    [
        (lambda _: None, True),
        (lambda leaf: leaf + leaf.data, True),
        (lambda leaf: leaf[1:], False),
        (lambda leaf: leaf.detach(), False),
        (lambda leaf: leaf.numpy(), False),
        (lambda leaf: leaf.__dlpack__(), False),
        (lambda leaf: leaf.share_memory_(), False),
    ],
    ids=["nothing", "another tensor", "rows", "detach", "numpy", "DLPack", "other processes"],
)
def test_what_only_the_tree_refers_to_is_hashed_later(share, is_private, tmp_path):
    """A leaf on memory that nothing else refers to does not keep the caller waiting, also once it was saved."""
    tree = TensorDict({"w": torch.zeros(50_000)})
    save(tree, tmp_path / "t.safetensors")
    # It is kept, as a program would.
    other = share(tree["w"])
    snapshot = background.take_snapshot(tree, None)

    assert ('"w"' not in snapshot.taken) == is_private
    assert snapshot.digests() == {'"w"': background._digest(tree["w"])}, other


def test_memory_of_other_libraries_is_hashed_at_once():
    """Leaves of up to 64 kB, and memory that torch did not allocate, are hashed at once: the owner may write to it."""
    leaves = {"n": torch.from_numpy(np.zeros(50_000)), "b": torch.frombuffer(bytearray(400_000), dtype=torch.float32)}
    leaves |= {"small": torch.zeros(16384), "large": torch.zeros(16385)}
    # The system has no more threads.
    with patch.object(background.ThreadPoolExecutor, "submit", side_effect=RuntimeError):
        snapshot = background.take_snapshot(TensorDict(leaves), None)

    assert snapshot.taken.keys() == {'"n"', '"b"', '"small"'}
    assert snapshot.digests().keys() == {*snapshot.taken, '"large"'}


# -- errors -----------------------------------------------------------------------------------------------------


def test_refusals_and_interrupts_come_at_once_and_free_the_place(tmp_path):
    """Refusals and interrupts are raised by `save` at once and use up no place."""
    saver = AsyncSaver()
    for _ in range(3):
        with pytest.raises(UnsupportedError, match=r'leaf "bad" cannot be stored'):
            saver.save(TREE.set("bad", NonTensorData(object())), tmp_path / "t.safetensors")
        with pytest.raises(TypeError, match="is not a tree"):
            saver.save([torch.ones(1)], tmp_path / "t.safetensors")
        with patch.object(background, "outline", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            saver.save(TREE, tmp_path / "t.safetensors")
    assert saver.save(TREE, tmp_path / "t.safetensors").result().exists()


class Interrupt:
    """Raises KeyboardInterrupt at a line of the functions that submit a save, as Ctrl-C does between two calls."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        if frame.f_code not in (background.SaveQueue.submit.__code__, background.SaveQueue._start_save.__code__):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("line", range(1, 24))
def test_ctrl_c_at_any_line_of_a_submission_frees_the_place(line, tmp_path):
    """The save may or may not be made; the next one does not wait for it."""
    saver = AsyncSaver()
    traced = sys.gettrace()
    sys.settrace(Interrupt(line))
    try:
        with suppress(KeyboardInterrupt):
            saver.save(TREE, tmp_path / "t.safetensors")
    finally:
        sys.settrace(traced)
    thread = threading.Thread(target=lambda: saver.save(TREE, tmp_path / "t.safetensors").result(), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    saver.wait()


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, lambda fn: lambda x: torch.func.jvp(fn, (x,), (x,)), lambda fn: jit(torch.func.grad(fn))],
)
@pytest.mark.parametrize("copy", [None, True, False])
def test_a_save_in_the_middle_of_a_transform(transform, copy, tmp_path):
    """As from a signal handler: the copies are tensors of their own, not of the transform."""
    tree = TensorDict({"p": nn.Parameter(torch.arange(3.0)), "x": torch.ones(2)})
    saver = AsyncSaver()

    def loss(x):
        saver.save(tree, tmp_path / "t.safetensors", copy=copy)
        return x.square()

    transform(loss)(torch.tensor(2.0))
    saver.wait()
    assert load(tmp_path / "t.safetensors")["p"].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("failing")
def test_an_error_comes_from_the_handle(tmp_path):
    """Once: what comes after is not told."""
    saver = AsyncSaver()
    with pytest.raises(OSError, match="No space left"):
        saver.save(TREE, tmp_path / "a.safetensors").result()
    assert "No space" in str(saver.save(TREE, tmp_path / "b.safetensors").exception())
    saver.wait()


@pytest.mark.usefixtures("failing")
def test_an_error_comes_from_the_next_save(tmp_path):
    """If nobody asked the handle, which has it too; the save does not begin."""
    saver = AsyncSaver()
    handle = saver.save(TREE, tmp_path / "b.safetensors")
    with pytest.raises(OSError, match="No space left"):
        saver.save(TREE, tmp_path / "c.safetensors")
    assert isinstance(handle.exception(), OSError)
    assert saver._queue.pending == []
    saver.wait()


@pytest.mark.usefixtures("failing")
def test_an_error_comes_from_wait(tmp_path):
    """Once."""
    saver = AsyncSaver()
    saver.save(TREE, tmp_path / "d.safetensors")
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    saver.wait()


@pytest.mark.usefixtures("failing")
def test_an_error_comes_from_the_end_of_the_block(tmp_path):
    """Once."""
    saver = AsyncSaver()
    with pytest.raises(OSError, match="No space left"), saver:
        saver.save(TREE, tmp_path / "e.safetensors")
    saver.wait()


def test_errors_of_saves_that_are_waited_for(failing, tmp_path):
    """A save that waits for a failing one hears of it; whoever gives up waiting has not heard."""
    failing.clear()
    saver = AsyncSaver()
    handle = saver.save(TREE, tmp_path / "a.safetensors")
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.001)
    threading.Timer(0.05, failing.set).start()

    with pytest.raises(OSError, match="No space left"):
        saver.save(TREE, tmp_path / "b.safetensors")
    assert saver._queue.pending == []


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("seen", [False, True])
def test_errors_that_nobody_saw_are_shown(seen, tmp_path):
    """A saver that goes warns of its failed saves, except those whose error was raised."""
    saver = AsyncSaver()
    handle = saver.save(TREE, tmp_path / "a.safetensors")
    futures.wait([handle])
    # The thread lets go of its work a moment later.
    saver._queue._pool.shutdown()
    if seen:
        handle.exception()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del saver
        gc.collect()
    assert len(caught) == (not seen)
    assert all("1 save(s)" in str(w.message) and "a.safetensors: OSError(28" in str(w.message) for w in caught)


@pytest.mark.usefixtures("failing")
def test_an_error_in_the_block_is_not_hidden(tmp_path):
    """The error that ends a block goes before that of a failed save, which the next `wait` raises."""
    saver = AsyncSaver()
    saver.save(TREE, tmp_path / "a.safetensors")
    with pytest.raises(KeyError, match="mine"), saver:
        raise KeyError("mine")
    with pytest.raises(OSError, match="No space"):
        saver.wait()


# -- the queue --------------------------------------------------------------------------------------------------


def test_a_full_queue_waits(gate, tmp_path):
    """With all places taken a save waits."""
    saver = AsyncSaver(max_pending=2)
    for name in "ab":
        saver.save(TREE, tmp_path / f"{name}.safetensors")
    threading.Timer(0.05, gate.set).start()
    saver.save(TREE, tmp_path / "d.safetensors").result()

    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "d.safetensors"]


@pytest.mark.parametrize("end", [AsyncSaver.wait, repr])
def test_cancel(end, gate, tmp_path):
    """A save that has not begun can be cancelled; the others are written, and nothing is raised or shown at the end."""
    saver = AsyncSaver(max_pending=3)
    first, second, third = (saver.save(TREE, tmp_path / f"{name}.safetensors") for name in "abc")
    while not first.running():
        time.sleep(0.001)
    assert second.cancel()
    assert not first.cancel()
    gate.set()
    third.result()
    end(saver)
    assert repr(saver) == "AsyncSaver(0 pending)"
    del saver
    gc.collect()

    with pytest.raises(futures.CancelledError):
        second.result()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "c.safetensors"]


def test_many_threads(tmp_path):
    """Several threads can submit; no save is lost, and the limit holds."""
    saver = AsyncSaver(max_pending=2)
    most = []

    def submit(name):
        for i in range(10):
            saver.save(TREE, tmp_path / f"{name}{i}.safetensors", fsync=False)
            most.append(len(saver._queue.pending))

    run_in_threads(submit, "abcd")
    saver.wait()

    assert max(most) <= 2
    assert all((load(path) == TREE).all() for path in tmp_path.iterdir())
    assert len(os.listdir(tmp_path)) == 40


def test_memory_is_let_go(tmp_path, monkeypatch):
    """The tree of a save that has ended, well or not, is let go."""
    saver, kept = AsyncSaver(), []
    leaves = []
    for fails in (False, True):
        if fails:
            real = background.save_outline
            monkeypatch.setattr(
                background, "save_outline", lambda *args, real=real, **_: real(args[0], "/no/folder", fsync=True)
            )
        leaf = torch.ones(3)
        leaves.append(weakref.ref(leaf))
        kept.append(saver.save(TensorDict({"w": leaf}), tmp_path / "t.safetensors"))
        kept[-1].exception()
        del leaf
    gc.collect()

    assert isinstance(kept[1].exception(), FileNotFoundError)
    assert [leaf() for leaf in leaves] == [None, None]


# -- processes --------------------------------------------------------------------------------------------------

EXIT = """
    import atexit, sys
    import torch
    from tdfunc import AsyncSaver, TensorDict

    folder = sys.argv[1]
    tree = TensorDict({str(i): torch.ones(300_000) for i in range(20)})
    good, bad, late = AsyncSaver(max_pending=3), AsyncSaver(), AsyncSaver()
    atexit.register(lambda: late.save(tree, f"{folder}/late.safetensors"))
    good.save(tree, f"{folder}/a.safetensors")
    good.save(tree, f"{folder}/b.safetensors")
    good.save(tree, f"{folder}/shards", max_shard_size=1_200_000)
    bad.save(tree, f"{folder}/missing/t.safetensors")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)], ids=["end", "exit", "error"]
)
def test_an_interpreter_that_ends_finishes_its_saves(end, status, tmp_path):
    """Saves are finished at the end, those of exit handlers too, and failed ones are shown."""
    process = run(EXIT + f"    {end}\n", tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors

    names = ("a.safetensors", "b.safetensors", "shards", "late.safetensors")
    sums = {name: sum(float(leaf.sum()) for leaf in load(tmp_path / name).leaves()) for name in names}
    assert sums == dict.fromkeys(names, 6e6)
    assert "1 save(s) in the background failed, and no call raised it" in errors
    assert f"{tmp_path}/missing/t.safetensors: FileNotFoundError" in errors


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_starts_with_nothing_pending(gate, tmp_path):
    """A forked process can save and wait; it is told that it cannot wait for a save of its parent."""
    saver = AsyncSaver()
    handle = saver.save(TREE, tmp_path / "parent.safetensors")
    child = os.fork()
    if not child:
        code = 1
        try:
            gate.set()
            with pytest.raises(ConcurrencyError, match=r"(?s)parent\.safetensors: only the process.*a forked process"):
                handle.result()
            saver.wait()
            saver.save(TREE, tmp_path / "child.safetensors").result(timeout=20)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    gate.set()
    handle.result()

    assert status == 0
    assert sorted(os.listdir(tmp_path)) == ["child.safetensors", "parent.safetensors"]


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:]], ids=["whole", "rows"])
def test_leaves_in_writable_files_are_copied(view, gate, tmp_path):
    """Leaves on files that can be written to are saved as they were."""
    made = TREE.memmap(tmp_path / "m")
    opened = TensorDict.load_memmap(tmp_path / "m", mode="r+")
    with AsyncSaver(max_pending=3) as saver:
        saver.save(TensorDict({"w": view(made["w"])}), tmp_path / "made.safetensors")
        saver.save(TensorDict({"w": view(opened["w"])}), tmp_path / "opened.safetensors")
        opened["w"].fill_(7)
        gate.set()

    saved = {name: load(tmp_path / f"{name}.safetensors")["w"] for name in ("made", "opened")}
    torch.testing.assert_close(saved, dict.fromkeys(saved, view(TREE["w"])), rtol=0, atol=0)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:]], ids=["whole", "rows"])
def test_leaves_on_private_maps_are_checked(view, gate, tmp_path):
    """They are not copied: a change is found."""
    TREE.memmap(tmp_path / "m")
    private = TensorDict.load_memmap(tmp_path / "m")
    with AsyncSaver() as saver:
        lost = saver.save(TensorDict({"w": view(private["w"])}), tmp_path / "private.safetensors")
        private["w"].fill_(8)
        gate.set()
        with pytest.raises(ConcurrencyError, match=r'leaf "w" changed after the save was submitted'):
            lost.result()
