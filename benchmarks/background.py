"""Saving in the background: how long the caller is blocked, against copying the tree first."""

import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tdfunc as tdf
from benchmarks import storage
from benchmarks.measure import Fresh
from benchmarks.rows import Case, Row, Suite
from benchmarks.storage import FEW, MANY, Leaves, scratch, tree_of

COPY, NEW = "copying the tree first", "copying it into new memory"


def blocked_ways(leaves: Leaves, folder: Path) -> dict[str, Fresh]:
    """Submit a save, or copy what it would write; nothing else runs meanwhile, since earlier saves have ended."""
    tree, saver = tree_of(leaves), tdf.AsyncSaver(max_pending=64)

    def submit(_: None) -> Any:
        return saver.save(tree, folder / "tree.safetensors", fsync=False)

    return {
        "tdfunc": Fresh(saver.wait, submit),
        COPY: Fresh(saver.wait, lambda _: tree.clone()),
        NEW: Fresh(saver.wait, lambda _: tree.apply(copy_to_new_memory)),
    }


def copy_to_new_memory(leaf: Tensor) -> Tensor:
    """As an allocator does that has no memory left over: of leaves above 32 MB, malloc keeps none."""
    return torch.frombuffer(mmap.mmap(-1, leaf.nbytes), dtype=leaf.dtype).view(leaf.shape).copy_(leaf)


def async_cases() -> list[Case]:
    folder = scratch("async")
    return [
        Case(f"submit {what}", dict(blocked_ways(leaves, folder)))
        for what, leaves in ((FEW, storage.large_leaves()), (MANY, storage.small_leaves()))
    ]


SUITE = Suite(
    "async",
    "Saving in the background",
    "The time is the time that the caller waits. The rival copies the tree. Only the tree uses its leaves: a "
    "thread computes the checksums of leaves above 64 kB, and the others are hashed at once.",
    async_cases,
    (Row("async save of 262 MB, time the caller is blocked", COPY, 0.1, "at most", (f"submit {FEW}",)),),
    (blocked_ways, copy_to_new_memory),
    clock="wall",
)
