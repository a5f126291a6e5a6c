"""Checkpoints of all formats, and the command in this process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import torch
from torch import nn

from tdfunc import TensorDict, cli, load, save


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def run(*args, stream=io.TextIOWrapper):
    """Run `tdfunc ARGS` in this process, with pipes for its output."""
    out, err = (stream(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code
    for made in (out, err):
        made.flush()
    assert code is not None, "main returns only by exiting"
    return Result(code or 0, *(made.buffer.getvalue().decode() for made in (out, err)))


class Small(nn.Module):
    """Tied weights, and a counter that is no floating number."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.emb.weight


def make_tree():
    """A tree with ties, kinds, an int, an empty leaf and a leaf that is not contiguous."""
    tree = TensorDict.from_module(Small()).clone()
    extra = {"x": torch.arange(12.0).reshape(3, 4).T, "none": torch.empty(0, 3), "half": torch.randn(5).bfloat16()}
    return tree.update({"extra": extra})


WRITERS = {
    "safetensors": ("t.safetensors", lambda tree, path: save(tree, path)),
    "shards": ("shards", lambda tree, path: save(tree, path, max_shard_size=64)),
    "memmap": ("folder", lambda tree, path: tree.memmap(path)),
    "torch": ("t.pt", lambda tree, path: torch.save(tree.state_dict(), path)),
}


def write_as(format, tree, folder):
    """Write a tree in a format, by the library itself or torch; returns the path."""
    name, write = WRITERS[format]
    write(tree, folder / name)
    return folder / name


def read_back(path):
    """The checkpoint at a path, as dotted names and tensors, read by the library itself or torch."""
    if path.is_file() and path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return load(path).state_dict()
