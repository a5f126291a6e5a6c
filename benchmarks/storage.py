"""Checkpoints in files: against writing and reading the bare bytes, safetensors, torch.save and tensordict."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import tensordict
import torch
from torch import Tensor

import tdfunc as tdf
from benchmarks.measure import Fresh
from benchmarks.rows import Case, Row, Suite

BYTES, FILES, TORCH, OTHER = "os.write", "save_file", "torch.save", "tensordict"
LOAD, OPEN, READ = "load_file", "safe_open", "reading the bytes"
FEW, MANY = "200 tensors, 262 MB", "3000 tensors, 20 MB"
Leaves = dict[str, Tensor]


def large_leaves() -> Leaves:
    """262 MB in 200 tensors."""
    return {f"layers.{i}.weight": torch.randn(640, 512) for i in range(200)}


def small_leaves() -> Leaves:
    """20 MB in 3000 tensors."""
    return {f"layers.{i // 6}.part{i % 6}": torch.randn(41, 41) for i in range(3000)}


def tree_of(leaves: Leaves) -> tdf.TensorDict:
    """The leaves nested by their dotted names, as those of a model are."""
    return tdf.TensorDict(leaves).unflatten_keys(".")


def scratch(name: str) -> Path:
    """Return a folder that is gone when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"tdfunc-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_bytes(chunks: Sequence[Any], path: Path, fsync: bool) -> None:
    """Write the memory of tensors to a new file: what no format can avoid."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for chunk in chunks:
        view = memoryview(chunk)
        while len(view):
            view = view[os.write(fd, view) :]
    if fsync:
        os.fsync(fd)
    os.close(fd)


def sync(path: Path) -> None:
    """Wait for the disk, as `tdfunc.save` does: the file, then its folder."""
    for name in (path, path.parent):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def save_ways(leaves: Leaves, folder: Path, fsync: bool) -> dict[str, Callable[[], Any]]:
    tree = tree_of(leaves)
    chunks = [leaf.numpy().reshape(-1).view("u1") for leaf in leaves.values()]
    ours, theirs, zipped = folder / "ours.safetensors", folder / "theirs.safetensors", folder / "zipped.pt"

    def with_sync(save: Callable[[], Any], path: Path) -> Callable[[], Any]:
        return (lambda: (save(), sync(path))) if fsync else save

    return {
        "tdfunc": lambda: tdf.save(tree, ours, fsync=fsync),
        BYTES: lambda: write_bytes(chunks, folder / "bytes", fsync),
        FILES: with_sync(lambda: safetensors.torch.save_file(leaves, theirs), theirs),
        TORCH: with_sync(lambda: torch.save(leaves, zipped), zipped),
    }


def memmap_way(leaves: Leaves, folder: Path) -> Callable[[], Any]:
    tree = tensordict.TensorDict(leaves).unflatten_keys(".")
    return lambda: tree.memmap(folder / "folder")


def load_ways(leaves: Leaves, folder: Path) -> dict[str, Callable[[], Any]]:
    ours, theirs = folder / "ours.safetensors", folder / "theirs.safetensors"
    tdf.save(tree_of(leaves), ours)
    safetensors.torch.save_file(leaves, theirs)
    return {
        "tdfunc": lambda: tdf.load(ours, verify=False),
        "verified": lambda: tdf.load(ours),
        LOAD: lambda: safetensors.torch.load_file(theirs),
        READ: lambda: _read(theirs),
    }


def _read(path: Path) -> int:
    """Read a mapped file once: the sum of its bytes as integers, the cheapest thing to do with all of them."""
    size = path.stat().st_size // 8
    return int(torch.from_file(str(path), shared=False, size=size, dtype=torch.int64).sum())


def partial_ways(leaves: Leaves, folder: Path) -> dict[str, Fresh]:
    """Open a file whose pages are not in memory, and read one tensor in a hundred."""
    ours, theirs = folder / "ours.safetensors", folder / "theirs.safetensors"
    tdf.save(tree_of(leaves), ours)
    safetensors.torch.save_file(leaves, theirs)
    wanted = list(leaves)[:: 100 if len(leaves) > 100 else 1]

    paths = [tuple(name.split(".")) for name in wanted]

    def read_ours(path: Path) -> list[Any]:
        with tdf.open(path) as file:
            return [file[path] for path in paths]

    def read_theirs(path: Path) -> list[Any]:
        with safetensors.safe_open(path, "pt") as file:
            # Cold pages come in when they are touched, so each tensor is.
            return [file.get_tensor(name).sum() for name in wanted]

    return {"tdfunc": Fresh(lambda: evicted(ours), read_ours), OPEN: Fresh(lambda: evicted(theirs), read_theirs)}


def evicted(path: Path) -> Path:
    """Drop a file's pages from memory."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path


