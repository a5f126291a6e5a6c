"""Folders of transformers go into trees and back under their names, or are refused."""

import copy
import json
import os

import pytest
import torch

import tdfunc as tdf
from tdfunc.llm import History, causal_lm, load_pretrained, save_jsonl, save_pretrained
from tdfunc.llm.folders.files import write_beside
from tests.cli.helpers import run
from tests.helpers import quick
from tests.llm.models import FAMILIES, VOCAB, make

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet():
    """No bars of transformers, which would stand between the lines of a test."""
    transformers.utils.logging.disable_progress_bar()


def write(family, folder, **options):
    """A model as transformers saves it, in shards, with a file of a tokenizer."""
    model = make(family, **options)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text('{"kept": true}')
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    return model


def read_beside(folder):
    """The files beside the weights."""
    names = ("config.json", "generation_config.json", "tokenizer.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@pytest.mark.parametrize("family", quick(FAMILIES, "llama", "qwen3_moe", "gpt2", "gpt_oss"))
def test_there_and_back(family, tmp_path):
    """A folder in shards becomes trees, and comes back under the same names, with checksums, for from_pretrained."""
    write(family, tmp_path / "source")
    model = load_pretrained(tmp_path / "source")
    apply, params, buffers = tdf.functional(model)
    new = params.apply(lambda x: 1.5 * x)
    ids = torch.arange(8).reshape(1, -1) % VOCAB

    save_pretrained(tdf.combine(new, buffers), tmp_path / "out", model=model, max_shard_size="20KB")

    assert sorted(tdf.load(tmp_path / "out").paths()) == sorted(tdf.load(tmp_path / "source").paths())
    assert read_beside(tmp_path / "out") == read_beside(tmp_path / "source")
    assert run("verify", tmp_path / "out").code == 0
    again = load_pretrained(tmp_path / "out")
    assert all(map(torch.equal, tdf.functional(again)[1].leaves(), new.leaves()))
    torch.testing.assert_close(again(ids).logits, apply(new, ids, buffers=buffers).logits, rtol=1e-5, atol=1e-4)


def test_merged_folders_load(tmp_path):
    """Folders of a mixture of experts, whose names the module does not have, are merged by name and load."""
    for i in range(2):
        write("qwen3_moe", tmp_path / str(i), initializer_range=0.2 + 0.1 * i)
    models = [load_pretrained(tmp_path / str(i)) for i in range(2)]
    apply = tdf.functional(models[0])[0]
    trees = [tdf.combine(*tdf.functional(model)[1:]) for model in models]
    ids = torch.arange(8).reshape(1, -1)

    result = run("merge", tmp_path / "0", tmp_path / "1", "--method", "linear", "-o", tmp_path / "out")

    assert result.code == 0, result.err
    soup = tdf.weights.linear(None, torch.stack(trees), [1, 1])
    torch.testing.assert_close(load_pretrained(tmp_path / "out")(ids).logits, apply(soup, ids).logits)


def test_without_a_source(tmp_path):
    """A model that was never loaded goes out with its configuration, in the dtype of the tree."""
    model = make("llama", tie_word_embeddings=True)
    params = tdf.from_module(model).detach().apply(lambda x: x.bfloat16())

    save_pretrained(params, out := tmp_path / "new" / "out", model=model)

    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert ("lm_head", "weight") not in tdf.load(out).paths()
    assert load_pretrained(out).lm_head.weight.dtype == torch.bfloat16


def test_the_generation_of_a_model_without_a_folder_is_kept(tmp_path):
    """The tokens that end a response may be there and not in the configuration."""
    model = copy.deepcopy(make("llama"))
    model.generation_config.eos_token_id = [1, 5]

    save_pretrained(tdf.from_module(model), tmp_path, model=model)

    assert causal_lm(load_pretrained(tmp_path))[0].eos_ids == (1, 5)


BESIDE = ["additional_chat_templates/tool_use.jinja", "modeling_own.py", "own.tiktoken", "source.spm", "vocab.bpe"]


@pytest.mark.parametrize("name", BESIDE)
def test_files_of_tokenizers_and_code_are_kept(name, tmp_path):
    """Further templates are in a separate folder."""
    model, file = write("llama", tmp_path / "source"), tmp_path / "source" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("own")

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    assert (tmp_path / "out" / name).read_text() == "own"


@pytest.mark.parametrize("name", BESIDE)
def test_a_merge_keeps_files_of_tokenizers_and_code(name, tmp_path):
    """Those of the first model."""
    for place in ("0", "1"):
        write("llama", tmp_path / place)
    (tmp_path / "0" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "0" / name).write_text("own")

    result = run("merge", tmp_path / "0", tmp_path / "1", "--method", "linear", "-o", tmp_path / "out")

    assert result.code == 0
    assert (tmp_path / "out" / name).read_text() == "own"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_kept_configuration_gets_the_dtype_of_the_tree(name, tmp_path):
    """It has the name that the source uses; the other entries stay."""
    model, file = write("llama", tmp_path / "source"), tmp_path / "source" / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}
    file.write_text(json.dumps({**config, name: "float32"}))
    params = tdf.from_module(model).detach().apply(lambda x: x.bfloat16())

    save_pretrained(params, tmp_path / "out", model=model, source=tmp_path / "source")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, name: "bfloat16"}


