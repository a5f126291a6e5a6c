"""Adapters of low rank as pure functions of trees: LoRA, DoRA, PiSSA, OLoRA, and the files of other libraries."""

from tdfunc.core.surface import surface as _surface
from tdfunc.lora._attach import LoraApply as LoraApply
from tdfunc.lora._files.api import load as load
from tdfunc.lora._files.api import save as save
from tdfunc.lora._lora import Lora as Lora
from tdfunc.lora._lora import attach as attach
from tdfunc.lora._lora import extract as extract
from tdfunc.lora._lora import init as init
from tdfunc.lora._lora import merge as merge
from tdfunc.lora._lora import unmerge as unmerge

_surface(globals())
