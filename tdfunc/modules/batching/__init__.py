"""Rules of our own for functions that torch's vmap cannot batch: a table, and the mode under which forwards meet it."""

from tdfunc.modules.batching.mode import Batching as Batching
