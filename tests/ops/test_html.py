"""Trees in a notebook: well-formed, escaped, bounded, right, and for any leaf there is."""

import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import tdfunc as tdf
from tdfunc import Kind, NonTensorData, TensorClass, TensorDict, lazy_stack
from tdfunc.ops.display.facts import bytes_text, printable
from tdfunc.ops.display.html import KEY
from tests.helpers import TiedLM, assert_pure
from tests.strategies import trees

VOID = {"col"}
ALLOWED = {
    "div", "style", "details", "summary", "table", "colgroup", "col", "thead", "tbody", "tr", "th", "td", "b", "small",
    "code", "span", "svg", "path",
}  # fmt: skip


class Page(HTMLParser):
    """What a page holds: whether it is well formed, its words, and its tables cell by cell."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.headings, self.attributes = [], [], [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED, tag
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID and self.get_starttag_text()[-2:] != "/>":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "summary":
            self.headings.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "summary" in self.open:
            self.headings[-1] += data
        elif "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def words(self):
        """All text but the style."""
        return " ".join([*self.headings, *(cell for row in self.rows for cell in row)])


def row(tree, key="x"):
    """The cells of a leaf after its key."""
    (cells,) = [cells for cells in Page(tree._repr_html_()).rows if cells[0].split(" ")[0] == key]
    return cells


def raw(**nodes):
    """A tree of any nodes, as tree_map may make it."""
    return TensorDict._make(nodes, torch.Size([]))


# -- any tree ---------------------------------------------------------------------------------------------------


@given(trees())
def test_page_of_any_tree(tree):
    """A tree would give a page that is malformed or lacks a key, a batch size or a total."""
    page = Page(assert_pure(lambda t: t._repr_html_(), tree))

    for path in tree.keys(include_nested=True):
        key = path if isinstance(path, str) else path[-1]
        assert printable(key, KEY) in page.words
    assert f"batch {list(tree.batch_size)}" in page.headings[0]
    assert f"{len(tree.leaves())} lea" in page.headings[0]
    assert bytes_text(tree.summary().size_bytes) in page.headings[0]
    assert page.attributes <= {"class", "open", "colspan", "style", "width", "height", "viewbox", "role", "aria-label",
                               "d", "fill"}  # fmt: skip


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
    ]  # fmt: skip
)


@given(HOSTILE, HOSTILE)
def test_keys_and_values_are_escaped(key, value):
    """A key or value from elsewhere could put its own HTML into a reader's notebook, or break the page."""
    tree = TensorDict({key: torch.zeros(2), "s": NonTensorData(value), "deep": {key: {key: 1}}})

    text = tree._repr_html_()

    page = Page(text)
    assert "script" not in page.tags
    assert page.words.count(printable(key, KEY)) >= 3
    assert len(text) < 20_000
    text.encode()
    assert all(c.isprintable() for c in text)


@given(st.lists(st.floats(width=32) | st.sampled_from([float("nan"), float("inf")]), min_size=2, max_size=40))
def test_numbers_against_numpy(values):
    """Range, mean or the shares of NaN and inf would be wrong."""
    array = np.array(values, dtype=np.float32)
    finite = array[np.isfinite(array)].astype(np.float64)

    text = row(TensorDict({"x": torch.tensor(array)}))[5]

    if len(finite):
        low, high = finite.min(), finite.max()
        expected = f"all {low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}, mean {finite.mean():.4g}"
        assert expected.replace("all -0", "all 0") in text.replace("all -0", "all 0")
    for share, word in ((np.isnan(array).mean(), "NaN"), (np.isinf(array).mean(), "inf")):
        assert (f"{100 * share:.3g} % {word}" in text) == (share > 0)


@given(st.lists(st.integers(-5, 12), min_size=2, max_size=60))
@settings(max_examples=30)
def test_histogram_of_integers(values):
    """The bars would not be the counts."""
    tree = TensorDict({"x": torch.tensor(values)})
    low, high = min(values), max(values)
    counts = np.bincount(np.array(values) - low) if high - low < 16 else np.histogram(values, 16)[0]

    bars = re.findall(r"v-([\d.]+)h", tree._repr_html_())

    if low == high:
        assert bars == []
    else:
        expected = [max(12 * n / counts.max(), 0.8) for n in counts if n]
        np.testing.assert_allclose([float(bar) for bar in bars], expected, rtol=0.01)


