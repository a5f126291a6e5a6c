"""The program `tdfunc`: exit codes, errors in words, pipes, completion, and what it must not import."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tdfunc import TensorDict, cli, save
from tdfunc.cli import app
from tests.cli.helpers import child, run


@pytest.fixture
def path(tmp_path):
    """A checkpoint."""
    save(TensorDict({"w": torch.ones(3), "i": torch.arange(2)}), tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/tdfunc-was-here",))


def evil(folder):
    """A file of torch.save with code that runs when it is unpickled."""
    torch.save({"w": Evil()}, folder / "evil.pt")
    return folder / "evil.pt"


def sparse(folder):
    """A file of torch.save with a tensor that no tree of ours holds."""
    torch.save({"s": torch.eye(2).to_sparse()}, folder / "sparse.pt")
    return folder / "sparse.pt"


def archive(folder):
    """A zip archive of another program."""
    with zipfile.ZipFile(folder / "x.zip", "w") as made:
        made.writestr("a.txt", "hello")
    return folder / "x.zip"


def program(folder):
    """A program of torch.jit, which is an archive too."""
    with zipfile.ZipFile(folder / "p.pt", "w") as made:
        for name in ("p/constants.pkl", "p/data.pkl", "p/code/x.py"):
            made.writestr(name, "")
    return folder / "p.pt"


def pipe(folder):
    """A path that is neither a file nor a folder."""
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


TROUBLE = [
    (None, ["show", "{tmp}/none"], r"none: No such file"),
    (None, ["show", "{tmp}"], r"the folder must hold a checkpoint"),
    (None, ["show", "{p}", "--filter", "x*"], r"the pattern 'x\*' matches no leaf"),
    (None, ["diff", "{p}"], r"Missing argument"),
    (None, ["diff", "{p}", "{p}", "--tol", "1/2/3"], r"'1/2/3' must be RTOL or RTOL/ATOL"),
    (None, ["convert", "{p}", "{tmp}/x.npz"], r"name must fit the format[\s\S]*--to shards"),
    (None, ["convert", "{p}", "{tmp}/x.pt", "--to", "memmap"], r"got:      .*x\.pt as memmap"),
    (None, ["convert", "{p}", "{tmp}/x", "--to", "safetensors"], r"expected: x\.safetensors"),
    (None, ["convert", "{p}", "{tmp}/x", "--max-shard-size", "0B"], r"max_shard_size"),
    (None, ["convert", "{p}", "{tmp}/x.pt", "--to", "torch", "--max-shard-size", "1GB"], r"with a folder of shards"),
    (None, ["convert", "{p}", "{p}/x", "--to", "shards"], r"t\.safetensors"),
    (None, ["convert", "{p}", "file://{p}"], r"t\.safetensors exists[\s\S]*--force replaces it"),
    (None, ["convert", "{p}", "{tmp}/none/x.safetensors"], r"No such file or directory"),
    (None, ["convert", "{p}", "memory://x.pt"], r"must be local for torch"),
    (None, ["convert", "{p}", "{tmp}", "--to", "memmap", "--force"], r"not part of a memmapped tree"),
    (None, ["cast", "{p}", "-o", "{tmp}/o.safetensors", "--dtype", "int8"], r"floating dtype[\s\S]*'int8'"),
    (None, ["extract", "{p}", "-o", "{tmp}/o.safetensors"], r"must choose\s+leaves"),
    (None, ["average", "{p}", "{p}", "-o", "{tmp}/o.safetensors", "--weights", "1"], r"expected: 2 numbers"),
    (None, ["average", "{p}", "{p}", "-o", "{tmp}/o.safetensors", "--weights", "1,x"], r"must be numbers"),
    (None, ["average", "{p}", "{p}", "-o", "{tmp}/o.safetensors", "--weights", "1,-1"], r"sum other than 0"),
    (None, ["average", "{p}", "-o", "{tmp}/o.safetensors", "--weights", "inf"], r"a finite number"),
    (None, ["merge", "{p}", "-o", "{tmp}/o"], r"must\s+be\s+given"),
    (
        None,
        ["merge", "{p}", "-o", "{tmp}/o", "--method", "linear", "--weight=1", "--weight=2"],
        r"must have a --weight",
    ),
    (None, ["merge", "{p}", "-o", "{tmp}/o", "--method", "ties", "--base", "{p}", "--option", "x"], r"NAME=VALUE"),
    (None, ["merge", "{p}", "-o", "{tmp}/o", "--method", "ties", "--base", "{p}", "--option", "x=1"], r"parameters: x"),
    (evil, ["show", "{f}"], r"only tensors and plain data[\s\S]*posix\.mkdir"),
    (evil, ["convert", "{f}", "{tmp}/o.safetensors"], r"only tensors and plain data"),
    (sparse, ["show", "{f}"], r"contain the value at 's'[\s\S]*sparse_coo"),
    (archive, ["show", "{f}"], r"x\.zip must be a file of torch\.save[\s\S]*a\.txt"),
    (program, ["verify", "{f}"], r"p\.pt must be a file of torch\.save[\s\S]*torch\.jit"),
    (pipe, ["verify", "{f}"], r"pipe must be a file or a folder"),
    (None, ["show", "{tmp}/a\nb"], r"a\\nb: No such file"),
]


@pytest.mark.parametrize(("make", "args", "text"), TROUBLE)
def test_trouble_is_told(make, args, text, tmp_path, path):
    """A mistake is told in a few lines on stderr, with exit code 2, and nothing is written."""
    made = make(tmp_path) if make is not None else path
    before = sorted(tmp_path.rglob("*"))

    result = run(*[arg.format(p=path, f=made, tmp=tmp_path) for arg in args])

    # The box around a usage error is folded.
    shown = re.sub(r"[ │]*\n[ │]*(?! )", "\n", result.err)
    assert result.code == 2
    assert result.out == ""
    assert re.search(text, shown), shown
    assert "Traceback" not in result.err
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/tdfunc-was-here").exists()


def test_debug_shows_the_traceback(tmp_path):
    """`--debug` shows the traceback, with the code of trouble."""
    result = run("diff", "--debug", tmp_path / "none", tmp_path / "none")

    assert result.code == 2
    assert result.err.startswith("tdfunc: Traceback (most recent call last):\n  File ")
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path / 'none'}'" in result.err


def test_a_full_disk(path, capsys):
    """Output that cannot be written is trouble, not success."""
    with open("/dev/full", "w") as full, redirect_stdout(full), pytest.raises(SystemExit) as stop:
        cli.main(["show", str(path)])

    assert stop.value.code == 2
    assert "No space left on device" in capsys.readouterr().err


def test_interrupted(path, monkeypatch):
    """Ctrl-C ends a command without a traceback."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run_show", stop)

    assert run("show", path).code == 130


