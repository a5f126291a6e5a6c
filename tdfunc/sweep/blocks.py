"""Training of blocks of members by several workers, with a checkpoint of each block after each rung."""

import os
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import WorkerError, as_count, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.system import platform
from tdfunc.distributed.messages import classes_of
from tdfunc.ensemble.draws import run_seeded
from tdfunc.ops.base.reading import iter_items
from tdfunc.storage.disk.commit import Descriptor
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.manager.manager import CheckpointManager
from tdfunc.storage.tree.encode import outline
from tdfunc.sweep.members import check_members, check_run

T = TypeVar("T", bound=TensorCollection)
# The seconds that a worker without a free block waits before it checks again.
_LOOK_S = 0.2
# The number of values of a member in a message.
_SHOWN = 12


class _Blocks(NamedTuple):
    """The blocks of a sweep in a folder. A call with the members of a block trains them to the end."""

    # Any: a function of trees.
    train: Callable[[Any, int], tuple[Any, Tensor]]
    rungs: int
    folder: str

    def manager(self, first: int) -> CheckpointManager:
        return CheckpointManager(f"{self.folder}/members-{first:06d}", keep_last=1)

    def rung(self, first: int) -> int:
        """Return the number of rungs for which a block is trained."""
        return self.manager(first).latest() or 0

    # Any: trees.
    def load(self, start: Any, first: int, device: torch.device) -> Any:
        """Return a block and its scores from the last checkpoint."""
        manager = self.manager(first)
        rung = self.rung(first)
        found = manager.metadata(rung).get("start")
        own = _digest(start)
        if found != own or rung > self.rungs:
            raise error(
                ValueError,
                f"train_blocks: {self.folder} has checkpoints of another run or block, or of more rungs.",
                expected=f"members from {first} that began as {own}, {self.rungs} rungs at most",
                got=f"{found}, {rung} rungs",
                hint="another folder=.",
            )
        target = None
        if device.type != "cpu":
            target = device
        return manager.load(device=target, classes=classes_of(start))

    # Any: a tree.
    def __call__(self, rows: Any) -> None:
        start = rows["run"]
        first = int(rows["member"][0])
        with Descriptor(f"{self.folder}/members-{first:06d}.lock", platform.LOCK_FILE, 0o666) as fd:
            try:
                platform.lock_file(fd)
            except BlockingIOError:
                return
            except OSError:
                # Without locks two workers may train a block at the same time; their checkpoints are equal.
                pass
            done = self.rung(first)
            device = _device_of(start)
            run = start
            if done:
                run = self.load(start, first, device)["run"]
            for rung in range(done, self.rungs):
                run, scores = self._step(run, rung, first)
                # A process without the device of `train` must be able to load it.
                if any(leaf.device != device for _, leaf in iter_leaves(run)):
                    run = run.to(device)
                saved = {"run": run, "scores": scores.to(device)}
                self.manager(first).save(rung + 1, saved, metadata={"start": _digest(start)}, overwrite=True)

    # Any: trees.
    def _step(self, run: Any, rung: int, first: int) -> tuple[Any, Tensor]:
        size = run._batch_size[0]
        try:
            # Alone among threads, whose draws would mix: they share the generator.
            new, scores = run_seeded([torch.default_generator], rung, partial(self.train, run, rung))
        except Exception as err:
            if size > 1:
                # Fewer members, which raise their own error, down to one.
                half = (size + 1) // 2
                self._step(run[:half], rung, first)
                self._step(run[half:], rung, first + half)
                what = f"train_blocks: members {first} to {first + size - 1} cannot be trained together."
            else:
                what = f"train_blocks: member {first} cannot be trained: {_values_of_member(run)}."
            raise WorkerError(
                what, expected=f"the run and scores of rung {rung}", got=f"{type(err).__name__}: {err}"
            ) from err
        where = f"train_blocks: members {first} to {first + size - 1}"
        check_run(where, new, size)
        check_members(where, "scores", scores, run._batch_size[:1])
        return new, scores


# Any: a tree.
def _values_of_member(run: Any) -> str:
    """Return the numbers of a run of one member, for a message."""
    numbers = [(path, leaf[0]) for path, leaf in iter_leaves(run) if leaf.dim() == 1]
    return ", ".join([f"{dotted(path)}={number.item():.6g}" for path, number in numbers[:_SHOWN]])


