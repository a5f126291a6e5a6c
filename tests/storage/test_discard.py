"""The later steps of a run are discarded together, also if the process is killed in the middle."""

import errno
import os
import signal
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability.children import in_child
from tdfunc import CheckpointManager, CorruptCheckpointError
from tdfunc.storage.disk import commit
from tdfunc.storage.manager import discard, steps
from tdfunc.storage.manager.marks import MARK_FILE, write_marks
from tests.cli.helpers import run as command
from tests.helpers import examples, run_in_threads
from tests.storage.scripts import tree_of, value_of

OLD = [10, 20, 30, 40]
NEW = [10, 20]


@pytest.fixture
def run(tmp_path):
    """A run of four steps."""
    manager = CheckpointManager(tmp_path / "run", fsync=False)
    for step in OLD:
        manager.save(step, tree_of(step))
    return manager


def names_in(manager):
    """The names in the folder of a run."""
    return sorted(os.listdir(manager._folder))


def folders_of(numbers):
    """The names of the folders of steps."""
    return [steps.step_name(number) for number in numbers]


def refuse(*args, **options):
    """Fail as the system does."""
    raise PermissionError(errno.EACCES, "no permission")


def half_done(manager):
    """Mark the later steps of a run, as a process that was killed before the first folder was removed."""
    discard._mark([30, 40], manager._folder, fsync=False)


@examples(1)
@given(numbers=st.sets(st.integers(0, 99), min_size=1, max_size=6), data=st.data())
def test_the_steps_up_to_the_number_stay(tmp_path_factory, numbers, data):
    """Of any steps, those above the number are removed and returned, and the others load as before."""
    manager = CheckpointManager(tmp_path_factory.mktemp("law"), fsync=False)
    for number in numbers:
        manager.save(number, tree_of(number))
    last = data.draw(st.sampled_from(sorted(numbers)))

    removed = manager.discard_after(last)

    kept = sorted(number for number in numbers if number <= last)
    assert removed == sorted(numbers - {*kept})
    assert names_in(manager) == folders_of(kept)
    assert [value_of(manager.load(number)) for number in kept] == kept


def test_the_latest_step_is_the_given_one(run):
    """The step becomes the one that a new process loads."""
    run.discard_after(20)

    assert value_of(CheckpointManager(run._folder).load()) == 20


def test_the_run_continues_without_a_warning(run):
    """After a return to the step, saves below and at the numbers of removed steps are ordinary saves."""
    run.load(20)
    run.discard_after(20)
    for step in (21, 30, 41):
        run.save(step, tree_of(-step))

    assert run.steps() == [10, 20, 21, 30, 41]


def test_a_second_return_warns_again(run):
    """Steps that were saved again after they were discarded are later steps like any others."""
    run.load(20)
    run.discard_after(20)
    run.save(40, tree_of(-40))
    run.load(20)

    with pytest.warns(RuntimeWarning, match=r"step 21 is below step 40[\s\S]*discard_after"):
        run.save(21, tree_of(21))


def test_no_later_steps(run):
    """Without later steps nothing happens."""
    assert run.discard_after(40) == []
    assert run.steps() == OLD


def test_a_step_that_does_not_exist(run):
    """A wrong number removes nothing."""
    with pytest.raises(FileNotFoundError, match="discard_after.*step 5 does not exist"):
        run.discard_after(5)
    assert run.steps() == OLD


def test_saves_in_the_background_are_finished_first(tmp_path):
    """A step that is being saved does not come back."""
    manager = CheckpointManager(tmp_path, async_save=True, max_pending=4)
    for step in OLD:
        manager.save(step, tree_of(step))

    assert manager.discard_after(20) == [30, 40]
    manager.wait()
    assert manager.steps() == NEW


def test_damaged_steps_are_removed(run):
    """A later step with a damaged description is removed, as `delete` does."""
    (run.path(40) / steps.ABOUT_FILE).write_bytes(b"{}")

    assert run.discard_after(20) == [30, 40]
    assert names_in(run) == folders_of(NEW)


def hold_a_step(run):
    """Load a later step meanwhile."""
    return steps.reading(run._folder, 30)


def link_a_step(run):
    """Make a later step a link."""
    os.rename(run.path(30), f"{run._folder}-moved")
    run.path(30).symlink_to(f"{run._folder}-moved")
    return pytest.MonkeyPatch.context()


def take_a_step(run):
    """Put the file of another program in the place of a later step's description."""
    os.rename(run.path(30) / steps.ABOUT_FILE, run.path(30) / "notes.txt")
    return pytest.MonkeyPatch.context()


