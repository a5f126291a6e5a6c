"""`map` on a local Ray of two processors."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import tdfunc as tdf
from tdfunc import RayExecutor, TensorDict, WorkerError
from tests.distributed import test_sweeps as sweeps
from tests.helpers import assert_trees_equal
from tests.parallel import functions as fns
from tests.parallel.test_processes import environment

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster():
    """A Ray of two processors on this machine, and an executor on it."""
    env = {"env_vars": {"PYTHONPATH": environment()["PYTHONPATH"]}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=env)
    yield RayExecutor()
    ray.shutdown()


SCRIPT = """
    import os, sys
    import torch
    import tdfunc as tdf

    class Point(tdf.TensorClass):
        x: torch.Tensor
        note: str = "plain"

    class Other(tdf.TensorClass):
        y: torch.Tensor

    class Strange(Exception):
        pass

    def other(rows):
        return Other(rows.x * 2, batch_size=rows.batch_size)

    def fail(rows):
        raise Strange("of the script")

    if __name__ == "__main__":
        executor = tdf.RayExecutor()
        points = Point(torch.arange(6.0), batch_size=[6])
        made = points.map(other, executor=executor, chunksize=4)
        assert type(made) is Other and made.y.tolist() == [0, 2, 4, 6, 8, 10]
        same = points.map(lambda rows: rows + 1, executor=executor, chunksize=4)
        assert type(same) is Point and same.x.tolist() == [1, 2, 3, 4, 5, 6] and same.note == "plain"
        ragged = tdf.lazy_stack([Point(torch.ones(n), batch_size=[n]) for n in (1, 2, 3)])
        back = ragged.map(lambda rows: rows, executor=executor)
        assert type(back) is type(ragged) and [p.x.shape[0] for p in back.unbind(0)] == [1, 2, 3]
        try:
            points.map(fail, executor=executor, chunksize=4)
        except Strange as err:
            assert "of the script" in str(err)
            print("done")
"""


# The first in the file: two clusters at once would share the processors.
def test_classes_of_a_script_on_ray(tmp_path):
    """A typed class that a script or notebook defines comes back as itself."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))

    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200, env=environment())

    assert done.stdout.split() == ["done"], done.stderr


def test_map_on_ray(cluster, tmp_path):
    """A cluster gives the results of one process."""
    td = TensorDict({"x": torch.arange(10), "y": torch.rand(10, 3)}, [10])

    assert_trees_equal(td.map(fns.double, executor=cluster, chunksize=3), fns.double(td))
    assert_trees_equal(td.map(lambda rows: rows * 2, executor=cluster, chunksize=0), td * 2)
    noise = [
        td.map(fns.draw, executor=e, num_workers=w, chunksize=3, key=3)["noise"]
        for e, w in ((cluster, None), (None, 1))
    ]
    assert torch.equal(*noise)
    out = td.new_zeros([10]).memmap(tmp_path / "out")
    td.memmap(tmp_path / "in").map(fns.double, executor=cluster, chunksize=3, out=out)
    assert_trees_equal(TensorDict.load_memmap(tmp_path / "out"), fns.double(td))


def test_errors_and_deaths_on_ray(cluster):
    """An error or a worker that dies names its chunk, nobody waits for cancelled chunks, and the cluster continues."""
    td = TensorDict({"x": torch.arange(40)}, [40])

    with pytest.raises(ValueError, match="five") as caught:
        td.map(fns.fail_at_five, executor=cluster, chunksize=2)
    assert getattr(caught.value, "__notes__", ["(rows 4:6)."])[-1].endswith("(rows 4:6).")
    with pytest.raises(WorkerError, match=r"a result of .*chunk 2 \(rows 4:6\)(.|\n)*got:.*died unexpectedly"):
        td.map(fns.kill_at_five, executor=cluster, chunksize=2)

    assert_trees_equal(td.map(fns.double, executor=cluster, chunksize=3), fns.double(td))


def test_a_closed_executor(cluster):
    """It waits for its tasks, or cancels them, and takes no more."""
    with RayExecutor() as executor:
        task = executor.submit(time.sleep, 1)
    other = RayExecutor()
    tasks = [other.submit(time.sleep, 100) for _ in range(3)]
    other.shutdown(cancel_futures=True)

    assert task.done()
    assert task.result() is None
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(RuntimeError, match="submit after shutdown"):
        other.submit(time.sleep, 1)


def test_a_death_on_ray_is_retried(cluster, tmp_path):
    """With retries, the chunk of a worker that died runs again, with the seed that it had."""
    td, died = TensorDict({"x": torch.arange(10)}, [10]), tmp_path / "died"

    def kill_once(rows):
        if 5 in rows["x"].tolist() and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows.set("noise", torch.rand(rows.shape))

    with pytest.raises(WorkerError, match="a worker died"):
        td.map(kill_once, executor=cluster, chunksize=2)
    died.unlink()
    got = td.map(kill_once, executor=RayExecutor(max_retries=1), chunksize=2, key=0)

    assert died.exists()
    assert_trees_equal(got, td.map(kill_once, executor=cluster, chunksize=2, key=0))


def test_a_sweep_on_ray(cluster, tmp_path):
    """Members of a worker of the cluster that was killed go on from their last checkpoint."""
    work = sweeps.Deadly(tmp_path, members=(40,))
    options = {"folder": tmp_path / "run", "chunk_size": sweeps.BLOCK}
    found = tdf.sweep.train_blocks(sweeps.begin(), work, sweeps.RUNGS, executor=cluster, **options)

    sweeps.check(found)
    calls = sweeps.calls_of(tmp_path)
    assert calls[32].count(1) > 1
    assert all(rungs == sorted(rungs) and set(rungs) == set(range(sweeps.RUNGS)) for rungs in calls.values())
    with pytest.raises(WorkerError, match=r"member 37 cannot be trained:(?s:.*)FloatingPointError: no"):
        tdf.sweep.train_blocks(
            sweeps.begin(64), sweeps.fail_at_37, 2, folder=tmp_path / "other", chunk_size=16, executor=cluster
        )
