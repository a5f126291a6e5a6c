"""Counts what is left of saves in which one call to the system fails or is the last one.

`python -m benchmarks.reliability.calls KIND FOLDER` goes through the calls of a save of one kind of writer
(`kills.KINDS`), every third one, in a folder in which other programs have files, and prints the counts.
"""

import builtins
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.reliability.children import forked
from benchmarks.reliability.kills import KINDS, AbstractKind
from tdfunc.core.system import platform
from tdfunc.storage.disk import commit

# Elements of a small leaf.
_SIZE = 8
_EVERY = 3
_CALLS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "write", "fsync", "link", "chmod", "listdir",
          "scandir", "stat", "lstat", "preadv")  # fmt: skip
_LIBC = ("renameat2", "fallocate64", "syncfs")
# A kill before or after the call, an error of the call, or of all calls from it on.
MODES = ("killed before", "killed after", "error", "errors")
CODES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
_INDEX, _SHARD = "model.safetensors.index.json", re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
# Files of other programs, some with names that are almost those of tdfunc's own.
FOREIGN = {
    "notes.txt": "mine",
    "weights.safetensors": "mine",
    "model-00001-of-00002.safetensors": "mine",
    "model-deadbeef-00001-of-00002.safetensors": "mine, under a name that tdfunc might have chosen",
    ".tdfunc-notes.tmp": "mine",
    ".tdfunc-0123456789abcdef.old": "mine",
    "step-0000000900/weights.npz": "mine",
    "model.fp16.safetensors.index.json": '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    "other.safetensors.index.json": "not JSON",
    "d.bak/meta.json": '{"a": {"type": "TensorDict"}}',
}
INDICES = (
    '{"weight_map": {"a": "model.safetensors"}}',
    '{"weight_map": {"a": "model.safetensors", "b": "weights.safetensors"}}',
    '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    "not JSON",
)


class Disturbance(NamedTuple):
    """A call to the system, counted from 1, and its fate."""

    at: int
    mode: str
    code: int = errno.EIO
    # Without it a file system cannot swap two folders in one step.
    exchange: bool = True


