"""convert, extract, cast and average write what the library would, leaf by leaf."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tdfunc import Filter, Kind, NonTensorData, TensorDict, lazy_stack, load, partition, save
from tdfunc.core.collection import TensorCollection
from tests.cli.helpers import WRITERS, make_tree, read_back, run, write_as
from tests.helpers import examples
from tests.storage.trees import DTYPES, assert_same, of_dtype, same_bytes

INF, NAN = float("inf"), float("nan")


def assert_same_state(actual, expected):
    """Check that two state dicts have the same names in the same order, and the same bits."""
    assert list(actual) == list(expected)
    for name, leaf in expected.items():
        assert same_bytes(actual[name], leaf), name


@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize("target", WRITERS)
def test_convert_every_pair(source, target, tmp_path):
    """Every format converts to every other one with its values, names and ties; their mean is equal, with its kinds."""
    tree = make_tree()
    path = write_as(source, tree, tmp_path)
    out = tmp_path / ("out.pt" if target == "torch" else "out.safetensors" if target == "safetensors" else "out")

    result = run("convert", path, out, "--to", target)

    assert result.code == 0
    assert result.out == ""
    assert f"wrote {out} ({target}, 9 leaves" in result.err
    assert run("average", path, out, path, "-o", tmp_path / "mean.safetensors").code == 0
    assert [run("diff", path, b, "--values").code for b in (out, tmp_path / "mean.safetensors")] == [0, 0]
    assert_same_state(read_back(out), tree.state_dict())


@pytest.mark.parametrize("source", ["safetensors", "shards", "memmap"])
@pytest.mark.parametrize("target", ["safetensors", "shards", "memmap"])
def test_convert_keeps_the_tree(source, target, tmp_path):
    """Batch sizes, names, non-tensor data, plain objects, kinds, lazy stacks, ties and NaN are kept, and equal."""
    rows = lazy_stack([TensorDict({"r": torch.ones(2)}), TensorDict({"r": torch.zeros(3)})])
    plain = {"text": "text", "list": NonTensorData([1, None, "x"]), "empty": TensorDict({})}
    more = {"named": TensorDict({"a": torch.ones(2, 3)}, [2], names=["row"]), "a.b": NonTensorData(torch.ones(2))}
    more["nan"] = torch.tensor([NAN, INF, -0.0])
    more["object"] = NonTensorData({"state": {0: {"m": torch.ones(2)}}, "pair": (1, torch.inf), "tree": make_tree()})
    tree = make_tree().update({"rows": rows, **plain, **more})
    path = write_as(source, tree, tmp_path)
    out = tmp_path / "out.safetensors" if target == "safetensors" else tmp_path / "out"

    assert run("convert", path, out, "--to", target).code == 0

    assert_same(load(out), load(path))
    assert [run("diff", path, out, *options).code for options in ([], ["--values"])] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_convert_every_dtype(dtype, tmp_path):
    """Every dtype goes to a file of torch.save and back with its bits."""
    leaf = of_dtype(dtype, (3, 4))
    save(TensorDict({"x": leaf}), tmp_path / "a.safetensors")

    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b.pt").code == 0
    assert run("convert", tmp_path / "b.pt", tmp_path / "c.safetensors").code == 0

    assert same_bytes(torch.load(tmp_path / "b.pt", weights_only=True)["x"], leaf)
    assert same_bytes(load(tmp_path / "c.safetensors")["x"], leaf)


@pytest.mark.parametrize(("count", "text"), [(3, "5 entries: b, 0, 1, 2, t\n"), (4, "6 entries: b, 0, 1, 2, 3, ...\n")])
def test_state_dict_says_what_it_leaves_out(count, text, tmp_path):
    """The first five entries that a state dict cannot hold are named."""
    notes = {str(i): "text" for i in range(count)}
    tree = TensorDict({"w": torch.ones(2), "b": torch.ones(1), **notes, "t": NonTensorData(torch.ones(1))})
    save(tree._replace(tree._data, kinds={"b": Kind.NON_PERSISTENT}), tmp_path / "t.safetensors")

    result = run("convert", tmp_path / "t.safetensors", tmp_path / "t.pt")

    assert f"cannot hold {text}" in result.err
    assert "(torch, 1 leaf, 8 B)" in result.err
    assert list(torch.load(tmp_path / "t.pt", weights_only=True)) == ["w"]


@pytest.fixture
def trained():
    """A model and its optimizer after a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_whole_training_state_converts(trained, tmp_path):
    """A file of models, optimizers and counters converts: the model is a tree, and the rest comes back equal."""
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "size": torch.Size([2])}
    torch.save(state, tmp_path / "t.pt")
    result = run("convert", tmp_path / "t.pt", tmp_path / "t.safetensors")
    tree = load(tmp_path / "t.safetensors")

    assert result.code == 0
    assert "not kept: size: Size becomes tuple" in result.err
    assert torch.equal(tree["model", "weight"], model.weight)
    assert repr(tree["optimizer"]) == repr(optimizer.state_dict())
    assert {name: tree[name] for name in ("epoch", "size")} == {"epoch": 3, "size": (2,)}
    optimizer.load_state_dict(tree["optimizer"])
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_the_state_of_an_optimizer_converts(trained, tmp_path):
    """Alone, with everything kept."""
    _, optimizer = trained
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    result = run("convert", tmp_path / "o.pt", tmp_path / "o.safetensors")
    alone = load(tmp_path / "o.safetensors")

    assert result.code == 0
    assert "not kept: size" not in result.err
    assert repr({key: alone[key] for key in ("state", "param_groups")}) == repr(optimizer.state_dict())


