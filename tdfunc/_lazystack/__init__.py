"""Ragged data: trees of unequal shapes as one."""

from tdfunc._lazystack.stack import LazyStack as LazyStack
from tdfunc._lazystack.stack import lazy_stack as lazy_stack
from tdfunc._lazystack.stack import pad_sequence as pad_sequence
