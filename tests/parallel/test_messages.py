"""The errors of `map`, by call, class and pattern."""

import re
from functools import partial

import pytest
import torch

import tdfunc as tdf
from tdfunc import BatchSizeError, LeafMismatchError, MissingKeyError, TensorDict, UnsupportedError, WorkerError
from tests.parallel import functions as fns


@pytest.fixture(scope="module")
def pool():
    """Two workers for all rows of the table."""
    with tdf.WorkerPool(2) as pool:
        yield pool


TD = TensorDict({"x": torch.arange(10)}, [10])
GRAD = TensorDict({"in": {"w": torch.ones(4, requires_grad=True)}}, [4])
CASES = {
    "both numbers": (lambda p: TD.map(len, chunksize=2, num_chunks=2), ValueError, "got: .*chunksize=2, num_chunks=2"),
    "chunksize": (lambda p: TD.map(len, chunksize=-1), ValueError, "chunksize must be at least 0.*-1"),
    "num_chunks": (lambda p: TD.map(len, num_chunks=0), ValueError, "num_chunks must be at least 1.*0"),
    "num_workers": (lambda p: TD.map(fns.same, num_workers=-1), ValueError, "num_workers must(?s:.*)-1"),
    "method": (lambda p: TD.map(fns.same, num_workers=1, mp_start_method="hope"), ValueError, "hope"),
    "executor": (lambda p: TD.map(fns.same, executor="ray"), AttributeError, "'submit'"),
    "no batch": (lambda p: GRAD["in"][0].map(fns.same), IndexError, "this one has none"),
    "dim": (lambda p: TD.map_iter(fns.same, 3), IndexError, "batch dimension 3 does not exist"),
    "no rows": (lambda p: TD[:0].map(fns.same, num_workers=0, chunksize=0), ValueError, "the tree has no row"),
    "lambda": (
        lambda p: TD.map(lambda part: part, executor=p), UnsupportedError,
        "the function cannot be sent.*lambda.*fork.*threads",
    ),
    "value of a chunk": (
        lambda p: TD.set("f", tdf.NonTensorData(lambda: 1)).map(fns.same, executor=p), UnsupportedError,
        "the chunk cannot be sent.*lambda.*select",
    ),
    "result": (
        lambda p: TD.map(fns.unpicklable, executor=p), UnsupportedError, "the result cannot be sent.*unpicklable"
    ),
    "grad": (lambda p: GRAD.map(fns.same, executor=p), UnsupportedError, "'in.w' requires grad.*SliceBack.*detach"),
    "grad of a result": (
        lambda p: TensorDict({"x": torch.ones(4)}, [4]).map(fns.requiring, executor=p), UnsupportedError,
        "leaf 'y' requires grad.*MulBackward0",
    ),
    "vmap": (
        lambda p: torch.vmap(lambda x: TensorDict({"x": x}, [3]).map(fns.same, executor=p)["x"])(torch.ones(2, 3)),
        UnsupportedError, "outside of vmap",
    ),
    "vmap of the function": (
        lambda p: torch.vmap(lambda x: TD.map(partial(fns.same, x), executor=p, key=0))(torch.ones(2)),
        UnsupportedError, "a tensor has no values inside.*outside of vmap",
    ),
    "text": (lambda p: TD.map(fns.text, executor=p, num_chunks=2), UnsupportedError, r"chunk 0 \(rows 0:5\).*str"),
    "other class": (
        lambda p: TD.map(fns.other_class, executor=p, chunksize=2), LeafMismatchError,
        r"chunk 2 \(rows 4:6\).*a TensorDict.*got: .*a Point",
    ),
    "no rows in a result": (
        lambda p: TD.map(fns.no_batch, executor=p, chunksize=5), LeafMismatchError, r"chunk 0 \(rows 0:5\).*has none"
    ),
    "ragged": (
        lambda p: TD.map(fns.ragged_row, executor=p, chunksize=0), LeafMismatchError,
        r"chunk 1 \(row 1\).*\[0\].*\[1\].*map_iter",
    ),
    "unreadable": (lambda p: TD.map(fns.fail_unreadably, executor=p), WorkerError, "Unreadable: 1 and 2"),
    "exit": (lambda p: TD.map(fns.leave, executor=p), WorkerError, "SystemExit: 3"),
    "out, nothing": (lambda p: TD.map(fns.nothing, executor=p, out=TD.clone()), UnsupportedError, "got: .*NoneType"),
    "out, no dimension": (lambda p: TD.map(fns.same, out=TD.with_batch_size([])), LeafMismatchError, r"size \[\]"),
    "out, rows": (lambda p: TD.map(fns.same, executor=p, out=TD[:3].clone()), LeafMismatchError, r"got: .*size \[3\]"),
    "out, empty": (lambda p: TD.map(fns.same, executor=p, out=TensorDict({}, [10])), LeafMismatchError, "have leaves"),
    "out, keys": (
        lambda p: TD.map(fns.same, executor=p, out=TensorDict({"z": torch.zeros(10)}, [10])), MissingKeyError, "'z'"
    ),
    "out, short": (
        lambda p: TD.map(fns.even_rows, executor=p, num_chunks=1, out=TD.clone()), BatchSizeError, r"\[10\].*\[5\]"
    ),
    "out, in the tree": (
        lambda p: TD[1:].map(fns.same, executor=p, out=TD[:-1]), LeafMismatchError, "'x' of out shares memory"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_messages(pool, case):
    """Each mistake is the error of its class, with the path or chunk and what to do."""
    call, kind, pattern = CASES[case]
    with pytest.raises(kind, match=re.compile(pattern, re.DOTALL)):
        call(pool)
