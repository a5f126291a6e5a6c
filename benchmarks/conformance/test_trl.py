"""Losses against TRL's own code, with gradients: its trainers' methods run on log-probs that are given, without models.

`make test-trl` installs TRL into a folder of its own and runs this file.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tdfunc.llm import losses
from tdfunc.llm.losses.corrections import truncated_is

pytest.importorskip("trl", reason="`make test-trl` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Accelerator:
    """An accelerator of one process."""

    num_processes, device = 1, torch.device("cpu")

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction="sum"):
        return x


def trainer(**attributes):
    """The attributes that TRL's losses read of their trainer."""
    defaults = {
        "accelerator": Accelerator(),
        "aux_loss_enabled": False,
        "model": SimpleNamespace(training=False),
        "_metrics": {"eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_entropy_bonus_enabled": False,
    }
    return SimpleNamespace(**{**defaults, **attributes})


def streams(seed, *rows):
    """Streams (*rows, 6) without empty rows, and with 0 where the mask is False, as TRL wants them."""
    torch.manual_seed(seed)
    mask = torch.rand(*rows, 6) < 0.7
    mask[..., :2] = torch.tensor([False, True])
    log_probs, old, ref, entropy = (torch.randn(4, *rows, 6, dtype=torch.float64).abs() * mask).unbind(0)
    return SimpleNamespace(
        mask=mask,
        log_probs=-log_probs,
        old=-log_probs - 0.3 * old * torch.randn(6),
        ref=-log_probs - 0.5 * ref * torch.randn(6),
        entropy=entropy,
        advantages=torch.randn(*rows, dtype=torch.float64),
        desirable=torch.rand(*rows) < 0.5,
    )


def same(ours, theirs, log_probs):
    """Assert that two losses and their gradients are equal."""
    grads = [torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (ours.loss, theirs)]
    torch.testing.assert_close(ours.loss, theirs)
    torch.testing.assert_close(*grads)
    assert (grads[0] != 0).any()


def trl_policy(s, log_probs, *, loss_type="grpo", level="token", clip=(0.2, 0.2), **options):
    """GRPOTrainer's loss, and the metrics that it logs."""
    from trl import GRPOTrainer

    args = {"delta": options.get("delta"), "use_bias_correction_kl": options.get("unbiased", False)}
    own = trainer(
        args=SimpleNamespace(**args, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=options.get("beta", 0.0),
        loss_type=loss_type,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        use_vllm="ratios" in options,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=17,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, s.entropy, None),
    )
    ids, mask = torch.zeros(s.mask.shape, dtype=torch.int64), s.mask.long()
    inputs = {"prompt_ids": ids[:, :0], "prompt_mask": mask[:, :0], "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": s.advantages, "old_per_token_logps": s.old, "ref_per_token_logps": s.ref}
    inputs |= {"num_items_in_batch": mask.sum(), "importance_sampling_ratio": options.get("ratios")}
    return GRPOTrainer._compute_loss(own, None, inputs), own._metrics["eval"]


POLICIES = {
    "grpo": (losses.grpo, {}, {}),
    "grpo, wide": (losses.grpo, {"clip": (0.05, 0.3)}, {"clip": (0.05, 0.3)}),
    "grpo, delta": (losses.grpo, {"dual_clip": 1.25}, {"delta": 1.25}),
    "grpo, reference": (losses.grpo, {"kl_coef": 0.3}, {"beta": 0.3}),
    "grpo, unbiased": (losses.grpo, {"kl_coef": 0.3, "kl_weighted": True}, {"beta": 0.3, "unbiased": True}),
    "dr_grpo": (losses.dr_grpo, {"max_length": 17}, {"loss_type": "dr_grpo"}),
    "bnpo": (losses.dapo, {}, {"loss_type": "bnpo", "clip": (0.2, 0.28)}),
    "dapo": (losses.dapo, {}, {"loss_type": "dapo", "clip": (0.2, 0.28)}),
    "gspo": (losses.gspo, {"clip": (0.1, 0.2)}, {"level": "sequence", "clip": (0.1, 0.2)}),
    "gspo, reference": (losses.gspo, {"kl_coef": 0.3}, {"level": "sequence", "clip": (3e-4, 4e-4), "beta": 0.3}),
    "cispo": (losses.cispo, {"max_ratio": 1.1}, {"loss_type": "cispo", "clip": (0.2, 1.1)}),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("corrected", [False, True])
def test_policies(name, corrected):
    """GRPOTrainer's losses, with and without its weights for a mismatch with vLLM."""
    ours, options, theirs = POLICIES[name]
    for seed in range(5):
        s = streams(seed, 4)
        log_probs = s.log_probs.requires_grad_()
        weights = truncated_is(s.old, s.ref, s.mask, high=1.5) if corrected else None
        given = {**options, "ref_log_probs": s.ref, "entropy": s.entropy, "weights": weights}
        found = ours(log_probs, s.advantages, s.mask, s.old, **given)
        expected, logged = trl_policy(s, log_probs, **theirs, **({"ratios": weights} if corrected else {}))

        same(found, expected, log_probs)
        assert float(found.metrics["entropy"]) == pytest.approx(logged["entropy"][0])
        if "beta" in theirs and "unbiased" not in theirs:
            assert float(found.metrics["kl"]) == pytest.approx(logged["kl"][0])
        if "level" not in theirs and name != "cispo":
            for metric in ("low_mean", "high_mean", "region_mean"):
                shares = found.metrics["clip_ratio", metric], logged[f"clip_ratio/{metric}"][0]
                assert float(shares[0]) == pytest.approx(shares[1])


def test_rloo():
    """RLOOTrainer's loss."""
    from trl import RLOOTrainer

    for seed in range(5):
        s = streams(seed, 4)
        log_probs = s.log_probs.requires_grad_()
        own = trainer(
            epsilon_low=0.2,
            epsilon_high=0.2,
            _get_per_token_logps_and_entropies=lambda *_, x=log_probs, s=s, **__: (x, s.entropy, None),
        )
        ids, mask = torch.zeros(s.mask.shape, dtype=torch.int64), s.mask.long()
        inputs = {"prompt_ids": ids[:, :0], "prompt_mask": mask[:, :0], "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": s.advantages, "old_logps": s.old.sum(-1)}

        same(
            losses.rloo(log_probs, s.advantages, s.mask, s.old), RLOOTrainer._compute_loss(own, None, inputs), log_probs
        )


def outputs(log_probs):
    """The outputs of a model whose log-probs are given."""
    zeros = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


DPO = {
    "sigmoid": lambda x, s: losses.dpo(x, s.ref, s.mask, beta=0.3),
    "sigmoid_norm": lambda x, s: losses.dpo(x, s.ref, s.mask, beta=0.3, average=True),
    "ipo": lambda x, s: losses.ipo(x, s.ref, s.mask, beta=0.3),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo_and_ipo(name):
    """DPOTrainer's losses and the rewards that it logs; its batch is all chosen rows, then all rejected ones."""
    from trl import DPOTrainer

    for seed in range(5):
        s = streams(seed, 3, 2)
        log_probs = s.log_probs.requires_grad_()
        flat, ref, mask = (x.transpose(0, 1).flatten(0, 1) for x in (log_probs * s.mask, s.ref, s.mask))
        mask = torch.cat([torch.zeros(6, 1), mask], -1).long()
        own = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[name],
            loss_weights=[1.0],
            beta=0.3,
            use_weighting=False,
        )
        chosen, rejected = ref.sum(-1).chunk(2)
        inputs = {"completion_mask": mask, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        inputs |= {"input_ids": torch.zeros_like(mask), "attention_mask": mask}
        expected = DPOTrainer._compute_loss(own, lambda x=flat, **_: outputs(x), inputs, return_outputs=False)
        found = DPO[name](log_probs, s)

        same(found, expected, log_probs)
        if name == "sigmoid":
            for metric in ("chosen", "rejected", "margins", "accuracies"):
                logged = own._metrics["eval"][f"rewards/{metric}"][0]
                assert float(found.metrics["rewards", metric]) == pytest.approx(logged)


def test_kto():
    """KTOTrainer's loss with its baseline from other rows."""
    from trl import KTOTrainer

    for seed in range(5):
        s, others = streams(seed, 4), streams(seed + 100, 4)
        log_probs, mask = s.log_probs.requires_grad_(), torch.cat([torch.zeros(4, 1), s.mask], -1).long()
        own = trainer(
            calculate_KL=True,
            precompute_ref_logps=True,
            loss_type="kto",
            beta=0.3,
            desirable_weight=2.0,
            undesirable_weight=0.5,
            _compute_kl_logps=lambda *_, s=others: s.log_probs.sum(-1),
        )
        batch = {"label": s.desirable, "completion_mask": mask, "input_ids": torch.zeros_like(mask)}
        batch |= {"attention_mask": mask, "ref_logps": s.ref.sum(-1), "ref_KL_logps": others.ref.sum(-1)}
        expected = KTOTrainer._compute_loss(
            own, lambda x=log_probs * s.mask, **_: outputs(x), batch, return_outputs=False
        )
        z = losses.kto_baseline(others.log_probs, others.ref, others.mask)
        weights = {"desirable_weight": 2.0, "undesirable_weight": 0.5}

        same(losses.kto(log_probs, s.ref, s.mask, s.desirable, baseline=z, beta=0.3, **weights), expected, log_probs)


def test_simpo_and_orpo():
    """CPOTrainer's loss of SimPO and ORPOTrainer's odds, which are computed in float32."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    for seed in range(5):
        s = streams(seed, 3, 2)
        log_probs = s.log_probs.requires_grad_()
        means = (log_probs * s.mask).sum(-1) / s.mask.sum(-1)
        cpo = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=1.5, label_smoothing=0.0)
        expected = CPOTrainer.cpo_loss(cpo, means[:, 0], means[:, 1])[0].mean()
        same(losses.simpo(log_probs, s.mask, beta=1.5, gamma=0.5), expected, log_probs)
        odds = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), means[:, 0], means[:, 1])[0].mean()
        likelihood = losses.sft(log_probs[:, 0], s.mask[:, 0]).loss
        found = losses.orpo(log_probs, s.mask, beta=0.3)

        torch.testing.assert_close(found.loss, likelihood - odds.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta):
    """GKDTrainer's divergence of all tokens, and SDPO's of the student's likeliest ones."""
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    student, teacher = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    student.requires_grad_()
    mask = torch.rand(3, 5) < 0.7
    labels = torch.where(mask, 0, -100)
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    same(
        losses.distill(p, q, mask, beta=beta), GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta), student
    )
    ids = student.topk(4).indices
    for tail in ("bucket", "renormalize"):
        options = {"distillation_topk": 4, "distillation_alpha": beta, "distillation_add_tail": tail == "bucket"}
        values = compute_topk_self_distillation_loss(student, teacher, **options)
        found = losses.distill(p.gather(-1, ids), q.gather(-1, ids), mask, beta=beta, tail=tail)
        same(found, values[mask].mean(), student)


def test_the_comparison_can_fail():
    """A formula that is off by a sign of its penalty is found."""
    s = streams(0, 4)
    log_probs = s.log_probs.requires_grad_()
    wrong = losses.grpo(log_probs, s.advantages, s.mask, s.old, ref_log_probs=s.ref, kl_coef=-0.3)

    with pytest.raises(AssertionError):
        same(wrong, trl_policy(s, log_probs, beta=0.3)[0], log_probs)