@pytest.mark.parametrize(
    "options",
    [
        {"rms_norm_eps": 0.5},
        {"hidden_act": "relu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("is_loaded", [True, False], ids=["an option of load_pretrained", "an assignment"])
def test_a_model_with_other_entries_than_its_folder_comes_back(is_loaded, options, tmp_path):
    """The configuration that is written describes the model that was trained, and keeps what is the folder's."""
    write("llama", tmp_path / "source", initializer_range=0.5)
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "code.Config"}}))
    model = load_pretrained(tmp_path / "source", **options if is_loaded else {})
    for name, value in options.items():
        setattr(model.config, name, value)
    # Modules read their entries when they are made.
    model = type(model)(model.config).eval()
    ids = torch.arange(8).reshape(1, -1)

    save_pretrained(tdf.from_module(model).detach(), tmp_path / "out", model=model, source=tmp_path / "source")

    assert torch.equal(load_pretrained(tmp_path / "out")(ids).logits, model(ids).logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == {"AutoConfig": "code.Config"}


def test_changed_options_of_generation_are_kept(tmp_path):
    """A model that ends its responses with other tokens than its folder says comes back with them."""
    write("llama", tmp_path / "source")
    model = load_pretrained(tmp_path / "source")
    model.generation_config.eos_token_id = [2, 7]

    save_pretrained(tdf.from_module(model).detach(), tmp_path / "out", model=model)

    assert load_pretrained(tmp_path / "out").generation_config.eos_token_id == [2, 7]


LAYER = ("model", "layers", "0")


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda tree: tree.delete(("model", "norm")), tdf.TreeStructureError, r"expected: 1 leaf more: model\.norm"),
        (lambda tree: tree.delete((*LAYER, "mlp")), tdf.TreeStructureError, r"3 leaves more: \S+, \S+, \S+weight\n"),
        (lambda tree: tree.delete((*LAYER, "self_attn")), tdf.TreeStructureError, r"4 leaves more: (\S+, ){3}\.\.\."),
        (lambda tree: tree.set(("model", "own"), torch.zeros(1)), tdf.TreeStructureError, r"got:.*own"),
        (lambda tree: tree.set(("model", "norm", "weight"), torch.zeros(3)), tdf.LeafMismatchError, r"32.\s+got: +\[3"),
    ],
)
def test_other_leaves_are_refused(change, kind, text, tmp_path):
    """In a tree, of which nothing is written, and in a folder, where transformers only logs them."""
    model, source = write("llama", tmp_path / "source"), tmp_path / "source"
    tree = change(tdf.load(source))

    with pytest.raises(kind, match=text):
        save_pretrained(tree, tmp_path / "out", model=model)
    assert not (tmp_path / "out").exists()
    tdf.save(tree, source, max_shard_size="20KB")
    with pytest.raises(kind, match=text):
        load_pretrained(source)


