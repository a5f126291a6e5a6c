"""What tensordict 0.14.3 does with folders that are damaged, hostile or hard to write, and what happens here instead.

Each test runs theirs, shows it wrong, and ours right. A test that fails on theirs means that they mended it: then the
row, and its line in docs/differences.md, goes.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import tdfunc as tdf
from benchmarks.conformance.faults.models import Payload
from tdfunc import TensorDict
from tests.incumbent import Incumbent, tensordict

# tensordict warns of the pickles that it runs, and of files that torch makes longer.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def ones(*size):
    """A leaf of ones."""
    return torch.ones(*size)


def change_meta(folder, **entries):
    """Write other facts of the leaf `w` into a folder's meta.json."""
    file = folder / "meta.json"
    meta = json.loads(file.read_text())
    meta["w"] |= entries
    file.write_text(json.dumps(meta))


def test_loading_runs_no_code(tmp_path):
    """Theirs unpickles a file of the folder, and so runs the code of its writer."""
    Incumbent({"w": ones(1), "e": tensordict.NonTensorData(Payload(str(tmp_path / "ran")))}, []).memmap(tmp_path / "d")

    Incumbent.load_memmap(tmp_path / "d")
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").rmdir()
    with pytest.raises(tdf.UnsupportedError, match=r"(?s)'e'.*pickle"):
        TensorDict.load_memmap(tmp_path / "d")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["shape", "device", "_type"])
def test_keys_that_are_fields_of_the_format(tmp_path, key):
    """Theirs loses a leaf of this name, with its file on disk and no error."""
    Incumbent({key: ones(2), "w": ones(2)}, []).memmap(tmp_path / "theirs")
    TensorDict({key: ones(2), "w": ones(2)}).memmap(tmp_path / "ours")

    assert list(Incumbent.load_memmap(tmp_path / "theirs").keys()) == ["w"]
    assert list(TensorDict.load_memmap(tmp_path / "ours").keys()) == [key, "w"]


@pytest.mark.parametrize("gone", ["w.memmap", "n"])
def test_a_leaf_or_sub_tree_that_is_missing(tmp_path, gone):
    """Theirs returns a tree without it."""
    for cls, name in ((Incumbent, "theirs"), (TensorDict, "ours")):
        cls({"w": ones(2), "n": {"b": ones(2)}}).memmap(tmp_path / name)
        (tmp_path / name / gone).rename(tmp_path / f"{name} moved")

    assert len(Incumbent.load_memmap(tmp_path / "theirs").keys()) == 1
    with pytest.raises(tdf.CorruptCheckpointError, match="(?s)missing"):
        TensorDict.load_memmap(tmp_path / "ours")


@pytest.mark.parametrize(("facts", "size"), [({"shape": [1000]}, 4000), ({"dtype": "torch.int64"}, 80)])
def test_a_description_that_lies(tmp_path, facts, size):
    """Theirs makes the file longer, by loading it, and returns values that were never saved."""
    for cls, name in ((Incumbent, "theirs"), (TensorDict, "ours")):
        cls({"w": ones(10)}).memmap(tmp_path / name)
        change_meta(tmp_path / name, **facts)

    Incumbent.load_memmap(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "w.memmap").stat().st_size == size
    with pytest.raises(tdf.CorruptCheckpointError, match="(?s)'w'.*tensordict's|tensordict's fields"):
        TensorDict.load_memmap(tmp_path / "ours")
    assert (tmp_path / "ours" / "w.memmap").stat().st_size == 40


def test_a_smaller_tree_over_a_larger_one(tmp_path):
    """Theirs leaves the file of the leaf that is gone, and the end of the one that is shorter."""
    for cls, name in ((Incumbent, "theirs"), (TensorDict, "ours")):
        cls({"w": ones(10), "y": ones(3)}).memmap(tmp_path / name)
        cls({"w": ones(2)}).memmap(tmp_path / name)

    assert sorted(os.listdir(tmp_path / "theirs")) == ["meta.json", "w.memmap", "y.memmap"]
    assert (tmp_path / "theirs" / "w.memmap").stat().st_size == 40
    assert sorted(os.listdir(tmp_path / "ours")) == ["meta.json", "w.memmap"]
    assert (tmp_path / "ours" / "w.memmap").stat().st_size == 8


@pytest.mark.parametrize("linked", [False, True])
def test_a_loaded_tree_is_written_to(tmp_path, linked):
    """Theirs writes to the checkpoint on disk, or to the target of a link in it."""
    files = {}
    for cls, name in ((Incumbent, "theirs"), (TensorDict, "ours")):
        cls({"w": ones(3)}).memmap(tmp_path / name)
        files[name] = leaf = tmp_path / name / "w.memmap"
        if linked:
            files[name] = leaf.rename(tmp_path / f"{name} target")
            leaf.symlink_to(files[name])

    Incumbent.load_memmap(tmp_path / "theirs")["w"].zero_()
    assert files["theirs"].read_bytes() == bytes(12)
    if linked:
        with pytest.raises(tdf.CorruptCheckpointError, match="(?s)'w'.*link"):
            TensorDict.load_memmap(tmp_path / "ours")
    else:
        TensorDict.load_memmap(tmp_path / "ours")["w"].zero_()
    assert files["ours"].read_bytes() == ones(3).numpy().tobytes()


