"""Saves and loads everything where calls lack: `python -m tests.platforms.script LEVEL all FOLDER`.

`save` and `check` in place of `all` are for tests that kill the process: one saves for ever, and one reads.
"""

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

from tests.platforms.less import VARIABLE, take_away

if os.environ.get(VARIABLE) is None:
    take_away(sys.argv[1])

import torch  # noqa: E402

import tdfunc as tdf  # noqa: E402
from tdfunc.core.system import platform  # noqa: E402

_LEAVES = 12


def tree_of(value):
    """A tree whose leaves all hold one value."""
    leaves = {str(i): torch.full((64 if i % 4 else 20_000,), float(value)) for i in range(_LEAVES)}
    return tdf.TensorDict({"n": leaves, "a": torch.full((8,), float(value)), "note": str(value)})


def value_of(tree):
    """The value of a tree that is whole."""
    found = {float(value) for leaf in tree.leaves() for value in (leaf.min(), leaf.max())}
    assert len(found) == 1, found
    assert len(tree["n"].keys()) == _LEAVES
    assert tree["note"] == str(int(min(found)))
    return int(found.pop())


def one_file(folder):
    """One file: saved over, loaded in whole, in part and verified."""
    path = folder / "c.safetensors"
    for value in range(3):
        tdf.save(tree_of(value), path)
    assert value_of(tdf.load(path)) == 2
    assert tdf.load(path, where="a")["a"].shape == (8,)
    with tdf.open(path) as opened:
        assert float(opened["n", "3"][0]) == 2.0
    assert os.listdir(folder) == ["c.safetensors"]


def shards(folder):
    """A folder of shards, in turn with one file."""
    place = folder / "m"
    for value in range(3):
        tdf.save(tree_of(value), place, max_shard_size=100_000)
    assert value_of(tdf.load(place)) == 2
    tdf.save(tree_of(3), place / "model.safetensors")
    assert value_of(tdf.load(place)) == 3
    assert os.listdir(place) == ["model.safetensors"]
    tdf.save(tree_of(4), place, max_shard_size=100_000)
    assert value_of(tdf.load(place)) == 4


def background(folder):
    """Saves in the background."""
    saver = tdf.AsyncSaver()
    for value in range(3):
        saver.save(tree_of(value), folder / "c.safetensors")
    saver.wait()
    assert value_of(tdf.load(folder / "c.safetensors")) == 2


def manager(folder):
    """The steps of a run: the last and the best are kept; it is resumed, and later steps are discarded."""
    made = tdf.CheckpointManager(folder / "run", keep_last=2, keep_best=1, metric="loss", mode="min")
    for step in range(5):
        made.save(step, tree_of(step), metadata={"loss": abs(step - 1.0)})
    assert made.steps() == [1, 3, 4]
    made.save(4, tree_of(9), metadata={"loss": 7.0}, overwrite=True)
    again = tdf.CheckpointManager(folder / "run", keep_last=2, keep_best=1, metric="loss", mode="min")
    assert value_of(again.load()) == 9
    assert value_of(again.load(1)) == 1
    assert again.discard_after(3) == [4]
    again.delete(1)
    assert again.steps() == [3]


def memmap(folder):
    """A memmap folder: made, opened, written to, read again, and replaced."""
    place = folder / "d"
    made = tree_of(1).memmap(place)
    made["a"].fill_(5.0)
    opened = tdf.TensorDict.load_memmap(place)
    assert float(opened["a"][0]) == 5.0
    opened["a"].fill_(6.0)
    written = tdf.TensorDict.load_memmap(place, mode="r+", num_threads=2)
    assert float(written["a"][0]) == 5.0
    written = written.at["a"].set_(torch.full((8,), 1.0))
    written.memmap_refresh_()
    assert value_of(tdf.load(place)) == 1
    assert tdf.load(place / "n")["3"].shape == (64,)
    zeros = tree_of(0).memmap_like(folder / "zeros")
    assert float(zeros["a"].sum()) == 0.0
    nameless = tree_of(2).memmap()
    assert float(nameless["a"][0]) == 2.0
    # Mapped leaves go, so that the folder can be replaced.
    del made, opened, written, zeros, nameless
    tree_of(7).memmap(place, sync=True)
    assert value_of(tdf.load(place)) == 7
    assert sorted(os.listdir(folder)) == ["d", "zeros"]


def workers(folder):
    """`map` over a mapped tree, in threads and processes."""
    data = tdf.TensorDict({"x": torch.arange(8.0)}, batch_size=[8]).memmap(folder / "x")
    for options in ({"executor": "threads"}, {"mp_start_method": "spawn"}):
        doubled = data.map(double, 0, num_workers=2, **options)
        assert doubled["x"].tolist() == [2.0 * i for i in range(8)]


def double(chunk):
    """A function for workers."""
    return chunk * 2


