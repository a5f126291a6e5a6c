"""Trees in a notebook: the page is well-formed, escaped, bounded, right, and there for any leaf."""

import time
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tdfunc as tdf
from tdfunc import Kind, NonTensorData, TensorClass, TensorDict, lazy_stack
from tdfunc.ops.display.html import KEY, _first
from tdfunc.ops.display.text import bytes_text, printable
from tests.helpers import TiedLM, assert_pure
from tests.strategies import trees

ALLOWED = {
    "div", "style", "details", "summary", "table", "colgroup", "col", "thead", "tbody", "tr", "th", "td", "b", "small",
    "code", "span",
}  # fmt: skip

RAGGED = [torch.zeros(2, 3), torch.ones(4, 3)]


class Page(HTMLParser):
    """The headings of a page and its tables cell by cell; asserts that it is well-formed and has no other tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.headings, self.attributes = [], [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED, tag
        self.attributes |= {name for name, _ in attrs}
        if tag != "col":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "summary":
            self.headings.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "summary" in self.open:
            self.headings[-1] += data
        elif "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def words(self):
        """All text except the style."""
        return " ".join([*self.headings, *(cell for row in self.rows for cell in row)])


class Odd(Tensor):
    """A tensor whose class raises."""

    layout = property(lambda self: 1 / 0)


def row(tree, key="x"):
    """The cells of a leaf."""
    (cells,) = [cells for cells in Page(tree._repr_html_()).rows if cells[0].split(" ")[0] == key]
    return cells


def raw(**nodes):
    """A tree of any nodes, as tree_map may make it."""
    return TensorDict._make(nodes, torch.Size([]))


@given(trees())
def test_page_of_any_tree(tree):
    """A page is well-formed, shows every key, the batch size and the totals, and leaves the tree as it was."""
    page = Page(assert_pure(lambda t: t._repr_html_(), tree))
    keys = [printable(path if isinstance(path, str) else path[-1], KEY) for path in tree.keys(include_nested=True)]

    assert [key for key in keys if key not in page.words] == []
    assert f"batch {list(tree.batch_size)}" in page.headings[0]
    assert f"{len(tree.leaves())} lea" in page.headings[0]
    assert bytes_text(tree.summary().size_bytes) in page.headings[0]
    assert page.attributes <= {"class", "open", "colspan", "style"}


HOSTILE = st.text(min_size=1, max_size=200) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "</td></table>",
        "a\nb",
        "\x00",
        "\ud800",
        "\u202e",
        "<!--",
        "&lt;",
        "x" * 100_000,
    ]
)


@given(HOSTILE, HOSTILE)
def test_keys_and_values_are_escaped(key, value):
    """Keys and values from elsewhere put no HTML of their own into a page, and do not break it."""
    tree = TensorDict({key: torch.zeros(2), "s": NonTensorData(value), "deep": {key: {key: 1}}})

    text = tree._repr_html_()

    assert Page(text).words.count(printable(key, KEY)) >= 3
    assert len(text) < 20_000
    text.encode()
    assert all(c.isprintable() for c in text)


@given(st.lists(st.floats(width=32) | st.sampled_from([float("nan"), float("inf")]), min_size=2, max_size=40))
def test_numbers_against_numpy(values):
    """The range and mean are those of the finite elements, and the others are counted."""
    array = np.array(values, dtype=np.float32)
    finite = array[np.isfinite(array)].astype(np.float64)

    text = row(TensorDict({"x": torch.tensor(array)}))[5]

    if len(finite):
        low, high = finite.min(), finite.max()
        expected = f"all {low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}, mean {finite.mean():.4g}"
        assert expected.replace("all -0", "all 0") in text.replace("all -0", "all 0")
    assert ("NaN or inf" in text) == (len(finite) < len(array))
    assert len(finite) == len(array) or f"{len(array) - len(finite)} NaN or inf" in text


@pytest.mark.parametrize(
    ("leaf", "cells"),
    [
        (lambda: torch.arange(6).reshape(2, 3), ["[2, 3]", "int64", "cpu", "48 B", "0 .. 5, mean 2.5"]),
        (lambda: torch.tensor([True, False, True, True]), ["[4]", "bool", "cpu", "4 B", "False .. True, mean 0.75"]),
        (lambda: torch.tensor([10**9 - 1, 10**9]), ["[2]", "int64", "cpu", "16 B", "999,999,999 .. 1e+09, mean 1e+09"]),
        (lambda: torch.tensor(3.5), ["[]", "float32", "cpu", "4 B", "3.5"]),
        (lambda: torch.zeros(0, 3), ["[0, 3]", "float32", "cpu", "0 B", "empty"]),
        (lambda: torch.ones(3, dtype=torch.bfloat16), ["[3]", "bfloat16", "cpu", "6 B", "all 1"]),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), ["[3]", "float8_e4m3fn", "cpu", "3 B", "all 1"]),
        (lambda: torch.full((2,), 2**64 - 1, dtype=torch.uint64), ["[2]", "uint64", "cpu", "16 B", "all 1.845e+19"]),
        (lambda: torch.tensor([3 + 4j, 0]), ["[2]", "complex64", "cpu", "16 B", ""]),
        (lambda: torch.tensor([torch.inf, -torch.inf]), ["[2]", "float32", "cpu", "8 B", " 2 NaN or inf"]),
        (lambda: torch.full((2,), 1.5e308, dtype=torch.float64), ["[2]", "float64", "cpu", "16 B", "all 1.5e+308"]),
        (lambda: torch.empty(3, device="meta"), ["[3]", "float32", "meta", "12 B", ""]),
        (lambda: torch.eye(3).to_sparse(), ["[3, 3]", "float32", "cpu", "60 B", ""]),
        (lambda: torch.eye(3).to_sparse_csr(), ["[3, 3]", "float32", "cpu", "68 B", ""]),
        (lambda: torch.nested.nested_tensor(RAGGED), ["[2, -1, 3]", "float32", "cpu", "72 B", ""]),
        (lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), ["[2, -1, 3]", "float32", "cpu", "72 B", ""]),
        (lambda: nn.UninitializedParameter(), ["not initialised", "float32", "cpu", "", ""]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_leaves(leaf, cells):
    """A leaf has its shape, dtype, device, size and values."""
    assert row(raw(x=leaf()))[1:] == cells


@pytest.mark.parametrize(
    ("leaf", "note"),
    [
        (lambda: nn.Parameter(torch.zeros(2)), "Parameter"),
        (lambda: nn.Parameter(torch.zeros(2), requires_grad=False), "Parameter, frozen"),
        (lambda: torch.zeros(2, requires_grad=True), "requires grad"),
        (lambda: torch.eye(3).to_sparse(), "sparse coo"),
        (lambda: NonTensorData("a"), "str"),
        (lambda: None, "NoneType"),
        (lambda: torch.zeros(2).as_subclass(Odd), "Odd"),
        (lambda: (torch.zeros(1), 2), "tuple"),
    ],
)
def test_notes(leaf, note):
    """Next to its key a leaf has its class, layout and `requires grad`, where these are not the usual ones."""
    assert row(raw(x=leaf()))[0] == f"x {note}"


def test_under_transforms():
    """A tree can be looked at inside vmap, grad, fake and inference blocks, or under another default device."""
    tree = TensorDict({"x": torch.arange(6.0).reshape(3, 2)}, [3])
    seen = []

    torch.vmap(lambda t: seen.append(row(t)) or t)(tree)
    torch.func.grad(lambda t: seen.append(row(t)) or t["x"].sum())(tree)
    with torch.inference_mode():
        seen.append(row(tree * 2))
    with torch.device("meta"):
        seen.append(row(raw(x=torch.zeros(1, device="cpu").expand(100_000))))
    make_fx(lambda x: seen.append(row(raw(x=x))) or x, tracing_mode="symbolic")(torch.zeros(5, 3))
    assert seen.pop()[2:] == ["float32", "cpu", "", ""]
    with FakeTensorMode():
        seen.append(row(TensorDict({"x": torch.zeros(3)})))

    assert [cells[1] for cells in seen] == ["[2]", "[3, 2]", "[3, 2]", "[100000]", "[3]"]
    assert [cells[5] for cells in seen] == ["", "", "0 .. 10, mean 5", "all 0 (of the first 16,384)", ""]


class Bad:
    """An object that cannot be printed."""

    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize("value", [Bad(), [Bad()], "x" * 10**7, list(range(10**6)), {"a": {"b": [1] * 1000}}])
def test_values_of_any_size(value):
    """A value whose repr raises is shown as such, and a long one is cut."""
    text = raw(x=NonTensorData(value), y=value)._repr_html_()

    Page(text)
    assert len(text) < 6000


def test_classes_of_trees():
    """Typed trees show their class, lazy stacks their ragged dimensions, and lists of values their first ones."""

    class Sample(TensorClass):
        image: Tensor
        source: str = "camera"

    typed = Page(Sample(torch.zeros(4, 2), batch_size=[4], device="cpu", names=["t"])._repr_html_())
    stack = lazy_stack([TensorDict({"x": torch.arange(n), "in": {"y": torch.zeros(n, 2)}}, [n]) for n in (2, 3)])
    ragged = Page(stack._repr_html_())

    assert typed.headings == ["Sample batch [4] · names ['t'] · cpu · 1 leaf, 32 B"]
    assert [cells[:2] for cells in typed.rows[1:]] == [["image", "[4, 2]"], ["source str", "'camera'"]]
    assert ragged.headings[0] == "LazyStack batch [2, -1] · stacked along dimension 0 · 4 leaves, 80 B"
    cells = {row[0]: row[1:] for row in ragged.rows}
    assert cells["x"] == ["2 x [-1]", "int64", "cpu", "40 B", ""]
    assert cells["y"] == ["2 x [-1, 2]", "float32", "cpu", "40 B", ""]
    assert row(TensorDict({"x": [f"w{i}" for i in range(100)]}, [100])) == [
        "x list", "[100] values: 'w0', 'w1', 'w2', 'w3', 'w4', 'w5', ..."
    ]  # fmt: skip


def test_ties_and_kinds():
    """A tied leaf names its other path and counts once, and a buffer is marked."""
    params = tdf.from_module(nn.Sequential(TiedLM(), nn.BatchNorm1d(3)))
    page = Page(params._repr_html_())

    labels = [cells[0] for cells in page.rows if cells[0].startswith("weight")]
    assert labels[0] == "weight parameter, tied to 0.out.weight"
    assert labels[2] == "weight parameter, tied to 0.emb.weight"
    assert any(cells[0] == "running_mean buffer" for cells in page.rows)
    assert f"{len(params.leaves())} leaves" in page.headings[0]
    assert row(TensorDict({}).set("x", torch.zeros(1), kind=Kind.NON_PERSISTENT))[0] == "x buffer, not saved"


# -- sizes ------------------------------------------------------------------------------------------------------


MANY = {
    "flat": (lambda: {f"k{i}": torch.zeros(()) for i in range(100_000)}, "... 99,900 more"),
    "nested": (
        lambda: {f"a{i}": {f"b{j}": torch.zeros(()) for j in range(100)} for i in range(1000)},
        "... 900 more",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "more"), MANY.values(), ids=MANY)
def test_many_entries(make, more):
    """A tree of 100,000 leaves takes bounded time and text, and counts the rest."""
    tree = TensorDict(make())
    start = time.process_time()
    text = tree._repr_html_()

    # Far above the time that it takes; without bounds it takes minutes.
    assert time.process_time() - start < 5
    assert len(text) < 200_000
    assert "100,000 leaves, 400 kB" in Page(text).headings[0]
    assert more in Page(text).words


@pytest.mark.slow
def test_many_entries_in_many_trees():
    """The leaves of trees that are not shown are counted as far as that takes bounded time."""
    part = TensorDict({f"a{i}": {f"b{j}": torch.zeros(()) for j in range(1000)} for i in range(302)})
    headings = Page(part._repr_html_()).headings

    assert headings[0].startswith("TensorDict batch [] · at least 299,699 leaves")
    assert headings[-1] == "a99 batch []"


def test_sub_trees_share_the_rows():
    """The first sub-tree does not take the rows of the others, and a deep tree ends."""
    wide = Page(TensorDict({f"block{i}": {f"k{j}": 0 for j in range(300)} for i in range(8)})._repr_html_())
    deep = TensorDict({"leaf": 1})
    for _ in range(300):
        deep = TensorDict({"k": deep})
    page = Page(deep._repr_html_())

    assert 300 < len(wide.rows) <= 400 + 9
    assert len(wide.headings) == 9
    assert wide.words.count("more") == 8
    assert len(page.headings) == 25
    assert "... 1 more" in page.words
    assert "1 leaf" in page.headings[0]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=3).filter(lambda s: np.prod(s) < 300_000), st.booleans())
def test_first_elements(sizes, transposed):
    """Of a large leaf at most 16,384 elements are read, in order if it is contiguous; of others all."""
    leaf = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    leaf = leaf.transpose(0, -1) if transposed else leaf

    found = _first(leaf)

    assert min(leaf.numel(), 1 << 14) // 2 <= len(found) <= 1 << 14
    assert torch.equal(found, leaf.reshape(-1)[: len(found)]) or transposed


def test_large_leaves_are_not_read_whole():
    """A leaf of 12 GB shows the values of its first elements and says so."""
    ramp = torch.arange(1000.0)[:, None].expand(1000, 3_000_000)

    assert row(TensorDict({"x": ramp}))[4:] == ["12.0 GB", "all 0 (of the first 16,384)"]
