"""How much memory saving, loading and scoring take at their peak; `python -m benchmarks.memory` prints it as JSON.

Each way runs in a forked process of its own, which has the tree already. The kernel keeps the highest mark of its
resident memory; pages of files that are mapped count in it, though the system may take them back at any time.
"""

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Before torch starts its pools: a process that is forked afterwards hangs in them.
os.environ["OMP_NUM_THREADS"] = "1"

import safetensors
import safetensors.torch
import tensordict
import torch
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks import ENVIRON, llm
from benchmarks.rows import OURS, Way
from benchmarks.storage import FEW, MANY, Leaves, large_leaves, scratch, small_leaves, tree_of
from benchmarks.training import CHUNKED, DONATED, LOOP, STACKED, Stacked, in_chunks, loop, ours, stacked_fused
from benchmarks.widths import MODELS

TRAINED = (("MLP", 512), ("CNN", 32), ("transformer", 64))
_MEMBERS = 64
_STEPS = 5
_CHUNK = 8
_trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
_CLEAR = Path("/proc/self/clear_refs")


class Peak(NamedTuple):
    """Bytes that a way needs at its peak above what was there before; and how many of them are a file's in the end."""

    what: str
    way: str
    size_bytes: int
    mapped_bytes: int


def save_ways(leaves: Leaves, folder: Path) -> dict[str, Callable[[], Any]]:
    tree, other = tree_of(leaves), tensordict.TensorDict(leaves).unflatten_keys(".")
    path = folder / "tree.safetensors"
    return {
        OURS: lambda: tdf.save(tree, path, fsync=False),
        f"{OURS}, in shards": lambda: tdf.save(tree, folder / "shards", max_shard_size="50MB", fsync=False),
        f"{OURS}, memmap": lambda: tree.memmap(folder / "folder"),
        "save_file": lambda: safetensors.torch.save_file(leaves, path),
        "torch.save": lambda: torch.save(leaves, folder / "tree.pt"),
        "tensordict, memmap": lambda: other.memmap(folder / "other"),
    }


def background_ways(leaves: Leaves, folder: Path) -> dict[str, Callable[[], Any]]:
    """Until the file is there."""
    tree, path = tree_of(leaves), folder / "tree.safetensors"
    return {
        OURS: lambda: tdf.AsyncSaver().save(tree, path, fsync=False).result(),
        "copying the tree first": lambda: tdf.AsyncSaver().save(tree, path, fsync=False, copy=True).result(),
    }


