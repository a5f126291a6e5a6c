"""`map` in programs of its own: what is left of it when it is interrupted, killed, short of descriptors or misused."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tdfunc import RayExecutor, TensorDict, UnsupportedError, WorkerError, WorkerPool
from tdfunc.parallel import pool
from tdfunc.parallel.transfer import pack
from tests.helpers import assert_trees_equal
from tests.storage import map_functions as fns


def program(folder, body, *, guard=True, functions=""):
    """Write a script that calls map on a tree of ten rows."""
    text = textwrap.dedent(f"""
        import os, sys, time
        import torch
        import tdfunc as tdf
        from functools import partial
        from tests.storage import map_functions as fns

        {textwrap.indent(textwrap.dedent(functions), "        ").strip()}

        def main():
            td = tdf.TensorDict({{"x": torch.arange(10)}}, [10])
            {body}

        {"if __name__ == '__main__':" if guard else "if True:"}
            main()
    """)
    path = folder / "program.py"
    path.write_text(text)
    return path


def run(path, *options, **more):
    """Run a script with warnings as errors and return what came of it."""
    command = [sys.executable, *options, "-W", "error", "-W", "ignore::DeprecationWarning", str(path)]
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


def left_in_shared_memory():
    """The names in /dev/shm, of which map makes none."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_program(tmp_path, how, method):
    """Ctrl-C, or the end of the program, would leave workers behind that run for ever."""
    marks = tmp_path / "marks"
    marks.mkdir()
    call = f"td.map(partial(fns.begin_and_sleep, folder={str(marks)!r}), num_workers=2, mp_start_method={method!r})"
    before = left_in_shared_memory()
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
    assert "leaked" not in errors
    assert left_in_shared_memory() <= before


def children_of(pid):
    """The command lines of the children of a process, by their ids."""
    found = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(entry)] = Path("/proc", entry, "cmdline").read_text()
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks Linux for the processes")
def test_an_interrupt_while_the_fork_server_starts(tmp_path):
    """A Ctrl-C in the first call would kill the server of all later ones, or its workers ignore their signals."""
    functions = """
        def interruptible():
            import signal
            assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    body = """
            import multiprocessing, time
            from multiprocessing.forkserver import _forkserver as server
            try:
                td.map(fns.double, num_workers=1)
            except KeyboardInterrupt:
                print("interrupted")
            before = server._forkserver_pid
            print(td.map(fns.double, num_workers=1)["x"].sum().item())
            assert server._forkserver_pid == before
            other = multiprocessing.get_context("forkserver").Process(target=interruptible)
            other.start()
            other.join()
            print(other.exitcode)
    """
    path = program(tmp_path, body.strip(), functions=functions.strip())
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(path)], env=environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as parent:  # fmt: skip
        try:
            wait_until(lambda: any("forkserver" in command for command in children_of(parent.pid).values()))
            # It imports torch now.
            time.sleep(0.3)
            os.killpg(parent.pid, signal.SIGINT)
            out, errors = parent.communicate(timeout=60)
        finally:
            parent.kill()

    assert (out.split(), errors) == (["interrupted", "90", "0"], "")


@pytest.mark.slow
def test_a_fork_server_that_has_just_ended(monkeypatch):
    """A call right after the end of the server would raise that it is refused."""
    td = TensorDict({"x": torch.arange(10)}, [10])
    td.map(fns.double, num_workers=1, mp_start_method="forkserver")
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)

    assert_trees_equal(td.map(fns.double, num_workers=1, mp_start_method="forkserver"), fns.double(td))

    class Refused:
        def start(self):
            raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(pool, "_RETRY_S", 0)
    with pytest.raises(ConnectionRefusedError):
        pool._start(Refused())


@pytest.mark.slow
def test_a_program_ends_clean(tmp_path):
    """A program would end with warnings about semaphores or shared memory, or wait for its workers for ever."""
    before = left_in_shared_memory()
    body = "pool = tdf.WorkerPool(2); td.map(fns.same, executor=pool); it = td.map_iter(fns.large); next(it)"

    done = run(program(tmp_path, body))

    assert (done.returncode, done.stderr) == (0, "")
    assert left_in_shared_memory() <= before


@pytest.mark.slow
def test_a_program_without_a_guard_is_told(tmp_path):
    """A script whose import calls map would start processes without end, or hang."""
    done = run(program(tmp_path, "td.map(fns.same, num_workers=2)", guard=False))

    assert done.returncode != 0
    assert "a worker could not start" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


@pytest.mark.slow
def test_a_function_that_exists_here_only_is_told(tmp_path):
    """A function typed into a notebook would fail with an AttributeError about a module `__main__`."""
    script = 'import torch, tdfunc\ndef f(t): return t\ntd = tdfunc.TensorDict({"x": torch.arange(4)}, [4])\n'

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script + "td.map(f, num_workers=1)"],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    forked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script + "print(len(td.map(f, num_workers=1, mp_start_method='fork')))"],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip

    assert "the function cannot be loaded in a worker" in done.stderr
    assert "mp_start_method='fork' or executor='threads'" in done.stderr
    assert forked.stdout == "4\n"


@pytest.mark.slow
def test_three_thousand_leaves_with_few_descriptors(tmp_path):
    """Each leaf would take a descriptor, of which a process has few."""
    body = "\n            ".join(
        [
            "td = tdf.TensorDict({f'k{i}': torch.full((4, 3), float(i)) for i in range(3000)}, [4])",
            "for options in ({}, {'mp_start_method': 'fork'}):",
            "    out = td.map(fns.same, num_workers=2, chunksize=1, **options)",
            "    assert (out == td).all()",
            "out = td.memmap('d').map(fns.same, num_workers=2, chunksize=2)",
            "assert (out == td).all()",
            "kept = list(tdf.TensorDict({'x': torch.arange(600)}, [600]).map_iter(fns.large, chunksize=2))",
            "assert len(kept) == 300",
        ]
    )

    done = run(
        program(tmp_path, body), cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_fork_after_openmp_does_not_hang(tmp_path):
    """A forked worker would wait for threads that its parent had and it does not."""
    body = "\n            ".join(
        [
            "torch.set_num_threads(2)",
            "a = torch.rand(4_000_000); (a + a).sum()",
            "print(float(td.map(fns.openmp, num_workers=2, mp_start_method='fork')['x'][0]))",
            "from concurrent.futures import ProcessPoolExecutor",
            "import multiprocessing",
            "with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork')) as executor:",
            "    print(float(td.map(fns.openmp, executor=executor)['x'][0]))",
        ]
    )

    done = run(program(tmp_path, body))

    assert done.stdout == "800000.0\n800000.0\n", done.stderr


@pytest.mark.slow
def test_every_start_method():
    """A start method would lose rows, or not know the caller's function."""
    td = TensorDict({"x": torch.arange(10)}, [10])

    for method in ("fork", "forkserver", "spawn"):
        assert_trees_equal(td.map(fns.double, num_workers=2, mp_start_method=method), fns.double(td))


