"""The trees of the golden files, built from constants."""

import torch
from torch import nn

import tdfunc as tdf


class GoldenPoint(tdf.TensorClass):
    """A typed tree that a file names by its class."""

    x: torch.Tensor
    note: str = "none"


class Tied(nn.Module):
    """An embedding whose weight is the head's, a norm with buffers, and one buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3), persistent=False)


def module_tree():
    """Parameters, buffers and a tie, as `from_module` reads them."""
    tree = tdf.from_module(Tied())
    values = (torch.arange(leaf.numel()).reshape(leaf.shape).to(leaf.dtype) for leaf in tree.leaves())
    return tree.apply(lambda leaf: next(values)).detach()


def plain_tree():
    """Dtypes, empty and 0-d leaves, odd keys, names, nested batch sizes and non-tensor values."""
    return tdf.TensorDict(
        {
            "float": torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]]),
            "half": torch.arange(2, dtype=torch.bfloat16),
            "flag": torch.tensor([True, False]),
            "empty": torch.zeros(2, 0),
            "a.b": torch.arange(2),
            "shape": {"x/y": torch.arange(4, dtype=torch.uint8).reshape(2, 2)},
            "inner": tdf.TensorDict({"z": torch.ones(2, 3, 1, dtype=torch.complex64)}, [2, 3], names=["row", "column"]),
            "word": "hello",
            "words": ["a", {"b": [1, None]}],
        },
        [2],
        names=["row"],
    )


def ragged_tree():
    """A lazy stack of typed trees inside of a tree."""
    points = [GoldenPoint(torch.arange(2.0 * n).reshape(n, 2), "é", batch_size=[n]) for n in (1, 3)]
    return tdf.TensorDict({"points": tdf.lazy_stack(points), "n": torch.tensor(2)})


TREES = {"module": module_tree, "plain": plain_tree, "ragged": ragged_tree}


def write(folder):
    """Write every tree in every format below a folder."""
    for name, make in TREES.items():
        tree = make()
        (folder / name).mkdir(parents=True)
        tdf.save(tree, folder / name / "one.safetensors")
        tdf.save(tree, folder / name / "shards", max_shard_size=64)
        tree.memmap(folder / name / "memmap")
    manager = tdf.CheckpointManager(folder / "run")
    manager.save(7, {"params": module_tree(), "rng": torch.arange(3)}, metadata={"loss": 0.5})
