"""Trace once, replay: `jit`, and what optimizers need to take part in a trace."""

from tdfunc._jit.call import CacheInfo as CacheInfo
from tdfunc._jit.call import Jitted as Jitted
from tdfunc._jit.call import jit as jit
