"""`TEMPLATES`: the templates that need no tokenizer, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tdfunc.llm.templates.base import AbstractTemplate
from tdfunc.llm.templates.chatml import chatml, qwen
from tdfunc.llm.templates.deepseek import deepseek
from tdfunc.llm.templates.gemma import gemma
from tdfunc.llm.templates.llama import llama
from tdfunc.llm.templates.mistral import mistral

TEMPLATES: Mapping[str, AbstractTemplate] = MappingProxyType(
    {
        "chatml": chatml,
        "chatml_format": chatml,
        "qwen": qwen,
        "llama": llama,
        "deepseek": deepseek,
        "mistral": mistral,
        "gemma": gemma,
    }
)
"""The templates that need no tokenizer, by name; `chatml_format` is torchrl's name of `chatml`."""
