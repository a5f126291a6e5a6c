"""`map` and `map_iter`: equal to the function on the whole, wherever the chunks run."""

import multiprocessing
import os
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import (
    BatchSizeError,
    LeafMismatchError,
    MissingKeyError,
    NonTensorStack,
    TensorDict,
    UnsupportedError,
    WorkerError,
    WorkerPool,
)
from tdfunc.parallel.in_place import check_rows_apart
from tests.helpers import assert_trees_equal
from tests.storage import map_functions as fns
from tests.storage.trees import assert_same
from tests.strategies import trees


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests of the module: their start takes longer than the tests."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def standard():
    """A pool of the standard library, which knows nothing of trees."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as executor:
        yield executor


@pytest.fixture
def executor(request, pool, standard):
    """Each way to run chunks."""
    return {"pool": pool, "standard": standard, "threads": "threads", "here": None}[request.param]


EXECUTORS = pytest.mark.parametrize("executor", ["pool", "standard", "threads", "here"], indirect=True)


def rows(n=10):
    """A tree of n rows: numbers, words and a sub-tree."""
    return TensorDict(
        {"x": torch.arange(n), "word": [str(i) for i in range(n)], "in": {"y": torch.arange(2.0 * n).reshape(n, 2)}},
        [n],
    )


def run(td, fn, executor, **options):
    """`map` by an executor; two threads where `map` starts them, and no workers where the function runs here."""
    if not isinstance(executor, tdf.WorkerPool | ProcessPoolExecutor):
        options["num_workers"] = 0 if executor is None else 2
    return td.map(fn, executor=executor, **options)


# -- laws -------------------------------------------------------------------------------------------------------


@EXECUTORS
@pytest.mark.parametrize("options", [{}, {"chunksize": 3}, {"chunksize": 0}, {"num_chunks": 4}, {"num_chunks": 99}])
def test_equals_the_function_on_the_whole(executor, options):
    """Chunks would come back in another order, twice or not at all."""
    td = rows()

    assert_trees_equal(run(td, fns.double, executor, **options), fns.double(td))


@given(tree=trees().filter(lambda t: t.ndim and 0 not in t.batch_size), data=st.data())
@settings(max_examples=40)
def test_identity_in_workers(pool, tree, data):
    """A tree would lose something on its way: a dtype, a tie, a kind, a name, a word or its key order."""
    dim = data.draw(st.integers(0, tree.ndim - 1))
    n = tree.batch_size[dim]
    options = data.draw(
        st.sampled_from([{"num_chunks": 1}, {"chunksize": 1}, {"chunksize": 2}, {"num_chunks": n}]), label="options"
    )

    back = tree.map(fns.same, dim, executor=pool, **options)

    assert_same(back, tree.map(fns.same, dim, num_workers=0, **options))
    assert_trees_equal(back, tree)


@given(
    n=st.integers(1, 12),
    size=st.one_of(st.none(), st.integers(0, 13)),
    chunks=st.integers(1, 13),
    workers=st.integers(0, 3),
)
@settings(max_examples=40)
def test_any_chunking_gives_the_same(n, size, chunks, workers):
    """The rows of some chunk size, number of chunks or number of threads would be cut wrongly."""
    td = rows(n)
    options = {"num_chunks": chunks} if size is None else {"chunksize": size}

    out = td.map(fns.double, num_workers=workers, executor="threads", **options)

    assert_trees_equal(out, fns.double(td))


@EXECUTORS
def test_other_dimensions(executor):
    """Only the first batch dimension could be cut."""
    td = TensorDict({"x": torch.arange(24.0).reshape(2, 4, 3)}, [2, 4], names=["a", "b"])

    for dim in (1, -1):
        assert_trees_equal(run(td, fns.double, executor, dim=dim, chunksize=3), td * 2)
    assert (run(td, fns.double, executor, dim=1, chunksize=0)["x"] == td["x"] * 2).all()


@EXECUTORS
def test_classes_lazy_stacks_ties_and_dtypes(executor):
    """A tree that is no plain TensorDict of floats would come back as another."""
    point = fns.Point(x=torch.arange(4), note="kept", batch_size=[4])
    ragged = tdf.lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in (1, 3, 2)])
    weight = torch.arange(8.0).to(torch.bfloat16).reshape(4, 2)
    tied = TensorDict({"a": weight, "b": {"c": weight}}, [4])
    floats = TensorDict(
        {str(d): torch.arange(4).to(d) for d in (torch.float8_e4m3fn, torch.complex64, torch.bool)}, [4]
    )

    assert run(point, fns.same, executor, chunksize=3).note == "kept"
    back = run(ragged, fns.same, executor, chunksize=2)
    assert [x.tolist() for x in back["x"]] == [[0], [0, 1, 2], [0, 1]]
    assert_trees_equal(run(tied, fns.same, executor, chunksize=3), tied)
    for key, leaf in run(floats, fns.same, executor, chunksize=3).items():
        assert leaf.dtype == floats[key].dtype
        assert torch.equal(leaf.view(torch.uint8), floats[key].view(torch.uint8))


@EXECUTORS
def test_tensors_as_results(executor):
    """Numbers of each chunk could not be collected."""
    assert run(rows(), fns.total, executor, chunksize=4).tolist() == [6.0, 22.0, 17.0]
    assert run(rows(3), fns.total, executor, chunksize=0).tolist() == [[0.0], [1.0], [2.0]]


@EXECUTORS
def test_none_leaves_rows_out(executor):
    """A filter would fail, or a function called for its effects would."""
    assert run(rows(), fns.even_only, executor, chunksize=0)["x"].tolist() == [0, 2, 4, 6, 8]
    assert run(rows(), fns.even_rows, executor, chunksize=3)["x"].tolist() == [0, 2, 4, 6, 8]
    assert run(rows(), fns.nothing, executor) is None


@EXECUTORS
def test_empty_batches(executor):
    """A data set without rows would fail where one with rows does not."""
    td = rows()[:0]

    assert_trees_equal(run(td, fns.double, executor), td)
    assert_trees_equal(run(td, fns.double, executor, chunksize=5), td)
    with pytest.raises(ValueError, match=r"no rows(.|\n)*expected: one row or more(.|\n)*got:      none"):
        run(td, fns.double, executor, chunksize=0)
    assert list(td.map_iter(fns.same, num_workers=0, chunksize=0)) == []


def test_many_results_are_joined_in_parts(pool):
    """Results that are joined while others are on their way would be joined in another order."""
    td = rows(300)

    assert_trees_equal(td.map(fns.double, executor=pool, chunksize=0), fns.double(td))
    assert_trees_equal(td.map(fns.double, executor=pool, chunksize=2), fns.double(td))


def test_gradients_flow_through_threads():
    """Threads share memory, so a loss on the result would reach the leaves."""
    x = torch.arange(6.0, requires_grad=True)

    TensorDict({"x": x}, [6]).map(fns.double, executor="threads", num_workers=2)["x"].sum().backward()

    assert x.grad.tolist() == [2.0] * 6


def test_parameters_come_back_as_parameters(pool):
    """A trained member would come back as a plain tensor, or expanded and meta leaves as full ones."""
    td = TensorDict(
        {"x": torch.ones(4), "wide": torch.zeros(()).expand(4, 1000), "m": torch.empty(4, device="meta")}, [4]
    )

    (back,) = td.map_iter(fns.parameter, executor=pool, num_chunks=1)

    assert type(back["x"]) is torch.nn.Parameter
    assert back["x"].requires_grad
    assert back["wide"].stride() == (0, 0)
    assert back["m"].device.type == "meta"


@EXECUTORS
def test_the_caller_s_modes_hold(executor):
    """A function would track gradients in a worker though the caller had turned that off."""
    assert run(rows(2), fns.modes, executor).tolist()[0] == [True, False]
    with torch.no_grad():
        assert run(rows(2), fns.modes, executor).tolist()[0] == [False, False]
    with torch.inference_mode():
        assert run(rows(2), fns.modes, executor).tolist()[0] == [False, True]
    torch.set_default_dtype(torch.float64)
    try:
        assert run(rows(2), fns.default_dtype, executor).all()
    finally:
        torch.set_default_dtype(torch.float32)


# -- seeds ------------------------------------------------------------------------------------------------------


def test_seeds_depend_on_the_chunk_only(pool, standard):
    """A run could not be repeated on a machine with another number of workers."""
    td = rows()

    def noise(executor, **options):
        generator = torch.Generator().manual_seed(7)
        return td.map(fns.draw, executor=executor, chunksize=3, generator=generator, **options)["noise"]

    first = noise(pool)
    assert torch.equal(first, noise(standard))
    assert torch.equal(first, noise(None, num_workers=1, mp_start_method="fork"))
    assert len(first.unique()) == len(first)
    assert not torch.equal(first, td.map(fns.draw, executor=pool, chunksize=3)["noise"])


@EXECUTORS
def test_a_generator_argument_is_given(executor):
    """A function that takes a generator would draw other numbers here than in a worker."""
    made = run(rows(), fns.draw_from, executor, chunksize=3, generator=torch.Generator().manual_seed(7))
    serial = rows().map(fns.draw_from, 0, 0, chunksize=3, generator=torch.Generator().manual_seed(7))

    assert torch.equal(made["noise"], serial["noise"])


def test_the_default_generator_draws_the_seed(pool):
    """`torch.manual_seed` would not make a run repeatable, or here the function's draws would be the caller's."""
    torch.manual_seed(3)
    first = rows().map(fns.draw, executor=pool, chunksize=3)["noise"]
    torch.manual_seed(3)
    assert torch.equal(first, rows().map(fns.draw, executor=pool, chunksize=3)["noise"])
    state = torch.get_rng_state()
    rows().map(fns.draw_from, num_workers=2, executor="threads", generator=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())


# -- out --------------------------------------------------------------------------------------------------------


@EXECUTORS
@pytest.mark.parametrize("options", [{"chunksize": 3}, {"chunksize": 0}])
def test_out_is_filled(executor, options):
    """Results would not be written to the rows that they belong to."""
    td = rows().select("x", "in")
    out = td.new_zeros([10])

    assert run(td, fns.double, executor, out=out, **options) is out
    assert_trees_equal(out, fns.double(td))


@EXECUTORS
def test_out_along_another_dimension(executor):
    """Chunks of a later dimension would be written to rows of the first."""
    td = TensorDict({"x": torch.arange(24.0).reshape(2, 4, 3)}, [2, 4])
    out = td.new_zeros([2, 4])

    run(td, fns.double, executor, dim=1, chunksize=3, out=out)

    assert (out["x"] == td["x"] * 2).all()


def square():
    """A tensor of 6 rows and 6 columns."""
    return torch.arange(36.0).reshape(6, 6)


@pytest.mark.parametrize(
    ("of_tree", "of_out", "dim"),
    [
        (lambda x: x[:-1], lambda x: x[1:], 0),
        (lambda x: x[1:], lambda x: x[:-1], 0),
        (lambda x: x, lambda x: x.mT, 0),
        (lambda x: x, lambda x: x.mT, 1),
        (lambda x: x[:, :-1], lambda x: x[:, 1:], 1),
        (lambda x: x[:1].expand(6, 6), lambda x: x, 0),
        (lambda x: x.view(torch.int32)[:-1], lambda x: x[1:], 0),
    ],
)
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "executor": "threads"}])
def test_out_over_other_rows_is_refused(of_tree, of_out, dim, options):
    """Rows would be read after they were overwritten: wrong numbers in silence."""
    x = square()
    td, out = [TensorDict({"in": {"x": part}}, part.shape) for part in (of_tree(x), of_out(x))]

    with pytest.raises(
        LeafMismatchError, match=r"'in.x' of out shares(.|\n)*expected: memory of its own(.|\n)*got:      rows"
    ):
        td.map(fns.same, dim, chunksize=2, out=out, **options)

    assert torch.equal(x, square())


@pytest.mark.parametrize(
    ("of_tree", "of_out", "dim"),
    [
        (lambda x: x, lambda x: x, 0),
        (lambda x: x, lambda x: x, 1),
        (lambda x: x.mT, lambda x: x.mT, 1),
        (lambda x: x[::2], lambda x: x[1::2], 0),
        (lambda x: x[:, :3], lambda x: x[:, 3:], 0),
        (lambda x: x[:, :3], lambda x: x[:, 3:], 1),
        (lambda x: x[:3], lambda x: x[3:], 0),
        (lambda x: x[:1], lambda x: x[:1], 0),
    ],
)
def test_out_in_place_or_beside_the_tree(of_tree, of_out, dim):
    """Results could not be written over their own rows, or between the rows of the tree."""
    x = square()
    td, out = [TensorDict({"x": part}, part.shape[:2]) for part in (of_tree(x), of_out(x))]
    expected = fns.double(td.clone())

    td.map(fns.double, dim, 0, chunksize=1, out=out)

    assert_trees_equal(out, expected)


def test_out_in_place_with_leaves_that_change_places():
    """Two leaves whose values are swapped chunk by chunk would both hold one of the two, as would trees of a stack."""
    td = TensorDict({"a": torch.zeros(4), "b": torch.ones(4)}, [4])
    stack = tdf.lazy_stack([TensorDict({"x": torch.full((), float(i))}) for i in range(4)])
    both = TensorDict({"in": stack, "x": torch.zeros(4)}, [4])

    td.map(
        lambda rows: TensorDict({"a": rows["b"], "b": rows["a"]}, rows.batch_size), num_workers=0, chunksize=3, out=td
    )
    both.map(lambda rows: rows + 1, num_workers=0, chunksize=3, out=both)

    assert td["a"].tolist() == [1.0] * 4
    assert td["b"].tolist() == [0.0] * 4
    assert [row["in", "x"].item() for row in both.unbind(0)] == [1.0, 2.0, 3.0, 4.0]
    # Which pair is named first depends on where the leaves lie.
    with pytest.raises(
        LeafMismatchError, match=r"leaf '(in.\d.)?x' of out shares memory with other rows of leaf '(in.\d.)?x'"
    ):
        both[1:].map(fns.same, num_workers=0, out=both[:-1])


@given(st.data())
def test_rows_that_meet_are_found(data):
    """An `out` over rows that are read later would be taken, or one beside them refused."""
    memory = torch.arange(48)
    n = data.draw(st.integers(1, 4))
    views = []
    for _ in range(2):
        steps = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
        views.append(memory.as_strided((n, data.draw(st.integers(1, 2))), steps, data.draw(st.integers(0, 15))))
    td, out = [TensorDict({"x": view}, [n]) for view in views]
    places = [[set(row.flatten().tolist()) for row in view] for view in views]
    meet = any(places[0][i] & places[1][j] for i in range(n) for j in range(n) if i != j)

    try:
        check_rows_apart(td, out, 0)
    except LeafMismatchError:
        # Elements in the same rows alone, at unequal steps, are refused with the others.
        assert any(places[0][i] & places[1][j] for i in range(n) for j in range(n))
    else:
        # In place: a tree whose own rows overlap cannot be written to anyway.
        assert not meet or (views[0].data_ptr(), *views[0].stride()) == (views[1].data_ptr(), *views[1].stride())


def test_out_that_cannot_take_the_result(pool):
    """Rows would be left as they were, or written to the wrong ones, in silence."""
    td = rows().select("x")
    with pytest.raises(UnsupportedError, match=r"out(.|\n)*expected: a tree(.|\n)*got:      NoneType"):
        td.map(fns.nothing, executor=pool, out=td.clone())
    with pytest.raises(LeafMismatchError, match=r"expected: 10 at batch dimension 0(.|\n)*got:      batch size \[3\]"):
        td.map(fns.same, executor=pool, out=td[:3].clone())
    with pytest.raises(LeafMismatchError, match=r"no leaves(.|\n)*got:      \[\]"):
        td.map(fns.same, executor=pool, out=TensorDict({}, [10]))
    with pytest.raises(UnsupportedError, match=r"lazy stack(.|\n)*expected: a tree of one shape"):
        td.map(fns.same, executor=pool, out=tdf.lazy_stack([td[i] for i in range(10)]))
    with pytest.raises(TypeError, match=r"expected: a tree\n  got:      dict"):
        td.map(fns.same, executor=pool, out={})
    with pytest.raises(MissingKeyError, match=r"expected: \['z'\](.|\n)*got:      \['x'\]"):
        td.map(fns.same, executor=pool, out=TensorDict({"z": torch.zeros(10)}, [10]))
    with pytest.raises(BatchSizeError, match=r"expected: \[10\](.|\n)*got:      \[5\]"):
        td.map(fns.even_rows, executor=pool, num_chunks=1, out=td.clone())


# -- map_iter ---------------------------------------------------------------------------------------------------


@EXECUTORS
def test_map_iter_yields_in_order(executor):
    """A loop over results would see them in the order in which they happened to end."""
    workers = 0 if executor is None else None
    seen = [part["x"].tolist() for part in rows().map_iter(fns.double, 0, workers, chunksize=4, executor=executor)]

    assert seen == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


def test_map_iter_gives_any_result(pool):
    """A chunk could not be turned into text, or into nothing."""
    assert list(rows().map_iter(fns.text, chunksize=5, executor=pool)) == ["text", "text"]
    assert list(rows().map_iter(fns.nothing, chunksize=5, executor=pool)) == [None, None]


def test_map_iter_is_lazy():
    """A loop that is left early would have paid for all chunks, or results would pile up in memory."""
    calls = []
    chunks = rows(100).map_iter(lambda part: calls.append(len(part)), num_workers=2, chunksize=1, executor="threads")

    assert calls == []
    next(chunks)
    chunks.close()

    assert 1 <= len(calls) <= 6


def test_map_iter_shuffles(pool):
    """Rows would be lost or twice there, or the order could not be repeated."""

    def order(chunksize, executor):
        generator = torch.Generator().manual_seed(5)
        parts = rows().map_iter(fns.same, chunksize=chunksize, shuffle=True, generator=generator, executor=executor)
        return [number for part in parts for number in part["x"].reshape(-1).tolist()]

    assert order(3, pool) == order(0, pool)
    assert order(3, pool) != list(range(10))
    assert sorted(order(4, pool)) == list(range(10))


def test_map_iter_checks_at_once():
    """A wrong argument would be found when the loop begins, far from the call."""
    with pytest.raises(IndexError, match=r"batch dimension 3 does not exist(.|\n)*expected: -1 <= dim < 1"):
        rows().map_iter(fns.same, 3)


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunksize": 2, "num_chunks": 2}, r"expected: one of the two\n  got:      chunksize=2, num_chunks=2"),
        ({"chunksize": -1}, r"chunksize(.|\n)*expected: 0 or more\n  got:      -1"),
        ({"chunksize": 2.0}, r"chunksize(.|\n)*expected: 0 or more\n  got:      2.0"),
        ({"num_chunks": 0}, r"num_chunks(.|\n)*expected: 1 or more\n  got:      0"),
        ({"num_workers": -1}, r"num_workers(.|\n)*expected: 0 or more\n  got:      -1"),
        ({"worker_threads": 0, "num_workers": 1}, r"worker_threads(.|\n)*expected: 1 or more\n  got:      0"),
        (
            {"mp_start_method": "hope", "num_workers": 1},
            r"start method(.|\n)*expected: (.*)spawn(.|\n)*got:      'hope'",
        ),
        (
            {"executor": "threads", "mp_start_method": "fork"},
            r"got:      mp_start_method='fork' and executor='threads'",
        ),
        ({"executor": "threads", "max_tasks_per_child": 1}, r"got:      max_tasks_per_child=1 and executor='threads'"),
    ],
)
def test_arguments_without_meaning(options, message):
    """An argument would be ignored, or fail somewhere inside."""
    with pytest.raises(ValueError, match=message):
        rows().map(fns.same, **options)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_numbers_of_numpy(kind):
    """A number out of an array would be refused, with an error that shows a number like those it wants."""
    calls = []
    td = rows().map(lambda part: calls.append(len(part)) or part, num_workers=kind(0), chunksize=kind(4))
    pool = WorkerPool(kind(1), worker_threads=kind(1), max_tasks_per_child=kind(1))

    assert calls == [4, 4, 2]
    assert len(td.map(lambda part: part, num_workers=kind(2), num_chunks=kind(3), executor="threads")) == 10
    with pool:
        assert len(td.map(fns.same, executor=pool, worker_threads=kind(1))) == 10
    with pytest.raises(ValueError, match=r"num_workers(.|\n)*0 or more\n  got:      np.True_"):
        td.map(fns.same, num_workers=np.True_)


def test_what_is_no_function_or_executor():
    """A pool that hangs when a worker dies would be accepted, or a spelling mistake be found late."""
    with pytest.raises(TypeError, match=r"expected: a function\n  got:      int"):
        rows().map(3)
    with pytest.raises(TypeError, match=r"generator is none(.|\n)*a torch\.Generator\n  got:      3"):
        rows().map(fns.same, generator=3)
    with pytest.raises(TypeError, match=r"'threads' or an Executor\n  got:      'ray'"):
        rows().map(fns.same, executor="ray")
    with pytest.raises(TypeError, match=r"'threads' or an Executor\n  got:      int(.|\n)*hangs when a worker dies"):
        rows().map(fns.same, executor=3)
    with pytest.raises(IndexError, match="this one has none"):
        TensorDict({"x": torch.ones(3)}).map(fns.same, num_workers=0)


def test_functions_that_cannot_be_sent(pool):
    """A lambda would fail inside pickle, without a word on what to do."""
    with pytest.raises(UnsupportedError, match=r"cannot be sent(.|\n)*got:(.|\n)*lambda(.|\n)*fork(.|\n)*threads"):
        rows().map(lambda part: part, executor=pool)
    assert len(rows().map(lambda part: part, num_workers=1, mp_start_method="fork")) == 10


def test_gradients_do_not_cross_in_silence(pool):
    """A loss on the result would train nothing."""
    td = TensorDict({"in": {"w": torch.ones(4, requires_grad=True)}}, [4])
    with pytest.raises(
        UnsupportedError, match=r"leaf 'in.w' requires grad(.|\n)*got:      SliceBackward0(.|\n)*detach"
    ):
        td.map(fns.same, executor=pool)
    with pytest.raises(UnsupportedError, match=r"leaf 'y' requires grad(.|\n)*got:      MulBackward0(.|\n)*detach"):
        TensorDict({"x": torch.ones(4)}, [4]).map(fns.requiring, executor=pool)
    with torch.no_grad():
        assert_trees_equal(td.map(fns.same, executor=pool), td.detach())


def test_map_inside_vmap_is_refused(pool):
    """Wrapped tensors would be sent without their values."""
    with pytest.raises(
        UnsupportedError, match=r"expected: plain tensors\n  got:      wrapped ones(.|\n)*outside of vmap"
    ):
        torch.vmap(lambda x: TensorDict({"x": x}, [3]).map(fns.same, executor=pool)["x"])(torch.ones(2, 3))


def test_results_that_cannot_be_joined(pool):
    """Rows of another class, dtype or number of dimensions would be joined, or the chunk at fault not be named."""
    with pytest.raises(UnsupportedError, match=r"on chunk 0 \(rows 0:5\)(.|\n)*expected: a tree(.|\n)*got:      str"):
        rows().map(fns.text, executor=pool, chunksize=5)
    with pytest.raises(LeafMismatchError, match=r"chunk 2 \(rows 4:6\)(.|\n)*a TensorDict\n  got:      a Point"):
        rows().select("x").map(fns.other_class, executor=pool, chunksize=2)
    with pytest.raises(LeafMismatchError, match=r"chunk 0 \(rows 0:5\)(.|\n)*1 batch dimensions(.|\n)*got:      \[\]"):
        rows().map(fns.no_batch, executor=pool, chunksize=5)
    with pytest.raises(
        LeafMismatchError, match=r"chunk 1 \(row 1\) does not fit(.|\n)*\[0\](.|\n)*\[1\](.|\n)*map_iter"
    ):
        rows().map(fns.ragged_row, executor=pool, chunksize=0)


# -- failures ---------------------------------------------------------------------------------------------------


@EXECUTORS
def test_exceptions_name_the_chunk(executor):
    """An exception would not say which rows it was about, or be another one than the function raised."""
    with pytest.raises(ValueError, match="five is not allowed") as caught:
        run(rows(), fns.fail_at_five, executor, chunksize=2)

    if sys.version_info >= (3, 11):
        assert "map: raised on chunk 2 (rows 4:6)." in caught.value.__notes__


@EXECUTORS
def test_stop_iteration_of_the_function(executor):
    """The end of an iterator in the function would end the results, or be an error without a chunk."""
    with pytest.raises(StopIteration, match="an iterator in the function ended") as caught:
        run(rows(), fns.stop_at_five, executor, chunksize=2)
    workers = 0 if executor is None else None
    parts = rows().map_iter(fns.stop_at_five, 0, workers, chunksize=2, executor=executor)
    with pytest.raises(RuntimeError, match=r"StopIteration on chunk 2 \(rows 4:6\)(.|\n)*got:  .*ended") as iterated:
        list(parts)

    assert isinstance(iterated.value.__cause__, StopIteration)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == iterated.value.__cause__.__notes__ == ["map: raised on chunk 2 (rows 4:6)."]


def test_the_worker_s_traceback_is_the_cause(pool, standard):
    """The line that failed would be lost with the worker's memory."""
    for executor in (pool, standard):
        with pytest.raises(ValueError, match="five") as caught:
            rows().map(fns.fail_at_five, executor=executor, chunksize=2)
        assert "fail_at_five" in str(caught.value.__cause__)
        assert "on chunk 2 (rows 4:6)" in str(caught.value.__cause__)


