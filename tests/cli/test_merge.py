"""merge writes what the methods give in memory, for options and for files of mergekit."""

import json
import re

import pytest
import torch
import yaml

import tdfunc as tdf
from tdfunc.cli.merging.config import setting
from tests.cli.helpers import run
from tests.lora.layers import llama
from tests.weights.matrix import options_of

D = 4
TWO = {"models": [{"model": "a"}, {"model": "b"}]}
LINEAR = {"merge_method": "linear", "parameters": {"weight": 1}}
PASS = {"merge_method": "passthrough"}
SLICE = {"sources": [{"model": "a", "layer_range": [0, 2]}]}
KINDS = ["full_attention", "sliding_attention", "conv"]


def make_model(seed, *, layers=3, words=6):
    """A tree as a decoder has it: an embedding, layers with experts, a norm."""
    g = torch.Generator().manual_seed(seed)
    layer = lambda: {  # noqa: E731
        "attn": {"w": torch.randn(D, D, generator=g)},
        "experts": {str(i): {"w": torch.randn(2, D, generator=g)} for i in range(2)},
    }
    embed, norm = torch.randn(words, D, generator=g), torch.randn(D, generator=g)
    return tdf.TensorDict(
        {"embed": {"w": embed}, "layers": {str(i): layer() for i in range(layers)}, "norm": {"w": norm}}
    )


def write_model(folder, seed, **sizes):
    """A model as a folder of shards with its configuration; return the tree."""
    tree = make_model(seed, **sizes)
    count, words = len(tree["layers"].keys()), tree["embed", "w"].shape[0]
    folder.mkdir(parents=True)
    config = {"num_hidden_layers": count, "layer_types": KINDS[:count], "vocab_size": words}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (folder / "notes.md").write_text("not kept")
    tdf.save(tree, folder, max_shard_size=200)
    return tree


@pytest.fixture
def models(tmp_path):
    """Three models by name."""
    return {name: write_model(tmp_path / name, seed) for seed, name in enumerate("abc")}


def merge_file(folder, doc, *options):
    """Run a configuration, in which models are named by their letter; return the merged tree."""
    text = re.sub(r"\b(model|base_model|source): ([a-z])\b", rf"\1: {folder}/\2", yaml.safe_dump(doc, width=1000))
    (folder / "x.yml").write_text(text)
    result = run("merge", "--config", folder / "x.yml", "-o", folder / "out", *options)
    assert result.code == 0, result.err
    return tdf.load(folder / "out")


@pytest.mark.parametrize("method", tdf.weights.METHODS.values(), ids=tdf.weights.METHODS)
def test_options_give_the_merge_in_memory(method, tmp_path, models):
    """Each method writes the tree that it returns for the models; its checksums fit."""
    names = list("bc")[: method.most or 2]
    weights = [0.3, 0.6][: len(names)]
    options = options_of(method)
    key = {"key": options.pop("key")} if method.is_random else {}
    given = [f"--option={name}={value}" for name, value in options.items()]
    given += [part for w in weights for part in ("--weight", w)]
    given += [] if method.base == "unused" else ["--base", tmp_path / "a"]

    models_given = [tmp_path / name for name in names]
    result = run("merge", *models_given, "-o", tmp_path / "out", "--method", method.name, *given, "--seed", 7)

    assert result.code == 0, result.err
    base = None if method.base == "unused" else models["a"]
    expected = method(base, torch.stack([models[name] for name in names]), weights, **options, **key)
    tdf.assert_close(tdf.load(tmp_path / "out"), expected, atol=1e-6, rtol=1e-6)
    assert run("verify", tmp_path / "out").code == 0
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".json", ".safetensors"]