def test_other_models_are_refused(tmp_path):
    """Ties that the tree does not have, names and shapes that the source does not have, and heads without weights."""
    write("llama", tmp_path / "llama")
    tied, head = make("llama", tie_word_embeddings=True), ("lm_head", "weight")
    loose = tdf.from_module(tied).detach().untie(head).set(head, torch.zeros(VOCAB, 32))
    cases = [
        (make("gpt2"), "llama", tdf.UnsupportedError, "get the names of .*llama"),
        (
            make("llama", vocab_size=50),
            "llama",
            tdf.UnsupportedError,
            r"another shape than in (?s:.*)97, 32(?s:.*)50, 32",
        ),
        (make("gpt2"), "none", FileNotFoundError, "is not a folder"),
        (torch.nn.Linear(2, 2), "llama", tdf.UnsupportedError, "not a model of transformers"),
    ]
    for model, source, kind, text in cases:
        with pytest.raises(kind, match=text):
            save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / source)
    with pytest.raises(tdf.TieError, match=r"lm_head.weight and model.embed_tokens.weight are tied"):
        save_pretrained(loose, tmp_path / "out", model=tied)
    assert not (tmp_path / "out").exists()
    with pytest.raises(tdf.TreeStructureError, match=r"of LlamaForSequenceClassification(?s:.)*score\.weight"):
        load_pretrained(tmp_path / "llama", cls=transformers.LlamaForSequenceClassification)


BESIDE = ("modeling_own.py", "words.tiktoken", "source.spm", "additional_chat_templates/rag.jinja")


@pytest.mark.parametrize("name", BESIDE)
def test_code_words_and_further_templates_are_kept(name, tmp_path):
    """Without one of them a model with its own code, a tokenizer or a kind of chat would not load."""
    model = write("llama", tmp_path / "source")
    (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "source" / name).write_text("kept")

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    assert (tmp_path / "out" / name).read_text() == "kept"


def test_a_merge_keeps_further_templates(tmp_path):
    """As the first of them, which is a file beside the weights."""
    for name in "ab":
        write("llama", tmp_path / name)
        (tmp_path / name / "additional_chat_templates").mkdir()
        (tmp_path / name / "additional_chat_templates" / "rag.jinja").write_text(name)

    result = run("merge", tmp_path / "a", tmp_path / "b", "--method", "linear", "-o", tmp_path / "out")

    assert result.code == 0, result.err
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").read_text() == "a"


def write_parts(folder):
    """The parts of sentence-transformers behind a model: one without weights, one with them, one without a folder."""
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    listed = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(parts.items())]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"own": 1}')


PARTS = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_sentence_transformers_are_kept(name, tmp_path):
    """`modules.json` names them; without them the model does not load."""
    model = write("llama", tmp_path / "source")
    write_parts(tmp_path / "source")

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    assert (tmp_path / "out" / name).read_text() == '{"own": 1}'


@pytest.mark.parametrize("name", PARTS)
def test_a_merge_keeps_parts_of_sentence_transformers(name, tmp_path):
    """Those of the first model."""
    for place in "ab":
        write("llama", tmp_path / place)
    write_parts(tmp_path / "a")

    run("merge", tmp_path / "a", tmp_path / "b", "--method", "linear", "-o", tmp_path / "out")

    assert (tmp_path / "out" / name).read_text() == '{"own": 1}'


def test_a_merge_names_weights_that_it_does_not_merge(tmp_path):
    """A part behind the model is the first model's."""
    for place in "ab":
        write("llama", tmp_path / place)
    write_parts(tmp_path / "a")

    result = run("merge", tmp_path / "a", tmp_path / "b", "--method", "linear", "-o", tmp_path / "out")

    assert "2_Dense/model.safetensors is the first model's" in result.err


