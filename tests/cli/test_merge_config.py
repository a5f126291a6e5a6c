"""A configuration of mergekit is checked entry by entry; options are read as `tdfunc methods` prints them."""

import copy
import time

import pytest
import torch
import yaml

import tdfunc as tdf
from tdfunc.cli.merging.config import from_options, make_config, read_config
from tests.cli.helpers import run

pytestmark = pytest.mark.sample(5)

MODEL = {"model": "m", "parameters": {"weight": 1.0}}
SLICE = {"sources": [{"model": "m", "layer_range": [0, 2], "parameters": {"scale": 1.0}}], "parameters": {}}
MODELS = {"merge_method": "linear", "models": [MODEL, {"model": "n"}], "parameters": {"weight": [0.1, 0.9]}}
SLICES = {"merge_method": "passthrough", "slices": [SLICE], "parameters": {"scale": [{"filter": "a", "value": 1}]}}
MODULES = {"merge_method": "passthrough", "modules": {"norm": {"slices": [SLICE], "parameters": {}}}}
REST = {"base_model": "m", "dtype": "float32", "out_dtype": "bfloat16"}
TOKENS = {"tokenizer": {"source": "union", "pad_to_multiple_of": 8}}
WHOLE = [MODELS | REST | TOKENS, SLICES | REST | {"tokenizer_source": "base"}, MODULES]


