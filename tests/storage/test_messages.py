"""Mistakes in the calls of storage: the class of the error, and the words that its message must have."""

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import CorruptCheckpointError, MissingKeyError, TensorDict
from tests.storage.trees import small_tree

# A call with an empty folder that holds `d`, a memmap of a small tree, and `t.safetensors`, the same as one file.
ROWS = {
    "save: suffix": (lambda p: tdf.save(small_tree(), p / "t.npz"), ValueError, r"expected: \.safetensors[\s\S]*\.npz"),
    "save: no suffix": (lambda p: tdf.save(small_tree(), p / "t"), ValueError, r"expected: \.safetensors[\s\S]*none"),
    "save: torch's suffix": (
        lambda p: tdf.save(small_tree(), p / "t.pt"),
        ValueError,
        r"torch\.save\(td\.state_dict\(\)",
    ),
    "save: a dict": (lambda p: tdf.save({"a": 1}, p / "t.safetensors"), AttributeError, "'dict' object"),
    "save: order": (lambda p: tdf.save("x", small_tree()), TypeError, "TensorDict"),
    "save: a folder": (lambda p: tdf.save(small_tree(), p / "f.safetensors"), IsADirectoryError, r"f\.safetensors"),
    "save: no folder": (lambda p: tdf.save(small_tree(), p / "no" / "t.safetensors"), FileNotFoundError, "folder"),
    "save: shard size": (lambda p: tdf.save(small_tree(), p / "s", max_shard_size="x"), ValueError, "5GB[\\s\\S]*'x'"),
    "save: folder's name": (
        lambda p: tdf.save(small_tree(), p / "x.pt", max_shard_size=9),
        ValueError,
        r"shards are saved in a folder[\s\S]*name a folder",
    ),
    "save: folder above": (
        lambda p: tdf.save(small_tree(), p / "no" / "s", max_shard_size=9),
        OSError,
        "the folder above must exist",
    ),
    "load: like": (lambda p: tdf.load(p / "t.safetensors", like=3), TypeError, r"no shape and dtype\.[\s\S]*int"),
    "load: like's leaf": (
        lambda p: tdf.load(p / "t.safetensors", like={"a": {"b": 3}}),
        TypeError,
        r"at 'a\.b'[\s\S]*int",
    ),
    "load: like's module": (
        lambda p: tdf.load(p / "t.safetensors", like=nn.Linear(1, 1)),
        TypeError,
        r"from_module[\s\S]*Linear",
    ),
    "load: dtype's name": (lambda p: tdf.load(p / "t.safetensors", dtype="float32"), ValueError, "a floating dtype"),
    "load: other file": (
        lambda p: tdf.load(p / "words"),
        CorruptCheckpointError,
        "give the path of a",
    ),
    "open: a dotted key": (
        lambda p: tdf.open(p / "t.safetensors")["n.b"],
        MissingKeyError,
        r"a nested key is a tuple: \('n', 'b'\)",
    ),
    "load: nothing": (lambda p: tdf.load(p / "none.safetensors"), FileNotFoundError, "none"),
    "load: no checkpoint": (lambda p: tdf.load(p / "f.safetensors"), FileNotFoundError, "index.json[\\s\\S]*other.txt"),
    "load: dtype": (lambda p: tdf.load(p / "t.safetensors", dtype=torch.int8), ValueError, "floating"),
    "open: a memmap": (lambda p: tdf.open(p / "d"), FileNotFoundError, "memmap folder"),
    "memmap: shared": (
        lambda p: small_tree().memmap(p / "e", share_non_tensor=True),
        ValueError,
        "share_non_tensor=False",
    ),
    "memmap: path": (lambda p: small_tree().memmap(3), TypeError, "int"),
    "memmap: a file": (
        lambda p: small_tree().memmap(p / "file"),
        FileExistsError,
        "(?s)this is a file.*name of a folder",
    ),
    "memmap: file name": (lambda p: small_tree().memmap(p / "x.safetensors"), ValueError, r"tdfunc\.save"),
    "memmap: exists": (lambda p: small_tree().memmap(p / "d", existsok=False), FileExistsError, "existsok=True"),
    "memmap: other file": (
        lambda p: TensorDict.load_memmap(p / "d").memmap(p / "e"),
        FileExistsError,
        r"(?s)'a'.*expected: .*e/a\.memmap.*got:.*d/a\.memmap.*copy_existing=True",
    ),
    "load_memmap: mode": (lambda p: TensorDict.load_memmap(p / "d", mode="w"), ValueError, "(?s)'w'.*'c'.*'r\\+'"),
    "load_memmap: nothing": (
        lambda p: TensorDict.load_memmap(p / "none"),
        FileNotFoundError,
        "(?s)no such folder.*meta.json.*none",
    ),
    "load_memmap: no meta": (lambda p: TensorDict.load_memmap(p), FileNotFoundError, "has no meta.json"),
    "load_memmap: a file": (lambda p: TensorDict.load_memmap(p / "file"), NotADirectoryError, r"tdfunc\.load"),
}


@pytest.mark.filterwarnings("ignore:unclosed checkpoint:ResourceWarning")
@pytest.mark.parametrize("row", ROWS)
def test_a_mistake_is_answered(row, tmp_path):
    """A mistake in a call gives an error of this class with these words."""
    call, kind, match = ROWS[row]
    small_tree().memmap(tmp_path / "d")
    tdf.save(small_tree(), tmp_path / "t.safetensors")
    (tmp_path / "file").write_text("")
    (tmp_path / "words").write_text("nothing of the kind, in a few words more")
    (tmp_path / "f.safetensors").mkdir()
    (tmp_path / "f.safetensors" / "other.txt").touch()

    with pytest.raises(kind, match=match):
        call(tmp_path)
