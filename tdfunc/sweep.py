"""Sweeps: hyperparameters of many members as a tree, folds and bootstraps, early stopping, the best members, results.

E is the number of members and N the number of examples. A member of a sweep is one index of stacked trees: parameters,
optimizer state and hyperparameters have the same index, and a member equals its own separate run.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import xxhash
from torch import Tensor

from tdfunc import random
from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import has_values, in_functorch, is_compiling
from tdfunc.core.errors import (
    BatchSizeError,
    WorkerError,
    as_count,
    brief,
    check_choice,
    check_finite,
    check_least,
    error,
)
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.system import platform
from tdfunc.distributed.messages import classes_of
from tdfunc.ensemble.draws import run_seeded
from tdfunc.ops.base.reading import iter_items
from tdfunc.random.draws import KeyLike, key_of
from tdfunc.storage.disk.commit import Descriptor
from tdfunc.storage.disk.raw import raw_bytes
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.manager.manager import CheckpointManager
from tdfunc.storage.tree.encode import outline

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

__all__ = [
    "EarlyStopping",
    "Results",
    "best",
    "bootstrap",
    "elites",
    "grid",
    "keep_best",
    "kfold",
    "log_uniform",
    "random_search",
    "rank",
    "successive_halving",
    "train_blocks",
    "uniform",
    "weights_of",
]

T = TypeVar("T", bound=TensorCollection)
Mode: TypeAlias = Literal["min", "max"]
Values: TypeAlias = "Tensor | Sequence[float] | Sequence[int] | Sequence[bool]"
Space: TypeAlias = "Callable[[Tensor, int], Tensor] | Tensor | Sequence[Any]"
# The seconds that a worker without a free block waits before it checks again.
_LOOK_S = 0.2
# The number of values of a member in a message, and of members in a table.
_SHOWN = 12


def grid(**axes: Values) -> "TensorDict":
    """Return every combination of values, one for each member; the last name varies fastest.

    Shapes:
        Axes of n, m, ... values give leaves (n * m * ...), the batch size of the tree.

    Raises:
        TypeError: The values of a name are not numbers.

    Examples:
        >>> hyper = grid(lr=[0.1, 0.01], weight_decay=[0.0, 1e-4, 1e-2])
        >>> hyper.batch_size, hyper["lr"].tolist()[:4]
        (torch.Size([6]), [0.10000000149011612, 0.10000000149011612, 0.10000000149011612, 0.009999999776482582])
    """
    if not axes:
        return _tree({})
    columns = {name: torch.atleast_1d(_numbers("grid", name, values)) for name, values in axes.items()}
    # A mesh of indices, because torch refuses a mesh of unequal dtypes.
    rows = torch.meshgrid(*[torch.arange(len(column)) for column in columns.values()], indexing="ij")
    pairs = zip(columns.items(), rows, strict=True)
    return _tree({name: column[row.flatten()] for (name, column), row in pairs})


def random_search(key: KeyLike, members: int, **spaces: Space) -> "TensorDict":
    """Return random hyperparameters; the values of a member do not depend on the number of members or on other names.

    Args:
        key: A random key, a seed or a generator.
        members: The number of members.
        **spaces: For each name the values to choose from, one number for all members, or a function of a key and a
            shape: `log_uniform(1e-4, 0.1)`, `uniform(0.0, 1.0)`, `tdf.random.normal`.

    Raises:
        TypeError: The values of a name are not numbers.
        BatchSizeError: A function does not return one value for each member.

    Examples:
        >>> hyper = random_search(0, 64, lr=log_uniform(1e-4, 1e-1), dropout=[0.0, 0.1, 0.5])
        >>> hyper.batch_size
        torch.Size([64])
    """
    members = as_count("random_search: members", members, 0)
    key = key_of(key)
    drawn = dict[str, Tensor]()
    for name, space in spaces.items():
        own = random.fold_in(key, xxhash.xxh64_intdigest(name.encode()))
        if callable(space):
            drawn[name] = space(own, members)
        else:
            # One number is one choice, as in `grid`: `choice` would draw from the numbers below it.
            choices = torch.atleast_1d(_numbers("random_search", name, space))
            drawn[name] = random.choice(own, choices, (members,))
    return TensorCollection._open(drawn, [members])


def uniform(low: float, high: float) -> Callable[[Tensor, int], Tensor]:
    """Return a space of uniform numbers in [low, high)."""
    if not low <= high:
        raise error(ValueError, "uniform: high is below low.", expected=f">= {low}", got=high)
    return lambda key, shape: random.uniform(key, shape, minval=low, maxval=high)


def log_uniform(low: float, high: float) -> Callable[[Tensor, int], Tensor]:
    """Return a space of positive numbers whose logarithm is uniform."""
    if not 0 < low <= high:
        raise error(ValueError, "log_uniform: low must be above 0, and high not below it.", got=(low, high))
    return lambda key, shape: random.uniform(key, shape, minval=math.log(low), maxval=math.log(high)).exp()


def kfold(examples: int, folds: int, *, key: KeyLike | None = None) -> Tensor:
    """Return the mask of training examples of each fold; the other examples validate it.

    Args:
        examples: The number of examples N.
        folds: The number of folds K. Each example validates exactly one fold, and their sizes differ by at most one.
        key: A random key, a seed or a generator that orders the examples. By default folds are consecutive examples.

    Shapes:
        (K, N), bool. `mask.nonzero()` returns indices. Under `torch.vmap`, use the mask as a weight of each loss.

    Raises:
        ValueError: There are fewer than two folds, or more folds than examples.

    Source:
        `sklearn.model_selection.KFold`.

    Examples:
        >>> kfold(4, 2).int()
        tensor([[0, 0, 1, 1],
                [1, 1, 0, 0]], dtype=torch.int32)
    """
    examples = as_count("kfold: examples", examples)
    folds = as_count("kfold: folds", folds)
    if not 2 <= folds <= examples:
        raise error(ValueError, "kfold: folds must be at least 2, and at most all examples.", got=(examples, folds))
    sizes = torch.tensor([examples // folds + (i < examples % folds) for i in range(folds)])
    fold_of = torch.arange(folds).repeat_interleave(sizes)
    if key is not None:
        key = key_of(key)
        fold_of = random.permutation(key, fold_of.to(key.device))
    return fold_of != torch.arange(folds, device=fold_of.device).unsqueeze(1)


def bootstrap(key: KeyLike, examples: int, members: int) -> Tensor:
    """Return the indices of a sample with replacement for each member; `weights_of` turns them into weights.

    The indices of a member do not depend on the number of members.

    Shapes:
        (E, N), int64.

    Examples:
        >>> bootstrap(0, 100, 16).shape
        torch.Size([16, 100])
    """
    examples = as_count("bootstrap: examples", examples)
    members = as_count("bootstrap: members", members, 0)
    key = key_of(key)
    keys = random.fold_in(key, torch.arange(members, device=key.device))
    return torch.vmap(lambda own: random.randint(own, (examples,), 0, examples))(keys)


def weights_of(indices: Tensor, examples: int) -> Tensor:
    """Return the count of each example in each member's indices.

    Shapes:
        Indices (E, M) become (E, N), float.
    """
    counts = torch.zeros(indices.shape[0], examples, device=indices.device)
    return counts.scatter_add(1, indices, torch.ones_like(indices, dtype=counts.dtype))


@dataclass(frozen=True)
class EarlyStopping:
    """Two pure functions that stop members whose metric does not improve for some time.

    `optimizer.update(..., active=state["active"])` does not change members that have stopped. A member that has stopped
    does not start again. `Results(hyper, state)` shows the state as a table.

    Args:
        patience: The number of updates without an improvement that stop a member.
        min_delta: The smallest change that counts as an improvement.
        mode: `"min"` if small metrics are good, `"max"` if large metrics are good.

    Raises:
        ValueError: `patience` is below 1.

    Examples:
        >>> stopping = EarlyStopping(patience=2)
        >>> state = stopping.init(2)
        >>> for loss in ([1.0, 1.0], [0.9, 1.1], [0.8, 1.2]):
        ...     state = stopping.update(torch.tensor(loss), state)
        >>> state["active"].tolist(), state["best"].tolist()
        ([True, False], [0.800000011920929, 1.0])
    """

    patience: int
    _: KW_ONLY
    min_delta: float = 0.0
    mode: Mode = "min"

    def __post_init__(self) -> None:
        check_finite("EarlyStopping: min_delta", self.min_delta)
        object.__setattr__(self, "patience", as_count("EarlyStopping: patience", self.patience))
        _sign(self.mode)

    @property
    def sign(self) -> int:
        """1 if small metrics are good, -1 if large metrics are good."""
        return _sign(self.mode)

    def init(self, members: int, *, device: torch.device | str | None = None) -> "TensorDict":
        """Return the state before the first metric: `best`, `waited`, `improved` and `active`, of shape (E,)."""
        best = torch.full((members,), self.sign * math.inf, dtype=torch.float64, device=device)
        yes = torch.ones(members, dtype=torch.bool, device=device)
        return _tree(
            {"best": best, "waited": torch.zeros_like(yes, dtype=torch.int64), "improved": ~yes, "active": yes}
        )

    def update(self, metric: Tensor, state: T) -> T:
        """Return the state after a metric of each member; nan does not count as an improvement.

        Shapes:
            `metric` is (E,).
        """
        data: Any = state._data
        best = data["best"]
        active = data["active"]
        _check_members("EarlyStopping.update", "metric", metric, best.shape)
        metric = metric.detach().to(best.dtype)
        improved = active & (self.sign * (best - metric) > self.min_delta)
        waited = torch.where(improved, 0, data["waited"] + active)
        new = {
            "best": torch.where(improved, metric, best),
            "waited": waited,
            "improved": improved,
            "active": active & (waited < self.patience),
        }
        return state._replace({**data, **new})


def rank(scores: Tensor, *, mode: Mode = "min") -> Tensor:
    """Return the members from the best to the worst: equal members by number, and members with a nan last.

    Args:
        scores: A number for each member.
        mode: `"min"` if small scores are good, `"max"` if large scores are good.

    Shapes:
        (E,) gives (E,), int64.

    Examples:
        >>> rank(torch.tensor([3.0, float("nan"), 1.0]))
        tensor([2, 0, 1])
    """
    order = scores.argsort(descending=_sign(mode) == -1, stable=True)
    return order[scores[order].isnan().argsort(stable=True)]


def elites(tree: T, scores: Tensor, members: int, *, mode: Mode = "min") -> T:
    """Return a smaller stack of the best members of a stacked tree, the best first.

    Args:
        tree: A tree whose first batch dimension is the members. One tree can hold several:
            `TensorDict({"params": params, "state": state, "hyper": hyper}, [E])`.
        scores: A number for each member. Members with a nan are kept only if there are too few others.
        members: The number of members to keep.
        mode: `"min"` if small scores are good, `"max"` if large scores are good.

    Shapes:
        `scores` is (E,); a tree of batch size (E, *S) gives one of (members, *S).

    Raises:
        BatchSizeError: The tree does not have a member for each score.
        ValueError: `members` is below 1 or above E, or all scores are nan or infinitely bad (not checked under a
            transform or `jit`).

    Examples:
        >>> run = TensorDict({"lr": torch.tensor([0.1, 0.2, 0.3])}, [3])
        >>> elites(run, torch.tensor([5.0, 1.0, 2.0]), 2)["lr"]
        tensor([0.2000, 0.3000])
    """
    _check_scores(tree, scores)
    total = scores.shape[0]
    members = as_count("sweep: members", members)
    if members > total:
        raise error(ValueError, "sweep: members is out of range.", expected=f"1 to {total}", got=members)
    _check_usable(scores, mode)
    chosen: Any = rank(scores, mode=mode)[:members]
    return tree[chosen]  # pyright: ignore[reportIndexIssue]


def best(tree: T, scores: Tensor, *, mode: Mode = "min") -> T:
    """Return the best member of a stacked tree; see `elites`.

    Examples:
        >>> run = TensorDict({"lr": torch.tensor([0.1, 0.2, 0.3])}, [3])
        >>> best(run, torch.tensor([0.7, 0.9, float("nan")]), mode="max")["lr"]
        tensor(0.2000)
    """
    return elites(tree, scores, 1, mode=mode)[0]  # pyright: ignore[reportIndexIssue]


class Results:
    """The scores of the members of a sweep beside their hyperparameters, as a table whose first row is the best member.

    Attributes:
        order: The members from the best to the worst, as `rank` returns them: `run[results.order[:4]]` is a stack.
        hyper: The tree of hyperparameters.
        scores: The number of each member.
        mode: `"min"` or `"max"`.

    Args:
        hyper: A tree with a number for each member, from `grid` or `random_search`. Other leaves are not shown.
        scores: A number for each member, or the state of `EarlyStopping`, which adds whether a member is active.
        mode: `"min"` if small scores are good, `"max"` if large scores are good.

    Raises:
        BatchSizeError: The tree does not have a member for each score.

    Source:
        `best_trial`, `best_value` and `best_params` of a study of Optuna.

    Examples:
        >>> hyper = grid(lr=[0.5, 0.25], weight_decay=[0.0, 0.125])
        >>> results = Results(hyper, torch.tensor([0.5, 0.75, float("nan"), 0.25]))
        >>> results
        Results(4 members, mode='min')
          member  score    lr  weight_decay
               3   0.25  0.25         0.125
               0    0.5   0.5             0
               1   0.75   0.5         0.125
               2    nan  0.25             0
        >>> results.best_member, results.best_score, results.best_hyper
        (3, 0.25, {'lr': 0.25, 'weight_decay': 0.125})
    """

    def __init__(self, hyper: TensorCollection, scores: Tensor | TensorCollection, *, mode: Mode = "min") -> None:
        state: dict[str, Any] = {}
        if isinstance(scores, TensorCollection):
            state = {name: scores._data[name] for name in ("waited", "active")}
            scores = scores._data["best"]
        assert isinstance(scores, Tensor)
        _check_scores(hyper, scores)
        columns = {dotted(path): leaf for path, leaf in iter_leaves(hyper) if leaf.dim() == 1}
        self.order: Tensor = rank(scores, mode=mode)
        self.mode: Mode = mode
        self.scores: Tensor = scores
        self.hyper: TensorCollection = hyper
        self._columns = columns
        self._state = state

    @property
    def best_member(self) -> int:
        """The number of the best member.

        Raises:
            ValueError: All scores are nan or infinitely bad.
        """
        _check_usable(self.scores, self.mode)
        return int(self.order[0])

    @property
    def best_score(self) -> float:
        """The score of the best member."""
        return self.scores[self.best_member].item()

    @property
    def best_hyper(self) -> dict[str, float]:
        """The hyperparameters of the best member."""
        member = self.best_member
        return {name: column[member].item() for name, column in self._columns.items()}

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.order)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each member, the best first: `pandas.DataFrame(results.rows())`.

        Its keys are `member`, `score` and the names of the hyperparameters; with a state also `waited` and `active`.
        """
        columns = {"member": torch.arange(len(self)), "score": self.scores, **self._columns, **self._state}
        values = {name: column.tolist() for name, column in columns.items()}
        return [{name: column[member] for name, column in values.items()} for member in self.order.tolist()]

    def __repr__(self) -> str:
        lines = [f"Results({len(self)} members, mode={self.mode!r})"]
        rows = self.rows()
        shown = [{name: _cell(value) for name, value in row.items()} for row in rows[:_SHOWN]]
        if shown:
            widths = {name: max(len(name), *[len(row[name]) for row in shown]) for name in shown[0]}
            for row in [{name: name for name in widths}, *shown]:
                lines.append("  " + "  ".join([row[name].rjust(width) for name, width in widths.items()]))
        if len(rows) > _SHOWN:
            lines.append(f"  and {len(rows) - _SHOWN} more")
        return "\n".join(lines)