def entries_of(value, at=()):
    """The path of each entry of a document."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*at, key)
            yield from entries_of(inner, (*at, key))


def with_entry(doc, path, value):
    """The document with another value at a path."""
    doc = copy.deepcopy(doc)
    node = doc
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return doc


# Of each kind that YAML has, a value; the marks of entries that accept it are below.
WRONG = {
    "bool": True,
    "int": -3,
    "number": 0.5,
    "text": "a text",
    "empty text": "",
    "list": [[1]],
    "empty list": [],
    "mapping": {"unknown": 1},
    "date": "2020-01-01",
}
CASES = [(doc, path) for doc in WHOLE for path in entries_of(doc)]
NAMES = ["/".join(map(str, path)) for _, path in CASES]


@pytest.mark.parametrize(("doc", "path"), CASES, ids=NAMES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_value_of_any_type_is_read_or_refused_with_a_message(doc, path, kind):
    """An entry of another type gives a message of tdfunc, never an error of Python."""
    text = yaml.safe_dump(with_entry(doc, path, WRONG[kind])).replace("'2020-01-01'", "2020-01-01")

    message = "merge: "
    try:
        read_config(text)
    except (ValueError, tdf.UnsupportedError) as err:
        message = str(err)

    assert message.startswith("merge: ")


@pytest.mark.parametrize(
    ("doc", "path", "value", "text"),
    [
        (WHOLE[0], ("models",), 5, "models must be a list with an entry"),
        (WHOLE[0], ("models",), [], "models must be a list"),
        (WHOLE[0], ("models", 0), None, r"models\[0\] must be a mapping"),
        (WHOLE[0], ("models", 1, "model"), None, r"models\[1\] must be a mapping with the entry model"),
        (WHOLE[0], ("models", 1, "model"), {"model": {"lora": "a"}}, r"must be the path of a model"),
        (WHOLE[0], ("merge_method",), [], "merge_method must be a text"),
        (WHOLE[0], ("merge_method",), None, "merge_method is required"),
        (WHOLE[0], ("dtype",), 5, "dtype must be a text"),
        (WHOLE[0], ("base_model",), 5, "base_model must be the path of a model"),
        (WHOLE[0], ("base_model",), {"path": ""}, "base_model.path must be a text"),
        (WHOLE[0], ("base_model",), {"path": None}, "base_model must be the path of a model"),
        (WHOLE[0], ("tokenizer",), "union", "tokenizer must be a mapping"),
        (
            WHOLE[0],
            ("tokenizer", "pad_to_multiple_of"),
            0,
            "tokenizer.pad_to_multiple_of must be a whole number above 0",
        ),
        (WHOLE[0], ("parameters",), [1], "parameters must be a mapping"),
        (WHOLE[0], ("models", 0, "parameters", "weight"), [], r"models\[0\].parameters.weight must be a list"),
        (
            WHOLE[0],
            ("models", 0, "parameters", "weight"),
            [1, None],
            r"models\[0\].parameters.weight\[1\] must be a number",
        ),
        (WHOLE[0], ("models", 0, "parameters", "weight"), "abc", r"models\[0\].parameters.weight must be a number"),
        (
            WHOLE[0],
            ("models", 0, "parameters", "weight"),
            [{"filter": "w"}],
            r"weight\[0\] must be a mapping with .* value",
        ),
        (
            WHOLE[0],
            ("models", 0, "parameters", "weight"),
            [{"value": [{"value": 1}]}],
            r"weight\[0\].value\[0\] must be",
        ),
        (WHOLE[0], ("models", 0, "parameters", "weight"), [{"value": 1}, 2], r"weight\[1\] must be a mapping"),
        (WHOLE[0], ("models", 0, "parameters", "weight"), 10**400, r"weight must be a number"),
        (
            WHOLE[1],
            ("slices", 0, "sources", 0, "layer_range"),
            [0],
            r"slices\[0\].sources\[0\].layer_range must be two",
        ),
        (WHOLE[1], ("slices", 0, "sources", 0, "layer_range"), 2, r"layer_range must be two whole numbers"),
        (WHOLE[1], ("slices", 0, "sources", 0, "layer_range"), [2, 1], r"layer_range must be two whole numbers"),
        (WHOLE[1], ("slices", 0, "sources", 0, "layer_range"), [0.0, 1.0], r"layer_range must be two whole numbers"),
        (WHOLE[1], ("slices", 0, "sources"), None, r"slices\[0\] must be a mapping with the entry sources"),
        (WHOLE[2], ("modules",), {1: {}}, "a key of modules must be a text"),
        (WHOLE[2], ("modules", "norm"), 3, "modules.norm must be a mapping"),
    ],
)
def test_the_message_names_the_entry(doc, path, value, text):
    """The entry is named as one would look for it in the file."""
    with pytest.raises((ValueError, tdf.UnsupportedError), match=f"merge: .*{text}"):
        make_config(with_entry(doc, path, value))


@pytest.mark.parametrize("doc", WHOLE, ids=["models", "slices", "modules"])
def test_a_whole_configuration_is_read(doc):
    """The documents that the table alters are right."""
    assert read_config(yaml.safe_dump(doc)).method.name == doc["merge_method"]


@pytest.mark.parametrize(("entry", "value"), [("name", "a-b"), ("name", 7), ("random_seed", 0)])
def test_an_entry_that_mergekit_does_not_read_is_noted(entry, value, capsys):
    """Files on the hub have them; the merge is the same."""
    assert make_config({**MODELS, entry: value}) == make_config(MODELS)
    assert f"not used, as by mergekit: {entry}" in capsys.readouterr().err


def test_a_configuration_whose_entries_are_all_used_is_not_noted(capsys):
    """Nothing is printed."""
    make_config(MODELS)

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [{model: a}]\nmodels: [{model: b}]", "line 2 has the entry 'models' of its mapping a second time"),
        ("x:\n- {a: 1, a: 1}", "line 2 has the entry 'a'"),
        ("a: [", "is not YAML"),
        ("x: 2020-13-45", "is not YAML"),
        ("[" * 5_000 + "]" * 5_000, "is not YAML"),
        ("x: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("5", "the configuration must be a mapping"),
        ("x: &a [*a]\nmerge_method: linear", "at most 100,000 values"),
    ],
)
def test_other_texts_are_refused(text, message):
    """Damage, depth, tags that run code and values that contain themselves have a message."""
    with pytest.raises(ValueError, match=message):
        read_config(text)


def aliases(open_, close, depth=12):
    """A few lines whose last value has 10 ** depth parts, each an alias of the one before."""
    lines = ["a0: &a0 {x: y}" if open_ == "{<<: " else "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, depth):
        parts = ", ".join([f"*a{i - 1}"] * 10)
        lines.append(f"a{i}: &a{i} {open_}{parts}{close}")
    return "parameters:\n" + "".join(f"  {line}\n" for line in lines) + "merge_method: linear\n"


@pytest.mark.parametrize(
    "text",
    [
        aliases("[", "]") + "models: [*a11]",
        aliases("[", "]") + "modules: *a11",
        aliases("[", "]") + "models: [{model: *a11}]",
        aliases("[", "]") + "models: *a11",
        aliases("[", "]") + "dtype: *a11\nmodels: [{model: m}]",
        aliases("{<<: [", "]}") + "models: [{model: m, parameters: *a11}]",
        aliases("{<<: ", "}").replace("{<<: *", "{<<: [*").replace("}\n  a", "]}\n  a") + "models: [*a11]",
    ],
)
def test_a_small_file_takes_little_time(text):
    """Aliases that make a small file a value without end are refused at once, in a short message."""
    begin = time.process_time()

    with pytest.raises(ValueError, match="merge: ") as caught:
        read_config(text)

    assert time.process_time() - begin < 2
    assert len(str(caught.value)) < 3_000


# -- options --------------------------------------------------------------------------------------------------------

PRINTED = [
    (method, name, default) for method in tdf.weights.METHODS.values() for name, default in method.options.items()
]


@pytest.mark.parametrize(("method", "name", "default"), PRINTED, ids=lambda value: getattr(value, "name", str(value)))
def test_every_option_is_read_as_it_is_printed(method, name, default):
    """The spelling of `tdfunc methods`, `normalize=True` and `lambda_=1.0`, is one of `--option`."""
    printed = f"{name}={default!r}"
    assert printed in dict((row[0], row[4]) for row in tdf.weights.methods.rows())[method.name]

    config = from_options(method.name, ["m"], None, None, [printed])

    assert config.parameters == {name: default}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("True", True),
        ("false", False),
        ("False", False),
        (".5", 0.5),
        ("0.5", 0.5),
        ("5e-1", 0.5),
        ("1", 1),
        ("+1", 1),
        ("[.5, 1]", [0.5, 1]),
        ("1_000", 1000),
    ],
)
def test_values_are_read_as_json_or_as_python(written, value):
    """Numbers, bools and lists of them are read in both spellings."""
    assert from_options("ties", ["m"], "b", None, [f"density={written}"]).parameters == {"density": value}


@pytest.mark.parametrize(
    ("method", "option", "text"),
    [
        ("ties", "density", "is not NAME=VALUE"),
        ("ties", "density=abc", "is not NAME=VALUE"),
        ("ties", "density=(0.5, 1)", "--option density must be a number"),
        ("ties", "density=None", "--option density must be a number"),
        ("ties", "density=[]", "--option density must be a list with an entry"),
        ("ties", "normalize=2", "normalize must be true or false"),
        ("karcher", "max_iter=1.5", "max_iter must be a whole number"),
        ("karcher", "max_iter=NaN", "max_iter must be a whole number"),
        ("ties", "density=NaN", "density of w must be finite"),
        ("ties", "rows=1", "does not have these parameters: rows"),
        ("dare_ties", "key=1", "hint:     --seed"),
    ],
)
def test_other_values_have_a_message(method, option, text, tmp_path):
    """A value of another type is an error that names the option."""
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path in paths:
        tdf.save(tdf.TensorDict({"w": torch.randn(3)}), path)
    base = [] if method == "karcher" else ["--base", paths[0]]

    result = run("merge", *paths[1:], *base, "-o", tmp_path / "o", "--method", method, "--option", option)

    assert result.code == 2
    assert text in result.err


@pytest.mark.parametrize(
    ("method", "parameter"),
    [("linear", "normalize"), ("task_arithmetic", "lambda"), ("dare_ties", "rescale"), ("breadcrumbs", "lambda_")],
)
def test_a_parameter_of_the_merge_is_not_of_one_model(method, parameter):
    """It would not be used."""
    doc = {
        "merge_method": method,
        "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 1, parameter: 0}}],
    }

    with pytest.raises(
        tdf.UnsupportedError, match=rf"these parameters of {method} are given for one model: {parameter}\."
    ):
        make_config(doc)


def test_a_mapping_may_replace_entries_of_another():
    """`<<` copies entries, of which own entries take the place, also where an alias comes back."""
    text = """
    merge_method: linear
    models:
      - {model: a, parameters: &p {weight: 1}}
      - {model: b, parameters: &q {<<: *p, weight: 2}}
      - {model: c, parameters: {<<: *q}}
    """
    (one,) = read_config(text).modules[""]
    assert [each.parameters["weight"] for each in one.inputs] == [1, 2, 2]


@pytest.mark.parametrize(("filter_", "is_noted"), [("atn", True), ("att", False), ("*", False)])
def test_a_filter_of_no_leaf_is_noted(filter_, is_noted, tmp_path):
    """Its value would be dropped without a word."""
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in paths:
        tdf.save(tdf.TensorDict({"att": {"w": torch.randn(3)}}), path)
    weight = [{"filter": filter_, "value": 0.3}, {"value": 0.7}]
    doc = {"merge_method": "linear", "models": [{"model": str(path)} for path in paths]}
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(doc | {"parameters": {"weight": weight}}))

    result = run("merge", "--config", config, "-o", tmp_path / "o.safetensors")

    assert ("is in the name of no leaf" in result.err) == is_noted
