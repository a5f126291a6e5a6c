"""The folder of one step, `step-0000000042`: its name and files. It is held while it is read, and removed whole."""

import errno
import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, as_count, damaged, error
from tdfunc.storage.api import load_choice
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.raw import write_all
from tdfunc.storage.manager.background import Snapshot
from tdfunc.storage.manager.marks import read_marks
from tdfunc.storage.safetensors.header import ALGORITHM, DIGITS, digest
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import plan_save
from tdfunc.storage.safetensors.ranks import RankSave
from tdfunc.storage.safetensors.select import Choice
from tdfunc.storage.safetensors.write import SHARD, write_into
from tdfunc.storage.tree.specs import parse_json

ABOUT_FILE = "checkpoint.json"
_VERSION = 1
_START = f'{{"digest":"{ALGORITHM}:'


class About(NamedTuple):
    """The contents of `checkpoint.json`."""

    step: int
    # The name of the tree's file, or of the index of its shards.
    file: str
    # The digest of that file's header, which contains the digests of all leaves.
    tree: str
    metadata: dict[str, Any]
    # Higher steps that were there already, by their digests: the run had gone back to a lower one.
    above: dict[str, str] | None = None


# A disk that cannot read, and a file system that finds itself damaged.
_UNREADABLE = frozenset(
    [getattr(errno, name) for name in ("EIO", "EUCLEAN", "EBADMSG", "EREMOTEIO", "ENXIO") if hasattr(errno, name)]
)


class StepRemovedError(FileNotFoundError):
    """The step was removed while its folder was opened."""


class StepReplacedError(CorruptCheckpointError):
    """Another save replaced the step while it was read."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:010d}"


def as_step(step: int, call: str) -> int:
    """Return a step as a plain int; raise for a negative or other number."""
    return as_count(f"{call}: the step", step, 0)


def list_steps(folder: str) -> list[int]:
    """Return the steps in a folder, in order, without discarded ones and without folders that have no file of a step.

    A link to the folder of a step, which may be on another disk, is the step.
    """
    found, aside = _scan(folder)
    return sorted({*found, *aside} - read_marks(folder).keys())


def _scan(folder: str) -> tuple[list[int], list[int]]:
    """Return the steps in a folder, and those whose writer was killed before the new folder had the name of the old."""
    found: list[int] = []
    aside: list[int] = []
    leftovers: list[str] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            step = step_of(entry.name)
            if step is not None and entry.is_dir():
                if _has_files(entry.path):
                    found.append(step)
            elif entry.name.endswith(".old") and commit.LEFTOVER.fullmatch(entry.name):
                leftovers.append(entry.path)
    for path in leftovers:
        with suppress(OSError, CorruptCheckpointError, UnsupportedError):
            step = read_about(path, None).step
            if commit.locate(os.path.join(folder, step_name(step))) == path:
                aside.append(step)
    return found, aside


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name."""
    match = commit.STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # More zeros than `step_name` writes are another program's.
    return step if step_name(step) == name else None


def _has_files(path: str) -> bool:
    """Return whether a folder has a file of a step."""
    return any(os.path.lexists(os.path.join(path, name)) for name in (ABOUT_FILE, SINGLE, INDEX))


@dataclass(frozen=True)
class _NewStep:
    """A step that is saved, without its tree."""

    folder: str
    step: int
    metadata: dict[str, Any]
    # Higher steps that were there already.
    above: Sequence[int]
    overwrite: bool
    fsync: bool

    def put(self, write: Callable[[str], None], file: str) -> None:
        """Make the folder, with the files that `write` puts into it and a description of them.

        `file` is the name of the tree's file, or of the index of its shards.
        """
        path = os.path.join(self.folder, step_name(self.step))

        def fill(place: str) -> None:
            write(place)
            self._write_about(place, file)

        def check() -> None:
            check_own(path, "save")

        commit.make_folder(self.folder, fsync=self.fsync)
        # Only these: a run may keep thousands of steps.
        _, aside = _scan(self.folder)
        for other in aside:
            commit.restore(os.path.join(self.folder, step_name(other)))
        commit.sweep(self.folder)
        try:
            commit.replace_folder(path, fill, check=check, overwrite=self.overwrite, fsync=self.fsync)
        except FileExistsError as err:
            # One without a number is the error of `check`.
            if err.errno is None:
                raise
            raise exists_error(self.folder, self.step) from err

    def put_file(self, write: Callable[[int, str], None], size_bytes: int) -> None:
        """Make the folder with one file, that `write` fills; it gets a descriptor and the name for other writers."""

        def write_file(place: str) -> None:
            commit.replace_named(os.path.join(place, SINGLE), write, size_bytes=size_bytes, fsync=self.fsync)

        self.put(write_file, SINGLE)

    def _write_about(self, place: str, file: str) -> None:
        """Write the `checkpoint.json` of the step into its new folder."""
        tree = _header_digest(os.path.join(place, file))
        above = _digests(self.folder, self.above)
        text = _describe(About(self.step, file, tree, self.metadata, above))
        path = os.path.join(place, ABOUT_FILE)
        commit.put_file(path, lambda fd, _: write_all(fd, text), size_bytes=len(text), fsync=self.fsync)


