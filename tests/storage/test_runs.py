"""Runs of a `CheckpointManager` that are moved, rolled back, or on a disk that cannot read."""

import errno
import os
import threading

import pytest
import torch

import tdfunc
from tdfunc import CheckpointManager, TensorDict
from tdfunc.storage.disk.remote import LocalBytes
from tdfunc.storage.manager import manager as manager_module
from tests.cli.helpers import run


def tree_of(value):
    """A tree with one value."""
    return TensorDict({"w": torch.tensor(float(value))})


# -- links ------------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path):
    """A run whose step 2 was moved to another place and linked back."""
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    for step in (1, 2):
        CheckpointManager(tmp_path / "run").save(step, tree_of(step), metadata={"loss": step})
    os.rename(manager.path(2), tmp_path / "two")
    manager.path(2).symlink_to(tmp_path / "two")
    return manager


def test_a_linked_step_is_a_step(linked):
    """A linked step is listed and loaded."""
    assert linked.steps() == [1, 2]
    assert linked.load()["w"] == 2
    assert linked.metadata(2) == {"loss": 2}


def test_a_linked_step_is_not_removed(linked, tmp_path):
    """A newer step does not remove a linked one or the files behind the link."""
    for step in (3, 4):
        linked.save(step, tree_of(step))

    assert linked.steps() == [2, 4]
    assert tdfunc.load(tmp_path / "two")["w"] == 2


def test_a_linked_step_is_not_deleted(linked, tmp_path):
    """`delete` names the link, and leaves it and the files behind it."""
    with pytest.raises(FileExistsError, match=r"is a link[\s\S]*two"):
        linked.delete(2)
    assert tdfunc.load(tmp_path / "two")["w"] == 2


def test_a_linked_step_is_not_replaced(linked, tmp_path):
    """`overwrite=True` does not write through a link or over it."""
    with pytest.raises(NotADirectoryError):
        linked.save(2, tree_of(9), overwrite=True)
    assert tdfunc.load(tmp_path / "two")["w"] == 2


def test_commands_read_a_linked_step(linked):
    """The commands show a linked step with its metadata, and verify it."""
    assert "loss: 2" in run("show", linked.path(2)).out
    assert run("verify", linked._folder).code == 0


# -- back to an earlier step ------------------------------------------------------------------------------------


def go_back(folder, **options):
    """A run that saved the steps 3, 4 and 50, and went back to step 4."""
    manager = CheckpointManager(folder, **options)
    for step in (3, 4, 50):
        manager.save(step, tree_of(step))
    manager.load(4)
    return manager


def test_the_first_step_below_warns_once(tmp_path):
    """A save below an abandoned step names both steps, once."""
    manager = go_back(tmp_path)

    with pytest.warns(RuntimeWarning, match=r"step 5 is below step 50[\s\S]*delete\(50\)"):
        manager.save(5, tree_of(-5))
    manager.save(6, tree_of(-6))


def test_a_new_process_warns_too(tmp_path):
    """A manager that finds a higher step warns without a load."""
    go_back(tmp_path)

    with pytest.warns(RuntimeWarning, match="step 5 is below step 50"):
        CheckpointManager(tmp_path).save(5, tree_of(-5))


def test_a_resumed_abandoned_step_is_named(tmp_path):
    """`load` without a step, in a new process, names the newer step."""
    with pytest.warns(RuntimeWarning, match="step 5 is below step 50"):
        go_back(tmp_path).save(5, tree_of(-5))

    with pytest.warns(RuntimeWarning, match=r"step 50 is the highest, and step 5 was saved after it[\s\S]*load\(5\)"):
        assert CheckpointManager(tmp_path).load()["w"] == 50


def test_keep_last_counts_the_new_run(tmp_path):
    """An abandoned step takes no place of a new one, and stays."""
    manager = go_back(tmp_path, keep_last=2)
    with pytest.warns(RuntimeWarning, match="step 5 is below step 50"):
        manager.save(5, tree_of(-5))
    for step in (6, 7):
        manager.save(step, tree_of(-step))

    assert manager.steps() == [6, 7, 50]


