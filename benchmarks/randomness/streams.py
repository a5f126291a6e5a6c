"""Endless streams of random bytes, in arrays of one megabyte."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tdfunc import random

_CHUNK = 2**17


def one_key(seed: int) -> Iterator[np.ndarray]:
    """Yield the draws of one key, in their order."""
    state, gamma = random.key(seed)
    while True:
        yield random.bits(torch.stack([state, gamma]), _CHUNK).numpy()
        # Draw i is a hash of state + i * gamma.
        state = state + _CHUNK * gamma


def split_keys(seed: int) -> Iterator[np.ndarray]:
    """Yield the first draw of each key of a split, the last of which is split for the next ones."""
    last = random.key(seed)
    while True:
        keys = random.split(last, _CHUNK + 1)
        last = keys[-1]
        yield _first_draws(keys[:-1])


def folded_keys(seed: int) -> Iterator[np.ndarray]:
    """Yield the first draw of `fold_in(key, i)` for i = 0, 1, 2, ..."""
    key, numbers = random.key(seed), torch.arange(_CHUNK)
    while True:
        yield _first_draws(random.fold_in(key, numbers))
        numbers = numbers + _CHUNK


def weyl(seed: int) -> Iterator[np.ndarray]:
    """Yield the counters of `one_key` without their hash: numbers that must fail."""
    state, gamma = random.key(seed)
    while True:
        yield (state + gamma * torch.arange(1, _CHUNK + 1)).numpy()
        state = state + _CHUNK * gamma


def _first_draws(keys: Tensor) -> np.ndarray:
    return torch.vmap(random.bits)(keys).numpy()
