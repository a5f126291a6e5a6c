"""Conversations and language models: histories, chat templates, and token-exact conversations."""

from tdfunc.llm import losses as losses
from tdfunc.llm.conversations.exact import (
    TokenMismatch,
    TokenRow,
    TokenTemplate,
    append_messages,
    chat_ids,
    find_mismatch,
    is_append_only,
    to_training_rows,
)
from tdfunc.llm.conversations.history import ChatHistory, History
from tdfunc.llm.conversations.jsonl import load_jsonl, save_jsonl
from tdfunc.llm.conversations.report import TemplateCheck, TemplateReport, template_report
from tdfunc.llm.datasets.pairwise import PairwiseDataset, RewardData
from tdfunc.llm.datasets.prompts import PromptData, tokenize_prompts
from tdfunc.llm.datasets.sources import read_records
from tdfunc.llm.datasets.tokens import TokenDataset, load_tokens
from tdfunc.llm.encoding.text import detokenize, tokenize_text, tokenizer_digest
from tdfunc.llm.folders.pretrained import load_pretrained, save_pretrained
from tdfunc.llm.generation.functions import generate
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.generation.rows import generate_tokens
from tdfunc.llm.losses.selection import AdaptiveKLController, ConstantKLController, TopK, topk_rewards
from tdfunc.llm.messages.content import ContentBase
from tdfunc.llm.rows.records import LogProbs, Masks, Text, Tokens
from tdfunc.llm.scoring.attention import attention_inputs
from tdfunc.llm.scoring.compare import compare
from tdfunc.llm.scoring.head import Head
from tdfunc.llm.scoring.ids import explain_scoring, score_ids
from tdfunc.llm.scoring.model import CausalLM, causal_lm
from tdfunc.llm.scoring.trees import MaskedCategorical, distribution, logits, score
from tdfunc.llm.templates.base import AbstractTemplate
from tdfunc.llm.templates.chatml import ChatML, chatml, qwen
from tdfunc.llm.templates.deepseek import DeepSeek, deepseek
from tdfunc.llm.templates.gemma import Gemma, gemma
from tdfunc.llm.templates.jinja import JinjaTemplate
from tdfunc.llm.templates.llama import Llama, llama
from tdfunc.llm.templates.mistral import Mistral, mistral
from tdfunc.llm.templates.named import TEMPLATES
from tdfunc.llm.wrappers.backend import AbstractBackend
from tdfunc.llm.wrappers.base import LLMWrapperBase
from tdfunc.llm.wrappers.batching import Batcher
from tdfunc.llm.wrappers.engine import vLLMWrapper
from tdfunc.llm.wrappers.push import Push
from tdfunc.llm.wrappers.remote import RemoteWrapper
from tdfunc.llm.wrappers.transformers import TransformersWrapper

# Without `losses`: `from tdfunc.llm import *` gives no submodules.
__all__ = [
    "AbstractBackend",
    "AbstractTemplate",
    "AdaptiveKLController",
    "Batcher",
    "CausalLM",
    "ChatHistory",
    "ChatML",
    "ConstantKLController",
    "ContentBase",
    "DeepSeek",
    "Gemma",
    "GenerationOptions",
    "Head",
    "History",
    "JinjaTemplate",
    "LLMWrapperBase",
    "Llama",
    "LogProbs",
    "MaskedCategorical",
    "Masks",
    "Mistral",
    "PairwiseDataset",
    "PromptData",
    "Push",
    "RemoteWrapper",
    "Response",
    "RewardData",
    "TEMPLATES",
    "TemplateCheck",
    "TemplateReport",
    "Text",
    "TokenDataset",
    "TokenMismatch",
    "TokenRow",
    "TokenTemplate",
    "Tokens",
    "TopK",
    "TransformersWrapper",
    "append_messages",
    "attention_inputs",
    "causal_lm",
    "chat_ids",
    "chatml",
    "compare",
    "deepseek",
    "detokenize",
    "distribution",
    "explain_scoring",
    "find_mismatch",
    "gemma",
    "generate",
    "generate_tokens",
    "is_append_only",
    "llama",
    "load_jsonl",
    "load_pretrained",
    "load_tokens",
    "logits",
    "mistral",
    "qwen",
    "read_records",
    "save_jsonl",
    "save_pretrained",
    "score",
    "score_ids",
    "template_report",
    "to_training_rows",
    "tokenize_prompts",
    "tokenize_text",
    "tokenizer_digest",
    "topk_rewards",
    "vLLMWrapper",
]
