"""Folders of this machine: a URL is refused, and is not the name of a new folder in the current one."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import tdfunc as tdf
from tdfunc import TensorDict
from tests.llm.tokens import make_tokenizer
from tests.lora.layers import trained


def save_adapter(folder):
    """Save an adapter to a folder."""
    apply, params, _ = tdf.functional(nn.Sequential(nn.Linear(3, 4)))
    lora = tdf.lora.Lora("0.weight", rank=2)
    tdf.lora.save(folder, lora, trained(lora, params, apply, 0), apply)


def save_model(folder):
    """Save a model of transformers to a folder."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, **sizes))
    tdf.llm.save_pretrained(tdf.from_module(model), folder, model=model)


def sweep(folder):
    """Train members with their checkpoints in a folder."""
    run = TensorDict({"lr": torch.ones(2)}, [2])
    tdf.sweep.train_blocks(run, lambda run, rung: (run, run["lr"]), rungs=1, folder=folder, chunk_size=2, num_workers=0)


def cache_tokens(folder):
    """Keep tokens in a folder."""
    tdf.llm.load_tokens(make_tokenizer(), ["a"], cache_dir=folder)


WRITERS = [save_adapter, save_model, sweep, cache_tokens]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("url", ["s3://bucket/a", "memory://a"])
def test_a_url_is_refused(write, url, here):
    """The message says that the folder is of this machine."""
    with pytest.raises(tdf.UnsupportedError, match=rf"{url}(.|\n)*a folder of this machine"):
        write(url)


@pytest.mark.parametrize("write", [save_adapter, save_model, sweep])
def test_a_url_of_this_machine_is_its_path(write, here):
    """As for `tdf.save`, the protocol `file://` is left out."""
    write(f"file://{here}/out")

    assert [path.name for path in here.iterdir()] == ["out"]
