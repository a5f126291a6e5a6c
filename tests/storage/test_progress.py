"""Progress bars are shown on terminals, for saves and loads of many bytes, and nowhere else."""

import builtins
import io
import re
import sys
import threading

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.storage import progress

TREE = TensorDict({"large": torch.randn(1000, 1000), "small": torch.ones(3), "n": {"odd": torch.ones(5, 2000).T}})


@pytest.fixture
def shown(monkeypatch, terminal):
    """A terminal where a bar is shown from one byte on, and at once."""
    from tqdm import auto

    class Prompt(auto.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "delay": 0, "mininterval": 0, "miniters": 1})

    monkeypatch.setattr(progress, "_SHOWN_BYTES", 1)
    monkeypatch.setattr(auto, "tqdm", Prompt)
    return terminal


SAVES = {
    "a file": lambda path: tdf.save(TREE, path / "a.safetensors"),
    "shards": lambda path: tdf.save(TREE, path / "shards", max_shard_size=100_000),
    "a step": lambda path: tdf.CheckpointManager(path / "run").save(1, TREE),
}
LOADS = {
    "a file": lambda path: tdf.load(path / "a.safetensors"),
    "shards": lambda path: tdf.load(path / "shards"),
    "a step": lambda path: tdf.CheckpointManager(path / "run").load(),
}


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_shows_its_bytes(kind, tmp_path, shown):
    """The bar goes to the end, once for all shards."""
    SAVES[kind](tmp_path)

    printed = shown.readouterr().err
    assert re.search(r"save .*(100|99)%", printed)
    assert len(set(re.findall(r"/(\S+) \[", printed))) == 1


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_shows_its_bytes(kind, tmp_path, shown):
    """Checksums of all leaves are compared: the bar goes to the end."""
    SAVES[kind](tmp_path)
    shown.readouterr()
    LOADS[kind](tmp_path)

    assert re.search(r"load .*100%", shown.readouterr().err)


@pytest.mark.parametrize("kind", SAVES)
def test_the_tree_comes_back(kind, tmp_path, shown):
    """With a bar the same is written and read."""
    SAVES[kind](tmp_path)

    tdf.assert_close(LOADS[kind](tmp_path), TREE)


def quiet_without_a_terminal(monkeypatch):
    """Nobody would see a bar."""
    monkeypatch.setattr(progress, "_is_off", lambda tqdm: True)


def quiet_below_the_limit(monkeypatch):
    """The tree is small."""
    monkeypatch.setattr(progress, "_SHOWN_BYTES", 10**9)


def quiet_without_tqdm(monkeypatch):
    """The package of bars is not installed."""
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "tqdm":
            raise ModuleNotFoundError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.mark.parametrize("make_quiet", [quiet_without_a_terminal, quiet_below_the_limit, quiet_without_tqdm])
def test_no_bar(make_quiet, tmp_path, shown, monkeypatch):
    """Without a terminal or tqdm, and for few bytes, nothing is printed."""
    make_quiet(monkeypatch)
    SAVES["a file"](tmp_path)
    LOADS["a file"](tmp_path)

    assert shown.readouterr() == ("", "")


def test_no_bar_in_the_background(tmp_path, shown):
    """A save in another thread does not print into the output of the training."""
    thread = threading.Thread(target=SAVES["a file"], args=[tmp_path])
    thread.start()
    thread.join()

    assert shown.readouterr() == ("", "")


@pytest.mark.parametrize("options", [{"show": False}, {"show": True}])
def test_progress_options_without_a_terminal(options, capfd):
    """`progress=True` prints nothing into the log of a job."""
    with progress.progress_bar("a call", unit="step", total=2, **options) as tick:
        tick(2)

    assert capfd.readouterr() == ("", "")


class InNotebook:
    """A class of tqdm for notebooks."""

    __module__ = "tqdm.notebook"


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self):
        """As of a terminal."""
        return True


@pytest.mark.parametrize(
    ("cls", "stderr", "is_off"),
    [(object, io.StringIO, True), (object, Terminal, False), (InNotebook, io.StringIO, False)],
)
def test_where_nobody_sees_a_bar(cls, stderr, is_off, monkeypatch):
    """A bar is off without a terminal, except in a notebook."""
    monkeypatch.setattr(sys, "stderr", stderr())

    assert progress._is_off(cls) == is_off
