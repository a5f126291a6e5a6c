"""Numbers that are not finite: a command refuses to make them, and counts those that it writes, before it replaces."""

import math
import re

import pytest
import torch

import tdfunc as tdf
from tdfunc.cli import convert
from tests.cli.helpers import run
from tests.weights.matrix import options_of

pytestmark = pytest.mark.sample(3)

NAN, INF = math.nan, math.inf
METHODS = tdf.weights.METHODS
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
MEANS = [one for one in METHODS.values() if one.is_mean({})]


@pytest.fixture
def target(tmp_path):
    """An older result, which a command may replace."""
    tdf.save(tdf.TensorDict({"old": torch.ones(2)}), tmp_path / "out.safetensors")
    return tmp_path / "out.safetensors"


def write_models(folder, leaves, dtype=torch.float32):
    """Files with one leaf `w` each; return their paths."""
    paths = []
    for i, leaf in enumerate(leaves):
        paths.append(folder / f"m{i}.safetensors")
        tdf.save(tdf.TensorDict({"w": leaf.to(dtype), "whole": torch.ones(2, dtype=dtype)}), paths[-1])
    return paths


def run_merge(method, folder, target, leaves, weights, *more, dtype=torch.float32):
    """Merge files of these leaves, the first of which is the base."""
    base, *models = write_models(folder, leaves, dtype)
    options = {name: value for name, value in options_of(method).items() if name != "key"}
    given = [f"--option={name}={value}" for name, value in options.items()]
    given += [f"--weight={weight}" for weight in weights]
    given += [] if method.base == "unused" else ["--base", base]
    return run("merge", *models, "-o", target, "--method", method.name, "--force", *given, *more)


