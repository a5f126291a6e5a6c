"""Comparing the structure and values of two trees: `assert_close`, `tree_equal`, `equal`, `all_close`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.pytree import flatten
from tdfunc.core.types import Path
from tdfunc.core.walk import Difference, zip_trees
from tdfunc.ops.base.foreach import check_same
from tdfunc.ops.base.reading import check_trees


def assert_close(
    actual: TensorCollection,
    expected: TensorCollection,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
) -> None:
    """Raise unless two trees have the same keys and batch sizes, close tensors and equal non-tensor data.

    Args:
        actual: A tree.
        expected: Another tree, of any class.
        rtol: Relative tolerance, given together with `atol`; the defaults are the tolerances of
            `torch.testing.assert_close` for the dtype.
        atol: Absolute tolerance.
        equal_nan: Take NaN as equal to NaN.

    Raises:
        TypeError: One of the two is not a tree.
        TreeStructureError: The keys differ.
        AssertionError: A batch size, leaf or value differs; the message names the first path that does.

    Source:
        `torch.testing.assert_close`, which compares each leaf.

    Examples:
        >>> tdf.assert_close(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(2) + 1e-7}))
    """
    check_trees("assert_close", actual, expected)
    check_same(actual, expected, "assert_close")
    _compare(actual, expected, {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}, ())


def _compare(actual: Any, expected: Any, options: dict[str, Any], at: Path) -> None:
    if isinstance(actual, TensorCollection):
        if actual._batch_size != expected._batch_size:
            raise _differ(at, "batch size", list(expected._batch_size), list(actual._batch_size))
        # A stack of trees is compared tree by tree.
        if actual._is_lazy:
            actual._each(lambda tree, other: _same(tree, other, options, at), expected)
            return
        for key in actual._keys():
            _compare(actual._get(key), expected._get(key), options, (*at, key))
    elif isinstance(actual, NonTensorBase):
        if not bool(actual.equal(expected).all()) or actual.shape != expected.shape:
            raise _differ(at, "values", expected.tolist(), actual.tolist())
    else:
        torch.testing.assert_close(
            actual, expected, **options, msg=lambda text: f"assert_close: {dotted(at)!r} differs.\n{text}"
        )


def _same(actual: Any, expected: Any, options: dict[str, Any], at: Path) -> Any:
    # The keys of a stack are those that its trees share; a tree may have or lack another.
    check_same(actual, expected, "assert_close")
    _compare(actual, expected, options, at)
    return actual


def _differ(at: Path, part: str, expected: Any, got: Any) -> AssertionError:
    where = "the tree"
    if at:
        where = repr(dotted(at))
    return error(AssertionError, f"assert_close: {part} of {where} differ.", expected=expected, got=got)


# Any: trees, and the built-in containers that hold them.
def tree_equal(first: Any, second: Any, *, rtol: float = 0.0, atol: float = 0.0, equal_nan: bool = False) -> bool:
    """Return True if two trees have one structure, and leaves of equal dtypes, devices, shapes and values.

    Args:
        first: A tree, or a tuple, list or dict of trees, tensors and other values.
        second: Another one. The structures agree if classes, keys, ties, batch sizes and non-tensor data agree; the
            order of keys does not count.
        rtol: Relative tolerance, with `atol`, for tensors of floating-point and complex dtypes.
        atol: Absolute tolerance.
        equal_nan: Take NaN as equal to NaN.

    Source:
        `equinox.tree_equal`.

    Examples:
        >>> a = TensorDict({"w": torch.ones(2)})
        >>> tdf.tree_equal(a, a.clone()), tdf.tree_equal(a, a.double()), tdf.tree_equal((a, 1), (a, 2))
        (True, False, False)
    """
    leaves, spec = tree_flatten(first)
    others, other_spec = tree_flatten(second)
    if spec != other_spec or _batch_sizes(first) != _batch_sizes(second):
        return False
    for x, y in zip(leaves, others, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or not bool(x == y):
                return False
        elif x.dtype != y.dtype or x.device != y.device or x.shape != y.shape:
            return False
        elif (rtol or atol or equal_nan) and (x.is_floating_point() or x.is_complex()):
            if not torch.allclose(x, y, rtol, atol, equal_nan):
                return False
        elif not torch.equal(x, y):
            return False
    return True


def _batch_sizes(value: Any) -> list[Any]:
    """Return the batch size of each tree in a value, in the order of its leaves."""
    tops = tree_flatten(value, is_leaf=lambda node: isinstance(node, TensorCollection))[0]
    found: list[Any] = []
    while tops:
        node = tops.pop()
        if isinstance(node, TensorCollection):
            found.append(node._batch_size)
            tops += flatten(node)[0]
    return found


def equal(first: Any, second: Any) -> bool:
    """Return True if two trees have equal keys, batch sizes, shapes and values, as `torch.equal` of their leaves."""
    check_trees("torch.equal", first, second)
    if first._batch_size != second._batch_size or isinstance(zip_trees(first, second), Difference):
        return False
    try:
        return _all_leaves("equal", first, second, torch.equal)
    except TreeStructureError:
        # Trees of a lazy stack have other keys than their twins.
        return False


def all_close(first: Any, second: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Return True if two trees with the same keys have close leaves and equal non-tensor data."""
    check_trees("torch.allclose", first, second)
    check_same(first, second, "allclose")
    return _all_leaves("allclose", first, second, lambda x, y: torch.allclose(x, y, rtol, atol, equal_nan))


def _all_leaves(call: str, first: TensorCollection, second: TensorCollection, same: Any) -> bool:
    found: list[bool] = []

    def leaf(x: Any, y: Any) -> Any:
        if isinstance(x, NonTensorBase):
            found.append(x.shape == y.shape and bool(x.equal(y).all()))
        else:
            found.append(same(x, y))
        return x

    first._shape(LeafOp(call, leaf, batch=True), second)
    return all(found)