@pytest.mark.parametrize("out", ["o", "t"], ids=["a new target", "an old target"])
@pytest.mark.parametrize("args", [["average", "a.safetensors"], ["cast", "--dtype", "f16"]], ids=["average", "cast"])
def test_errors_name_the_file(args, out, tmp_path, monkeypatch):
    """A damaged input is named, writes nothing, and leaves the old target whole."""
    monkeypatch.chdir(tmp_path)
    for name in "abt":
        save(TensorDict({"w": torch.ones(100)}), tmp_path / f"{name}.safetensors")
    before = (tmp_path / "t.safetensors").read_bytes()
    raw = bytearray((tmp_path / "b.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(raw)

    result = run(*args, tmp_path / "b.safetensors", "-o", tmp_path / f"{out}.safetensors", "--force")
    assert result.code == 2
    assert 'b.safetensors: leaf "w" is damaged' in result.err
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "b", "t"]
    assert (tmp_path / "t.safetensors").read_bytes() == before


BASE = torch.arange(12.0).reshape(3, 4)
KINDS_OF_FILES = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def converted(data, folder, legacy):
    """Data of a file of torch, of now or of an old version, after its conversion."""
    torch.save(data, folder / "t.pt", _use_new_zipfile_serialization=not legacy)
    assert run("convert", folder / "t.pt", folder / "t.safetensors").code == 0
    return load(folder / "t.safetensors")


@KINDS_OF_FILES
def test_shapes_of_torch_files(legacy, tmp_path):
    """Lists with views, and keys with dots and beside their beginnings."""
    data = {"list": [BASE.T, {"a": BASE[1:]}], "a.b": BASE, "a": 5}
    tree = converted(data, tmp_path, legacy)

    found = {"T": tree["list"][0], "rows": tree["list"][1]["a"], "a.b": tree["a.b"]}
    torch.testing.assert_close(found, {"T": BASE.T, "rows": BASE[1:], "a.b": BASE}, rtol=0, atol=0)
    assert tree["a"] == 5


@KINDS_OF_FILES
def test_plain_values_of_torch_files(legacy, tmp_path):
    """Tuples and dicts of values are kept, and an empty dict is an empty tree."""
    tree = converted({"tuple": (1, 2), "none": {}, "plain": {"lr": 1}, "w": BASE}, tmp_path, legacy)

    assert tree["tuple"] == (1, 2)
    assert tree["plain"] == {"lr": 1}
    assert isinstance(tree["none"], TensorDict)


@KINDS_OF_FILES
def test_parameters_of_torch_files(legacy, tmp_path):
    """They stay Parameters."""
    assert isinstance(converted({"p": torch.nn.Parameter(BASE)}, tmp_path, legacy)["p"], torch.nn.Parameter)


@KINDS_OF_FILES
def test_a_file_of_one_tensor(legacy, tmp_path):
    """It gets a name."""
    assert torch.equal(converted(BASE, tmp_path, legacy)["value"], BASE)


@KINDS_OF_FILES
@pytest.mark.parametrize(
    ("data", "key"),
    [({"ints": {1: BASE, "x": BASE}}, "ints"), ({1: BASE, "x": BASE}, "value")],
    ids=["inside", "whole"],
)
def test_keys_that_are_not_texts(data, key, legacy, tmp_path):
    """A dict with them is a value."""
    assert torch.equal(converted(data, tmp_path, legacy)[key][1], BASE)


def test_classes_that_are_not_here_keep_their_names(tmp_path):
    """A checkpoint with typed nodes converts without their code, and keeps their names."""
    fields = {"__slots__": (), "__module__": "nowhere.at_all", "__qualname__": "Outer.Typed"}
    typed = type("Typed", (TensorCollection,), fields)
    node = typed._make({"x": torch.ones(2)}, torch.Size(()))
    save(TensorDict({"k": torch.ones(1)})._put({"n": node}), tmp_path / "a.safetensors")
    there = run("convert", tmp_path / "a.safetensors", tmp_path / "folder", "--to", "memmap")
    back = run("convert", tmp_path / "folder", tmp_path / "b.safetensors", "--to", "safetensors")

    assert there.code == 0
    assert back.code == 0
    assert type(load(tmp_path / "b.safetensors", classes=[typed])["n"]) is typed


# -- extract and cast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["safetensors", "shards", "memmap"])
@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--filter", "norm.*"], lambda tree: partition(tree, "norm.*")[0]),
        (
            ["-f", "norm.*", "-f", "out*", "-x", "*.bias"],
            lambda tree: partition(partition(tree, Filter("norm.*") | "out*")[0], "*.bias")[1],
        ),
        (["--exclude", "norm.*"], lambda tree: partition(tree, "norm.*")[1]),
    ],
    ids=["filter", "both", "exclude"],
)
def test_extract(source, options, where, tmp_path):
    """The leaves of `partition` are written, with their ties."""
    tree = make_tree().update({"note": "text"})
    path = write_as(source, tree, tmp_path)

    assert run("extract", path, "-o", tmp_path / "out.safetensors", *options).code == 0

    assert_same(load(tmp_path / "out.safetensors"), where(load(path)))


