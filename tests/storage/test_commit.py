"""A save replaces a file or folder as a whole: killed, interrupted, out of space, or beside other saves."""

import errno
import os
import re
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tdfunc import AsyncSaver, CheckpointManager, ConcurrencyError, TensorDict
from tdfunc.core.system import platform
from tdfunc.storage.api import load, save
from tdfunc.storage.disk import commit
from tdfunc.storage.safetensors import write
from tdfunc.storage.stream import memmap_stream, save_stream
from tests.storage.trees import assert_same, retie

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
    """A failed save, and a load, leave no file descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    save(BIG, tmp_path / "c.safetensors")
    monkeypatch.setattr(write, "seal", lambda *_: 1 / 0)
    for _ in range(5):
        load(tmp_path / "c.safetensors")
        with pytest.raises(ZeroDivisionError):
            save(BIG, tmp_path / "c.safetensors")

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("reserve", [True, False], ids=["reserved", "not reserved"])
def test_no_space(reserve, tmp_path, monkeypatch):
    """A full disk leaves the old file as it is, with and without reserved space."""
    save(OLD, tmp_path / "c.safetensors")
    if not reserve:
        monkeypatch.setattr(platform, "_libc", None)
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


@pytest.mark.parametrize(("place", "moment", "name"), [(commit, "lock", "file"), (os, "mkdir", "memmap")])
def test_a_temporary_name_that_is_deleted_before_it_is_locked(place, moment, name, tmp_path, monkeypatch):
    """A save that another one takes for a leftover, in the moment before it is opened or locked, takes a new name."""
    real, deleted = getattr(place, moment), []

    def late(*args, **how):
        real(*args, **how)
        left = [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
        if left and not deleted:
            deleted.append(commit._remove(str(left[0])))

    monkeypatch.setattr(place, moment, late)
    SAVES[name](BIG, tmp_path)

    assert len(deleted) == 1
    assert (load(next(tmp_path.iterdir())) == BIG).all()


STEP = "step-0000000000"
FILE = ["new", "-> c.safetensors", "."]
ORDERS = {
    "file": (lambda folder: save(OLD, folder / "c.safetensors"), FILE),
    "background": (lambda folder: AsyncSaver().save(OLD, folder / "c.safetensors").result(), FILE),
    "stream": (lambda folder: save_stream(OLD, lambda leaf: [leaf], folder / "c.safetensors"), FILE),
    "streamed memmap": (
        lambda folder: memmap_stream(TensorDict({}), iter, folder / "c"), ["new/meta.json", "new", "new", "-> c", "."]
    ),
    "memmap": (
        lambda folder: TensorDict({"n": {}}).memmap(folder / "c", sync=True),
        ["new/meta.json", "new", "new/n/meta.json", "new/n", "new", "-> c", "."],
    ),
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
    # Without the call that syncs a memmap folder as a whole, each file is synced.
    monkeypatch.setattr(platform, "_libc", None)
    ORDERS[name][0](tmp_path)

    assert calls == ORDERS[name][1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_save_inside_a_save_of_one_thread_is_refused(tmp_path):
    """Only a signal handler does this; it must not wait for the frame that it interrupted."""
    with commit.locked(str(tmp_path)):
        with pytest.raises(ConcurrencyError, match="this thread is saving to the folder already"):
            save(OLD, tmp_path, max_shard_size=100)
        with pytest.raises(ConcurrencyError, match="this thread is saving to the folder already"):
            save(OLD, tmp_path, max_shard_size=100)
    save(OLD, tmp_path, max_shard_size=100)

    assert_same(load(tmp_path), OLD)


def test_forks_keep_no_lock(tmp_path, monkeypatch):
    """A save that waits too long for another one names the folder, also after a fork, which does not keep the lock."""
    monkeypatch.setattr(commit, "_WAIT_S", 0.05)
    out, into = os.pipe()
    with commit.locked(str(tmp_path)):
        child = os.fork()
        if not child:
            os.read(out, 1)
            os._exit(0)
        # Another thread: the same one would be refused at once.
        with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=str(tmp_path)):
            pool.submit(save, OLD, tmp_path, max_shard_size=100).result()
    with commit.locked(str(tmp_path)):
        os.write(into, b".")
    os.waitpid(child, 0)
    os.close(out)
    os.close(into)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "place", "modes"),
    [
        ("file", "c.safetensors", [0o640, 0o700]),
        ("shards", "c/model.safetensors.index.json", [0o640, 0o700]),
        ("memmap", "c", [0o751, 0o700]),
        ("memmap", "c/old.memmap", [0o640, 0o640]),
        ("step", f"c/{STEP}", [0o751, 0o700]),
    ],
)
def test_permissions(name, place, modes, tmp_path):
    """A new file or folder follows the umask, and one that is replaced keeps its mode."""
    found, old = [], os.umask(0o026)
    try:
        for mode in modes:
            SAVES[name](OLD + mode, tmp_path)
            found.append(stat.S_IMODE((tmp_path / place).stat().st_mode))
            (tmp_path / place).chmod(0o700)
    finally:
        os.umask(old)

    assert list(map(oct, found)) == list(map(oct, modes))


def test_a_link_is_replaced_and_not_followed(tmp_path):
    """A save to a link replaces the link, not the file that it leads to."""
    save(OLD, tmp_path / "blob.safetensors")
    (tmp_path / "c.safetensors").symlink_to("blob.safetensors")

    save(BIG, tmp_path / "c.safetensors")

    assert not (tmp_path / "c.safetensors").is_symlink()
    assert (load(tmp_path / "blob.safetensors") == OLD).all()


SAVES = {
    "file": lambda tree, folder: save(tree, folder / "c.safetensors"),
    "shards": lambda tree, folder: save(tree, folder / "c", max_shard_size=100),
    "memmap": lambda tree, folder: tree.memmap(folder / "c").memmap(folder / "c"),
    "step": lambda tree, folder: CheckpointManager(folder / "c", keep_last=1).save(0, tree, overwrite=True),
}


def fail(error):
    """A function that raises."""

    def raises(*_, **__):
        raise error

    return raises


NO_LOCKS = fail(OSError(errno.ENOLCK, "no"))
LACKS = {
    "locks": ("_fcntl", SimpleNamespace(LOCK_EX=0, LOCK_SH=0, LOCK_NB=0, LOCK_UN=0, flock=NO_LOCKS)),
    "calls of Linux": ("_libc", None),
    "calls of this file system": (
        "_libc", SimpleNamespace(fallocate64=lambda *_: -1, renameat2=lambda *_: -1)
    ),
    "links": ("os.link", fail(OSError(errno.EPERM, "no"))),
}  # fmt: skip


@pytest.mark.parametrize("missing", LACKS)
@pytest.mark.parametrize("name", SAVES)
def test_file_systems_that_can_do_less(name, missing, tmp_path, monkeypatch):
    """Without a call that not every file system has, saves still replace what is there and leave nothing."""
    target, lack = LACKS[missing]
    monkeypatch.setattr(f"tdfunc.core.system.platform.{target}", lack)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EOPNOTSUPP)
    for value in (0, 1, 2, 0):
        leaf = torch.full((3,), float(value))
        tree = retie(TensorDict({"old": leaf, "n": {"tied": leaf}}), [[("old",), ("n", "tied")]])
        SAVES[name](tree, tmp_path)

    place = next(tmp_path.iterdir())
    assert_same(load(place / STEP if name == "step" else place), tree)
    assert len(os.listdir(tmp_path)) == 1
    assert not list(tmp_path.rglob(".tdfunc-*"))


@pytest.mark.parametrize(
    ("before", "save_again", "folder", "place"),
    [
        ("step", SAVES["step"], "c", f"c/{STEP}"),
        ("memmap", lambda tree, folder: tree.memmap(folder / "c", sync=True), "", "c"),
        ("shards", lambda tree, folder: save(tree, folder / "c" / "model.safetensors"), "c", "c"),
    ],
)
def test_nothing_goes_before_the_disk_has_the_new_names(before, save_again, folder, place, tmp_path, monkeypatch):
    """If the disk does not take the new names, the save warns, and the old contents stay beside the new ones."""
    SAVES[before](OLD, tmp_path)
    count, real = len(os.listdir(tmp_path / folder)), os.fsync
    monkeypatch.setattr(platform, "_libc", None)

    def refuse(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / folder):
            raise OSError(errno.EIO, "no")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.warns(RuntimeWarning, match=r"the save is in place, but a power failure may undo it"):
        save_again(OLD + 1, tmp_path)

    assert (load(tmp_path / place) == OLD + 1).all()
    assert len(os.listdir(tmp_path / folder)) == count + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "no")])
@pytest.mark.parametrize("libc", [None, SimpleNamespace(renameat2=lambda *_: -1), SimpleNamespace(syncfs=lambda _: -1)])
def test_a_folder_that_cannot_take_its_place(error, tmp_path, monkeypatch, libc):
    """An old folder gets its name back if the second of two steps fails, and an exchange that fails changes nothing."""
    SAVES["memmap"](OLD, tmp_path)
    real, targets = os.rename, []

    def refuse(source, target):
        targets.append(target)
        if targets.count(str(tmp_path / "c")) == 2:
            raise error
        real(source, target)

    monkeypatch.setattr(platform, "_libc", libc)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    with pytest.raises((KeyboardInterrupt, OSError)):
        BIG.memmap(tmp_path / "c", sync=True)
    assert (load(tmp_path / "c") == OLD).all()
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_system_that_finds_no_folder_is_an_error(tmp_path, monkeypatch):
    """Not an endless search for the parent of the root."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(commit.os.path, "isdir", lambda path: False)
    monkeypatch.setattr(commit.os, "mkdir", refuse)

    with pytest.raises(PermissionError):
        commit.make_folder(str(tmp_path / "a"), fsync=False)


def test_ctrl_c_in_a_close_leaves_no_descriptor(tmp_path, monkeypatch):
    """Its lock would stay until the process ends, and other saves would wait for it."""
    held = commit.Folder(str(tmp_path))
    number = held.fd
    # Only the module's own name for it: the tests' other locks are real.
    monkeypatch.setattr(platform, "_fcntl", SimpleNamespace(flock=_interrupted, LOCK_UN=0))
    with pytest.raises(KeyboardInterrupt):
        held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def _interrupted(*_):
    raise KeyboardInterrupt
