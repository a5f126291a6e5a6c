"""`tdfunc show`: what is in a checkpoint of any format."""

import io
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import CheckpointManager, Kind, NonTensorData, TensorDict, save
from tdfunc.cli.numbers import Stats
from tests.cli.helpers import WRITERS, make_tree, run, write_as
from tests.storage.trees import DTYPES, of_dtype


@pytest.mark.parametrize("format", WRITERS)
def test_json_lists_every_leaf(format, tmp_path):
    """The JSON has every leaf with its dtype, shape and size."""
    tree = make_tree()
    found = run("show", write_as(format, tree, tmp_path), "--json").json

    state = {name: leaf for name, leaf in tree.state_dict().items() if name != "out.weight"}
    leaves = {leaf["name"]: {key: leaf[key] for key in ("dtype", "shape", "bytes")} for leaf in found["leaves"]}
    assert leaves == {
        name: {"dtype": str(leaf.dtype)[6:], "shape": list(leaf.shape), "bytes": leaf.nbytes}
        for name, leaf in state.items()
    }
    assert found["bytes"] == sum(leaf["bytes"] for leaf in leaves.values())


@pytest.mark.parametrize(
    ("format", "kind"), [(format, "parameter") for format in WRITERS if format != "torch"] + [("torch", None)]
)
def test_json_has_ties_and_kinds(format, kind, tmp_path):
    """Files of torch have no kinds."""
    leaves = run("show", write_as(format, make_tree(), tmp_path), "--json").json["leaves"]
    (leaf,) = [leaf for leaf in leaves if leaf["name"] == "emb.weight"]

    assert leaf["tied_to"] == [["out", "weight"]]
    assert leaf["kind"] == kind


@pytest.mark.parametrize("format", WRITERS)
def test_json_has_the_format_and_its_checksums(format, tmp_path):
    """A folder has files."""
    path = write_as(format, make_tree(), tmp_path)
    found = run("show", path, "--json").json

    assert found["format"] == format
    assert found["checksums"] == {"safetensors": "xxh3-64", "shards": "xxh3-64"}.get(format)
    assert (" file" in run("show", path).out) == (format in ("shards", "memmap"))


@pytest.fixture
def table(tmp_path):
    """The name of a leaf, and the lines of the table of a file with long texts."""
    tree = TensorDict({(name := "a" * 200): torch.ones(3), "n": {"i": torch.arange(2)}, "note": "t" * 61})
    tree = tree.update({"t": NonTensorData(torch.ones(1)), "u": "u" * 58})
    save(tree._replace(tree._data, kinds={name: Kind.BUFFER}), tmp_path / "t.safetensors")
    return name, run("show", tmp_path / "t.safetensors").out.splitlines(), tmp_path / "t.safetensors"


def test_table(table):
    """The plain table is whole, with all columns: leaves and values."""
    name, lines, _ = table

    assert [line.split() for line in lines[1:5]] == [
        ["path", "dtype", "shape", "size", "kind"],
        [name, "float32", "[3]", "12", "B", "buffer"],
        ["t", "float32", "[1]", "4", "B", "non-tensor"],
        ["n.i", "int64", "[2]", "16", "B", "tensor"],
    ]
    assert lines[1].index("e  k") == lines[3].index("B")
    assert [line.split(" value ")[1] for line in lines[5:7]] == [f"'{'t' * 59}...", f"'{'u' * 58}'"]


def test_a_table_has_the_file_and_the_totals(table):
    """Around it; without colours."""
    _, lines, path = table

    assert lines[0].startswith(f"{path}, safetensors, ")
    assert lines[7] == "3 leaves, 6 elements, 32 B (float32 16 B, int64 16 B), 2 non-tensor values"
    assert "\x1b" not in "".join(lines)


class Terminal(io.TextIOWrapper):
    """A stream of a terminal."""

    def isatty(self):
        return True


def test_a_terminal_has_a_width_and_a_bar(tmp_path, monkeypatch):
    """On a terminal the header is bold, lines are folded, and a bar on stderr counts the bytes."""
    monkeypatch.setenv("TERM", "xterm")
    save(TensorDict({"a" * 500: torch.ones(3)}), tmp_path / "t.safetensors")

    shown = run("show", tmp_path / "t.safetensors", "--stats", stream=Terminal)

    assert "\x1b[1m" in shown.out
    assert "a" * 500 not in shown.out
    assert "12/12 bytes" in shown.err


def test_tree_and_filter(tmp_path):
    """--tree shows the nesting, --filter and --exclude choose leaves."""
    path = write_as("safetensors", make_tree(), tmp_path)

    lines = run("show", path, "--tree", "--filter", "norm.*", "-f", "emb*", "--exclude", "*running*").out.splitlines()

    assert [line.strip(" │├└─").split("  ")[0] for line in lines[1:-1]] == [
        "t.safetensors", "emb", "weight", "out", "weight", "norm", "weight", "bias", "num_batches_tracked",
    ]  # fmt: skip
    assert "tied to emb.weight" in lines[5]
    assert lines[-1].startswith("4 leaves")


