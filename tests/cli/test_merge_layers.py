"""What belongs together in models stays together: tied leaves, and layers with what config.json says of them."""

import copy
import json

import pytest
import torch
import yaml

import tdfunc as tdf
from tests.cli.helpers import run
from tests.lora.layers import llama

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 4,
}


def gpt2(folder):
    """GPT-2 whose layers scale their attention by their number."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, scale_attn_by_inverse_layer_idx=True
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def rearrange(source, out, ranges, *more):
    """Passthrough of ranges of the layers of one folder, or of (folder, range)."""
    pairs = [one if isinstance(one[0], str) else (str(source), one) for one in ranges]
    slices = [{"sources": [{"model": name, "layer_range": list(numbers)}]} for name, numbers in pairs]
    config = out.parent / "c.yml"
    config.write_text(yaml.safe_dump({"merge_method": "passthrough", "slices": slices}))
    return run("merge", "--config", config, "-o", out, *more)


def edit_config(folder, change):
    """Change the config.json of a folder."""
    path = folder / "config.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def logits(model):
    """The logits of twelve tokens."""
    with torch.no_grad():
        return model.eval()(torch.arange(12)[None], use_cache=False).logits


def gemma(folder):
    """Gemma 3 as in the hub: each third layer is of another kind, by a rule and not by a list."""
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES, head_dim=16, num_hidden_layers=6, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2
        )
    )
    model.save_pretrained(folder)

    def as_rule(document):
        del document["layer_types"]
        document.pop("_sliding_window_pattern", None)
        document["sliding_window_pattern"] = 3

    edit_config(folder, as_rule)
    return model


def qwen(folder, **more):
    """Qwen 2, whose first layers have no window."""
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_hidden_layers=4, **more))
    model.save_pretrained(folder)
    edit_config(folder, lambda document: document.pop("layer_types"))
    return model


# -- layers whose kind goes by number -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ranges"),
    [
        (gemma, [[1, 3], [0, 2]]),
        (gemma, [[0, 3], [4, 6]]),
        (lambda folder: qwen(folder, use_sliding_window=True, max_window_layers=2), [[2, 4], [0, 2]]),
    ],
    ids=["gemma", "gemma after a gap", "qwen"],
)
def test_a_rule_that_would_change_the_kind_of_a_layer_is_refused(make, ranges, tmp_path):
    """The window of a layer goes by its number, which changes: nothing is written."""
    make(tmp_path / "m")

    result = rearrange(tmp_path / "m", tmp_path / "out", ranges)

    assert result.code == 2
    assert "config.json cannot describe the rearranged layers" in result.err
    assert not (tmp_path / "out").exists()


def test_layers_that_compute_with_their_number_are_refused(tmp_path):
    """The number of a layer is part of what it computes: no other place fits."""
    gpt2(tmp_path / "m")

    result = rearrange(tmp_path / "m", tmp_path / "out", [[1, 3], [0, 1]])

    assert result.code == 2
    assert "merge: config.json cannot describe" in result.err


@pytest.mark.parametrize(
    ("make", "ranges"),
    [
        (gemma, [[3, 6], [0, 3]]),
        (gemma, [[0, 3], [0, 6]]),
        (gemma, [[0, 4]]),
        (lambda folder: qwen(folder, use_sliding_window=False, max_window_layers=2), [[2, 4], [0, 2]]),
        (lambda folder: qwen(folder, use_sliding_window=True, max_window_layers=2), [[0, 3]]),
    ],
    ids=["whole periods", "a repeated period", "the first layers", "an unused rule", "a shorter model"],
)
def test_a_rule_that_keeps_the_kinds_is_followed(make, ranges, tmp_path):
    """The merged folder computes what the layers of the model compute in their new order."""
    model = make(tmp_path / "m")

    result = rearrange(tmp_path / "m", tmp_path / "out", ranges)

    assert result.code == 0, result.err
    picked = [i for first, last in ranges for i in range(first, last)]
    right = copy.deepcopy(model)
    right.model.layers = torch.nn.ModuleList([copy.deepcopy(model.model.layers[i]) for i in picked])
    right.config.layer_types = [model.config.layer_types[i] for i in picked]
    right.config.num_hidden_layers = len(picked)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(right))


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("sliding_window_pattern", 6, True),
        ("max_window_layers", 2, True),
        ("first_k_dense_replace", 3, True),
        ("moe_layer_freq", 2, True),
        ("moe_layer_freq", 1, False),
        ("attn_layer_period", 8, True),
        ("decoder_sparse_step", 2, True),
        ("global_attn_every_n_layers", 3, True),
        ("num_kv_shared_layers", 10, True),
        ("num_kv_shared_layers", 0, False),
        ("scale_attn_by_inverse_layer_idx", True, True),
        ("scale_attn_by_inverse_layer_idx", False, False),
        ("sliding_window", 4096, True),
        ("sliding_window", None, False),
        ("cross_attention_layers", [1], True),
        ("mlp_only_layers", [], False),
        ("num_query_heads", [1, 2, 3], True),
        ("eos_token_id", [1, 2, 3], False),
        ("layer_types", ["a", "b", "c"], False),
        ("layer_norm_eps", 1e-5, False),
        ("layerdrop", 0.1, False),
        ("text_config", {"sliding_window_pattern": 6}, True),
        ("rope_theta", 1e4, False),
    ],
)
def test_entries_of_an_unknown_model_are_judged_by_their_names(name, value, is_refused, tmp_path):
    """Without a model of transformers, entries that may describe layers by number are refused by name."""
    tree = tdf.TensorDict({"layers": {str(i): {"w": torch.full((2,), float(i))} for i in range(3)}})
    tdf.save(tree, tmp_path / "m", max_shard_size=200)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"num_hidden_layers": 3, name: value}))

    result = rearrange(tmp_path / "m", tmp_path / "out", [[1, 3], [0, 1]])

    assert (result.code == 2) is is_refused, result.err
    assert (f"numbers change: {name}" in result.err) is is_refused


@pytest.mark.parametrize("name", ["sliding_window_pattern", "num_query_heads"])
def test_layers_that_keep_their_numbers_are_described_as_before(name, tmp_path):
    """A merge of all layers in their order changes nothing in config.json."""
    tree = tdf.TensorDict({"layers": {str(i): {"w": torch.full((2,), float(i))} for i in range(3)}})
    tdf.save(tree, tmp_path / "m", max_shard_size=200)
    document = {"num_hidden_layers": 3, name: [1, 2, 3]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(document))

    result = rearrange(tmp_path / "m", tmp_path / "out", [[0, 2], [2, 3]])

    assert result.code == 0, result.err
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == document


def test_layers_of_another_model_bring_their_entries(tmp_path):
    """A list with an entry for each layer is taken from the model of each layer."""
    for name, kinds in (("a", ["x", "y"]), ("b", ["p", "q"])):
        tree = tdf.TensorDict({"layers": {str(i): {"w": torch.full((2,), float(i))} for i in range(2)}})
        tdf.save(tree, tmp_path / name, max_shard_size=200)
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "layer_types": kinds}))

    result = rearrange(None, tmp_path / "out", [(str(tmp_path / "a"), [0, 2]), (str(tmp_path / "b"), [1, 2])])

    assert result.code == 0, result.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"] == ["x", "y", "q"]


def test_a_list_that_another_model_lacks_is_an_error(tmp_path):
    """Layers of a model whose configuration does not describe them cannot be described."""
    for name in "ab":
        tree = tdf.TensorDict({"layers": {str(i): {"w": torch.full((2,), float(i))} for i in range(2)}})
        tdf.save(tree, tmp_path / name, max_shard_size=200)
        own = {"layer_types": ["x", "y"]} if name == "a" else {}
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": 2} | own))

    result = rearrange(None, tmp_path / "out", [(str(tmp_path / "a"), [0, 2]), (str(tmp_path / "b"), [1, 2])])

    assert result.code == 2
    assert "has no entry for layer 1 in layer_types" in result.err


# -- tied leaves ----------------------------------------------------------------------------------------------------


def save_llama(folder, *, tied, seed=0):
    """A folder of transformers, with or without an output layer."""
    torch.manual_seed(seed)
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_a_head_that_the_base_ties_is_not_lost(method, tmp_path):
    """A fine-tune with its own output layer, of a base without one, is refused by the name of the leaf."""
    save_llama(tmp_path / "base", tied=True)
    save_llama(tmp_path / "tuned", tied=False, seed=1)
    base = ["--base", tmp_path / "base"] if method != "linear" else [tmp_path / "base"]

    result = run("merge", *base, tmp_path / "tuned", "-o", tmp_path / "out", "--method", method)

    assert result.code == 2
    assert "has lm_head.weight, which" in result.err
    assert not (tmp_path / "out").exists()


def test_a_head_in_the_last_slice_is_not_lost(tmp_path):
    """The leaves after the layers belong to the last slice, whose output layer must have a place."""
    save_llama(tmp_path / "base", tied=True)
    save_llama(tmp_path / "tuned", tied=False, seed=1)
    parts = [(str(tmp_path / "base"), [0, 1]), (str(tmp_path / "tuned"), [1, 2])]

    result = rearrange(None, tmp_path / "out", parts)

    assert result.code == 2
    assert "has lm_head.weight, which" in result.err


def test_a_copy_of_the_embedding_may_be_left_out(tmp_path):
    """A model that stores its tied head is merged with one that does not: no value is lost."""
    model = save_llama(tmp_path / "base", tied=True)
    twice = tdf.load(tmp_path / "base").set(("lm_head", "weight"), model.lm_head.weight.detach().clone())
    tdf.save(twice, tmp_path / "tuned", max_shard_size="1GB")

    result = run("merge", tmp_path / "base", tmp_path / "tuned", "-o", tmp_path / "out", "--method", "linear")

    assert result.code == 0, result.err
    assert "1 leaf not in" in result.err


W = torch.arange(20.0).reshape(5, 4)
TIED = {"emb.weight": W, "mid.weight": W, "out.weight": W, "bias": torch.ones(3)}
APART = {name: leaf + i for i, (name, leaf) in enumerate(TIED.items())}
# The first two names share memory.
PARTLY = APART | {"mid.weight": APART["emb.weight"]}


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("command", ["average", "merge"])
def test_names_that_share_memory_in_some_files_are_merged_by_name(first, command, tmp_path):
    """Each name of a file of torch.save has the mean of its values, in any order of the files."""
    states = [TIED, APART, PARTLY]
    order = states[first:] + states[:first]
    for i, state in enumerate(order):
        torch.save(state, tmp_path / f"{i}.pt")
    paths = [tmp_path / f"{i}.pt" for i in range(3)]
    method = ["--method", "linear"] if command == "merge" else []

    result = run(command, *paths, "-o", tmp_path / "out.pt", *method)

    assert result.code == 0, result.err
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = {name: sum(state[name] for state in states) / 3 for name in TIED}
    tdf.assert_close(tdf.TensorDict(found), tdf.TensorDict(expected))


@pytest.mark.parametrize("command", ["average", "merge"])
def test_names_that_share_memory_in_all_files_stay_tied(command, tmp_path):
    """Ties that all files have are those of the result."""
    for i in range(2):
        torch.save({name: leaf for name, leaf in PARTLY.items()}, tmp_path / f"{i}.pt")
    method = ["--method", "linear"] if command == "merge" else []

    result = run(command, tmp_path / "0.pt", tmp_path / "1.pt", "-o", tmp_path / "out.safetensors", *method)

    assert result.code == 0, result.err
    assert tdf.load(tmp_path / "out.safetensors").ties() == [["emb.weight", "mid.weight"]]


def test_diff_shows_names_that_share_memory(tmp_path):
    """Two files of torch.save with equal values and other ties differ."""
    torch.save(TIED, tmp_path / "a.pt")
    torch.save({name: leaf.clone() for name, leaf in TIED.items()}, tmp_path / "b.pt")

    result = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values")

    assert result.code == 1
    assert "tied" in result.out
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--no-metadata").code == 0


def test_the_hint_for_recorded_ties_helps(tmp_path):
    """Ties that a file records are compared; the hint of the message makes the files alike."""
    tree = tdf.from_module(torch.nn.ModuleDict(dict.fromkeys("ab", torch.nn.Linear(2, 2, bias=False)))).detach()
    tdf.save(tree, tmp_path / "a.safetensors")
    tdf.save(tree.untie(("b", "weight")), tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]

    refused = run("average", *paths, "-o", tmp_path / "o.safetensors")
    tdf.save(tdf.load(paths[0]).untie(("b", "weight")), tmp_path / "c.safetensors")
    done = run("average", tmp_path / "c.safetensors", paths[1], "-o", tmp_path / "o.safetensors")

    assert refused.code == 2
    assert "tree.untie(path)" in refused.err
    assert done.code == 0


# -- what differs and has no mean -----------------------------------------------------------------------------------


def test_unequal_values_come_from_the_first_when_asked(tmp_path):
    """`--unequal first` takes integers and non-tensor data from the base, else from the first model."""
    for i in range(3):
        tree = tdf.TensorDict({"w": torch.full((2,), float(i)), "n": torch.tensor(i), "epoch": f"epoch {i}"})
        tdf.save(tree, tmp_path / f"{i}.safetensors")
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    given = ["merge", *paths[:2], "--base", paths[2], "--method", "task_arithmetic", "-o", tmp_path / "o.safetensors"]

    refused = run(*given)
    done = run(*given, "--unequal", "first")

    assert refused.code == 2
    assert "--unequal first" in refused.err
    assert done.code == 0, done.err
    assert tdf.load(tmp_path / "o.safetensors").to_dict() == {
        "w": pytest.approx([-1.0, -1.0]),
        "n": 2,
        "epoch": "epoch 2",
    }
