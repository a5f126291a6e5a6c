"""Saves that are killed, disks that are full, folders that cannot be written to, and several processes at one place."""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.reliability.children import in_child
from benchmarks.reliability.faults import full_disk_saves, limited_saves, read_only_save, share, small_disk
from benchmarks.reliability.kills import KINDS, kill_saves
from tdfunc import TensorDict, load, save
from tests.helpers import quick

NO_LOSS = {"lost": 0, "not cleaned": 0}
HARMLESS = {"killed by a signal": 0, "old tree lost": 0, "left behind": 0}


# The others save by the same steps: their tests of many kills, reads and sizes are slow ones.
OFTEN = ("one file", "folder of shards", "memmap folder")


@pytest.fixture(params=quick(KINDS, *OFTEN))
def kind(request):
    """Each way of saving."""
    return request.param


@pytest.fixture
def folder():
    """A folder that any user may read, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="tdfunc-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def parts(counts, expected):
    """Those of the counts that are compared."""
    return {key: counts[key] for key in expected}


def test_a_few_kills(kind, tmp_path):
    """A killed save leaves the whole old tree or the whole new one, and nothing else."""
    counts = kill_saves(kind, 3, tmp_path)

    assert parts(counts, NO_LOSS) == NO_LOSS


def test_files_that_may_not_grow(kind, tmp_path):
    """A save that cannot write everything leaves the old tree and nothing else."""
    counts = limited_saves(kind, [1, 40_000], tmp_path)

    assert parts(counts, HARMLESS) == HARMLESS
    assert counts["OSError"] == 2


@pytest.mark.slow
def test_a_full_disk(kind, folder):
    """A full disk leaves the old tree and nothing else, and the process lives."""
    sizes = [1, 5_000, 70_000, 500_000, 1_500_000, 1_900_000, 6_000_000]
    try:
        with small_disk(folder / "disk"):
            counts = full_disk_saves(kind, sizes, folder / "disk")
    except PermissionError:
        pytest.skip("mounting a small file system needs root")

    assert parts(counts, HARMLESS) == HARMLESS
    assert counts["OSError"] + counts["saved"] == len(sizes)
    assert counts["OSError"] >= 3


def test_a_folder_that_cannot_be_written_to(kind, folder):
    """A save without permission is a PermissionError and changes nothing."""
    assert read_only_save(kind, folder) == "OSError 13 0"


def test_a_few_reads_while_others_save(kind, tmp_path):
    """A reader sees whole trees while two processes save to one place."""
    counts = share(kind, 8, tmp_path)

    assert parts(counts, {"not whole", "writers that failed", "left behind"}) == {
        "not whole": 0, "writers that failed": 0, "left behind": 0,
    }  # fmt: skip


def test_forks_while_threads_save(tmp_path):
    """A process that is forked while other threads save can save and load."""
    trees = [TensorDict({"a": torch.full((100_000,), float(i))}) for i in range(4)]

    def work(number):
        for _ in range(8):
            save(trees[number], tmp_path / f"{number % 2}.safetensors", fsync=False)
            trees[number].memmap(tmp_path / f"d{number % 2}")

    def child():
        save(trees[0], tmp_path / "0.safetensors", fsync=False)
        trees[0].memmap(tmp_path / "d0")
        found = load(tmp_path / "0.safetensors")["a"], TensorDict.load_memmap(tmp_path / "d0")["a"]
        return [float(leaf.min()) == float(leaf.max()) for leaf in found]

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, number) for number in range(4)]
        said = [in_child(child) for _ in range(5)]
        for job in jobs:
            job.result()
    save(trees[0], tmp_path / "0.safetensors")
    trees[0].memmap(tmp_path / "d0")

    assert said == [(0, "[True, True]")] * 5
    assert sorted(os.listdir(tmp_path)) == ["0.safetensors", "1.safetensors", "d0", "d1"]
