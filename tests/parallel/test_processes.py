"""`map` in processes: Ctrl-C, deaths, few descriptors, functions of scripts and notebooks."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from tdfunc import TensorDict, UnsupportedError, WorkerError, WorkerPool
from tdfunc.parallel.parcel import to_parcel
from tests.helpers import assert_trees_equal
from tests.parallel import functions as fns

TD = TensorDict({"x": torch.arange(10)}, [10])
GUARD = "if __name__ == '__main__':"


def program(folder, body, *, guard=GUARD, functions=""):
    """Write a script that calls map on a tree of ten rows."""
    text = f"""
import os, sys, time
import torch
import tdfunc as tdf
from functools import partial
from tests.parallel import functions as fns
{textwrap.dedent(functions)}
def main():
    td = tdf.TensorDict({{"x": torch.arange(10)}}, [10])
{textwrap.indent(textwrap.dedent(body), "    ")}
{guard}
    main()
"""
    path = folder / "program.py"
    path.write_text(text)
    return path


def run(*args, **more):
    """Run Python with warnings as errors and return what came of it."""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), **more)


def environment():
    """The environment of a program that finds the package and the tests."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return {**os.environ, "PYTHONPATH": root}


def is_running(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=60):
    """Wait for a condition that another process makes true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_program(tmp_path, how, method):
    """Ctrl-C, or the end of the program by any signal, ends the workers."""
    marks = tmp_path / "marks"
    marks.mkdir()
    call = f"td.map(partial(fns.begin_and_sleep, folder={str(marks)!r}), num_workers=2, mp_start_method={method!r})"
    path = program(tmp_path, call)
    # A session of its own: Ctrl-C reaches every process of it, as in a terminal. A shell's background jobs ignore it.
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(path)], env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as parent:  # fmt: skip
        try:
            wait_until(lambda: len(list(marks.iterdir())) == 2)
            workers = [int(mark.name) for mark in marks.iterdir()]
            assert all(map(is_running, workers))
            if how == signal.SIGINT:
                os.killpg(parent.pid, how)
            else:
                parent.send_signal(how)
            parent.wait(20)
            wait_until(lambda: not any(map(is_running, workers)), 20)
        finally:
            parent.kill()
        errors = parent.stderr.read()

    assert ("KeyboardInterrupt" in errors) is (how == signal.SIGINT)
    assert errors.count("Traceback") <= 2


@pytest.mark.slow
def test_a_program_ends_clean(tmp_path):
    """A program with an open pool and an iterator that was not used up ends without warnings."""
    body = "pool = tdf.WorkerPool(2); td.map(fns.same, executor=pool); it = td.map_iter(fns.same); next(it)"

    done = run(program(tmp_path, body))

    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.slow
def test_functions_of_a_script(tmp_path):
    """Functions that a script defines reach its workers; a script without a guard is told to have one."""
    body = "print(td.map(own, num_workers=2)['x'].sum().item())"
    functions = "def own(rows):\n    return rows * 3\n"

    done = run(program(tmp_path, body, functions=functions))
    bare = run(program(tmp_path, body, functions=functions, guard="if True:"))

    assert done.stdout == "135\n"
    assert done.stderr == ""
    assert bare.returncode != 0
    assert "a worker died, or could not start" in bare.stderr
    assert GUARD in bare.stderr


@pytest.mark.slow
def test_functions_of_a_notebook():
    """A function that no module has is refused with the way out, which works."""
    script = 'import torch, tdfunc\ndef f(t): return t\ntd = tdfunc.TensorDict({"x": torch.arange(4)}, [4])\n'

    done = run("-c", script + "td.map(f, num_workers=1)")
    forked = run("-c", script + "print(len(td.map(f, num_workers=1, mp_start_method='fork')))")

    assert "a worker cannot import the function" in done.stderr
    assert "mp_start_method='fork' or executor='threads'" in done.stderr
    assert forked.stdout == "4\n"


@pytest.mark.slow
def test_three_thousand_leaves_with_few_descriptors(tmp_path):
    """No leaf takes a descriptor."""
    body = """
        td = tdf.TensorDict({f'k{i}': torch.full((4, 3), float(i)) for i in range(3000)}, [4])
        for options in ({}, {'mp_start_method': 'fork'}):
            out = td.map(fns.same, num_workers=2, chunksize=1, **options)
            assert (out == td).all()
        out = td.memmap('d').map(fns.same, num_workers=2, chunksize=2)
        assert (out == td).all()
    """

    done = run(
        program(tmp_path, body), cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )  # fmt: skip

    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.slow
def test_fork_after_openmp_does_not_hang(tmp_path):
    """A forked worker does not wait for threads that its parent had, also in a pool of the caller."""
    body = """
        torch.set_num_threads(2)
        a = torch.rand(4_000_000); (a + a).sum()
        print(float(td.map(fns.openmp, num_workers=2, mp_start_method='fork')['x'][0]))
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork')) as executor:
            print(float(td.map(fns.openmp, executor=executor)['x'][0]))
    """

    done = run(program(tmp_path, body))

    assert done.stdout == "800000.0\n800000.0\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method(method):
    """Rows are the same with every start method."""
    options = {"num_workers": 2, "mp_start_method": method}

    assert_trees_equal(TD.map(fns.double, **options), fns.double(TD))


def test_a_closed_iterator_and_an_error_end_the_workers():
    """Workers do not go on with chunks that nobody waits for."""
    chunks = TD.map_iter(fns.pid, num_workers=2, chunksize=1, mp_start_method="fork")
    worker = int(next(chunks)["pid"])
    assert is_running(worker)

    chunks.close()

    assert not is_running(worker)
    with pytest.raises(ValueError, match="five"):
        TD[5:8].map(fns.fail_or_sleep, num_workers=2, chunksize=1, mp_start_method="fork")


def test_a_dead_worker_is_reported_by_chunk():
    """A worker that is killed (out of memory, say) is an error with the chunks that were running."""
    with pytest.raises(WorkerError, match=r"died(.|\n)*a result of .*chunk 2 \(rows 4:6\)"):
        TD.map(fns.kill_at_five, num_workers=2, chunksize=2, mp_start_method="fork")
    with WorkerPool(2) as pool:
        with pytest.raises(WorkerError, match=r"a result of .*chunk 2 \(rows 4:6\)"):
            TD.map(fns.kill_at_five, executor=pool, chunksize=2)
        with pytest.raises(WorkerError, match=r"a result of the first chunk(.|\n)*BrokenProcessPool"):
            TD.map(fns.same, executor=pool)


def test_forked_workers_need_no_pickle():
    """A closure over values that pickle cannot copy runs in forked workers, which have it in memory."""
    td, factor = TensorDict({"x": torch.inference_mode()(torch.arange)(4)}, [4]), 3
    lock = threading.Lock()

    out = td.map(lambda rows: rows * factor if lock else rows, num_workers=2, mp_start_method="fork")

    assert out["x"].tolist() == [0, 3, 6, 9]


def test_cuda_leaves_are_refused():
    """A leaf on a GPU is not copied to another process in silence."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda:0")

    x = torch.ones(2).as_subclass(Elsewhere)

    with pytest.raises(
        UnsupportedError, match=r"leaf 'a' is not in the memory(.|\n)*got:      cuda:0(.|\n)*td.cpu\(\)"
    ):
        to_parcel(TensorDict({"a": x}, [2]))
