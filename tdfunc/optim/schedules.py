"""Schedules: functions from the number of steps done so far to a hyperparameter, under optax's names.

The number is an integer tensor, of no dimensions or with an entry for each member, and so are the values: a peak of
shape (E,) is a schedule for each member. Everything is arithmetic of tensors, which `torch.vmap` and `tdfunc.jit` run:
in float64, as in the optimizers, unless a peak of several members has another dtype.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, as_count, brief, check_choice, check_finite, check_least, error
from tdfunc.core.types import wide_default_dtype
from tdfunc.optim.optimizer import Schedule

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

__all__ = [
    "ReduceOnPlateau",
    "constant",
    "cosine_decay",
    "exponential_decay",
    "join_schedules",
    "linear",
    "piecewise_constant",
    "polynomial",
    "warmup_cosine_decay",
]

T = TypeVar("T", bound=TensorCollection)
Value: TypeAlias = float | Tensor


def constant(value: Value) -> Schedule:
    """Return the schedule of one value."""
    return lambda step: _at(step, value)


def polynomial(
    init_value: Value, end_value: Value, transition_steps: int, *, power: float = 1.0, transition_begin: int = 0
) -> Schedule:
    """Return the schedule from one value to another along a power of the steps that are left.

    Args:
        init_value: The value up to `transition_begin`.
        end_value: The value from `transition_begin + transition_steps` on.
        transition_steps: The number of steps from one value to the other.
        power: The power; 1 is a straight line.
        transition_begin: The number of steps before the transition.

    Source:
        `optax.polynomial_schedule`, `torch.optim.lr_scheduler.PolynomialLR`.
    """
    check_least("polynomial: transition_steps", transition_steps)

    def value(step: Tensor) -> Tensor:
        left = 1 - (_real(step) - transition_begin).clamp(0, transition_steps) / transition_steps
        return (init_value - end_value) * left**power + end_value

    return value


def linear(init_value: Value, end_value: Value, transition_steps: int, *, transition_begin: int = 0) -> Schedule:
    """Return the schedule along a straight line; see `polynomial`.

    Examples:
        >>> warmup = linear(0.0, 0.1, 100)
        >>> warmup(torch.tensor(50))
        tensor(0.0500, dtype=torch.float64)
    """
    return polynomial(init_value, end_value, transition_steps, transition_begin=transition_begin)


def cosine_decay(init_value: Value, decay_steps: int, *, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Return the schedule along half a cosine, down to `alpha * init_value`.

    Args:
        init_value: The value at step 0.
        decay_steps: The number of steps to the last value.
        alpha: The last value, as a share of the first.
        exponent: A power of the cosine.

    Source:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts" (2017);
        `optax.cosine_decay_schedule`.
    """
    check_least("cosine_decay: decay_steps", decay_steps)

    def value(step: Tensor) -> Tensor:
        share = _real(step).clamp(max=decay_steps) / decay_steps
        return init_value * ((1 - alpha) * ((1 + torch.cos(math.pi * share)) / 2) ** exponent + alpha)

    return value