def test_exceptions_that_cannot_be_read_back(pool):
    """An exception that pickle cannot copy, or that ends a program, would end the caller instead of being told."""
    with pytest.raises(
        WorkerError, match=r"failed on chunk 0(.|\n)*expected: an Exception(.|\n)*got:      Unreadable: 1 and 2"
    ):
        rows().map(fns.fail_unreadably, executor=pool)
    with pytest.raises(WorkerError, match=r"failed on chunk 0(.|\n)*got:      SystemExit: 3"):
        rows().map(fns.leave, executor=pool)


def test_results_that_cannot_be_sent(pool, standard):
    """An error of pickle would be told as one of the function, without a word on what to do."""
    refused = (
        r"map: the result cannot be sent(.|\n)*pickle can copy\n  got:      \w+: .*unpicklable(.|\n)*a tree, tensors"
    )
    for executor in (pool, standard):
        with pytest.raises(UnsupportedError, match=refused) as caught:
            list(rows().map_iter(fns.unpicklable, executor=executor, chunksize=5))
        assert "on chunk 0 (rows 0:5)" in str(caught.value.__cause__)
    with pytest.raises(UnsupportedError, match=refused):
        pool.submit(fns.unpicklable, 1).result()


def test_chunks_that_cannot_be_sent(pool, standard):
    """A value among the non-tensor data that pickle cannot copy would give an error of pickle alone."""
    for executor in (pool, standard):
        with pytest.raises(
            UnsupportedError, match=r"map: the chunk cannot be sent(.|\n)*got: (.|\n)*lambda(.|\n)*select"
        ):
            rows().set("f", tdf.NonTensorData(lambda: 1)).map(fns.same, executor=executor)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(fns.exit_at_five, "it ended with exit code 17"), (fns.kill_at_five, r"it was killed by signal 9 \(SIGKILL\)")],
)
def test_a_dead_worker_is_reported_by_chunk(pool, fn, reason):
    """A worker that is killed (out of memory, say) would leave the caller waiting for ever."""
    with pytest.raises(
        WorkerError, match=rf"died on chunk 2 \(rows 4:6\)(.|\n)*expected: a result\n  got:      {reason}"
    ):
        rows().map(fn, executor=pool, chunksize=2)
    # The pool goes on.
    assert_trees_equal(rows().map(fns.same, executor=pool), rows())