def test_version_and_help():
    """--version is that of the package, and the help lists every command."""
    shown = run("--help").out

    assert run("--version").out == f"tdfunc {version('tdfunc')}\n"
    for name in ("show", "diff", "verify", "convert", "extract", "cast", "average", "--install-completion", "--debug"):
        assert name in shown
    for name in ("diff", "verify"):
        assert "Exit code: 0" in run(name, "--help").out


# -- a process of its own ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipes(path):
    """`tdfunc show x | head -1` prints no error: the signal of a pipe without a reader ends it."""
    many = path.parent / "many.safetensors"
    save(TensorDict({f"{i:0100d}": torch.ones(1) for i in range(2000)}), many)

    with subprocess.Popen(child("show", many), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith(str(many))
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (-signal.SIGPIPE, "")


@pytest.mark.slow
def test_import_of_tdfunc_needs_no_extra():
    """`import tdfunc` imports neither typer nor rich."""
    code = "import tdfunc, tdfunc.cli, sys, json; print(json.dumps([m for m in ('typer', 'rich') if m in sys.modules]))"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert json.loads(result.stdout) == []


PEAK = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "tdfunc", *sys.argv[1:]], stdout=subprocess.DEVNULL)
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(*args):
    """The most memory that a command had, mapped files included."""
    command = [sys.executable, "-c", PEAK, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    code, size = result.stdout.split()
    assert code == "0", result.stderr
    return int(size)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """The memory of a command does not grow with the checkpoint."""
    path = tmp_path / "t.safetensors"
    save(TensorDict({"one": torch.randn(50_000_000), "n": {str(i): torch.randn(5_000_000) for i in range(10)}}), path)
    base = peak_bytes("--version")
    commands = [
        ("average", path, path, "-o", tmp_path / "a.safetensors"),
        ("convert", path, tmp_path / "folder", "--to", "memmap"),
        ("convert", tmp_path / "folder", tmp_path / "shards", "--to", "shards", "--max-shard-size", "100MB"),
        ("cast", tmp_path / "shards", "-o", tmp_path / "c.safetensors", "--dtype", "bf16"),
        ("diff", path, tmp_path / "folder", "--values"),
        ("show", path, "--stats"),
        ("verify", path),
    ]

    # The file has 400 MB, one leaf of it 200 MB.
    for command in commands:
        assert peak_bytes(*command) - base < 100e6, command


def test_the_module_is_the_program(monkeypatch, capsys):
    """`python -m tdfunc` takes the same arguments; the test keeps its own signal of a broken pipe."""
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda *args: handlers.append(args))
    monkeypatch.setattr(sys, "argv", ["tdfunc", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tdfunc", run_name="__main__")

    assert ended.value.code in (0, None)
    assert handlers == [(signal.SIGPIPE, signal.SIG_DFL)]
    assert version("tdfunc") in capsys.readouterr().out
