"""A save replaces the file as a whole: killed, interrupted, out of space, or beside other saves."""

import json
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from tdfunc import TensorDict
from tdfunc.storage.api import load, save
from tdfunc.storage.disk import atomic
from tdfunc.storage.safetensors import write

# Imports once and forks a child for each kill. A child saves trees of equal values over and over; the values of what
# is loaded after its death must be equal too.
KILLS = """
    import json, os, random, resource, signal, sys, time
    import torch
    from tdfunc import TensorDict
    from tdfunc.storage import atomic
    from tdfunc.storage.api import load, save

    path, kills, named = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "named"
    torch.set_num_threads(1)
    if named:
        atomic._UNNAMED = 0
    random.seed(0)
    trees = [TensorDict({str(k): torch.full((1 << 16,), float(i)) for k in range(20)}) for i in range(4)]
    start = time.perf_counter()
    save(trees[0], path)
    span = time.perf_counter() - start
    seen, left = set(), 0
    for kill in range(kills):
        child = os.fork()
        if not child:
            try:
                while True:
                    for tree in trees:
                        save(tree, path, fsync=kill % 2 == 0)
            finally:
                os._exit(1)
        time.sleep(random.uniform(0, 3 * span))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        values = {float(value) for leaf in load(path).values() for value in (leaf.min(), leaf.max())}
        assert len(values) == 1, values
        seen |= values
        left += len(os.listdir(os.path.dirname(path))) - 1
    save(trees[0], path)
    print(json.dumps({"seen": sorted(seen), "left": left, "files": os.listdir(os.path.dirname(path))}))
"""


