"""Random streams, and the loops over their tokens that the formulas of losses are written with."""

from types import SimpleNamespace

import torch

NAN = float("nan")


def make(seed, *, rows=4, width=5, lead=(), dtype=torch.float64):
    """Streams with a random mask, of one token in the second row and none in the last; poison where it is False."""
    generator = torch.Generator().manual_seed(seed)
    size = (*lead, rows, width)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(size, generator=generator) < 0.7
    mask[..., :2, 0], mask[..., 1, 1:], mask[..., -1, :] = True, False, False
    poison = torch.tensor([NAN, -torch.inf, torch.inf])[torch.randint(3, size, generator=generator)].double()

    def stream(values):
        return torch.where(mask, values, poison).to(dtype)

    base = -normal(*size).abs()
    return SimpleNamespace(
        mask=mask,
        log_probs=stream(base),
        old=stream(base + 0.3 * normal(*size)),
        ref=stream(base + 0.5 * normal(*size)),
        advantages=((2 * normal(*lead, rows)).round() / 2).to(dtype),
        gains=stream((2 * normal(*size)).round() / 2),
        weights=stream(normal(*size).abs()),
        entropy=stream(normal(*size).abs()),
        desirable=torch.rand((*lead, rows), generator=generator) < 0.5,
    )


def tokens(mask):
    """For each row the positions of its tokens."""
    return [[t for t, valid in enumerate(row) if valid] for row in mask.tolist()]


def average(values):
    """The mean of a list; 0 of an empty one."""
    return sum(values) / len(values) if values else 0.0


def combine(rows, normalize):
    """The mean of lists of the values of tokens, one for each row."""
    if normalize == "token":
        return average([value for row in rows for value in row])
    if normalize == "sequence":
        return average([average(row) for row in rows])
    return sum(value for row in rows for value in row) / normalize