def write_step(
    folder: str,
    step: int,
    snapshot: Snapshot | RankSave,
    metadata: dict[str, Any],
    *,
    max_bytes: int | None,
    overwrite: bool,
    fsync: bool,
    above: Sequence[int] = (),
) -> None:
    """Write a tree and its `checkpoint.json` into a new folder, and give it the name of the step.

    If all ranks save the tree, the first one makes the folder.
    """
    new = _NewStep(folder, step, metadata, above, overwrite, fsync)
    # These are Hugging Face's names, so that its libraries read a step.
    if isinstance(snapshot, RankSave):
        snapshot.write(new.put_file, folder)
        return
    plan = plan_save(snapshot.outline, max_bytes, snapshot.digests())
    new.put(lambda place: write_into(plan, place, fsync=fsync), SINGLE if max_bytes is None else INDEX)


def _digests(folder: str, steps: Sequence[int]) -> dict[str, str]:
    """Return the digests of the steps that are there."""
    found: dict[str, str] = {}
    for step in steps:
        with suppress(OSError, CorruptCheckpointError, UnsupportedError):
            found[str(step)] = read_about(os.path.join(folder, step_name(step)), step).tree
    return found


def saved_after(folder: str, step: int) -> list[int]:
    """Return the lower steps that were saved when a step was there already, by a run that had gone back."""
    tree = _digests(folder, [step]).get(str(step))
    found: list[int] = []
    for other in list_steps(folder):
        with suppress(OSError, CorruptCheckpointError, UnsupportedError):
            above = read_about(os.path.join(folder, step_name(other)), other).above or {}
            if other < step and tree is not None and above.get(str(step)) == tree:
                found.append(other)
    return found


def check_own(path: str, call: str) -> None:
    """Raise if a folder may belong to another program: it has other files, and no `checkpoint.json`."""
    if os.path.islink(path):
        raise linked_error(path, call)
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


def linked_error(path: str, call: str) -> OSError:
    """Return the error for a step whose folder is a link."""
    if call == "save":
        kind: type[OSError] = NotADirectoryError
        undone = "the step was not saved"
    else:
        kind = FileExistsError
        undone = "the step was not removed"
    return error(
        kind,
        f"{call} {path}: {undone}: its folder is a link, and nothing behind a link is removed.",
        got=f"a link to {os.readlink(path)}",
        hint="remove the link by hand (unlink), and the folder behind it if nobody needs it.",
    )


def is_damage(err: CorruptCheckpointError | OSError) -> bool:
    """Return whether an error means that a step is damaged, or that the disk cannot read it."""
    return isinstance(err, CorruptCheckpointError) or err.errno in _UNREADABLE


