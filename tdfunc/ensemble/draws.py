"""torch's default generators around one member's forward: watched for draws that no seed serves, or seeded.

nn.RReLU, for example, draws from the default generator inside torch, where no generator can be given to it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Generator

from tdfunc.core.context import make_lock
from tdfunc.core.generators import Witness

T = TypeVar("T")
# Reentrant: an ensemble may run inside a member of another.
_SEEDING = make_lock()


def run_seeded(generators: Sequence[Generator], seed: int, run: Callable[[], T]) -> T:
    """Return what `run` returns under a seed, alone among threads that do the same; the states are put back."""
    with _SEEDING:
        # One call of C code puts them back: Ctrl-C, which comes between calls, cannot cut it short.
        put_back = partial(list, map(Generator.set_state, generators, [g.get_state() for g in generators]))
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return run()
        finally:
            put_back()


def watch(generators: Sequence[Generator], run: Callable[[], T]) -> tuple[T, bool]:
    """Return what `run` returns and whether it drew from a default generator."""
    before = [generator.get_state() for generator in generators]
    result = run()
    if all([torch.equal(a, g.get_state()) for a, g in zip(before, generators, strict=True)]):
        return result, False
    # They moved, but another thread may have done it: look at the operations of a second run.
    witness = Witness()
    with witness:
        run()
    return result, bool(witness.drew)
