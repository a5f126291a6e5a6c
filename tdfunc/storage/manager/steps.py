"""Step folders of a run, `step-0000000042`: named, listed, written in one step, held while they are read, removed."""

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from tdfunc.core.errors import CorruptCheckpointError, error
from tdfunc.storage.disk import commit

_NAME = re.compile(r"step-([0-9]{10,200})")
_MAX_DIGITS = 200


class StepRemovedError(FileNotFoundError):
    """The step was there when its folder was looked for, and is not any more."""


class StepReplacedError(CorruptCheckpointError):
    """Another save of the step took its place while it was read: what was read is of two saves."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:010d}"


def as_step(step: int, call: str) -> int:
    """Return a step as a plain int; raise for a number that has no folder name."""
    number = step.__index__()
    if number < 0 or number >= 10**_MAX_DIGITS:
        raise error(
            ValueError,
            f"{call}: the step must be 0 or more.",
            expected=f"an int of 0 or more, of at most {_MAX_DIGITS} digits",
            got=f"an int of {number.bit_length()} bits" if number > 0 else repr(number),
        )
    return number


def list_steps(folder: str) -> list[int]:
    """Return the steps in a folder, in order; whatever else is there does not count."""
    found: list[int] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and step_name(int(match[1])) == entry.name and entry.is_dir(follow_symlinks=False):
                found.append(int(match[1]))
    return sorted(found)


def write_step(folder: str, step: int, fill: Callable[[str], None], *, overwrite: bool, fsync: bool) -> None:
    """Fill a new folder and give it the name of the step.

    Raises:
        FileExistsError: There is such a step, and it is not to be replaced.
        OSError: The file system refused; nothing is left behind.
    """
    commit.make_folder(folder, fsync=fsync)
    commit.sweep(folder)
    try:
        commit.replace_folder(os.path.join(folder, step_name(step)), fill, overwrite=overwrite, fsync=fsync)
    except FileExistsError as err:
        raise exists_error(folder, step) from err


def exists_error(folder: str, step: int) -> FileExistsError:
    """Return the error for a step that is there already."""
    return error(
        FileExistsError,
        f"save {folder}: step {step} exists; nothing was saved.",
        expected="a new step",
        got=step_name(step),
        hint="save(..., overwrite=True) replaces it; delete(step) removes it.",
    )


@contextmanager
def reading(folder: str, step: int, call: str = "load") -> Generator[str, None, None]:
    """Hold a step so that nobody removes it, and give its path; errors name the call.

    Raises:
        StepRemovedError: It is not there.
        StepReplacedError: Another one was there before the end.
    """
    path = os.path.join(folder, step_name(step))
    while True:
        try:
            held = commit.Descriptor(path, commit.FOLDER | commit.NO_LINK)
        except FileNotFoundError as err:
            raise _removed(folder, step, call) from err
        # Without the lock (its writer still has it, or the file system has none) a reader may find the step gone.
        with suppress(OSError):
            commit.lock(held.fd, shared=True)
        if commit.is_at(held.fd, path):
            break
        held.close()
    with held as fd:
        try:
            yield path
        except (FileNotFoundError, CorruptCheckpointError) as err:
            if commit.is_at(fd, path):
                raise
            if os.path.isdir(path):
                raise StepReplacedError(str(err)) from err
            raise _removed(folder, step, call) from err


def _removed(folder: str, step: int, call: str) -> StepRemovedError:
    steps = list_steps(folder)
    shown = ", ".join(map(str, steps[-10:])) or "no steps"
    return error(
        StepRemovedError,
        f"{call} {folder}: step {step} is not there; it was removed, or never saved.",
        expected=step_name(step),
        got=f"... {shown}" if len(steps) > 10 else shown,
    )


def remove_step(folder: str, step: int) -> bool:
    """Remove a step as a whole; False if it is being read (or is not there)."""
    return commit.remove_folder(os.path.join(folder, step_name(step)))
