"""A save replaces a file or folder as a whole: killed, interrupted, out of space, or beside other saves."""

import errno
import os
import re
import resource
import stat
from types import SimpleNamespace

import pytest
import torch

from tdfunc import CheckpointManager, TensorDict
from tdfunc.storage.api import load, save
from tdfunc.storage.disk import commit
from tdfunc.storage.safetensors import write

BIG = TensorDict({"big": torch.ones(3_000_000), "small": torch.ones(3)})
OLD = TensorDict({"old": torch.zeros(3)})


@pytest.mark.parametrize("target", ["write_all", "replace", "seal"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")])
def test_errors_in_the_middle(error, target, tmp_path, monkeypatch):
    """An error or an interrupt during a save changes nothing and leaves nothing behind."""
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
    """A failed save leaves no file descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(write, "seal", lambda *_: 1 / 0)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            save(BIG, tmp_path / "c.safetensors")

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("reserve", [True, False], ids=["reserved", "not reserved"])
def test_no_space(reserve, tmp_path, monkeypatch):
    """A full disk leaves the old file as it is, with and without reserved space."""
    save(OLD, tmp_path / "c.safetensors")
    if not reserve:
        monkeypatch.setattr(commit, "_libc", None)
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


def test_leftovers_go_with_the_next_save(tmp_path):
    """The next save to a path removes what killed saves left, but no file of a save that runs or of another path."""
    path = str(tmp_path / "c.safetensors")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with commit._staged(path, lambda name: commit.Descriptor(name, flags)) as (running, _):
        for name in (path, path, f"{tmp_path}/d.safetensors"):
            commit.Descriptor(commit._temporary(name), flags).close()
        assert len(os.listdir(tmp_path)) == 4
        save(BIG, path)
        left = os.listdir(tmp_path)

    assert sorted(left)[-1] == "c.safetensors"
    assert os.path.basename(running) in left
    assert len(left) == 3


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_temporary_name_that_is_deleted_before_it_is_locked(what, tmp_path, monkeypatch):
    """A save that another one takes for a leftover, in the moment before its lock, takes a new name."""
    real, deleted = commit.lock, []

    def late(fd, **how):
        if not deleted:
            deleted.extend(name for name in os.listdir(tmp_path) if name.endswith(".tmp"))
            commit._remove(str(tmp_path / deleted[0]))
        real(fd, **how)

    monkeypatch.setattr(commit, "lock", late)
    if what == "file":
        save(BIG, tmp_path / "c.safetensors")
        back = load(tmp_path / "c.safetensors")
    else:
        BIG.memmap(tmp_path / "c")
        back = load(tmp_path / "c")

    assert len(deleted) == 1
    assert (back == BIG).all()


STEP = "step-0000000000"
ORDERS = {
    "file": (lambda folder: save(OLD, folder / "c.safetensors"), ["new", "-> c.safetensors", "."]),
    "memmap": (lambda folder: OLD.memmap(folder / "c", sync=True), ["all of new", "new", "-> c", "."]),
    "shards": (
        lambda folder: save(OLD, folder, max_shard_size=100),
        ["new/new", "-> SHARD", "new/new", "-> INDEX", "-> SHARD", ".", "-> INDEX", "."],
    ),
    "step": (
        lambda folder: CheckpointManager(folder / "run").save(0, OLD),
        [
            ".", "run/new/new", "-> model.safetensors", "run/new/new", "-> checkpoint.json", "run/new", f"-> {STEP}",
            "run",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_the_disk_has_the_contents_before_the_name_and_the_name_at_the_end(name, tmp_path, monkeypatch):
    """Every rename comes after the contents are on the disk, and the folder is synced after every rename."""
    calls = []

    def record(real, describe):
        def call(*args, **options):
            calls.append(describe(*args))
            return real(*args, **options)

        return call

    def shown(path):
        # By name: which folder is synced matters as much as when.
        text = re.sub(r"\.tdfunc-\w+-\w+\.tmp", "new", os.path.relpath(path, tmp_path))
        return re.sub(r"model-.*-of-.*", "SHARD", text.replace("model.safetensors.index.json", "INDEX"))

    def renamed(_, path):
        return "-> " + os.path.basename(shown(path))

    monkeypatch.setattr(os, "fsync", record(os.fsync, lambda fd: shown(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "replace", record(os.replace, renamed))
    monkeypatch.setattr(os, "rename", record(os.rename, renamed))
    monkeypatch.setattr(commit, "sync_files", record(commit.sync_files, lambda path: f"all of {shown(path)}"))
    ORDERS[name][0](tmp_path)

    assert calls == ORDERS[name][1]


def test_a_lock_that_is_kept(tmp_path, monkeypatch):
    """A save that waits too long for another one names the folder, and writes nothing."""
    monkeypatch.setattr(commit, "_WAIT_S", 0.05)
    with commit.locked(str(tmp_path)), pytest.raises(TimeoutError, match=str(tmp_path)):
        save(OLD, tmp_path, max_shard_size=100)

    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_keep_no_lock(tmp_path, monkeypatch):
    """A process that was forked during a save does not keep its lock, nor take it from its parent."""
    monkeypatch.setattr(commit, "_WAIT_S", 0.05)
    out, into = os.pipe()
    with commit.locked(str(tmp_path)):
        child = os.fork()
        if not child:
            os.read(out, 1)
            os._exit(0)
        with pytest.raises(TimeoutError), commit.locked(str(tmp_path)):
            pass
    with commit.locked(str(tmp_path)):
        os.write(into, b".")
    os.waitpid(child, 0)
    os.close(out)
    os.close(into)


def test_permissions(tmp_path):
    """A new file follows the umask, and a file that is replaced keeps its mode."""
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
    """A save to a link replaces the link, not the file that it leads to."""
    save(OLD, tmp_path / "blob.safetensors")
    (tmp_path / "c.safetensors").symlink_to("blob.safetensors")

    save(BIG, tmp_path / "c.safetensors")

    assert not (tmp_path / "c.safetensors").is_symlink()
    assert (load(tmp_path / "blob.safetensors") == OLD).all()


@pytest.mark.parametrize("name", ["x" * 243 + ".safetensors", "имя.safetensors", " .safetensors"], ids=len)
def test_names(name, tmp_path, monkeypatch):
    """Names of the greatest length, not of ASCII, relative ones and bytes can be saved."""
    monkeypatch.chdir(tmp_path)
    save(OLD, name)

    assert (load(name) == OLD).all()
    assert os.listdir(tmp_path) == [name]
    assert (load(os.fsencode(name)) == OLD).all()


def test_a_file_system_that_cannot_reserve(tmp_path, monkeypatch):
    """A file system that takes no reservations can be saved to."""
    monkeypatch.setattr(commit, "_libc", SimpleNamespace(fallocate64=lambda *_: -1))
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EOPNOTSUPP)
    save(BIG, tmp_path / "c.safetensors")

    assert (load(tmp_path / "c.safetensors") == BIG).all()


SAVES = {
    "file": lambda tree, folder: save(tree, folder / "c.safetensors"),
    "shards": lambda tree, folder: save(tree, folder / "c", max_shard_size=100),
    "memmap": lambda tree, folder: tree.memmap(folder / "c"),
    "step": lambda tree, folder: CheckpointManager(folder / "c", keep_last=1).save(0, tree, overwrite=True),
}


@pytest.mark.parametrize("missing", ["locks", "exchange"])
@pytest.mark.parametrize("name", SAVES)
def test_file_systems_that_can_do_less(name, missing, tmp_path, monkeypatch):
    """Without locks, and without a call that swaps two folders, saves still replace what is there and leave nothing."""
    if missing == "locks":
        no_locks = SimpleNamespace(LOCK_EX=0, LOCK_SH=0, LOCK_NB=0, LOCK_UN=0, flock=fail(OSError(errno.ENOLCK, "no")))
        monkeypatch.setattr(commit, "_fcntl", no_locks)
    else:
        monkeypatch.setattr(commit, "_libc", None)
    for tree in (OLD, OLD + 1, OLD + 2):
        SAVES[name](tree, tmp_path)
    SAVES[name](OLD.clone(), tmp_path)

    place = next(tmp_path.iterdir())
    back = load(place / STEP if name == "step" else place)
    assert (back == OLD).all()
    assert len(os.listdir(tmp_path)) == 1
    assert not list(tmp_path.rglob(".tdfunc-*"))


def fail(error):
    """A function that raises."""

    def raises(*_):
        raise error

    return raises
