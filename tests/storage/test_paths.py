"""Names of files and folders: relative ones, empty ones, and ones that are none."""

import os
from functools import partial

import pytest

import tdfunc
from tdfunc import AsyncSaver, CheckpointManager, TensorDict
from tests.storage.scripts import tree_of, value_of


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    """Two folders, the first of which is the current one."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    return tmp_path / "a", tmp_path / "b"


def read(path):
    """Wait until a pipe is written to."""
    path.read_text()
    return path


def test_a_background_save_stays_where_it_was_submitted(two_folders):
    """A save goes to the folder that was current when it was submitted."""
    first, second = two_folders
    with AsyncSaver(max_pending=9) as saver:
        os.mkfifo("wait")
        # The queue is busy until the folder has changed.
        saver._queue.submit(first / "busy", lambda: partial(read, first / "wait"), lambda: first)
        handles = [saver.save(tree_of(1), "x.safetensors"), saver.save(tree_of(2), "shards", max_shard_size=8)]
        os.chdir(second)
        (first / "wait").write_text("go on")

    assert [handle.result() for handle in handles] == [first / "x.safetensors", first / "shards"]
    assert os.listdir(second) == []
    assert value_of(tdfunc.load(first / "x.safetensors")) == 1
    assert value_of(tdfunc.load(first / "shards")) == 2


@pytest.mark.parametrize("in_background", [False, True])
def test_a_manager_stays_where_it_was_made(in_background, two_folders):
    """A manager stays in the folder that was current when it was made."""
    first, second = two_folders
    manager = CheckpointManager("run", keep_last=1, async_save=in_background)
    manager.save(1, tree_of(1))
    manager.wait()

    os.chdir(second)
    manager.save(2, tree_of(2))
    manager.wait()

    assert os.listdir(second) == []
    assert manager.steps() == [2]
    assert value_of(manager.load()) == 2
    assert manager.path(2) == first / "run" / "step-0000000002"


def test_mapped_files_stay_where_they_are(two_folders):
    """Mapped files are found after a change of the current folder."""
    first, second = two_folders
    tree = tree_of(1).memmap("m")
    own = TensorDict.load_memmap("m", mode="r+")
    os.chdir(second)

    tree["w"].fill_(2)
    own.memmap_refresh_()

    assert own["w"].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda name: tdfunc.save(tree_of(1), name, max_shard_size=8), id="save"),
        pytest.param(lambda name: tree_of(1).memmap(name), id="memmap"),
        pytest.param(TensorDict.load_memmap, id="load_memmap"),
    ],
)
@pytest.mark.parametrize("name", ["", b""])
def test_empty_names_write_nothing(name, call, two_folders):
    """A variable that was never set saves neither to the root of the file system nor over the program's own files."""
    with pytest.raises(OSError, match="folder"):
        call(name)
    assert os.listdir() == []


@pytest.mark.parametrize("name", [".", "./", "..", "../a", "here", "own"])
@pytest.mark.parametrize("call", ["memmap", "memmap_", "memmap_like", "save"])
def test_a_memmap_in_place_of_the_current_folder(name, call, two_folders):
    """A folder that holds the current one is not replaced."""
    here = two_folders[0]
    TensorDict({"n": tree_of(0)}).memmap(here / "own")
    os.symlink(here, here / "here")
    os.chdir({"own": here / "own" / "n", "..": here / "own" / "n"}.get(name, here))
    given = here / name if name in ("own", "here") else name

    with pytest.raises(FileExistsError, match=r"(?s)contains the current.*got:      the current folder .*\./tree"):
        getattr(tree_of(1), call)(given)

    assert os.getcwd()
    assert value_of(TensorDict.load_memmap(here / "own")["n"]) == 0
    assert tree_of(1).memmap("tree")["w"].tolist() == [1, 1, 1, 1]


def test_a_memmap_from_a_folder_that_is_gone(two_folders, tmp_path):
    """A program whose current folder was deleted writes to others."""
    os.mkdir(tmp_path / "gone")
    os.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")

    assert value_of(tree_of(1).memmap(tmp_path / "tree")) == 1


@pytest.mark.parametrize(
    "name",
    [b"bytes", "é中", os.fsdecode(b"\xff"), " ", "x" * 243],
    ids=["bytes", "letters", "no text", "space", "long"],
)
def test_paths_of_every_kind(two_folders, name):
    """Every call takes names of bytes, of the greatest length, and with letters that are not text."""
    file = os.fsdecode(name) + ".safetensors"
    tdfunc.save(tree_of(1), file)
    tree_of(2).memmap(name)
    manager = CheckpointManager(os.fsencode(name) + b"-run")
    manager.save(1, tree_of(3))

    assert value_of(tdfunc.load(file)) == 1
    assert value_of(TensorDict.load_memmap(name)) == 2
    assert value_of(manager.load()) == 3
    assert len(os.listdir()) == 3
