"""The messages of mistakes with losses. Each row is a call, its error and its message."""

import pytest
import torch

from tdfunc import LeafMismatchError
from tdfunc.llm import LogProbs
from tdfunc.llm.losses import (
    cispo,
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
from tdfunc.llm.scoring.ids import Scores

X, ROWS, PAIRS = torch.zeros(2, 3), torch.zeros(2), torch.zeros(4, 2, 3)
WIDE = torch.zeros(2, 3, 5)
MISTAKES = [
    (lambda: grpo(X[:, :2], ROWS, X), LeafMismatchError,
     r"log_probs must have the shape of the mask.*\[2, 3\].*\[2, 2\]"),
    (lambda: grpo(Scores(X, X), ROWS, X), LeafMismatchError,
     "log_probs must be a tensor.*got: +Scores.*scores.log_probs"),
    (lambda: sft(LogProbs(full=X, batch_size=[2]), X), LeafMismatchError,
     r"must be a tensor.*got: +LogProbs.*log_probs\.full"),
    (lambda: grpo(X, ROWS, X, X[:1]), LeafMismatchError, r"old_log_probs must have the shape of the mask"),
    (lambda: grpo(X, ROWS[:1], X), LeafMismatchError, r"advantages must have a value for each row.*\[2\] or \[2, 3\]"),
    (lambda: grpo(X, X.sum(0), X), LeafMismatchError, r"advantages must .*got: +\[3\]"),
    (lambda: grpo(X, ROWS.unsqueeze(1), X), LeafMismatchError, r"advantages must .*got: +\[2, 1\]"),
    (lambda: grpo(X, ROWS, X, weights=ROWS[:1]), LeafMismatchError, "weights must have a value for each row"),
    (lambda: grpo(X, ROWS, X, ref_log_probs=X[:1]), LeafMismatchError, "ref_log_probs must have the shape"),
    (lambda: grpo(X, ROWS, X, entropy=X[:1]), LeafMismatchError, "entropy must have the shape"),
    (lambda: grpo(X, ROWS, X, kl_coef=0.1), ValueError, "kl_coef must come with ref_log_probs"),
    (lambda: grpo(X, ROWS, X, kl_coef=torch.tensor(0.0)), ValueError, "kl_coef must come with ref_log_probs"),
    (lambda: grpo(X, ROWS, X, entropy_coef=0.1), ValueError, "entropy_coef must come with entropy"),
    (lambda: grpo(X, ROWS, X, kl="k4"), ValueError, "kl must be one of 'k1', 'k2', 'k3'.*'k4'"),
    (lambda: grpo(X, ROWS, X, dual_clip=0.2), ValueError, "dual_clip must be a ratio above 1.*0.2"),
    (lambda: cispo(X, ROWS, X, dual_clip=3.0), ValueError, "dual_clip must be .* the clipped surrogate.*'weighted'"),
    (lambda: policy_gradient(X, ROWS, X, surrogate="ppo"), ValueError, "surrogate must be one of .*'ppo'"),
    (lambda: policy_gradient(X, ROWS, X, ratio="row"), ValueError, "level of a ratio must be one of .*'row'"),
    (lambda: policy_gradient(X, ROWS, X, normalize="mean"), ValueError, "normalize must be 'token', .*'mean'"),
    (lambda: sft(X, X[:1]), LeafMismatchError, "sft: log_probs must have the shape of the mask"),
    (lambda: minor_sft(X, X[:1], X), LeafMismatchError, "minor_sft: ref_log_probs must have the shape"),
    (lambda: dpo(X, X, X.expand(3, 2, 3)), LeafMismatchError, "dpo: log_probs must have the shape of the mask"),
    (lambda: dpo(WIDE, WIDE, WIDE), LeafMismatchError, r"dpo: the mask must hold pairs.*\[2, 3, 5\].*torch.stack"),
    (lambda: orpo(ROWS, ROWS), LeafMismatchError, "orpo: the mask must hold pairs"),
    (lambda: dpo(PAIRS, PAIRS[:1], PAIRS), LeafMismatchError, "dpo: ref_log_probs must have the shape"),
    (lambda: kto(X, X, X, ROWS[:1]), LeafMismatchError, "kto: desirable must have a value for each row"),
    (lambda: kto_baseline(X, X[:1], X), LeafMismatchError, "kto_baseline: ref_log_probs must have the shape"),
    (lambda: distill(WIDE, WIDE[..., :4], X), LeafMismatchError, r"distill: teacher must have candidates.*\[2, 3, 5\]"),
    (lambda: distill(X, X, X), LeafMismatchError, "distill: student must have candidates at each position"),
    (lambda: distill(WIDE, WIDE, X, beta=1.5), ValueError, r"distill: beta must be in \[0, 1\].*1.5"),
    (lambda: distill(WIDE, WIDE, X, tail="rest"), ValueError, "distill: tail must be one of .*'rest'"),
    (lambda: distill_on_policy(X, X[:1], X), LeafMismatchError, "teacher_log_probs must have the shape"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES)
def test_mistakes_name_what_must_hold(call, kind, message):
    """A wrong shape or option raises before any work."""
    with pytest.raises(kind, match="(?s)" + message):
        call()