def load_ways(leaves: Leaves, folder: Path) -> dict[str, Callable[[], Any]]:
    """Load everything and use it: what is mapped is read then."""
    tdf.save(tree_of(leaves), folder / "tree.safetensors")
    torch.save(leaves, folder / "tree.pt")
    tensordict.TensorDict(leaves).unflatten_keys(".").memmap(folder / "other")

    def used(load: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            tree = load()
            found: list[Tensor] = list(tree.values()) if isinstance(tree, dict) else tree.flatten_keys(".").values()
            return tree, [leaf.view(torch.int32).amax() for leaf in found]

        return run

    return {
        OURS: used(lambda: tdf.load(folder / "tree.safetensors")),
        "load_file": used(lambda: safetensors.torch.load_file(folder / "tree.safetensors")),
        "torch.load": used(lambda: torch.load(folder / "tree.pt", weights_only=True)),
        "tensordict, memmap": used(lambda: tensordict.TensorDict.load_memmap(folder / "other")),
    }


def open_ways(leaves: Leaves, folder: Path) -> dict[str, Callable[[], Any]]:
    """Open the file and read one leaf in a hundred, at least two."""
    path, wanted = folder / "tree.safetensors", list(leaves)[::100]
    tdf.save(tree_of(leaves), path)

    def read_ours() -> Any:
        with tdf.open(path) as file:
            return [file[tuple(name.split("."))].add_(1) for name in wanted]

    def read_theirs() -> Any:
        with safetensors.safe_open(path, "pt") as file:
            return [file.get_tensor(name).add_(1) for name in wanted]

    return {OURS: read_ours, "safe_open": read_theirs}


def train_ways(model: str, width: int, members: int) -> dict[str, Callable[[], Any]]:
    """Make the members and their state, and take five steps."""
    _, make, inputs = MODELS[model]
    x, t = inputs(width), torch.randint(10, (32,))

    def make_modules() -> list[nn.Module]:
        return [make(width) for _ in range(members)]

    def make_tree() -> Stacked:
        return Stacked(make(width), tdf.init_ensemble(lambda: make(width), members), members)

    def trained(way: Callable[..., Way | None], start: Callable[[], Any] = make_tree) -> Callable[[], Any]:
        def run() -> Any:
            step = way(start(), x, t)
            assert step is not None
            for _ in range(_STEPS):
                step()
            return step

        return run

    return {
        OURS: trained(ours),
        DONATED: trained(partial(ours, donate=True)),
        CHUNKED: trained(partial(in_chunks, chunk_size=_CHUNK)),
        LOOP: trained(loop, make_modules),
        STACKED: trained(stacked_fused, make_modules),
    }


def state_bytes(model: str, width: int, members: int) -> int:
    """Return the bytes of the parameters of all members, and of two moments of each."""
    one = MODELS[model][1](width)
    return 3 * members * sum([leaf.numel() * leaf.element_size() for leaf in one.parameters()])


WORK: dict[str, Callable[[Leaves, Path], dict[str, Callable[[], Any]]]] = {
    "save": save_ways,
    "save in the background,": background_ways,
    "load, verified,": load_ways,
    "open, read 1 %,": open_ways,
}
SOURCES = (save_ways, background_ways, load_ways, open_ways, train_ways, llm.score_ways)


def measure_all(folder: Path) -> list[Peak]:
    found: list[Peak] = []
    for size, make in ((FEW, large_leaves), (MANY, small_leaves)):
        leaves = make()
        tiny = {name: leaf[:1].clone() for name, leaf in list(leaves.items())[:2]}
        for i, (work, ways) in enumerate(WORK.items()):
            places = [folder / f"{kind}{i}" for kind in ("all", "tiny")]
            for place in places:
                place.mkdir(exist_ok=True)
            warm = ways(tiny, places[1])
            for way, run in ways(leaves, places[0]).items():
                found.append(Peak(f"{work} {size}", way, *peak_of(run, warm[way])))
    for model, width in TRAINED:
        what = f"train {_MEMBERS} members, {model} of width {width},"
        found.append(Peak(what, "parameters and state", state_bytes(model, width, _MEMBERS), 0))
        warm = train_ways(model, 16, 2 * _CHUNK)
        for way, run in train_ways(model, width, _MEMBERS).items():
            found.append(Peak(what, way, *peak_of(run, warm[way])))
    warm = llm.score_ways((8, 7))
    for way, run in llm.score_ways(llm.LENGTHS).items():
        found.append(Peak("score 4 rows of about 256 tokens", way, *peak_of(run, warm[way])))
    return found


def peak_of(work: Callable[[], Any], warm: Callable[[], Any]) -> tuple[int, int]:
    """Return what a call takes above what is there already: resident bytes, and those of mapped files at its end.

    The same with little data goes first, for the code that is read from files then.
    """
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            warm()
            # What was freed and kept would serve the next allocation, and not show.
            _trim(0)
            before, files = _status("VmRSS"), _status("RssFile")
            # Resets the highest mark of resident memory.
            _CLEAR.write_text("5")
            result = work()
            os.write(into, json.dumps([_status("VmHWM") - before, max(_status("RssFile") - files, 0)]).encode())
            del result
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with os.fdopen(out) as file:
        text = file.read()
    if not text:
        raise RuntimeError("a way failed in its process; its error is above")
    size_bytes, mapped_bytes = json.loads(text)
    return size_bytes, mapped_bytes


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peaks(say: Callable[[str], None]) -> list[Peak]:
    """Measure in a new process, where no thread runs; nothing where the system does not tell of peaks."""
    if not os.access(_CLEAR, os.W_OK):
        say("\nno peak memory: the system has no /proc/self/clear_refs")
        return []
    command = [sys.executable, "-m", "benchmarks.memory"]
    done = subprocess.run(command, env=ENVIRON, cwd=Path.cwd(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process for peak memory failed:\n{done.stderr}")
    found = [Peak(*values) for values in json.loads(done.stdout.splitlines()[-1])]
    say("\nPeak memory")
    for peak in found:
        say(f"  {peak.what:48} {peak.way:24} {peak.size_bytes / 1e6:7.1f} MB, {peak.mapped_bytes / 1e6:.1f} mapped")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(measure_all(scratch("memory"))))
