"""`map` and `map_iter`: equal to the function on the whole, wherever the chunks run."""

import multiprocessing
import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import LeafMismatchError, NonTensorStack, TensorDict, WorkerPool
from tdfunc.parallel.parcel import from_parcel, to_parcel
from tests.helpers import assert_trees_equal
from tests.parallel import functions as fns
from tests.storage.trees import assert_same
from tests.strategies import trees


class Sub(torch.Tensor):
    """A class of the caller's own."""


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests of the module: their start takes longer than the tests."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def standard():
    """A pool of the standard library without our initializer."""
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
    if not isinstance(executor, Executor):
        options["num_workers"] = 0 if executor is None else 2
    return td.map(fn, executor=executor, **options)


# -- laws -------------------------------------------------------------------------------------------------------


@EXECUTORS
@pytest.mark.parametrize(
    "options", [{}, {"chunksize": np.int64(3)}, {"chunksize": 0}, {"num_chunks": 4}, {"num_chunks": 99}]
)
def test_equals_the_function_on_the_whole(executor, options):
    """Chunks come back once each, in order."""
    td = rows()

    assert_trees_equal(run(td, fns.double, executor, **options), fns.double(td))


@given(tree=trees().filter(lambda t: t.ndim and 0 not in t.batch_size), data=st.data())
@settings(max_examples=40)
def test_identity_in_workers(pool, tree, data):
    """A tree keeps all on its way: dtypes, ties, kinds, names, words and the order of keys."""
    dim = data.draw(st.integers(0, tree.ndim - 1))
    n = tree.batch_size[dim]
    options = data.draw(st.sampled_from([{"num_chunks": 1}, {"chunksize": 1}, {"chunksize": 2}, {"num_chunks": n}]))

    back = tree.map(fns.same, dim, executor=pool, **options)

    assert_same(back, tree.map(fns.same, dim, num_workers=0, **options))
    assert_trees_equal(back, tree)


@EXECUTORS
def test_other_dimensions(executor):
    """Any batch dimension is cut."""
    td = TensorDict({"x": torch.arange(24.0).reshape(2, 4, 3)}, [2, 4], names=["a", "b"])
    out = td.new_zeros([2, 4])

    for dim in (1, -1):
        assert_trees_equal(run(td, fns.double, executor, dim=dim, chunksize=3), td * 2)
    assert (run(td, fns.double, executor, dim=1, chunksize=0)["x"] == td["x"] * 2).all()
    run(td, fns.double, executor, dim=1, chunksize=3, out=out)
    assert (out["x"] == td["x"] * 2).all()


@EXECUTORS
def test_classes_come_back(executor):
    """With their fields that are no tensors."""
    point = fns.Point(x=torch.arange(4), note="kept", batch_size=[4])

    assert run(point, fns.same, executor, chunksize=3).note == "kept"


@EXECUTORS
def test_lazy_stacks_come_back(executor):
    """With rows of different lengths."""
    ragged = tdf.lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in (1, 3, 2)])

    assert [x.tolist() for x in run(ragged, fns.same, executor, chunksize=2)["x"]] == [[0], [0, 1, 2], [0, 1]]


@EXECUTORS
def test_ties_come_back(executor):
    """One tensor under two keys."""
    weight = torch.arange(8.0).to(torch.bfloat16).reshape(4, 2)
    tied = TensorDict({"a": weight, "b": {"c": weight}}, [4])

    assert_trees_equal(run(tied, fns.same, executor, chunksize=3), tied)


@EXECUTORS
def test_stacks_of_values_come_back(executor):
    """Of texts."""
    words = TensorDict({"s": NonTensorStack("a", "b", "c"), "x": torch.zeros(3)}, [3])

    assert run(words, fns.same, executor, chunksize=0)["s"] == ["a", "b", "c"]


@EXECUTORS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str)
def test_dtypes_come_back(executor, dtype):
    """Those that numpy lacks, too."""
    tree = TensorDict({"x": torch.arange(4).to(dtype)}, [4])
    found = run(tree, fns.same, executor, chunksize=3)["x"]

    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tree["x"].view(torch.uint8))