def test_a_key_that_leads_out_of_the_folder(tmp_path):
    """Theirs writes beside the folder, where it is told not to encode keys; here there is no such option."""
    Incumbent({"../esc": ones(3)}, []).memmap(tmp_path / "in" / "theirs", robust_key=False)
    TensorDict({"../esc": ones(3)}).memmap(tmp_path / "in" / "ours")

    assert (tmp_path / "in" / "esc.memmap").exists()
    assert list(TensorDict.load_memmap(tmp_path / "in" / "ours").keys()) == ["../esc"]
    assert os.listdir(tmp_path) == ["in"]
    assert sorted(os.listdir(tmp_path / "in")) == ["esc.memmap", "ours", "theirs"]


@pytest.mark.parametrize(
    "leaves", [{"k" * 300: ones(2)}, {"☃" * 100: ones(2)}, {"a.memmap": {"b": ones(2)}}, {"meta.json": {"b": ones(2)}}]
)
def test_keys_that_are_no_file_names(tmp_path, leaves):
    """Theirs fails after other leaves have been written."""
    with pytest.raises(OSError, match=r"File name too long|Not a directory|Is a directory"):
        Incumbent({"a": ones(1), **leaves}, []).memmap(tmp_path / "theirs")
    assert "a.memmap" in os.listdir(tmp_path / "theirs")

    tree = TensorDict({"a": ones(1), **leaves})
    tree.memmap(tmp_path / "ours")
    assert (TensorDict.load_memmap(tmp_path / "ours") == tree).all()


def test_what_a_folder_keeps(tmp_path):
    """Theirs loses names, Parameters and ties, and stores the tied weight twice."""
    weight = torch.nn.Parameter(ones(2))
    Incumbent({"a": weight, "b": weight}, [2], names=["rows"]).memmap(tmp_path / "theirs")
    theirs = Incumbent.load_memmap(tmp_path / "theirs")
    assert theirs.names == [None]
    assert not theirs["a"].requires_grad
    assert theirs["a"].data_ptr() != theirs["b"].data_ptr()

    layer = torch.nn.Linear(2, 2, bias=False)
    tied = tdf.from_module(torch.nn.ModuleDict({"a": layer, "b": layer}))
    TensorDict({"n": tied, "r": ones(2)}, [2], names=["rows"]).memmap(tmp_path / "ours")
    ours = TensorDict.load_memmap(tmp_path / "ours")
    assert ours.names == ["rows"]
    assert ours["n", "a", "weight"] is ours["n", "b", "weight"]
    assert isinstance(ours["n", "a", "weight"], torch.nn.Parameter)
    assert ours.ties() == [["n.a.weight", "n.b.weight"]]


def test_small_floats(tmp_path):
    """Theirs writes a folder that it cannot load."""
    values = ones(2).to(torch.float8_e4m3fn)
    Incumbent({"w": values}, []).memmap(tmp_path / "theirs")
    TensorDict({"w": values}).memmap(tmp_path / "ours")

    with pytest.raises(KeyError, match="float8_e4m3fn"):
        Incumbent.load_memmap(tmp_path / "theirs")
    assert TensorDict.load_memmap(tmp_path / "ours")["w"].float().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kept", [200, 396, 440])
def test_one_file_that_is_cut_short(tmp_path, kept):
    """Theirs ends in an error of the JSON or Unicode decoder without the name of the file."""
    Incumbent({"w": ones(100)}, []).consolidate(tmp_path / "theirs")
    tdf.save(TensorDict({"w": ones(100)}), tmp_path / "ours.safetensors")
    for file in (tmp_path / "theirs", tmp_path / "ours.safetensors"):
        file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(Exception, match=r"^(?!.*theirs)") as caught:
        Incumbent.from_consolidated(tmp_path / "theirs")
    assert not isinstance(caught.value, OSError)
    with pytest.raises(tdf.CorruptCheckpointError, match="ours.safetensors"):
        tdf.load(tmp_path / "ours.safetensors")


SAVE = """
import torch
from {library} import TensorClass
class Point(TensorClass):
    x: torch.Tensor
    y: torch.Tensor
Point(x=torch.ones(2), y=torch.zeros(2), batch_size=[2]).memmap({folder!r})
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_typed_trees_of_another_program(tmp_path):
    """Theirs cannot load a tree of a script's own class; here `classes=` gives the class."""
    for library in ("tensordict", "tdfunc"):
        code = SAVE.format(library=library, folder=str(tmp_path / library))
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)

    with pytest.raises(Exception, match="Could not find name"):
        Incumbent.load_memmap(tmp_path / "tensordict")
    with pytest.raises(tdf.UnsupportedError, match=r"(?s)__main__.*Point.*classes="):
        TensorDict.load_memmap(tmp_path / "tdfunc")
    assert TensorDict.load_memmap(tmp_path / "tdfunc", classes=TensorDict)["x"].tolist() == [1.0, 1.0]
