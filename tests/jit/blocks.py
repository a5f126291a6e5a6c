"""Blocks of every size from the pool of a jitted function, so that small tensors test what large ones do; its calls."""

from contextlib import contextmanager

import torch

from tdfunc._jit.replay import pool


@contextmanager
def pool_all_sizes():
    """Pool the results of records made inside, of any sizes; yield the list of the sizes that were taken."""
    before = pool.MIN_BYTES
    take = pool.Pool.take
    taken = []

    def noted(self, shape, stride, dtype, size_bytes):
        taken.append(size_bytes)
        return take(self, shape, stride, dtype, size_bytes)

    pool.MIN_BYTES = 1
    pool.Pool.take = noted
    try:
        yield taken
    finally:
        pool.MIN_BYTES = before
        pool.Pool.take = take


@contextmanager
def threads(count):
    """Compute in some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calls_of(step, name, *args):
    """Return how often a replay calls an operation of torch."""
    with torch.profiler.profile() as profile:
        step(*args)
    return sum([event.name == name for event in profile.events()])
