"""`map` over trees on disk: leaves cross by the names of their files, and results are written where they are made."""

import os
import shutil

import pytest
import torch

from tdfunc import LeafMismatchError, TensorDict, WorkerError, WorkerPool
from tdfunc.parallel.parcel import from_parcel, to_parcel
from tests.helpers import assert_trees_equal
from tests.parallel import functions as fns


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests of the module."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize("options", [{"chunksize": 3}, {"chunksize": 0}])
@pytest.mark.parametrize("workers", [None, 0], ids=["pool", "here"])
def test_out_on_a_file_is_written_where_the_chunk_runs(pool, workers, options, tmp_path):
    """Workers write their rows to the file that they have mapped too, also over the file that they read."""
    td = TensorDict({"x": torch.arange(10), "in": {"y": torch.rand(10, 2)}}, [10]).memmap(tmp_path / "in")
    out, expected = td.new_zeros([10]).memmap(tmp_path / "out"), fns.double(td).clone()
    options = {**options, "num_workers": workers, "executor": None if workers == 0 else pool}

    assert td.map(fns.double, out=out, **options) is out
    assert_trees_equal(TensorDict.load_memmap(tmp_path / "out"), expected)
    TensorDict.load_memmap(tmp_path / "in").map(fns.double, out=td, **options)
    assert_trees_equal(TensorDict.load_memmap(tmp_path / "in"), expected)


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_out_over_other_rows_of_the_file(pool, mode, tmp_path):
    """Rows of a file that workers would read after they were overwritten are refused."""
    written = TensorDict({"x": torch.arange(10)}, [10]).memmap(tmp_path / "d")
    td = TensorDict.load_memmap(tmp_path / "d", mode=mode)

    with pytest.raises(LeafMismatchError, match="leaf 'x' of out shares memory"):
        td[:-1].map(fns.double, out=written[1:], executor=pool, chunksize=2)

    assert written["x"].tolist() == list(range(10))


def test_a_mapped_tree_crosses_by_name(pool, tmp_path):
    """A data set on disk is not read to be sent."""
    n = 3_000_000
    td = TensorDict({"x": torch.ones(4, n)}, [4]).memmap(tmp_path / "d")

    out = td.map(fns.mapped_bytes, executor=pool, chunksize=2)

    assert out[:, 0].tolist() == [2.0 * n, 2.0 * n]
    assert (out[:, 1] < 4_000_000).all(), "a chunk has 24 MB"
    assert to_parcel((td[1:3], td["x"][0, :1])).block == b""
    assert_trees_equal(td.map(fns.double, executor=pool, chunksize=3), fns.double(td))


@pytest.mark.parametrize("place", [0, 4095, 4096])
def test_a_write_at_any_place_is_noticed(place, tmp_path):
    """A leaf of two pages that was written to at its first or last number does not cross by the name of its file."""
    TensorDict({"x": torch.zeros(4097, dtype=torch.uint8)}, [4097]).memmap(tmp_path / "d")
    td = TensorDict.load_memmap(tmp_path / "d")
    assert to_parcel(td).block == b""

    td["x"][place] = 1
    assert from_parcel(to_parcel(td))["x"][place] == 1


@pytest.mark.parametrize("change", ["version", "data", "deleted", "replaced"])
def test_a_mapped_leaf_that_is_not_its_file_crosses_as_bytes(pool, tmp_path, change):
    """Workers see the caller's values, not those of the file, where they differ."""
    TensorDict({"x": torch.arange(5000)}, [5000]).memmap(tmp_path / "d")
    td = TensorDict.load_memmap(tmp_path / "d")
    expected = td["x"].clone()
    if change in ("version", "data"):
        (td["x"] if change == "version" else td["x"].data)[4000] = -1
        expected[4000] = -1
    if change != "version" and change != "data":
        shutil.rmtree(tmp_path / "d")
    if change == "replaced":
        TensorDict({"x": torch.zeros(5000, dtype=torch.int64)}, [5000]).memmap(tmp_path / "d")

    assert torch.equal(td.map(fns.same, executor=pool, chunksize=1250)["x"], expected)


def test_a_writable_mapping_is_the_file_in_workers_too(pool, tmp_path):
    """A function that fills a preallocated data set in place fills the file; a copy-on-write mapping keeps it."""
    td = TensorDict({"x": torch.arange(10)}, [10]).memmap(tmp_path / "d")

    td.map(fns.write_in_place, executor=pool, chunksize=3)

    assert td["x"].tolist() == list(range(1, 11))
    private = TensorDict.load_memmap(tmp_path / "d")
    with pytest.warns(UserWarning, match="the writes are lost"):
        private.map(fns.write_in_place, executor=pool, chunksize=3)
    assert private["x"].tolist() == list(range(1, 11))


def test_a_file_that_a_worker_does_not_find(tmp_path):
    """A worker on another machine, or one that comes late, does not map another file of that name."""
    td = TensorDict({"x": torch.zeros(100)}, [100]).memmap(tmp_path / "d")
    parcel, file = to_parcel(td), next((tmp_path / "d").glob("*.memmap"))
    kept = shutil.move(file, tmp_path)

    with pytest.raises(WorkerError, match=r"a worker cannot open \S*x.memmap(.|\n)*got:(.|\n)*No such file"):
        from_parcel(parcel)
    shutil.copy(kept, file)
    with pytest.raises(WorkerError, match=r"is not the file(.|\n)*expected: inode \d+, 400 bytes"):
        from_parcel(parcel)
    os.replace(kept, file)
    os.truncate(file, 399)
    with pytest.raises(WorkerError, match=r"is not the file(.|\n)*inode \d+, 399"):
        from_parcel(parcel)


def test_shuffled_rows_are_gathered_by_the_workers(pool, tmp_path):
    """Rows of a shuffled data set on disk come together in workers."""
    td = TensorDict({"x": torch.arange(1000), "y": torch.rand(1000, 3)}, [1000]).memmap(tmp_path / "d")
    generator = torch.Generator().manual_seed(1)

    parts = list(td.map_iter(fns.same, chunksize=300, shuffle=True, key=generator, executor=pool))

    order = torch.cat([part["x"] for part in parts])
    assert sorted(order.tolist()) == list(range(1000))
    assert torch.equal(torch.cat([part["y"] for part in parts]), td["y"][order])