def train_blocks(
    run: T,
    train: Callable[[T, int], tuple[T, Tensor]],
    rungs: int,
    *,
    folder: str | os.PathLike[str],
    chunk_size: int,
    num_workers: int = 0,
    executor: Any = None,
    retries: int = 2,
    progress: bool = False,
) -> tuple[T, Tensor]:
    """Train blocks of members side by side, with a checkpoint of each block after each rung.

    Every process that calls it with the same arguments and folder is a worker. A worker trains blocks that no other
    worker is training, and returns when all blocks are trained. So a job that is started again continues from the
    checkpoints, and the processes of torchrun, or of an array of jobs, share the blocks without messages. With
    `num_workers=` or `executor=`, this process only waits for its workers.

    The members of a killed worker continue from their last checkpoint, with the same result as without the kill. A
    block is locked while it is trained; the lock of a killed process ends with the process.

    Args:
        run: The members before the first rung, as in `elites`. It must be the same in every call.
        train: A function of the run of a block and the number of the rung, as for `successive_halving`. It samples with
            keys in the run, or with torch's default generator on the CPU, whose seed is the number of the rung. It may
            move the run to a device; its result is moved back.
        rungs: The number of times to train. If the folder has fewer, training continues.
        folder: The folder of the checkpoints, on a file system that all workers share.
        chunk_size: The number of members in a block, which one call of `train` trains.
        num_workers: The number of processes to start here; 0 trains in this process.
        executor: An executor in place of these processes, as for `td.map`: a `RayExecutor`, for example. Threads train
            one block at a time, because they share the default generator.
        retries: The number of times in a row that a worker may die without a new checkpoint in the folder.
        progress: Show a progress bar of the blocks that are left. Requires tqdm.

    Returns:
        The run and the scores of the last rung, in the order of the members.

    Raises:
        WorkerError: `train` raised an error, or a worker died too often. The message has the member and its values,
            which are found by training smaller blocks.
        BatchSizeError: `train` does not return all members of a block, and one score for each; the message has the
            block.
        ValueError: The folder has the checkpoints of another run, or a number is below 1.

    Examples:
        >>> import tempfile
        >>> def train(run, rung):
        ...     run = run.set("trained", run["trained"] + 1)
        ...     return run, (run["lr"] - 0.3).abs()
        >>> run = TensorDict({"lr": torch.linspace(0, 1, 11), "trained": torch.zeros(11)}, [11])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run, scores = train_blocks(run, train, rungs=3, folder=folder, chunk_size=4)
        >>> tdf.sweep.best(run, scores)["lr"], run["trained"].unique()
        (tensor(0.3000), tensor([3.]))
    """
    rungs = as_count("train_blocks: rungs", rungs)
    chunk_size = as_count("train_blocks: chunk_size", chunk_size)
    blocks = _Blocks(train, rungs, os.path.abspath(local_folder(folder, "train_blocks")))
    os.makedirs(blocks.folder, exist_ok=True)
    members = torch.arange(run._batch_size[0], device="cpu")
    tree = TensorCollection._open({"run": run, "member": members}, [len(members)])
    firsts = range(0, len(members), chunk_size)
    # An executor has its own number of workers.
    workers = num_workers if executor is None else None
    options: Any = {"chunksize": chunk_size, "num_workers": workers, "executor": executor, "key": 0, "pbar": progress}
    _train_all(tree, blocks, firsts, options, retries)
    parts = [blocks.load(run[i : i + chunk_size], i, _device_of(run)) for i in firsts]  # pyright: ignore[reportIndexIssue]
    # Any: trees.
    found: Any = torch.cat([part["run"] for part in parts])
    return found, torch.cat([part["scores"] for part in parts])


# Any: a tree, and options of `map_iter`.
def _train_all(tree: Any, blocks: _Blocks, firsts: range, options: Any, retries: int) -> None:
    """Train the blocks that begin at some members until all have their rungs, with new workers for those that died."""
    deaths = 0
    done = [blocks.rung(first) for first in firsts]
    while min(done) < blocks.rungs:
        # A shorter block is the last.
        waiting = [first for first, rung in zip(firsts, done, strict=True) if rung < blocks.rungs]
        # Any: as above.
        left: Any = torch.cat([tree["member"][first : first + firsts.step] for first in waiting])
        before = done
        death = _run_blocks(tree[left], blocks, options)
        done = [blocks.rung(first) for first in firsts]
        if done > before:
            deaths = 0
        elif death is not None:
            deaths += 1
        if death is not None and deaths > retries:
            raise death
        if done == before:
            # Other processes train the rest.
            time.sleep(_LOOK_S)


# Any: a tree, and options of `map_iter`.
def _run_blocks(rows: Any, blocks: _Blocks, options: Any) -> WorkerError | None:
    """Train the blocks of members; return the error of a worker that died, of which another may continue the work."""
    try:
        for _ in rows.map_iter(blocks, **options):
            pass
    except WorkerError as err:
        if not isinstance(err.__cause__, BrokenExecutor):
            raise
        return err
    return None


def _device_of(tree: TensorCollection) -> torch.device:
    return next(leaf.device for _, leaf in iter_leaves(tree))


def _digest(tree: TensorCollection) -> str:
    """Return a digest of the leaves and of the non-tensor data, which are hyperparameters as well."""
    state = xxhash.xxh3_128()
    for path, leaf in iter_leaves(tree):
        state.update(repr((path, leaf.dtype, tuple(leaf.shape))).encode())
        state.update(raw_bytes(leaf).data)
    others = {dotted(path): node for path, node in iter_items(tree, True, True) if isinstance(node, NonTensorBase)}
    if others:
        values = {name: NonTensorData(node._array.ravel().tolist()) for name, node in sorted(others.items())}
        described = outline(TensorCollection._open(values), call="train_blocks")
        state.update((described.text or "").encode())
        for leaf in described.leaves:
            state.update(raw_bytes(leaf).data)
    return state.hexdigest()
