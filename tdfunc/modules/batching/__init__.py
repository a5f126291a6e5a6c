"""Rules of our own for functions that torch's vmap cannot batch: a table, and the mode under which forwards meet it."""

from tdfunc.modules.batching.mode import Batching as Batching
from tdfunc.modules.batching.packing import reads_packed as reads_packed
from tdfunc.modules.batching.table import PACKED as PACKED