@pytest.mark.parametrize("listed", ["{", "5", '[{"path": "../other"}, {"path": 3}, 4, {"path": "missing"}]'])
def test_another_list_of_modules_is_kept_as_it_is(listed, tmp_path):
    """Only folders inside the folder are parts."""
    model = write("llama", tmp_path / "source")
    (tmp_path / "source" / "modules.json").write_text(listed)

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    assert (tmp_path / "out" / "modules.json").read_text() == listed


def test_a_folder_without_the_prefix_of_the_head_comes_back(tmp_path):
    """GPT-2's own folder has the names of the model without its head."""
    make("gpt2").transformer.save_pretrained(tmp_path / "source")
    model = load_pretrained(tmp_path / "source", cls=transformers.GPT2LMHeadModel)

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model)

    assert tdf.load(tmp_path / "out").paths() == tdf.load(tmp_path / "source").paths()


def test_a_model_without_its_head_comes_back_with_the_prefix(tmp_path):
    """The head is tied, so that the folder of the whole model has the leaves of the model without it."""
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    model = load_pretrained(tmp_path / "source", cls=transformers.AutoModel)

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model)

    assert tdf.load(tmp_path / "out").paths() == tdf.load(tmp_path / "source").paths()


def add_leaves(folder, leaves):
    """A folder with more leaves than its model has."""
    tree = tdf.load(folder)
    for name, leaf in leaves.items():
        tree = tree.set(tuple(name.split(".")), leaf)
    tdf.save(tree, folder, max_shard_size="20KB")


def test_leaves_that_transformers_does_not_load_are_named(tmp_path):
    """A model may ignore layers for the prediction of several tokens, without a word."""
    model = write("llama", tmp_path / "source")
    add_leaves(tmp_path / "source", {"mtp.norm.weight": torch.ones(3)})

    with pytest.warns(UserWarning, match=r"left out(?s:.)*1 leaf more: mtp\.norm\.weight"):
        save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")


def describe_codes(folder):
    """Files that describe FP8 codes."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    (folder / "hf_quant_config.json").write_text('{"quantization_config": {"quant_algo": "FP8"}}')


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_numbers_are_not_described_as_codes(name, tmp_path):
    """The scales of the codes are not in the model, so that a reader would take its numbers for codes."""
    model = write("llama", tmp_path / "source")
    describe_codes(tmp_path / "source")
    add_leaves(tmp_path / "source", {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)})

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    written = tmp_path / "out" / name
    assert not written.exists() or "quantization_config" not in json.loads(written.read_text())


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_description_of_other_codes_is_kept(name, tmp_path):
    """The leaves are those of the folder, with which it was described."""
    model = write("llama", tmp_path / "source")
    describe_codes(tmp_path / "source")

    save_pretrained(tdf.from_module(model), tmp_path / "out", model=model, source=tmp_path / "source")

    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_the_hint_for_a_folder_of_torch_makes_it_a_source(tmp_path):
    """The names of files of torch.save are not read; the line of the error writes files whose names are."""
    own = make("llama")
    own.config.save_pretrained(tmp_path)
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
    model = load_pretrained(tmp_path)
    tree = tdf.combine(*tdf.functional(model)[1:])

    with pytest.raises(tdf.UnsupportedError, match="has no safetensors, whose names are compared") as refused:
        save_pretrained(tree, tmp_path / "out", model=model)
    line = str(refused.value).split("tdfunc convert ")[1].split(", in a shell")[0]

    assert run("convert", *line.split()).code == 0
    save_pretrained(tree, tmp_path / "out", model=model)
    assert (tmp_path / "out" / "config.json").exists()


def test_other_files_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """Files of a tokenizer and conversations are synchronised, as leaves are."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or fsync(fd))
    write_beside(str(tmp_path), {"tokenizer.json": b"{}", "merges.txt": b"a b c"})

    save_jsonl(History.from_chats([{"role": "user", "content": "ü"}]), tmp_path / "a.jsonl")
    line = '{"messages": [{"role": "user", "content": "ü"}]}\n'.encode()
    assert {2, 5, len(line)} <= {*synced}
    assert (tmp_path / "a.jsonl").read_bytes() == line
