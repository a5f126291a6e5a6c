"""Commands copy codes and scales with their bits; those that compute with values refuse them by name, or dequantize."""

import pytest
import safetensors.torch
import torch

import tdfunc as tdf
from tests.cli.helpers import run
from tests.helpers import quick
from tests.storage.layouts import FP8, OTHERS, bits

pytestmark = pytest.mark.sample(5)

LAYOUTS = {**FP8, **{name: make for name, (_, make) in OTHERS.items()}}
CODES = {name: next(iter(make(0)[1])) for name, make in FP8.items()}
CODES |= {name: codes for name, (codes, _) in OTHERS.items()}
INTEGER = [name for name in OTHERS if name != "bitsandbytes nf4 in bfloat16" and not name.startswith("FP8")]
NUMBERS = [name for name in LAYOUTS if name not in INTEGER]
# The others are slow together, and differ in what `test_scales.py` of the storage has for all.
FEW = ("blocks at the edge", "rows", "tensor", "ComfyUI", *OTHERS)
each_layout = pytest.mark.parametrize("layout", quick(LAYOUTS, *FEW))


def write(layout, seed, folder):
    """Write a file of a layout; return its path and leaves."""
    made = LAYOUTS[layout](seed)
    state = made[0] if layout in FP8 else made
    path = folder / f"{seed}.safetensors"
    safetensors.torch.save_file(state, path)
    return path, state


def leaves(path):
    """Return the leaves of a checkpoint by their dotted names."""
    return dict(tdf.load(path).flatten_keys(".").items())


# The arguments, for a path and a folder.
COPIES = {
    "convert": lambda path, folder: ["convert", path, folder / "out.safetensors"],
    "shards": lambda path, folder: ["convert", path, folder / "out", "--to", "shards", "--max-shard-size", "2000"],
    "memmap": lambda path, folder: ["convert", path, folder / "out", "--to", "memmap"],
    "extract": lambda path, folder: ["extract", path, "-f", "*", "-o", folder / "out.safetensors"],
    "average with itself": lambda path, folder: ["average", path, path, "-o", folder / "out.safetensors"],
}


@each_layout
@pytest.mark.parametrize("command", COPIES)
def test_copies_keep_codes_and_scales(layout, command, tmp_path):
    """Every leaf has its bits."""
    path, state = write(layout, 0, tmp_path)
    result = run(*COPIES[command](path, tmp_path))
    (out,) = tmp_path.glob("out*")

    assert result.code == 0, result.err
    assert bits(leaves(out)) == bits(state)


@each_layout
def test_a_torch_file_keeps_codes_and_scales(layout, tmp_path):
    """Every leaf has its bits after torch.save and back."""
    path, state = write(layout, 0, tmp_path)

    assert run("convert", path, tmp_path / "out.pt").code == 0
    assert run("convert", tmp_path / "out.pt", tmp_path / "out.safetensors").code == 0
    assert bits(leaves(tmp_path / "out.safetensors")) == bits(state)


CASTS = [["cast", "--out"], ["convert"], ["extract", "-f", "*", "--out"]]


@pytest.mark.parametrize("layout", quick(NUMBERS, *FEW))
@pytest.mark.parametrize("words", CASTS, ids=lambda words: words[0])
def test_a_cast_of_codes_is_refused(layout, words, tmp_path):
    """The message names the leaf, its scale and the option; nothing is written."""
    path, _ = write(layout, 0, tmp_path)

    result = run(words[0], path, *words[1:], tmp_path / "out.safetensors", "--dtype", "fp16")

    assert result.code == 2
    assert f"the leaf '{CODES[layout]}' has codes" in result.err
    assert "--dequantize" in result.err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("layout", INTEGER)
def test_a_cast_keeps_integer_codes_and_scales(layout, tmp_path):
    """All other floating leaves are cast."""
    path, state = write(layout, 0, tmp_path)

    result = run("cast", path, "-o", tmp_path / "out.safetensors", "--dtype", "bf16")

    assert result.code == 0, result.err
    expected = state | {"norm.weight": state["norm.weight"].bfloat16()}
    assert bits(leaves(tmp_path / "out.safetensors")) == bits(expected)


@pytest.mark.parametrize("layout", quick(FP8, *FEW))
@pytest.mark.parametrize("dtype", ["float32", "bf16", "float64"])
@pytest.mark.parametrize("words", CASTS, ids=lambda words: words[0])
def test_dequantize_writes_what_load_returns(layout, dtype, words, tmp_path):
    """The file has the numbers of `load(dequantize=True)`."""
    path, _ = write(layout, 0, tmp_path)

    result = run(words[0], path, *words[1:], tmp_path / "out.safetensors", "--dtype", dtype, "--dequantize")

    assert result.code == 0, result.err
    wanted = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}[dtype]
    expected = tdf.load(path, dequantize=True, dtype=wanted)
    assert bits(leaves(tmp_path / "out.safetensors")) == bits(dict(expected.flatten_keys(".").items()))


@pytest.mark.parametrize("layout", OTHERS)
def test_other_layouts_are_not_dequantized(layout, tmp_path):
    """A layout that is not codes times scale is refused by name."""
    path, _ = write(layout, 0, tmp_path)

    result = run("convert", path, tmp_path / "out.safetensors", "--dequantize")

    assert result.code == 2
    assert f"dequantize: the leaf '{CODES[layout]}' has codes" in result.err


MEANS = {
    "average": ["average"],
    "average, unequal": ["average", "--unequal", "first"],
    "merge": ["merge", "--method", "linear"],
    "merge and cast": ["merge", "--method", "linear", "--dtype", "bf16"],
}


