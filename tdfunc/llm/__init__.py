"""Conversations and language models: histories, chat templates, and token-exact conversations."""

from tdfunc.llm.content import ContentBase as ContentBase
from tdfunc.llm.history import History as History
from tdfunc.llm.jsonl import load_jsonl as load_jsonl
from tdfunc.llm.jsonl import save_jsonl as save_jsonl
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