def warmup_cosine_decay(
    init_value: Value,
    peak_value: Value,
    warmup_steps: int,
    decay_steps: int,
    *,
    end_value: Value = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Return a straight line up to a peak, then half a cosine down.

    Args:
        init_value: The value at step 0.
        peak_value: The value after the warm-up.
        warmup_steps: The number of steps of the warm-up.
        decay_steps: The number of steps of the warm-up and the decay together.
        end_value: The last value.
        exponent: A power of the cosine.

    Raises:
        ValueError: `decay_steps` is not above `warmup_steps`.

    Source:
        `optax.warmup_cosine_decay_schedule`.
    """
    check_least("warmup_cosine_decay: decay_steps", decay_steps, warmup_steps + 1)
    decay = cosine_decay(1.0, decay_steps - warmup_steps, exponent=exponent)

    def cosine(step: Tensor) -> Any:
        return (peak_value - end_value) * decay(step) + end_value

    if not warmup_steps:
        return cosine
    return join_schedules([linear(init_value, peak_value, warmup_steps), cosine], [warmup_steps])


def exponential_decay(
    init_value: Value,
    transition_steps: int,
    decay_rate: float,
    *,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Value | None = None,
) -> Schedule:
    """Return the schedule `init_value * decay_rate ** (step / transition_steps)`.

    Args:
        init_value: The value up to `transition_begin`.
        transition_steps: The number of steps in which the value is multiplied by `decay_rate` once.
        decay_rate: The factor.
        transition_begin: The number of steps before the decay.
        staircase: Multiply once after all of these steps, not a little at each (`torch.optim.lr_scheduler.StepLR`).
        end_value: A bound; the smallest value if `decay_rate` is below 1, otherwise the largest.

    Source:
        `optax.exponential_decay`.
    """
    check_least("exponential_decay: transition_steps", transition_steps)

    def value(step: Tensor) -> Tensor:
        share = (_real(step) - transition_begin).clamp(min=0) / transition_steps
        decayed = init_value * decay_rate ** (share.floor() if staircase else share)
        if end_value is None:
            return decayed
        bound = torch.as_tensor(end_value, dtype=decayed.dtype, device=decayed.device)
        if decay_rate < 1:
            return torch.maximum(decayed, bound)
        return torch.minimum(decayed, bound)

    return value


def piecewise_constant(init_value: Value, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """Return a value that is multiplied at some steps.

    Args:
        init_value: The value before the first of these steps.
        boundaries_and_scales: A mapping from numbers of steps done to factors from then on.

    Source:
        `optax.piecewise_constant_schedule`, `torch.optim.lr_scheduler.MultiStepLR`.

    Examples:
        >>> schedule = piecewise_constant(1.0, {10: 0.5, 20: 0.1})
        >>> [round(schedule(torch.tensor(step)).item(), 3) for step in (9, 10, 20)]
        [1.0, 0.5, 0.05]
    """

    def value(step: Tensor) -> Tensor:
        scaled = _at(step, init_value)
        for boundary, scale in boundaries_and_scales.items():
            scaled = torch.where(step >= boundary, scaled * scale, scaled)
        return scaled

    return value


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return one schedule after the other; each counts from its own first step.

    Args:
        schedules: The schedules.
        boundaries: The numbers of steps done at which the second, third, ... schedule begins.

    Raises:
        ValueError: There is not one boundary less than schedules, or they do not ascend.

    Source:
        `optax.join_schedules`, `torch.optim.lr_scheduler.SequentialLR`.
    """
    if len(schedules) != len(boundaries) + 1:
        raise error(
            ValueError,
            "join_schedules: the number of boundaries does not fit the number of schedules.",
            expected="a boundary where each schedule but the first begins",
            got=f"{len(schedules)} schedules, boundaries {brief(list(boundaries))}",
        )
    if list(boundaries) != sorted(boundaries):
        raise error(ValueError, "join_schedules: boundaries do not ascend.", got=brief(list(boundaries)))

    def value(step: Tensor) -> Tensor:
        joined = _at(step, schedules[0](step))
        for boundary, schedule in zip(boundaries, schedules[1:], strict=True):
            # Before its first step a schedule's value is not used, but its derivative must be finite.
            joined = torch.where(step >= boundary, schedule((step - boundary).clamp(min=0)), joined)
        return joined

    return value


class ReduceOnPlateau:
    """Two pure functions: a scale of the learning rate, reduced where a member's metric stops improving.

    Hold the learning rate as a tensor, which `init` puts into the optimizer's state:
    `state = state.set("lr", lr * plateau["scale"])`.

    Args:
        factor: The factor of the scale at a reduction.
        patience: The number of updates without an improvement that are allowed.
        threshold: The smallest change that counts as an improvement, as a share of the size of the best metric.
        cooldown: The number of updates after a reduction that are not counted.
        min_scale: The smallest scale.
        mode: `min` if small metrics are good, `max` if large ones are.

    Raises:
        TypeError: `patience` or `cooldown` is not a whole number.
        ValueError: `factor` or `min_scale` is not between 0 and 1, `mode` is another one, or a count is negative.

    Source:
        `torch.optim.lr_scheduler.ReduceLROnPlateau`, with `threshold_mode="rel"`; below zero its margin
        points the other way.

    Examples:
        >>> plateau = ReduceOnPlateau(factor=0.5, patience=0)
        >>> state = plateau.init((2,))
        >>> for loss in ([1.0, 1.0], [0.5, 1.0]):
        ...     state = plateau.update(torch.tensor(loss), state)
        >>> state["scale"]
        tensor([1.0000, 0.5000])
    """

    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        *,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_scale: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if not 0.0 < factor < 1.0:
            raise error(ValueError, "ReduceOnPlateau: factor must be between 0 and 1.", got=factor)
        check_finite("ReduceOnPlateau: threshold", threshold)
        check_choice("ReduceOnPlateau: mode", mode, ("min", "max"))
        # A reduction to a larger scale would be a rise.
        if not 0.0 <= min_scale <= 1.0:
            raise error(ValueError, "ReduceOnPlateau: min_scale must be between 0 and 1.", got=min_scale)
        self.factor = factor
        self.patience: int = as_count("ReduceOnPlateau: patience", patience, 0)
        self.threshold = threshold
        self.cooldown: int = as_count("ReduceOnPlateau: cooldown", cooldown, 0)
        self.min_scale = min_scale
        self.mode = mode

    def init(self, size: Sequence[int] = (), *, device: torch.device | str | None = None) -> "TensorDict":
        """Return the state before the first metric, with the given batch size: (E,) for members."""
        size = torch.Size(size)
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        worst = math.inf if self.mode == "min" else -math.inf
        # In 16 bits a small improvement would be rounded away.
        dtype = wide_default_dtype()
        data = {
            "scale": torch.ones(size, dtype=dtype, device=device),
            "best": torch.full(size, worst, dtype=dtype, device=device),
            "waited": zeros,
            "cooldown": zeros.clone(),
        }
        return TensorCollection._open._make(data, size, None, None)

    def update(self, metric: Tensor | float | NDArray[Any], state: T) -> T:
        """Return the state after a metric, of the state's batch size or one for all; a nan is not an improvement.

        Raises:
            BatchSizeError: The metric has another shape.
        """
        data: Any = state._data
        best = data["best"]
        metric = torch.as_tensor(metric, dtype=best.dtype, device=best.device).detach()
        if metric.shape not in ((), best.shape):
            raise BatchSizeError(
                "ReduceOnPlateau.update: the metric is not one number, and does not have the batch size of the state.",
                expected=f"shape [] or {list(best.shape)}",
                got=f"shape {list(metric.shape)}",
                hint="metric.mean(), or init((members,)) for a metric of each member.",
            )
        bound = self._bound(best)
        if self.mode == "min":
            better = metric < bound
        else:
            better = metric > bound
        cooling = data["cooldown"] > 0
        waited = torch.where(better | cooling, 0, data["waited"] + 1)
        reduce = waited > self.patience
        scale = torch.where(reduce, (data["scale"] * self.factor).clamp(min=self.min_scale), data["scale"])
        new = {
            "scale": scale,
            "best": torch.where(better, metric, best),
            "waited": torch.where(reduce, 0, waited),
            "cooldown": torch.where(reduce, self.cooldown, (data["cooldown"] - 1).clamp(min=0)),
        }
        return state._replace({**data, **new})

    def _bound(self, best: Tensor) -> Tensor:
        """Return the number that an improvement must pass: better than the best by a share of its size."""
        toward_zero = best * (1 - self.threshold)
        away = best * (1 + self.threshold)
        if self.mode == "min":
            is_toward_zero = best > 0
        else:
            is_toward_zero = best < 0
        # The first metric is better than an infinite one, whatever the share.
        return torch.where(best.isinf(), best, torch.where(is_toward_zero, toward_zero, away))


def _real(step: Tensor) -> Tensor:
    return step.to(torch.float64)


def _at(step: Tensor, value: Any) -> Tensor:
    """Return a value with the dimensions of the step count."""
    return (value.to(step.device) if isinstance(value, Tensor) else value) + torch.zeros_like(_real(step))


def __dir__() -> list[str]:
    return list(__all__)
