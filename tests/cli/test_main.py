"""The program `tdfunc`: exit codes, errors in words, pipes, completion, and what it must not import."""

import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tdfunc import CheckpointManager, TensorDict, cli, save
from tdfunc.cli import app
from tdfunc.weights import METHODS
from tests.cli.helpers import run


@pytest.fixture
def path(tmp_path):
    """A checkpoint."""
    save(TensorDict({"w": torch.ones(3), "i": torch.arange(2)}), tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/tdfunc-was-here",))


def archive(*names):
    """A function that writes a zip archive of another program."""

    def make(path):
        with zipfile.ZipFile(path, "w") as made:
            for name in names:
                made.writestr(name, "")

    return make


EVIL = partial(torch.save, {"w": Evil()})
RUN = lambda path: CheckpointManager(path).save(1, TensorDict({"w": torch.ones(3)}))  # noqa: E731
TWICE = lambda path: TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}).memmap(path)  # noqa: E731
MERGE = ["merge", "{p}", "-o", "{tmp}/o", "--method"]
AVERAGE = ["average", "{p}", "{p}", "-o", "{tmp}/o.safetensors", "--weights"]
# (what makes the file {f}, arguments, pattern)
TROUBLE = [
    (None, ["show", "{tmp}/none"], r"none: No such file"),
    (None, ["show", "{tmp}"], r"the folder has no checkpoint"),
    (None, ["show", "{p}", "--filter", "x*"], r"the pattern 'x\*' matches no leaf"),
    (None, ["diff", "{p}"], r"Missing argument"),
    *((None, ["diff", "{p}", "{p}", "--tol", tol], rf"'{tol}' is not RTOL or") for tol in ("1/2/3", "x", "1/inf")),
    (None, ["convert", "{p}", "{tmp}/x.npz"], r"name does not fit the format[\s\S]*--to shards"),
    (None, ["convert", "{p}", "{tmp}/x.pt", "--to", "memmap"], r"got:      .*x\.pt as memmap"),
    (None, ["convert", "{p}", "{tmp}/x", "--to", "safetensors"], r"expected: x\.safetensors"),
    (None, ["convert", "{p}", "{tmp}/x", "--max-shard-size", "0B"], r"max_shard_size"),
    (
        None,
        ["convert", "{p}", "{tmp}/x.pt", "--to", "torch", "--max-shard-size", "1GB"],
        r"only for a folder of shards",
    ),
    (None, ["convert", "{p}", "{p}/x", "--to", "shards"], r"t\.safetensors"),
    (None, ["convert", "{p}", "file://{p}"], r"t\.safetensors exists[\s\S]*--force replaces it"),
    (None, ["convert", "{p}", "{tmp}/none/x.safetensors"], r"No such file or directory"),
    (None, ["convert", "{p}", "memory://x.pt"], r"torch cannot be written to a URL"),
    (None, ["convert", "{p}", "{tmp}", "--to", "memmap", "--force"], r"not part of a memmapped tree"),
    (None, ["cast", "{p}", "-o", "{tmp}/o.safetensors", "--dtype", "int8"], r"floating dtype[\s\S]*'int8'"),
    (None, ["extract", "{p}", "-o", "{tmp}/o.safetensors"], r"no\s+pattern\s+chooses\s+leaves"),
    (None, [*AVERAGE, "1"], r"1 number for 2 checkpoints"),
    (None, [*AVERAGE, "1,x"], r"not a list of numbers"),
    (None, [*AVERAGE, "1,-1"], r"a sum of 0"),
    (None, [*AVERAGE, "1,inf"], r"a number that is not finite"),
    (None, MERGE[:-1], r"give\s+either\s+--config"),
    (None, ["merge", "-o", "{tmp}/o", "--config", "{p}", "--option", "x=1"], r"give\s+either\s+--config"),
    (None, [*MERGE, "linear", "--weight=1", "--weight=2"], r"one --weight for each model"),
    (None, [*MERGE, "ties", "--base", "{p}", "--option", "x"], r"NAME=VALUE"),
    (None, [*MERGE, "ties", "--base", "{p}", "--option", "x=1"], r"parameters: x"),
    (EVIL, ["show", "{f}"], r"more than tensors and plain data[\s\S]*posix\.mkdir"),
    (EVIL, ["convert", "{f}", "{tmp}/o.safetensors"], r"more than tensors and plain data"),
    (lambda f: torch.save({"s": torch.eye(2).to_sparse()}, f), ["show", "{f}"], r"the value at 's'[\s\S]*sparse_coo"),
    (archive("a.txt"), ["show", "{f}"], r"f: this is a zip archive"),
    (
        archive("p/constants.pkl", "p/data.pkl"),
        ["verify", "{f}"],
        r"f: this is a program of TorchScript[\s\S]*torch\.jit",
    ),
    (os.mkfifo, ["verify", "{f}"], r"f is not a file or a folder"),
    (os.mkfifo, ["convert", "{p}", "{f}", "--to", "shards", "--force"], r"f is a file, and the result a folder"),
    (RUN, ["convert", "{p}", "{f}", "--to", "shards", "--force"], r"f belongs to a"),
    (RUN, ["convert", "{p}", "{f}", "--to", "memmap", "--force"], r"f belongs to a"),
    (RUN, ["convert", "{p}", "{f}/step-0000000001", "--to", "shards", "--force"], r"belongs to a"),
    (RUN, ["convert", "{p}", "{f}/step-0000000001/model.safetensors", "--force"], r"belongs to a"),
    (TWICE, ["convert", "{f}", "{tmp}/x.pt"], r"two paths become the name 'a\.b'"),
    (None, ["convert", "{p}", "/"], r"tdfunc: /: the name does not fit"),
    (None, ["show", "--", "--debug"], r"--debug: No such file"),
    (None, ["show", "{tmp}/a\nb"], r"a\\nb: No such file"),
]