@pytest.mark.parametrize(
    ("prepare", "kind", "message"),
    [
        (hold_a_step, BlockingIOError, "step 30 is being loaded; nothing was removed"),
        (link_a_step, FileExistsError, "is a link"),
        (take_a_step, FileExistsError, "only folders of a CheckpointManager are removed"),
    ],
    ids=["read", "linked", "foreign"],
)
def test_if_one_step_stays_all_stay(prepare, kind, message, run):
    """A step that must not be removed keeps all others."""
    with prepare(run), pytest.raises(kind, match=f"discard_after.*{message}"):
        run.discard_after(20)
    assert run.steps() == OLD


# -- killed in the middle ---------------------------------------------------------------------------------------

CHANGES = ("rename", "replace", "unlink", "rmdir", "fsync")


def discard_until(manager, changes):
    """Discard the later steps in this process, which ends by SIGKILL before one more change of the disk."""
    left = changes

    def counted(change):
        def call(*args, **options):
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return change(*args, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    manager.discard_after(20)


@pytest.mark.parametrize("changes", range(14))
def test_a_killed_process_discards_all_or_none(changes, run):
    """A process that is killed at any change of the disk leaves all later steps, or none; a new manager cleans up."""
    manager = CheckpointManager(run._folder)
    status, _ = in_child(lambda: discard_until(manager, changes))
    found = run.steps()
    CheckpointManager(run._folder)

    assert status in (0, signal.SIGKILL)
    assert found in (OLD, NEW)
    assert names_in(run) == folders_of(found)


def test_marked_steps_are_gone(run):
    """A step that a killed process has only marked is not listed, loaded or best."""
    half_done(run)

    assert run.steps() == NEW
    assert value_of(run.load()) == 20
    assert "step 40" not in command("show", run._folder).out
    with pytest.raises(FileNotFoundError, match="step 30 does not exist"):
        run.load(30)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda run: CheckpointManager(run._folder), NEW),
        (lambda run: run.save(30, tree_of(-30)), [10, 20, 30]),
        (lambda run: run.discard_after(10), [10]),
    ],
    ids=["a new manager", "a save of a marked step", "another discard"],
)
def test_the_rest_is_removed_later(act, expected, run):
    """A new manager, a save and another call remove the folders of marked steps, and the marks."""
    half_done(run)

    act(run)

    assert names_in(run) == folders_of(expected)


def test_steps_that_another_process_discards_are_left_to_it(run):
    """While a process has the lock of the folder, a new manager does not remove its marks."""
    half_done(run)
    with commit.locked(run._folder):
        CheckpointManager(run._folder)

        assert MARK_FILE in names_in(run)
    assert run.steps() == NEW


def test_folders_that_cannot_be_removed(run, monkeypatch):
    """If the system does not remove a folder, a warning says so; the steps are gone, and the next call removes it."""
    with monkeypatch.context() as patch:
        patch.setattr(discard, "remove_step", refuse)
        for step in (30, 20):
            with pytest.warns(RuntimeWarning, match=r"still there[\s\S]*no permission"):
                run.discard_after(step)

    assert run.steps() == NEW
    assert run.discard_after(20) == []
    assert names_in(run) == folders_of(NEW)


def test_a_marked_step_that_was_saved_again_stays(run):
    """A step that another process has put in the place of a marked one is a new step."""
    write_marks(run._folder, {30: "of another step", 40: discard._identity(run.path(40))}, fsync=False)

    assert CheckpointManager(run._folder).steps() == [10, 20, 30]


def test_a_damaged_mark_is_named(run):
    """A damaged file of marks is an error that names it, and not a run with all steps."""
    with open(f"{run._folder}/{MARK_FILE}", "w") as file:
        file.write("{")

    with pytest.raises(CorruptCheckpointError, match=rf"{MARK_FILE} is malformed[\s\S]*remove this file"):
        run.load()


# -- loads meanwhile --------------------------------------------------------------------------------------------


def test_loads_meanwhile_are_whole(tmp_path):
    """Whoever loads the newest step meanwhile gets a whole step, whenever the later ones are discarded."""
    CheckpointManager(tmp_path, fsync=False).save(1, tree_of(1))
    loaded = set()

    def load_often():
        for _ in range(200):
            loaded.add(value_of(CheckpointManager(tmp_path).load()))

    def discard_often():
        manager = CheckpointManager(tmp_path, fsync=False)
        for _ in range(40):
            for step in (2, 3, 4):
                manager.save(step, tree_of(step))
            while manager.latest() != 1:
                # A load may have one of them.
                with suppress(BlockingIOError):
                    manager.discard_after(1)

    run_in_threads(lambda work: work(), [load_often, discard_often])

    assert loaded <= {1, 2, 3, 4}
    assert os.listdir(tmp_path) == folders_of([1])