@pytest.mark.parametrize("source", ["safetensors", "shards", "memmap"])
def test_extract_of_tensors_that_are_data(source, tmp_path):
    """Extra state that is a tensor, and tensors and trees in plain objects, are not leaves, as in load(where=)."""
    states = {
        "_extra_state": NonTensorData(torch.arange(3)),
        "optim": NonTensorData({0: torch.ones(2), "t": make_tree()}),
    }
    tree = TensorDict({"0": {"weight": torch.ones(2), **states}})
    path, out = write_as(source, tree, tmp_path), tmp_path / "out.safetensors"

    assert run("extract", path, "-o", out, "--filter", "*").code == 0
    assert_same(load(out), load(path, where="*"))
    assert load(out).paths() == [("0", "weight")]
    assert run("extract", path, "-o", out, "--exclude", "*.weight", "--force").code == 0
    assert_same(load(out), partition(load(path), "*.weight")[1])
    refused = run("extract", path, "-o", out, "--filter", "*_extra_state", "--force")
    assert refused.code == 2
    assert "'*_extra_state' matches no leaf" in refused.err


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("F64", torch.float64), ("torch.float8_e4m3fn", torch.float8_e4m3fn)]
)
def test_cast_is_that_of_load(name, dtype, tmp_path):
    """Leaves are those of load(dtype=); integers, Parameters and ties are kept."""
    path = write_as("safetensors", make_tree(), tmp_path)

    assert run("cast", path, "-o", tmp_path / "out.safetensors", "--dtype", name).code == 0

    assert_same(load(tmp_path / "out.safetensors"), load(path, dtype=dtype))


SPECIALS = [1e9, -1e9, INF, -INF, NAN, 464.0, 1.0, 0.0, -3.0]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [("float8_e4m3fn", 5), ("float8_e4m3fnuz", 5), ("float8_e5m2", 2), ("float8_e8m0fnu", 5), ("bf16", 0), ("fp32", 0)],
)
def test_cast_counts_values_out_of_range(dtype, count, tmp_path):
    """Infinities, signs, zeros and sizes that a dtype does not have are counted; rounding and NaN are not."""
    save(TensorDict({"a": torch.tensor(SPECIALS), "b": torch.ones(2)}), tmp_path / "t.safetensors")

    result = run("cast", tmp_path / "t.safetensors", "-o", tmp_path / "o.safetensors", "--dtype", dtype)

    assert (f"a: {count} values out of the range of" in result.err) is (count > 0)
    assert "b:" not in result.err


# -- average ----------------------------------------------------------------------------------------------------


