"""Entries beside the weights that name layers or tokens by number follow a merge, or are refused by name."""

import json
import shutil

import pytest
import safetensors.torch
import torch

import tdfunc as tdf
from tests.cli.helpers import run
from tests.cli.test_merge_layers import edit_config, rearrange

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}


def write_llama(folder, seed=0, **more):
    """Write a folder of transformers."""
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more})).save_pretrained(folder)


# -- layers by number -----------------------------------------------------------------------------------------------

NAMED = [
    {"ignored_layers": ["lm_head", "model.layers.0.mlp.down_proj"]},
    {"modules_to_not_convert": ["model.layers.1"]},
    {"dynamic": {"-:model.layers.2.mlp": {}}},
    {"ignore": ["re:.*layers\\.(0|1)\\.mlp.*"]},
]
UNNAMED = [
    {"ignored_layers": ["lm_head", "mlp.gate"]},
    {"ignore": ["re:model.layers.[0-9]+.mlp.*", "re:.*layers\\.\\d+\\.mlp.*"]},
]


def describe_codes(folder, entries):
    """Add a description of codes to config.json."""
    edit_config(folder, lambda document: document.update(quantization_config={"quant_method": "fp8", **entries}))


@pytest.mark.parametrize("entries", NAMED)
def test_an_entry_that_names_a_moved_layer_is_refused(entries, tmp_path):
    """The number in a name would be that of another layer."""
    write_llama(tmp_path / "a")
    describe_codes(tmp_path / "a", entries)

    result = rearrange(tmp_path / "a", tmp_path / "out", [[1, 3], [0, 1]])

    assert result.code == 2
    assert f"quantization_config.{next(iter(entries))}" in result.err
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("entries", UNNAMED)
def test_an_entry_for_all_layers_is_kept(entries, tmp_path):
    """A pattern without a number describes layers in any order."""
    write_llama(tmp_path / "a")
    describe_codes(tmp_path / "a", entries)

    assert rearrange(tmp_path / "a", tmp_path / "out", [[1, 3], [0, 1]]).code == 0


def test_the_first_layers_keep_their_names(tmp_path):
    """Layers that keep their numbers are named as before."""
    write_llama(tmp_path / "a")
    describe_codes(tmp_path / "a", NAMED[0])

    assert rearrange(tmp_path / "a", tmp_path / "out", [[0, 2]]).code == 0


def test_another_file_of_the_model_may_name_layers(tmp_path):
    """ModelOpt writes the names into a file of its own."""
    write_llama(tmp_path / "a")
    about = {"quantization": {"exclude_modules": ["model.layers.0.self_attn*"]}}
    (tmp_path / "a" / "hf_quant_config.json").write_text(json.dumps(about))

    result = rearrange(tmp_path / "a", tmp_path / "out", [[1, 3], [0, 1]])

    assert "quantization.exclude_modules in" in result.err


def test_layers_of_other_positions_are_refused(tmp_path):
    """One model has one rule of positions, which is not in its layers."""
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "b", 1, rope_theta=1e6)

    result = rearrange(None, tmp_path / "out", [(str(tmp_path / "a"), [0, 2]), (str(tmp_path / "b"), [0, 2])])

    assert result.code == 2
    assert "config.rope_parameters" in result.err


def test_entries_of_other_models_are_noted(tmp_path):
    """A merge computes with the entries of the first model; others are named."""
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "b", 1, hidden_act="gelu")

    result = run("merge", tmp_path / "a", tmp_path / "b", "--method", "linear", "-o", tmp_path / "out")

    assert result.code == 0
    assert "config.json has hidden_act 'gelu', and the result has 'silu'" in result.err


def test_a_model_in_a_file_has_no_entries(tmp_path):
    """A file beside a folder is merged as before."""
    write_llama(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "b.safetensors")

    assert (
        run("merge", tmp_path / "a", tmp_path / "b.safetensors", "--method", "linear", "-o", tmp_path / "o").code == 0
    )


