"""The table of a tree: rows, totals, where it shows."""

import builtins
import io

import pytest
import torch
from hypothesis import given
from rich.console import Console
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import Filter, FilterError, Kind, TensorClass, TensorDict, lazy_stack
from tests.helpers import TiedLM
from tests.strategies import trees


def rows(found):
    """The cells of the table, as text."""
    cells = [list(column.cells) for column in found.table.columns]
    return [[str(cell) for cell in line] for line in zip(*cells, strict=True)]


def network():
    """Parameters, buffers and a tied weight."""
    return tdf.from_module(nn.Sequential(TiedLM(), nn.BatchNorm1d(3)))


@given(trees())
def test_totals(tree):
    """Leaves, elements and bytes are those of the tree, and add up by dtype and by kind."""
    found = tree.summary()

    tensors = {id(x): x for x in tree.leaves()}.values()
    expected = [found.leaves, found.elements, found.size_bytes] if tensors else []
    assert found.leaves == len(tensors)
    assert [sum(values) for values in zip(*found.by_dtype.values(), strict=True)] == expected
    assert [sum(values) for values in zip(*found.by_kind.values(), strict=True)] == expected
    assert set(found.by_dtype) == {str(x.dtype).removeprefix("torch.") for x in tensors}
    assert f"{found.leaves} lea" in repr(found)


def test_rows():
    """Each leaf has a row in order with its kind; a tied one counts once."""
    found = network().summary()

    lines = rows(found)
    assert " ".join(column.header for column in found.table.columns) == "path shape dtype device kind elements size"
    assert lines[0] == ["0.emb.weight", "[7, 4]", "float32", "cpu", "parameter", "28", "112 B"]
    assert ["0.out.weight", "", "", "", "tied to 0.emb.weight", "", ""] in lines
    assert ["1.num_batches_tracked", "[]", "int64", "cpu", "buffer", "1", "8 B"] in lines
    assert found.by_kind == {"parameter": (5, 42, 168), "buffer": (3, 7, 32)}
    assert ["of it buffer", "3 leaves", "", "", "", "7", "32 B"] in lines


def test_depth():
    """The leaves below a depth share a line with their totals."""
    lines = rows(network().summary(depth=1))

    assert lines[0] == ["0.*", "3 leaves", "float32", "cpu", "parameter", "36", "144 B"]
    assert lines[1] == ["1.*", "5 leaves", "float32, int64", "cpu", "parameter, buffer", "13", "56 B"]
    assert rows(network().summary(depth=9)) == rows(network().summary())
    dtypes = [torch.int8, torch.int16, torch.int32, torch.int64]
    many = TensorDict({"n": {str(x): torch.zeros(1, dtype=x) for x in dtypes} | {"word": "a"}}).summary(depth=1)
    assert rows(many)[0][1:3] == ["4 leaves", "int8, int16, int32, ..."]
    three = TensorDict({"n": {str(x): torch.zeros(1, dtype=x) for x in dtypes[:3]}}).summary(depth=1)
    assert rows(three)[0][2] == "int8, int16, int32"


def test_where():
    """A filter chooses the leaves that count."""
    found = network().summary(where=Filter(Kind.BUFFER))

    assert [line[0] for line in rows(found)][:3] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert found.leaves == 3
    assert found.elements == 7
    assert "where Filter(Kind.BUFFER)" in found.table.title
    with pytest.raises(FilterError, match="'\\*.wieght' matches no leaf"):
        network().summary(where="*.wieght")


def test_other_nodes():
    """Rows of non-tensor data, empty trees, ragged stacks, typed trees and leaves that are shared without a tie."""

    class Sample(TensorClass):
        image: Tensor
        source: str = "camera"

    x = torch.zeros(2)
    tree = TensorDict({"s": Sample(x, batch_size=[2]), "again": x, "words": ["a", "b"], "empty": {}}, [2])

    assert rows(tree.summary()) == [
        ["s.image", "[2]", "float32", "cpu", "tensor", "2", "8 B"],
        ["s.source", "[2]", "str", "", "non-tensor", "", ""],
        ["again", "", "", "", "seen above", "", ""],
        ["words", "[2]", "list", "", "non-tensor", "", ""],
        ["empty", "", "", "", "empty tree", "", ""],
    ]
    ragged = lazy_stack([TensorDict({"x": torch.zeros(n)}, [n]) for n in (1, 2)]).summary()
    assert rows(ragged) == [["x", "2 x [-1]", "float32", "cpu", "tensor", "3", "12 B"]]
    assert ragged.leaves == 2
    odd = TensorDict({"u": nn.UninitializedParameter(), "g": torch.zeros(2, requires_grad=True)}).summary()
    assert rows(odd)[0] == ["u", "not initialised", "float32", "cpu", "UninitializedParameter", "0", "0 B"]
    assert rows(odd)[1][1] == "[2], requires grad"


def test_many_rows():
    """Of many leaves the first are shown, and all are counted."""
    found = TensorDict({f"k{i}": torch.zeros(()) for i in range(3000)}).summary()

    assert len(rows(found)) == 1001
    assert rows(TensorDict({f"k{i}": torch.zeros(()) for i in range(1000)}).summary())[-1][0] == "k999"
    assert rows(found)[-1][0] == "... 2,000 more; depth= folds them"
    assert found.leaves == 3000


def test_keys_are_no_markup():
    """Keys are shown as they are, without markup, line breaks or control characters."""
    text = repr(TensorDict({"[red]a[/red]": 1, "b\nc": 2, "\x1b[31m": 3, "x" * 500: 4}).summary())

    assert all(key in text for key in ("[red]a[/red]", r"b\nc", r"\x1b[31m"))
    assert "\x1b" not in text


def test_where_it_shows(capsys):
    """A summary shows at a prompt, in a notebook and through rich, and does not print by itself."""
    found = network().summary()
    assert capsys.readouterr().out == ""

    assert repr(found) == str(found)
    assert "49" in repr(found).splitlines()[-2]
    assert repr(found).count("├") == 3
    bundle = found._repr_mimebundle_(include=["text/html"], exclude=[])
    assert "0.emb.weight" in bundle["text/html"]
    out = io.StringIO()
    Console(file=out, width=200).print(found)
    assert "0.emb.weight" in out.getvalue()


def test_without_rich(monkeypatch):
    """Without rich the error names the package to install."""
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)

    with pytest.raises(ImportError, match=r"rich is not installed[\s\S]*pip install rich"):
        TensorDict({}).summary()
