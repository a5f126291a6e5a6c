"""`CheckpointManager`: the checkpoints of a run, a folder for each step, with metadata and rules that keep the best."""

import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import (
    ConcurrencyError,
    CorruptCheckpointError,
    UnsupportedError,
    as_count,
    check_choice,
    damaged,
    error,
    explain,
)
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Device
from tdfunc.storage.disk.commit import naming, settle, sweep
from tdfunc.storage.disk.ranks import find_sharded, group_of
from tdfunc.storage.disk.remote import anchored, local_folder
from tdfunc.storage.manager.background import PendingSave, SaveQueue, Snapshot, WaitMethods, Write, take_snapshot
from tdfunc.storage.manager.discard import discard_steps, finish_discard
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    as_step,
    exists_error,
    is_damage,
    list_steps,
    load_step,
    no_step,
    read_about,
    reading,
    remove_step,
    saved_after,
    step_name,
    step_of,
    write_step,
)
from tdfunc.storage.manager.together import Request, Together, has_one_group
from tdfunc.storage.safetensors.plan import as_bytes
from tdfunc.storage.safetensors.ranks import Checked, RankSave, refuse_shards
from tdfunc.storage.safetensors.select import Choice
from tdfunc.storage.tree.build import Classes
from tdfunc.storage.tree.encode import outline
from tdfunc.storage.tree.objects import as_tree

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T")
# How often the newest step is opened anew because it was removed, and is there again.
_ATTEMPTS = 20


