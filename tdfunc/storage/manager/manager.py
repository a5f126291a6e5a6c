"""`CheckpointManager`: the checkpoints of a run, a folder for each step, with metadata and rules for which to keep."""

import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import ConcurrencyError, CorruptCheckpointError, UnsupportedError, error
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Device
from tdfunc.storage.disk.commit import naming, settle, sweep
from tdfunc.storage.disk.ranks import has_sharded
from tdfunc.storage.disk.remote import anchored, local_folder
from tdfunc.storage.manager.background import PendingSave, SaveQueue, Snapshot, WaitMethods, Write, take_snapshot
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    as_step,
    exists_error,
    list_steps,
    load_step,
    read_about,
    reading,
    remove_step,
    step_name,
    write_step,
)
from tdfunc.storage.safetensors.plan import as_bytes
from tdfunc.storage.safetensors.ranks import RankSave
from tdfunc.storage.safetensors.select import Choice
from tdfunc.storage.tree.build import Classes
from tdfunc.storage.tree.encode import outline
from tdfunc.storage.tree.objects import as_tree

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T")


class CheckpointManager(WaitMethods):
    """The checkpoints of a run: one folder for each step, of which the last and the best are kept.

    A step appears whole or not at all. The rest of a killed process's save is invisible, and removed by the next
    manager or save of the same folder. Several processes may save and load at the same time; a step that is being
    loaded is not removed. Only folders with their own, undamaged `checkpoint.json` are removed; such a folder goes
    with all files in it.

    Args:
        folder: Where the steps are; it is made by the first save. A change of the current folder does not move it.
        keep_last: How many of the highest steps are kept; the step that was saved last is always kept. Without it and
            without `keep_best`, all are.
        keep_best: How many steps are also kept, by `metric`. Of equal ones the later is better.
        metric: The entry of the metadata by which steps are compared. A step whose metadata lack it, or hold None
            there, is never best.
        mode: `"min"` where the lowest value is best, `"max"` where the highest is.
        async_save: Save in the background: `save` returns as soon as nothing can change the saved values.
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
        if any(count is not None and count < 1 for count in (keep_last, keep_best)):
            got = f"keep_last={keep_last}, keep_best={keep_best}"
            raise error(ValueError, "CheckpointManager: the steps to keep must be 1 or more, or None.", got=got)
        if mode not in ("min", "max"):
            raise error(ValueError, "CheckpointManager: the mode must be 'min' or 'max'.", got=repr(mode))
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

        A tree with DTensors is saved by all ranks of the default process group together, each its own parts, and not
        in the background. Metadata are those of the first rank.

        Args:
            step: Its number.
            tree: A tree, or several trees, tensors and plain objects by name: `{"params": params, "optim":
                optim.state_dict(), "epoch": 3}` is loaded as a tree with these keys. Trees are trees again; dicts,
                lists, tuples, numbers, None and texts are what they were, with the tensors and trees in them.
            metadata: Anything that JSON gives back as it was: numbers, text, lists, and dicts with `str` keys.
            overwrite: Replace a step of this number.
            copy: In the background, which leaves are copied first: all (True), none (False), or those that are
                expected to be written to (Parameters and the buffers of modules).

        Returns:
            A handle. Its `result()` is the step's folder; without `async_save` the save is done.

        Raises:
            FileExistsError: There is such a step, or a folder of another program under its name. Of two processes that
                save one step at the same time, one gets this.
            UnsupportedError: A leaf or an entry of the metadata cannot be stored unchanged; the message names it.
            ConcurrencyError: A leaf changed while it was saved (with `async_save`, from the handle).
            OSError: The file system refused; the other steps are as they were. An error of the removal of old steps is
                a `RuntimeWarning`.
            Exception: An earlier save in the background failed, and this is its error. Nothing was submitted.
        """
        number = as_step(step, "save")
        described: dict[str, Any] = {}
        for key, value in (metadata or {}).items():
            entry = {key: value}
            try:
                back: Any = json.loads(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode())
            except (TypeError, ValueError, RecursionError) as err:
                back = f"{type(err).__name__}: {err}"
            # Types too: JSON makes a list of a tuple, and text of a number that is a key.
            if repr(back) != repr(entry):
                raise UnsupportedError(
                    f"save: metadata[{key!r}] cannot be stored; nothing was written.",
                    expected="str, bool, None, finite numbers, lists, and dicts with str keys",
                    got=f"{type(value).__name__}, of which JSON makes {back!r}"[:300],
                    hint="convert it: float(x), list(x), str(x); None stands for a missing value.",
                )
            described.update(back)
        metric = described.get(self._metric) if self._metric is not None else None
        if metric is not None and not _is_number(metric):
            raise error(
                TypeError,
                f"save: the metric {self._metric!r} must be a number.",
                expected="an int or float, or None for a step that is never best",
                got=repr(metric),
            )
        td = as_tree(tree, f"save {self._folder}")
        path = self.path(number)
        if not overwrite and (os.path.lexists(path) or any(save._path == path for save in self._queue.pending)):
            raise exists_error(self._folder, number)
        if self._max_bytes is None and has_sharded(td):
            together = RankSave(td, f"save {path}", fsync=self._fsync)
            save = PendingSave(path)
            save.set_result(self._commit(number, together, described, overwrite))
            return save
        if not self._async:
            save = PendingSave(path)
            save.set_result(self._commit(number, Snapshot(outline(td), {}), described, overwrite))
            return save

        def prepare() -> Write:
            return partial(self._commit, number, take_snapshot(td, copy), described, overwrite)

        return self._queue.submit(path, prepare)

    def delete(self, step: int) -> None:
        """Remove a step, also if it is the latest or the best.

        Args:
            step: Its number.

        Raises:
            FileNotFoundError: The step does not exist.
            BlockingIOError: It is being loaded.
            FileExistsError: The folder may be another program's: it has no `checkpoint.json`, and other files.
        """
        number = as_step(step, "delete")
        if not remove_step(self._folder, number, damaged=True):
            with reading(self._folder, number, "delete"):
                raise error(
                    BlockingIOError, f"delete {self._folder}: step {number} is being loaded.", hint="try again later."
                )

    # -- reading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that are there, in order; saves that are still pending are not."""
        return list_steps(self._folder)

    def latest(self) -> int | None:
        """Return the highest step, or None before the first save."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the best metric, or None if no step has it; of equal ones the later.

        Raises:
            ValueError: The manager was made without a metric.
            CorruptCheckpointError: The metadata of a step are damaged; the message names it.
        """
        if self._metric is None:
            raise error(
                ValueError, "best: the manager must have a metric.", hint='CheckpointManager(folder, metric="loss").'
            )
        return next(iter(self._by_metric(self.steps())), None)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of a step.

        Args:
            step: Its number; without it the latest.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: They are damaged; the message names the step.
        """
        return self._use(step, "metadata", lambda path, number: read_about(path, number).metadata)

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
        where: "FilterLike | None" = None,
        dtype: torch.dtype | None = None,
        device: "Device | None" = None,
        classes: Classes = (),
        verify: bool = True,
    ) -> "TensorDict":
        """Load the tree of a step.

        Args:
            step: Its number; without it the latest. If that is removed meanwhile, a newer one is loaded.
            fallback: Where the latest step is damaged, warn and load the newest one that is whole.
            like: The expected leaves, as in `tdfunc.load`.
            where: A glob on dotted paths or a `Filter`: only these leaves are read and verified.
            dtype: Cast leaves of floating dtypes.
            device: Where the leaves are put; without it, where they were.
            classes: The classes of the tree's nodes where they are not TensorDicts, as in `tdfunc.load`.
            verify: Read everything once and compare the checksums.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: The step is damaged; the message names it and the damage.
            ValueError: `fallback` together with a step, or without `verify`.
        """
        if fallback and (step is not None or not verify):
            raise error(
                ValueError,
                "load: fallback looks for the newest whole step.",
                got=f"step {step}" if step is not None else "verify=False",
            )

        place = torch.device(device) if device is not None else None
        # A resumed run goes on bit for bit only with leaves that lie as those of the first one did.
        choice = Choice(where, like, dtype, place, classes, aligned=True)
        return self._use(step, "load", partial(load_step, choice=choice, verify=verify), fallback=fallback)

    def verify(self, step: int | None = None) -> int:
        """Read a step whole and compare all checksums.

        Args:
            step: Its number; without it the latest.

        Returns:
            The step.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: It is damaged; the message names it and the damage.
        """

        def read(path: str, number: int) -> int:
            load_step(path, number, Choice(device=torch.device("cpu"), classes=TensorCollection._open))
            return number

        return self._use(step, "verify", read)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._folder!r}, {len(self.steps())} steps, {len(self._queue.pending)} pending)"

    # -- parts --------------------------------------------------------------------------------------------------

    def _commit(
        self, step: int, snapshot: Snapshot | RankSave, metadata: dict[str, Any], overwrite: bool
    ) -> pathlib.Path:
        path = self.path(step)
        max_bytes, fsync = self._max_bytes, self._fsync
        try:
            with naming("save", str(path), "the step was not saved"):
                write_step(
                    self._folder, step, snapshot, metadata, max_bytes=max_bytes, overwrite=overwrite, fsync=fsync
                )
        except ConcurrencyError as err:
            raise ConcurrencyError(f"save {path}: {err}") from err
        is_first = not isinstance(snapshot, RankSave) or snapshot.ranks.rank == 0
        if is_first and (self._keep_last is not None or self._keep_best is not None):
            settle(str(path), "older steps are still there", lambda: self._remove_old(step, path))
        return path

    def _remove_old(self, saved: int, path: pathlib.Path) -> None:
        steps = self.steps()
        kept = {saved, *steps[-(self._keep_last or 1) :]}
        if self._keep_best is not None:
            kept.update(self._by_metric(steps, damaged=True)[: self._keep_best])
        for step in steps:
            if step not in kept:
                remove = partial(remove_step, self._folder, step)
                settle(str(path), f"step {step} could not be removed", remove)

    def _by_metric(self, steps: Sequence[int], *, damaged: bool = False) -> list[int]:
        """Return the steps that have the metric, best first; with `damaged` those count that cannot be read."""
        found: list[tuple[Any, int]] = []
        for step in steps:
            try:
                value = self.metadata(step).get(self._metric or "")
            except FileNotFoundError:
                continue
            except (CorruptCheckpointError, UnsupportedError):
                # It is never best, and it stays.
                if not damaged:
                    raise
                continue
            if _is_number(value):
                found.append((value, step))
        # A stable sort: of equal ones the later stays first.
        return [step for _, step in sorted(reversed(found), key=lambda pair: pair[0], reverse=self._mode == "max")]

    def _use(self, step: int | None, call: str, read: Callable[[str, int], T], *, fallback: bool = False) -> T:
        """Call `read` with the folder and number of a step (the newest), again if another save replaces it."""
        damaged: set[int] = set()
        while True:
            number = max(set(self.steps()) - damaged, default=None) if step is None else as_step(step, call)
            if number is None and damaged:
                raise CorruptCheckpointError(
                    f"{call} {self._folder}: no step is whole.",
                    expected="a whole step",
                    got=f"damaged: {sorted(damaged)}",
                )
            if number is None:
                raise error(
                    FileNotFoundError,
                    f"{call} {self._folder}: the folder must have a step.",
                    hint="latest() is None before the first save.",
                )
            try:
                with reading(self._folder, number, call) as path:
                    return read(path, number)
            except StepReplacedError:
                continue
            except StepRemovedError:
                # If the newest one is removed meanwhile, a newer one is there.
                if step is not None or number in self.steps():
                    raise
            except CorruptCheckpointError as err:
                if not fallback:
                    raise
                damaged.add(number)
                warnings.warn(f"{err}\n  an older step is loaded instead.", RuntimeWarning, stacklevel=3)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
