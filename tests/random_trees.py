"""Random trees for the differential test: descriptions that tdfunc and tensordict are both built from."""

from dataclasses import dataclass

import numpy as np
import torch

SIZES = ((), (3,), (1,), (0,), (4,), (2, 3), (3, 1), (1, 1), (3, 3), (2, 0), (2, 3, 2), (1, 2, 3))
FEATURES = ((), (), (2,), (1,), (0,), (2, 3))
DTYPES = (
    torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
KEYS = ("a", "b", "c", "keys", "shape", "x.y", "a/b")


@dataclass(frozen=True)
class Branch:
    """A tree: its batch size, names of dimensions, and entries by key."""

    size: tuple
    names: tuple | None
    entries: dict

    def leaves(self):
        """Every tensor in it."""
        for value in self.entries.values():
            if isinstance(value, Branch):
                yield from value.leaves()
            elif isinstance(value, torch.Tensor):
                yield value

    def build(self, cls):
        """This tree in either library; tensors are shared, not copied."""
        data = {k: v.build(cls) if isinstance(v, Branch) else v for k, v in self.entries.items()}
        return cls(data, batch_size=list(self.size), names=None if self.names is None else list(self.names))


def random_leaf(rng, size, dtype=None):
    """A tensor that starts with the batch size: contiguous, transposed or expanded."""
    dtype = DTYPES[rng.integers(len(DTYPES))] if dtype is None else dtype
    shape = (*size, *FEATURES[rng.integers(len(FEATURES))])
    layout = rng.integers(6)
    if layout == 0 and shape:
        return _values(rng, shape[-1:], dtype).expand(shape)
    if layout == 1 and len(shape) > 1:
        return _values(rng, (shape[1], shape[0], *shape[2:]), dtype).transpose(0, 1)
    return _values(rng, shape, dtype)


def _values(rng, shape, dtype):
    if dtype is torch.bool:
        return torch.from_numpy(rng.random(shape) < 0.5) if shape else torch.tensor(bool(rng.random() < 0.5))
    values = torch.as_tensor(rng.integers(-4, 5, size=shape).astype(np.float32))
    if dtype.is_floating_point and rng.random() < 0.1:
        values = torch.where(values == 0, torch.nan, values)
    return (values.abs() if dtype is torch.uint8 else values).to(dtype)


def random_tree(rng, size=None, depth=2, dtype=None, nontensor=True):
    """A tree: nested, empty, 0-d, with a nested batch size that may be longer, names, and non-tensor data."""
    size = SIZES[rng.integers(len(SIZES))] if size is None else size
    names = tuple("xyzuvw"[: len(size)]) if size and depth == 2 and rng.random() < 0.3 else None
    entries = {}
    for key in rng.permutation(KEYS)[: rng.integers(0, 4)]:
        kind = rng.random()
        if kind < 0.2 and depth:
            longer = size + (2,) if rng.random() < 0.3 else size
            entries[str(key)] = random_tree(rng, longer, depth - 1, dtype, nontensor)
        elif kind < 0.3 and nontensor:
            entries[str(key)] = _words(rng, size)
        else:
            entries[str(key)] = random_leaf(rng, size, dtype)
    return Branch(size, names, entries)


def _words(rng, size):
    if len(size) == 1 and size[0] and rng.random() < 0.5:
        return [str(rng.choice(["red", "blue"])) for _ in range(size[0])]
    return str(rng.choice(["red", "blue"]))


def like(rng, branch, *, change=False):
    """A tree of the same structure with other values and, with `change`, one difference somewhere in it."""
    paths = list(_paths(branch))
    target = paths[rng.integers(len(paths))] if change and paths else None
    return _like(rng, branch, (), target)


def _paths(branch, at=()):
    for key, value in branch.entries.items():
        yield (*at, key)
        if isinstance(value, Branch):
            yield from _paths(value, (*at, key))


def _like(rng, branch, at, target):
    entries = {}
    for key, value in branch.entries.items():
        here = (*at, key)
        if here == target:
            if rng.random() < 0.5:
                continue
            value = random_leaf(rng, branch.size)
        if isinstance(value, Branch):
            entries[key] = _like(rng, value, here, target)
        elif isinstance(value, torch.Tensor):
            entries[key] = _values(rng, tuple(value.shape), value.dtype)
        else:
            entries[key] = value
    return Branch(branch.size, branch.names, entries)


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
