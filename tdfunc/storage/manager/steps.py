"""The folder of one step, `step-0000000042`: its name, its files, held while it is read, written and removed whole."""

import json
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, NamedTuple

import xxhash

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, error
from tdfunc.storage.api import load_choice
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.raw import write_all
from tdfunc.storage.manager.background import Snapshot
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import plan_save
from tdfunc.storage.safetensors.ranks import RankSave
from tdfunc.storage.safetensors.select import Choice
from tdfunc.storage.safetensors.write import SHARD, write_into
from tdfunc.storage.tree.specs import no_constant, unique

# With more digits a name is longer than a file system takes.
_NAME = re.compile(r"step-([0-9]{10,250})")
ABOUT_FILE = "checkpoint.json"
_VERSION = 1
_START = '{"digest":"xxh3-64:'
_DIGEST_DIGITS = 16


class About(NamedTuple):
    """The contents of `checkpoint.json`."""

    step: int
    # The name of the tree's file, or of the index of its shards.
    file: str
    # The digest of that file's header, which holds those of all leaves.
    tree: str
    metadata: dict[str, Any]


class StepRemovedError(FileNotFoundError):
    """The step was there when its folder was looked for, and is not any more."""


class StepReplacedError(CorruptCheckpointError):
    """Another save of the step took its place while it was read."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:010d}"


def as_step(step: int, call: str) -> int:
    """Return a step as a plain int; raise for a negative or other number."""
    try:
        number = index(step)
    except TypeError as err:
        raise error(TypeError, f"{call}: the step must be a whole number.", got=repr(step)) from err
    if number < 0:
        raise error(ValueError, f"{call}: the step must be 0 or more.", got=repr(number))
    return number


def list_steps(folder: str) -> list[int]:
    """Return the steps in a folder, in order; other entries do not count, nor do folders without a file of a step."""
    found: list[int] = []
    aside: list[str] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and step_name(int(match[1])) == entry.name and entry.is_dir(follow_symlinks=False):
                if any(os.path.lexists(os.path.join(entry.path, name)) for name in (ABOUT_FILE, SINGLE, INDEX)):
                    found.append(int(match[1]))
            elif entry.name.endswith(".old") and commit.LEFTOVER.fullmatch(entry.name):
                aside.append(entry.path)
    for path in aside:
        # The old folder of a step whose writer was killed before the new one had its name.
        with suppress(OSError, CorruptCheckpointError, UnsupportedError):
            step = read_about(path, None).step
            if commit.locate(os.path.join(folder, step_name(step))) == path:
                found.append(step)
    return sorted(found)


def write_step(
    folder: str,
    step: int,
    snapshot: Snapshot | RankSave,
    metadata: dict[str, Any],
    *,
    max_bytes: int | None,
    overwrite: bool,
    fsync: bool,
) -> None:
    """Write a tree and its `checkpoint.json` into a new folder, and give it the name of the step.

    Of a tree that all ranks save, the first one makes the folder.
    """
    path = os.path.join(folder, step_name(step))
    if isinstance(snapshot, RankSave):

        def commit_file(path: str, write: Callable[[int, str], None], size_bytes: int) -> None:
            def write_file(place: str) -> None:
                file = os.path.join(place, SINGLE)
                commit.replace_named(file, write, size_bytes=size_bytes, fsync=fsync)

            _replace_step(path, write_file, SINGLE, step, metadata, overwrite=overwrite, fsync=fsync)

        snapshot.write(path, commit_file, folder)
        return
    outline, digests = snapshot.outline, snapshot.digests()

    def write_files(place: str) -> None:
        # As Hugging Face does, so that its libraries read a step too.
        write_into(plan_save(outline, max_bytes, digests), place, fsync=fsync)

    file = SINGLE if max_bytes is None else INDEX
    _replace_step(path, write_files, file, step, metadata, overwrite=overwrite, fsync=fsync)


def _replace_step(
    path: str,
    write: Callable[[str], None],
    file: str,
    step: int,
    metadata: dict[str, Any],
    *,
    overwrite: bool,
    fsync: bool,
) -> None:
    """Make the folder of a step, with the files that `write` puts into it and a description of them."""
    folder = os.path.dirname(path)

    def fill(place: str) -> None:
        write(place)
        text = _describe(About(step, file, _header_digest(os.path.join(place, file)), metadata))
        about = os.path.join(place, ABOUT_FILE)
        commit.put_file(about, lambda fd: write_all(fd, text), size_bytes=len(text), fsync=fsync)

    path = os.path.join(folder, step_name(step))
    commit.make_folder(folder, fsync=fsync)
    for other in list_steps(folder):
        commit.restore(os.path.join(folder, step_name(other)))
    commit.sweep(folder)
    try:
        commit.replace_folder(path, fill, check=lambda: _check_own(path, "save"), overwrite=overwrite, fsync=fsync)
    except FileExistsError as err:
        if err.errno is None:
            raise
        raise exists_error(folder, step) from err


def _check_own(path: str, call: str) -> None:
    """Raise if a folder may be another program's: it has no `checkpoint.json`, and more than the files of a step."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(path)
        foreign = [name for name in names if name not in (SINGLE, INDEX) and not SHARD.fullmatch(name)]
        if foreign and ABOUT_FILE not in names:
            raise error(
                FileExistsError,
                f"{call} {path}: only folders of a CheckpointManager are removed.",
                expected=f"a folder with {ABOUT_FILE}",
                got=", ".join(sorted(names)[:5]),
                hint="move or remove it by hand.",
            )


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
    """Hold a step so that it is not removed, and yield its path; errors name the call."""
    path = os.path.join(folder, step_name(step))
    while True:
        place = commit.locate(path)
        try:
            held = commit.Descriptor(place, commit.FOLDER | commit.NO_LINK)
        except FileNotFoundError as err:
            if commit.locate(path) != place:
                continue
            raise _removed(folder, step, call) from err
        # Without the lock (its writer still has it, or the file system has none) a reader may find the step gone.
        with suppress(OSError):
            commit.lock(held.fd, shared=True)
        if commit.is_at(held.fd, place):
            break
        held.close()
    with held as fd:
        try:
            yield place
        except (FileNotFoundError, CorruptCheckpointError) as err:
            if commit.is_at(fd, place):
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


