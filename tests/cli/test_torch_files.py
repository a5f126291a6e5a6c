"""Files of torch.save with values that a tree cannot contain: what is left out is named, and the rest is read."""

import argparse
import collections
import enum
import functools
import json
import pathlib
import re
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from tdfunc import load
from tdfunc.cli.torch_files import pickles
from tests.cli.helpers import run
from tests.storage.trees import same_bytes


class Color(enum.Enum):
    RED = 1


class Options(dict):
    """A dict of its own class."""


# Kept as they are, or in the nearest class of Python.
KEPT = {
    "np.float64": np.float64(0.5), "np.bool": np.bool_(True), "array": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "texts": np.array(["a", "bc"]),
    "empty": np.zeros((0, 3)),
    "big endian": np.arange(3).astype(">f4"), "long": 10**50, "nan": float("inf"),
    "state": np.random.PCG64(1).state,
}  # fmt: skip
# Left out, with words of the line that says so.
LEFT_OUT = {
    "dtype": (torch.float16, "torch.float16"), "set": ({1, 2}, "{1, 2}"), "device": (torch.device("cpu"), "device"),
    "complex": (1 + 2j, "(1+2j)"), "bytes": (b"abc", "b'abc'"), "frozenset": (frozenset([1]), "frozenset({1})"),
    "namespace": (argparse.Namespace(a=1, b=torch.ones(2)), "argparse.Namespace"),
    "path": (pathlib.PurePosixPath("/x"), "pathlib.PurePosixPath"), "enum": (Color.RED, "Color"),
    "partial": (functools.partial(int, "1"), "functools.partial"), "objects": (np.array([None, 1]), "numpy.ndarray"),
    "function": (len, "builtins.len"), "Popen": (subprocess.Popen, "Popen"),
    "module": (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """A function that writes a training file with a value, and gives its path."""

    def write(value):
        torch.save({"model": nn.Linear(3, 2).state_dict(), "extra": value}, tmp_path / "c.pt")
        return tmp_path / "c.pt"

    return write


@pytest.mark.parametrize("name", LEFT_OUT)
def test_show_names_what_it_leaves_out(name, write):
    """The leaves are listed, and the value by its name."""
    value, says = LEFT_OUT[name]

    result = run("show", write(value))

    assert result.code == 0
    assert "model.weight" in result.out
    assert "left out: extra: " in result.out
    assert says in result.out


@pytest.mark.parametrize("name", LEFT_OUT)
def test_extract_reads_around_it(name, write, tmp_path):
    """One tensor of the file can be extracted."""
    path = write(LEFT_OUT[name][0])

    result = run("extract", path, "-o", tmp_path / "o.safetensors", "--filter", "model.bias")

    assert result.code == 0
    assert load(tmp_path / "o.safetensors")["model", "bias"].shape == (2,)


@pytest.mark.parametrize("name", ["dtype", "path"])
def test_convert_says_what_it_does_not_keep(name, write, tmp_path):
    """A value that is not kept is named on stderr."""
    value, says = LEFT_OUT[name]

    result = run("convert", write(value), tmp_path / "o.safetensors")

    assert f"not kept: extra: {says}" in result.err


@pytest.mark.parametrize("name", KEPT)
def test_values_that_are_kept(name, write, tmp_path):
    """Numbers and arrays of numpy are converted as what they are."""
    assert run("convert", write(KEPT[name]), tmp_path / "o.safetensors").code == 0

    found = load(tmp_path / "o.safetensors")["extra"]
    assert type(found) is type(KEPT[name])
    assert repr(found) == repr(KEPT[name])


@pytest.mark.parametrize("value", [Options(a=1), collections.defaultdict(list, a=1)], ids=["a class", "defaultdict"])
def test_classes_of_dicts_are_dicts(value, write, tmp_path):
    """A dict of another class is a dict."""
    assert run("convert", write(value), tmp_path / "o.safetensors").code == 0

    assert load(tmp_path / "o.safetensors")["extra"] == {"a": 1}


def test_a_value_in_a_list_is_none(write, tmp_path):
    """In a list None is in the place of a value that is left out, and the line names the place."""
    result = run("convert", write([1, {2, 3}, "x"]), tmp_path / "o.safetensors")

    assert "not kept: extra.1: {2, 3}" in result.err
    assert load(tmp_path / "o.safetensors")["extra"] == [1, None, "x"]


def test_a_sparse_tensor_is_not_dropped(write, tmp_path):
    """A tensor that cannot be converted is an error with a hint that works; a value is a note."""
    path = write(torch.eye(2).to_sparse())

    refused = run("convert", path, tmp_path / "o.safetensors")
    taken = run("extract", path, "-o", tmp_path / "o.safetensors", "--exclude", "extra")

    assert refused.code == 2
    assert taken.code == 0
    assert "--exclude extra" in refused.err


class Averaged:
    """A value with a tensor as its attribute, in itself by another one."""

    def __init__(self, value):
        self.value = value
        self.itself = self


WITH_TENSORS = {
    "module": nn.Linear(1, 1), "attribute": Averaged(torch.ones(2)), "deep": Averaged([{"a": (torch.ones(2),)}]),
    "namespace": argparse.Namespace(a=1, b=torch.ones(2)), "set": {torch.ones(2)}, "list": [nn.BatchNorm1d(2)],
    "arguments": functools.partial(torch.add, torch.ones(2)), "storage": torch.ones(2).untyped_storage(),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize("command", ["convert", "average", "merge"])
def test_an_object_with_tensors_is_not_dropped(name, command, write, tmp_path):
    """No command writes the rest of a file as if it were all."""
    path, out = write(WITH_TENSORS[name]), tmp_path / "out.safetensors"
    further = {"convert": (path, out), "average": (path, path, "-o", out)}
    code, _, err = run(command, *further.get(command, (path, path, "--method", "linear", "-o", out)))
    assert code == 2
    assert out.exists() is False
    assert "--exclude extra" in err


@pytest.mark.parametrize("value", [nn.CrossEntropyLoss(), Averaged([{"a": 1}])], ids=["loss", "cycle"])
def test_an_object_without_tensors_is_left_out(value, write, tmp_path):
    """Nothing of a model is lost with it."""
    code, _, err = run("convert", write(value), tmp_path / "out.safetensors")
    assert code == 0
    assert "not kept: extra" in err


class Part:
    """A value that knows the whole, as the parts of a model often do."""

    def __init__(self, whole, value):
        self.whole = whole
        self.value = value
        whole.append(self)


@pytest.mark.parametrize("last", [0, torch.ones(2)], ids=["without tensors", "with one"])
def test_parts_that_know_the_whole_are_searched_once(last, tmp_path, monkeypatch):
    """The work grows with the parts, and not with their pairs."""
    inner = pickles._inner
    looks = []
    monkeypatch.setattr(pickles, "_inner", lambda value: looks.append(1) or inner(value))
    counts = []
    for n in (50, 200):
        whole = []
        parts = [Part(whole, i if i < n - 1 else last) for i in range(n)]
        torch.save({"w": torch.ones(2), "parts": parts}, tmp_path / "c.pt")
        looks.clear()
        run("show", tmp_path / "c.pt")
        counts.append(len(looks))

    assert counts[1] < 4.5 * counts[0]


NOTHING = {"optimizer": {"state": {0: {"step": torch.ones(1)}}}, "list": [torch.ones(2)], "plain": {"epoch": 3}}


@pytest.mark.parametrize("name", NOTHING)
def test_a_state_dict_of_nothing_is_not_written(name, tmp_path):
    """Plain objects have no place in a state dict."""
    torch.save(NOTHING[name], tmp_path / "a.pt")
    code, _, err = run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 2
    assert (tmp_path / "b.pt").exists() is False
    assert "would be empty" in err


def test_a_part_of_nothing_is_not_written(tmp_path):
    """A tied leaf is excluded by any of its names."""
    w = torch.ones(2)
    torch.save({"a": {"w": w}, "b": {"w": w}, "c": torch.ones(1)}, tmp_path / "a.pt")
    out = tmp_path / "out.safetensors"
    code, _, err = run("extract", tmp_path / "a.pt", "-o", out, "-f", "a.*", "-x", "b.*")
    assert code == 2
    assert out.exists() is False
    assert "would be empty" in err


def test_diff_compares_what_is_left_out(tmp_path):
    """Two files that differ in a value that trees cannot contain are different."""
    for name, dtype in (("a", torch.float16), ("b", torch.float32)):
        torch.save({"w": torch.ones(2), "dtype": dtype}, tmp_path / f"{name}.pt")

    result = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values")

    assert result.code == 1
    assert "torch.float16" in result.out
    assert "torch.float32" in result.out


def test_tensors_in_lists_are_named(tmp_path):
    """`show` lists them, and `extract` says that a pattern does not choose them."""
    torch.save({"w": torch.ones(2), "parts": [torch.ones(3), (torch.zeros(4),)]}, tmp_path / "c.pt")

    shown = run("show", tmp_path / "c.pt", "--json").json
    taken = run("extract", tmp_path / "c.pt", "-o", tmp_path / "o.safetensors", "--filter", "*")

    assert {one["name"] for one in shown["leaves"]} == {"w", "parts.0", "parts.1.0"}
    assert "not chosen: 2 tensors in plain objects, which stay whole: parts.0, parts.1.0" in taken.err


@pytest.mark.parametrize(("protocol", "value"), [(4, 1), (3, np.float64(0.5))])
def test_another_protocol_is_named(protocol, value, tmp_path):
    """A protocol that torch's restricted reader does not know is named, and the hint's line repairs the file."""
    path = tmp_path / "c.pt"
    torch.save({"w": torch.ones(2), "n": value}, path, pickle_protocol=protocol)

    refused = run("show", path)
    line = refused.err.split("trusts the file: ")[1].strip().rstrip(".")
    exec(line, {"torch": torch, "path": path})

    assert refused.code == 2
    assert run("show", path).code == 0
    assert f"protocol {protocol}" in refused.err


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("command", ["show", "verify"])
def test_the_protocol_that_torch_reads_is_read(command, is_archive, tmp_path):
    """torch.load(weights_only=True) warns of protocol 3, and reads it."""
    path = tmp_path / "c.pt"
    torch.save(
        {"w": torch.ones(2), "n": [0.5, "a", None]}, path, pickle_protocol=3, _use_new_zipfile_serialization=is_archive
    )

    result = run(command, path)

    assert result.code == (3 if command == "verify" and not is_archive else 0)
    assert result.err == ""


def test_an_optimizer_with_a_dtype_keeps_its_tensors(tmp_path):
    """In a plain object only the value is left out."""
    state = {"state": {0: {"m": torch.ones(2), "dtype": torch.float16}}, "lr": 0.1}
    torch.save({"optim": state}, tmp_path / "c.pt")

    result = run("convert", tmp_path / "c.pt", tmp_path / "o.safetensors")

    found = load(tmp_path / "o.safetensors")["optim"]
    assert "not kept: optim.state.0.dtype: torch.float16" in result.err
    assert found["lr"] == 0.1
    assert list(found["state"][0]) == ["m"]


@pytest.mark.parametrize("name", ["verify", "show"])
def test_shards_of_torch(name, tmp_path):
    """A folder of `.bin` shards is read as one checkpoint."""
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin", "b": "y.bin"}}')
    torch.save({"a": torch.ones(2), "c": torch.ones(1)}, tmp_path / "x.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "y.bin")

    assert run(name, tmp_path).code == 0
    assert "left out: c: an entry that the index does not name" in run("show", tmp_path).out


@pytest.fixture
def shards_of_bin(tmp_path):
    """A model in shards, as `save_pretrained(safe_serialization=False)` wrote them: the folder and its state dict."""
    tied = torch.randn(40, 8, dtype=torch.bfloat16)
    state = {"embed.weight": tied, "layer.0.q": torch.randn(8, 8), "layer.0.n": torch.tensor(3), "head.weight": tied}
    homes = {}
    for number in (1, 2):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        part = dict(list(state.items())[2 * number - 2 : 2 * number])
        torch.save(part, tmp_path / name)
        homes |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1536}, "weight_map": homes}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tmp_path, state


@pytest.mark.parametrize("source", ["", "pytorch_model.bin.index.json"], ids=["folder", "index"])
@pytest.mark.parametrize(
    "result", [["o.safetensors"], ["o", "--to", "shards"], ["o", "--to", "memmap"]], ids=["file", "shards", "memmap"]
)
def test_shards_of_torch_are_converted(source, result, shards_of_bin):
    """A folder of `.bin` shards, or its index, becomes a checkpoint of each format with the same bits."""
    folder, state = shards_of_bin
    name, *options = result

    assert run("convert", folder / source, folder / name, *options).code == 0
    found = load(folder / name).state_dict()
    assert found.keys() == state.keys()
    assert [key for key in state if not same_bytes(found[key], state[key])] == []


def test_shards_of_torch_are_converted_in_place(shards_of_bin):
    """Shards in the folder of the model itself are what `load` reads from then on; the old ones stay."""
    folder, state = shards_of_bin

    assert run("convert", folder, folder, "--to", "shards").code == 0
    assert torch.equal(load(folder)["layer", "0", "q"], state["layer.0.q"])
    assert len(list(folder.glob("*.bin"))) == 2


def test_a_missing_entry_of_a_shard(tmp_path):
    """An index that names an entry of no file is damage, by name."""
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin"}}')
    torch.save({"b": torch.ones(3)}, tmp_path / "x.bin")

    assert "missing: a" in run("show", tmp_path).err


# -- differences inside of objects ------------------------------------------------------------------------------


def save_training(path, lr, seed=0):
    """A training file of many layers with an optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    optim = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.randn(2, 3)).square().sum().backward()
    optim.step()
    torch.save({"model": {"state_dict": model.state_dict()}, "optimizer": optim.state_dict()}, path)


def test_diff_names_the_place_in_an_object(tmp_path):
    """The place inside of the optimizer's state and both values are shown."""
    for name, lr in (("a", 0.1), ("b", 0.2)):
        save_training(tmp_path / f"{name}.pt", lr)

    found = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json").json["differences"]

    assert [(one["name"], one["a"], one["b"]) for one in found] == [("optimizer.param_groups.0.lr", 0.1, 0.2)]


def test_diff_shows_where_long_texts_differ(tmp_path):
    """Two texts with a long common beginning are cut before the difference, not at it."""
    for name in "ab":
        torch.save({"w": torch.ones(1), "note": "x" * 200 + name}, tmp_path / f"{name}.pt")

    row = next(line for line in run("diff", tmp_path / "a.pt", tmp_path / "b.pt").out.split("\n") if "note" in line)

    assert "xa " in row
    assert row.endswith("xb")


def test_an_average_that_differs_takes_a_few_lines(tmp_path):
    """Hundreds of differences are a few lines, and both hints work."""
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for seed, path in enumerate(paths):
        save_training(path, 0.1, seed)

    refused = run("average", *paths, "-o", tmp_path / "o.safetensors")
    hint = refused.err.split("--filter ")[1].split(" averages")[0].strip("'")
    part = run("average", *paths, "-o", tmp_path / "o.safetensors", "--filter", hint)
    first = run("average", *paths, "-o", tmp_path / "p.safetensors", "--unequal", "first")

    assert refused.code == 2
    assert part.code == 0
    assert first.code == 0
    assert len(refused.err.splitlines()) <= 14


# -- views and containers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_a_view_with_other_values_is_not_tied(view, tmp_path):
    """A conjugate and a negative have the memory of a tensor, and other values."""
    plain = torch.randn(3, dtype=torch.complex64)
    torch.save({"plain": plain, "view": view(plain)}, tmp_path / "v.pt")

    assert run("convert", tmp_path / "v.pt", tmp_path / "v.safetensors").code == 0

    assert torch.equal(load(tmp_path / "v.safetensors")["view"], view(plain).clone())


def nest(levels, make):
    """A value in containers."""
    value = 1
    for _ in range(levels):
        value = make(value)
    return value


def list_in_itself():
    """A list that contains itself."""
    made = []
    made.append(made)
    return made


def dict_in_itself():
    """A dict that contains itself, and a tensor."""
    made = {"w": torch.ones(2)}
    made["own"] = made
    return made


ENDLESS = {
    "a list in itself": (list_in_itself(), "a list that contains itself"),
    "a dict in itself": (dict_in_itself(), "a dict that contains itself"),
    "deep lists": (nest(300, lambda x: [x]), "a list that is nested over 200 deep"),
    "deep tuples": (nest(300, lambda x: (x,)), "a tuple that is nested over 200 deep"),
    "one list many times": (nest(60, lambda x: [x, x]), "a list that has over 10,000,000 values"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_container_without_end_is_left_out_by_name(name, write):
    """The rest of the file is shown."""
    value, text = ENDLESS[name]

    result = run("show", write(value))

    assert result.code == 0, result.err
    assert f"left out: extra: {text}" in result.out
    assert "model.weight" in result.out


def test_a_tensor_in_a_container_without_end_is_not_dropped(write, tmp_path):
    """A tensor is left out by --exclude only."""
    path = write(dict_in_itself())

    assert run("convert", path, tmp_path / "a.safetensors").code == 2
    assert run("extract", path, "-x", "extra", "-o", tmp_path / "a.safetensors").code == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named(layout, write):
    """The rest of a file with a nested tensor is shown."""
    result = run("show", write(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)))

    assert result.code == 0, result.err
    # Since torch 2.15 its restricted reader does not make nested tensors.
    assert re.search(r"left out: extra: (a tensor of|torch\..*nested)", result.out)


class Scaled(torch.Tensor):
    """A subclass with parts, which a function makes again."""

    @staticmethod
    def __new__(cls, values, scale):
        """A tensor without memory."""
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values, made.scale = values, scale
        return made

    def __reduce_ex__(self, protocol):
        """As torch's own subclasses do."""
        return torch._tensor._rebuild_from_type_v2, (remake, Scaled, (self.values, self.scale), {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Not used."""
        raise NotImplementedError


def remake(values, scale):
    """A `Scaled` of its parts."""
    return Scaled(values, scale)


def test_a_subclass_of_tensor_with_parts_is_named(write):
    """The rest of the file is shown."""
    result = run("show", write(Scaled(torch.ones(2), 3.0)))

    assert result.code == 0, result.err
    assert f"left out: extra: {__name__}.Scaled" in result.out


def test_a_subclass_of_tensor_with_parts_is_not_dropped(write, tmp_path):
    """It is left out by --exclude only."""
    path = write(Scaled(torch.ones(2), 3.0))

    assert run("convert", path, tmp_path / "a.safetensors").code == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_an_archive_that_was_packed_anew_has_its_numbers(method, tmp_path):
    """Other programs compress, and the bytes of a compressed entry can be mapped, but are not the numbers."""
    # Numbers that are larger when they are compressed.
    tensors = {"w": torch.randn(6, 8), "b": torch.randn(4).bfloat16()}
    torch.save(tensors, tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as old, zipfile.ZipFile(tmp_path / "new.pt", "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))

    assert run("convert", tmp_path / "new.pt", tmp_path / "o.safetensors").code == 0
    found = load(tmp_path / "o.safetensors")

    assert {name: leaf.tolist() for name, leaf in found.items()} == {
        name: leaf.tolist() for name, leaf in tensors.items()
    }
