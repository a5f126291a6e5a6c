"""`assert_close` passes what is close, and names what is not."""

import pytest
import torch

from tdfunc import TensorDict, TreeStructureError
from tdfunc._lazystack.stack import lazy_stack
from tdfunc.ops.compare import assert_close

ONE = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.tensor([1.0, torch.nan])}, "s": ["p", "q"]}, [2])


def ragged(value):
    """Rows of different length."""
    return lazy_stack([TensorDict({"x": torch.full((n,), value), "s": "t"}, [n]) for n in (1, 2)])


def test_close_trees_pass():
    """Rounding, NaN at the same place or another order of keys would count as a difference."""
    near = ONE.set("a", ONE["a"] + 1e-7)

    assert_close(ONE, near)
    assert_close(ONE, near.select("s", "n", "a"))
    assert_close(ONE, ONE.set("a", ONE["a"] + 0.1), rtol=0, atol=0.2)
    assert_close(ragged(1.0), ragged(1.0))


WORSE = [
    (ONE.set("a", ONE["a"] + 1), r"'a' differs.\n(.*\n)*.*Greatest absolute difference: 1"),
    (ONE.set(("n", "b"), torch.tensor([1.0, 2.0])), r"'n.b' differs"),
    (ONE.set("a", ONE["a"].double()), r"'a' differs.\n.*dtype"),
    (ONE.set("a", torch.ones(2, 2)), r"'a' differs.\n.*shape"),
    (ONE.set("s", ["p", "r"]), r"values of 's' differ.\n.*\['p', 'r'\]\n.*\['p', 'q'\]"),
    (ONE.exclude("a").set("a", ONE["a"]).with_batch_size([]), r"batch size of the tree differ.\n.*\[\]\n.*\[2\]"),
]


@pytest.mark.parametrize(("other", "message"), WORSE)
def test_a_difference_is_named(other, message):
    """A difference would pass, or the message not say where it is."""
    with pytest.raises(AssertionError, match=message):
        assert_close(ONE, other)


def test_other_differences():
    """Keys, a ragged leaf or NaN when it may not be would pass."""
    with pytest.raises(TreeStructureError, match=r"assert_close: .*\n.*'a', 'n', 's'.*\n.*\['a'\]"):
        assert_close(ONE, ONE.select("a"))
    with pytest.raises(AssertionError, match="'x' differs") as caught:
        assert_close(ragged(1.0), ragged(2.0))
    assert caught.value.__notes__ == ["In tree 0 of the lazy stack."]
    with pytest.raises(AssertionError, match="batch size of the tree differ"):
        assert_close(ragged(1.0), ragged(1.0)[:1])
    with pytest.raises(AssertionError, match="'n.b' differs"):
        assert_close(ONE, ONE, equal_nan=False)


@pytest.mark.parametrize("swap", [False, True])
def test_assert_close_of_what_is_no_tree(swap):
    """A dict in place of a tree would be an AttributeError from inside."""
    td = TensorDict({"a": torch.ones(2)})
    pair = (td.to_dict(), td) if swap else (td, td.to_dict())

    with pytest.raises(TypeError, match=r"assert_close: of two trees.\n.*a tree\n.*dict\n.*TensorDict\(value\)"):
        assert_close(*pair)