@EXECUTORS
def test_results(executor):
    """Tensors are joined as trees are; None leaves rows out; an empty batch is one empty chunk."""
    empty = rows()[:0]

    assert run(rows(), fns.total, executor, chunksize=4).tolist() == [6.0, 22.0, 17.0]
    assert run(rows(3), fns.total, executor, chunksize=0).tolist() == [[0.0], [1.0], [2.0]]
    assert run(rows(), fns.even_only, executor, chunksize=0)["x"].tolist() == [0, 2, 4, 6, 8]
    assert run(rows(), fns.even_rows, executor, chunksize=3)["x"].tolist() == [0, 2, 4, 6, 8]
    assert run(rows(), fns.nothing, executor) is None
    assert_trees_equal(run(empty, fns.double, executor, chunksize=5), empty)


@pytest.mark.parametrize("options", [{"executor": "threads"}, {"num_workers": 0}], ids=["threads", "here"])
def test_writes_in_place_reach_the_tree(options):
    """A function that writes to its rows and returns nothing changes the tree, in this process."""
    td = rows()

    assert td.map(fns.write_in_place, chunksize=3, **options) is None
    assert td["x"].tolist() == list(range(1, 11))


# From Python 3.12 on.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["pool", "standard", "fork"])
def test_lost_writes_are_warned_of(kind, pool, standard):
    """In another process a function writes to a copy: what it does not return is lost, with a warning."""
    executor = {"pool": pool, "standard": standard, "fork": None}[kind]
    options = {"executor": executor} if executor else {"num_workers": 1, "mp_start_method": "fork"}
    td = rows()

    with pytest.warns(UserWarning, match="(?s)wrote to its rows in place and returned None.*return the rows") as caught:
        assert td.map(fns.write_in_place, chunksize=3, **options) is None

    assert {warning.filename for warning in caught} == {__file__}
    assert td["x"].tolist() == list(range(10))
    assert run(td, fns.nothing, executor) is None


def test_gradients_flow_through_threads():
    """Threads share memory, so a loss reaches the leaves; a thread pool of the caller is not shut down."""
    x = torch.arange(6.0, requires_grad=True)
    with ThreadPoolExecutor(2) as executor:
        TensorDict({"x": x}, [6]).map(torch.neg, executor=executor)["x"].sum().backward()
        assert executor.submit(len, "ab").result() == 2

    assert x.grad.tolist() == [-1.0] * 6


def test_parameters_expanded_and_meta_leaves_come_back(pool):
    """A parameter is one again; expanded leaves send one row and meta leaves nothing."""
    td = TensorDict(
        {"x": torch.ones(4), "wide": torch.zeros(()).expand(4, 1000), "m": torch.empty(4, device="meta")}, [4]
    )

    (back,) = td.map_iter(fns.parameter, executor=pool, num_chunks=1)

    assert type(back["x"]) is torch.nn.Parameter
    assert back["x"].requires_grad
    assert type(back["free"]) is torch.Tensor
    assert back["free"].requires_grad is True
    assert back["wide"].stride() == (0, 0)
    assert back["m"].device.type == "meta"


def test_tensors_of_the_function_are_copied(pool, standard):
    """Weights in a `partial` cross as bytes: a worker's write does not reach the caller's."""
    weight = torch.zeros(3)
    for executor in (pool, standard):
        list(rows().map_iter(partial(_write, weight), executor=executor, chunksize=5))

    assert weight.tolist() == [0, 0, 0]
    assert not weight.is_shared()


def _write(weight, part):
    weight.add_(1)


@pytest.mark.parametrize("x", [torch.eye(3).to_sparse(), torch.eye(3).as_subclass(Sub)])
def test_tensors_that_pickle_copies(x):
    """Other layouts and subclasses cross by their own pickling."""
    back = from_parcel(to_parcel((x, torch.ones(2))))[0]

    assert type(back) is type(x)
    assert back.layout == x.layout
    assert torch.equal(back.to_dense(), x.to_dense())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["pool", "standard"])
def test_workers_have_the_threads_of_the_call(kind, count, request):
    """Each chunk runs with them, in any pool."""
    executor = request.getfixturevalue(kind)
    found = rows(2).map(fns.threads, executor=executor, worker_threads=count)["threads"]

    assert found.unique().tolist() == [count]


