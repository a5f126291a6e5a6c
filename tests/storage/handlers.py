"""Saves of each kind, interrupted at any line by a signal handler that saves; run in a process of its own."""

import faulthandler
import random
import signal
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import Future
from functools import partial

import torch

import tdfunc as tdf
from tests.storage.scripts import value_of

# A handler that waits for the frame it interrupted never returns; the process then ends with all stacks.
HANG_S = 30


def tree_of(value):
    """A tree with leaves that a save in the background copies, hashes at once, and hashes in a thread."""
    leaves = {
        "copied": torch.nn.Parameter(torch.full((40,), float(value))),
        "shared": torch.full((50,), float(value)),
        "private": torch.full((20_000,), float(value)),
    }
    return tdf.TensorDict(leaves)


class File:
    """`tdfunc.save` to a file."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, place, value):
        """Save a tree of one value; return a future, or None if the save is done."""
        tdf.save(tree_of(value), self.folder / f"{place}.safetensors", fsync=False)

    def wait(self):
        """Wait for all saves that this object has started."""

    def load(self, place):
        """Load the tree of a place."""
        return tdf.load(self.folder / f"{place}.safetensors")


class Shards(File):
    """`tdfunc.save` to a folder of shards, which has a lock."""

    def save(self, place, value):
        tdf.save(tree_of(value), self.folder / str(place), max_shard_size=50_000, fsync=False)

    def load(self, place):
        return tdf.load(self.folder / str(place))


class Single(File):
    """`tdfunc.save` to the file of a folder of Hugging Face, which has a lock."""

    def save(self, place, value):
        (self.folder / str(place)).mkdir(exist_ok=True)
        tdf.save(tree_of(value), self.folder / str(place) / "model.safetensors", fsync=False)

    def load(self, place):
        return tdf.load(self.folder / str(place))


class Memmap(File):
    """`memmap` to a folder."""

    threads = 0

    def save(self, place, value):
        tree_of(value).memmap(self.folder / str(place), num_threads=self.threads)

    def load(self, place):
        return tdf.TensorDict.load_memmap(self.folder / str(place))


class MemmapThreads(Memmap):
    """`memmap` to a folder, by threads."""

    threads = 2


class Saver(File):
    """`AsyncSaver` to files."""

    def __init__(self, folder):
        super().__init__(folder)
        self.saver = tdf.AsyncSaver()

    def save(self, place, value):
        return self.saver.save(tree_of(value), self.folder / f"{place}.safetensors", fsync=False)

    def wait(self):
        self.saver.wait()


class SaverQueue(Saver):
    """`AsyncSaver` with several saves on their way."""

    def __init__(self, folder):
        super().__init__(folder)
        self.saver = tdf.AsyncSaver(max_pending=3)


class Manager(File):
    """`CheckpointManager`."""

    options = {}

    def __init__(self, folder):
        super().__init__(folder)
        self.manager = tdf.CheckpointManager(folder, fsync=False, **self.options)

    def save(self, place, value):
        return self.manager.save(place, tree_of(value), overwrite=True)

    def wait(self):
        self.manager.wait()

    def load(self, place):
        return self.manager.load(place)


class ManagerAsync(Manager):
    """`CheckpointManager` that saves in the background."""

    options = {"async_save": True}


class ManagerKeeps(Manager):
    """`CheckpointManager` that removes old steps."""

    options = {"async_save": True, "keep_last": 3, "max_pending": 2}


KINDS = {
    kind.__name__: kind
    for kind in (
        File, Shards, Single, Memmap, MemmapThreads, Saver, SaverQueue, Manager, ManagerAsync, ManagerKeeps,
    )
}  # fmt: skip


class AtLine:
    """Calls a handler once, before the line of a given number that this thread executes, of any module."""

    def __init__(self, number, handler):
        self.left = number
        self.handler = handler

    def trace(self, frame, event, _):
        """Count a line."""
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.handler()
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class AtTime:
    """Calls a handler from a real signal after a time."""

    def __init__(self, seconds, handler):
        self.seconds = seconds
        self.handler = handler
        self.left = 1

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.call)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def call(self, *_):
        """Note the signal."""
        self.left = 0
        self.handler()

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def count_lines(kind, folder):
    """Return the number of lines of a save and its wait."""
    made = KINDS[kind](folder)
    counter = AtLine(10**9, None)
    with counter:
        made.save(0, 0.0)
        made.wait()
    return 10**9 - counter.left


def interrupt(kind, folder, moment, same_place, counts):
    """Save, with a handler that saves and waits; both results are whole, or their calls were refused."""
    made = KINDS[kind](folder)
    before, outer, inner = 1.0, 2.0, 3.0
    for place in (1, 2):
        made.save(place, before)
    made.wait()

    def handler():
        started_s = time.monotonic()
        counts["calls"] += 1
        try:
            pending = made.save(1 if same_place else 2, inner)
            if isinstance(pending, Future):
                pending.result()
            made.wait()
        except (tdf.ConcurrencyError, FileExistsError):
            counts["refused"] += 1
        counts["slow"] += time.monotonic() - started_s > 5

    with moment(handler):
        try:
            made.save(1, outer)
            made.wait()
        except FileExistsError:
            counts["the outer save was refused"] += 1
    made.wait()
    found = value_of(made.load(1))
    counts["not whole"] += found not in ({outer, inner} if same_place else {outer})
    counts["lost"] += value_of(made.load(2)) not in ({before} if same_place else {before, inner})


def main(kind, folder, seed, lines, times):
    """Interrupt saves at random lines and times, and print the counts."""
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    draw, counts = random.Random(seed), Counter({"calls": 0, "not whole": 0, "lost": 0, "slow": 0})
    total = count_lines(kind, folder)
    moments = [partial(AtLine, draw.randint(1, total)) for _ in range(lines)]
    moments += [partial(AtTime, draw.uniform(1e-5, 4e-3)) for _ in range(times)]
    for i, moment in enumerate(moments):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        interrupt(kind, folder, moment, bool(i % 2), counts)
    print(dict(counts))
