"""Saving, loading and memmaps without the calls that Windows lacks, in processes from which these are taken away."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.platforms.less import LEVELS

ROOT = Path(__file__).parent.parent.parent
QUICK = ("one_file", "shards", "background", "manager", "memmap", "open_files", "mapped_files")
ALL = (*QUICK, "workers", "command_line", "ranks")
KINDS = ("file", "shards", "memmap", "step")
# Each process imports torch, which takes long on a busy machine.
PATIENCE_S = 500
pytestmark = pytest.mark.timeout(1200)


def start(*args):
    """Start the script that saves and loads."""
    command = [sys.executable, "-m", "tests.platforms.script", *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process):
    """The lines that a process printed, after it has ended well."""
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors[-3000:]
    return out.split()


@pytest.mark.parametrize("level", [pytest.param("bare", marks=pytest.mark.slow), "windows"])
def test_saves_and_loads(level, tmp_path):
    """Every way of saving and loading works, within one process."""
    assert ended(start(level, "all", tmp_path, *QUICK)) == list(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_other_processes(level, tmp_path):
    """So do workers of `map`, the command line, and a save of ranks."""
    others = [name for name in ALL if name not in QUICK]

    assert ended(start(level, "all", tmp_path, *others)) == others


@pytest.mark.parametrize(
    ("level", "kind"),
    [(level, kind) for level in LEVELS for kind in KINDS],
)
@pytest.mark.slow
def test_a_killed_save(level, kind, tmp_path):
    """A save that is killed leaves the old tree or the new one, also where a folder is replaced in two steps."""
    last = 0
    for pause_s in (0.0, 0.02):
        saver = start(level, "save", tmp_path, kind)
        # Two saves are done; the kill meets one of the next.
        done = [saver.stdout.readline().strip(), saver.stdout.readline().strip()]
        assert all(done), saver.stderr.read()[-3000:]
        time.sleep(pause_s)
        os.kill(saver.pid, signal.SIGKILL)
        rest = saver.communicate()[0].split()
        last = int((done + rest)[-1])

        assert int(ended(start(level, "check", tmp_path, kind))[0]) in (last, last + 1)


IMPORTS = """
import sys
import torch
import torch.distributed.tensor, torch._dynamo, torch._inductor.utils
{lacks}
sys.platform = {name!r}
import os
import tdfunc, tdfunc.llm, tdfunc.distributed, tdfunc.cli, tdfunc.sweep, tdfunc.lora, tdfunc.nn, tdfunc.parallel.pool
from tdfunc.core.system import platform
tree = tdfunc.TensorDict({{"a": torch.ones(3)}})
tdfunc.save(tree, sys.argv[1])
assert (tdfunc.load(sys.argv[1]) == tree).all()
assert platform._libc is None
print(platform.HOLDS_NAMES)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lacks", "holds"),
    [
        ("win32", "from tests.platforms.less import take_away; take_away('windows')", "True"),
        ("darwin", "", "False"),
    ],
)
def test_imports_under_another_name_of_the_system(name, lacks, holds, tmp_path):
    """The whole package can be imported, and saves, under the names of Windows and macOS."""
    code = IMPORTS.format(name=name, lacks=lacks)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "c.safetensors")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, cwd=ROOT, check=False
    )

    assert done.stdout.strip() == holds, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_tests_of_storage_without_the_calls():
    """The tests of storage pass without the calls, except the tests of the calls; here every third one runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.platforms.bare", "tests/storage"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TDFUNC_EVERY_TEST": "3"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stdout[-5000:]