@pytest.mark.parametrize(
    ("name", "write"),
    [("m.safetensors", tdf.save), ("m.pt", lambda tree, path: torch.save(tree.state_dict(), path))],
    ids=["safetensors", "torch"],
)
def test_a_sequential_is_a_tree_of_layers(name, write, tmp_path):
    """The layers of an `nn.Sequential` are the tree itself."""
    trees = [tdf.TensorDict({str(i): {"w": torch.full((2,), float(i + 10 * k))} for i in range(3)}) for k in range(2)]
    paths = [tmp_path / f"{k}{name}" for k in range(2)]
    for tree, path in zip(trees, paths, strict=True):
        write(tree, path)

    result = run("merge", *paths, "--method", "linear", "-o", tmp_path / "out.safetensors")

    assert result.code == 0, result.err
    merged = tdf.load(tmp_path / "out.safetensors")
    assert [merged[str(i), "w"].tolist() for i in range(3)] == [[5.0 + i] * 2 for i in range(3)]


@pytest.mark.parametrize("method", ["ties", "della", "karcher"])
@pytest.mark.parametrize("within", [False, True])
def test_members_of_ensembles_are_merged_one_by_one(method, within, tmp_path):
    """A file of an ensemble, also as a part of a tree, gives the numbers of the merge in memory."""
    base, *models = [tdf.TensorDict({"w": torch.randn(3, 20)}, [3]) for _ in range(3)]
    for name, tree in zip("abc", (base, *models), strict=True):
        tdf.save({"params": tree} if within else tree, tmp_path / f"{name}.safetensors")
    options = options_of(tdf.weights.METHODS[method])
    given = [f"--option={name}={value}" for name, value in options.items() if name != "key"]
    seed = ["--seed", options["key"]] if "key" in options else []
    sources = [tmp_path / "b.safetensors", tmp_path / "c.safetensors", "--base", tmp_path / "a.safetensors"]

    result = run("merge", *sources, "--method", method, *given, *seed, "-o", tmp_path / "out")

    assert result.code == 0, result.err
    tree = tdf.load(tmp_path / "out")
    wrap = (lambda tree: tdf.TensorDict({"params": tree})) if within else (lambda tree: tree)
    merged = tdf.weights.METHODS[method](wrap(base), torch.stack([wrap(m) for m in models]), [1.0, 1.0], **options)
    tdf.assert_close(tree, merged, atol=1e-6, rtol=1e-5)
    assert not torch.equal(merged.leaves()[0], base["w"])


def test_layers_of_a_sequential_are_stacked(tmp_path):
    """Slices take the layers of the tree itself."""
    tree = tdf.TensorDict({str(i): {"w": torch.full((2,), float(i))} for i in range(3)})
    tdf.save(tree, tmp_path / "a", max_shard_size=10**6)
    ranges = [[0, 2], [1, 3]]
    slices = [{"sources": [{"model": "a", "layer_range": numbers}]} for numbers in ranges]

    merged = merge_file(tmp_path, {"slices": slices, **PASS})

    assert [merged[str(i), "w"][0].item() for i in range(4)] == [0.0, 1.0, 1.0, 2.0]


def test_values_by_filter_and_depth(tmp_path, models):
    """The first filter that is part of the name counts; a list is interpolated over the layers."""
    merged = merge_file(
        tmp_path,
        {
            "merge_method": "task_arithmetic",
            "base_model": "a",
            "models": [
                {"model": "a"},
                {"model": "b", "parameters": {"weight": [{"filter": "attn", "value": [0, 1, 0.5]}, {"value": 0.25}]}},
            ],
            "parameters": {"lambda": {"value": "2e0"}, "normalize": False, "int8_mask": True},
        },
    )

    for path in merged.paths():
        weight = 0.25
        if "attn" in path:
            weight = [0, 1, 0.5][int(path[1])]
        expected = models["a"][path] + 2 * weight * (models["b"][path] - models["a"][path])
        torch.testing.assert_close(merged[path], expected)


@pytest.mark.parametrize(
    ("value", "depth", "expected"),
    [
        ([0, 1, 0.5], 0.25, 0.5),
        ([0, 1, "5e-1"], 1.0, 0.5),
        ([True, False], 0.9, True),
        ([True, False], 1.0, False),
        ([{"filter": "mlp", "value": 1}, {"filter": "*", "value": [2, 3]}], 0.5, 2.5),
        ([{"filter": "mlp", "value": 1}], 0.5, None),
    ],
)
def test_a_setting_depends_on_the_depth_and_the_name(value, depth, expected):
    """Numbers are interpolated, one of several bools is chosen, and a leaf may have no value."""
    assert setting(value, "layers.0.attn.w", depth) == expected


