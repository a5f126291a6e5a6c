"""Random indices of tensors: everything that torch accepts between brackets, and some that it refuses."""

import numpy as np
import torch


def random_index(rng, size):
    """Anything torch accepts as an index of these dimensions, and now and then something it refuses."""
    if rng.random() < 0.4:
        return _item(rng, size, 0)[0]
    items, dim, seen = [], 0, False
    for _ in range(rng.integers(0, len(size) + 2)):
        if rng.random() < 0.12 and not seen:
            items.append(Ellipsis)
            seen = True
            dim = min(dim + int(rng.integers(0, 2)), len(size))
            continue
        item, taken = _item(rng, size, min(dim, max(len(size) - 1, 0)))
        items.append(item)
        dim += taken
    return tuple(items)


def _item(rng, size, dim):
    n = size[dim] if dim < len(size) else 2
    kind = rng.integers(13)
    if kind == 0:
        return None, 0
    if kind == 1:
        return bool(rng.random() < 0.7), 0
    if kind in (2, 3):
        return int(rng.integers(-n - (rng.random() < 0.1), n + (rng.random() < 0.1) + (n == 0))), 1
    if kind in (4, 5):
        return _slice(rng, n), 1
    if kind == 6:
        return _mask(rng, size, dim)
    picks = rng.integers(-n, n, size=rng.integers(0, 4)) if n else np.zeros(0, dtype=np.int64)
    if kind == 7:
        return torch.as_tensor(picks), 1
    if kind == 8:
        return picks.tolist(), 1
    if kind == 9:
        return range(int(rng.integers(0, n + 1))), 1
    if kind == 10:
        return picks, 1
    if kind == 11:
        return (torch.tensor(int(rng.integers(-n, n))) if n else torch.zeros(0, dtype=torch.long)), 1
    return torch.as_tensor(rng.integers(-n, n, size=(2, 2)) if n else np.zeros((0, 2), dtype=np.int64)), 1


def _slice(rng, n):
    start, stop = (None if rng.random() < 0.3 else int(rng.integers(-n - 1, n + 2)) for _ in range(2))
    step = None if rng.random() < 0.6 else int(rng.integers(1, 3))
    return slice(start, stop, step)


def _mask(rng, size, dim):
    covered = size[dim : dim + 1 + int(rng.integers(2))] or (2,)
    if rng.random() < 0.05:
        covered = (*covered[:-1], covered[-1] + 1)
    mask = rng.random(covered) < 0.5
    kind = rng.integers(3)
    if kind == 0 and len(covered) == 1:
        return mask.tolist(), 1
    return (mask if kind == 1 else torch.as_tensor(mask)), len(covered)