@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from([1, 7, 100]))
def test_stats_oracle(values, count):
    """Statistics of pieces are those of the whole, over the finite values."""
    leaf = torch.tensor(values, dtype=torch.float32)
    stats = Stats()
    for piece in leaf.split(count) if values else ():
        stats.add(piece)

    found, finite = stats.summary(), leaf[leaf.isfinite()].double()
    if len(finite):
        assert found["min"] == finite.min().item()
        assert found["max"] == finite.max().item()
        assert found["mean"] == pytest.approx(finite.mean().item(), rel=1e-9, abs=1e-12 * finite.abs().max().item())
    if len(finite) > 1:
        assert found["std"] == pytest.approx(finite.std().item(), rel=1e-6, abs=1e-12 * finite.abs().max().item())
    shares = [leaf.isnan(), leaf.isinf(), leaf == 0]
    assert [found[name] for name in ("nan", "inf", "zero")] == [
        s.double().mean().item() if values else 0 for s in shares
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stats_of_every_dtype(dtype, tmp_path):
    """Statistics are those of the values, in every dtype."""
    leaf = of_dtype(dtype, (4, 6))
    save(TensorDict({"x": leaf}), tmp_path / "t.safetensors")

    result = run("show", tmp_path / "t.safetensors", "--stats", "--json")

    assert result.code == 0
    assert run("show", tmp_path / "t.safetensors", "--stats").code == 0
    if dtype.startswith("float4"):
        assert "stats" not in result.json["leaves"][0]
    else:
        wide = leaf.to(torch.complex128).abs() if leaf.is_complex() else leaf.to(torch.float64)
        assert result.json["leaves"][0]["stats"]["max"] == pytest.approx(wide[wide.isfinite()].max().item())


@pytest.fixture
def counted(tmp_path):
    """A file of another program with a NaN, an infinity and no values."""
    leaf = torch.tensor([1.0, 3.0, 0.0, math.nan, math.inf])
    safetensors.torch.save_file({"x": leaf, "e": torch.empty(0)}, tmp_path / "f.safetensors", metadata={"who": "me"})
    return tmp_path / "f.safetensors"


def test_stats_columns(counted):
    """The table of statistics has every number, and shows a single NaN among many values."""
    lines = run("show", counted, "--stats").out.splitlines()

    assert lines[2].split() == ["path", "dtype", "shape", "min", "max", "mean", "std", "nan", "inf", "zero"]
    rows = {line.split()[0]: line.split()[3:] for line in lines[3:5]}
    assert rows == {"x": ["0", "3", "1.3333", "1.5275", "20%", "20%", "20%"], "e": ["-", "-", "-", "-", "0", "0", "0"]}
    tree = run("show", counted, "--stats", "--tree").out
    assert "x  float32 [5] 20 B min 0 max 3 mean 1.3333 std 1.5275 nan 20% inf 20% zero 20%" in tree


def test_metadata_of_other_programs_are_shown(counted):
    """They have no checksums; a conversion does not keep them."""
    lines = run("show", counted, "--stats").out.splitlines()

    assert "no checksums" in lines[0]
    assert lines[1] == "who: 'me'"
    assert lines[-1] == "2 leaves, 5 elements, 20 B"
    assert "not kept: who" in run("convert", counted, counted.with_name("g.safetensors")).err


def test_steps_of_a_run(tmp_path):
    """The folder of a CheckpointManager, and one step of it, are shown, and its metadata are compared."""
    manager, shown = CheckpointManager(tmp_path / "run"), {}
    for step in (3, 12):
        manager.save(step, TensorDict({"w": torch.full((2,), float(step))}), metadata={"loss": step / 2})
        shown[step] = run("show", tmp_path / "run")

    whole, one = shown[12], run("show", manager.path(3), "--json")

    assert "step 12, the latest of 3, 12" in whole.out
    assert "loss: 6.0" in whole.out
    assert [line.split() for line in whole.out.splitlines()[2:5]] == [["step", "loss"], ["3", "1.5"], ["12", "6.0"]]
    assert one.json["metadata"] == {"loss": 1.5}
    assert shown[3].out.splitlines()[2].split() == ["path", "dtype", "shape", "size", "kind"]
    assert "metadata loss" in run("diff", manager.path(3), manager.path(12)).out


@pytest.mark.parametrize("option", [[], ["--tree"]])
def test_hostile_names(tmp_path, option):
    """Control characters and rich's markup in a key are printed as text."""
    save(TensorDict({"\x1b[31mred\r": torch.ones(1), "[bold]x": torch.ones(1)}), tmp_path / "t.safetensors")

    result = run("show", tmp_path / "t.safetensors", *option)

    assert r"\x1b[31mred\r" in result.out
    assert "[bold]x" in result.out
    assert "\x1b" not in result.out
    assert "\r" not in result.out


def test_one_value_for_a_huge_batch(tmp_path):
    """One value for a batch of 2**40 is shown once."""
    for name in "ab":
        path = tmp_path / f"{name}.safetensors"
        save(TensorDict({"v": NonTensorData(name, (2**40,)), "w": torch.empty(2**40, 0)}, [2**40]), path)

    shown, listed = run("show", path), run("show", path, "--json").json
    compared = run("diff", tmp_path / "a.safetensors", path, "--json").json
    averaged = run("average", tmp_path / "a.safetensors", path, "-o", tmp_path / "o.safetensors")

    assert "value 'b'" in shown.out
    assert listed["values"] == [{"path": ["v"], "name": "v", "shape": [2**40], "per_element": False, "value": "b"}]
    assert [one["what"] for one in compared["differences"]] == ["value"]
    assert "'value': 'b'} instead of {" in averaged.err


def test_ties_inside_a_plain_object(tmp_path):
    """A tied leaf of a tree inside a plain object is one leaf, with both of its paths."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    save({"run": {1: TensorDict.from_module(model).detach(), 2: "x"}}, tmp_path / "t.safetensors")

    leaves = run("show", tmp_path / "t.safetensors", "--json").json["leaves"]
    assert [leaf["tied_to"] for leaf in leaves] == [[["run", "1", "b", "weight"]]]
