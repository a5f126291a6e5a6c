"""`load(like=from_module(model))` takes what the commands wrote of a model wherever it takes the original."""

import pytest
import safetensors.torch
import torch
from torch import nn

import tdfunc as tdf
from tests.cli.helpers import run
from tests.storage.trees import assert_same


class Model(nn.Module):
    """A module with a leaf of every kind, and a tie."""

    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("places", torch.arange(3), persistent=False)
        self.note = "first"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Plain(Model):
    """The module without extra state, which a file of safetensors' own writer cannot hold."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def write_state(folder):
    """Write a state dict by safetensors' own writer, a tied leaf under its first name; return a tree of the model."""
    model = Plain()
    state = {name: leaf for name, leaf in model.state_dict().items() if name != "out.weight"}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return tdf.from_module(model)


def write_tree(folder):
    """Write the tree of a model, with its kinds; return it."""
    tree = tdf.from_module(Model())
    tdf.save(tree, folder / "model.safetensors")
    return tree


def write_parameters(folder):
    """Write the parameters only; return them."""
    params, _ = tdf.split(tdf.from_module(Model()))
    tdf.save(params, folder / "model.safetensors")
    return params


ORIGINALS = {"state dict": write_state, "tree": write_tree, "parameters": write_parameters}
# The arguments before the output.
COMMANDS = {
    "convert": ["convert", "{}"],
    "extract": ["extract", "{}", "--filter", "*", "--out"],
    "cast": ["cast", "{}", "--dtype", "float32", "--out"],
    "average": ["average", "{}", "{}", "--out"],
    "merge": ["merge", "{}", "{}", "--method", "linear", "--weight", "0.5", "--weight", "0.5", "--out"],
}
TARGETS = {"safetensors": "copy.safetensors", "shards": "copy", "memmap": "copy"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("original", ORIGINALS)
def test_a_copy_loads_as_the_original(original, command, target, tmp_path):
    """A checkpoint that a command wrote gives the tree that the original gives."""
    like = ORIGINALS[original](tmp_path)
    given = [part.format(tmp_path / "model.safetensors") for part in COMMANDS[command]]
    assert run(*given, tmp_path / TARGETS[target], "--to", target).code == 0

    copied, whole = (tdf.load(tmp_path / name, like=like) for name in (TARGETS[target], "model.safetensors"))

    # `extract` with a pattern leaves non-tensor data out.
    assert_same(copied, whole.exclude("_extra_state") if command == "extract" else whole)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_copy_of_a_torch_file_loads(command, tmp_path):
    """A state dict of torch.save becomes a checkpoint of its model, which computes its buffers itself."""
    model = Model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    given = [part.format(tmp_path / "model.pt") for part in COMMANDS[command]]
    assert run(*given, tmp_path / "copy.safetensors").code == 0

    tree = tdf.load(tmp_path / "copy.safetensors", like=tdf.from_module(model))

    assert all(torch.equal(tree[path], tdf.from_module(model)[path]) for path in tree.paths())


def test_a_tree_with_kinds_has_all_its_buffers(tmp_path):
    """A tree that records kinds, and lacks a buffer that is not persistent, is of another model."""
    like = tdf.from_module(Model())
    tdf.save(like.exclude("places"), tmp_path / "model.safetensors")

    with pytest.raises(tdf.TreeStructureError, match="missing:    places"):
        tdf.load(tmp_path / "model.safetensors", like=like)
