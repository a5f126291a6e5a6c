"""Mistakes in the calls of storage: the class of the error, and the words that its message must have."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import AsyncSaver, CheckpointManager, CorruptCheckpointError, MissingKeyError, TensorDict, UnsupportedError
from tdfunc.storage.stream import save_stream
from tests.storage.trees import small_tree

# A call in a folder that holds `d`, a memmap of a small tree, and `t.safetensors`, the same as one file.
RUN, FILE = "run", "t.safetensors"
ROWS = {
    "save: no suffix": (lambda: tdf.save(small_tree(), "t"), ValueError, r"expected: \.safetensors[\s\S]*none"),
    "save: suffix": (lambda: tdf.save(small_tree(), "t.pt"), ValueError, r"expected: \.saf.*\n.*\.pt\n.*torch\.save\("),
    "save: a module": (
        lambda: tdf.save(nn.Linear(1, 1), "n.safetensors"),
        TypeError,
        r"save n\.safetensors: the value is not a tree or a mapping[\s\S]*Linear[\s\S]*from_module",
    ),
    "save: a tensor": (lambda: tdf.save(torch.ones(1), "n.safetensors"), TypeError, "got: +Tensor"),
    "save: int keys": (
        lambda: tdf.save({1: torch.ones(1)}, "n.safetensors"),
        TypeError,
        r"save n\.safe.*\n.*\n.*\[1\]",
    ),
    "saver: a list": (lambda: AsyncSaver().save([1], "n.safetensors"), TypeError, r"save .*n\.safetensors: the value"),
    "save: order": (lambda: tdf.save("x", small_tree()), TypeError, "TensorDict"),
    "save: a folder": (lambda: tdf.save(small_tree(), "f.safetensors"), IsADirectoryError, "this is a folder"),
    "save: no folder": (lambda: tdf.save(small_tree(), "no/t.safetensors"), OSError, "the folder must exist"),
    "save: shard size": (lambda: tdf.save(small_tree(), "s", max_shard_size="x"), ValueError, "5GB[\\s\\S]*'x'"),
    "save: a file for a folder": (
        lambda: tdf.save(small_tree(), "file", max_shard_size=9),
        ValueError,
        r"shards are saved in a folder[\s\S]*name a folder",
    ),
    "save: no name": (lambda: tdf.save(small_tree(), "", max_shard_size=9), OSError, "the folder above must exist"),
    "save: folder above": (lambda: tdf.save(small_tree(), "no/s", max_shard_size=9), OSError, "the folder above must"),
    "load: like": (lambda: tdf.load(FILE, like=3), TypeError, r"like= has no shape and dtype\.[\s\S]*int"),
    "load: like's leaf": (lambda: tdf.load(FILE, like={"a": {"b": 3}}), TypeError, r"at 'a\.b'[\s\S]*int"),
    "load: like's dtype": (lambda: tdf.load(FILE, like={"a": SimpleNamespace(shape=())}), TypeError, r"dtype at 'a'\."),
    "load: like's module": (lambda: tdf.load(FILE, like=nn.Linear(1, 1)), TypeError, r"from_module[\s\S]*Linear"),
    "load: dtype's name": (lambda: tdf.load(FILE, dtype="float32"), ValueError, "a floating dtype"),
    "load: dtype": (lambda: tdf.load(FILE, dtype=torch.int8), ValueError, "floating"),
    "load: other file": (lambda: tdf.load("words"), CorruptCheckpointError, "give the path of a"),
    "load: nothing": (lambda: tdf.load("none.safetensors"), FileNotFoundError, "none"),
    "load: no checkpoint": (lambda: tdf.load("f.safetensors"), FileNotFoundError, "index.json[\\s\\S]*other.txt"),
    "open: a dotted key": (lambda: tdf.open(FILE)["n.b"], MissingKeyError, r"a nested key is a tuple: \('n', 'b'\)"),
    "open: a memmap": (lambda: tdf.open("d"), FileNotFoundError, "memmap folder"),
    "memmap: shared": (lambda: small_tree().memmap("e", share_non_tensor=True), ValueError, "share_non_tensor=False"),
    "memmap: path": (lambda: small_tree().memmap(3), TypeError, "int"),
    "memmap: a file": (lambda: small_tree().memmap("file"), FileExistsError, "(?s)this is a file.*name of a folder"),
    "memmap: file name": (lambda: small_tree().memmap("x.safetensors"), ValueError, r"tdfunc\.save"),
    "memmap: exists": (lambda: small_tree().memmap("d", existsok=False), FileExistsError, "existsok=True"),
    "memmap: other file": (
        lambda: TensorDict.load_memmap("d").memmap("e"),
        FileExistsError,
        r"(?s)'a'.*expected: .*e/a\.memmap.*got:.*d/a\.memmap.*copy_existing=True",
    ),
    "save: other file": (lambda: TensorDict.load_memmap("d").save("e"), FileExistsError, "copy_existing=True"),
    "dumps: other file": (lambda: TensorDict.load_memmap("d").dumps("e"), FileExistsError, "copy_existing=True"),
    "load_memmap: mode": (lambda: TensorDict.load_memmap("d", mode="w"), ValueError, "(?s)'c'.*'r\\+'.*got:.*'w'"),
    "load_memmap: path": (lambda: TensorDict.load_memmap(3), TypeError, "int"),
    "load_memmap: nothing": (
        lambda: TensorDict.load_memmap("none"),
        FileNotFoundError,
        "(?s)the folder does not exist.*meta.json.*none",
    ),
    "load_memmap: no meta": (lambda: TensorDict.load_memmap("."), FileNotFoundError, "has no meta.json"),
    "load_memmap: a file": (lambda: TensorDict.load_memmap("file"), NotADirectoryError, r"tdfunc\.load"),
    "a step below 0": (
        lambda: CheckpointManager(RUN).save(-1, small_tree()),
        ValueError,
        r"(?s)save: .*least 0.*-1",
    ),
    "a step that is text": (
        lambda: CheckpointManager(RUN).save("1", small_tree()),
        TypeError,
        "whole number(?s:.*)'1'",
    ),
    "a manager of a URL": (lambda: CheckpointManager("s3://b/run"), UnsupportedError, "CheckpointManager s3://b/run"),
    "memmap: a URL": (lambda: small_tree().memmap("s3://b/m"), UnsupportedError, r"s3://b/m: (?s:.*)of this machine"),
    "load_memmap: a URL": (lambda: TensorDict.load_memmap("s3://b/m"), UnsupportedError, "load_memmap s3://b/m"),
    "load: a protocol": (lambda: tdf.load("nosuch://x/t.safetensors"), ValueError, "nosuch"),
    "stream: complex128": (
        lambda: save_stream(TensorDict({"x": torch.zeros(2, dtype=torch.complex128)}), iter, "n.safetensors"),
        UnsupportedError,
        r'leaf "x"[\s\S]*got: .*complex128',
    ),
    "stream: suffix": (lambda: save_stream(small_tree(), iter, "x.pt"), ValueError, r"expected: .safetensors\n.*\.pt"),
    "half a step": (lambda: CheckpointManager(RUN).save(1.5, small_tree()), TypeError, r"save: the step(?s:.*)1\.5"),
    "NUL in a path": (lambda: tdf.load("a\0b"), ValueError, r"NUL(?s:.*)a\\x00b"),
    "load: torch.save's": (lambda: tdf.load("x.pt"), UnsupportedError, r"x\.pt: (?s:.*)tdfunc convert"),
    "a list for a tree": (lambda: CheckpointManager(RUN).save(0, [1]), TypeError, "save .*run: the value is not"),
    "no step kept": (lambda: CheckpointManager(RUN, keep_last=0), ValueError, r"(?s)keep_last must be at least 1.*0"),
    "no best kept": (
        lambda: CheckpointManager(RUN, keep_best=0, metric="m"),
        ValueError,
        "keep_best must be",
    ),
    "best without a metric": (lambda: CheckpointManager(RUN, keep_best=1), ValueError, "keep_best needs a metric"),
    "another mode": (lambda: CheckpointManager(RUN, mode="low"), ValueError, "(?s)'min', 'max'.*'low'"),
    "best() without a metric": (lambda: CheckpointManager(RUN).best(), ValueError, "(?s)best: .*metric="),
    "a metric that is text": (
        lambda: CheckpointManager(RUN, metric="loss").save(0, small_tree(), metadata={"loss": "low"}),
        TypeError,
        r"(?s)metric 'loss'.*int or float.*'low'",
    ),
    "shards of a step": (lambda: CheckpointManager(RUN, max_shard_size=0), ValueError, "max_shard_size"),
    "places of a manager": (
        lambda: CheckpointManager(RUN, max_pending=0),
        ValueError,
        "max_pending must be at least 1",
    ),
    "places of a saver": (lambda: AsyncSaver(max_pending=0), ValueError, "max_pending must be at least 1"),
    "saver: suffix": (lambda: AsyncSaver().save(small_tree(), "t.pt"), ValueError, r"expected: \.safetensors\n.*\.pt"),
    "saver: shards": (lambda: AsyncSaver().save(small_tree(), "m", max_shard_size=0), ValueError, "max_shard_size"),
    "saver: folder": (
        lambda: AsyncSaver().save(small_tree(), "m.ckpt", max_shard_size=9),
        ValueError,
        "name of a folder",
    ),
}


@pytest.mark.filterwarnings("ignore:unclosed checkpoint:ResourceWarning")
@pytest.mark.parametrize("row", ROWS)
def test_messages(row, tmp_path, monkeypatch):
    """A mistake in a call gives an error of this class with these words, and nothing is written."""
    call, kind, match = ROWS[row]
    monkeypatch.chdir(tmp_path)
    small_tree().memmap("d")
    tdf.save(small_tree(), FILE)
    (tmp_path / "file").write_text("")
    torch.save({"w": torch.ones(1)}, "x.pt")
    (tmp_path / "words").write_text("nothing of the kind, in a few words more")
    (tmp_path / "f.safetensors").mkdir()
    (tmp_path / "f.safetensors" / "other.txt").touch()
    before = sorted(os.listdir())

    with pytest.raises(kind, match=match):
        call()
    assert sorted(os.listdir()) == before