class CheckpointManager(WaitMethods):
    """The checkpoints of a run: one folder for each step, of which the last and the best are kept.

    A step appears completely or not at all. Readers never see the partial files of a killed process; the next manager
    or save of the same folder removes them. Several processes may save and load at the same time; a step that is being
    loaded is not removed. The manager removes only folders with their own, undamaged `checkpoint.json`, together with
    all files in them.

    Args:
        folder: The folder of the steps, which the first save creates. A change of the current folder does not move it.
        keep_last: The number of highest steps to keep; the last saved step is always kept. Without it and without
            `keep_best`, all steps are kept. After a return to an earlier step, the steps above it are not counted, and
            stay until `discard_after` or `delete`.
        keep_best: The number of steps that are also kept, by `metric`. Of equal steps, the later is better.
        metric: The entry of the metadata by which steps are compared. A step without it, or with None, is never best.
        mode: `"min"` if the lowest value is best, `"max"` if the highest value is best.
        async_save: Save in the background: `save` returns as soon as nothing can change the saved values.
        max_pending: The largest number of such saves that wait or run; another `save` waits for a place.
        max_shard_size: The largest size of a file, in bytes or as `"5GB"`; without it a step is one file.
        fsync: Wait until each step is on the disk. Without it, a power failure can lose a step; a crash of the program
            cannot.

    Raises:
        ValueError: A number is below 1, the mode is unknown, or `keep_best` was given without `metric`.
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
        if keep_last is not None:
            keep_last = as_count("CheckpointManager: keep_last", keep_last)
        if keep_best is not None:
            keep_best = as_count("CheckpointManager: keep_best", keep_best)
        check_choice("CheckpointManager: the mode", mode, ("min", "max"))
        if keep_best is not None and metric is None:
            raise error(
                ValueError,
                "CheckpointManager: keep_best needs a metric.",
                got="no metric",
                hint='metric="loss", and save(..., metadata={"loss": ...}).',
            )
        self._folder = anchored(local_folder(folder, "CheckpointManager"))
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._mode = mode
        self._fsync = fsync
        self._async = async_save
        self._max_bytes = None if max_shard_size is None else as_bytes(max_shard_size)
        self._queue = SaveQueue(max_pending)
        # The steps that were there when this run began or went back to a step.
        self._earlier: frozenset[int] = frozenset(list_steps(self._folder))
        # Steps above one that the run went back to; the run does not continue them.
        self._abandoned: frozenset[int] = frozenset()
        self._has_gone_back = False
        finish_discard(self._folder)
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
        """Save a step, then remove the steps that are not kept.

        All ranks of the default process group save a tree with DTensors together, and not in the background. Each rank
        writes its own parts. The step and the options must be equal on all ranks. The metadata come from the first
        rank; the other ranks give equal metadata or none. If one rank raises an error, all ranks raise it.

        Args:
            step: The number of the step.
            tree: A tree, or several trees, tensors and plain objects by name: `{"params": params, "optim":
                optim.state_dict(), "epoch": 3}` is loaded as a tree with these keys. Dicts, lists, tuples, numbers,
                None, strings, and arrays and numbers of numpy are loaded unchanged, with the tensors and trees in them.
            metadata: Values that JSON returns unchanged: numbers, strings, lists, and dicts with `str` keys. Numbers of
                numpy are stored as equal numbers of Python.
            overwrite: Replace an existing step.
            copy: The leaves to copy before a save in the background: all (True), none (False), or by default the
                leaves that are likely to be written to (Parameters and the buffers of modules).

        Returns:
            A handle, whose `result()` is the step's folder. Without `async_save` the save is done.

        Raises:
            FileExistsError: The step exists, or another program has a folder of this name. If two processes save one
                step at the same time, one of them gets this error.
            UnsupportedError: A leaf or an entry of the metadata cannot be stored unchanged; the message names it.
            ConcurrencyError: A leaf changed while it was saved (with `async_save`, from the handle).
            OSError: Writing failed; the other steps are unchanged. An error in the removal of old steps is a
                `RuntimeWarning`.
            Exception: An earlier save in the background failed with this error. Nothing was submitted.

        Warns:
            RuntimeWarning: The step is below a step that was there when the run began or went back to a step.
        """
        leaf = find_sharded(tree)
        if leaf is not None:
            return self._save_by_ranks(leaf, lambda: self._check(step, tree, metadata, overwrite))
        given = self._check(step, tree, metadata, overwrite)

        def write_here() -> pathlib.Path:
            snapshot = Snapshot(outline(given.tree), {})
            return self._commit(given.step, snapshot, given.metadata, overwrite)

        if not self._async:
            save = PendingSave(given.path)
            save.set_result(write_here())
            return save

        def prepare() -> Write:
            snapshot = take_snapshot(given.tree, copy)
            return partial(self._commit, given.step, snapshot, given.metadata, overwrite)

        return self._queue.submit(given.path, prepare, write_here)

    def delete(self, step: int) -> None:
        """Remove a step, also if it is the latest or the best.

        Args:
            step: The number of the step.

        Raises:
            FileNotFoundError: The step does not exist.
            BlockingIOError: The step is being loaded.
            FileExistsError: The folder may belong to another program: it has other files, and no `checkpoint.json`.
        """
        number = as_step(step, "delete")
        if not remove_step(self._folder, number, even_damaged=True):
            with reading(self._folder, number, "delete"):
                raise error(
                    BlockingIOError, f"delete {self._folder}: step {number} is being loaded.", hint="try again later."
                )

    def discard_after(self, step: int) -> list[int]:
        """Remove all steps above a step: the run continues from this step.

        All of them are removed, or none: a process that is killed in the middle leaves the whole run as it was, or
        without these steps. Saves in the background are finished first. Of several processes, one calls it, before the
        others load or save.

        Args:
            step: The number of the step that becomes the latest.

        Returns:
            The numbers of the removed steps, in order.

        Raises:
            FileNotFoundError: The step does not exist; nothing was removed.
            BlockingIOError: A step above it is being loaded; nothing was removed.
            FileExistsError: The folder of a step above it may belong to another program, or is a link; nothing was
                removed.
            Exception: An earlier save in the background failed with this error. Nothing was removed.

        Warns:
            RuntimeWarning: The steps are gone, but the system did not remove their folders; the next save does.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     manager = tdf.CheckpointManager(folder)
            ...     for step in (10, 20, 30, 40):
            ...         handle = manager.save(step, TensorDict({"w": torch.full((2,), float(step))}))
            ...     manager.discard_after(20), manager.steps(), manager.load()["w"]
            ([30, 40], [10, 20], tensor([20., 20.]))
        """
        number = as_step(step, "discard_after")
        # A save that is pending would bring its step back.
        self.wait()
        removed = discard_steps(self._folder, number, fsync=self._fsync)
        self._earlier -= {*removed}
        self._abandoned -= {*removed}
        return removed

    # -- reading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the saved steps, in order, without saves that are still pending."""
        return list_steps(self._folder)

    def latest(self) -> int | None:
        """Return the highest step, without saves that are still pending; None before the first save."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the best metric, or None if no step has it; of equal steps, the later.

        Saves that are still pending do not count: call `wait()` first.

        Raises:
            ValueError: The manager was made without a metric.
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
            step: The number of the step; without it the latest.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: The metadata are damaged; the message names the step.
        """
        return self._use(step, "metadata", lambda path, number: read_about(path, number).metadata)

    def path(self, step: int) -> pathlib.Path:
        """Return the path of a step's folder, whether it exists or not; `load` and `open` take it.

        Args:
            step: The number of the step.
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

        With DTensors in `like`, all ranks that save such a tree together also load it together: each reads its parts of
        the newest step that all of them see. (On a mesh of several dimensions without all ranks, each loads alone.)

        Args:
            step: The number of the step; without it the latest. If that is removed meanwhile, a newer one is loaded.
            fallback: If the latest step is damaged or the disk cannot read it, warn and load the newest undamaged one.
                Leaves are read at once, not mapped.
            like: The expected leaves, as in `tdfunc.load`.
            where: A glob on dotted paths or a `Filter`: only these leaves are read and verified.
            dtype: The dtype to which leaves of floating dtypes are cast.
            device: The device of the leaves. By default the device of the saved tree.
            classes: The classes of the tree's nodes that are not TensorDicts, as in `tdfunc.load`.
            verify: Read everything once and compare the checksums.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: The step is damaged; the message names it and the damage.
            ValueError: `fallback` was given with a step, or without `verify`.
        """

        def check() -> Request[Any]:
            number = self._check_load(step, fallback=fallback, verify=verify)
            place = None
            if device is not None:
                place = torch.device(device)
            # A resumed run continues bit for bit only with leaves of the same alignment.
            choice = Choice(where, like, dtype, place, classes, aligned=True)
            # An error of the disk is an error where leaves are read, and the end of the process where they are mapped.
            read = partial(load_step, choice=choice, verify=verify, mapped=not fallback)
            return Request(number, read, fallback)

        leaf = find_sharded(like)
        if leaf is not None and has_one_group(leaf):
            return self._load_by_ranks(Together(leaf, self._folder, check))
        request = check()
        return self._use(request.step, "load", request.read, fallback=fallback)

    def verify(self, step: int | None = None) -> int:
        """Read all of a step and compare all checksums.

        Args:
            step: The number of the step; without it the latest.

        Returns:
            The number of the step.

        Raises:
            FileNotFoundError: The step does not exist.
            CorruptCheckpointError: The step is damaged; the message names it and the damage.
        """

        def read(path: str, number: int) -> int:
            load_step(path, number, Choice(device=torch.device("cpu"), classes=TensorCollection._open))
            return number

        return self._use(step, "verify", read)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._folder!r}, {len(self.steps())} steps, {len(self._queue.pending)} pending)"

    # -- parts --------------------------------------------------------------------------------------------------

    def _check(
        self,
        step: int,
        tree: "TensorCollection | Mapping[str, Any]",
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
    ) -> "_Submission":
        """Return the arguments of a save; raise if one of them is wrong."""
        number = as_step(step, "save")
        described = _describe(metadata or {})
        metric = None
        if self._metric is not None:
            metric = described.get(self._metric)
        if metric is not None and not _is_number(metric):
            raise error(
                TypeError,
                f"save: the metric {self._metric!r} is not a number.",
                expected="an int or float, or None for a step that is never best",
                got=repr(metric),
            )
        td = as_tree(tree, f"save {self._folder}")
        path = self.path(number)
        finish_discard(self._folder)
        self._warn_above(number)
        if not overwrite:
            is_there = number in self._pending_steps() or os.path.lexists(path)
            if is_there:
                raise exists_error(self._folder, number)
        return _Submission(number, td, described, overwrite, path)

    def _pending_steps(self) -> frozenset[int]:
        """Return the steps that are being saved in the background."""
        found = [step_of(os.path.basename(save._path)) for save in self._queue.pending]
        return frozenset(step for step in found if step is not None)

    # Any: a DTensor.
    def _save_by_ranks(self, leaf: Any, check: "Callable[[], _Submission]") -> PendingSave:
        """Save with the other ranks, which hear of all that is wrong on this one."""
        made: list[_Submission] = []

        def prepare() -> Checked:
            given = check()
            made.append(given)
            refuse_shards(f"save {given.path}", self._max_bytes)
            options = f"overwrite={given.overwrite}, fsync={self._fsync}, keep_last={self._keep_last}"
            rule = f"keep_best={self._keep_best}, metric={self._metric!r}, mode={self._mode!r}"
            return Checked(given.tree, f"save step {given.step}, {options}, {rule}")

        saving = RankSave(prepare, f"save {self._folder}", group_of(leaf), fsync=self._fsync)
        given = made[0]
        save = PendingSave(given.path)
        save.set_result(self._commit(given.step, saving, given.metadata, given.overwrite))
        return save

    def _check_load(self, step: int | None, *, fallback: bool, verify: bool) -> int | None:
        """Return the step; raise if an argument of a load is wrong."""
        has_step = step is not None
        if fallback and (has_step or not verify):
            raise error(
                ValueError,
                "load: fallback=True excludes a step and verify=False.",
                got=f"step {step}" if has_step else "verify=False",
            )
        # A save that ends between the two looks is found by the second.
        pending = self._pending_steps()
        is_newest = step is None and not pending
        if not is_newest:
            self._earlier = pending.union(self.steps())
            self._has_gone_back = True
        if step is None:
            return None
        return as_step(step, "load")

    def _load_by_ranks(self, call: Together[T]) -> T:
        """Load with the other ranks."""
        number, found = call.load()
        for reason in call.broken.values():
            warnings.warn(f"{reason}\n  an older step is loaded instead.", RuntimeWarning, stacklevel=3)
        if call.request.step is None:
            self._warn_abandoned(number)
        return found

    def _commit(
        self, step: int, snapshot: Snapshot | RankSave, metadata: dict[str, Any], overwrite: bool
    ) -> pathlib.Path:
        path = self.path(step)
        above = sorted([other for other in self._abandoned if other > step])
        try:
            with naming("save", str(path), "the step was not saved"):
                write_step(
                    self._folder,
                    step,
                    snapshot,
                    metadata,
                    max_bytes=self._max_bytes,
                    overwrite=overwrite,
                    fsync=self._fsync,
                    above=above,
                )
        except ConcurrencyError as err:
            raise ConcurrencyError(f"save {path}: {err}") from err
        is_first = not isinstance(snapshot, RankSave) or snapshot.ranks.rank == 0
        has_rule = self._keep_last is not None or self._keep_best is not None
        if is_first and has_rule:
            settle(str(path), "older steps are still there", lambda: self._remove_old(step, path))
        return path

    def _remove_old(self, saved: int, path: pathlib.Path) -> None:
        steps = self.steps()
        # Steps that this run does not continue are neither counted nor removed: the person decides on them.
        abandoned = {step for step in self._abandoned if step > saved}
        own = [step for step in steps if step not in abandoned]
        kept = {saved, *own[-(self._keep_last or 1) :], *abandoned}
        if self._keep_best is not None:
            kept.update(self._by_metric(steps, skip_damaged=True)[: self._keep_best])
        for step in steps:
            if step not in kept:
                remove = partial(remove_step, self._folder, step)
                settle(str(path), f"step {step} could not be removed", remove)

    def _warn_above(self, step: int) -> None:
        """Warn once if a run that went back to a lower step saves below steps of its abandoned part."""
        if step in self._earlier and not self._has_gone_back:
            # A step that is corrected.
            return
        pending = self._pending_steps()
        higher = [other for other in self._earlier if other > step]
        above = {other for other in higher if other in pending or os.path.lexists(self.path(other))}
        if above <= self._abandoned:
            return
        self._abandoned |= above
        highest = max(above)
        what = f"save {self._folder}: step {step} is below step {highest}, which was there before."
        got = f"load() loads step {highest}, and keep_last does not count or remove steps above {step}"
        hint = f"discard_after(n) before this save removes all steps above n; delete({highest}) removes one of them."
        warnings.warn(explain(what, got=got, hint=hint), RuntimeWarning, stacklevel=4)

    def _warn_abandoned(self, number: int) -> None:
        """Warn if lower steps were saved after the highest one, by a run that had gone back."""
        later = saved_after(self._folder, number)
        if later:
            what = f"load {self._folder}: step {number} is the highest, and step {max(later)} was saved after it."
            last = max(later)
            hint = f"load({last}) continues the newer run; discard_after({last}) removes the steps of the other one."
            warnings.warn(explain(what, hint=hint), RuntimeWarning, stacklevel=4)

    def _by_metric(self, steps: Sequence[int], *, skip_damaged: bool = False) -> list[int]:
        """Return the steps that have the metric, best first; with `skip_damaged`, without steps that cannot be read."""
        found: list[tuple[Any, int]] = []
        for step in steps:
            try:
                value = self.metadata(step).get(self._metric or "")
            except FileNotFoundError:
                continue
            except (CorruptCheckpointError, UnsupportedError):
                if not skip_damaged:
                    raise
                continue
            if _is_number(value):
                found.append((value, step))
        # A stable sort: of equal steps, the later stays first.
        found.reverse()
        found.sort(key=itemgetter(0), reverse=self._mode == "max")
        return [step for _, step in found]

    def _use(self, step: int | None, call: str, read: Callable[[str, int], T], *, fallback: bool = False) -> T:
        """Call `read` with the folder and number of a step (or the newest), again if another save replaces it."""
        broken: set[int] = set()
        attempts = 0
        while True:
            number = self._newest(call, broken) if step is None else as_step(step, call)
            try:
                with reading(self._folder, number, call) as path:
                    found = read(path, number)
                if step is None and call == "load":
                    self._warn_abandoned(number)
                return found
            except StepReplacedError:
                continue
            except StepRemovedError:
                if step is not None:
                    raise
                # If the newest one is removed meanwhile, another one is there, or one that was saved under its number.
                if number in self.steps():
                    attempts += 1
                if attempts == _ATTEMPTS:
                    raise
            except (CorruptCheckpointError, OSError) as err:
                if not fallback or not is_damage(err):
                    raise
                broken.add(number)
                warnings.warn(f"{err}\n  an older step is loaded instead.", RuntimeWarning, stacklevel=3)

    def _newest(self, call: str, broken: set[int]) -> int:
        """Return the newest step except those that are broken; raise if there is none."""
        number = max(set(self.steps()) - broken, default=None)
        if number is not None:
            return number
        if broken:
            raise damaged(f"{call} {self._folder}: all steps are damaged.", got=f"damaged: {sorted(broken)}")
        raise no_step(self._folder, call)


