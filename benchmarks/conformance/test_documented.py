"""Differences that docs/differences.md tells in words: each runs in both libraries.

The results of tensordict are those of 0.15.3, which `make conformance` runs.
"""

import pytest
import torch

import tdfunc
from tests.incumbent import tensordict

TWO = {"a": torch.arange(6.0).reshape(2, 3)}
WORDS = {"a": torch.ones(2), "s": "x"}
MASK, SUM = torch.tensor([True, False]), torch.func.jacrev(lambda t: t["a"].sum(-1))


def named(lib, name):
    """A tree whose batch dimension has a name."""
    return lib.TensorDict({"a": torch.ones(2)}, [2], names=[name])


def lazy(lib, *sizes):
    """A lazy stack of trees of these lengths."""
    return lib.lazy_stack([lib.TensorDict({"a": torch.ones(n)}) for n in sizes])


def shadow(lib):
    """Define a field that has the name of the batch size."""
    return type(lib.TensorClass)("Shadow", (lib.TensorClass["shadow"],), {"__annotations__": {"batch_size": object}})


def decorated(lib):
    """Decorate a class; the same one comes back or another."""
    cls = type("Point", (), {"__annotations__": {"x": torch.Tensor}})
    return lib.tensorclass(cls) is cls


# a call of a library -> (our result, or the class of our error; theirs)
DOCUMENTED = {
    "larger operand": (
        lambda lib: (lib.TensorDict(TWO, [2]) * torch.ones(5, 2)).batch_size, tdfunc.BatchSizeError, (5, 2),
    ),
    "line for it": (lambda lib: (lib.TensorDict(TWO, [2]).expand(5, 2) * torch.ones(5, 2)).batch_size, (5, 2), (5, 2)),
    "shorter mask": (
        lambda lib: lib.TensorDict(TWO, [2, 3]).masked_fill(MASK, 0)["a"].tolist(), ValueError, [[0] * 3, [3, 4, 5]],
    ),
    "several quantiles": (
        lambda lib: lib.TensorDict(TWO, [2]).quantile(torch.tensor([0.1, 0.9]), 0).batch_size, ValueError, (2,),
    ),
    "negative padding": (lambda lib: lib.pad(lib.TensorDict(TWO, [2]), [-1, 0]).batch_size, ValueError, (1,)),
    "padded value": (lambda lib: lib.pad(lib.TensorDict(WORDS, [2]), [0, 1])["s"], "x", ["x", "x", None]),
    "flatten of None": (lambda lib: lib.TensorDict(TWO, [2, 3]).flatten(None, None).batch_size, TypeError, (6,)),
    "empty key": (lambda lib: list(lib.TensorDict({"": torch.ones(1)}).keys()), TypeError, [""]),
    "a number in a tree": (lambda lib: 42 in lib.TensorDict(TWO), False, RuntimeError),
    "data among leaves": (lambda lib: sorted(lib.TensorDict(WORDS, [2]).keys(True, True)), ["a", "s"], ["a"]),
    "lazy contiguous": (lambda lib: type(lazy(lib, 2, 2).contiguous()).__name__, "LazyStack", "TensorDict"),
    "ragged contiguous": (lambda lib: type(lazy(lib, 2, 3).contiguous()).__name__, "LazyStack", RuntimeError),
    "names that differ": (
        lambda lib: torch.stack([named(lib, "x"), named(lib, "y")]).names, [None, "x"], [None, None],
    ),
    "shadowed batch size": (lambda lib: shadow(lib).__name__, AttributeError, "Shadow"),
    "decorator": (decorated, False, True),
    "bare data": (lambda lib: list(lib.NonTensorData("x").keys()), AttributeError, []),
    "extremes": (
        lambda lib: [type(t) is lib.TensorDict for t in lib.TensorDict(TWO, [2]).max(0)], [True] * 2, [True] * 2,
    ),
    "to another tree": (
        lambda lib: lib.TensorDict(TWO, [2]).to(lib.TensorDict(TWO, [2, 3], device="cpu")).batch_size, (2,), (2,),
    ),
    "to a batch size": (lambda lib: lib.TensorDict(TWO, [2]).to(batch_size=[2, 3]).batch_size, TypeError, (2, 3)),
    "expand_as": (
        lambda lib: lib.TensorDict({"a": torch.ones(1, 1)}, [1]).expand_as(lib.TensorDict(TWO, [2]))["a"].shape,
        (2, 1), (2, 3),
    ),
    "a dict as operand": (lambda lib: (lib.TensorDict(TWO, [2]) == TWO)["a"].dtype, TypeError, torch.bool),
    "source and entries": (lambda lib: list(lib.TensorDict({"b": 1}, a=1).keys()), ["b", "a"], ValueError),
    "refresh without tensors": (lambda lib: list(lib.TensorDict({}).memmap_refresh_().keys()), [], RuntimeError),
    "hasattr of a write": (lambda lib: hasattr(lib.TensorDict({}), "lock_"), False, True),
    "save without a folder": (lambda lib: lib.TensorDict(TWO, [2]).save().is_memmap(), True, True),
    "Jacobian": (lambda lib: SUM(lib.TensorDict(TWO, [2])).batch_size, (2, 2), (2,)),
    "its line": (lambda lib: SUM(lib.TensorDict(TWO, [2])).with_batch_size([2]).batch_size, (2,), AttributeError),
}  # fmt: skip


def outcome(call, lib):
    """The result of a call, or its error."""
    try:
        return call(lib)
    except Exception as error:
        return error


@pytest.mark.skipif(tensordict.__version__ != "0.15.3", reason="results of another version")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_both_do_what_the_page_tells(name):
    """Each library returns or raises as the page has it."""
    call, *expected = DOCUMENTED[name]

    for lib, value in zip((tdfunc, tensordict), expected, strict=True):
        found = outcome(call, lib)
        assert isinstance(found, value) if isinstance(value, type) else found == value, (lib.__name__, found)


def test_memmap_of_a_tree_on_files(tmp_path):
    """A second `memmap_` raises here and does nothing there."""
    ours, theirs = (lib.TensorDict(TWO, [2]).memmap(tmp_path / lib.__name__) for lib in (tdfunc, tensordict))

    assert theirs.memmap_() is theirs
    with pytest.raises(FileExistsError, match="on another file already"):
        ours.memmap_()