def test_a_broken_standard_pool_is_reported():
    """A dead worker of another executor would be told without the chunks that it may have had."""
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as executor,
        pytest.raises(WorkerError, match=r"executor broke on chunk \d (.|\n)*results of chunks(.|\n)*got: .*abruptly"),
    ):
        rows().map(fns.exit_at_five, executor=executor, chunksize=2)


# -- pools and transfer -----------------------------------------------------------------------------------------


def test_a_pool_is_an_executor(pool):
    """A pool would serve `map` only, or a cancelled or failed call would be told as done."""
    assert [future.result() for future in [pool.submit(pow, 2, n) for n in range(3)]] == [1, 2, 4]
    assert list(pool.map(len, ["a", "bc"])) == [1, 2]
    assert pool.submit(torch.add, torch.ones(2), other=torch.ones(2)).result().tolist() == [2.0, 2.0]
    with pytest.raises(ZeroDivisionError) as caught:
        pool.submit(divmod, 1, 0).result()
    assert "ZeroDivisionError" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match=r"died during its task(.|\n)*exit code 3"):
        pool.submit(fns.os._exit, 3).result()


def test_a_closed_pool_takes_no_tasks():
    """A task would wait for ever in a pool that has no workers any more."""
    pool = WorkerPool(1)
    pool.shutdown()

    with pytest.raises(RuntimeError, match=r"shut down(.|\n)*make a new WorkerPool"):
        pool.submit(len, "a")
    with pytest.raises(ValueError, match=r"num_workers(.|\n)*expected: 1 or more\n  got:      0"):
        WorkerPool(0)