# Any: a number of any kind.
def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def successive_halving(
    run: T, train: Callable[[T, int], tuple[T, Tensor]], rungs: int, *, factor: float = 2, mode: Mode = "min"
) -> T:
    """Train a stack in rungs, and continue after each rung with a smaller stack of the best members.

    Args:
        run: The parameters, optimizer state and hyperparameters of the members in one tree, as in `elites`.
        train: A function of the run and the number of the rung. It trains all members for one rung, and returns the run
            and a score for each member.
        rungs: The number of times to train.
        factor: The ratio of the members before and after each rung except the last; their number is rounded up.
        mode: `"min"` if small scores are good, `"max"` if large scores are good.

    Returns:
        The members of the last rung, the best first.

    Raises:
        ValueError: `rungs` or `factor` is below 1, or all scores of a rung are nan or infinitely bad.
        BatchSizeError: `train` does not return all members, and one score for each.

    Source:
        Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (2016).

    Examples:
        >>> def train(run, rung):
        ...     run = run.set("trained", run["trained"] + 10 * 2**rung)
        ...     return run, (run["lr"] - 0.3).abs()
        >>> run = TensorDict({"lr": torch.linspace(0, 1, 8), "trained": torch.zeros(8)}, [8])
        >>> successive_halving(run, train, rungs=3)["trained"]  # 8, 4 and 2 members were trained
        tensor([70., 70.])
    """
    rungs = as_count("successive_halving: rungs", rungs)
    check_least("successive_halving: factor", factor)
    scores = None
    for rung in range(rungs):
        if scores is not None:
            run = elites(run, scores, math.ceil(scores.shape[0] / factor), mode=mode)
        size = run._batch_size[0]
        run, scores = train(run, rung)
        _check_run("successive_halving", run, size)
    assert scores is not None
    return elites(run, scores, scores.shape[0], mode=mode)


