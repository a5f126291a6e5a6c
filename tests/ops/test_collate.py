"""Trees in a `DataLoader`: as the data set, and as rows of one."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, default_collate

import tdfunc as tdf
from tdfunc import LazyStack, LeafMismatchError, TensorClass, TensorDict
from tests.helpers import assert_trees_equal


class Sample(TensorClass):
    """Two fields and a string for each row."""

    x: Tensor
    label: Tensor
    name: str = "all"


def plain(n):
    """Rows with a nested tree, one string for each and one for all."""
    names = [f"r{i}" for i in range(n)]
    return TensorDict({"x": torch.arange(n), "n": {"y": torch.rand(n, 2)}, "s": names, "t": "all"}, [n])


SETS = {
    "TensorDict": plain(10),
    "TensorClass": Sample(torch.rand(10, 2), torch.arange(10), batch_size=[10]),
    "LazyStack": tdf.lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in range(1, 11)]),
    "two dimensions": TensorDict({"x": torch.rand(10, 3, 2)}, [10, 3], names=["row", None]),
}


def identity(batch):
    """What users of tensordict give as the collate function; a lambda cannot be pickled."""
    return batch


@pytest.mark.parametrize("collate", [None, tdf.collate, identity])
@pytest.mark.parametrize("name", SETS)
def test_a_tree_is_a_data_set(name, collate):
    """A batch would be no tree, or not the rows of the tree."""
    data = SETS[name]
    batches = list(DataLoader(data, batch_size=4, collate_fn=collate))

    for batch, expected in zip(batches, [data[:4], data[4:8], data[8:]], strict=True):
        assert_trees_equal(batch, expected)


def test_rows_are_shuffled_and_dropped():
    """A sampler's positions would not be those of the batch."""
    loader = DataLoader(SETS["TensorDict"], batch_size=4, shuffle=True, drop_last=True, collate_fn=tdf.collate)
    rows = torch.cat(list(loader))

    assert len(rows) == 8
    assert len(set(rows["x"].tolist())) == 8
    assert rows["s"] == [f"r{i}" for i in rows["x"].tolist()]
    assert torch.equal(rows["n", "y"], SETS["TensorDict"]["n", "y"][rows["x"]])


@pytest.mark.parametrize("name", SETS)
def test_workers(name):
    """A tree could not be sent to a worker or come back as what it was."""
    data = SETS[name]
    batches = list(DataLoader(data, batch_size=5, num_workers=2))

    assert_trees_equal(batches[0], data[:5])
    assert_trees_equal(batches[1], data[5:])


def test_a_batch_is_one_index():
    """Each row would be indexed for itself, which takes a hundred times as long."""
    data = TensorDict({str(i): torch.rand(512, 4) for i in range(20)}, [512])
    calls = []
    once = data.__getitems__(list(range(512)))

    assert_trees_equal(once, data)
    start = time.perf_counter()
    data.__getitems__(list(range(512)))
    calls.append(time.perf_counter() - start)
    start = time.perf_counter()
    torch.stack([data[i] for i in range(512)])
    calls.append(time.perf_counter() - start)
    assert calls[0] * 5 < calls[1]


