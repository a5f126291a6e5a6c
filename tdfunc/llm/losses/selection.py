"""The best responses to each prompt, and coefficients of a KL penalty."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.context import require_values
from tdfunc.core.errors import as_count, as_number, brief, error, refuse_text
from tdfunc.core.types import wide_default_dtype
from tdfunc.mixture import widen


class TopK(NamedTuple):
    """The row indices that `topk_rewards` returns.

    Attributes:
        chosen: The rows to train on: in the order in which their groups became full, highest reward first.
        pending: The rows of incomplete groups, in order.
    """

    chosen: Tensor
    pending: Tensor


def topk_rewards(prompts: Sequence[str], rewards: Tensor, *, group_size: int, k: int) -> TopK:
    """Choose the rows with the `k` highest rewards above the median in each group of rows with the same prompt.

    Each `group_size` consecutive rows of a prompt are a group. The median of an even number of rewards is the lower of
    the two in the middle. If all rewards of a group are equal, none is above the median, and no row is chosen. To
    continue with later rows, append them to the pending rows.

    Args:
        prompts: The prompt of each row.
        rewards: The reward of each row. Several rewards of one row are averaged.
        group_size: The number of rows in a group.
        k: The maximum number of rows to choose from a group.

    Shapes:
        Rewards are (N, ...) for N prompts.

    Raises:
        ValueError: The number of rewards differs from the number of prompts, `k` is not in 1 to `group_size`, or a
            reward is NaN.

    Source:
        `torchrl.data.llm.TopKRewardSelector`.

    Examples:
        >>> rewards = torch.tensor([1.0, 5.0, 2.0, 3.0, 9.0])
        >>> topk_rewards(["a", "a", "a", "a", "b"], rewards, group_size=4, k=1)
        TopK(chosen=tensor([1]), pending=tensor([4]))
    """
    refuse_text("topk_rewards: prompts", prompts)
    group_size = as_count("topk_rewards: group_size", group_size)
    k = as_count("topk_rewards: k", k)
    if len(prompts) != rewards.shape[0]:
        raise error(
            ValueError,
            "topk_rewards: there is not one reward for each prompt.",
            expected=f"{len(prompts)} rewards",
            got=f"shape {list(rewards.shape)}",
        )
    if k > group_size:
        raise error(ValueError, "topk_rewards: k must be in 1 to group_size.", got=f"k={k}, group_size={group_size}")
    per_row = rewards
    if rewards.ndim != 1:
        per_row = rewards.flatten(1).double().mean(1)
    is_nan = per_row.isnan()
    if bool(is_nan.any()):
        row = int(is_nan.nonzero()[0, 0])
        raise error(ValueError, "topk_rewards: a reward is NaN.", got=f"row {row}")
    chosen: list[int] = []
    open_groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        group = open_groups.setdefault(prompt, [])
        group.append(row)
        if len(group) == group_size:
            del open_groups[prompt]
            chosen += _choose(group, per_row[group], k)
    pending = sorted(row for group in open_groups.values() for row in group)
    return TopK(
        torch.tensor(chosen, dtype=torch.int64, device=rewards.device),
        torch.tensor(pending, dtype=torch.int64, device=rewards.device),
    )


def _choose(group: list[int], rewards: Tensor, k: int) -> list[int]:
    """Return the rows of a complete group with the `k` highest rewards above its median."""
    above_median = int((rewards > rewards.median()).sum())
    best = rewards.argsort(descending=True, stable=True)[: min(k, above_median)]
    return [group[i] for i in best.tolist()]


@dataclass(frozen=True, eq=False)
class ConstantKLController:
    """A constant coefficient of a KL penalty.

    Args:
        kl_coef: The coefficient, or one per member (E,).

    Examples:
        >>> controller = ConstantKLController(0.1)
        >>> state = controller.init()
        >>> controller.update(state, torch.tensor(3.0), n_steps=4)["kl_coef"]
        tensor(0.1000)
    """

    kl_coef: float | Tensor

    def init(self) -> TensorDict:
        """Return the state: a tree with `kl_coef`."""
        return _kl_state(self.kl_coef)

    def update(self, state: TensorDict, kl: Tensor, *, n_steps: int | Tensor) -> TensorDict:
        """Return the state unchanged."""
        return state


@dataclass(frozen=True, eq=False)
class AdaptiveKLController:
    """A coefficient of a KL penalty that rises if the divergence is above a target, and falls if it is below.

    An update multiplies it by 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon.

    Args:
        init_kl_coef: The first coefficient, or one per member (E,).
        target: The target divergence, in nats.
        horizon: The number of steps in which the coefficient changes by at most a fifth.

    Source:
        Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, section 2.2.

    Examples:
        >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100)
        >>> controller.update(controller.init(), torch.tensor(60.0), n_steps=50)["kl_coef"]
        tensor(0.1100)
    """

    init_kl_coef: float | Tensor
    target: float | Tensor
    horizon: int

    def __post_init__(self) -> None:
        # With a negative one, the coefficient would fall where it has to rise.
        _check_positive("AdaptiveKLController: target", self.target)
        _check_positive("AdaptiveKLController: horizon", self.horizon)

    def init(self) -> TensorDict:
        """Return the state: a tree with `kl_coef`."""
        return _kl_state(self.init_kl_coef)

    def update(self, state: TensorDict, kl: Tensor, *, n_steps: int | Tensor) -> TensorDict:
        """Return the state with the new coefficient.

        Args:
            state: The state from `init` or the last update.
            kl: The divergence of the policy from its reference, in nats.
            n_steps: The number of steps, or samples, over which `kl` is averaged; less than five horizons.

        Raises:
            ValueError: After `n_steps` steps the coefficient could be 0 or negative.
        """
        if not isinstance(n_steps, Tensor) and not isinstance(self.horizon, Tensor) and n_steps >= 5 * self.horizon:
            what = "AdaptiveKLController: an update changes the coefficient by a fifth for each horizon of steps."
            raise error(
                ValueError, what, expected=f"n_steps < {5 * self.horizon}", got=n_steps, hint="a longer horizon."
            )
        # In 16 bits a factor near 1 would not change the coefficient.
        deviation = (widen(kl.detach()) / self.target - 1).clamp(-0.2, 0.2)
        coef = state["kl_coef"]
        return state.set("kl_coef", (coef * (1 + deviation * n_steps / self.horizon)).to(coef.dtype))


def _check_positive(what: str, number: float | Tensor) -> None:
    """Raise unless a number, or each of a tensor, is above 0 and finite."""
    if isinstance(number, Tensor):
        fits = (number > 0) & number.isfinite()
        require_values(fits, lambda: error(ValueError, f"{what} must be above 0 and finite.", got=brief(number)))
    elif not as_number(what, number) > 0:
        raise error(ValueError, f"{what} must be above 0 and finite.", got=number)


def _kl_state(coef: float | Tensor) -> TensorDict:
    # In 16 bits a factor near 1 would not change it.
    if isinstance(coef, Tensor):
        value = widen(coef.detach())
    else:
        value = torch.tensor(coef, dtype=wide_default_dtype())
    return TensorDict({"kl_coef": value})
