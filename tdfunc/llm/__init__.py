"""Conversations and language models: histories, chat templates, and token-exact conversations."""

from types import ModuleType as _ModuleType

from tdfunc.llm.compare import compare as compare
from tdfunc.llm.content import ContentBase as ContentBase
from tdfunc.llm.datasets import TokenDataset as TokenDataset
from tdfunc.llm.datasets import load_tokens as load_tokens
from tdfunc.llm.functions import MaskedCategorical as MaskedCategorical
from tdfunc.llm.functions import distribution as distribution
from tdfunc.llm.functions import logits as logits
from tdfunc.llm.functions import score as score
from tdfunc.llm.head import Head as Head
from tdfunc.llm.history import History as History
from tdfunc.llm.jsonl import load_jsonl as load_jsonl
from tdfunc.llm.jsonl import save_jsonl as save_jsonl
from tdfunc.llm.model import CausalLM as CausalLM
from tdfunc.llm.model import causal_lm as causal_lm
from tdfunc.llm.pairwise import PairwiseDataset as PairwiseDataset
from tdfunc.llm.prompts import PromptData as PromptData
from tdfunc.llm.records import LogProbs as LogProbs
from tdfunc.llm.records import Masks as Masks
from tdfunc.llm.records import Text as Text
from tdfunc.llm.records import Tokens as Tokens
from tdfunc.llm.report import Finding as Finding
from tdfunc.llm.report import TemplateReport as TemplateReport
from tdfunc.llm.report import template_report as template_report
from tdfunc.llm.rewards import RewardData as RewardData
from tdfunc.llm.scoring import plan as plan
from tdfunc.llm.scoring import score_ids as score_ids
from tdfunc.llm.selection import AdaptiveKLController as AdaptiveKLController
from tdfunc.llm.selection import ConstantKLController as ConstantKLController
from tdfunc.llm.selection import TopK as TopK
from tdfunc.llm.selection import topk_rewards as topk_rewards
from tdfunc.llm.sources import read_records as read_records
from tdfunc.llm.templates.base import AbstractTemplate as AbstractTemplate
from tdfunc.llm.templates.chatml import ChatML as ChatML
from tdfunc.llm.templates.chatml import chatml as chatml
from tdfunc.llm.templates.chatml import qwen as qwen
from tdfunc.llm.templates.deepseek import DeepSeek as DeepSeek
from tdfunc.llm.templates.deepseek import deepseek as deepseek
from tdfunc.llm.templates.find import TEMPLATES as TEMPLATES
from tdfunc.llm.templates.gemma import Gemma as Gemma
from tdfunc.llm.templates.gemma import gemma as gemma
from tdfunc.llm.templates.jinja import JinjaTemplate as JinjaTemplate
from tdfunc.llm.templates.llama import Llama as Llama
from tdfunc.llm.templates.llama import llama as llama
from tdfunc.llm.templates.mistral import Mistral as Mistral
from tdfunc.llm.templates.mistral import mistral as mistral
from tdfunc.llm.tokenize import detokenize as detokenize
from tdfunc.llm.tokenize import tokenize_prompts as tokenize_prompts
from tdfunc.llm.tokenize import tokenize_text as tokenize_text
from tdfunc.llm.tokenize import tokenizer_digest as tokenizer_digest
from tdfunc.llm.tokens import Drift as Drift
from tdfunc.llm.tokens import TokenRow as TokenRow
from tdfunc.llm.tokens import TokenTemplate as TokenTemplate
from tdfunc.llm.tokens import bridge as bridge
from tdfunc.llm.tokens import chat_ids as chat_ids
from tdfunc.llm.tokens import drift as drift
from tdfunc.llm.tokens import extends as extends
from tdfunc.llm.tokens import fork as fork

# `from tdfunc.llm import *` gives no submodules.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, value in globals().items() if not name.startswith("_") and not isinstance(value, _ModuleType)
]