def test_workers_have_one_thread_and_are_replaced():
    """Workers would fight for processors, or one that leaks would never be replaced."""
    out = rows().map(fns.threads, num_workers=1, mp_start_method="fork", worker_threads=2)
    assert out["threads"].unique().tolist() == [2]

    out = rows().map(fns.pid, num_workers=1, mp_start_method="fork", max_tasks_per_child=2, chunksize=2)

    assert [len(part.unique()) for part in out["pid"].split(4)] == [1, 1, 1]
    assert len(out["pid"].unique()) == 3


def test_workers_of_a_pool_have_one_thread(pool, standard):
    """A forked process that used the threads of its parent would hang, and two workers would fight for processors."""
    assert rows().map(fns.threads, executor=pool)["threads"].unique().tolist() == [1]
    assert rows().map(fns.threads, executor=standard)["threads"].unique().tolist() == [1]


def test_large_blocks_cross_in_shared_memory(pool):
    """Chunks too large for the pipe would arrive altered or leave descriptors open."""
    before = open_descriptors()
    td = TensorDict({"x": torch.rand(8, 1_000_000), "y": torch.rand(8, 3)}, [8])

    assert_trees_equal(td.map(fns.same, executor=pool, num_chunks=2), td)
    kept = list(td.map_iter(fns.large, executor=pool, chunksize=1))
    kept[0]["x"].add_(1)
    assert all((part["x"] == 1.5).all() for part in kept[1:])
    assert open_descriptors() <= before + 3


