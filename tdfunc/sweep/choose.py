"""Early stopping, the best members, and the results of a sweep.

E is the number of members.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import has_values, in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError, as_count, brief, check_choice, check_finite, check_least, error
from tdfunc.core.keys import dotted
from tdfunc.sweep.members import check_members, check_run, tree_of_members

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)
Mode: TypeAlias = Literal["min", "max"]
# The number of members in a table.
_SHOWN = 12


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
        return tree_of_members(
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
        check_members("EarlyStopping.update", "metric", metric, best.shape)
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
        >>> hyper = tdf.sweep.grid(lr=[0.5, 0.25], weight_decay=[0.0, 0.125])
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
        check_run("successive_halving", run, size)
    assert scores is not None
    return elites(run, scores, scores.shape[0], mode=mode)


def keep_best(kept: T, tree: T, improved: Tensor) -> T:
    """Return each member from `tree` if it has improved, else from `kept`.

    Outside of transforms the result does not require grad.

    Shapes:
        `improved` is (E,), as in the state of `EarlyStopping`.
    """
    check_members("keep_best", "improved", improved, kept._batch_size[:1])
    # Live Parameters would add a node to the graph of the kept weights at each call.
    is_followed = torch.is_grad_enabled() and (in_functorch() or is_compiling())
    with torch.set_grad_enabled(bool(is_followed)):
        return torch.where(improved, tree, kept)  # pyright: ignore[reportArgumentType, reportCallIssue]


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


def _sign(mode: Mode) -> int:
    check_choice("mode", mode, ("min", "max"))
    return 1 if mode == "min" else -1
