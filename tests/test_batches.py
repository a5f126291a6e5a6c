"""Random batches of row numbers, and the place at which a resumed run continues them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tdfunc as tdf
from tdfunc import TensorDict, random
from tests.helpers import assert_trees_equal

SIZES = st.integers(1, 20)


def by_loop(seed, length, size, epochs, drop_last):
    """Batches of each epoch's permutation, by a loop in plain torch."""
    found = []
    for epoch in range(epochs):
        order = random.permutation(random.fold_in(random.key(seed), epoch), length)
        parts = order.split(size)
        found += [part.tolist() for part in parts if len(part) == size or not drop_last]
    return found


def rows_of(order):
    """The row numbers of pairs."""
    return [rows.tolist() for rows, _ in order]


def places_of(order):
    """The places of pairs, as numbers."""
    return [{name: leaf.tolist() for name, leaf in place.items()} for _, place in order]


@given(seed=st.integers(0, 2**40), length=SIZES, size=SIZES, epochs=st.integers(1, 3), drop_last=st.booleans())
def test_batches_are_parts_of_permutations(seed, length, size, epochs, drop_last):
    """The batches of an epoch are the parts of its permutation, as a loop makes them."""
    size = min(size, length)

    order = list(random.batches(seed, length, size, epochs=epochs, drop_last=drop_last))

    assert rows_of(order) == by_loop(seed, length, size, epochs, drop_last)


@given(seed=st.integers(0, 2**40), length=SIZES, size=SIZES, drop_last=st.booleans(), data=st.data())
def test_a_place_continues(seed, length, size, drop_last, data):
    """From each place come the batches, and the places, that follow it."""
    options = {"batch_size": min(size, length), "epochs": 3, "drop_last": drop_last}
    whole = list(random.batches(random.key(seed), length, **options))
    used = data.draw(st.integers(1, len(whole)))

    rest = list(random.batches(whole[used - 1][1], length, **options))

    assert rows_of(rest) == rows_of(whole[used:])
    assert places_of(rest) == places_of(whole[used:])


def test_each_epoch_has_its_own_order():
    """Two epochs contain all rows, in different orders."""
    (first, _), (second, _) = random.batches(0, 100, 100, epochs=2)

    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_without_epochs_batches_do_not_end():
    """Without a number of epochs there is always another batch."""
    *_, (_, place) = itertools.islice(random.batches(0, 3, 2), 101)

    assert place["epoch"] == 50
    assert place["offset"] == 2


def test_the_place_says_how_far_the_run_is():
    """A place has the key, the epoch, the rows of it that were used, and the length of the data."""
    places = [place for _, place in random.batches(3, 5, 2, epochs=1)]

    assert [(int(place["epoch"]), int(place["offset"])) for place in places] == [(0, 2), (0, 4), (1, 0)]
    assert torch.equal(places[0]["key"], random.key(3))
    assert places[0]["length"] == 5


def test_another_batch_size_continues_at_the_same_row():
    """A run may continue with another batch size: each row of the epoch is used once."""
    whole = random.permutation(random.fold_in(random.key(0), 0), 10)
    _, place = next(random.batches(0, 10, 4))

    rest = torch.cat([rows for rows, _ in random.batches(place, 10, 3, epochs=1)])

    assert torch.equal(rest, whole[4:])


def test_a_saved_place_is_a_place(tmp_path):
    """A place comes back from a checkpoint as a place."""
    _, place = next(random.batches(0, 10, 4))
    tdf.CheckpointManager(tmp_path).save(0, {"place": place})

    back = tdf.CheckpointManager(tmp_path).load()["place"]

    assert_trees_equal(back, place)
    assert rows_of(random.batches(back, 10, 4, epochs=1)) == rows_of(random.batches(place, 10, 4, epochs=1))


def test_workers_load_the_batches():
    """A DataLoader with workers loads the rows of the batches, in their order."""
    data = TensorDict({"x": torch.arange(10)}, [10])
    rows = rows_of(random.batches(0, 10, 4, epochs=2))

    loader = DataLoader(data, batch_sampler=rows, num_workers=2)

    assert [batch["x"].tolist() for batch in loader] == rows


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        pytest.param(lambda: random.batches(0, 0, 2), ValueError, "length", id="no rows"),
        pytest.param(lambda: random.batches(0, 5, 0), ValueError, "batch_size", id="no batch"),
        pytest.param(lambda: random.batches(0, 5, 2, epochs=0), ValueError, "epochs", id="no epochs"),
        pytest.param(lambda: random.batches(0, 5, 6, drop_last=True), ValueError, "every", id="all left out"),
        pytest.param(lambda: random.batches("0", 5, 2), TypeError, "key", id="no key"),
        pytest.param(
            lambda: random.batches(TensorDict({"key": random.key(0)}), 5, 2),
            tdf.TreeStructureError, r"not a place[\s\S]*offset[\s\S]*hint", id="another tree",
        ),
        pytest.param(
            lambda: random.batches(next(random.batches(0, 4, 2))[1], 5, 2),
            ValueError, r"another length[\s\S]*4 rows[\s\S]*5 rows[\s\S]*hint", id="other data",
        ),
    ],
)  # fmt: skip
def test_errors_come_at_the_call(call, kind, message):
    """A wrong argument is an error of the call, before the first batch."""
    with pytest.raises(kind, match=message):
        call()
