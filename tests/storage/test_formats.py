"""Files of other formats are named as what they are, by the same table for `load`, `open` and the commands."""

import bz2
import gzip
import io
import lzma
import pickle
import shutil
import subprocess
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc
from tdfunc import CorruptCheckpointError, UnsupportedError
from tests.cli.helpers import run


def saved(save, *args, **options):
    """The bytes that a function writes into a file."""
    file = io.BytesIO()
    save(file, *args, **options)
    return file.getvalue()


def script(file):
    """Write a program of TorchScript."""
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)


def export(file):
    """Write a program of torch.export."""
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), file)


def archive(file):
    """Write a zip archive."""
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.txt", "x")


def tar(file):
    """Write a tar archive."""
    with tarfile.open(fileobj=file, mode="w") as made:
        made.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
OTHERS = {
    "torch.save": (lambda: saved(lambda f: torch.save({"w": torch.ones(2)}, f)), "a file of torch.save"),
    "torch.jit": (lambda: saved(script), "a program of TorchScript"),
    "torch.export": (lambda: saved(export), "a program of torch.export"),
    "npz": (lambda: saved(np.savez, x=np.ones(3)), "an archive of numpy arrays"),
    "npy": (lambda: saved(np.save, np.ones(3)), "a numpy array"),
    "zip": (lambda: saved(archive), "a zip archive"),
    "tar": (lambda: saved(tar), "a tar archive"),
    "pickle": (lambda: pickle.dumps({"w": [1.0] * 9}), "a pickle of Python"),
    "onnx": (lambda: b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + b":\x03abc", "a model of ONNX"),
    "gguf": (lambda: b"GGUF\x03\0\0\0" + b"\0" * 64, "a GGUF file"),
    "hdf5": (lambda: b"\x89HDF\r\n\x1a\n" + b"\0" * 64, "an HDF5 file"),
    "gzip": (lambda: gzip.compress(b"x" * 99), "a gzip file"),
    "bzip2": (lambda: bz2.compress(b"x" * 99), "a bzip2 file"),
    "xz": (lambda: lzma.compress(b"x" * 99), "an xz file"),
    "flax": (lambda: b"\x81\xa6params\x81\xa5Dense\xc7\x10\x01" + b"\0" * 64, "a msgpack file"),
    "msgpack": (lambda: b"\xde\x00\x20\xd9\x28" + b"long_name_" * 9, "a msgpack file"),
    "parquet": (lambda: b"PAR1" + b"\x15" * 64, "a Parquet file"),
}
# What stands in place of the weights.
PLACEHOLDERS = {
    "git-lfs": (POINTER, r"a pointer of git-lfs[\s\S]*git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML or XML page"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an HTML or XML page"),
    "json": (b'{"error": "Repository not found", "status": 404}', "this is JSON"),
    "text": (b"Invalid username or password.", "this is text"),
}


@pytest.mark.parametrize("read", [tdfunc.load, tdfunc.open], ids=["load", "open"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_other_formats_are_named(name, read, tmp_path):
    """A file of another format is refused by its name."""
    make, says = OTHERS[name]
    (tmp_path / "x.safetensors").write_bytes(make())

    with pytest.raises(UnsupportedError, match=rf"x\.safetensors: this is {says}[\s\S]*hint"):
        read(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_placeholders_are_named(name, tmp_path):
    """A file that stands in place of the weights counts as damage, and is named."""
    raw, says = PLACEHOLDERS[name]
    (tmp_path / "x.safetensors").write_bytes(raw)

    with pytest.raises(CorruptCheckpointError, match=says):
        tdfunc.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("command", [["show"], ["verify"], ["convert", "{}"]], ids=lambda command: command[0])
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "torch.save"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_commands_name_other_formats(name, command, tmp_path):
    """A command names a file of another format by the same words, in a few lines."""
    make, says = OTHERS[name]
    path = tmp_path / "x.bin"
    path.write_bytes(make())
    first, *rest = [arg.format(tmp_path / "o.safetensors") for arg in command]

    result = run(first, path, *rest)

    assert result.code == 2
    assert f"this is {says}" in result.err
    assert len(result.err.splitlines()) <= 5


@pytest.mark.parametrize("name", ["gzip", "bzip2", "xz", "tar"])
def test_hints_unpack(name, tmp_path):
    """The program of the hint unpacks the file."""
    suffix = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz", "tar": ".tar"}[name]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(OTHERS[name][0]())
    shutil.copy(path, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError) as caught:
        tdfunc.load(tmp_path / "x.safetensors")
    hint = str(caught.value).split("hint:")[1].strip().rstrip(".").replace("FILE", path.name)
    (tmp_path / "x.safetensors").unlink()
    if shutil.which(hint.split()[0]) is None:
        pytest.skip(f"{hint} is not installed")

    assert subprocess.run(hint.split(), cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("npz", "tdfunc.save(dict(numpy.load(path)), 'x.safetensors')"),
        ("npy", "tdfunc.save({'x': numpy.load(path)}, 'x.safetensors')"),
    ],
)
def test_hints_of_numpy_save_the_arrays(name, line, tmp_path, monkeypatch):
    """The line of the hint writes the arrays as a checkpoint."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"a.{name}"
    path.write_bytes(OTHERS[name][0]())
    with pytest.raises(UnsupportedError) as caught:
        tdfunc.load(path)
    assert line in str(caught.value)

    exec(line, {"tdfunc": tdfunc, "numpy": np, "path": path})
    assert tdfunc.load("x.safetensors")["x"].tolist() == [1.0, 1.0, 1.0]