# -- any leaf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "cells"),
    [
        (lambda: torch.arange(6).reshape(2, 3), ["[2, 3]", "int64", "cpu", "48 B", "0 .. 5, mean 2.5"]),
        (lambda: torch.tensor([True, False, True, True]), ["[4]", "bool", "cpu", "4 B", "75 % True"]),
        (lambda: torch.tensor(3.5), ["[]", "float32", "cpu", "4 B", "3.5"]),
        (lambda: torch.tensor(True), ["[]", "bool", "cpu", "1 B", "True"]),
        (lambda: torch.zeros(0, 3), ["[0, 3]", "float32", "cpu", "0 B", "empty"]),
        (lambda: torch.ones(3, dtype=torch.bfloat16), ["[3]", "bfloat16", "cpu", "6 B", "all 1"]),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), ["[3]", "float8_e4m3fn", "cpu", "3 B", "all 1"]),
        (lambda: torch.full((2,), 2**64 - 1, dtype=torch.uint64), ["[2]", "uint64", "cpu", "16 B", "all 1.845e+19"]),
        (lambda: torch.tensor([-(2**63), 2**63 - 1]), ["[2]", "int64", "cpu", "16 B", "-9.223e+18 .. 9.223e+18"]),
        (lambda: torch.tensor([3 + 4j, 0]), ["[2]", "complex64", "cpu", "16 B", "0 .. 5, mean 2.5 (magnitude)"]),
        (lambda: torch.tensor([3 + 4j, 0]).conj(), ["[2]", "complex64", "cpu", "16 B", "0 .. 5, mean 2.5"]),
        (lambda: torch.tensor([1e308, -1e308], dtype=torch.float64), ["[2]", "float64", "cpu", "16 B", "-1e+308 .."]),
        (lambda: torch.empty(3, device="meta"), ["[3]", "float32", "meta", "12 B", ""]),
        (lambda: torch.eye(3).to_sparse(), ["[3, 3]", "float32", "cpu", "60 B", "all 1 (stored values)"]),
        (lambda: torch.full((3,), float("nan")), ["[3]", "float32", "cpu", "12 B", "100 % NaN"]),
        (lambda: torch.tensor(float("inf")), ["[]", "float32", "cpu", "4 B", "100 % inf"]),
    ],
)
def test_leaves(leaf, cells):
    """A leaf's shape, dtype, device, size or values would be wrong, or asking for them would raise."""
    shown = row(raw(x=leaf()))[1:]

    assert shown[:4] == cells[:4]
    assert shown[4].startswith(cells[4])


@pytest.mark.parametrize(
    ("leaf", "note"),
    [
        (lambda: nn.Parameter(torch.zeros(2)), "Parameter"),
        (lambda: nn.Parameter(torch.zeros(2), requires_grad=False), "Parameter, frozen"),
        (lambda: torch.zeros(2, requires_grad=True), "requires grad"),
        (lambda: torch.zeros(1).expand(5), "expanded"),
        (lambda: torch.zeros(2).share_memory_(), "shared"),
        (lambda: torch.eye(3).to_sparse(), "sparse coo"),
        (lambda: nn.UninitializedParameter(), "UninitializedParameter"),
        (lambda: NonTensorData("a"), "str"),
        (lambda: 3, "int"),
        (lambda: None, "NoneType"),
        (lambda: (torch.zeros(1), 2), "tuple"),
    ],
)
def test_notes(leaf, note):
    """What shape and dtype do not say would not be told."""
    assert row(raw(x=leaf()))[0] == f"x {note}"


@pytest.mark.filterwarnings("ignore")
def test_leaves_of_other_layouts():
    """Nested, compressed, quantised and sharded leaves would raise, or hide their ragged dimension."""
    parts = [torch.zeros(2, 3), torch.ones(4, 3)]
    for nested in (
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
    ):
        assert row(raw(x=nested))[1:] == ["[2, -1, 3]", "float32", "cpu", "72 B", "0 .. 1, mean 0.6667"]
    assert row(raw(x=torch.eye(3).to_sparse_csr()))[4:] == ["68 B", "all 1 (stored values)"]
    quantised = torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.quint8)
    assert row(raw(x=quantised))[5] == "0 .. 1, mean 0.5 (dequantised)"


def test_leaves_without_values():
    """A leaf that only stands for values would raise, or show values that nobody has."""
    with FakeTensorMode():
        fake = TensorDict({"x": torch.zeros(3)})
        inside = row(fake)
    assert row(fake) == inside == ["x FakeTensor", "[3]", "float32", "cpu", "12 B", ""]
    assert row(raw(x=nn.UninitializedParameter()))[1:] == ["not initialised", "float32", "cpu", "", ""]


def test_under_transforms():
    """A tree could not be looked at inside vmap, grad or an inference block, or under another default device."""
    tree = TensorDict({"x": torch.arange(6.0).reshape(3, 2)}, [3])
    seen = []

    torch.vmap(lambda t: seen.append(row(t)) or t)(tree)
    torch.func.grad(lambda t: seen.append(row(t)) or t["x"].sum())(tree)
    with torch.inference_mode():
        seen.append(row(tree * 2))
    with torch.device("meta"):
        seen.append(row(raw(x=torch.zeros(1, device="cpu").expand(100_000))))

    assert [cells[0] for cells in seen] == ["x vmapped", "x in a transform, requires grad", "x", "x expanded"]
    assert [cells[1] for cells in seen] == ["[2]", "[3, 2]", "[3, 2]", "[100000]"]
    assert [cells[5] for cells in seen] == ["", "", "0 .. 10, mean 5", "all 0 (sample)"]


class Bad:
    """An object that cannot be printed."""

    def __repr__(self):
        raise ValueError("no")


class Long:
    """An object with a long text."""

    def __repr__(self):
        return "long " * 100_000