def keep_best(kept: T, tree: T, improved: Tensor) -> T:
    """Return each member from `tree` if it has improved, else from `kept`.

    Outside of transforms the result does not require grad.

    Shapes:
        `improved` is (E,), as in the state of `EarlyStopping`.
    """
    _check_members("keep_best", "improved", improved, kept._batch_size[:1])
    # Live Parameters would add a node to the graph of the kept weights at each call.
    is_followed = torch.is_grad_enabled() and (in_functorch() or is_compiling())
    with torch.set_grad_enabled(bool(is_followed)):
        return torch.where(improved, tree, kept)  # pyright: ignore[reportArgumentType, reportCallIssue]


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
        _check_run(where, new, size)
        _check_members(where, "scores", scores, run._batch_size[:1])
        return new, scores


# Any: a tree.
def _values_of_member(run: Any) -> str:
    """Return the numbers of a run of one member, for a message."""
    numbers = [(path, leaf[0]) for path, leaf in iter_leaves(run) if leaf.dim() == 1]
    return ", ".join([f"{dotted(path)}={number.item():.6g}" for path, number in numbers[:_SHOWN]])

    # Any: trees.


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
        >>> best(run, scores)["lr"], run["trained"].unique()
        (tensor(0.3000), tensor([3.]))
    """
    rungs = as_count("train_blocks: rungs", rungs)
    chunk_size = as_count("train_blocks: chunk_size", chunk_size)
    blocks = _Blocks(train, rungs, os.path.abspath(local_folder(folder, "train_blocks")))
    os.makedirs(blocks.folder, exist_ok=True)
    members = torch.arange(run._batch_size[0], device="cpu")
    tree = TensorCollection._open({"run": run, "member": members}, [len(members)])
    firsts = range(0, len(members), chunk_size)
    deaths = 0
    done = [blocks.rung(first) for first in firsts]
    # An executor has its own number of workers.
    workers = num_workers if executor is None else None
    options: Any = {"chunksize": chunk_size, "num_workers": workers, "executor": executor, "key": 0, "pbar": progress}
    while min(done) < rungs:
        # A shorter block is the last.
        waiting = [first for first, rung in zip(firsts, done, strict=True) if rung < rungs]
        left: Any = torch.cat([members[first : first + chunk_size] for first in waiting])
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
    parts = [blocks.load(run[i : i + chunk_size], i, _device_of(run)) for i in firsts]  # pyright: ignore[reportIndexIssue]
    # Any: trees.
    found: Any = torch.cat([part["run"] for part in parts])
    return found, torch.cat([part["scores"] for part in parts])


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


# Any: lists of anything.
def _numbers(call: str, name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as err:
        raise error(
            TypeError,
            f"{call}: the values of {name!r} are not numbers, and members are rows of tensors.",
            got=brief(values),
            hint="run one sweep for each of these values.",
        ) from err


def _check_members(call: str, name: str, given: Tensor, shape: torch.Size) -> None:
    if given.shape != shape:
        raise BatchSizeError(
            f"{call}: {name} does not have an entry for each member.",
            expected=f"shape {list(shape)}",
            got=f"shape {list(given.shape)}",
        )


def _check_scores(tree: TensorCollection, scores: Tensor) -> None:
    if scores.dim() != 1 or tree._batch_size[:1] != scores.shape:
        size = ", ".join(map(str, [*scores.shape, "..."]))
        raise BatchSizeError(
            "sweep: the tree does not have a member for each score.",
            expected=f"batch size [{size}], for scores of one dimension",
            got=f"batch size {list(tree._batch_size)}, scores of shape {list(scores.shape)}",
            hint="tree.with_batch_size([E]), if its leaves are stacked.",
        )


def _check_usable(scores: Tensor, mode: Mode) -> None:
    # The metric of a member that has never improved is infinite in the state of `EarlyStopping`.
    is_usable = _sign(mode) * scores < math.inf
    if has_values() and not scores.is_meta and not bool(is_usable.any()):
        raise error(
            ValueError,
            "sweep: none of the scores is a number.",
            expected="a score that is finite, or infinitely good",
            got=brief(scores.tolist()),
        )


# Any: the result of a function of the user.
def _check_run(call: str, run: Any, members: int) -> None:
    """Raise unless `train` has returned all members; without some, the scores would belong to others."""
    got = type(run).__name__
    if isinstance(run, TensorCollection):
        if run._batch_size[:1] == (members,):
            return
        got = f"batch size {list(run._batch_size)}"
    raise BatchSizeError(
        f"{call}: train returned another number of members.",
        expected=f"a tree with the batch size [{members}, ...]",
        got=got,
        hint="select members between rungs, with `elites`.",
    )


def _sign(mode: Mode) -> int:
    check_choice("mode", mode, ("min", "max"))
    return 1 if mode == "min" else -1


def _tree(data: dict[str, Any]) -> "TensorDict":
    if data:
        size = next(iter(data.values())).shape[:1]
    else:
        size = torch.Size()
    return TensorCollection._open._make(data, size, None, None)


def __dir__() -> list[str]:
    return list(__all__)