class _Calls:
    """Counts calls, and disturbs one."""

    def __init__(self, plan: Disturbance) -> None:
        self.plan, self.count = plan, 0

    def wrap(self, real: Callable[..., Any], *, is_c: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            at, mode, code, _ = self.plan
            is_hit = self.count == at or (mode == "errors" and self.count > at > 0)
            if is_hit and mode == "killed before":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_hit and mode.startswith("error"):
                if is_c:
                    ctypes.set_errno(code)
                    return -1
                raise OSError(code, os.strerror(code))
            try:
                return real(*args, **options)
            finally:
                if is_hit and mode == "killed after":
                    os.kill(os.getpid(), signal.SIGKILL)

        return call


def _disturbed(plan: Disturbance, work: Callable[[], object]) -> tuple[int, BaseException | None]:
    """Run work with a disturbance; return the number of calls, and the error."""
    calls, libc = _Calls(plan), platform._libc
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        names = _LIBC if plan.exchange else _LIBC[1:]
        fake = type("Libc", (), {name: staticmethod(calls.wrap(getattr(libc, name), is_c=True)) for name in names})
        stack.enter_context(mock.patch.object(os, "fsync", return_value=None))
        for place, name in [*((os, name) for name in _CALLS), (builtins, "open"), (fcntl, "flock")]:
            stack.enter_context(mock.patch.object(place, name, calls.wrap(getattr(place, name))))
        stack.enter_context(mock.patch.object(platform, "_libc", fake))
        try:
            work()
        except Exception as err:
            return calls.count, err
    return calls.count, None


def place_of(kind: str, folder: Path) -> Path:
    """The folder in which other programs have files too."""
    return folder / "m" if "shards" in kind else folder


def prepare(kind: str, folder: Path, foreign: dict[str, str], index: str | None = None) -> AbstractKind:
    """Save one tree, and put other files beside it, such as another program's index."""
    target = KINDS[kind](folder, _SIZE)
    place = place_of(kind, folder)
    place.mkdir(parents=True, exist_ok=True)
    target.save(1, fsync=False)
    for name, text in foreign.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    if index is not None and (place / "model.safetensors").exists():
        (place / _INDEX).write_text(index)
    return target


def disturb(kind: str, folder: Path, value: int, plan: Disturbance) -> tuple[int, str]:
    """Save a tree over the old one with a disturbance; return the number of calls, and the ending."""

    def work() -> None:
        KINDS[kind](folder, _SIZE).save(value, fsync=True)

    if plan.mode.startswith("killed"):
        signal_number, said = forked(lambda into: os.write(into, str(_disturbed(plan, work)[0]).encode()))
        return int(said or 0), "killed" if signal_number else "saved"
    count, error = _disturbed(plan, work)
    if error is not None and not isinstance(error, OSError | ValueError):
        raise error
    return count, "failed" if error is not None else "saved"


def check(kind: str, folder: Path, foreign: dict[str, str], before: int, value: int, ending: str) -> int:
    """Raise unless the old tree or the new one is there, and all files of others; return the value of the tree."""
    found = KINDS[kind](folder, _SIZE).check()
    allowed = {"failed": (before,), "saved": (value,), "killed": (before, value)}[ending]
    assert found in allowed, f"{ending}, and {found} is there instead of {allowed}"
    place = place_of(kind, folder)
    for name, text in foreign.items():
        assert (place / name).read_text() == text, f"{name} was lost"
    return found


def strays(kind: str, folder: Path, foreign: dict[str, str]) -> list[str]:
    """What tdfunc left in a folder, apart from the tree: names of killed writers, and shards that no index names."""
    place = place_of(kind, folder)
    index = place / _INDEX
    named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
    names = [path.name for path in folder.rglob("*") if path.name not in foreign]
    return [name for name in names if commit.LEFTOVER.fullmatch(name) or (_SHARD.fullmatch(name) and name not in named)]


def count_calls(kind: str, folder: Path, *, every: int) -> dict[str, int]:
    """Disturb each call of a save (or one of some) in each way, and count the results."""
    counts = {"calls": 0, "saves": 0, "killed": 0, "failed": 0, "saved": 0, "lost": 0, "not cleaned": 0}
    for exchange in (True, False):
        for value in (0, 3):
            shutil.rmtree(folder, ignore_errors=True)
            prepare(kind, folder, FOREIGN)
            total = disturb(kind, folder, value, Disturbance(0, "error", exchange=exchange))[0]
            counts["calls"] += total
            for at in range(1, total + 1, every):
                for mode in MODES:
                    shutil.rmtree(folder, ignore_errors=True)
                    prepare(kind, folder, FOREIGN, INDICES[at % len(INDICES)])
                    plan = Disturbance(at, mode, CODES[at % len(CODES)], exchange)
                    ending = disturb(kind, folder, value, plan)[1]
                    counts["saves"] += 1
                    counts[ending] += 1
                    try:
                        check(kind, folder, FOREIGN, 1, value, ending)
                        KINDS[kind](folder, _SIZE).save(2, fsync=False)
                        check(kind, folder, FOREIGN, value, 2, "saved")
                    except Exception as err:
                        print(f"{kind}, {plan}, {value}: {type(err).__name__}: {err}", file=sys.stderr)
                        counts["lost"] += 1
                    else:
                        left = strays(kind, folder, FOREIGN)
                        counts["not cleaned"] += bool(left)
                        if left:
                            print(f"{kind}, {plan}, {value}: {left}", file=sys.stderr)
    return counts


def main() -> None:
    """Count for one kind."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(count_calls(sys.argv[1], Path(sys.argv[2]), every=_EVERY)))


if __name__ == "__main__":
    main()
