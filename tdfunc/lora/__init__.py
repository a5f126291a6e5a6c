"""Adapters of low rank as pure functions of trees: LoRA, DoRA, PiSSA, OLoRA, and the files of other libraries."""

from tdfunc.lora._attach import LoraApply
from tdfunc.lora.files.api import load, load_base, save
from tdfunc.lora.lora import Lora, attach, extract, init, merge, unmerge
from tdfunc.lora.weighted import add_weighted

__all__ = [
    "Lora",
    "LoraApply",
    "add_weighted",
    "attach",
    "extract",
    "init",
    "load",
    "load_base",
    "merge",
    "save",
    "unmerge",
]


def __dir__() -> list[str]:
    return list(__all__)
