"""Counts what is left of saves by several ranks of which one is killed: `python -m benchmarks.reliability.ranks COUNT`.

Two or three processes of a gloo group save sharded trees over each other until a random one of them gets SIGKILL at a
random moment. The values of a tree are equal, and differ from those of the others, so that a mixture shows. The others
must raise `PeerError` and end.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# DTensor imports it at first use, which would take longer than all else in each child.
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tdfunc as tdf

_NAMES = ("x.safetensors.bak", "x.safetensors.tmp", "y.safetensors", "step-notes", ".x.safetensors.swp")
_ROWS, _COLUMNS, _TIMEOUT_S = 48, 1 << 12, 20
# How a rank that was not killed ends.
_RAISED, _OTHER = 3, 4
KEYS = (
    "kills", "in a save", "old", "new", "lost", "foreign files lost", "not cleaned", "survivors", "raised",
    "other ends",
)  # fmt: skip


def _tree_of(value: int, mesh: Any) -> tdf.TensorDict:
    """This rank's view of a tree of one value."""
    rows = _ROWS // mesh.size()
    leaves = {
        str(i): DTensor.from_local(torch.full((rows, _COLUMNS >> i), float(value)), mesh, [Shard(0)]) for i in range(4)
    }
    return tdf.TensorDict({"n": leaves, "value": torch.tensor(float(value)), "note": str(value)})


def _value_of(tree: Any) -> int:
    """The value of a tree that is whole; every element is read."""
    found = {float(value) for leaf in tree.leaves() for value in (leaf.min(), leaf.max())}
    assert len(found) == 1, f"values of several trees: {found}"
    value = int(found.pop())
    assert [leaf.shape for leaf in tree["n"].leaves()] == [(_ROWS, _COLUMNS >> i) for i in range(4)]
    assert tree["note"] == str(value)
    return value


def _save(rank: int, size: int, folder: Path, meeting: str, into: int, value: int, *, is_manager: bool) -> None:
    """Save one tree after another, as one rank; the first rank notes in a pipe where it is."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options: Any = {"init_method": f"file://{meeting}", "timeout": timedelta(seconds=_TIMEOUT_S)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **options)
    mesh = init_device_mesh("cpu", (size,))
    manager = tdf.CheckpointManager(folder, keep_last=2, fsync=False) if is_manager else None
    while True:
        value += 1
        tree = _tree_of(value, mesh)
        if not rank:
            os.write(into, b"(")
        if manager is not None:
            manager.save(value, tree)
        else:
            tdf.save(tree, folder / "x.safetensors", fsync=value % 2 == 0)
        if not rank:
            os.write(into, b")")


def _fork(rank: int, *args: Any, **options: Any) -> int:
    child = os.fork()
    if child:
        return child
    code = _OTHER
    try:
        # A commit that could not tell its end warns; here only the file and the errors count.
        warnings.simplefilter("ignore")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            _save(rank, *args, **options)
    except tdf.PeerError:
        code = _RAISED
    except BaseException as err:
        print(f"rank {rank}: {type(err).__name__}: {err}", file=sys.stderr)
    finally:
        os._exit(code)


def _read_marks(out: int, marks: str, count: int, limit_s: float = 60) -> str:
    """Return the marks in a pipe, once there are `count` of them."""
    until = time.monotonic() + limit_s
    while len(marks) < count:
        assert select.select([out], [], [], max(until - time.monotonic(), 0))[0], "no save within a minute"
        part = os.read(out, 1 << 12)
        assert part, "the first rank ended before a save"
        marks += part.decode()
    return marks


def _kill_one(folder: Path, value: int, *, is_manager: bool) -> tuple[int, bool, list[int]]:
    """Kill one rank; return the last value that was saved, whether a save was not done, and how the others ended."""
    size = random.choice((2, 3))
    victim = random.randrange(size)
    out, into = os.pipe()
    with tempfile.TemporaryDirectory() as place:
        args = (size, folder, f"{place}/meeting", into, value)
        children = [_fork(rank, *args, is_manager=is_manager) for rank in range(size)]
        os.close(into)
        # The second save of the group takes as long as those after it; the first one meets all ranks.
        marks = _read_marks(out, "", 3)
        start = time.perf_counter()
        marks = _read_marks(out, marks, 4)
        time.sleep(random.uniform(0, 2 * (time.perf_counter() - start)))
        os.kill(children[victim], signal.SIGKILL)
        ends = [_end_of(child) for child in children]
    while part := os.read(out, 1 << 16):
        marks += part.decode()
    os.close(out)
    others = [end for rank, end in enumerate(ends) if rank != victim]
    return value + marks.count(")"), marks.endswith("("), others


def _end_of(child: int) -> int:
    """Return how a process ended; one that does not end within a minute is killed, and counts as another end."""
    until = time.monotonic() + 3 * _TIMEOUT_S
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _check(folder: Path, last: int, *, is_manager: bool) -> int:
    """Load the newest tree and return its value, which is that of the last save or of the one that was killed."""
    if is_manager:
        manager = tdf.CheckpointManager(folder)
        values = [_value_of(manager.load(step)) for step in manager.steps()]
        assert values == manager.steps(), f"values {values} in steps {manager.steps()}"
        found = values[-1]
    else:
        found = _value_of(tdf.load(folder / "x.safetensors"))
    assert found in (last, last + 1), f"{found}, where {last} was saved"
    return found


def kill_ranks(count: int, folder: Path, *, is_manager: bool = False) -> dict[str, int]:
    """Kill a rank of `count` groups, one after the other, and count the results of a reader."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        (folder / name).write_text(name)
    result, value = dict.fromkeys(KEYS, 0), 0
    for kill in range(count):
        last, inside, others = _kill_one(folder, value, is_manager=is_manager)
        try:
            value = _check(folder, last, is_manager=is_manager)
        # Whatever a reader raises is a loss.
        except Exception as err:
            print(f"kill {kill}: {type(err).__name__}: {err}", file=sys.stderr)
            result["lost"], value = result["lost"] + 1, last + 1
        result["kills"] += 1
        result["in a save"] += inside
        result["new" if value > last else "old"] += inside
        result["survivors"] += len(others)
        result["raised"] += others.count(_RAISED)
        result["other ends"] += len(others) - others.count(_RAISED)
        value += 1
        tree = tdf.TensorDict({"value": torch.tensor(float(value))})
        if is_manager:
            tdf.CheckpointManager(folder, keep_last=1, fsync=False).save(value, tree)
        else:
            tdf.save(tree, folder / "x.safetensors", fsync=False)
        left = {path.name for path in folder.iterdir()} - {*_NAMES}
        result["not cleaned"] += len(left) != 1
        result["foreign files lost"] += sum([(folder / name).read_text() != name for name in _NAMES])
    return result


def main() -> None:
    """Count both kinds of saves: three quarters of the kills hit `save`, the others a `CheckpointManager`."""
    random.seed(0)
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "save, 2 or 3 ranks": kill_ranks(count - count // 4, Path(folder) / "file"),
            "CheckpointManager, 2 or 3 ranks": kill_ranks(count // 4, Path(folder) / "steps", is_manager=True),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
