"""`memmap_refresh_`: leaves on the files that a folder holds now, all from one writing of it."""

import os
import shutil

import pytest
import torch

from tdfunc import CorruptCheckpointError, LeafMismatchError, TensorDict, UnsupportedError, lazy_stack
from tdfunc.core.memory import mapped_file
from tdfunc.parallel.parcel import from_parcel, to_parcel
from tdfunc.storage.memmap import read, write
from tests.storage.trees import small_tree as flat
from tests.storage.trees import values_of


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_refresh_sees_a_folder_that_was_written_again(tmp_path, mode):
    """After a refresh, leaves and views have the values of the folder that is there now."""
    flat().set("none", torch.zeros(3, 0)).memmap(tmp_path / "d")
    tree = TensorDict.load_memmap(tmp_path / "d", mode=mode)
    row = tree[1:2]
    flat().apply(lambda x: x + 1).memmap(tmp_path / "d")
    assert torch.equal(tree["a"], flat()["a"])

    assert tree.memmap_refresh_() is tree
    row.memmap_refresh_()

    assert torch.equal(tree["a"], flat()["a"] + 1)
    assert torch.equal(row["a"], flat()["a"][1:2] + 1)
    assert mapped_file(tree["a"]).mode == mode


def of_value(value, count=6):
    """A tree whose leaves, nested ones and those of a lazy stack too, hold one value."""
    rows = [TensorDict({"r": torch.full((n,), float(value))}) for n in (2, 3)]
    leaves = {str(k): torch.full((500,), float(value)) for k in range(count)}
    return TensorDict({**leaves, "n": {"m": {"x": torch.full((2, 3), float(value))}}, "s": lazy_stack(rows)})


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t["s"], lambda t: t.select("n", "s")])
def test_a_folder_that_is_replaced_during_a_refresh(part, tmp_path, monkeypatch):
    """All leaves of a refresh come from one writing of the folder."""
    of_value(0).memmap(tmp_path / "d")
    tree = part(TensorDict.load_memmap(tmp_path / "d"))
    values = iter(range(1, 4))

    def map_leaf(root, leaf, *args):
        mapped = read.map_leaf(root, leaf, *args)
        if (value := next(values, None)) is not None:
            of_value(value).memmap(tmp_path / "d")
        return mapped

    monkeypatch.setattr(write, "map_leaf", map_leaf)
    tree.memmap_refresh_()

    assert len(values_of(tree)) == 1
    assert values_of(tree) != {0}


def test_refresh_gives_up(tmp_path, monkeypatch):
    """A refresh ends when a writer is always faster."""
    monkeypatch.setattr(read, "_RETRIES", 3)
    of_value(0).memmap(tmp_path / "d")
    tree = TensorDict.load_memmap(tmp_path / "d")

    def map_leaf(*args):
        of_value(1).memmap(tmp_path / "d")
        raise CorruptCheckpointError

    monkeypatch.setattr(write, "map_leaf", map_leaf)

    with pytest.raises(OSError, match="memmap_refresh_: the folder was replaced again and again"):
        tree.memmap_refresh_()
    assert values_of(tree) == {0}


def test_refresh_of_leaves_from_several_folders(tmp_path):
    """Leaves from two folders, and from another process, are found in their folders."""
    for name in "ab":
        TensorDict({"x": torch.zeros(2), "n": {"y": torch.zeros(2)}}).memmap(tmp_path / name)
    a, b = (TensorDict.load_memmap(tmp_path / name, mode="r+") for name in "ab")
    tree = TensorDict({"1": a["n"], "2": b, "3": from_parcel(to_parcel(a["x"]))})
    for name in "ab":
        TensorDict({"x": torch.ones(2), "n": {"y": torch.ones(2)}}).memmap(tmp_path / name)

    tree.memmap_refresh_()

    assert values_of(tree) == {1}
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(
        LeafMismatchError, match=r"(?s)'2.x' is not in its file any more; nothing was changed.*x\.memmap"
    ):
        tree.memmap_refresh_()


def test_refresh_of_a_damaged_folder(tmp_path):
    """A file that was cut short is an error of the refresh."""
    tree = flat().memmap(tmp_path / "d")
    tree = TensorDict.load_memmap(tmp_path / "d")
    os.truncate(tmp_path / "d" / "a.memmap", 8)

    with pytest.raises(CorruptCheckpointError, match=r"(?s)memmap_refresh_ .*'a'.*cut short.*24 bytes.*8 bytes"):
        tree.memmap_refresh_()


def test_refresh_refusals(tmp_path):
    """A leaf on no file, of another dtype or without its file is named, and no leaf changes."""
    with pytest.raises(UnsupportedError, match="(?s)'a' is on no file.*got:      a tensor in memory"):
        flat().memmap_refresh_()
    with pytest.raises(UnsupportedError, match="(?s)'a' is on no file.*got:      a memmap without a folder"):
        flat().memmap().memmap_refresh_()
    tree = flat().memmap(tmp_path / "d")
    TensorDict({"a": torch.zeros(3, 2, dtype=torch.int32), "n": {"b": torch.zeros(3)}}).memmap(tmp_path / "d")
    with pytest.raises(LeafMismatchError, match="(?s)'a'.*expected: torch.float32, 24 bytes.*got:      torch.int32"):
        tree.memmap_refresh_()
    TensorDict({"a": torch.zeros(3, 2)}).memmap(tmp_path / "d")
    with pytest.raises(LeafMismatchError, match="(?s)'n.b' is not in its file any more.*b.memmap"):
        tree.memmap_refresh_()
    assert torch.equal(tree["a"], flat()["a"])