def command_line(folder):
    """`tdfunc show`, `verify` and `convert`."""
    path = str(folder / "c.safetensors")
    tdf.save(tree_of(1), path)
    calls = (
        ["show", path], ["verify", path], ["convert", path, str(folder / "d"), "--to", "memmap"],
        ["convert", str(folder / "d"), str(folder / "s"), "--to", "shards"],
    )  # fmt: skip
    for call in calls:
        # The site of the environment takes the calls away in each process.
        done = subprocess.run([sys.executable, "-m", "tdfunc", *call], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (call, done.stdout[-400:], done.stderr[-2000:])
    assert value_of(tdf.load(folder / "s")) == 1


def ranks(folder):
    """A save of one process that is a group of ranks."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(24.0).view(6, 4)
        parts = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "all": distribute_tensor(whole, mesh, [Replicate()]),
        }
        tdf.save(tdf.TensorDict(parts), folder / "r.safetensors")
        assert torch.equal(tdf.load(folder / "r.safetensors")["rows"], whole)
        tdf.CheckpointManager(folder / "run").save(0, tdf.TensorDict(parts))
    finally:
        destroy_process_group()
    assert torch.equal(tdf.CheckpointManager(folder / "run").load()["all"], whole)


def open_files(folder):
    """A file that is open when it is replaced: an error that names it, or the new file, and never a part of one."""
    path = folder / "c.safetensors"
    tdf.save(tree_of(1), path)
    with tdf.open(path) as opened:
        expected = 2
        refused = None
        try:
            tdf.save(tree_of(2), path)
        except PermissionError as err:
            expected = 1
            refused = str(err)
        assert (refused is not None) == (os.environ[VARIABLE] == "windows")
        assert refused is None or ("the file was not replaced" in refused and "c.safetensors" in refused)
        assert float(opened["a"][0]) == 1.0
    assert value_of(tdf.load(path)) == expected
    tdf.save(tree_of(3), path)
    assert value_of(tdf.load(path)) == 3
    assert os.listdir(folder) == ["c.safetensors"]


def mapped_files(folder):
    """A tree that was loaded, and so is mapped, stays whole while its file, shards and steps are replaced."""
    loaded = {}
    for kind in ("file", "shards"):
        SAVES[kind](tree_of(1), folder)
        loaded[kind] = LOADS[kind](folder)
        with warnings.catch_warnings():
            # Shards that are mapped stay, and the save says so.
            warnings.simplefilter("ignore", RuntimeWarning)
            SAVES[kind](tree_of(2), folder)
        assert value_of(loaded[kind]) == 1
        assert value_of(LOADS[kind](folder)) == 2
    made = tdf.CheckpointManager(folder / "run", keep_last=1)
    made.save(0, tree_of(0))
    first = made.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        made.save(1, tree_of(1))
    assert value_of(first) == 0
    assert value_of(made.load()) == 1
    # Without the maps, the next save removes what is left.
    loaded.clear()
    del first
    gc.collect()
    for kind in ("file", "shards"):
        SAVES[kind](tree_of(3), folder)
    made.save(2, tree_of(2))
    assert made.steps() == [2]
    if level_has_locks():
        assert not [name for name in os.listdir(folder) if name.startswith(".tdfunc-")]


def level_has_locks():
    """Whether leftovers can be told from the files of a save that runs."""
    return os.environ[VARIABLE] == "windows"


ALL = (one_file, shards, background, manager, memmap, workers, command_line, ranks, open_files, mapped_files)
SAVES = {
    "file": lambda tree, folder: tdf.save(tree, folder / "c.safetensors"),
    "shards": lambda tree, folder: tdf.save(tree, folder / "c", max_shard_size=100_000),
    "memmap": lambda tree, folder: tree.memmap(folder / "c"),
    "step": lambda tree, folder: tdf.CheckpointManager(folder / "c", keep_last=1).save(0, tree, overwrite=True),
}
LOADS = {
    "file": lambda folder: tdf.load(folder / "c.safetensors"),
    "shards": lambda folder: tdf.load(folder / "c"),
    "memmap": lambda folder: tdf.load(folder / "c"),
    "step": lambda folder: tdf.CheckpointManager(folder / "c").load(),
}


def save_for_ever(kind, folder):
    """Save trees of 1, 2, ... over each other, and print each value when its save is done."""
    value = 0
    while True:
        value += 1
        SAVES[kind](tree_of(value), folder)
        print(value, flush=True)


def main():
    """Run what the arguments name."""
    _, level, what, folder, *names = sys.argv
    folder = Path(folder)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    assert platform.HOLDS_NAMES
    if what == "save":
        save_for_ever(names[0], folder)
    elif what == "check":
        print(value_of(LOADS[names[0]](folder)), flush=True)
    else:
        for task in ALL:
            if not names or task.__name__ in names:
                place = folder / task.__name__
                place.mkdir()
                task(place)
                print(task.__name__, flush=True)


if __name__ == "__main__":
    main()
