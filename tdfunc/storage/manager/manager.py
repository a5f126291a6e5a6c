"""`CheckpointManager`: the checkpoints of a run, a folder for each step, with metadata and rules for which to keep."""

import json
import os
import pathlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import ConcurrencyError, CorruptCheckpointError, UnsupportedError, error, explain
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Device
from tdfunc.storage.api import load, outline_of
from tdfunc.storage.disk.commit import replace_file, sweep
from tdfunc.storage.disk.raw import write_all
from tdfunc.storage.disk.remote import anchored, local_folder
from tdfunc.storage.manager.background import PendingSave, SaveQueue, Snapshot, WaitMethods, Write, take_snapshot
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    as_step,
    exists_error,
    list_steps,
    reading,
    remove_step,
    step_name,
    write_step,
)
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import as_bytes, plan_save
from tdfunc.storage.safetensors.write import write_into
from tdfunc.storage.tree.build import Classes
from tdfunc.storage.tree.specs import no_constant, unique

T = TypeVar("T")
ABOUT_FILE = "checkpoint.json"
_VERSION = 1
_START = '{"digest":"xxh3-64:'
_DIGITS = 16


class About(NamedTuple):
    """What `checkpoint.json` says."""

    step: int
    # The name of the tree's file, or of the index of its shards.
    file: str
    # The digest of that file's header, which holds those of all leaves.
    tree: str
    metadata: dict[str, Any]


