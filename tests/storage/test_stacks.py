"""Lazy stacks in every kind of file: their class follows from that of their trees."""

import pytest
import torch

import tdfunc
from tdfunc import AsyncSaver, CheckpointManager, CorruptCheckpointError, LazyStack, TensorClass, TensorDict, lazy_stack
from tests.storage.trees import forge


class Point(TensorClass):
    x: torch.Tensor
    note: str = "none"


def points():
    """A lazy stack of typed trees, in a tree and in a lazy stack of its own."""
    stack = lazy_stack([Point(torch.rand(n, 2), "é", batch_size=[n]) for n in (1, 3)], dim=1)
    return TensorDict({"one": stack, "two": lazy_stack([stack, stack.detach()])})


def single(tree, folder):
    """Save one file and load it."""
    tdfunc.save(tree, folder / "x.safetensors")
    return tdfunc.load(folder / "x.safetensors")


def shards(tree, folder):
    """Save a folder of shards and load it."""
    tdfunc.save(tree, folder / "shards", max_shard_size=8)
    return tdfunc.load(folder / "shards")


def handle(tree, folder):
    """Save one file and read it through a handle."""
    tdfunc.save(tree, folder / "x.safetensors")
    with tdfunc.open(folder / "x.safetensors") as f:
        return f.load()


def like(tree, folder):
    """Save one file and compare it with the tree as it is loaded."""
    tdfunc.save(tree, folder / "x.safetensors")
    return tdfunc.load(folder / "x.safetensors", like=tree)


def background(tree, folder):
    """Save one file in the background and load it."""
    with AsyncSaver() as saver:
        saver.save(tree, folder / "x.safetensors")
    return tdfunc.load(folder / "x.safetensors")


def manager(tree, folder):
    """Save a step and load it."""
    steps = CheckpointManager(folder / "run")
    steps.save(1, tree)
    return steps.load()


def memmap(tree, folder):
    """Write a memmap folder and load it."""
    tree.memmap(folder / "mm")
    return tdfunc.load(folder / "mm")


@pytest.mark.parametrize("way", [single, shards, handle, like, background, manager, memmap])
def test_stacks_of_typed_trees(way, tmp_path):
    """A lazy stack of a user's class would be written, and refused when it is read: no module holds its class."""
    tree = points()

    back = way(tree, tmp_path)

    for got, saved in zip((back["one"], *back["two"].trees), (tree["one"],) * 3, strict=True):
        assert isinstance(got, Point)
        assert isinstance(got, LazyStack)
        assert (got.batch_size, got.stack_dim) == (saved.batch_size, 1)
        assert [part.x.tolist() for part in got.trees] == [part.x.tolist() for part in saved.trees]
        assert [part.note for part in got.trees] == ["é", "é"]


def test_stacks_without_their_class(tmp_path):
    """With `classes=TensorDict` a stack would become a tree whose batch size its leaves do not have."""
    tdfunc.save(points(), tmp_path / "x.safetensors")

    back = tdfunc.load(tmp_path / "x.safetensors", classes=TensorDict)

    assert type(back["one"]) is LazyStack
    assert [type(part) for part in back["one"].trees] == [TensorDict, TensorDict]
    assert back["two"].batch_size == points()["two"].batch_size


NODE = {"keys": ["s"], "items": [{"tree": 1}]}
STACK = {"size": [2], "class": "tdfunc._lazystack.stack:LazyStack", "own": -1}
PART = {"size": [], "keys": [], "items": []}
TWO = {"keys": ["0", "1"], "items": [{"tree": 2}, {"tree": 3}]}


@pytest.mark.parametrize(
    ("stack", "parts", "expected"),
    [
        ({**STACK, "keys": ["0", "2"], "items": TWO["items"]}, [PART, PART], r"in order\n  got:      \['0', '2'\]"),
        ({**STACK, "keys": [], "items": []}, [], r"in order\n  got:      \[\]"),
        (
            {**STACK, "keys": ["0", "1"], "items": [{"value": 1}, {"value": 2}]},
            [],
            r"in order\n  got:      \['0', '1'\]",
        ),
        ({**STACK, **TWO}, [PART, {**PART, "size": [2]}], r"number of dimensions, in order"),
        ({**STACK, **TWO, "own": -2}, [PART, PART], r"batch size is \[2\]\n  got:      -2"),
        ({**STACK, **TWO, "own": 0}, [PART, PART], r"batch size is \[2\]\n  got:      0"),
        ({**STACK, **TWO, "own": None}, [PART, PART], r"batch size is \[2\]\n  got:      None"),
        ({**STACK, **TWO, "size": [3]}, [PART, PART], r"batch size \[3\]\n  got:      \[2\]"),
    ],
)
def test_stacks_that_lie(stack, parts, expected, tmp_path):
    """A file could make a stack whose size, dimension or trees are not what it says, and fail when it is used."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(forge({"specs": [], "nodes": [NODE, stack, *parts], "ties": []}, []))

    with pytest.raises(CorruptCheckpointError, match=expected):
        tdfunc.load(path)