@pytest.mark.parametrize("value", [Bad(), Long(), [Bad()], "x" * 10**7, list(range(10**6)), {"a": {"b": [1] * 1000}}])
def test_values_of_any_size(value):
    """A value whose repr raises would take the page with it; a long one would fill the notebook."""
    text = raw(x=NonTensorData(value), y=value)._repr_html_()

    Page(text)
    assert len(text) < 5000


# -- classes of trees -------------------------------------------------------------------------------------------


def test_typed_trees():
    """A typed tree would not show its class, or hide a field that is None."""

    class Sample(TensorClass):
        image: Tensor
        source: str = "camera"
        box: Tensor | None = None

    page = Page(Sample(torch.zeros(4, 2), batch_size=[4])._repr_html_())

    assert page.headings == ["Sample batch [4] · 1 leaf, 32 B"]
    assert [cells[:2] for cells in page.rows[1:]] == [["image", "[4, 2]"], ["source str", "'camera'"], ["box", "None"]]


def test_lazy_stacks():
    """A ragged stack would not say where it is ragged, along which dimension, or which keys some trees lack."""
    stack = lazy_stack(
        [TensorDict({"x": torch.arange(n), "s": "a", "in": {"y": torch.zeros(n, 2)}}, [n]) for n in (2, 3)]
    )
    stack = torch.cat([stack, lazy_stack([TensorDict({"x": torch.zeros(1).long(), "z": torch.zeros(1)}, [1])])])

    page = Page(stack._repr_html_())

    assert page.headings[0] == "LazyStack batch [3, -1] · stacked along dimension 0 · 6 leaves, 92 B"
    cells = {row[0]: row[1:] for row in page.rows}
    assert cells["x"] == ["3 x [-1]", "int64", "cpu", "48 B", "0 .. 2, mean 0.6667"]
    assert cells["z"] == ["in trees [2]"]
    assert cells["s"] == ["in trees [0, 1]"]


def test_nontensor_stacks():
    """The values of a batch would not be shown, or all of them would."""
    cells = row(TensorDict({"x": [f"w{i}" for i in range(100)]}, [100]))

    assert cells == ["x list", "[100] values: 'w0', 'w1', 'w2', 'w3', 'w4', 'w5', ..."]


def test_ties_and_kinds():
    """A tied leaf would look like two, count twice, or a buffer like a parameter."""
    params = tdf.from_module(nn.Sequential(TiedLM(), nn.BatchNorm1d(3)))
    page = Page(params._repr_html_())

    labels = [cells[0] for cells in page.rows if cells[0].startswith("weight")]
    assert labels[0] == "weight parameter, tied to 0.out.weight"
    assert labels[2] == "weight parameter, tied to 0.emb.weight"
    assert any(cells[0] == "running_mean buffer" for cells in page.rows)
    assert f"{len(params.leaves())} leaves" in page.headings[0]
    assert row(TensorDict({}).set("x", torch.zeros(1), kind=Kind.NON_PERSISTENT))[0] == "x buffer, not saved"


# -- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_entries():
    """A tree of 100,000 leaves would take seconds and megabytes; what is left out would not be said."""
    flat = TensorDict({f"k{i}": torch.zeros(()) for i in range(100_000)})
    nested = TensorDict({f"a{i}": {f"b{j}": torch.zeros(()) for j in range(100)} for i in range(1000)})
    for tree, more in ((flat, "... 99,900 more"), (nested, "... 900 more")):
        tree._repr_html_()

        start = time.process_time()
        text = tree._repr_html_()

        # Far above what it takes; without bounds it would be minutes.
        assert time.process_time() - start < 5
        assert len(text) < 200_000
        page = Page(text)
        assert "100,000 leaves, 400 kB" in page.headings[0]
        assert more in page.words


def test_sub_trees_share_the_rows():
    """The first sub-tree would take all rows, and the others be hidden."""
    tree = TensorDict({f"block{i}": {f"k{j}": 0 for j in range(300)} for i in range(8)})

    page = Page(tree._repr_html_())

    assert len(page.headings) == 9
    assert 300 < sum(re.match(r"k\d", cells[0]) is not None for cells in page.rows) <= 400 - 8
    assert page.words.count("more") == 8


def test_depth_is_bounded():
    """A deep tree would overflow the stack, or never end."""
    tree = TensorDict({"leaf": 1})
    for _ in range(300):
        tree = TensorDict({"k": tree})

    page = Page(tree._repr_html_())

    assert len(page.headings) == 25
    assert "... 1 more" in page.words
    assert "1 leaf" in page.headings[0]


def test_large_leaves_are_sampled():
    """A leaf of 10 GB would be read whole; the reader would not know that the numbers are of a sample."""
    ramp = torch.arange(1000.0)[:, None].expand(1000, 3_000_000)

    assert row(TensorDict({"x": ramp}))[4:] == ["12.0 GB", "0 .. 999, mean 499.5 (sample)"]
    exact = torch.zeros(1 << 14)
    exact[12345] = 7
    assert row(TensorDict({"x": exact}))[5] == f"0 .. 7, mean {7 / (1 << 14):.4g}"