class CheckpointManager(WaitMethods):
    """The checkpoints of a run: one folder for each step, of which the last and the best are kept.

    A step appears whole or not at all, whatever happens during the save. What a killed process left is invisible, and
    removed by the next manager or save of the same folder. Several processes may save and load at the same time; a
    step that is being loaded is not removed.

    Args:
        folder: Where the steps are; it is made by the first save. A change of the current folder does not move it.
        keep_last: How many of the highest steps are kept; the step that was saved last is always kept. Without it and
            without `keep_best`, all are.
        keep_best: How many steps are kept besides, by `metric`. Of equal ones the later is better.
        metric: The entry of the metadata that says how good a step is. A step whose metadata lack it, or hold None
            there, is never best.
        mode: Whether the best has the lowest (`"min"`) or the highest (`"max"`) value.
        async_save: Save in the background: `save` returns as soon as nothing can change what is saved.
        max_pending: How many such saves may be waiting or running; another `save` waits for a place.
        max_shard_size: The most bytes of leaves in one file, as a number or as `"5GB"`; without it a step is one file.
        fsync: Wait until the disk has each step. Without it a power failure (not a crash of the program) may lose it.

    Raises:
        ValueError: A number below 1, another mode, `keep_best` without `metric`, or an empty name.
        UnsupportedError: The folder is a URL.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = tdf.CheckpointManager(folder, keep_last=2, keep_best=1, metric="loss")
        ...     for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
        ...         handle = manager.save(step, TensorDict({"w": torch.full((2,), loss)}), metadata={"loss": loss})
        ...     manager.steps(), manager.latest(), manager.best(), manager.load()["w"]
        ([1, 2, 3], 3, 1, tensor([4., 4.]))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: str = "min",
        async_save: bool = False,
        max_pending: int = 1,
        max_shard_size: int | str | None = None,
        fsync: bool = True,
    ) -> None:
        for name, count in (("keep_last", keep_last), ("keep_best", keep_best)):
            if count is not None and count < 1:
                raise error(
                    ValueError,
                    f"CheckpointManager: {name} must be a number of steps.",
                    expected="1 or more, or None",
                    got=repr(count),
                )
        if mode not in ("min", "max"):
            raise error(
                ValueError, "CheckpointManager: the mode must be known.", expected="'min' or 'max'", got=repr(mode)
            )
        if keep_best is not None and metric is None:
            raise error(
                ValueError,
                "CheckpointManager: keep_best needs a metric.",
                got="no metric",
                hint='metric="loss", and save(..., metadata={"loss": ...}).',
            )
        self._folder = anchored(local_folder(folder, "CheckpointManager"))
        self._keep_last, self._keep_best, self._metric, self._mode = keep_last, keep_best, metric, mode
        self._fsync, self._async = fsync, async_save
        self._max_bytes = as_bytes(max_shard_size) if max_shard_size is not None else None
        self._queue = SaveQueue(max_pending)
        sweep(self._folder)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: "TensorCollection | Mapping[str, Any]",
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        copy: bool | None = None,
    ) -> PendingSave:
        """Save a step, then remove those that are not to be kept.

        Args:
            step: Its number.
            tree: A tree, or several by name: `{"params": params, "state": state}` is loaded as a tree with these keys.
            metadata: Anything that JSON gives back as it was: numbers, text, lists, and dicts with `str` keys.
            overwrite: Replace a step of this number.
            copy: In the background, which leaves are copied first: all (True), none (False), or those that are
                expected to be written to (Parameters and the buffers of modules).

        Returns:
            A handle. Its `result()` is the step's folder; without `async_save` the save is done.

        Raises:
            FileExistsError: There is such a step. Of two processes that save one step at the same time, one gets this.
            UnsupportedError: A leaf or an entry of the metadata cannot be stored unchanged; the message names it.
            ConcurrencyError: A leaf changed while it was saved (with `async_save`, from the handle).
            OSError: The file system refused; the other steps are as they were.
            Exception: An earlier save in the background failed, and this is its error. Nothing was submitted.
        """
        number = as_step(step, "save")
        described = _check_metadata({} if metadata is None else metadata)
        self._check_metric(described)
        td = tree if isinstance(tree, TensorCollection) else _gather(tree)
        path = self.path(number)
        self._check_new(number, path, overwrite)
        if not self._async:
            save = PendingSave(path)
            save.set_result(self._commit(number, Snapshot(outline_of(td), {}), described, overwrite))
            return save

        def prepare() -> Write:
            return partial(self._commit, number, take_snapshot(td, copy), described, overwrite)

        return self._queue.submit(path, prepare)

    def delete(self, step: int) -> None:
        """Remove a step, also if it is the latest or the best.

        Args:
            step: Its number.

        Raises:
            FileNotFoundError: There is no such step.
            BlockingIOError: It is being loaded.
        """
        number = as_step(step, "delete")
        if not remove_step(self._folder, number):
            with reading(self._folder, number, "delete"):
                raise error(
                    BlockingIOError, f"delete {self._folder}: step {number} is being loaded.", hint="try again later."
                )

    # -- reading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that are there, in order; saves that are still pending are not."""
        return list_steps(self._folder)

    def latest(self) -> int | None:
        """Return the highest step, or None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the best metric, or None if no step has it; of equal ones the later.

        Raises:
            ValueError: The manager has no metric.
            CorruptCheckpointError: The metadata of a step are damaged; the message names it.
        """
        if self._metric is None:
            raise error(
                ValueError, "best: the manager has no metric.", hint='CheckpointManager(folder, metric="loss").'
            )
        return next(iter(self._by_metric(self.steps())), None)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of a step.

        Args:
            step: Its number; without it the latest.

        Raises:
            FileNotFoundError: There is no such step.
            CorruptCheckpointError: They are damaged; the message names the step.
        """
        if step is None:
            return self._newest(self.metadata, "metadata")
        number = as_step(step, "metadata")
        return self._read(number, lambda path: read_about(path, number).metadata, "metadata")

    def path(self, step: int) -> pathlib.Path:
        """Return the folder of a step, which need not be there; `load` and `open` take it.

        Args:
            step: Its number.
        """
        return pathlib.Path(self._folder, step_name(as_step(step, "path")))

    def load(
        self,
        step: int | None = None,
        *,
        fallback: bool = False,
        like: Any = None,  # a tree or spec of anything that has a shape and a dtype
        keys: "FilterLike | None" = None,
        dtype: torch.dtype | None = None,
        device: "Device | None" = None,
        classes: Classes = (),
        verify: bool = True,
    ) -> Any:  # the class of the tree is what was saved
        """Load the tree of a step.

        Args:
            step: Its number; without it the latest. If that is removed meanwhile, a newer one is loaded.
            fallback: Where the latest step is damaged, warn and load the newest one that is whole.
            like: What is expected, as in `tdfunc.load`.
            keys: A glob on dotted paths or a `Filter`: only these leaves are read and verified.
            dtype: Cast leaves of floating dtypes.
            device: Where the leaves are put; without it, where they were.
            classes: The classes of the tree's nodes where they are not TensorDicts, as in `tdfunc.load`.
            verify: Read everything once and compare the checksums.

        Raises:
            FileNotFoundError: There is no such step, or no step at all.
            CorruptCheckpointError: The step is damaged; the message names it and what is wrong.
            ValueError: `fallback` together with a step, or without `verify`.
        """
        if fallback and (step is not None or not verify):
            raise error(
                ValueError,
                "load: fallback looks for the newest whole step.",
                got=f"step {step}" if step is not None else "verify=False",
            )

        def load_step(number: int) -> Any:
            options = {"like": like, "keys": keys, "dtype": dtype, "device": device, "classes": classes}
            return self._load(number, "load", verify=verify, **options)

        if step is not None:
            return load_step(as_step(step, "load"))
        return self._newest(load_step, "load", fallback=fallback)

    def verify(self, step: int | None = None) -> int:
        """Read a step whole and compare all checksums.

        Args:
            step: Its number; without it the latest.

        Returns:
            The step.

        Raises:
            FileNotFoundError: There is no such step.
            CorruptCheckpointError: It is damaged; the message names it and what is wrong.
        """
        if step is None:
            return self._newest(self.verify, "verify")
        number = as_step(step, "verify")
        self._load(number, "verify", classes=TensorCollection._open, device="cpu")
        return number

    def __repr__(self) -> str:
        return f"CheckpointManager({self._folder!r}, {len(self.steps())} steps, {len(self._queue.pending)} pending)"

    # -- parts --------------------------------------------------------------------------------------------------

    def _commit(self, step: int, snapshot: Snapshot, metadata: dict[str, Any], overwrite: bool) -> pathlib.Path:
        path = self.path(step)

        def fill(folder: str) -> None:
            file = _write_tree(snapshot, folder, self._max_bytes, fsync=self._fsync)
            text = _describe(About(step, file, _header_digest(os.path.join(folder, file)), metadata))
            about = os.path.join(folder, ABOUT_FILE)
            replace_file(about, lambda fd: write_all(fd, text), size_bytes=len(text), fsync=self._fsync)

        try:
            write_step(self._folder, step, fill, overwrite=overwrite, fsync=self._fsync)
        except ConcurrencyError as err:
            raise ConcurrencyError(f"save {path}: {err}") from err
        except OSError as err:
            if err.errno is None:
                raise
            raise OSError(err.errno, f"save: {os.strerror(err.errno)}; the step was not saved", str(path)) from err
        self._remove_old(step)
        return path

    def _remove_old(self, saved: int) -> None:
        if self._keep_last is None and self._keep_best is None:
            return
        steps = self.steps()
        kept = {saved, *steps[-(self._keep_last or 1) :]}
        if self._keep_best is not None:
            kept.update(self._by_metric(steps)[: self._keep_best])
        for step in steps:
            if step not in kept:
                try:
                    remove_step(self._folder, step)
                except OSError as err:
                    # The new step is safe, so the save did not fail.
                    what = f"save {self._folder}: step {step} could not be removed."
                    warnings.warn(explain(what, got=str(err)), RuntimeWarning, stacklevel=2)

    def _by_metric(self, steps: Sequence[int]) -> list[int]:
        """Return the steps that have the metric, best first."""
        found: list[tuple[Any, int]] = []
        for step in steps:
            try:
                value = self.metadata(step).get(self._metric or "")
            except FileNotFoundError:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append((value, step))
        # A stable sort: of equal ones the later stays first.
        return [step for _, step in sorted(reversed(found), key=lambda pair: pair[0], reverse=self._mode == "max")]

    def _check_metric(self, metadata: dict[str, Any]) -> None:
        value = metadata.get(self._metric) if self._metric is not None else None
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise error(
                TypeError,
                f"save: the metric {self._metric!r} is no number.",
                expected="an int or float, or None for a step that is never best",
                got=f"{value!r} ({type(value).__name__})",
            )

    def _check_new(self, step: int, path: pathlib.Path, overwrite: bool) -> None:
        if overwrite:
            return
        if os.path.lexists(path) or any(save._path == path for save in self._queue.pending):
            raise exists_error(self._folder, step)

    # Any: the options of `load`, and what it returns.
    def _load(self, step: int, call: str, **options: Any) -> Any:
        def read(path: str) -> Any:
            with naming_step(path, step):
                check_tree(path, read_about(path, step))
                return load(path, **options)

        return self._read(step, read, call)

    def _read(self, step: int, use: Callable[[str], T], call: str) -> T:
        """Call `use` with the folder of a step, again if another save replaces the step meanwhile."""
        while True:
            with suppress(StepReplacedError), reading(self._folder, step, call) as path:
                return use(path)

    def _newest(self, use: Any, call: str, *, fallback: bool = False) -> Any:
        """Call `use` with the newest step; if that is removed meanwhile, a newer one is there."""
        damaged: set[int] = set()
        while True:
            step = max((step for step in self.steps() if step not in damaged), default=None)
            if step is None and not damaged:
                raise error(
                    FileNotFoundError,
                    f"{call} {self._folder}: there are no steps.",
                    hint="latest() is None where nothing was saved.",
                )
            if step is None:
                shown = ", ".join(map(str, sorted(damaged)))
                raise CorruptCheckpointError(
                    f"{call} {self._folder}: no step is whole.", expected="a whole step", got=f"damaged: {shown}"
                )
            try:
                return use(step)
            except StepRemovedError:
                if step in self.steps():
                    raise
            except CorruptCheckpointError as err:
                if not fallback:
                    raise
                damaged.add(step)
                warnings.warn(f"{err}\n  an older step is loaded instead.", RuntimeWarning, stacklevel=3)


def _write_tree(snapshot: Snapshot, folder: str, max_bytes: int | None, *, fsync: bool) -> str:
    """Write the tree into a new folder as Hugging Face does, so that its libraries read a step too."""
    outline, digests = snapshot
    write_into(plan_save(outline, max_bytes, digests), folder, fsync=fsync)
    return SINGLE if max_bytes is None else INDEX


# -- arguments --------------------------------------------------------------------------------------------------


def _gather(trees: Any) -> TensorCollection:
    if not isinstance(trees, Mapping):
        raise error(
            TypeError,
            "save: this must be a tree.",
            expected="a TensorDict, or trees by name",
            got=type(trees).__name__,
            hint='save(step, {"params": params, "state": state}).',
        )
    return TensorCollection._open(trees)


def _check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that nobody else can change; raise for an entry that JSON would alter."""
    plain: dict[str, Any] = {}
    for key, value in metadata.items():
        entry = {key: value}
        try:
            text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
            back: Any = json.loads(text.encode())
        except (TypeError, ValueError, RecursionError) as err:
            back = f"{type(err).__name__}: {err}"
        # Types too: JSON makes a list of a tuple, and text of a number that is a key.
        if repr(back) != repr(entry):
            raise UnsupportedError(
                f"save: metadata[{key!r}] cannot be stored; nothing was written.",
                expected="str, bool, None, finite numbers, lists, and dicts with str keys, which JSON gives back as is",
                got=f"{type(value).__name__}, of which JSON makes {back!r}"[:300],
                hint="convert it: float(x), list(x), str(x); None where there is no value.",
            )
        plain.update(back)
    return plain


