"""Adapters of low rank as pure functions of trees: LoRA, DoRA, PiSSA, OLoRA, and the files of other libraries."""

from tdfunc.core.surface import surface as _surface
from tdfunc.lora._attach import LoraApply as LoraApply
from tdfunc.lora._files import load as load
from tdfunc.lora._files import save as save
from tdfunc.lora._lora import Lora as Lora

_surface(globals())