def test_a_pool_has_a_worker_for_each_processor(monkeypatch):
    """By default, with a thread each."""
    monkeypatch.setattr(os, "sched_getaffinity", {0: {2, 3, 5}}.__getitem__)
    with WorkerPool() as default:
        assert default._max_workers == 3
        assert default.submit(torch.get_num_threads).result() == 1


@EXECUTORS
def test_the_caller_s_modes_hold(executor):
    """Grad mode, inference mode and the default dtype of the caller hold for the function."""
    assert run(rows(2), fns.modes, executor).tolist()[0] == [True, False, False]
    with torch.no_grad():
        assert run(rows(2), fns.modes, executor).tolist()[0] == [False, False, False]
    with torch.inference_mode():
        assert run(rows(2), fns.modes, executor).tolist()[0] == [False, True, False]
    torch.set_default_dtype(torch.float64)
    try:
        assert run(rows(2), fns.modes, executor).tolist()[0] == [True, False, True]
    finally:
        torch.set_default_dtype(torch.float32)


# -- seeds ------------------------------------------------------------------------------------------------------


def test_seeds_depend_on_the_chunk_only(pool, standard):
    """A run gives the same draws on any number and kind of workers."""
    td = rows()

    def noise(executor, **options):
        return td.map(fns.draw, executor=executor, chunksize=3, key=7, **options)["noise"]

    first = noise(pool)
    assert torch.equal(first, noise(standard))
    assert torch.equal(first, noise(None, num_workers=1, mp_start_method="fork"))
    assert len(first.unique()) == len(first)
    assert not torch.equal(first, td.map(fns.draw, executor=pool, chunksize=3)["noise"])


@EXECUTORS
def test_a_generator_argument_is_given(executor):
    """A function that takes a generator draws the same numbers wherever it runs."""
    made = run(rows(), fns.draw_from, executor, chunksize=3, key=torch.Generator().manual_seed(7))
    serial = rows().map(fns.draw_from, 0, 0, chunksize=3, key=tdf.random.key_of(torch.Generator().manual_seed(7)))

    assert torch.equal(made["noise"], serial["noise"])


def test_the_default_generator_draws_the_seed(pool):
    """`torch.manual_seed` makes a run repeatable; with a generator the default one stays as it is."""
    torch.manual_seed(3)
    first = rows().map(fns.draw, executor=pool, chunksize=3)["noise"]
    torch.manual_seed(3)
    assert torch.equal(first, rows().map(fns.draw, executor=pool, chunksize=3)["noise"])
    state = torch.get_rng_state()
    rows().map(fns.draw_from, num_workers=2, executor="threads", key=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())


# -- out --------------------------------------------------------------------------------------------------------


@EXECUTORS
@pytest.mark.parametrize("options", [{"chunksize": 3}, {"chunksize": 0}])
def test_out_is_filled(executor, options):
    """Results are written to the rows that they belong to, also over the tree itself."""
    td = rows().select("x", "in")
    out, expected = td.new_zeros([10]), fns.double(td)

    assert run(td, fns.double, executor, out=out, **options) is out
    assert_trees_equal(out, expected)
    run(td, fns.double, executor, out=td, **options)
    assert_trees_equal(td, expected)


@given(st.data())
def test_out_is_written_beside_the_rows_that_are_read(data):
    """An `out` in any part of the tree's memory gives the result of one in memory of its own, or is refused."""
    memory = torch.arange(48)
    n = data.draw(st.integers(1, 4))
    views = []
    for _ in range(2):
        steps = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
        views.append(memory.as_strided((n, data.draw(st.integers(1, 2))), steps, data.draw(st.integers(0, 24))))
    td, out = [TensorDict({"x": view}, [n]) for view in views]
    expected = [row["x"].tolist() for row in td.clone().map_iter(fns.double, num_workers=0, chunksize=1)]

    try:
        td.map(fns.double, num_workers=0, chunksize=1, out=out)
    except ValueError:
        assert torch.equal(memory, torch.arange(48))
    else:
        assert [[row] for row in out["x"].tolist()] == expected