def file_cases() -> list[Case]:
    folder = scratch("files")
    large, small = large_leaves(), small_leaves()
    cases: list[Case] = []
    for what, leaves in ((FEW, large), (MANY, small)):
        for fsync in (False, True):
            ways = save_ways(leaves, folder, fsync)
            if leaves is small and not fsync:
                ways[OTHER] = memmap_way(leaves, folder)
            cases.append(Case(f"save {what}, {'fsync' if fsync else 'no fsync'}", ways))
        ways = load_ways(leaves, _inner(folder, what))
        verified = ways.pop("verified")
        cases.append(Case(f"load {what}", ways))
        cases.append(Case(f"load {what}, verified", {**ways, "tdfunc": verified}))
        cases.append(Case(f"open {what}, read 1 %, cold", partial_ways(leaves, _inner(folder, what))))
    return cases


def _inner(folder: Path, name: str) -> Path:
    inner = folder / name.split()[0]
    inner.mkdir(exist_ok=True)
    return inner


SMALL_SAVES = (f"save {MANY}, no fsync", f"save {MANY}, fsync")
PLACES = (
    "numpy and torch take a third of the time to make the tensors; Python takes the rest to read the header, "
    "name the leaves, compare their entries with the tree and make the nodes; load_file is written in Rust "
    "and checks less"
)
ENTRIES = (
    "Python verifies the header's checksum and finds its entries; safe_open is written in Rust and verifies nothing"
)
DISK = "with fsync, all ways wait for the same disk"
HASH = "xxh3 reads 262 MB in 24 ms, beside the 68 ms in which os.write copies them to the page cache: on one core 1.35x"
FILES_OF_OTHERS = "tensordict creates 3,000 files, which takes most of its time and does not change with the bytes"
SUITE = Suite(
    "storage",
    "Checkpoints",
    "All leaves have one size and are in one file, three levels deep. The file is on the disk of the folder "
    "for temporary files.",
    file_cases,
    (
        Row("save 262 MB, checksums included, no fsync", BYTES, 1.25, "at most", (f"save {FEW}, no fsync",), why=HASH),
        Row("save 262 MB, checksums included, fsync", BYTES, 1.05, "at most", (f"save {FEW}, fsync",), why=HASH),
        *(
            Row("save 3000 small tensors", rival, reach, "faster", SMALL_SAVES, bound=BYTES, why=DISK)
            for rival, reach in ((FILES, 3), (TORCH, 4))
        ),
        Row("save 3000 small tensors", OTHER, 20, "faster", (f"save {MANY}, no fsync",), why=FILES_OF_OTHERS),
        Row("load 3000 tensors", LOAD, 6, "faster", (f"load {MANY}",), why=PLACES),
        Row("load 200 tensors", LOAD, 4, "faster", (f"load {FEW}",), why=PLACES),
        Row("load 3000 tensors, verified", LOAD, 3, "faster", (f"load {MANY}, verified",), why=PLACES),
        Row("load 200 tensors, verified", READ, 1.3, "at most", (f"load {FEW}, verified",)),
        Row(
            "open and read 1 % of 3000 tensors, verified, cold",
            OPEN,
            2,
            "faster",
            (f"open {MANY}, read 1 %, cold",),
            why=ENTRIES,
        ),
        Row(
            "open and read 1 % of 200 tensors, verified, cold",
            OPEN,
            1.2,
            "faster",
            (f"open {FEW}, read 1 %, cold",),
            why=ENTRIES,
        ),
    ),
    (save_ways, write_bytes, memmap_way, load_ways, partial_ways),
    clock="wall",
)
