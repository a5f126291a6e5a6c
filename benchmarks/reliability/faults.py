"""Disks that are full, folders that cannot be written to, and several processes at one place.

`python -m benchmarks.reliability.faults KIND FOLDER` prints the counts for one kind of writer (`kills.KINDS`).
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.reliability.children import in_child
from benchmarks.reliability.kills import _VALUES, KINDS, AbstractKind

_TMPFS_BYTES = 20 << 20
_NOBODY = 65534


def _save(target: AbstractKind, value: int) -> str:
    try:
        target.save(value, fsync=False)
        if getattr(target, "_manager", None) is not None:
            target._manager.wait()
    except OSError as err:
        return f"OSError {err.errno}"
    return "saved"


# -- full disks -------------------------------------------------------------------------------------------------


def limited_saves(kind: str, sizes: list[int], folder: Path) -> dict[str, int]:
    """Save where no file may be larger than some bytes; count the results."""
    target = KINDS[kind](folder)
    assert _save(target, 0) == "saved"

    def attempt(size: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return _save(KINDS[kind](folder), 1)

    return _count([(in_child(lambda size=size: attempt(size)), target) for size in sizes])


@contextmanager
def small_disk(folder: Path):
    """A file system of a few MB on a folder; needs root.

    Raises:
        PermissionError: This user cannot mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        raise PermissionError("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk_saves(kind: str, free: list[int], folder: Path) -> dict[str, int]:
    """Save where the disk has only some bytes left, in a folder that is a small file system."""
    target = KINDS[kind](folder / "x")
    (folder / "x").mkdir()
    assert _save(target, 0) == "saved"
    results = []
    for size in free:
        filler = folder / "filler"
        state = os.statvfs(folder)
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - size))
        results.append((in_child(lambda: _save(KINDS[kind](folder / "x"), 1)), target))
        counted = _count(results[-1:])
        results[-1] = counted
        filler.unlink()
        assert _save(KINDS[kind](folder / "x"), 0) == "saved"
    return {key: sum(result[key] for result in results) for key in results[0]}


def _count(results: list) -> dict[str, int]:
    counts = {"saves": 0, "OSError": 0, "saved": 0, "killed by a signal": 0, "old tree lost": 0, "left behind": 0}
    for (signal_number, said), target in results:
        counts["saves"] += 1
        counts["killed by a signal"] += signal_number != 0
        counts["OSError"] += said.startswith("OSError")
        counts["saved"] += said == "saved"
        try:
            assert target.check() in ((0,) if said != "saved" else (0, 1))
        except Exception as err:
            print(f"{type(err).__name__}: {err}", file=sys.stderr)
            counts["old tree lost"] += 1
        counts["left behind"] += not target.tidy()
    return counts


# -- folders that cannot be written to --------------------------------------------------------------------------


def read_only_save(kind: str, folder: Path) -> str:
    """Save to a folder without write permission, as a user who has no right to it."""
    target = KINDS[kind](folder)
    assert _save(target, 0) == "saved"
    places = [folder, *(Path(place) for place, _, _ in os.walk(folder))]
    modes = [place.stat().st_mode for place in places]
    for place in places:
        place.chmod(0o555)

    def attempt() -> str:
        # Root may write anywhere.
        if not os.getuid():
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        return f"{_save(KINDS[kind](folder), 1)} {KINDS[kind](folder).check()}"

    try:
        status, said = in_child(attempt)
    finally:
        for place, mode in zip(places, modes, strict=True):
            place.chmod(mode)
    assert target.check() == 0
    return f"signal {status}" if status else said


# -- several processes ------------------------------------------------------------------------------------------


def share(kind: str, reads: int, folder: Path, *, writers: int = 2) -> dict[str, int]:
    """Read again and again while other processes save to one place; each read must give a whole tree."""
    target = KINDS[kind](folder)
    assert _save(target, 0) == "saved"
    children = []
    for number in range(writers):
        child = os.fork()
        if not child:
            try:
                own = KINDS[kind](folder)
                random.seed(number)
                while True:
                    own.save(random.randrange(_VALUES), fsync=False)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        children.append(child)
    counts = {"reads": 0, "not whole": 0, "trees seen": 0, "writers that failed": 0, "left behind": 0}
    last = None
    try:
        while counts["reads"] < reads:
            counts["reads"] += 1
            try:
                found = target.read()
            except Exception as err:
                counts["not whole"] += 1
                print(f"{kind}: {type(err).__name__}: {err}", file=sys.stderr)
            else:
                counts["trees seen"] += found != last
                last = found
            time.sleep(0.001)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                counts["writers that failed"] += os.waitpid(child, os.WNOHANG)[0] != 0
                os.kill(child, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(child, 0)
    assert _save(KINDS[kind](folder), 0) == "saved"
    counts["left behind"] = int(not target.tidy())
    return counts


def main() -> None:
    """Count everything for one kind."""
    torch.set_num_threads(1)
    random.seed(0)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    sizes = [random.randrange(1, 60_000) for _ in range(30)]
    free = [random.randrange(1, 4_000_000) for _ in range(30)]
    results = {}
    for name in ("limit", "read-only", "shared"):
        (folder / name).mkdir(parents=True)
    results["limit"] = limited_saves(kind, sizes, folder / "limit")
    with small_disk(folder / "disk"):
        results["full"] = full_disk_saves(kind, free, folder / "disk")
    results["read-only"] = read_only_save(kind, folder / "read-only")
    results["shared"] = share(kind, 300, folder / "shared")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
