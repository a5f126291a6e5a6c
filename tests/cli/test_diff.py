"""`tdfunc diff`: every kind of difference is found and named, with its exit code."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Kind, NonTensorData, TensorDict, save
from tdfunc.cli.numbers import Difference, Tolerance
from tests.cli.helpers import run
from tests.storage.trees import DTYPES, of_dtype


def compare(folder, a, b, *options):
    """Save two trees, or mappings, and compare their files."""
    for name, tree in (("a", a), ("b", b)):
        save(tree, folder / f"{name}.safetensors")
    return run("diff", folder / "a.safetensors", folder / "b.safetensors", *options)


BASE = {"w": torch.arange(4.0), "n": TensorDict({"i": torch.arange(3)}, [3]), "note": "text"}


def test_chosen_leaves_are_compared(tmp_path):
    """Steps of a run differ in more than parameters: a filter leaves out the rest, of leaves and of metadata."""
    for name, step in (("a", 1), ("b", 2)):
        tree = TensorDict({"params": {"w": torch.ones(2)}, "state": {"step": torch.tensor(step)}})
        save(tree.set("note", name), tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]

    assert run("diff", *files, "--values").code == 1
    assert run("diff", *files, "--values", "--filter", "params.*").code == 0
    assert run("diff", *files, "--exclude", "state.*").code == 0
    chosen = run("diff", *files, "--filter", "state.*")
    assert chosen.code == 1
    assert "state.step" in chosen.out
    assert run("diff", *files, "--filter", "other.*").code == 2


@pytest.mark.parametrize(
    ("change", "what", "path"),
    [
        (lambda t: t.set("new", torch.ones(1)), "added", ["new"]),
        (lambda t: t.delete("n"), "missing", ["n", "i"]),
        (lambda t: t.set("w", torch.arange(4.0).reshape(2, 2)), "shape", ["w"]),
        (lambda t: t.set("w", torch.arange(4.0).double()), "dtype", ["w"]),
        (lambda t: t.set(("n", "i"), torch.tensor([0, 1, 3])), "values", ["n", "i"]),
        (lambda t: t.set("note", "other"), "value", ["note"]),
        (lambda t: t.set("note", ["text"]), "value", ["note"]),
        (lambda t: t.delete("note"), "value", ["note"]),
        (lambda t: t.set("note", NonTensorData("text", (2,))), "value", ["note"]),
        (lambda t: t.set("n", t["n"].with_batch_size([])), "batch size", ["n"]),
        (lambda t: t.set("n", t["n"].with_names(["x"])), "names", ["n"]),
        (lambda t: t._replace(t._data, kinds={"w": Kind.BUFFER}), "kind", ["w"]),
        (lambda t: t.set("w", torch.nn.Parameter(torch.arange(4.0))), "class", ["w"]),
        (lambda t: t.set("e", TensorDict({})), "empty tree", ["e"]),
        (lambda t: TensorDict({key: t[key] for key in ("n", "w", "note")}), "order of keys", []),
    ],
)
def test_every_difference_is_found(change, what, path, tmp_path):
    """Only this difference is found, its path is printed, and `--no-metadata` shows the differences of leaves."""
    tree, options = TensorDict(BASE), ([], ["--json"], ["--no-metadata"])

    plain, found, leaves = [compare(tmp_path, tree, change(tree), "--values", *more) for more in options]

    assert plain.code == 1
    assert found.code == 1
    assert leaves.code == (what in ("added", "missing", "shape", "dtype", "values"))
    assert [(one["what"], one["path"]) for one in found.json["differences"]] == [(what, path)]
    assert what in plain.out
    assert "difference" in plain.out.splitlines()[-1]


@pytest.mark.parametrize(("count", "shown"), [(3, "  0, 1, 2  "), (9, "  0, 1, 2 and 6 more  ")])
def test_leaves_that_differ_in_the_same_way_are_one_row(count, shown, tmp_path):
    """A mean of Parameters, which are plain tensors, differs from Parameters in one row."""
    tree = TensorDict({str(i): torch.nn.Parameter(torch.ones(2)) for i in range(count)})

    lines = compare(tmp_path, tree, (tree + tree) / 2, "--values").out.splitlines()

    assert shown in lines[1]
    assert lines[2:] == [f"{count} differences; values compared: all"]


def test_checksums_tell_without_reading(tmp_path):
    """Without --values different checksums are differences, and leaves without any are counted."""
    save(TensorDict({"w": torch.zeros(3), "same": torch.ones(2)}), tmp_path / "a.safetensors")
    save(TensorDict({"w": torch.ones(3), "same": torch.ones(2)}), tmp_path / "b.safetensors")
    torch.save({"w": torch.ones(3), "same": torch.ones(2)}, tmp_path / "c.pt")

    ours = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    other = run("diff", tmp_path / "a.safetensors", tmp_path / "c.pt")

    assert ours.code == 1
    assert other.code == 0
    assert "w       the checksums differ" in ours.out
    assert "same" not in ours.out
    assert other.out == "no differences; values compared: no (--values reads them)\n"


@pytest.mark.parametrize(("tol", "code"), [("1e-3", 0), ("1e-5", 1), ("0/1e-3", 0), ("1e-3/0", 0), ("0/1e-5", 1)])
def test_tolerance(tol, code, tmp_path):
    """RTOL and ATOL are used as `torch.isclose` uses them."""
    save(TensorDict({"w": torch.tensor([1.0, 2.0])}), tmp_path / "a.safetensors")
    save(TensorDict({"w": torch.tensor([1.0, 2.0005])}), tmp_path / "b.safetensors")

    assert run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--tol", tol).code == code


@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.0, 1e-3, 10.0]),
    st.sampled_from([0.0, 1e-3, 10.0]),
)
def test_numbers_oracle(rows, rtol, atol):
    """Counts are those of torch.isclose, and the largest differences those of torch."""
    a = torch.tensor([x for x, _, _ in rows], dtype=torch.float32)
    b = torch.tensor([x if same else y for x, y, same in rows], dtype=torch.float32)
    found = Difference(Tolerance(rtol, atol))
    for x, y in zip(a.split(4), b.split(4), strict=True):
        found.add(x, y)

    x, y = a.double(), b.double()
    close = torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    finite = x.isfinite() & y.isfinite()
    equal = (x == y) | (x.isnan() & y.isnan())
    assert found.differing == int((~close).sum())
    expected = (x - y).abs()[finite].max().item() if bool(finite.any()) else 0.0
    assert found.max_abs == (expected if bool((finite | equal).all()) else math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_of_every_dtype(dtype, tmp_path):
    """A difference in one element is found in every dtype."""
    a = of_dtype(dtype, (4, 6))
    b = a.clone()
    b.view(torch.uint8)[1, 0] ^= 1

    result = compare(tmp_path, {"x": a}, {"x": b}, "--values", "--json")

    assert result.code == 1
    assert [(d["what"], d["differing"], d["elements"]) for d in result.json["differences"]] == [("values", 1, 24)]


def test_a_place_of_a_tensor_in_an_object_is_named(tmp_path):
    """Objects with their tensors at other places differ in their values and leaves, and in no stack dimension."""
    found = compare(tmp_path, {"o": [torch.ones(2), 1]}, {"o": [1, torch.ones(2)]}, "--json").json["differences"]

    assert [one["what"] for one in found if one["what"] not in ("value", "missing", "added")] == ["description"]
