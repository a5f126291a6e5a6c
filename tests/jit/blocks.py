"""Blocks of every size from the pool of a jitted function, so that small tensors test what large ones do."""

from contextlib import contextmanager

from tdfunc._jit import pool


@contextmanager
def pool_all_sizes():
    """Pool the results of records made inside, whatever their sizes are."""
    before = pool.MIN_BYTES
    pool.MIN_BYTES = 1
    try:
        yield
    finally:
        pool.MIN_BYTES = before