def test_layers_are_stacked(tmp_path, models):
    """Slices give a deeper model: leaves before the layers are those of the first, others those of the last."""
    sources = [("a", [0, 2], {}), ("b", [1, 3], {"scale": 3.0}), ("b", [1, 2], {})]
    source = lambda name, numbers: {"sources": [{"model": name, "layer_range": numbers}]}  # noqa: E731
    doc = {
        "merge_method": "passthrough",
        "slices": [source(name, numbers) | {"parameters": own} for name, numbers, own in sources],
        "parameters": {"scale": [{"filter": "norm", "value": 2.0}, {"value": 1.0}]},
    }

    merged = merge_file(tmp_path, doc, "--max-shard-size", "300")

    expected = [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("b", 1)]
    for i, (name, number) in enumerate(expected):
        tdf.assert_close(merged["layers", str(i)], models[name]["layers", str(number)] * (3 if i in (2, 3) else 1))
    assert torch.equal(merged["embed", "w"], models["a"]["embed", "w"])
    assert torch.equal(merged["norm", "w"], 2 * models["b"]["norm", "w"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 5
    assert config["layer_types"] == [KINDS[number] for _, number in expected]


def test_slices_merge_unequal_layers(tmp_path, models):
    """Sources of a slice may begin at different layers; depth runs from 0 to 1 in each slice, which has a base."""
    source = lambda name, first: {"model": name, "layer_range": [first, first + 2]}  # noqa: E731
    slices = [{"base_model": "a", "sources": [source("a", 0), source("b", 1)]}]
    doc = {"merge_method": "slerp", "slices": slices, "parameters": {"t": [0.0, 1.0]}}

    merged = merge_file(tmp_path, doc, "--dtype", "float64")

    tdf.assert_close(merged["layers", "0"], models["a"]["layers", "0"].double(), atol=1e-6, rtol=1e-6)
    tdf.assert_close(merged["layers", "1"], models["b"]["layers", "2"].double(), atol=1e-6, rtol=1e-6)
    assert merged["norm", "w"].dtype == torch.float64
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float64"


def test_modules_have_their_own_models(tmp_path, models):
    """Modules are parts of the tree, each with its own models."""
    one = lambda name: {"models": [{"model": name}]}  # noqa: E731
    doc = {"merge_method": "passthrough", "modules": {"embed": one("a"), "layers": one("b"), "norm": one("c")}}
    doc["modules"]["norm"]["parameters"] = {"scale": 2.0}

    merged = merge_file(tmp_path, doc)

    for part, name, scale in (("embed", "a", 1), ("layers", "b", 1), ("norm", "c", 2)):
        tdf.assert_close(merged[part], models[name][part] * scale)


def test_folders_of_transformers_have_the_order_of_their_modules(tmp_path):
    """Their files are sorted by name: what is after the layers in the module belongs to the last slice."""
    made = {name: llama() for name in "ab"}
    for name, model in made.items():
        model.save_pretrained(tmp_path / name)

    merged = merge_file(tmp_path, PASS | {"slices": [SLICE, {"sources": [{"model": "b", "layer_range": [0, 1]}]}]})

    sources = {"model.embed_tokens": "a", "lm_head": "b", "model.layers.1.mlp.up_proj": "a"}
    found = {path: merged[(*path.split("."), "weight")] for path in sources}
    expected = {path: made[name].get_submodule(path).weight.detach() for path, name in sources.items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- vocabularies ---------------------------------------------------------------------------------------------------

WORDS = {"a": ["?", "x", "y", "z"], "b": ["?", "z", "q"], "c": ["?", "y", "x", "r", "z"]}
# The embeddings of `a` and `b` have padding, and the last word of `c` has no row.
ROWS = {"a": 6, "b": 4, "c": 4}


@pytest.fixture
def spoken(tmp_path):
    """Three models, each with a tokenizer."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = {}
    for seed, (name, words) in enumerate(WORDS.items()):
        made[name] = write_model(tmp_path / name, seed, words=ROWS[name])
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
        tokenizer = tokenizers.Tokenizer(model)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / name)
    return made


@pytest.mark.parametrize(
    ("source", "expected", "pad", "rows"),
    [("union", ["?", "x", "y", "z", "q", "r"], 4, 8), ("base", WORDS["a"], 4, 4), ("c", WORDS["c"], None, 5)],
)
def test_vocabularies_are_made_one(source, expected, pad, rows, tmp_path, spoken):
    """A token's row is merged with the same token's; what a model does not have is the base's, or the others' mean."""
    transformers = pytest.importorskip("transformers")
    doc = {
        "merge_method": "task_arithmetic",
        "base_model": "a",
        "models": [{"model": name, "parameters": {"weight": w}} for name, w in (("b", 0.3), ("c", 0.5))],
        "tokenizer": {"source": source, "pad_to_multiple_of": pad},
    }

    merged = merge_file(tmp_path, doc)["embed", "w"]

    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True).get_vocab()
    assert sorted(words, key=words.get) == expected
    assert merged.shape == (rows, D)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == merged.shape[0]
    row = lambda name, word: dict(zip(WORDS[name], spoken[name]["embed", "w"], strict=False)).get(word)  # noqa: E731
    for i, word in enumerate(expected):
        found = [row(name, word) for name in "abc"]
        have = [x for x in found if x is not None]
        missing = found[0] if found[0] is not None else torch.stack(have).mean(0)
        a, b, c = (missing if x is None else x for x in found)
        torch.testing.assert_close(merged[i], a + 0.3 * (b - a) + 0.5 * (c - a))


def test_a_wide_vocabulary_stays_wide(tmp_path, spoken):
    """Embeddings of float64 are not rounded to float32, and those of 16 bits are rounded once."""
    trees = {name: tree.double() + 1e-12 for name, tree in spoken.items()}
    for name, tree in trees.items():
        tdf.save(tree, tmp_path / name, max_shard_size=200)
    doc = LINEAR | {"models": [{"model": name} for name in "ac"], "tokenizer": {"source": "union"}}

    merged = merge_file(tmp_path, doc)["embed", "w"]

    # "y" is the word 2 of a and 1 of c; "r" is the word 3 of c only.
    y = (trees["a"]["embed", "w"][2] + trees["c"]["embed", "w"][1]) / 2
    assert torch.equal(merged[2], y)
    assert torch.equal(merged[4], trees["c"]["embed", "w"][3])


def test_a_base_of_another_dtype_does_not_round(tmp_path):
    """Models of float64 with a base of float32 are merged in float64, and rounded to the dtype of the result."""
    leaves = [torch.rand(5, dtype=torch.float64) for _ in range(3)]
    for i, leaf in enumerate(leaves):
        tdf.save(tdf.TensorDict({"w": leaf.float() if i == 0 else leaf}), tmp_path / f"{i}.safetensors")
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    given = ["--base", paths[0], "--method", "task_arithmetic", "--dtype", "float64", "-o", tmp_path / "o.safetensors"]

    assert run("merge", *paths[1:], *given).code == 0

    base = leaves[0].float().double()
    expected = base + (leaves[1] - base) + (leaves[2] - base)
    torch.testing.assert_close(tdf.load(tmp_path / "o.safetensors")["w"], expected, atol=1e-15, rtol=1e-15)


def test_lost_tokens_are_told(tmp_path, spoken):
    """Notes name lost tokens and embeddings of another size; a base that is not treated apart is one of the models."""
    doc = LINEAR | {"base_model": str(tmp_path / "a"), "tokenizer": {"source": "base", "pad_to_multiple_of": 6}}
    doc["models"] = [{"model": str(tmp_path / name)} for name in "bc"]
    (tmp_path / "x.yml").write_text(yaml.safe_dump(doc))

    result = run("merge", "-c", tmp_path / "x.yml", "-o", tmp_path / "out")

    assert f"{tmp_path / 'b'}: 1 token is not in the result" in result.err
    assert "rows of the vocabulary" not in result.err
    assert "has no chat template" in run("template", "check", tmp_path / "a").err
    mean = sum(tree["norm", "w"] for tree in spoken.values()) / 3
    torch.testing.assert_close(tdf.load(tmp_path / "out")["norm", "w"], mean)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "text"),
    [
        ("a", "config.json", "vocab_size", "words", "config.json has no vocab_size"),
        ("a", "config.json", '"vocab_size": 6', '"vocab_size": 9', "no leaf has the vocabulary as its first dimension"),
        ("a", "tokenizer.json", '"z": 3', '"z": 7', "numbers of the result's tokens have gaps"),
        ("b", "config.json", "", "", "several dimensions of embed.w"),
    ],
)
def test_a_vocabulary_must_be_clear(name, file, old, new, text, tmp_path, spoken):
    """A model without its size, without its embedding, with gaps or with a square embedding is refused."""
    path = tmp_path / name / file
    path.write_text(path.read_text().replace(old, new))
    doc = LINEAR | {"models": [{"model": str(tmp_path / name)}], "tokenizer_source": "base"}
    (tmp_path / "x.yml").write_text(yaml.safe_dump(doc))

    result = run("merge", "-c", tmp_path / "x.yml", "-o", tmp_path / "out")

    assert result.code == 2
    assert len(spoken) == 3
    assert text in result.err


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("doc", "text"),
    [
        ([], "must be a mapping"),
        (TWO | {"merge_method": "none"}, "expected: linear, slerp"),
        (LINEAR, "one of models, slices and modules"),
        (LINEAR | TWO | {"slices": [SLICE]}, "one of models, slices and modules"),
        (PASS | {"modules": ["a"]}, "modules must be a mapping"),
        (PASS | {"modules": {"norm": {}}}, "has no models or slices"),
        (PASS | {"modules": {"norm": {"slices": [SLICE]}}}, "slices require one node of layers"),
        (LINEAR | {"models": ["a"]}, r"models\[0\] must be a mapping"),
        (LINEAR | {"models": [{"model": 1}]}, r"models\[0\].model must be the path of a model"),
        (LINEAR | TWO | {"chat_template": "chatml"}, "unknown entries: chat_template"),
        (LINEAR | TWO | {"tokenizer": {"source": "union", "tokens": {"x": {}}}}, "unknown entries: tokens"),
        (LINEAR | {"models": [{"model": {"model": "a", "lora": "b"}}]}, "b is not a folder with an adapter"),
        (PASS | {"slices": [SLICE | {"residual_weight": 0.5}]}, "unknown entries: residual_weight"),
        (LINEAR | TWO | {"parameters": {"weight": 1, "density": 0.5}}, "does not have these parameters: density"),
        ({"merge_method": "karcher", "parameters": {"weight": 1}} | TWO, "does not have these parameters: weight"),
        ({"merge_method": "linear"} | TWO, "linear requires the parameter weight"),
        ({"merge_method": "slerp", "parameters": {"t": 1}} | TWO, "requires a base"),
        (PASS | TWO, "number of models"),
        (
            PASS | {"slices": [{"sources": [SLICE["sources"][0], {"model": "b", "layer_range": [0, 3]}]}]},
            "equally many",
        ),
        (PASS | {"slices": [{"sources": [{"model": "a", "layer_range": [2, 4]}]}]}, "must have the layer 3"),
        (PASS | {"modules": {"none": {"models": [{"model": "a"}]}}}, "the module 'none'"),
        (PASS | {"modules": {"norm": {"models": [{"model": "a"}]}}}, "is in none of the modules"),
        (LINEAR | TWO | {"dtype": "int8"}, "floating dtype"),
        (LINEAR | TWO | {"tokenizer_source": "union"}, "has no tokenizer"),
        (
            LINEAR | {"models": [{"model": "a"}, {"model": "wide"}]},
            r"different shapes[\s\S]*embed.w[\s\S]*nothing is cut",
        ),
        (LINEAR | {"models": [{"model": "a"}, {"model": "shallow"}]}, r"shallow does not have the leaf layers\.2"),
        (LINEAR | {"models": [{"model": "shallow"}, {"model": "a"}]}, r"a has more layers than .*shallow"),
        (PASS | {"slices": [{"sources": [{"model": "shallow", "layer_range": [0, 1]}]}]}, "number of layers, which"),
        (
            LINEAR | {"models": [{"model": "a"}, {"model": "adapter"}]},
            r"adapter: this is an adapter[\s\S]*BASE\+",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(doc, text, tmp_path, models):
    """An entry, a parameter or a model that does not fit raises before anything is written."""
    write_model(tmp_path / "wide", 3, words=7)
    write_model(tmp_path / "shallow", 3, layers=2)
    (tmp_path / "shallow" / "config.json").write_text("{}")
    write_model(tmp_path / "adapter", 3)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    names = "|".join([*models, "wide", "shallow", "adapter"])
    written = re.sub(rf"\b(model|base_model): ({names})\b", rf"\1: {tmp_path}/\2", yaml.safe_dump(doc, width=1000))
    (tmp_path / "x.yml").write_text(written)

    result = run("merge", "--config", tmp_path / "x.yml", "-o", tmp_path / "out")

    assert result.code == 2
    assert re.search(text, result.err), result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([torch.tensor(0), torch.tensor(1)], r"x \(torch.int64\) differs"),
        (["model 0", "model 1"], "x in .*: 'model 1' instead of 'model 0'"),
    ],
)
def test_other_leaves_and_data_must_be_equal(values, text, tmp_path):
    """A counter or non-tensor data that differ raise by name, and the old result stays."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, value in zip(paths, values, strict=True):
        tdf.save(tdf.TensorDict({"w": torch.randn(2), "x": value}), path)

    result = run("merge", *paths, "-o", paths[0], "--method", "linear", "--force")

    assert result.code == 2
    assert re.search(text, result.err)
    assert tdf.load(paths[0])["x"] == values[0]


def test_ties_must_be_equal(tmp_path):
    """A tie that one model does not have raises, since a value would be lost; a leaf of the other one is told."""
    tied = tdf.from_module(torch.nn.ModuleDict(dict.fromkeys("ab", torch.nn.Linear(2, 2, bias=False)))).detach()
    tied = tied.set("count", torch.tensor(3))
    trees = {"tied": tied, "untied": tied.untie(("b", "weight")), "more": tied.set("own", torch.zeros(1))}
    for name, tree in trees.items():
        tdf.save(tree, tmp_path / f"{name}.safetensors")
    place = lambda name: tmp_path / f"{name}.safetensors"  # noqa: E731

    lost = run("merge", place("tied"), place("untied"), "-o", place("o"), "--method", "linear")
    told = run("merge", place("tied"), place("more"), "-o", tmp_path / "o", "--method", "linear")

    assert lost.code == 2
    assert "b.weight is not tied in" in lost.err
    assert told.code == 0
    assert "1 leaf not in" in told.err
    tdf.assert_close(tdf.load(tmp_path / "o"), tied)


@pytest.mark.parametrize(("method", "name"), [("slerp", "t"), ("nearswap", "t"), ("task_arithmetic", "weight")])
def test_the_weight_as_an_option_is_the_weight(method, name, models, tmp_path):
    """Under its name in files of mergekit; it is the weight of each model."""
    paths = ("merge", tmp_path / "b", "--base", tmp_path / "a", "--method", method)

    results = [
        run(*paths, "--option", f"{name}=0.3", "-o", tmp_path / "x"),
        run(*paths, "--weight", "0.3", "-o", tmp_path / "y"),
    ]

    assert [one.code for one in results] == [0, 0]
    torch.testing.assert_close(
        dict(tdf.load(tmp_path / "x").items(True, True)), dict(tdf.load(tmp_path / "y").items(True, True))
    )


def test_a_weight_given_twice_is_refused(models, tmp_path):
    """One of the two numbers would have no meaning."""
    twice = ("--weight", "0.3", "--option", "t=0.5")

    result = run("merge", tmp_path / "b", "--base", tmp_path / "a", "--method", "slerp", *twice, "-o", tmp_path / "x")

    assert result.code == 2
    assert (tmp_path / "x").exists() is False
    assert "--weight and --option t are the same number of slerp" in result.err
