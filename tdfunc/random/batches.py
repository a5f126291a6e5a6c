"""The order of a data set: batches of row numbers by a key, and the place of the next one as a tree."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import TreeStructureError, as_count, brief, error
from tdfunc.random.draws import KeyLike, fold_in, key_of, permutation

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

_ENTRIES = ("key", "epoch", "offset", "length")


def batches(
    place: "KeyLike | TensorCollection",
    length: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    drop_last: bool = False,
) -> "Iterator[tuple[Tensor, TensorDict]]":
    """Return an iterator over the row numbers of random batches, each with the place of the batch that follows it.

    An epoch contains each row once, in its own order: `permutation(fold_in(key, epoch), length)`. A run that saves the
    place with its parameters, and gives it back here, gets the batches that it would have got without the interruption.

    Args:
        place: A random key for batches from the start of the first epoch, or the place where they continue.
        length: The number of rows of the data set.
        batch_size: The number of rows in a batch. It may change when a run continues.
        epochs: The number of epochs, also counting those before `place`; without it the batches do not end.
        drop_last: Leave out the last batch of an epoch if it has fewer rows.

    Returns:
        Pairs of row numbers and a tree with `key`, `epoch`, `offset` (the rows of this epoch that were used) and
        `length`.

    Shapes:
        Row numbers of shape (batch_size,), int64; the last batch of an epoch may have fewer.

    Raises:
        ValueError: A number is below 1, a batch is larger than the data with `drop_last`, or `place` belongs to a data
            set of another length.
        TreeStructureError: `place` is a tree with other entries.

    Examples:
        >>> order = list(batches(tdf.random.key(0), 10, 4, epochs=2))
        >>> [len(rows) for rows, _ in order]
        [4, 4, 2, 4, 4, 2]
        >>> _, place = order[1]  # saved after the second batch
        >>> rest = list(batches(place, 10, 4, epochs=2))
        >>> torch.equal(rest[0][0], order[2][0]), len(rest)
        (True, 4)
    """
    length = as_count("batches: length", length)
    batch_size = as_count("batches: batch_size", batch_size)
    if epochs is not None:
        epochs = as_count("batches: epochs", epochs)
    if drop_last and batch_size > length:
        raise error(
            ValueError,
            "batches: drop_last=True leaves out every batch.",
            expected=f"a batch of at most {length} rows",
            got=batch_size,
            hint="a smaller batch_size, or drop_last=False.",
        )
    if isinstance(place, TensorCollection):
        start = _place_of(place, length)
    else:
        start = _Place(key_of(place), 0, 0)
    return _iterate(start, length, batch_size, epochs, drop_last)


class _Place(NamedTuple):
    """The place of a batch, without the length of the data."""

    key: Tensor
    epoch: int
    offset: int


def _place_of(tree: TensorCollection, length: int) -> _Place:
    """Return the place that a tree describes; raise if it belongs to other data."""
    found = {name: leaf for name, leaf in tree._data.items() if name in _ENTRIES and isinstance(leaf, Tensor)}
    if len(found) != len(_ENTRIES):
        raise TreeStructureError(
            "batches: the tree is not a place of batches.",
            expected=", ".join(_ENTRIES),
            got=brief(list(tree._data)),
            hint="give the place that came with the last batch, or a random key to begin.",
        )
    rows = int(found["length"])
    if rows != length:
        raise error(
            ValueError,
            "batches: the place belongs to a data set of another length, which has another order.",
            expected=f"{rows} rows",
            got=f"{length} rows",
            hint="batches(key, ...) begins anew with a random key.",
        )
    return _Place(found["key"], int(found["epoch"]), int(found["offset"]))


def _iterate(
    place: _Place, length: int, batch_size: int, epochs: int | None, drop_last: bool
) -> "Iterator[tuple[Tensor, TensorDict]]":
    key, epoch, offset = place
    # The end of the last batch of an epoch.
    end = length
    while epochs is None or epoch < epochs:
        if drop_last:
            end = offset + (length - offset) // batch_size * batch_size
        if offset < end:
            order = permutation(fold_in(key, epoch), length)
            for start in range(offset, end, batch_size):
                stop = min(start + batch_size, end)
                following = _Place(key, epoch, stop)
                if stop == end:
                    following = _Place(key, epoch + 1, 0)
                yield order[start:stop], _as_tree(following, length)
        epoch += 1
        offset = 0


def _as_tree(place: _Place, length: int) -> "TensorDict":
    return TensorCollection._open(
        {
            "key": place.key,
            "epoch": torch.tensor(place.epoch),
            "offset": torch.tensor(place.offset),
            "length": torch.tensor(length),
        }
    )