def no_step(folder: str, call: str) -> FileNotFoundError:
    """Return the error for a folder without steps."""
    return error(
        FileNotFoundError,
        f"{call} {folder}: the folder has no step.",
        hint="latest() is None before the first save.",
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
            held = commit.Folder(place)
        except FileNotFoundError as err:
            if commit.locate(path) != place:
                continue
            raise no_such_step(folder, step, call) from err
        # Without the lock (its writer still has it, or the file system has none) a reader may find the step gone.
        with suppress(OSError):
            commit.lock(held, shared=True)
        if commit.is_at(held, place, follow=True):
            break
    with held:
        # After the lock, without which a step may be marked next.
        if step in read_marks(folder):
            raise no_such_step(folder, step, call)
        try:
            yield place
        except (FileNotFoundError, CorruptCheckpointError) as err:
            if commit.is_at(held, place, follow=True):
                raise
            if os.path.isdir(path):
                raise StepReplacedError(str(err)) from err
            raise no_such_step(folder, step, call) from err


def no_such_step(folder: str, step: int, call: str) -> StepRemovedError:
    """Return the error for a step that is not there."""
    shown = ", ".join(map(str, list_steps(folder)[-10:])) or "none"
    return error(
        StepRemovedError,
        f"{call} {folder}: step {step} does not exist; it was removed, or never saved.",
        expected=step_name(step),
        got=f"the last are {shown}",
    )


def remove_step(folder: str, step: int, *, even_damaged: bool = False) -> bool:
    """Remove a step as a whole; return False if it is being read, is a link or does not exist.

    Raises:
        CorruptCheckpointError: It is damaged, and `even_damaged` does not include it.
        FileExistsError: It may belong to another program, or is a link and `even_damaged`.
    """
    path = os.path.join(folder, step_name(step))
    if os.path.islink(path):
        if even_damaged:
            raise linked_error(path, "delete")
        return False

    def check() -> None:
        # A name proves nothing; its own `checkpoint.json` does.
        if even_damaged:
            check_own(path, "delete")
        else:
            read_about(path, step)

    return commit.remove_folder(path, check)


# Any: the class of the tree is the one that was saved.
def load_step(path: str, step: int, choice: Choice, *, verify: bool = True, mapped: bool = True) -> Any:
    """Load the tree of a step, and compare it with the description in its `checkpoint.json`."""
    with naming_step(path, step):
        check_tree(path, read_about(path, step))
        return load_choice(path, choice, verify=verify, mapped=mapped)


def _describe(about: About) -> memoryview:
    fields = {"format": "tdfunc checkpoint", "version": _VERSION, **about._asdict()}
    if not about.above:
        del fields["above"]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    raw = f'{_START}{"0" * DIGITS}",{text[1:]}\n'.encode()
    return memoryview(raw.replace(b"0" * DIGITS, digest(raw, len(_START)).encode(), 1))


def read_about(folder: str, step: int | None) -> About:
    """Read the `checkpoint.json` of a step; without a number, of any step."""
    path = os.path.join(folder, ABOUT_FILE)
    with naming_step(folder, step):
        with open(path, "rb") as file:
            raw = file.read()
        begin = f"{_START}{digest(raw, len(_START))}"
        if not raw.startswith(begin.encode()):
            raise damaged(f"{ABOUT_FILE} is damaged.", begin, repr(raw[: len(begin)])[2:-1])
        about = _parse_about(raw, path)
        is_other = step is not None and about.step != step
        if is_other or about.file not in (SINGLE, INDEX):
            raise damaged(
                "the folder does not have the name of its step.",
                f"step {step} in {SINGLE} or {INDEX}",
                f"step {about.step} in {about.file!r}"[:100],
            )
        return about


def _parse_about(raw: bytes, path: str) -> About:
    """Return the contents of a `checkpoint.json` whose digest is right."""
    try:
        fields = parse_json(raw)
        version = fields["version"]
        if version == _VERSION:
            metadata = dict(fields["metadata"])
            above = dict(fields.get("above", {}))
            return About(fields["step"], fields["file"], fields["tree"], metadata, above)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise damaged(f"{ABOUT_FILE} is malformed.", got=f"{type(err).__name__}: {err}"[:300]) from err
    raise UnsupportedError(
        f"load {path}: this version of tdfunc cannot read the format.",
        expected=f"version {_VERSION}",
        got=repr(version)[:100],
        hint="a later version of tdfunc wrote it.",
    )


def check_tree(folder: str, about: About) -> None:
    """Raise unless the tree in a step's folder was saved with its `checkpoint.json`."""
    found = _header_digest(os.path.join(folder, about.file))
    if found != about.tree:
        raise damaged(
            f"{about.file} is not the file that was saved with {ABOUT_FILE}.",
            f"a header with the digest {about.tree}",
            found,
        )


def _header_digest(path: str) -> str:
    """Return the digest of the header of a safetensors file, or of a whole index."""
    with open(path, "rb") as file:
        if path.endswith(INDEX):
            raw = file.read()
        else:
            # The length of the header, and the header.
            length = file.read(8)
            left = os.fstat(file.fileno()).st_size - len(length)
            raw = length + file.read(min(int.from_bytes(length, "little"), left))
    return f"{ALGORITHM}:{xxhash.xxh3_64_hexdigest(raw)}"


@contextmanager
def naming_step(folder: str, step: int | None) -> Generator[None, None, None]:
    """Add the step to every error of damage."""
    what = f"step {step} in {os.path.dirname(folder)} is damaged:"
    try:
        yield
    except CorruptCheckpointError as err:
        text = str(err)
        if not text.startswith(what):
            text = f"{what} {text}"
        raise CorruptCheckpointError(text) from err
    except FileNotFoundError as err:
        # If the whole folder is gone, the step was removed.
        if not os.path.isdir(folder):
            raise
        raise damaged(
            f"{what} a file is missing.",
            os.path.basename(os.fsdecode(err.filename or "")),
            hint="load(fallback=True) loads the newest whole step; delete(step) removes this one.",
        ) from err