# -- checkpoint.json --------------------------------------------------------------------------------------------


def _describe(about: About) -> memoryview:
    fields = {"format": "tdfunc checkpoint", "version": _VERSION, **about._asdict()}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    raw = f'{_START}{"0" * _DIGITS}",{text[1:]}\n'.encode()
    return memoryview(raw.replace(b"0" * _DIGITS, xxhash.xxh3_64_hexdigest(raw).encode(), 1))


def read_about(folder: str, step: int) -> About:
    """Read the `checkpoint.json` of a step.

    Raises:
        CorruptCheckpointError: It is not what was saved, or of another step.
        UnsupportedError: A later version of tdfunc wrote it.
    """
    path = os.path.join(folder, ABOUT_FILE)
    with naming_step(folder, step):
        with open(path, "rb") as file:
            raw = file.read()
        start, end = len(_START), len(_START) + _DIGITS
        found = xxhash.xxh3_64_hexdigest(raw[:start] + b"0" * _DIGITS + raw[end:])
        if raw[:start] != _START.encode() or raw[start:end] != found.encode():
            raise CorruptCheckpointError(
                f"{ABOUT_FILE} is not what was saved.", expected=f"{_START}{found}", got=repr(raw[:end])[2:-1]
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
        if about.step != step or about.file not in (SINGLE, INDEX):
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
def naming_step(folder: str, step: int) -> Generator[None, None, None]:
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