def merge_slices(folder, *sources, **more):
    """Merge all layers of several models as one slice."""
    parts = [{"model": str(folder / name), "layer_range": [0, 3]} for name in sources]
    document = {"merge_method": "linear", "parameters": {"weight": 1}, "slices": [{"sources": parts}], **more}
    (folder / "c.yml").write_text(json.dumps(document))
    return run("merge", "--config", folder / "c.yml", "-o", folder / "out")


def test_leaves_of_a_slice_that_the_first_model_lacks_are_not_lost(tmp_path):
    """The biases of the second model have no place in the layers of the first."""
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "b", 1, attention_bias=True)

    result = merge_slices(tmp_path, "a", "b")

    assert result.code == 2
    assert "bias, which would be lost" in result.err


def test_leaves_of_the_base_that_a_slice_lacks_are_not_lost(tmp_path):
    """A base that is not among the models has no further leaves either."""
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "b", 1, attention_bias=True)

    result = merge_slices(tmp_path, "a", merge_method="task_arithmetic", base_model=str(tmp_path / "b"))

    assert result.code == 2
    assert "bias, which would be lost" in result.err


# -- tokens by number -----------------------------------------------------------------------------------------------

WORDS = {
    "a": ["<unk>", "</s>", "<pad>", "x", "y"],
    "b": ["y", "x", "<pad>", "z", "<unk>", "</s>"],
    "c": ["y", "x", "<unk>", "z"],
}


@pytest.fixture
def spoken(tmp_path):
    """Three models with one word at different numbers; c lacks the end of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    for seed, (name, words) in enumerate(WORDS.items()):
        ends = {"eos_token_id": words.index("</s>"), "pad_token_id": words.index("<pad>")} if name != "c" else {}
        write_llama(tmp_path / name, seed, **ends)
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>"
        )
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def merge_words(folder, source):
    """Merge three models with the vocabulary of a source."""
    models = [{"model": str(folder / name), "parameters": {"weight": 1}} for name in WORDS]
    where = source if source == "union" else str(folder / source)
    document = {"merge_method": "linear", "models": models, "tokenizer": {"source": where}}
    (folder / "c.yml").write_text(json.dumps(document))
    return run("merge", "--config", folder / "c.yml", "-o", folder / "out")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("source", "words"), [("b", WORDS["b"]), ("union", [*WORDS["a"], "z"])], ids=["b", "union"])
def test_tokens_keep_their_meaning(file, source, words, spoken):
    """The end of a text has the number that it has in the vocabulary of the result."""
    edit = {"eos_token_id": [1, 4], "pad_token_id": 2, "bos_token_id": None, "suppress_tokens": [-1]}
    path = spoken / "a" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))

    result = merge_words(spoken, source)

    assert result.code == 0, result.err
    found = json.loads((spoken / "out" / file).read_text())
    assert {name: found[name] for name in edit} == {
        "eos_token_id": [words.index("</s>"), words.index("y")],
        "pad_token_id": words.index("<pad>"),
        "bos_token_id": None,
        "suppress_tokens": [-1],
    }


def test_a_token_that_the_result_lacks_is_named(spoken):
    """No number would mean the end of a text."""
    result = merge_words(spoken, "c")

    assert result.code == 2
    assert "names a token that the tokenizer of the result does not have" in result.err


# -- codes ----------------------------------------------------------------------------------------------------------


def test_a_description_of_codes_beside_numbers_is_noted(tmp_path):
    """The library of the folder would take the numbers for codes."""
    weight = torch.tensor([[448.0, 2.0]]).to(torch.float8_e4m3fn)
    state = {"q.weight": weight, "q.weight_scale_inv": torch.full((1, 1), 0.5)}
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file(state, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))

    result = run("convert", tmp_path / "a", tmp_path / "a", "--to", "shards", "--dequantize", "--force")

    assert "has quantization_config, and the result has no codes" in result.err
    assert "codes and not their scales" not in result.err
    assert tdf.load(tmp_path / "a")["q", "weight"].tolist() == [[224.0, 1.0]]