def open_descriptors():
    """How many files, pipes and so on this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_threads_of_the_caller_are_used():
    """A thread pool of the caller would be left unused, or be shut down."""
    with ThreadPoolExecutor(2) as executor:
        assert_trees_equal(rows().map(fns.double, executor=executor, chunksize=3), fns.double(rows()))
        assert executor.submit(len, "ab").result() == 2


def test_progress_is_shown(capfd):
    """`pbar=True` would show nothing."""
    rows().map(fns.same, num_workers=0, chunksize=5, pbar=True)

    assert "2/2" in capfd.readouterr().err


def test_progress_needs_tqdm(monkeypatch):
    """Without tqdm the bar would be left out in silence."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)

    with pytest.raises(ImportError, match=r"pbar=True needs tqdm(.|\n)*expected: tqdm(.|\n)*pip install tqdm"):
        rows().map(fns.same, num_workers=0, pbar=True)


def test_nontensor_values_cross(pool):
    """Words of single rows would be lost, or be given to other rows."""
    td = TensorDict({"s": NonTensorStack("a", "b", "c"), "x": torch.zeros(3)}, [3])

    assert td.map(fns.same, executor=pool, chunksize=2)["s"] == ["a", "b", "c"]
    assert td.map(fns.same, executor=pool, chunksize=0)["s"] == ["a", "b", "c"]


class Forgetful(Executor):
    """Runs the first calls and never looks at the others, nor at those that were cancelled (as Ray's futures do)."""

    _max_workers = 4

    def __init__(self, first):
        self._left = first

    def submit(self, fn, /, *args, **kwargs):
        future, self._left = Future(), self._left - 1
        if self._left >= 0:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.timeout(60)
def test_cancelled_chunks_are_not_waited_for():
    """After an error the caller would wait for ever for chunks that were cancelled."""
    with pytest.raises(ValueError, match="five"):
        rows().map(fns.fail_at_five, executor=Forgetful(3), chunksize=2)