class _Submission(NamedTuple):
    """The checked arguments of a save."""

    step: int
    tree: TensorCollection
    metadata: dict[str, Any]
    overwrite: bool
    path: pathlib.Path


def _describe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as JSON returns them, with numbers of Python for numbers of numpy; raise if others change."""
    described: dict[str, Any] = {}
    for key, value in metadata.items():
        entry = {key: value}
        reason = ""
        try:
            entry = {key: _without_numpy(value)}
            back: Any = json.loads(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError) as err:
            back = None
            reason = str(err)
        # Also types: JSON makes a list of a tuple, and text of a number that is a key.
        if repr(back) != repr(entry):
            reason = reason or f"JSON turns it into {back[key]!r}"
            raise UnsupportedError(
                f"save: metadata[{key!r}] cannot be stored; nothing was written.",
                expected="str, bool, None, finite numbers, lists, and dicts with str keys",
                got=f"{type(value).__name__}: {reason}"[:300],
                hint="convert it: float(x), x.tolist(), str(x); None stands for a missing value.",
            )
        described.update(back)
    return described


def _without_numpy(value: Any) -> Any:
    """Return the value with equal numbers of Python for numpy's, also inside lists and dicts."""
    if isinstance(value, (np.number, np.bool_)):
        return value.item()  # pyright: ignore[reportUnknownVariableType]
    if type(value) is list:
        return [_without_numpy(one) for one in value]
    if type(value) is dict:
        return {key: _without_numpy(one) for key, one in value.items()}
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
