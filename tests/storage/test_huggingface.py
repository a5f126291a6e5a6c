"""Checkpoints that transformers wrote, and ours that it reads."""

import os

import pytest
import torch

import tdfunc
from tdfunc import TensorDict
from tdfunc.storage.checkpoint import load, save
from tests.storage.trees import assert_same

# An optional package of the `llm` extra; .ci/run installs it.
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing is looked up on a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_model(tied):
    """A tiny llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def logits(model):
    """What a model says to some tokens."""
    with torch.no_grad():
        return model(TOKENS).logits


def read(folder):
    """The model that transformers reads from a folder."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["two heads", "tied"])
@pytest.mark.parametrize("theirs", ["5GB", "10KB"])
@pytest.mark.parametrize("ours", ["1GB", "8KB", None])
def test_there_and_back(tied, theirs, ours, tmp_path):
    """A model of transformers would not load, or transformers not read what was saved after an edit."""
    model = make_model(tied)
    folder = tmp_path / "hf"
    model.save_pretrained(folder, max_shard_size=theirs)

    tree = load(folder)
    assert torch.equal(
        tree["model", "layers", "1", "mlp", "up_proj", "weight"], model.model.layers[1].mlp.up_proj.weight
    )
    edited = tree.at["model", "norm", "weight"].mul(2.0)
    if ours is None:
        save(edited, folder / "model.safetensors")
    else:
        save(edited, folder, max_shard_size=ours)

    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    torch.testing.assert_close(logits(read(folder)), logits(model), rtol=0, atol=0)
    assert_same(load(folder), edited)


@pytest.mark.parametrize("tied", [False, True], ids=["two heads", "tied"])
def test_a_tree_from_a_module(tied, tmp_path):
    """A tied head, which is stored once, would be missing for transformers."""
    model = make_model(tied)
    model.config.save_pretrained(tmp_path / "m")
    tree = TensorDict.from_module(model)

    save(tree, tmp_path / "m", max_shard_size="8KB")

    torch.testing.assert_close(logits(read(tmp_path / "m")), logits(model), rtol=0, atol=0)
    assert_same(load(tmp_path / "m"), tree)
    assert len([name for name in os.listdir(tmp_path / "m") if name.endswith(".safetensors")]) > 2


def test_like_of_a_model_that_has_no_memory(tmp_path):
    """A checkpoint could not be compared with the model that is to take it before memory is spent."""
    model = make_model(False)
    model.save_pretrained(tmp_path / "m", max_shard_size="10KB")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(model.config)
    like, _ = tdfunc.split(TensorDict.from_module(empty))

    tree = load(tmp_path / "m", like=like, dtype=torch.float32)

    assert set(tree.paths()) == set(like.paths())
    with tdfunc.open(tmp_path / "m") as f:
        assert torch.equal(f["lm_head", "weight"], model.lm_head.weight)
        assert torch.equal(f.slice(("lm_head", "weight"), slice(3, 5)), model.lm_head.weight[3:5])