@examples(0.4)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]),
)
def test_average_oracle(tmp_path_factory, weights, dtype):
    """The mean is that of float64, rounded once."""
    folder = tmp_path_factory.mktemp("average")
    leaves = [torch.randn(17, 3, dtype=torch.float64).to(dtype) for _ in weights]
    for i, leaf in enumerate(leaves):
        save(TensorDict({"w": leaf, "n": torch.tensor(3)}), folder / f"{i}.safetensors")
    paths = [folder / f"{i}.safetensors" for i in range(len(weights))]

    result = run("average", *paths, "-o", folder / "o.safetensors", "--weights", ",".join(map(str, weights)))

    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(w * leaf.to(wide) for w, leaf in zip(weights, leaves, strict=True)) / sum(weights)
    assert result.code == 0
    assert torch.equal(load(folder / "o.safetensors")["w"], expected.to(dtype))
    assert load(folder / "o.safetensors")["n"] == 3


BROKEN, WHOLE, OTHER = [INF, NAN, 1.0, -INF], [1.0, 2.0, 3.0, -0.0], [3.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "weights", "rows", "expected", "said"),
    [
        (torch.float64, "0,1", [BROKEN, WHOLE], WHOLE, ""),
        (torch.complex128, "1,0,1", [WHOLE, BROKEN, OTHER], [2.0, 2.0, 3.0, 0.0], ""),
        (
            torch.float16,
            "2,-1",
            [[6e4, 1.0, INF], [1.0, 2.0, 1.0]],
            [INF, 0.0, INF],
            "w: 1 value out of the range of f",
        ),
    ],
)
def test_average_of_special_values(dtype, weights, rows, expected, said, tmp_path):
    """A checkpoint of weight 0 does not count, even with infinities; means out of the range of a dtype are counted."""
    paths = [tmp_path / str(i) for i in range(len(rows))]
    for path, row in zip(paths, rows, strict=True):
        # Of all formats the one that also holds complex128.
        TensorDict({"w": torch.tensor(row, dtype=dtype)}).memmap(path)

    result = run("average", *paths, "-o", tmp_path / "o", "--weights", weights)

    assert load(tmp_path / "o")["w"].tolist() == expected
    assert said in result.err


@pytest.fixture
def unequal(tmp_path):
    """Two files that differ in shapes, names and values."""
    for i in range(2):
        leaves = {"w": torch.full((2,), float(i)), "rng": torch.full((2 + i,), i), f"more{i}": torch.ones(2)}
        values = {"n": torch.tensor(i), "note": f"run {i}", "same": "x", f"own{i}": "x"}
        save(TensorDict(leaves | values), tmp_path / f"{i}.safetensors")
    return [tmp_path / f"{i}.safetensors" for i in range(2)]


ALIKE = ["-x", "rng", "-x", "more*"]


def test_average_of_other_leaves_is_refused(unequal, tmp_path):
    """Each is listed."""
    result = run("average", *unequal, "-o", tmp_path / "o.safetensors")

    assert result.code == 2
    texts = ["rng in {}: expected int64 [2], got int64 [3]", "missing: more0 in {}", "unexpected: more1 in {}"]
    assert [text for text in texts if text.format(unequal[1]) not in result.err] == []


def test_average_of_what_has_no_mean(unequal, tmp_path):
    """Integers and values that differ are listed, and those that are the same are not."""
    result = run("average", *unequal, "-o", tmp_path / "o.safetensors", *ALIKE)

    assert result.code == 2
    texts = ["n (int64 []) in {}", "note in {}: 'run 1' instead of 'run 0'", "own1 in {}: 'x' instead of 'not"]
    assert [text for text in texts if text.format(unequal[1]) not in result.err] == []
    assert "same in" not in result.err


def test_average_of_a_part(unequal, tmp_path):
    """The rest is left out."""
    assert run("average", *unequal, "-o", tmp_path / "p.safetensors", "--filter", "w").code == 0
    assert load(tmp_path / "p.safetensors").to_dict().keys() == {"w"}


def test_average_may_take_the_first(unequal, tmp_path):
    """Of what has no mean."""
    assert run("average", *unequal, "-o", tmp_path / "o.safetensors", *ALIKE, "--unequal", "first").code == 0

    found = load(tmp_path / "o.safetensors")
    assert found["w"].tolist() == [0.5, 0.5]
    assert found["n"].item() == 0
    assert found["note"] == "run 0"


# -- what is there already --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", WRITERS)
def test_results_replace_their_source_only_when_told(format, tmp_path, monkeypatch):
    """A checkpoint is overwritten with --force only, and whole."""
    tree = make_tree()
    path = write_as(format, tree, tmp_path)

    monkeypatch.chdir(tmp_path.parent)
    refused = run("cast", path, "-o", path.relative_to(tmp_path.parent), "--dtype", "bf16")
    before = read_back(path)
    done = run("cast", path, "-o", path, "--dtype", "bf16", "--force")

    assert refused.code == 2
    assert done.code == 0
    assert "exists" in refused.err
    assert "--force" in refused.err
    assert_same_state(before, tree.state_dict())
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tree.state_dict().items()}
    assert_same_state(read_back(path), expected)