def draw(method, scale=1.0):
    """A base and as many models as a method takes."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 3, generator=generator)
    rows = [base + 0.1 * torch.randn(4, 3, generator=generator) for _ in range(method.most or 3)]
    return [scale * leaf for leaf in (base, *rows)]


def cancelling(method):
    """Weights whose sum is 0 after rounding."""
    return [[0.0], [1.0, -1.0], [0.1, 0.2, -0.3]][(method.most or 3) - 1]


# -- merge ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
def test_merge_refuses_weights_that_are_no_numbers(method, value, tmp_path, target):
    """The message names the leaf, and the old file stays."""
    before = target.read_bytes()
    leaves = draw(method)

    result = run_merge(method, tmp_path, target, leaves, [value] + ["1"] * (len(leaves) - 2))

    assert result.code == 2
    assert f"{method.name}: these weights of w do not define a merge in torch.float32" in result.err
    assert target.read_bytes() == before


@pytest.mark.parametrize("method", MEANS, ids=lambda one: one.name)
def test_merge_refuses_a_mean_of_weights_that_cancel(method, tmp_path, target):
    """The methods that divide by the sum of the weights refuse a sum that is 0 or lost in rounding."""
    before = target.read_bytes()

    result = run_merge(method, tmp_path, target, draw(method), cancelling(method))

    assert result.code == 2
    assert re.search("weights of w do not define a merge.*\n.*(sum other than 0|no negative)", result.err)
    assert target.read_bytes() == before


@pytest.mark.parametrize("method", [one for one in METHODS.values() if one not in MEANS], ids=lambda one: one.name)
def test_merge_with_other_weights_that_cancel_is_near_the_models(method, tmp_path, target):
    """No other method divides by a sum of 0."""
    result = run_merge(method, tmp_path, target, draw(method), cancelling(method))

    assert result.code == 0, result.err
    assert float(tdf.load(target)["w"].abs().max()) < 10


@every
@pytest.mark.parametrize(("value", "word"), [(NAN, "NaN"), (INF, "NaN|infinite"), (-INF, "NaN|infinite")])
def test_merge_counts_what_a_model_hands_on(method, value, word, tmp_path, target):
    """A NaN or an infinity of a model is in the result, which is written, and counted by leaf."""
    leaves = draw(method)
    leaves[1][2, 1] = value

    result = run_merge(method, tmp_path, target, leaves, ["0.5"] * (len(leaves) - 1))

    assert result.code == 0, result.err
    count = int((~tdf.load(target)["w"].isfinite()).sum())
    noted = re.search(rf"tdfunc: w: of 12 written values .*({word})", result.err)
    assert noted is not None
    assert sum(map(int, re.findall(r"(\d+) (?:NaN|infinite)", noted[0]))) == count > 0
    assert "tdfunc: whole" not in result.err


@every
@pytest.mark.parametrize(("dtype", "scale"), [("float16", 1e5), ("bfloat16", 3e38), ("float8_e4m3fn", 1e3)])
def test_merge_never_overflows_silently(method, dtype, scale, tmp_path, target):
    """Finite models give a finite merge, a refusal that names the leaf, or a count of its values out of range."""
    before = target.read_bytes()
    leaves = [leaf.clamp(-1.1, 1.1) * scale for leaf in draw(method)]

    result = run_merge(method, tmp_path, target, leaves, ["2.0"] * (len(leaves) - 1), "--dtype", dtype)

    refused = result.code == 2 and target.read_bytes() == before and "w has" in result.err
    noted = result.code == 0 and re.search(r"tdfunc: w: \d+ values? out of the range of", result.err) is not None
    whole = result.code == 0 and bool(tdf.load(target)["w"].float().isfinite().all())
    assert refused or noted or whole, result.err


def test_merge_refuses_an_overflow_of_its_sums(tmp_path, target):
    """Finite weights and finite models whose sum is not finite in float32 are an error, not a file of infinities."""
    before = target.read_bytes()

    result = run_merge(
        METHODS["task_arithmetic"], tmp_path, target, [10 * torch.eye(4)[:, :3] * i for i in range(4)], ["3e38"] * 3
    )

    assert result.code == 2
    assert "w has 3 infinite of 12 numbers" in result.err
    assert target.read_bytes() == before


# -- average, convert, extract and cast -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        *((each, "a sum of 0 or infinity") for each in ("1,-1", "1e308,1e308", "0,0", "0.1,-0.1")),
        *((each, "a number that is not finite") for each in ("nan,1", "inf,1")),
        ("1,1,1", "3 numbers for 2 checkpoints"),
    ],
)
def test_average_refuses_weights_without_a_mean(weights, text, tmp_path, target):
    """Weights must be finite and must not cancel."""
    before = target.read_bytes()
    paths = write_models(tmp_path, draw(METHODS["slerp"]))

    result = run("average", *paths, "-o", target, "--weights", weights, "--force")

    assert result.code == 2
    assert f"--weights has {text}" in result.err
    assert target.read_bytes() == before


def test_average_refuses_a_sum_that_is_lost_in_rounding(tmp_path, target):
    """0.1 + 0.2 - 0.3 is not 0 in float64."""
    paths = write_models(tmp_path, draw(METHODS["nuslerp"]))

    result = run("average", *paths, "-o", target, "--weights", "0.1,0.2,-0.3", "--force")

    assert result.code == 2
    assert "lost in rounding" in result.err


def test_average_refuses_an_overflow_of_its_sums(tmp_path, target):
    """A mean of finite numbers that float64 cannot sum is an error which names the leaf."""
    before = target.read_bytes()
    paths = write_models(tmp_path, [torch.full((4,), 1.7e308, dtype=torch.float64)] * 2, torch.float64)

    result = run("average", *paths, "-o", target, "--force")

    assert result.code == 2
    assert "average: 4 means of w overflow" in result.err
    assert target.read_bytes() == before


COMMANDS = {
    "average": ["average", "{path}", "{path}", "-o", "{out}"],
    "convert": ["convert", "{path}", "{out}"],
    "extract": ["extract", "{path}", "-o", "{out}", "--filter", "*"],
    "cast": ["cast", "{path}", "-o", "{out}", "--dtype", "bf16"],
    "merge": ["merge", "{path}", "{path}", "-o", "{out}", "--method", "linear"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2])
def test_every_command_counts_numbers_that_are_not_finite(command, dtype, tmp_path, monkeypatch):
    """The note names the leaf and both counts, and comes before the file is replaced."""
    out = tmp_path / "out.safetensors"
    leaf = torch.ones(1_000)
    leaf[:3] = NAN
    leaf[10:12] = -INF
    (path,) = write_models(tmp_path, [leaf], dtype)
    seen = []
    monkeypatch.setattr(convert, "note", lambda text: seen.append((text, out.exists())))

    result = run(*[part.format(path=path, out=out) for part in command])

    assert result.code == 0, result.err
    assert ("w: of 1,000 written values 3 NaN and 2 infinite", False) in seen
    assert [text for text, _ in seen if text.startswith("whole")] == []


@pytest.mark.parametrize("target", ["o.safetensors", "o.pt", "shards", "folder"])
def test_every_format_counts_each_leaf_once(target, tmp_path):
    """Of a tied leaf with two names and another leaf there are two notes, whatever the format."""
    layer = torch.nn.Linear(2, 1, bias=False)
    module = torch.nn.ModuleDict({"a": layer, "b": layer, "c": torch.nn.Linear(2, 1, bias=False)})
    tree = tdf.from_module(module).detach().apply(lambda x: torch.tensor([[1.0, NAN]]))
    tdf.save(tree, tmp_path / "t.safetensors")
    to = {"shards": ["--to", "shards"], "folder": ["--to", "memmap"]}.get(target, [])

    result = run("convert", tmp_path / "t.safetensors", tmp_path / target, *to)

    assert result.code == 0, result.err
    assert result.err.count("of 2 written values 1 NaN") == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_average_counts_the_nan_of_8_bits(dtype, tmp_path, target):
    """A NaN of a source is handed on, as in other dtypes."""
    paths = write_models(tmp_path, [torch.tensor([1.0, NAN]), torch.ones(2)], dtype)

    result = run("average", *paths, "-o", target, "--force")

    assert result.code == 0, result.err
    assert "1 NaN" in result.err
