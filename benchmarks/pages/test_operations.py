"""The tables of names have the names and arguments of both libraries; `make conformance` runs this."""

import re

import pytest
import torch
from torch import nn

import tdfunc
from benchmarks.pages.operations import (
    ARGUMENTS,
    FUNCTIONS,
    LAZY,
    METHODS,
    OPTIONS,
    PAGE,
    TYPED,
    absent_arguments,
    besides,
    explained,
    follows_a_rule,
    full,
    page,
    public,
    section,
    status,
    typed,
)
from tdfunc import LazyStack, TensorClass, TensorDict
from tests.incumbent import Incumbent, tensordict

# Names of tensordict, names of ours, and the explanations of the rest.
BOTH = {
    "methods": (public(Incumbent), public(TensorDict), METHODS),
    "functions": (public(tensordict), public(tdfunc), FUNCTIONS),
    "lazy stacks": (besides(tensordict.LazyStackedTensorDict, public(Incumbent)), public(LazyStack), LAZY),
    "typed trees": (list(filter(typed, public(tensordict.TensorClass))), public(TensorClass), TYPED),
}


def listed():
    """The names and arguments in the first columns of the page's tables of names."""
    text = PAGE.read_text().split("<!-- names -->")[1]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_is_current():
    """The committed page is the one that its writer writes."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", BOTH)
def test_a_name_that_is_not_listed_works(name):
    """Each name of tensordict is here under the same name, or on the page, or explained by a rule of the page."""
    theirs, ours, table = BOTH[name]
    missing = [key for key in theirs if key not in listed() and not follows_a_rule(key, table.get(key, ""))]

    assert [key for key in missing if key not in ours] == []


def test_an_argument_that_is_not_listed_is_taken():
    """Each argument of a method with the same name is taken, or on the page."""
    assert set(absent_arguments()) - listed() == set()


def test_the_page_lists_no_name_that_works():
    """A name of both libraries would be called different."""
    same = {name for theirs, ours, _ in BOTH.values() for name in theirs if name in ours}
    differing = {name for theirs, ours, _ in BOTH.values() for name in theirs if name not in ours}

    assert (listed() & same) - differing - set(absent_arguments()) == set()


@pytest.mark.parametrize("subject", ["methods", "functions", "arguments"])
def test_all_names_can_be_printed(subject):
    """The names that are the same are only there."""
    assert "| instead, or the reason |" in full()[subject]


@pytest.mark.parametrize("name", BOTH)
def test_every_name_is_explained(name):
    """Every name of tensordict is here or explained."""
    theirs, ours, table = BOTH[name]

    assert [key for key, text in explained(theirs, ours, table).items() if text is None] == []


@pytest.mark.parametrize("name", BOTH)
def test_no_explanation_is_stale(name):
    """The page explains only names that tensordict has and tdfunc lacks."""
    theirs, ours, table = BOTH[name]

    assert sorted(table.keys() & set(ours)) == []
    assert sorted(table.keys() - set(theirs)) == []


def test_every_argument_is_explained():
    """Every argument that is not taken is explained, and no other."""
    assert absent_arguments().keys() == ARGUMENTS.keys()


def test_options_are_taken():
    """The arguments that the page counts as options are taken."""
    td = TensorDict({"a": torch.ones(2)}, [2])
    calls = {
        "apply": lambda **kw: td.apply(torch.add, td, **kw),
        "named_apply": lambda **kw: td.named_apply(lambda _, x, y: x + y, td, **kw),
        "add": lambda **kw: td.add(td, **kw),
        "sub": lambda **kw: td.sub(td, **kw),
        "from_any": lambda **kw: TensorDict.from_any({"a": torch.ones(2)}, **kw),
    }
    values = {
        "batch_size": [2], "default": None, "device": "cpu", "filter_empty": True, "names": ["t"], "alpha": 2,
        "auto_batch_size": True, "batch_dims": 1,
    }  # fmt: skip

    for name, call in calls.items():
        for option in OPTIONS[name] - {"names"} if name == "from_any" else OPTIONS[name]:
            assert call(**{option: values[option]})["a"].shape == (2,)
    with pytest.raises(TypeError):
        td.apply(torch.abs, call_on_nested=True)


def test_names_are_found():
    """The names that the tests above compare are found."""
    assert {"reshape", "memmap_", "batch_size", "from_dict"} <= set(public(Incumbent))
    assert {"pad_sequence", "LazyStackedTensorDict", "stack"} <= set(public(tensordict))
    assert not {"Any", "defaultdict", "nn"} & set(public(tensordict))
    assert explained(["a", "b", "c"], ["a"], {"b": "why"}) == {"b": "why", "c": None}
    assert [status(text) for text in ("absent: x", "planned: y", "`td.z`: w")] == ["absent", "planned", "renamed"]
    assert "| `b` | absent | why |" in section("T", ["a", "b"], ["a"], {"b": "absent: why"})


def snippets():
    """The code of each explanation, where it is complete: without dots, and of what is installed."""
    tables = (FUNCTIONS, METHODS, LAZY, TYPED)
    found = {
        (name, code) for table in tables for name, text in table.items() for code in re.findall(r"`([^`]+)`", text)
    }
    # Lines that take another package or device, and words.
    apart = (
        "...", "a str", "frame", "pandas", "record_stream", "path)", "grads", "isinstance", "tdfunc.nn", "complex32",
        "column", "pin_memory", "(dst)", "(src)",
    )  # fmt: skip
    return sorted(
        pair for pair in found if re.search(r"[(\[ .]", pair[1]) and not any(word in pair[1] for word in apart)
    )


@pytest.mark.parametrize(("name", "code"), snippets(), ids=lambda text: text)
def test_what_to_write_instead_runs(name, code):
    """Every line of the tables runs."""
    td = TensorDict({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}, [2], device="cpu")
    lazy = tdfunc.lazy_stack([td, td])
    names = {
        "TensorDict": TensorDict, "torch": torch, "tdfunc": tdfunc, "td": td, "lazy": lazy, "trees": [td, td],
        "modules": [nn.Linear(2, 2), nn.Linear(2, 2)], "key": "a", "keys": ["a"], "index": 0, "fn": torch.abs,
        "value": 3, "values": [1, 2], "dim": 0, "size": [2], "device": "cpu", "old": "a", "new": "c", "other": td,
        "names": ["rows"], "i": 1, "tree": td, "pad_size": [1, 0], "a": td, "b": TensorDict({"c": torch.ones(2)}, [2]),
        "data": td.to_dict(), "lengths": [1, 2], "rows": torch.ones(3),
    }  # fmt: skip
    if "assert_close" in code or "torch.cat" in code:
        names["b"] = td
    if "update" in code:
        names["rows"] = {"a": torch.ones(3)}
    if "unique()" in code:
        names |= {"key": "row", "td": td.set("row", torch.tensor([0, 1]))}
    if "lengths" in code or "torch.stack([" in code:
        names |= {"td": td.with_batch_size([2, 3]), "dim": 2}

    exec(code, names)


LEAVES = {"a": torch.ones(2, 3), "n": {"b": torch.zeros(2, 3), "m": {"c": torch.full((2, 3), 2.0)}}}
# name -> its result in tensordict
RESULTS = {
    "depth": lambda td: td.depth,
    "cat_from_tensordict": lambda td: td.cat_from_tensordict(0),
    "stack_from_tensordict": lambda td: td.stack_from_tensordict(1),
    "param_count": lambda td: td.param_count(),
    "pack": lambda td: td.pack()[0],
    "get_at": lambda td: td.get_at(("n", "b"), 1),
    "cat_tensors": lambda td: td.cat_tensors("a", ("n", "b"), out_key="x", dim=1)["x"],
    "bytes": lambda td: td.bytes(),
    "is_cuda": lambda td: td.is_cuda,
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_line_gives_the_result_of_tensordict(name):
    """The first line of the page for a name returns what the name returns."""
    names = {
        "td": TensorDict(LEAVES, [2]), "torch": torch, "dim": int(name != "cat_from_tensordict"),
        "index": 1, "key": ("n", "b"), "keys": ["a", ("n", "b")], "new": "x",
    }  # fmt: skip

    found = eval(re.findall(r"`([^`]+)`", METHODS[name])[0], names)

    found = found["x"] if name == "cat_tensors" else found
    expected = RESULTS[name](Incumbent(LEAVES, [2]))
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def test_backward_and_merge():
    """Gradients reach the leaves that require one, and the first tree wins where both have a key."""
    w = torch.ones(2, requires_grad=True)
    names = {
        "td": TensorDict({"w": w * 2, "n": torch.ones(2)}),
        "grads": TensorDict({"w": w.detach(), "n": w.detach()}),
    }
    exec(re.findall(r"`([^`]+)`", METHODS["backward"])[0], names | {"torch": torch})
    a, b = {"x": torch.ones(1), "y": torch.ones(1)}, {"y": torch.zeros(1), "z": torch.zeros(1)}
    _, first, _, called = re.findall(r"`([^`]+)`", FUNCTIONS["merge_tensordicts"])
    trees = {"a": TensorDict(a), "b": TensorDict(b), "fn": lambda x, y: x + y + 5}
    merge = tensordict.merge_tensordicts

    assert w.grad.tolist() == [2.0, 2.0]
    for code, theirs in (
        (first, merge(Incumbent(a), Incumbent(b))),
        (called, merge(Incumbent(a), Incumbent(b), callback_exist=lambda *v: sum(v) + 5)),
    ):
        assert {key: x.tolist() for key, x in eval(code, trees).items()} == {k: x.tolist() for k, x in theirs.items()}