def remove_step(folder: str, step: int, *, damaged: bool = False) -> bool:
    """Remove a step as a whole; False if it is being read (or is not there).

    Raises:
        CorruptCheckpointError: It is damaged, and `damaged` does not include such.
        FileExistsError: It may be another program's.
    """
    path = os.path.join(folder, step_name(step))

    def check() -> None:
        # A name proves nothing; its own `checkpoint.json` does.
        if damaged:
            _check_own(path, "delete")
        else:
            read_about(path, step)

    return commit.remove_folder(path, check)


# Any: the class of the tree is the one that was saved.
def load_step(path: str, step: int, choice: Choice, *, verify: bool = True) -> Any:
    """Load the tree of a step, which must be the one that its `checkpoint.json` describes."""
    with naming_step(path, step):
        check_tree(path, read_about(path, step))
        return load_choice(path, choice, verify=verify)


def _describe(about: About) -> memoryview:
    fields = {"format": "tdfunc checkpoint", "version": _VERSION, **about._asdict()}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    raw = f'{_START}{"0" * _DIGEST_DIGITS}",{text[1:]}\n'.encode()
    return memoryview(raw.replace(b"0" * _DIGEST_DIGITS, xxhash.xxh3_64_hexdigest(raw).encode(), 1))


def read_about(folder: str, step: int | None) -> About:
    """Read the `checkpoint.json` of a step; without a number, of any."""
    path = os.path.join(folder, ABOUT_FILE)
    with naming_step(folder, step):
        with open(path, "rb") as file:
            raw = file.read()
        start, end = len(_START), len(_START) + _DIGEST_DIGITS
        found = xxhash.xxh3_64_hexdigest(raw[:start] + b"0" * _DIGEST_DIGITS + raw[end:])
        if raw[:start] != _START.encode() or raw[start:end] != found.encode():
            raise CorruptCheckpointError(
                f"{ABOUT_FILE} is damaged.", expected=f"{_START}{found}", got=repr(raw[:end])[2:-1]
            )
        try:
            fields = json.loads(raw, object_pairs_hook=unique, parse_constant=no_constant)
            version = fields["version"]
            about = None
            if version == _VERSION:
                about = About(fields["step"], fields["file"], fields["tree"], dict(fields["metadata"]))
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise CorruptCheckpointError(
                f"{ABOUT_FILE} is malformed.", got=f"{type(err).__name__}: {err}"[:300]
            ) from err
        if about is None:
            raise UnsupportedError(
                f"load {path}: the format must be known.",
                expected=f"version {_VERSION}",
                got=repr(version)[:100],
                hint="a later version of tdfunc wrote it.",
            )
        if about.step != (about.step if step is None else step) or about.file not in (SINGLE, INDEX):
            raise CorruptCheckpointError(
                "the folder must have the name of its step.",
                expected=f"step {step} in {SINGLE} or {INDEX}",
                got=f"step {about.step} in {about.file!r}"[:100],
            )
        return about


def check_tree(folder: str, about: About) -> None:
    """Raise unless the tree in a step's folder is the one that was saved with its `checkpoint.json`."""
    found = _header_digest(os.path.join(folder, about.file))
    if found != about.tree:
        raise CorruptCheckpointError(
            f"{about.file} is not the one that was saved with {ABOUT_FILE}.",
            expected=f"a header with the digest {about.tree}",
            got=found,
        )


def _header_digest(path: str) -> str:
    """Return the digest of the header of a safetensors file, or of a whole index."""
    with open(path, "rb") as file:
        raw = file.read(-1 if path.endswith(INDEX) else 8)
        if not path.endswith(INDEX):
            left = os.fstat(file.fileno()).st_size - len(raw)
            raw += file.read(min(int.from_bytes(raw, "little"), left))
    return f"xxh3-64:{xxhash.xxh3_64_hexdigest(raw)}"


@contextmanager
def naming_step(folder: str, step: int | None) -> Generator[None, None, None]:
    """Name the step in every sign of damage."""
    what = f"step {step} in {os.path.dirname(folder)} is damaged:"
    try:
        yield
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(str(err) if str(err).startswith(what) else f"{what} {err}") from err
    except FileNotFoundError as err:
        # If the whole folder is gone, the step was removed.
        if not os.path.isdir(folder):
            raise
        raise CorruptCheckpointError(
            f"{what} a file is missing.",
            expected=os.path.basename(os.fsdecode(err.filename or "")),
            hint="load(fallback=True) loads the newest whole step; delete(step) removes this one.",
        ) from err
