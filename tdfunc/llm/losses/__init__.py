"""Losses of language models: pure functions of tokens' log-probs, masks and weights for each token."""

from tdfunc.llm.losses import advantages as advantages
from tdfunc.llm.losses import corrections as corrections
from tdfunc.llm.losses import divergences as divergences
from tdfunc.llm.losses.distillation import distill as distill
from tdfunc.llm.losses.distillation import distill_on_policy as distill_on_policy
from tdfunc.llm.losses.output import Loss as Loss
from tdfunc.llm.losses.policy import PolicyOptions as PolicyOptions
from tdfunc.llm.losses.policy import cispo as cispo
from tdfunc.llm.losses.policy import dapo as dapo
from tdfunc.llm.losses.policy import dr_grpo as dr_grpo
from tdfunc.llm.losses.policy import grpo as grpo
from tdfunc.llm.losses.policy import gspo as gspo
from tdfunc.llm.losses.policy import policy_gradient as policy_gradient
from tdfunc.llm.losses.policy import reinforce_pp as reinforce_pp
from tdfunc.llm.losses.policy import rloo as rloo
from tdfunc.llm.losses.preference import dpo as dpo
from tdfunc.llm.losses.preference import ipo as ipo
from tdfunc.llm.losses.preference import kto as kto
from tdfunc.llm.losses.preference import kto_baseline as kto_baseline
from tdfunc.llm.losses.preference import orpo as orpo
from tdfunc.llm.losses.preference import simpo as simpo
from tdfunc.llm.losses.sft import minor_sft as minor_sft
from tdfunc.llm.losses.sft import sft as sft
