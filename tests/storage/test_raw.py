"""The bytes of a leaf, whatever its strides, by every way in which a leaf is written."""

import pytest
import torch
from torch import nn

from tdfunc import AsyncSaver, CheckpointManager, TensorDict, init_ensemble, load, save
from tdfunc.parallel.parcel import from_parcel, to_parcel
from tdfunc.storage.disk.raw import raw_bytes, raw_view

# torch counts a dimension of one element as contiguous whatever its stride is.
ONES = {
    "a column of one row": lambda: torch.arange(5.0).reshape(1, 5)[:, 0],
    "one of every second": lambda: torch.arange(4.0)[::2][:1],
    "an imaginary part": lambda: torch.tensor([1 + 2j]).imag,
    "a negative one": lambda: torch.tensor([1 + 2j]).conj().imag,
    "a negative one in two dimensions": lambda: torch.tensor([[1 + 2j]]).conj().imag,
    "a conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "a negative scalar": lambda: torch.tensor(1 + 2j).conj().imag,
    "no negative ones": lambda: torch.empty(0, dtype=torch.complex64).conj().imag,
    "no column": lambda: torch.empty(0, 5)[:, 3],
    "bfloat16": lambda: torch.arange(4.0).bfloat16()[::2][:1],
    "of a module": lambda: nn.Parameter(torch.arange(5.0).reshape(1, 5)[:, 2]),
    "expanded": lambda: torch.tensor(3.0).expand(1),
}


def saved(tree, path, **options):
    """What `load` gives of a tree that was saved."""
    save(tree, path, fsync=False, **options)
    return load(path)


def saved_async(tree, path, **options):
    """What `load` gives of a tree that was saved in the background."""
    with AsyncSaver() as saver:
        saver.save(tree, path, fsync=False, **options)
    return load(path)


def mapped(tree, folder):
    """What is in the folder of a memmap."""
    tree.memmap(folder)
    return load(folder)


WAYS = {
    "save": lambda tree, folder: saved(tree, folder / "x.safetensors"),
    "shards": lambda tree, folder: saved(tree, folder / "x", max_shard_size=4),
    "in the background": lambda tree, folder: saved_async(tree, folder / "x.safetensors"),
    "in the background, checked": lambda tree, folder: saved_async(tree, folder / "x.safetensors", copy=False),
    "a step": lambda tree, folder: load(CheckpointManager(folder, fsync=False).save(1, tree).result()),
    "memmap": lambda tree, folder: tree.memmap(folder / "x"),
    "memmap, read": lambda tree, folder: mapped(tree, folder / "x"),
    "memmap_": lambda tree, folder: tree.clone(False).memmap_(folder / "x"),
    "to a worker": lambda tree, _: from_parcel(to_parcel(tree)),
}


@pytest.mark.parametrize("name", ONES)
def test_bytes_are_those_of_a_copy(name):
    """The bytes of one element were refused where its stride is not 1."""
    leaf = ONES[name]()
    plain = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf.detach())

    assert raw_bytes(leaf).tobytes() == raw_view(plain).tobytes()
    assert raw_bytes(leaf).nbytes == leaf.numel() * leaf.element_size()


def test_what_is_written_to_the_view_is_in_the_tensor():
    """Values that are read from a file into a tensor would be lost."""
    leaf = torch.arange(5.0).reshape(1, 5)[:, 3]

    raw_view(leaf)[:] = raw_bytes(torch.tensor([7.0]))

    assert leaf.item() == 7.0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_writes_them(way, tmp_path):
    """An ordinary leaf of one element ended a save in an error of torch that names no leaf."""
    leaves = {name: make() for name, make in ONES.items()}

    back = WAYS[way](TensorDict({"a": leaves, "y": torch.ones(3)}), tmp_path)

    assert [name for name, leaf in leaves.items() if not torch.equal(back["a", name], leaf)] == []
    assert back["y"].tolist() == [1.0] * 3


class Strided(nn.Module):
    """A parameter and a buffer as above."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, 5)[:, 0])
        self.register_buffer("phase", torch.rand(2, dtype=torch.complex64).conj().imag)


def test_members_of_an_ensemble():
    """`init_ensemble` compares the members by their bytes."""
    tree = init_ensemble(Strided, 2)

    assert tree["weight"].shape == (2, 1)
    assert tree["phase"].shape == (2, 2)
    with pytest.raises(ValueError, match="members 0 and 1 are equal"):
        init_ensemble(lambda: nn.ParameterList([torch.ones(1, 5)[:, 0]]), 2)
