"""Checkpoints that transformers wrote, and ours that it reads."""

import pytest
import safetensors.torch
import torch

import tdfunc
from tdfunc import Kind, TensorDict, TreeStructureError
from tdfunc.storage.api import load, save
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
    """The logits of some tokens."""
    with torch.no_grad():
        return model(TOKENS).logits


def read(folder):
    """The model that transformers reads from a folder."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["two heads", "tied"])
@pytest.mark.parametrize("theirs", ["5GB", "10KB"])
@pytest.mark.parametrize("ours", ["1GB", "8KB", None])
def test_there_and_back(tied, theirs, ours, tmp_path):
    """A model of transformers loads, and transformers reads the edited tree."""
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


def make_bert():
    """A tiny BERT, which has buffers of integers that are not persistent."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def output(model):
    """The output for some tokens."""
    with torch.no_grad():
        return model(TOKENS)[0]


MODELS = {"llama": lambda: make_model(False), "tied llama": lambda: make_model(True), "bert": make_bert}


@pytest.mark.parametrize("size", ["5GB", "10KB"])
@pytest.mark.parametrize("name", MODELS)
def test_like_of_the_model_itself(name, size, tmp_path):
    """Buffers that a module computes itself need not be in a file of transformers."""
    model, other = MODELS[name](), MODELS[name]()
    model.save_pretrained(tmp_path / "m", max_shard_size=size)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    like = TensorDict.from_module(other)
    computed = {path for path in like.paths() if Kind.NON_PERSISTENT is like.kind(path)}

    tree = load(tmp_path / "m", like=like)
    tree.to_module(other)

    assert computed
    assert not computed & set(tree.paths())
    assert torch.equal(output(other), output(model))
    with tdfunc.open(tmp_path / "m") as f:
        assert_same(f.load(like=like), tree)


def test_like_lists_what_is_missing_nevertheless(tmp_path):
    """A parameter that a file lacks is an error, and so is a buffer of another shape that it has."""
    model = make_model(False)
    state = {key: leaf for key, leaf in model.state_dict().items() if key != "model.norm.weight"}
    safetensors.torch.save_file({**state, "model.rotary_emb.inv_freq": torch.ones(5)}, tmp_path / "x.safetensors")

    with pytest.raises(TreeStructureError) as caught:
        load(tmp_path / "x.safetensors", like=TensorDict.from_module(model))

    assert "2 differences" in str(caught.value)
    assert "missing:    model.norm.weight (float32 [16])" in str(caught.value)
    assert "shape:      model.rotary_emb.inv_freq: expected [4], got [5]" in str(caught.value)


def test_like_is_exact_for_our_files(tmp_path):
    """A tree of ours must have the buffers too."""
    tree = TensorDict.from_module(make_model(False))
    save(tree.delete(("model", "rotary_emb", "inv_freq")), tmp_path / "x.safetensors")

    with pytest.raises(TreeStructureError, match=r"1 difference:\n    missing:    model\.rotary_emb\.inv_freq"):
        load(tmp_path / "x.safetensors", like=tree)