def test_closing_an_iterator_ends_its_workers(tmp_path):
    """Workers would go on with chunks that nobody wants."""
    td = TensorDict({"x": torch.arange(10)}, [10])
    chunks = td.map_iter(fns.pid, num_workers=2, chunksize=1, mp_start_method="fork")
    worker = int(next(chunks)["pid"])
    assert is_running(worker)

    chunks.close()

    assert not is_running(worker)


def test_leaving_a_pool_by_an_exception_does_not_wait():
    """A program that fails would first wait for its workers' tasks, and their futures would stay open."""
    tasks = []

    def fail_in_a_pool():
        with WorkerPool(1, mp_start_method="fork") as pool:
            tasks.extend([pool.submit(time.sleep, 600), pool.submit(time.sleep, 600)])
            wait_until(tasks[0].running)
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_pool()
    running, waiting = tasks

    assert isinstance(running.exception(), WorkerError)
    assert waiting.cancelled()


def test_waiting_tasks_can_be_cancelled():
    """`shutdown(cancel_futures=True)` would wait for tasks that had not begun."""
    pool = WorkerPool(1, mp_start_method="fork")
    running, waiting = pool.submit(time.sleep, 0.5), pool.submit(time.sleep, 600)
    wait_until(running.running)

    pool.shutdown(cancel_futures=True)

    assert running.result() is None
    assert waiting.cancelled()


@pytest.mark.slow
def test_a_map_inside_a_map():
    """A function that calls map itself would fail because workers may have no workers, or leave theirs behind."""
    td = TensorDict({"x": torch.arange(4)}, [4])

    assert_trees_equal(td.map(fns.nested_map, num_workers=1, mp_start_method="fork"), fns.double(td))


def test_an_error_ends_the_other_chunks(tmp_path):
    """After an exception, chunks would still be worked on, and their results be written."""
    td = TensorDict({"x": torch.arange(5, 8)}, [3])
    begun = time.monotonic()

    with pytest.raises(ValueError, match="five"):
        td.map(fns.fail_or_sleep, num_workers=2, chunksize=1, mp_start_method="fork")

    assert time.monotonic() - begun < 30


def test_forked_workers_need_no_pickle():
    """A closure over what pickle cannot copy would be refused though the workers have it in memory."""
    td, factor = TensorDict({"x": torch.arange(4)}, [4]), 3
    lock = threading.Lock()

    out = td.map(lambda rows: rows * factor if lock else rows, num_workers=2, mp_start_method="fork")

    assert out["x"].tolist() == [0, 3, 6, 9]


def test_ray_is_asked_for_when_it_is_missing(monkeypatch):
    """Without Ray the class would fail with a word on a module that nobody imported."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ImportError, match=r"expected: ray(.|\n)*pip install tdfunc\[ray\]"):
        RayExecutor()


def test_cuda_leaves_are_refused():
    """A leaf on a GPU would be copied to another process in silence, or fail deep inside."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda:0")

    x = torch.ones(2).as_subclass(Elsewhere)

    with pytest.raises(
        UnsupportedError, match=r"leaf 'a' is not in the memory(.|\n)*got:      cuda:0(.|\n)*td.cpu\(\)"
    ):
        pack(TensorDict({"a": x}, [2]))
