"""Files and folders without the faults of tensordict's: damage, hostile input, keys, and writes that stop.

`benchmarks/conformance/faults/` shows each fault by a test of the same name. Kills at random moments are counted in
tests/storage/test_kills.py.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import tdfunc as tdf
from tdfunc import CorruptCheckpointError, TensorDict, UnsupportedError


@pytest.fixture
def folder(tmp_path):
    """A memmap folder of a leaf of ten ones and a sub-tree."""
    TensorDict({"w": torch.ones(10), "n": {"b": torch.ones(2)}}).memmap(tmp_path / "folder")
    return tmp_path / "folder"


def lengthen(folder):
    """Describe a larger leaf."""
    change_meta(folder, {"shape": [1000]})


def widen(folder):
    """Describe a dtype of more bytes."""
    change_meta(folder, {"dtype": "torch.int64"})


def change_meta(folder, facts):
    """Change facts of the leaf `w` in a folder's meta.json."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["w"] |= facts
    (folder / "meta.json").write_text(json.dumps(meta))


def truncate(folder):
    """Cut the file of the leaf `w`."""
    os.truncate(folder / "w.memmap", 16)


def link(folder):
    """Put the leaf `w` elsewhere, and a link in its place."""
    (folder / "w.memmap").rename(folder.parent / "target")
    (folder / "w.memmap").symlink_to(folder.parent / "target")


def contents(path):
    """The bytes of each file below a folder, through links."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "'w'.*cut short"),
        (lengthen, "meta.json.*'shape': \\[10\\].*'shape': \\[1000\\]"),
        (widen, "meta.json.*float32.*int64"),
        (link, "'w'.*link"),
        (lambda folder: (folder / "w.memmap").unlink(), "missing"),
        (lambda folder: shutil.rmtree(folder / "n"), "missing"),
    ],
    ids=["cut short", "longer by its meta.json", "wider by its meta.json", "a link", "no leaf", "no sub-tree"],
)
def test_a_damaged_folder(damage, message, folder):
    """A folder whose files do not fit its description is refused, and no file changes."""
    damage(folder)
    before = contents(folder)

    with pytest.raises(CorruptCheckpointError, match=f"(?s){message}"):
        TensorDict.load_memmap(folder)

    assert contents(folder) == before


def test_a_write_that_stops_half_way(tmp_path, monkeypatch):
    """A write that is interrupted at its first or second leaf leaves the old folder, whole."""
    old, new = (TensorDict({"a": torch.full((2,), x), "b": torch.full((2,), x)}) for x in (0.0, 1.0))
    old.memmap(tmp_path / "d")
    write, left = os.write, 0

    def stopping(fd, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(fd, data)

    monkeypatch.setattr(os, "write", stopping)
    for steps in range(2):
        left = steps
        with pytest.raises(KeyboardInterrupt):
            new.memmap(tmp_path / "d")
        assert (TensorDict.load_memmap(tmp_path / "d") == old).all()


def test_data_that_json_cannot_hold(tmp_path):
    """Non-tensor data that need a pickle are refused before anything is written."""
    with pytest.raises(UnsupportedError, match='"data"'):
        TensorDict({"x": torch.ones(1), "data": print}).memmap(tmp_path / "d")

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "leaves",
    [
        {"shape": torch.ones(2), "device": torch.ones(2), "_type": torch.ones(2)},
        {"../esc": torch.ones(3), "A": torch.ones(1), "a": torch.zeros(1)},
        {"k" * 300: torch.ones(2)},
        {"☃" * 100: torch.ones(2)},
        {"a.memmap": {"b": torch.ones(2)}, "meta.json": {"b": torch.ones(2)}},
        {"w": torch.ones(2).to(torch.float8_e4m3fn), "none": torch.zeros(0, 3)},
    ],
    ids=["fields of the format", "paths", "long", "long in bytes", "names of files", "small floats"],
)
def test_keys_that_are_no_file_names(tmp_path, leaves):
    """Every key and dtype comes back, and nothing is written beside the folder."""
    tree = TensorDict({"a.b": torch.ones(1), **leaves})

    tree.memmap(tmp_path / "in" / "d")
    loaded = TensorDict.load_memmap(tmp_path / "in" / "d")

    assert list(loaded.keys(True, True)) == list(tree.keys(True, True))
    assert all(torch.equal(loaded[key].float(), tree[key].float()) for key in tree.keys(True, True))
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == ["d"]


def test_a_smaller_tree_over_a_larger_one(folder):
    """The files of the larger tree are gone."""
    TensorDict({"w": torch.ones(2)}).memmap(folder)

    assert sorted(os.listdir(folder)) == ["meta.json", "w.memmap"]
    assert (folder / "w.memmap").stat().st_size == 8


def test_what_a_folder_keeps(tmp_path):
    """Names, Parameters and ties come back."""
    layer = torch.nn.Linear(2, 2, bias=False)
    tied = tdf.from_module(torch.nn.ModuleDict({"a": layer, "b": layer}))
    TensorDict({"n": tied, "r": torch.ones(2)}, [2], names=["rows"]).memmap(tmp_path / "d")

    loaded = TensorDict.load_memmap(tmp_path / "d")

    assert loaded.names == ["rows"]
    assert loaded["n", "a", "weight"] is loaded["n", "b", "weight"]
    assert isinstance(loaded["n", "a", "weight"], torch.nn.Parameter)
    assert loaded.ties() == [["n.a.weight", "n.b.weight"]]


SAVE = """
import torch
from tdfunc import TensorClass
class Point(TensorClass):
    x: torch.Tensor
Point(x=torch.ones(2), batch_size=[2]).memmap({!r})
"""


@pytest.mark.slow
def test_typed_trees_of_another_program(tmp_path):
    """A typed tree whose class was the other program's own loads as the class that is given."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", SAVE.format(str(tmp_path / "d"))], check=True)

    with pytest.raises(UnsupportedError, match=r"(?s)__main__.*Point.*classes="):
        TensorDict.load_memmap(tmp_path / "d")
    assert TensorDict.load_memmap(tmp_path / "d", classes=TensorDict)["x"].tolist() == [1.0, 1.0]


def _from_the_third(chunk):
    return None if chunk["a"][0] < 2 else chunk


def test_rows_that_are_left_out_of_a_map_with_out():
    """A map that leaves rows out cannot fill a given tree; without one it joins the rest."""
    tree = TensorDict({"a": torch.arange(6)}, [6])

    with pytest.raises(UnsupportedError, match="out"):
        tree.map(_from_the_third, num_workers=0, chunksize=2, out=tree.new_zeros([6]))
    assert tree.map(_from_the_third, num_workers=0, chunksize=2)["a"].tolist() == [2, 3, 4, 5]
