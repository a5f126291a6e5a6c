"""Counts what is left of saves that are killed: `python -m benchmarks.reliability.kills KIND COUNT FOLDER`.

A child process saves trees over each other again and again until it gets SIGKILL. All values of a tree are equal, and
differ from those of the others, so that a mixture shows. The child notes in a pipe where it is, which tells whether a
kill hit a save.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from tdfunc import CheckpointManager, TensorDict, load, save

_LEAVES, _VALUES = 24, 4
# Elements of a small leaf.
_SIZE = 1 << 14


def tree_of(value: int, size: int = _SIZE) -> TensorDict:
    """A tree of small and larger leaves, all of one value."""
    leaves = {str(i): torch.full((size if i % 4 else 4 * size,), float(value)) for i in range(_LEAVES)}
    return TensorDict({"n": leaves, "value": torch.tensor(float(value)), "note": str(value)})


def value_of(tree) -> int:
    """The value of a tree that is whole; every element is looked at.

    Raises:
        AssertionError: It was put together from two, or something is missing.
    """
    found = {float(value) for leaf in tree.leaves() for value in (leaf.min(), leaf.max())}
    assert len(found) == 1, f"values of several trees: {found}"
    value = int(found.pop())
    assert len(tree["n"].keys()) == _LEAVES, f"{len(tree['n'].keys())} leaves"
    assert tree["note"] == str(value), f"note {tree['note']!r} beside {value}"
    return value


class AbstractKind:
    """A writer and its reader, in a folder of their own."""

    def __init__(self, folder: Path, size: int = _SIZE) -> None:
        self.folder, self.shard_bytes = folder, 50 * size
        self.trees = [tree_of(value, size) for value in range(_VALUES)]

    def save(self, value: int, *, fsync: bool = True) -> None:
        """Save over the old tree."""
        raise NotImplementedError

    def load(self):
        """Load the tree."""
        raise NotImplementedError

    def check(self) -> int:
        """Load and check; return the value."""
        return value_of(self.load())

    def read(self) -> int:
        """Load while others save, and check; return the value."""
        return value_of(self.load())

    def tidy(self) -> bool:
        """Return whether the folder holds the files of one save and nothing else."""
        raise NotImplementedError


class OneFile(AbstractKind):
    """One file."""

    def save(self, value, *, fsync=True):
        save(self.trees[value], self.folder / "c.safetensors", fsync=fsync)

    def load(self):
        return load(self.folder / "c.safetensors")

    def tidy(self):
        return os.listdir(self.folder) == ["c.safetensors"]


class Shards(AbstractKind):
    """A folder of shards."""

    def save(self, value, *, fsync=True):
        save(self.trees[value], self.folder / "m", max_shard_size=self.shard_bytes, fsync=fsync)

    def load(self):
        return load(self.folder / "m")

    def tidy(self):
        names = os.listdir(self.folder / "m")
        shards = [name for name in names if "-of-" in name]
        stems = {name.split("-of-")[0].rsplit("-", 1)[0] for name in shards}
        # One save's shards, all of them, and the index.
        whole = all(int(name.split("-of-")[1].split(".")[0]) == len(shards) for name in shards)
        return whole and len(stems) == 1 and sorted(set(names) - set(shards)) == ["model.safetensors.index.json"]


class FileAndShards(Shards):
    """A folder in which one file and shards replace each other."""

    def save(self, value, *, fsync=True):
        if value % 2:
            save(self.trees[value], self.folder / "m" / "model.safetensors", fsync=fsync)
        else:
            super().save(value, fsync=fsync)

    def tidy(self):
        return os.listdir(self.folder / "m") == ["model.safetensors"] or super().tidy()


class Memmap(AbstractKind):
    """A memmap folder."""

    def save(self, value, *, fsync=True):
        self.trees[value].memmap(self.folder / "d", sync=fsync)

    def load(self):
        return TensorDict.load_memmap(self.folder / "d")

    def tidy(self):
        return os.listdir(self.folder) == ["d"]


class Manager(AbstractKind):
    """The steps of a run, of which two are kept; every third save replaces a step."""

    background = False

    def __init__(self, folder, size=_SIZE):
        super().__init__(folder, size)
        self._manager = None
        self._latest = -1

    def save(self, value, *, fsync=True):
        if self._manager is None:
            self._manager = CheckpointManager(self.folder, keep_last=2, async_save=self.background, fsync=fsync)
        step = (self._manager.latest() or 0) + (value != 0)
        self._manager.save(step, self.trees[value], metadata={"value": value}, overwrite=True)

    def load(self):
        return CheckpointManager(self.folder).load()

    def check(self):
        # One that was not used, as a new process has.
        manager = CheckpointManager(self.folder)
        steps = manager.steps()
        assert steps, "no step"
        assert steps[-1] >= self._latest, f"step {self._latest} is lost, the last is {steps[-1]}"
        self._latest = steps[-1]
        values = [value_of(manager.load(step)) for step in steps]
        assert [manager.metadata(step) for step in steps] == [{"value": value} for value in values], (
            "metadata of another"
        )
        return values[-1]

    def tidy(self):
        return all(name.startswith("step-") for name in os.listdir(self.folder)) and len(os.listdir(self.folder)) <= 2


class AsyncManager(Manager):
    """The same, saved in the background."""

    background = True


KINDS = {
    "one file": OneFile,
    "folder of shards": Shards,
    "shards and one file in turn": FileAndShards,
    "CheckpointManager": Manager,
    "CheckpointManager, async_save": AsyncManager,
    "memmap folder": Memmap,
}


def kill_saves(kind: str, count: int, folder: Path) -> dict[str, int]:
    """Kill `count` writers of a kind, one after the other, and count the results of the reader."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    target = KINDS[kind](folder)
    target.save(0)
    _wait(target)
    start = time.perf_counter()
    KINDS[kind](folder).save(0)
    span = time.perf_counter() - start
    result = {"kills": count, "during a save": 0, "old": 0, "new": 0, "lost": 0, "left behind": 0, "not cleaned": 0}
    before = target.check()
    for kill in range(count):
        last, inside = _kill_one(KINDS[kind](folder), before, span, fsync=kill % 2 == 0)
        untidy = not target.tidy()
        following = (last + 1) % _VALUES
        try:
            found = target.check()
            # A save in the background is not done when `save` returns.
            assert found in (last, following) or kind.endswith("async_save"), f"{found}, an older tree than {last}"
        # Whatever a reader raises is a loss.
        except Exception as err:
            print(f"{kind}, kill {kill}: {type(err).__name__}: {err}", file=sys.stderr)
            result["lost"] += 1
            shutil.rmtree(folder)
            folder.mkdir()
            target = KINDS[kind](folder)
            found = 0
        else:
            result["during a save"] += inside
            result["new" if found == following else "old"] += inside
            result["left behind"] += untidy
        fresh = KINDS[kind](folder)
        fresh.save((found + 1) % _VALUES, fsync=False)
        _wait(fresh)
        result["not cleaned"] += not target.tidy()
        before = target.check()
    return result


def _kill_one(target: AbstractKind, value: int, span: float, *, fsync: bool) -> tuple[int, bool]:
    """Kill one writer; return the value that was there before its last save, and whether that was not done."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            while True:
                os.write(into, b"(")
                value = (value + 1) % _VALUES
                target.save(value, fsync=fsync)
                os.write(into, b")")
        finally:
            os._exit(1)
    os.close(into)
    # From the moment of the first save on.
    marks = os.read(out, 1)
    time.sleep(random.uniform(0, 2.5 * span))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(out, 1 << 16):
        marks += part
    os.close(out)
    return (value + marks.count(b")")) % _VALUES, marks.endswith(b"(")


def _wait(target: AbstractKind) -> None:
    if isinstance(target, Manager) and target._manager is not None:
        target._manager.wait()


if __name__ == "__main__":
    random.seed(0)
    print(json.dumps(kill_saves(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