class Rows(Dataset):
    """Rows with a tree among other things."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return SETS["TensorDict"][i], {"weight": float(i), "more": [SETS["TensorClass"][i]]}, "text"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_their_own(method):
    """A worker that starts afresh would not know how trees are collated: nothing but the data set goes to it."""
    data = SETS["TensorDict"]
    batches = list(DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context=method))

    assert_trees_equal(batches[0], data[:5])
    assert_trees_equal(batches[1], data[5:])


@pytest.mark.parametrize("collate", [None, tdf.collate])
@pytest.mark.parametrize("workers", [0, 2])
def test_trees_among_other_things(workers, collate):
    """A tree beside tensors would be refused, or stay a list."""
    (first, second) = DataLoader(Rows(), batch_size=2, num_workers=workers, collate_fn=collate)
    tree, other, texts = first

    # Rows with the same value are put together as rows with values of their own, as `torch.stack` does.
    assert_trees_equal(tree.exclude("t"), SETS["TensorDict"][:2].exclude("t"))
    assert tree["t"] == ["all", "all"]
    assert torch.equal(other["weight"], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert type(other["more"][0]) is Sample
    assert torch.equal(other["more"][0].x, SETS["TensorClass"].x[:2])
    assert list(texts) == ["text", "text"]
    assert second[0]["x"].tolist() == [2, 3]


def test_other_rows_are_as_torch_collates_them():
    """Rows without trees would come out otherwise than from `default_collate`."""
    rows = [
        (torch.ones(2), 1, 2.0, "a", {"k": [torch.zeros(1)]}),
        (torch.zeros(2), 3, 4.0, "b", {"k": [torch.ones(1)]}),
    ]

    assert str(tdf.collate(rows)) == str(default_collate(rows))


def test_errors():
    """A user could not see which leaf does not fit."""
    rows = [TensorDict({"x": torch.ones(n)}) for n in (1, 2)]
    for collate in (tdf.collate, default_collate):
        with pytest.raises(LeafMismatchError, match=r"stack: leaf 'x' differs.\n.*\[1\]\n.*\[2\]\n.*lazy_stack"):
            collate(rows)
    with pytest.raises(TypeError, match="object"):
        tdf.collate([object()])
    assert isinstance(tdf.lazy_stack(rows).__getitems__([1, 0]), LazyStack)


def test_what_is_entered_in_torchs_table():
    """Other types than trees would be collated otherwise once tdfunc is imported."""
    table = torch.utils.data._utils.collate.default_collate_fn_map
    mine = [cls for cls, fn in table.items() if fn.__module__.startswith("tdfunc")]

    assert [cls.__name__ for cls in mine] == ["TensorCollection"]
    assert not issubclass(mine[0], tuple(cls for cls in table if isinstance(cls, type) and cls is not mine[0]))
    with pytest.raises(TypeError, match="default_collate: batch must contain tensors.*object"):
        default_collate([object()])


@pytest.mark.parametrize("batch_size", [None, 4])
def test_samplers_of_whole_batches(batch_size):
    """A batch sampler, or a loader that takes rows one by one, would not give trees."""
    data = SETS["TensorDict"]
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False) if batch_size is None else None
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

    assert_trees_equal(next(iter(loader)), data[:4])
    assert_trees_equal(next(iter(DataLoader(data, batch_size=None))), data[0])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "indices",
    [(1, 2), (2,), range(3), [3, 1], {0: 1, 4: 2}, np.array([2, 0]), torch.tensor([1, 2])],
    ids=["tuple", "one", "range", "list", "dict", "array", "tensor"],
)
def test_positions_of_any_kind(name, indices):
    """A batch sampler that yields tuples would get one element, of the second batch dimension, or an error."""
    data = SETS[name]

    (batch,) = DataLoader(data, batch_sampler=[indices], collate_fn=tdf.collate)

    assert_trees_equal(batch, data[torch.tensor([int(i) for i in indices], dtype=torch.int64)])


@pytest.mark.parametrize("name", ["TensorDict", "TensorClass", "two dimensions"])
@pytest.mark.parametrize("indices", [(), []])
def test_an_empty_batch(name, indices):
    """A batch sampler that yields no positions would raise."""
    (batch,) = DataLoader(SETS[name], batch_sampler=[indices], collate_fn=tdf.collate)

    assert_trees_equal(batch, SETS[name][:0])


def test_positions_in_two_dimensions():
    """Places in two batch dimensions would be taken for a table of rows."""
    data = SETS["two dimensions"]

    (batch,) = DataLoader(data, batch_sampler=[[(0, 1), (2, 2), (9, 0)]], collate_fn=tdf.collate)

    assert torch.equal(batch["x"], torch.stack([data["x"][0, 1], data["x"][2, 2], data["x"][9, 0]]))


def test_a_tree_without_a_batch():
    """There is no first row to look at; it comes back as it is, as a batch does."""
    tree = TensorDict({"x": torch.ones(2)})

    assert tdf.collate(tree) is tree