def test_a_deleted_abandoned_step_is_forgotten(tmp_path):
    """After `delete` the run goes on as any other, also through the number of the old step."""
    with pytest.warns(RuntimeWarning, match="step 5 is below step 50"):
        go_back(tmp_path).save(5, tree_of(-5))
    manager = CheckpointManager(tmp_path)
    manager.delete(50)
    manager.save(50, tree_of(-50))

    assert CheckpointManager(tmp_path).load()["w"] == -50


def test_a_corrected_step_does_not_warn(tmp_path):
    """A step that is saved again, by a run that did not go back, is no new run."""
    for step in (3, 4):
        CheckpointManager(tmp_path).save(step, tree_of(step))

    CheckpointManager(tmp_path).save(3, tree_of(9), overwrite=True)

    assert CheckpointManager(tmp_path).load()["w"] == 4


@pytest.fixture
def gate(monkeypatch):
    """An event; saves of a manager wait for it."""
    event, real = threading.Event(), manager_module.write_step

    def write(*args, **options):
        assert event.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(manager_module, "write_step", write)
    yield event
    event.set()


@pytest.mark.parametrize("step", [4, None], ids=["a step", "the newest"])
def test_a_step_that_is_still_being_saved_is_abandoned(step, gate, tmp_path):
    """A run that goes back while its last save is pending warns, and a new process does too."""
    gate.set()
    manager = CheckpointManager(tmp_path, async_save=True, max_pending=2)
    manager.save(4, tree_of(4)).result()
    gate.clear()
    manager.save(50, tree_of(50))
    manager.load(step)
    with pytest.warns(RuntimeWarning, match="step 5 is below step 50"):
        manager.save(5, tree_of(-5))
    gate.set()
    manager.wait()

    with pytest.warns(RuntimeWarning, match=r"step 50 is the highest, and step 5 was saved after it"):
        CheckpointManager(tmp_path).load()


# -- a disk that cannot read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG])
@pytest.mark.parametrize("begin", [0, 9], ids=["header", "leaf"])
def test_fallback_of_a_disk_that_cannot_read(code, begin, tmp_path, monkeypatch):
    """With `fallback`, an error of the disk is damage; without it, the error of the system."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, tree_of(step))
    plain = LocalBytes.read_into

    def fail(self, view, offset):
        if "step-0000000002" in self.path and offset >= begin:
            raise OSError(code, os.strerror(code), self.path)
        return plain(self, view, offset)

    monkeypatch.setattr(LocalBytes, "read_into", fail)

    with pytest.warns(RuntimeWarning, match=r"step-0000000002[\s\S]*older step is loaded"):
        assert manager.load(fallback=True)["w"] == 1


def test_other_errors_are_not_damage(tmp_path, monkeypatch):
    """With `fallback`, a file that may not be read is still an error."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, tree_of(step))

    def fail(self, view, offset):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path)

    monkeypatch.setattr(LocalBytes, "read_into", fail)

    with pytest.raises(PermissionError):
        manager.load(fallback=True)


def test_the_folder_of_a_run_is_named(tmp_path):
    """`load` of a run's folder names the manager and a step, and the step loads."""
    CheckpointManager(tmp_path).save(3, tree_of(3))

    with pytest.raises(FileNotFoundError, match="CheckpointManager") as caught:
        tdfunc.load(tmp_path)
    assert tdfunc.load(str(caught.value).split("load('")[1].split("'")[0])["w"] == 3


def resolved_names_of_a_save(folder, kept, monkeypatch):
    """Return how often a save follows the links of a name, which looks at each part, if so many steps are kept."""
    manager = CheckpointManager(folder)
    for step in range(kept):
        manager.save(step, TensorDict({"w": torch.ones(1)}))
    real = os.path.realpath
    names = []
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", lambda name, **options: names.append(name) or real(name, **options))
        manager.save(kept, TensorDict({"w": torch.ones(1)}))
    return len(names)


def test_a_save_does_not_resolve_the_steps_that_are_kept(tmp_path, monkeypatch):
    """A run may keep thousands of steps."""
    few = resolved_names_of_a_save(tmp_path / "few", 2, monkeypatch)
    assert resolved_names_of_a_save(tmp_path / "many", 12, monkeypatch) == few