@pytest.mark.parametrize(("make", "args", "text"), TROUBLE)
def test_trouble_is_told(make, args, text, tmp_path, path):
    """A mistake is told in a few lines on stderr, with exit code 2, and nothing is written."""
    files = lambda: {one: one.read_bytes() if one.is_file() else None for one in tmp_path.rglob("*")}  # noqa: E731
    if make is not None:
        make(tmp_path / "f")

    before, result = files(), run(*[arg.format(p=path, f=tmp_path / "f", tmp=tmp_path) for arg in args])

    # The box around a usage error is folded.
    shown = re.sub(r"[ │]*\n[ │]*(?! )", "\n", result.err)
    assert result.code == 2
    assert result.out == ""
    assert re.search(text, shown), shown
    assert "Traceback" not in result.err
    assert files() == before
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
    assert "tdfunc: OSError: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run_show", "app"])
def test_interrupted(name, path, monkeypatch):
    """Ctrl-C ends a command without a traceback, also before it has begun."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, name, stop)

    assert run("show", path).code == 130


def test_version():
    """It is that of the package."""
    assert run("--version").out == f"tdfunc {version('tdfunc')}\n"


@pytest.mark.parametrize(
    "name", ["show", "diff", "verify", "convert", "extract", "cast", "average", "--install-completion", "--debug"]
)
def test_the_help_lists_every_command(name):
    """And the options of the program."""
    assert name in run("--help").out


@pytest.mark.parametrize("name", ["diff", "verify"])
def test_the_help_of_a_command_that_compares_has_its_exit_codes(name):
    """Scripts read them."""
    assert "Exit code: 0" in run(name, "--help").out


def test_methods_are_listed():
    """Every one, in order."""
    assert [line.split()[0] for line in run("methods").out.splitlines()[1:]] == list(METHODS)


# -- a process of its own ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipes(path):
    """`tdfunc show x | head -1` prints no error: the signal of a pipe without a reader ends it."""
    many = path.parent / "many.safetensors"
    save(TensorDict({f"{i:0100d}": torch.ones(1) for i in range(2000)}), many)

    command, pipe = [sys.executable, "-m", "tdfunc", "show", many], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline().startswith(str(many))
        process.stdout.close()
        assert process.wait(120) == -signal.SIGPIPE
        assert process.stderr.read() == ""


def test_without_its_packages_the_command_names_the_extra(monkeypatch):
    """`tdfunc.cli` imports neither typer nor rich before it checks that they are installed."""
    for name in [name for name in sys.modules if name.startswith("tdfunc.cli")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rich", "typer"):
        monkeypatch.setitem(sys.modules, name, None)
    # The new module is put here as well.
    monkeypatch.setattr("tdfunc.cli", cli)

    with pytest.raises(SystemExit, match=r"needs rich and typer: pip install 'tdfunc\[cli\]'"):
        importlib.import_module("tdfunc.cli").main([])


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
    save(TensorDict({"one": torch.randn(40_000_000), "n": {str(i): torch.randn(4_000_000) for i in range(5)}}), path)
    models = [path.with_name(name) for name in "ab"]
    for model in models:
        save(TensorDict({str(j): torch.randn(250_000) for j in range(120)}), model, max_shard_size="1GB")
    base = peak_bytes("--version")
    commands = [
        ("average", path, path, "-o", tmp_path / "a.safetensors"),
        ("convert", path, tmp_path / "folder", "--to", "memmap"),
        ("convert", tmp_path / "folder", tmp_path / "shards", "--to", "shards", "--max-shard-size", "100MB"),
        ("cast", tmp_path / "shards", "-o", tmp_path / "c.safetensors", "--dtype", "bf16"),
        ("diff", path, tmp_path / "folder", "--values"),
        ("show", path, "--stats"),
        ("verify", path),
        ("merge", models[1], "--base", models[0], "-o", tmp_path / "m", "--method", "ties"),
    ]

    # The file has 240 MB, one leaf of it 160 MB; each model has 120 MB.
    sizes = {command: peak_bytes(*command) - base for command in commands}
    assert {command: size for command, size in sizes.items() if size >= 100e6} == {}


def test_the_module_is_the_program(monkeypatch, capsys):
    """`python -m tdfunc` takes the same arguments; the test keeps its own signal of a broken pipe."""
    runpy.run_module("tdfunc.__main__")
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda *args: handlers.append(args))
    monkeypatch.setattr(sys, "argv", ["tdfunc", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tdfunc", run_name="__main__")

    assert ended.value.code in (0, None)
    assert handlers == [(signal.SIGPIPE, signal.SIG_DFL)]
    assert version("tdfunc") in capsys.readouterr().out