def run(code, *args, timeout=250):
    """Run a script in a fresh interpreter and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unnamed", "named"])
def test_kills(how, tmp_path):
    """A killed save would leave a torn file, lose the old one, or leave its own behind."""
    result = run(KILLS, tmp_path / "c.safetensors", 30, how)

    assert result["files"] == ["c.safetensors"]
    assert len(result["seen"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unnamed", "named"])
def test_hundreds_of_kills(how, tmp_path):
    """A rare moment in which a kill loses the file would be missed by a few."""
    result = run(KILLS, tmp_path / "c.safetensors", 400, how)

    assert result["files"] == ["c.safetensors"]
    assert len(result["seen"]) == 4


@pytest.fixture(params=["unnamed", "named", "linkless"])
def saving(request, monkeypatch):
    """Each way of writing: without a name, with a temporary one, and without a name where linking then fails."""
    if request.param == "named":
        monkeypatch.setattr(atomic, "_UNNAMED", 0)
    if request.param == "linkless":
        monkeypatch.setattr(atomic, "_link", lambda folder, temporary, fd: False)


BIG = TensorDict({"big": torch.ones(3_000_000), "small": torch.ones(3)})
OLD = TensorDict({"old": torch.zeros(3)})


@pytest.mark.usefixtures("saving")
def test_each_way_of_writing_saves(tmp_path):
    """A file system without unnamed files, or without links to them, would lose the save."""
    save(OLD, tmp_path / "c.safetensors")
    save(BIG, tmp_path / "c.safetensors")

    assert (load(tmp_path / "c.safetensors") == BIG).all()
    assert os.listdir(tmp_path) == ["c.safetensors"]


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("target", ["write_all", "replace", "seal"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")])
def test_errors_in_the_middle(error, target, tmp_path, monkeypatch):
    """An error or an interrupt during a save would damage the old file or leave a part of the new one behind."""
    save(OLD, tmp_path / "c.safetensors")
    before = (tmp_path / "c.safetensors").read_bytes()
    place = os if target == "replace" else write
    real, calls = getattr(place, target), []

    def fail(*args, **kwargs):
        calls.append(args)
        if target != "write_all" or len(calls) > 2:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(place, target, fail)
    with pytest.raises(error if isinstance(error, type) else OSError):
        save(BIG, tmp_path / "c.safetensors")

    assert calls
    assert (tmp_path / "c.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["c.safetensors"]


def test_errors_close_what_they_opened(tmp_path, monkeypatch):
    """Failed saves would use up the process's file descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(write, "seal", lambda *_: 1 / 0)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            save(BIG, tmp_path / "c.safetensors")

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("reserve", [True, False], ids=["reserved", "not reserved"])
def test_no_space(reserve, tmp_path, monkeypatch):
    """A full disk would leave a truncated file in place of the old one."""
    save(OLD, tmp_path / "c.safetensors")
    if not reserve:
        monkeypatch.setattr(atomic, "_fallocate", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Python ignores SIGXFSZ, so a write past the limit fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, hard))
        with pytest.raises(OSError, match=r"File too large; the file was not replaced: .*c\.safetensors"):
            save(BIG, tmp_path / "c.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (load(tmp_path / "c.safetensors") == OLD).all()
    assert os.listdir(tmp_path) == ["c.safetensors"]


def leave_behind(folder, name, *, locked=False):
    """Make what a killed save leaves: a temporary file, held by its lock if the save still runs."""
    fd = os.open(folder, os.O_RDONLY)
    temporary = f"{atomic._temporary(name)}0123456789abcdef.tmp"
    file = atomic._create(fd, temporary)
    os.close(fd)
    if not locked:
        file.close()
    return temporary, file


def test_leftovers_go_with_the_next_save(tmp_path):
    """Killed saves would fill the disk; or the file of a save that still runs, or of another path, would be deleted."""
    gone, _ = leave_behind(tmp_path, "c.safetensors")
    other, _ = leave_behind(tmp_path, "d.safetensors")
    save(BIG, tmp_path / "c.safetensors")
    assert sorted(os.listdir(tmp_path)) == sorted([other, "c.safetensors"])
    assert gone != other

    running, file = leave_behind(tmp_path, "c.safetensors", locked=True)
    save(BIG, tmp_path / "c.safetensors")
    assert running in os.listdir(tmp_path)
    file.close()
    save(BIG, tmp_path / "c.safetensors")
    assert sorted(os.listdir(tmp_path)) == sorted([other, "c.safetensors"])


def test_a_temporary_file_deleted_before_it_was_locked(tmp_path, monkeypatch):
    """A save that another one takes for a leftover, in the moment before its lock, would lose its file."""
    real, deleted = atomic._lock, []

    def late(fd):
        if not deleted:
            deleted.extend(os.listdir(tmp_path))
            os.unlink(tmp_path / deleted[0])
        real(fd)

    monkeypatch.setattr(atomic, "_UNNAMED", 0)
    monkeypatch.setattr(atomic, "_lock", late)
    save(BIG, tmp_path / "c.safetensors")

    assert len(deleted) == 1
    assert (load(tmp_path / "c.safetensors") == BIG).all()


@pytest.mark.usefixtures("saving")
def test_threads_that_save_to_one_path(tmp_path):
    """Two saves at once would mix, fail, or delete each other's temporary file; a reader would see half of one."""
    path = tmp_path / "c.safetensors"
    trees = [TensorDict({str(k): torch.full((20_000,), float(i)) for k in range(5)}) for i in range(3)]
    save(trees[0], path)
    errors, loads = [], []

    def work(call):
        try:
            for _ in range(15):
                call()
        except BaseException as err:
            errors.append(err)

    def read():
        loads.append({float(leaf.unique()) for leaf in load(path).values()})

    calls = [lambda tree=tree: save(tree, path, fsync=False) for tree in trees]
    threads = [threading.Thread(target=work, args=(call,)) for call in [*calls, read]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert all(len(values) == 1 for values in loads)
    assert len(loads) == 15
    assert os.listdir(tmp_path) == ["c.safetensors"]


def test_permissions(tmp_path):
    """A new file would ignore the umask, or a private one become readable to all."""
    path = tmp_path / "c.safetensors"
    old = os.umask(0o027)
    try:
        save(OLD, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        save(BIG, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    """Saving to a link into a cache of other files would overwrite one of them."""
    save(OLD, tmp_path / "blob.safetensors")
    (tmp_path / "c.safetensors").symlink_to("blob.safetensors")

    save(BIG, tmp_path / "c.safetensors")

    assert not (tmp_path / "c.safetensors").is_symlink()
    assert (load(tmp_path / "blob.safetensors") == OLD).all()


@pytest.mark.parametrize("name", ["x" * 243 + ".safetensors", "имя.safetensors", " .safetensors"], ids=len)
def test_names(name, tmp_path, monkeypatch):
    """A file name of the greatest length, or one that is not ASCII, or a relative one, could not be saved."""
    monkeypatch.chdir(tmp_path)
    save(OLD, name)

    assert (load(name) == OLD).all()
    assert os.listdir(tmp_path) == [name]
    assert (load(os.fsencode(name)) == OLD).all()


def test_a_file_system_that_cannot_reserve(tmp_path, monkeypatch):
    """A file system that takes no reservations would refuse every save."""
    monkeypatch.setattr(atomic, "_fallocate", lambda *_: -1)
    monkeypatch.setattr("ctypes.get_errno", lambda: 95)
    save(BIG, tmp_path / "c.safetensors")

    assert (load(tmp_path / "c.safetensors") == BIG).all()


@pytest.mark.parametrize("code", [95, 21], ids=["unsupported", "is a directory"])
def test_a_file_system_without_unnamed_files(code, tmp_path, monkeypatch):
    """Where the kernel refuses files without a name, every save would fail."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & atomic._UNNAMED == atomic._UNNAMED:
            raise OSError(code, "no")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    save(BIG, tmp_path / "c.safetensors")
    monkeypatch.undo()

    assert (load(tmp_path / "c.safetensors") == BIG).all()
    assert os.listdir(tmp_path) == ["c.safetensors"]