@pytest.fixture
def beside(tmp_path):
    """A file, a folder of a model with its shards and another file, and a memmap folder."""
    save(TensorDict({"a": torch.ones(3)}), tmp_path / "t.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    TensorDict({"a": torch.ones(3)}).memmap(tmp_path / "folder")
    assert run("convert", tmp_path / "t.safetensors", tmp_path / "model", "--to", "shards").code == 0
    return tmp_path


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("model", ["--to", "shards"], "model.safetensors.index.json exists"),
        ("model/model.safetensors", [], "model.safetensors.index.json exists"),
        ("folder", ["--to", "shards", "--force"], "contains a memmapped tree"),
        ("model", ["--to", "memmap", "--force"], "not part of a memmapped tree"),
    ],
    ids=["shards again", "a file beside shards", "shards in a memmap folder", "a memmap folder over shards"],
)
def test_shards_beside_other_files(beside, target, options, message):
    """Shards go next to other files of a folder, which stay, and never into a memmap folder."""
    result = run("convert", beside / "t.safetensors", beside / target, *options)

    assert result.code == 2
    assert message in result.err
    assert (beside / "model" / "config.json").exists()


def test_urls(tmp_path):
    """Checkpoints on other machines are read, compared and written."""
    tree = make_tree()
    path = write_as("safetensors", tree, tmp_path)
    url = f"memory://cli/{tmp_path.name}.safetensors"

    assert run("convert", path, url).code == 0
    assert run("diff", path, url, "--values").code == 0
    assert "checksums xxh3-64" in run("show", url).out
    assert run("verify", url).code == 0
    assert_same(load(url), load(path))
    assert f"{url}.no: No such file or directory" in run("show", f"{url}.no").err


FACTORS = {
    "PEFT": ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"),
    "PEFT in memory": ("q.lora_A.default.weight", "q.lora_B.default.weight"),
    "PEFT embedding": ("wte.lora_embedding_A", "wte.lora_embedding_B"),
    "loralib, of the whole model": ("lora_A", "lora_B"),
    "Kohya": ("lora_unet_q.lora_down.weight", "lora_unet_q.lora_up.weight"),
    "MLX": ("layers.0.q.lora_a", "layers.0.q.lora_b"),
    "torchtune": ("layers.0.q.lora_a.weight", "layers.0.q.lora_b.weight"),
    "diffusers": ("q.processor.to_q_lora.down.weight", "q.processor.to_q_lora.up.weight"),
    "diffusers, of layers": ("q.lora_linear_layer.down.weight", "q.lora_linear_layer.up.weight"),
    "XLabs": ("q.processor.qkv_lora1.down.weight", "q.processor.qkv_lora1.up.weight"),
    "LoHa": ("base_model.model.q.hada_w1_a", "base_model.model.q.hada_w1_b"),
    "LoKr": ("lycoris_q.lokr_w1", "lycoris_q.lokr_w2_a"),
    "VeRA": ("base_model.model.q.vera_lambda_b", "base_model.model.q.vera_lambda_d"),
}
MEANS = {"average": ["average"], "merge": ["merge", "--method", "linear"]}


def write_factors(names, folder):
    """Write two adapters, and return their paths."""
    paths = [folder / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        save_file({name: torch.randn(2, 2) for name in names}, path)
    return paths


@pytest.mark.parametrize("names", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("command", MEANS.values(), ids=MEANS)
def test_factors_of_adapters_are_not_averaged_one_by_one(names, command, tmp_path):
    """The product of two means is not the mean of the products, and each file has its own scale."""
    result = run(*command, *write_factors(names, tmp_path), "-o", tmp_path / "out.safetensors")

    assert result.code == 2
    assert "is an adapter and not a model" in result.err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("names", FACTORS.values(), ids=FACTORS)
def test_one_factor_of_each_module_has_a_mean(names, tmp_path):
    """With a filter, for adapters that share the other factor."""
    paths = write_factors(names, tmp_path)

    assert run("average", *paths, "-f", names[1], "-o", tmp_path / "out.safetensors").code == 0

    expected = (load_file(paths[0])[names[1]] + load_file(paths[1])[names[1]]) / 2
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")[names[1]], expected)
