"""The messages of mistakes with losses. Each row is a call, its error and its message."""

import pytest
import torch

from tdfunc import LeafMismatchError
from tdfunc.llm import LogProbs, topk_rewards
from tdfunc.llm.losses import (
    cispo,
    corrections,
    distill,
    distill_on_policy,
    dpo,
    grpo,
    kto,
    kto_baseline,
    minor_sft,
    orpo,
    policy_gradient,
    sft,
)
from tdfunc.llm.losses.advantages import (
    batch_normalized,
    group_normalized,
    leave_one_out,
    mc_returns,
    penalized_rewards,
)
from tdfunc.llm.losses.corrections import masked_is, reject, truncated_is
from tdfunc.llm.scoring.ids import Scores

X, ROWS, PAIRS = torch.zeros(2, 3), torch.zeros(2), torch.zeros(4, 2, 3)
WIDE = torch.zeros(2, 3, 5)
MISTAKES = [
    (lambda: grpo(X[:, :2], ROWS, X), LeafMismatchError,
     r"log_probs and the mask differ in shape.*\[2, 3\].*\[2, 2\]"),
    (lambda: grpo(Scores(X, X), ROWS, X), LeafMismatchError,
     "log_probs must be a tensor.*got: +Scores.*scores.log_probs"),
    (lambda: sft(LogProbs(full=X, batch_size=[2]), X), LeafMismatchError,
     r"must be a tensor.*got: +LogProbs.*log_probs\.full"),
    (lambda: grpo(X, ROWS, X, X[:1]), LeafMismatchError, r"old_log_probs and the mask differ in shape"),
    (lambda: grpo(X, ROWS[:1], X), LeafMismatchError, r"advantages must have a value for each row.*\[2\] or \[2, 3\]"),
    (lambda: grpo(X, X.sum(0), X), LeafMismatchError, r"advantages must .*got: +\[3\]"),
    (lambda: grpo(X, ROWS.unsqueeze(1), X), LeafMismatchError, r"advantages must .*got: +\[2, 1\]"),
    (lambda: grpo(X, ROWS, X, weights=ROWS[:1]), LeafMismatchError, "weights must have a value for each row"),
    (lambda: grpo(X, ROWS, X, ref_log_probs=X[:1]), LeafMismatchError, "ref_log_probs and the mask differ in shape"),
    (lambda: grpo(X, ROWS, X, entropy=X[:1]), LeafMismatchError, "entropy and the mask differ in shape"),
    (lambda: grpo(X, ROWS, X, kl_coef=0.1), ValueError, "kl_coef has no effect without ref_log_probs"),
    (lambda: grpo(X, ROWS, X, kl_coef=torch.tensor(0.0)), ValueError, "kl_coef has no effect without ref_log_probs"),
    (lambda: grpo(X, ROWS, X, entropy_coef=0.1), ValueError, "entropy_coef has no effect without entropy"),
    (lambda: grpo(X, ROWS, X, kl="k4"), ValueError, "kl must be one of 'k1', 'k2', 'k3'.*'k4'"),
    (lambda: grpo(X, ROWS, X, dual_clip=1.0), ValueError, "dual_clip must be a ratio above 1.*=1.0"),
    (lambda: cispo(X, ROWS, X, dual_clip=3.0), ValueError, "dual_clip must be .* the clipped surrogate.*'weighted'"),
    (lambda: policy_gradient(X, ROWS, X, surrogate="ppo"), ValueError, "surrogate must be one of .*'ppo'"),
    (lambda: policy_gradient(X, ROWS, X, ratio="row"), ValueError, "level of a ratio must be one of .*'row'"),
    (lambda: policy_gradient(X, ROWS, X, normalize="mean"), ValueError, "normalize must be 'token', .*'mean'"),
    (lambda: policy_gradient(X, ROWS, X, normalize=True), ValueError, "normalize must be 'token', .*True"),
    (lambda: sft(X, X[:1]), LeafMismatchError, "sft: log_probs and the mask differ in shape"),
    (lambda: minor_sft(X, X[:1], X), LeafMismatchError, "minor_sft: ref_log_probs and the mask differ in shape"),
    (lambda: dpo(X, X, X.expand(3, 2, 3)), LeafMismatchError, "dpo: log_probs and the mask differ in shape"),
    (lambda: dpo(WIDE, WIDE, WIDE), LeafMismatchError, r"dpo: the mask does not hold pairs.*\[2, 3, 5\].*torch.stack"),
    (lambda: orpo(ROWS, ROWS), LeafMismatchError, "orpo: the mask does not hold pairs"),
    (lambda: dpo(PAIRS, PAIRS[:1], PAIRS), LeafMismatchError, "dpo: ref_log_probs and the mask differ in shape"),
    (lambda: kto(X, X, X, ROWS[:1]), LeafMismatchError, "kto: desirable does not have a value for each row"),
    (lambda: kto_baseline(X, X[:1], X), LeafMismatchError, "kto_baseline: ref_log_probs and the mask differ in shape"),
    (lambda: distill(WIDE, WIDE[..., :4], X), LeafMismatchError, r"teacher does not have the candidates.*\[2, 3, 5\]"),
    (lambda: distill(X, X, X), LeafMismatchError, "distill: student does not have the candidates at each position"),
    (lambda: distill(WIDE, WIDE, X, beta=1.5), ValueError, r"distill: beta must be in \[0, 1\].*1.5"),
    (lambda: distill(WIDE, WIDE, X, tail="rest"), ValueError, "distill: tail must be one of .*'rest'"),
    (lambda: distill_on_policy(X, X[:1], X), LeafMismatchError, "teacher_log_probs and the mask differ in shape"),
    (lambda: truncated_is(X, X[:1], X), LeafMismatchError, "truncated_is: behaviour and the mask differ in shape"),
    (lambda: masked_is(X[:1], X, X), LeafMismatchError, "masked_is: log_probs and the mask differ in shape"),
    (lambda: reject(X, X, X, low=0, high=1, level="row"), ValueError, "level of a ratio must be .*'row'"),
    (lambda: group_normalized(X, scale="std"), ValueError, "scale must be one of .*'std'"),
    (lambda: group_normalized(X, X[:1]), LeafMismatchError, "group_normalized: the values and the mask differ"),
    (lambda: leave_one_out(X, X[:1]), LeafMismatchError, "leave_one_out: the values and the mask differ in shape"),
    (lambda: batch_normalized(X, X[:1]), LeafMismatchError, "batch_normalized: the values and the mask differ"),
    (lambda: penalized_rewards(X, X, X), LeafMismatchError, r"not one reward for each row.*\[2\].*\[2, 3\]"),
    (lambda: penalized_rewards(X[:, 0], X[:1], X), LeafMismatchError, "penalty and the mask differ in shape"),
    (lambda: mc_returns(X[:1], X), LeafMismatchError, "mc_returns: rewards and the mask differ in shape"),
    (lambda: topk_rewards(["a"], ROWS, group_size=2, k=1), ValueError, "one reward for each prompt.*1 rewards"),
    (lambda: topk_rewards(["a"], ROWS[:1], group_size=2, k=0), ValueError, "k must be at least 1"),
    (lambda: topk_rewards(["a"], ROWS[:1], group_size=2, k=3), ValueError, "k must be in 1 to group_size.*k=3"),
    (lambda: topk_rewards(["a", "a"], torch.tensor([0, torch.nan]), group_size=2, k=1), ValueError, "NaN.*row 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES)
def test_mistakes_name_what_must_hold(call, kind, message):
    """A wrong shape or option raises before any work."""
    with pytest.raises(kind, match="(?s)" + message):
        call()


LIMITS = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("limits", [(2.0, 0.5), (float("nan"), 1.0)], ids=repr)
@pytest.mark.parametrize("correct", [corrections.truncated_is, corrections.masked_is, corrections.reject])
def test_limits_are_in_their_order(correct, limits):
    """Between others there is no ratio: no token would be trained."""
    with pytest.raises(ValueError, match=f"{correct.__name__}: low is above high"):
        correct(*LIMITS, low=limits[0], high=limits[1])


@pytest.mark.parametrize("number", [0, -64, -1.0, float("nan")])
def test_a_divisor_of_a_loss_is_above_zero(number):
    """A negative one would train the opposite."""
    with pytest.raises(ValueError, match="normalize must be above 0"):
        policy_gradient(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), normalize=number)


@pytest.mark.parametrize("share", [10, -0.1, float("nan")])
def test_a_label_smoothing_is_a_probability(share):
    """Of 10 (a percentage) the loss would prefer the rejected responses."""
    with pytest.raises(ValueError, match="label_smoothing must be a probability"):
        dpo(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 2, 3), label_smoothing=share)
