"""The checkpoints of a run when saves are killed, fail, or meet other saves and loads."""

import os
import signal
import time
from contextlib import suppress

import pytest

from tdfunc import CheckpointManager
from tdfunc.core.system import platform
from tdfunc.storage.disk import commit
from tdfunc.storage.manager import manager as manager_module
from tdfunc.storage.manager import steps as steps_module
from tests.helpers import run_in_threads
from tests.storage.scripts import tree_of, value_of

# -- interrupted saves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remove", "steps"),
    [
        pytest.param(lambda manager, folder: CheckpointManager(folder), {"step-0000000000"}, id="a new manager"),
        pytest.param(
            lambda manager, folder: manager.save(1, tree_of(1)), {"step-0000000000", "step-0000000001"}, id="a save"
        ),
    ],
)
def test_leftovers_are_removed_unless_somebody_still_writes(remove, steps, tmp_path):
    """A new manager and the next save remove what killed saves left, and nothing of a save that runs."""
    manager = CheckpointManager(tmp_path)
    manager.save(0, tree_of(0))

    def create(path):
        os.mkdir(path)
        return commit.Folder(path)

    with commit._staged(f"{tmp_path}/{steps_module.step_name(7)}", create) as (running, _):
        dead = tmp_path / os.path.basename(commit._temporary("step-0000000001"))
        dead.mkdir()
        (dead / "model.safetensors").write_bytes(b"part")
        remove(manager, tmp_path)

        assert not dead.exists()
        assert os.path.isdir(running)
    assert set(os.listdir(tmp_path)) - {os.path.basename(running)} == steps


def test_a_step_whose_writer_was_killed_between_two_renames(tmp_path, monkeypatch):
    """A step that was moved aside, and that nothing has replaced, is found; the next save gives it its name back."""
    manager = CheckpointManager(tmp_path)
    for step in (0, 1, 2):
        manager.save(step, tree_of(step))
    new, superseded = (commit._temporary(str(manager.path(step))) for step in (1, 2))
    os.rename(manager.path(2), commit._twin(superseded))

    def move_aside(path):
        monkeypatch.undo()
        os.mkdir(new)
        os.rename(path, commit._twin(new))
        return path

    monkeypatch.setattr(commit, "locate", move_aside)
    assert value_of(manager.load(1)) == 1
    assert CheckpointManager(tmp_path).steps() == [0, 1]
    manager.save(3, tree_of(3))
    assert sorted(os.listdir(tmp_path)) == [manager.path(step).name for step in (0, 1, 3)]


# -- several processes ------------------------------------------------------------------------------------------


def test_two_threads_that_save_the_same_steps(tmp_path):
    """Of two threads that save the same step, one gets FileExistsError, and the other's is there."""
    won = {1.0: [], 2.0: []}

    def work(value):
        manager = CheckpointManager(tmp_path, fsync=False)
        for step in range(40):
            with suppress(FileExistsError):
                manager.save(step, tree_of(value))
                won[value].append(step)

    run_in_threads(work, won)
    manager = CheckpointManager(tmp_path)

    assert sorted(won[1.0] + won[2.0]) == list(range(40))
    assert [value_of(manager.load(step)) for step in range(40)] == [1 if s in won[1.0] else 2 for s in range(40)]
    assert len(os.listdir(tmp_path)) == 40


def test_a_step_that_is_read_is_not_removed(tmp_path):
    """A step that is read is removed by a later save, and not by this one."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(0, tree_of(0))
    with steps_module.reading(str(tmp_path), 0):
        manager.save(1, tree_of(1))
        assert manager.steps() == [0, 1]
    manager.save(2, tree_of(2))

    assert manager.steps() == [2]


def test_the_latest_is_removed_before_it_is_opened(tmp_path, monkeypatch):
    """Where the latest step is removed before it is opened, a later one is loaded."""
    manager, real = CheckpointManager(tmp_path), manager_module.reading
    manager.save(0, tree_of(0))

    def late(folder, step, call):
        if step == 0:
            manager.save(1, tree_of(1))
            steps_module.remove_step(folder, 0)
        return real(folder, step, call)

    monkeypatch.setattr(manager_module, "reading", late)
    assert value_of(manager.load()) == 1


def test_without_locks_a_step_that_goes_while_it_is_read_is_gone_and_not_damaged(tmp_path, monkeypatch):
    """On a file system without locks a step that is removed while it is read is gone, and not damaged."""
    monkeypatch.setattr(platform, "_fcntl", None)
    manager, real = CheckpointManager(tmp_path, keep_last=2), steps_module.load_choice
    for step in range(3):
        manager.save(step, tree_of(step))
    assert manager.steps() == [1, 2]

    def late(*args, **kwargs):
        steps_module.remove_step(str(tmp_path), 1)
        return real(*args, **kwargs)

    monkeypatch.setattr(steps_module, "load_choice", late)
    with pytest.raises(FileNotFoundError, match="step 1 does not exist; it was removed"):
        manager.load(1)
    assert value_of(manager.load()) == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_during_a_save_keeps_nobody_waiting(tmp_path, monkeypatch):
    """Processes that were forked during a save keep no lock that loads or removals wait for."""
    children, real = [], steps_module._describe

    def fork(about):
        child = os.fork()
        if not child:
            time.sleep(250)
            os._exit(0)
        children.append(child)
        return real(about)

    monkeypatch.setattr(steps_module, "_describe", fork)
    manager = CheckpointManager(tmp_path, keep_last=1)
    try:
        values = []
        for step in range(2):
            manager.save(step, tree_of(step))
            values.append(value_of(manager.load(step)))
        assert values == [0, 1]
        assert manager.steps() == [1]
        assert [os.waitpid(child, os.WNOHANG) for child in children] == [(0, 0)] * len(children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
