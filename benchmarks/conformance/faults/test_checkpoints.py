"""What README.md and docs/differences.md say of tensordict's folders and maps, and what happens here instead."""

import os
import shutil
import warnings

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tests.incumbent import Incumbent, tensordict


def flip(path):
    """Change a bit of the last values."""
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x40
    path.write_bytes(raw)


def test_a_flipped_bit(tmp_path):
    """Tensordict returns another value; a file of ours is refused by name."""
    Incumbent({"w": torch.ones(3)}, []).memmap(tmp_path / "theirs")
    tdf.save(TensorDict({"w": torch.ones(3)}), tmp_path / "ours.safetensors")
    flip(tmp_path / "theirs" / "w.memmap")
    flip(tmp_path / "ours.safetensors")

    assert Incumbent.load_memmap(tmp_path / "theirs")["w"].tolist() != [1, 1, 1]
    with pytest.raises(tdf.CorruptCheckpointError, match='"w" is damaged'):
        tdf.load(tmp_path / "ours.safetensors")


def test_a_file_that_is_cut_short(tmp_path):
    """Tensordict makes the file longer; ours raises and leaves it alone."""
    Incumbent({"w": torch.ones(1000)}, []).memmap(tmp_path / "theirs")
    TensorDict({"w": torch.ones(1000)}).memmap(tmp_path / "ours")
    for file in (tmp_path / "theirs" / "w.memmap", tmp_path / "ours" / "w.memmap"):
        file.write_bytes(file.read_bytes()[:400])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = Incumbent.load_memmap(tmp_path / "theirs")["w"]
    with pytest.raises(tdf.CorruptCheckpointError, match="'w'.*cut short"):
        TensorDict.load_memmap(tmp_path / "ours")

    assert values.sum() == 100
    assert (tmp_path / "theirs" / "w.memmap").stat().st_size == 4000
    assert (tmp_path / "ours" / "w.memmap").stat().st_size == 400


def stopping_at_the_second(write):
    """A function that writes, and is interrupted in its second call."""
    calls = []

    def stopping(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*args, **options)

    return stopping


def test_a_write_that_stops_half_way(tmp_path, monkeypatch):
    """Tensordict leaves new values next to old ones; ours leaves the old folder."""
    old, new = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    Incumbent(old, []).memmap(tmp_path / "theirs")
    TensorDict(old).memmap(tmp_path / "ours")
    theirs = tensordict.MemoryMappedTensor
    monkeypatch.setattr(theirs, "from_tensor", stopping_at_the_second(theirs.from_tensor))
    with pytest.raises(KeyboardInterrupt):
        Incumbent(new, []).memmap(tmp_path / "theirs")
    monkeypatch.setattr(os, "write", stopping_at_the_second(os.write))
    with pytest.raises(KeyboardInterrupt):
        TensorDict(new).memmap(tmp_path / "ours")

    assert [x[0].item() for x in Incumbent.load_memmap(tmp_path / "theirs").values()] == [1, 0]
    assert (TensorDict.load_memmap(tmp_path / "ours") == TensorDict(old)).all()


def test_data_that_json_cannot_hold(tmp_path):
    """Tensordict pickles it; ours refuses it by name before it writes anything."""
    Incumbent({"x": torch.ones(1), "data": tensordict.NonTensorData(print)}, []).memmap(tmp_path / "theirs")

    assert [file.suffix for file in (tmp_path / "theirs").rglob("*") if "pickle" in file.name or "pkl" in file.name]
    with pytest.raises(tdf.UnsupportedError, match=r'(?s)"data".*built-in'):
        TensorDict({"x": torch.ones(1), "data": print}).memmap(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_room_for_more_than_the_disk(tmp_path):
    """Tensordict makes room that the disk does not have; ours refuses unless it is asked to."""
    huge = [2 * shutil.disk_usage(tmp_path).free // 4000, 1000]
    made = Incumbent({"x": torch.zeros(1)}, []).expand(*huge).memmap_like(tmp_path / "theirs")
    tree = TensorDict({"x": torch.zeros(1)}).expand(*huge)

    assert made["x"].shape == (*huge, 1)
    with pytest.raises(OSError, match="(?s)does not have the free space.*sparse_ok=True"):
        tree.memmap_like(tmp_path / "ours")


def _from_the_third(chunk):
    return None if chunk["a"][0] < 2 else chunk


def test_rows_that_are_left_out_of_a_map_with_out():
    """Tensordict writes results to the rows of others; ours raises."""
    theirs = Incumbent({"a": torch.arange(6)}, [6]).map(
        _from_the_third, num_workers=1, chunksize=2, out=Incumbent({"a": torch.full((6,), -1)}, [6]),
        mp_start_method="fork",
    )  # fmt: skip
    ours = TensorDict({"a": torch.arange(6)}, [6])

    assert theirs["a"].tolist() == [2, 3, 4, 5, -1, -1]
    with pytest.raises(tdf.UnsupportedError, match=r"(?s)out.*expected: a tree.*NoneType"):
        ours.map(_from_the_third, num_workers=0, chunksize=2, out=ours.new_zeros([6]))
    assert ours.map(_from_the_third, num_workers=0, chunksize=2)["a"].tolist() == [2, 3, 4, 5]