def test_out_in_place_with_leaves_that_change_places():
    """Leaves whose values are swapped chunk by chunk both hold the other's; rows of a stack do not move."""
    td = TensorDict({"a": torch.zeros(4), "b": torch.ones(4)}, [4])
    stack = tdf.lazy_stack([TensorDict({"x": torch.zeros(())}) for i in range(4)])
    both = TensorDict({"in": stack, "x": torch.zeros(4)}, [4])

    td.map(lambda t: TensorDict({"a": t["b"], "b": t["a"]}, t.batch_size), num_workers=0, chunksize=3, out=td)

    assert td["a"].tolist() == [1.0] * 4
    assert td["b"].tolist() == [0.0] * 4
    with pytest.raises(LeafMismatchError, match="of out shares memory with the tree"):
        both[1:].map(fns.same, num_workers=0, out=both[:-1])
    beside = TensorDict({"a": both["x"][:3], "b": both["x"][1:]}, [3])
    with pytest.raises(LeafMismatchError, match="leaf 'a' of out shares memory with the tree"):
        beside.map(fns.same, num_workers=0, out=beside)


# -- map_iter ---------------------------------------------------------------------------------------------------


@EXECUTORS
def test_map_iter_yields_any_result_in_order(executor):
    """A loop sees the results in the order of the rows, of whatever kind they are."""
    workers = 0 if executor is None else None
    seen = [part["x"].tolist() for part in rows().map_iter(fns.double, 0, workers, chunksize=4, executor=executor)]

    assert seen == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert list(rows().map_iter(fns.text, 0, workers, chunksize=5, executor=executor)) == ["text", "text"]
    assert list(rows().map_iter(fns.nothing, 0, workers, chunksize=5, executor=executor)) == [None, None]


@pytest.mark.parametrize(("count", "lengths"), [(0, [10]), (3, [4, 3, 3])])
def test_map_iter_yields_a_part_for_each_worker(count, lengths):
    """Without workers it is one."""
    assert [len(part) for part in rows().map_iter(fns.same, num_workers=count, executor="threads")] == lengths


def test_map_iter_is_lazy():
    """A loop that is left early has begun a few chunks only."""
    calls = []
    chunks = rows(100).map_iter(lambda part: calls.append(len(part)), num_workers=2, chunksize=1, executor="threads")

    assert calls == []
    next(chunks)
    chunks.close()

    assert 1 <= len(calls) <= 6


def test_map_iter_shuffles(pool):
    """Each row is there once, in an order that a seed repeats."""

    def order(chunksize, executor):
        parts = rows().map_iter(fns.same, chunksize=chunksize, shuffle=True, key=5, executor=executor)
        return [number for part in parts for number in part["x"].reshape(-1).tolist()]

    assert order(3, pool) == order(0, pool)
    assert order(3, pool) != list(range(10))
    assert sorted(order(4, pool)) == list(range(10))


# -- failures ---------------------------------------------------------------------------------------------------


@EXECUTORS
def test_exceptions_of_the_function(executor):
    """An exception is the one that the function raised; StopIteration does not end the results."""
    with pytest.raises(ValueError, match="five is not allowed") as caught:
        run(rows(), fns.fail_at_five, executor, chunksize=2)
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(rows(), fns.stop_at_five, executor, chunksize=2)

    assert getattr(caught.value, "__notes__", ["map: raised on chunk 2 (rows 4:6)."])[-1].endswith("(rows 4:6).")
    if isinstance(executor, ProcessPoolExecutor):
        assert "in fail_at_five" in str(caught.value.__cause__)


def test_progress_is_shown(terminal):
    """`pbar=True` counts chunks."""
    rows().map(fns.same, num_workers=0, chunksize=5, pbar=True)

    assert "2/2" in terminal.readouterr().err


def test_a_function_of_a_file_off_the_path(tmp_path, monkeypatch):
    """A worker imports a module that was loaded from a file by its location, as pytest imports test files."""
    file = tmp_path / "off_the_path.py"
    file.write_text("def add_one(rows):\n    return rows + 1\n")
    spec = spec_from_file_location("folder_of_tests.off_the_path", file)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "folder_of_tests", ModuleType("folder_of_tests"))
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    td = TensorDict({"x": torch.arange(4.0)}, [4])

    assert td.map(module.add_one, num_workers=1)["x"].tolist() == [1, 2, 3, 4]
