"""`jit`: a function is traced once and replayed from then on."""

from tdfunc._jit.call import CacheInfo as CacheInfo
from tdfunc._jit.call import Jitted as Jitted
from tdfunc._jit.decorator import jit as jit