@each_layout
@pytest.mark.parametrize("command", MEANS)
def test_a_mean_of_codes_is_refused(layout, command, tmp_path):
    """A command that would compute with codes or scales names one, and writes nothing."""
    paths = [write(layout, seed, tmp_path)[0] for seed in (0, 1)]

    result = run(*MEANS[command], *paths, "-o", tmp_path / "out.safetensors")

    assert result.code == 2
    assert "codes" in result.err
    assert not (tmp_path / "out.safetensors").exists()


@each_layout
@pytest.mark.parametrize("command", ["average", "merge"])
def test_a_mean_around_equal_codes(layout, command, tmp_path):
    """Models that share codes and scales are averaged elsewhere."""
    path, state = write(layout, 0, tmp_path)
    other = state | {"norm.weight": -state["norm.weight"]}
    safetensors.torch.save_file(other, tmp_path / "other.safetensors")

    result = run(*MEANS[command], path, tmp_path / "other.safetensors", "-o", tmp_path / "out.safetensors")

    assert result.code == 0, result.err
    assert bits(leaves(tmp_path / "out.safetensors")) == bits(state | {"norm.weight": torch.zeros(4)})


def test_the_mean_of_dequantized_files_is_right(tmp_path):
    """Numbers are averaged after they were computed."""
    paths = [write("blocks at the edge", seed, tmp_path)[0] for seed in (0, 1)]
    for path in paths:
        run("convert", path, f"{path}.plain.safetensors", "--dequantize")

    run("average", *[f"{path}.plain.safetensors" for path in paths], "-o", tmp_path / "out.safetensors")

    expected = sum(FP8["blocks at the edge"](seed)[1]["q.weight"].float().double() for seed in (0, 1)) / 2
    assert torch.equal(leaves(tmp_path / "out.safetensors")["q.weight"], expected.float())


@each_layout
def test_show_names_the_scale(layout, tmp_path):
    """The kind of the leaf of codes is its layout, with the leaf of its scale."""
    path, _ = write(layout, 0, tmp_path)

    assert "scale in '" in run("show", path).out


@pytest.mark.parametrize(
    ("scale", "text", "blocks"),
    [
        (torch.tensor(0.5), "for the tensor", [200, 300]),
        (torch.ones(200, 1), "for blocks of 1 x 300", [1, 300]),
        (torch.ones(2, 3), "for blocks of 128 x 128", [128, 128]),
        (torch.ones(7, 11), "", None),
    ],
    ids=["tensor", "rows", "blocks", "unknown"],
)
def test_show_names_the_codes_that_share_a_scale(scale, text, blocks, tmp_path):
    """A scale is for the tensor, for rows or for blocks, as the shapes say."""
    codes = torch.ones(200, 300).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"q.weight": codes, "q.weight_scale": scale}, tmp_path / "m.safetensors")

    printed = run("show", tmp_path / "m.safetensors").out
    found = {one["name"]: one for one in run("show", tmp_path / "m.safetensors", "--json").json["leaves"]}

    assert f"FP8, scale in 'q.weight_scale' {text}".strip() in printed
    assert found["q.weight"]["scale_blocks"] == blocks


def test_show_lists_the_companions_as_json(tmp_path):
    """All leaves that belong to codes are listed."""
    path, _ = write("tensor", 0, tmp_path)

    found = {one["name"]: one.get("scaled_by") for one in run("show", path, "--json").json["leaves"]}

    assert found["q.weight"] == ["q.weight_scale", "q.input_scale"]


@pytest.mark.parametrize(
    "words", [["show", "{}", "--stats"], ["diff", "{}", "{}", "--tol", "1e-3"]], ids=["show", "diff"]
)
def test_statistics_of_codes_are_noted(words, tmp_path):
    """A command that reads codes as they are says so."""
    path, _ = write("blocks", 0, tmp_path)

    assert "codes as they are, without their scales: q.weight" in run(*[word.format(path) for word in words]).err


def test_codes_without_their_scale_are_noted(tmp_path):
    """A part of a checkpoint that leaves the scale out says so, and keeps the codes."""
    path, state = write("rows", 0, tmp_path)

    result = run("extract", path, "-f", "q.weight", "-o", tmp_path / "out.safetensors")

    assert "the result has codes and not their scales: q.weight (FP8, scale in 'q.weight_scale')" in result.err
    assert bits(leaves(tmp_path / "out.safetensors")) == bits({"q.weight": state["q.weight"]})


def test_a_mean_without_scales_is_noted(tmp_path):
    """`average` of a part that leaves the scale out says so."""
    path, _ = write("rows", 0, tmp_path)

    result = run("average", path, path, "-x", "*scale*", "-o", tmp_path / "out.safetensors")

    assert "the result has codes and not their scales: q.weight" in result.err


def test_numbers_of_a_part_have_no_note(tmp_path):
    """Codes that are multiplied by a scale outside of the part are numbers."""
    path, _ = write("rows", 0, tmp_path)

    result = run("extract", path, "-f", "q.weight", "--dequantize", "-o", tmp_path / "out.safetensors")

    assert "codes" not in result.err


def test_models_of_two_precisions_are_not_merged(tmp_path):
    """Codes beside numbers of the same name are refused."""
    path, state = write("rows", 0, tmp_path)
    plain = {"q.weight": torch.ones(5, 6), "norm.weight": state["norm.weight"]}
    safetensors.torch.save_file(plain, tmp_path / "plain.safetensors")

    result = run(
        "merge", tmp_path / "plain.safetensors", path, "--method", "linear", "-o", tmp_path / "out.safetensors"
    )

    assert result.code == 2
    assert "codes or their scales differ between checkpoints" in result.err
