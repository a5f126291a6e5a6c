"""Trees in folders of mapped files: written as a whole, opened without reading, larger than memory.

The layout is tensordict's (`docs/memmap.md`), so that each library opens the folders of the other.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import is_fake
from tdfunc.core.errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, error, explain
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MapMode, mapped_file
from tdfunc.core.shapes import as_count
from tdfunc.core.types import Device
from tdfunc.ops import storage_writes
from tdfunc.storage.disk.descriptor import Descriptor
from tdfunc.storage.disk.levels import outside_transforms
from tdfunc.storage.disk.mapped import check_maps, map_descriptor, open_inside
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.memmap.folder_build import build_folder
from tdfunc.storage.memmap.folder_commit import recover, replace_folder
from tdfunc.storage.memmap.folder_plan import FileLeaf, FolderPlan, plan_folder
from tdfunc.storage.memmap.folder_read import FolderReader, LeafFile
from tdfunc.storage.safetensors.write import pieces, write_all
from tdfunc.storage.tree.build import Classes

In = TypeVar("In")
Out = TypeVar("Out")
# Each takes about a millisecond; beside writers that never rest a reader may need some.
_RETRIES = 100


def memmap(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None" = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    sync: bool = False,
) -> Any:
    """Write every leaf to a file of its own in a folder, and return the tree on these files."""
    task = partial(write_folder, "memmap", td, prefix, copy_existing, num_threads, existsok, sync)
    return start(task, "memmap", num_threads, return_early, share_non_tensor)


def memmap_like(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None" = None,
    copy_existing: bool = False,
    *,
    existsok: bool = True,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    sparse_ok: bool = False,
) -> Any:
    """Make files of zeros for every leaf, which take no space until they are written to."""
    del copy_existing
    task = partial(_make_room, td, prefix, num_threads, existsok, sparse_ok)
    return start(task, "memmap_like", num_threads, return_early, share_non_tensor)


def load_memmap(
    prefix: "str | os.PathLike[str]",
    device: "Device | None" = None,
    non_blocking: bool = False,
    *,
    out: TensorCollection | None = None,
    num_threads: int = 0,
    mode: MapMode = "c",
    classes: Classes = (),
) -> Any:
    """Open a memmap folder: no leaf is read before it is used."""
    if mode not in ("c", "r+"):
        raise error(
            ValueError,
            f"load_memmap: there is no mode {mode!r}.",
            expected="'c' (copy-on-write) or 'r+' (writes reach the files)",
        )
    if out is not None and not isinstance(out, TensorCollection):
        raise error(
            TypeError,
            "load_memmap: out is no tree.",
            expected="a tree",
            got=type(out).__name__,
            hint="TensorDict(out) is one, which takes the same tensors.",
        )
    threads = _threads(num_threads, "load_memmap")
    name = local_folder(prefix, "load_memmap")
    place = torch.device(device) if device is not None else None
    if out is not None and is_fake(place):
        raise UnsupportedError(
            "load_memmap: leaves without values have none for out.",
            expected="a device that has values",
            got=str(place) if place is not None else type(torch.empty(0, device="cpu")).__name__,
            hint="leave out the device, or out.",
        )

    def read(root: int) -> TensorCollection:
        return _read(root, os.path.realpath(name), mode, threads, classes, None, place, non_blocking)

    tree = read_folder(name, "load_memmap", read)
    if out is None:
        return tree
    storage_writes.write_tree(out, tree, complete=True)
    return out


def read_folder(name: str, call: str, read: Callable[[int], Out]) -> Out:
    """Return what `read` makes of a descriptor of a folder: all of it of one writing, beside writers too.

    Raises:
        FileNotFoundError: There is no such folder.
        NotADirectoryError: It is a file.
        OSError: It was replaced again and again.
    """
    for _ in range(_RETRIES):
        with _opened(name, call) as root, _naming(name, call), outside_transforms():
            try:
                return read(root)
            except (CorruptCheckpointError, UnsupportedError, OSError):
                # A writer may have put another folder here meanwhile, and deleted this one.
                if not _was_replaced(root, name):
                    raise
    raise OSError(errno.EBUSY, f"{call}: the folder was replaced again and again while it was read", name)


def _read(
    root: int,
    where: str | None,
    mode: MapMode,
    threads: int,
    classes: Classes,
    types: Mapping[str, Any] | None,
    place: torch.device | None,
    non_blocking: bool,
) -> TensorCollection:
    """Read the folder behind a descriptor; `where` is the path that the leaves remember."""
    reader = FolderReader(root, classes, types)
    fake = is_fake(place)
    if fake:
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device=place or "cpu") for leaf in reader.leaves]
        return build_folder(reader, leaves, place)
    aliases = reader.aliases()
    if place is None or place.type == "cpu":
        check_maps(len(reader.leaves) - len(aliases), "load_memmap")

    def one(number: int) -> Tensor | None:
        if number in aliases:
            return None
        leaf = map_leaf(root, reader.leaves[number], where, mode)
        return leaf if place is None or place.type == "cpu" else _move(leaf, place, non_blocking)

    return build_folder(reader, _each(one, range(len(reader.leaves)), threads), place)


def map_leaf(root: int, leaf: LeafFile, where: str | None, mode: MapMode, top: str | None = None) -> Tensor:
    """Map the file of one leaf in the folder behind a descriptor; the leaf remembers it as a file in `where`.

    It also remembers the folder that was opened: `top` where that is not `where`, but one around it.
    """
    what = f"leaf {dotted(leaf.path)!r}"
    try:
        opened = open_inside(root, leaf.name, what, writable=mode == "r+")
    except FileNotFoundError as err:
        if not leaf.size_bytes:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        raise CorruptCheckpointError(
            f"{what}: its file is missing.", expected=leaf.name, hint="restore it from a copy."
        ) from err
    with opened as fd:
        found = os.fstat(fd).st_size
        if found < leaf.size_bytes or (leaf.exact and found > leaf.size_bytes):
            raise CorruptCheckpointError(
                f"{what}: its file {leaf.name} is {'cut short' if found < leaf.size_bytes else 'too long'}.",
                expected=f"{leaf.size_bytes} bytes for {leaf.dtype} {list(leaf.shape)}",
                got=f"{found} bytes",
                hint="restore it from a copy.",
            )
        if not leaf.size_bytes:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        path = None if where is None else os.path.join(where, leaf.name)
        return map_descriptor(fd, path, mode, leaf.dtype, leaf.shape, leaf.size_bytes, top or where)


def _move(leaf: Tensor, place: torch.device, non_blocking: bool) -> Tensor:
    try:
        return leaf.to(place, non_blocking=non_blocking)
    # A torch without CUDA says so by an assertion.
    except (AssertionError, NotImplementedError, RuntimeError) as err:
        raise UnsupportedError(
            "the leaves cannot be put on their device.", expected=str(place), got=f"{type(err).__name__}: {err}"[:200]
        ) from err


@contextmanager
def _opened(name: str, call: str) -> Generator[int, None, None]:
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    try:
        root = Descriptor(name, flags)
    except FileNotFoundError:
        old = recover(name)
        if old is None:
            raise FileNotFoundError(
                errno.ENOENT, explain(f"{call}: there is no such folder.", expected="a folder with meta.json"), name
            ) from None
        root = Descriptor(old, flags)
    except NotADirectoryError as err:
        hint = "tdfunc.load reads a .safetensors file."
        raise NotADirectoryError(
            errno.ENOTDIR, explain(f"{call}: this is a file.", expected="a folder with meta.json", hint=hint), name
        ) from err
    with root as fd:
        yield fd


@contextmanager
def _naming(name: str, call: str) -> Generator[None, None, None]:
    try:
        yield
    except (CorruptCheckpointError, TreeStructureError, UnsupportedError) as err:
        raise type(err)(f"{call} {name}: {err}") from err
    except FileNotFoundError as err:
        what = explain(f"{call}: the folder has no meta.json.", expected="a memmap folder")
        raise FileNotFoundError(errno.ENOENT, what, name) from err


def _was_replaced(root: int, name: str) -> bool:
    mine = os.fstat(root)
    try:
        now = os.stat(name)
    except OSError:
        return True
    return (mine.st_dev, mine.st_ino) != (now.st_dev, now.st_ino)


# -- writing ----------------------------------------------------------------------------------------------------


def start(task: Callable[[], Any], call: str, num_threads: int, early: bool, share_non_tensor: bool) -> Any:
    """Run a write, or (as tensordict: only with threads) start it and return a future."""
    threads = _threads(num_threads, call)
    if share_non_tensor:
        raise error(
            ValueError,
            f"{call}: non-tensor data cannot be shared.",
            expected="share_non_tensor=False",
            got="True",
            hint="a tree does not change, so neither do its non-tensor values: each process has them as written.",
        )
    if not (early and threads):
        return task()
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"tdfunc-{call}")
    future: Future[Any] = pool.submit(task)
    pool.shutdown(wait=False)
    return future


def _threads(count: Any, call: str) -> int:
    count = as_count(count)
    if type(count) is not int or count < 0:
        raise error(ValueError, f"{call}: num_threads.", expected="a number, 0 for none", got=repr(count))
    return count


def _each(fn: Callable[[In], Out], items: Sequence[In], threads: int) -> list[Out]:
    if threads < 2 or len(items) < 2:
        return [fn(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="tdfunc-memmap") as pool:
        return list(pool.map(fn, items))


def write_folder(
    call: str,
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    threads: int,
    existsok: bool,
    sync: bool,
    one_file: bool = False,
) -> Any:
    """Write a tree to a folder (or to files without a name) and return it on these files, mapped for writing.

    With `one_file` a tensor under two keys gets one file with two names, as declared ties do.
    """
    target = _target(td, prefix, call)
    plan = plan_folder(td, call)
    if one_file:
        plan = _with_one_file(plan)
    _check_existing(plan, target, call, copy_existing)

    def fill(folder: str, file: FileLeaf) -> None:
        _write_leaf(os.path.join(folder, file.name), file, target)

    return _commit(target, plan, fill, call, threads, existsok, sync)


def _with_one_file(plan: FolderPlan) -> FolderPlan:
    """Give each tensor one file; what else has it under its key is a second name of that."""
    # The name that the leaves remember is one of a leaf, not of non-tensor data that are the same tensor.
    first = {id(file.leaf): file for file in sorted(reversed(plan.files), key=attrgetter("is_value"), reverse=True)}
    same = [(file.name, first[id(file.leaf)].name) for file in plan.files if file is not first[id(file.leaf)]]
    return plan._replace(files=list(first.values()), same=same)


def _make_room(
    td: TensorCollection, prefix: "str | os.PathLike[str] | None", threads: int, existsok: bool, sparse_ok: bool
) -> Any:
    call = "memmap_like"
    target = _target(td, prefix, call)
    plan = plan_folder(td, call, values=False)
    for file in plan.files:
        if file.is_value and file.leaf.is_meta:
            raise UnsupportedError(
                f"memmap_like: the non-tensor data at {dotted(file.path)!r} have no values; nothing was written.",
                expected="values, which are kept",
                got="a tensor on the meta device",
            )
    if not sparse_ok:
        _check_space(target, plan.size_bytes)

    def fill(folder: str, file: FileLeaf) -> None:
        if file.is_value:
            _write_leaf(os.path.join(folder, file.name), file, None)
            return
        with create(os.path.join(folder, file.name)) as fd:
            try:
                os.ftruncate(fd, file.size_bytes)
            except (OSError, OverflowError) as err:
                if isinstance(err, OSError) and err.errno != errno.EFBIG:
                    raise
                what = f"memmap_like: leaf {dotted(file.path)!r} is larger than a file can be; nothing was written."
                expected, got = "a size that the file system has", f"{file.size_bytes} bytes"
                raise OSError(errno.EFBIG, explain(what, expected=expected, got=got)) from err

    return _commit(target, plan, fill, call, threads, existsok, sync=False)


def _target(td: Any, prefix: Any, call: str) -> str | None:
    if not isinstance(td, TensorCollection):
        raise error(TypeError, f"{call}: this is no tree.", expected="a TensorDict", got=type(td).__name__)
    if is_fake(None):
        raise UnsupportedError(
            f"{call}: a mode is active under which tensors have no values.",
            got=type(torch.empty(0, device="cpu")).__name__,
            hint="write outside of FakeTensorMode.",
        )
    if prefix is None:
        return None
    target = os.path.realpath(local_folder(prefix, call, "give it a name: the current folder cannot be replaced."))
    if target.endswith(".safetensors"):
        raise error(
            ValueError,
            f"{call} {target}: this is the name of a file.",
            got=".safetensors",
            hint="tdfunc.save(tree, path) writes one safetensors file; a memmap is a folder of any other name.",
        )
    return target


def _check_existing(plan: FolderPlan, target: str | None, call: str, copy_existing: bool) -> None:
    """Raise for a leaf that is on a file elsewhere: writing it would copy what may be a large data set."""
    if copy_existing:
        return
    for file in plan.files:
        found = mapped_file(file.leaf)
        if found is not None and (target is None or found.path != os.path.join(target, file.name)):
            raise error(
                FileExistsError,
                f"{call}: leaf {dotted(file.path)!r} is on another file already; nothing was written.",
                expected="a leaf in memory" + (f", or on {os.path.join(target, file.name)}" if target else ""),
                got=str(found.path or "a file without a name (memmap without a prefix)"),
                hint="copy_existing=True copies it.",
            )


def _check_space(target: str | None, size_bytes: int) -> None:
    folder = target or tempfile.gettempdir()
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise OSError(
            errno.ENOSPC,
            explain(
                "memmap_like: the file system has less free space than the tree needs.",
                expected=f"{size_bytes} bytes",
                got=f"{free} bytes",
                hint="sparse_ok=True makes the files anyway; a write then ends the process when the disk is full.",
            ),
            folder,
        )


def _commit(
    target: str | None,
    plan: FolderPlan,
    fill: Callable[[str, FileLeaf], None],
    call: str,
    threads: int,
    existsok: bool,
    sync: bool,
) -> TensorCollection:
    """Write a folder, map it for writing, and put it in its place."""
    check_maps(len(plan.files), call)

    def write(folder: str) -> TensorCollection:
        with outside_transforms():
            write_files(folder, plan, fill, threads)
            with Descriptor(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) as root:
                return _read(root, target, "r+", threads, (), plan.types, None, False)

    if target is None:
        # The files have no name once they are mapped, and go with the last tensor on them.
        with tempfile.TemporaryDirectory(prefix="tdfunc-memmap-") as folder:
            return write(folder)
    return replace_folder(target, write, call=call, exist_ok=existsok, sync=sync)


def write_files(folder: str, plan: FolderPlan, fill: Callable[[str, FileLeaf], None], threads: int) -> None:
    """Write all that a plan names into an empty folder."""
    for name, text in plan.metas:
        place = os.path.join(folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "x", encoding="utf-8", newline="") as file:
            file.write(text)
    _each(partial(fill, folder), plan.files, threads)
    for name, first in plan.links:
        _link(os.path.join(folder, first), os.path.join(folder, name))
    for name, first in plan.same:
        if not _link(os.path.join(folder, first), os.path.join(folder, name), copy=False):
            raise UnsupportedError(
                f"memmap_: {name} and {first} are one tensor, and the file system gives no file two names.",
                hint="td.tie(...) says that they are one; or td.clone() first.",
            )


def create(path: str) -> Descriptor:
    """Make a new file."""
    return Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)


def _write_leaf(path: str, file: FileLeaf, target: str | None) -> None:
    if target is not None and _keep_file(path, file, os.path.join(target, file.name)):
        return
    with create(path) as fd, torch.no_grad():
        for piece in pieces(file.leaf):
            write_all(fd, piece)


def _keep_file(path: str, file: FileLeaf, place: str) -> bool:
    """Give a leaf that is on the file of this very place that file again, with everybody who has it mapped."""
    found, leaf = mapped_file(file.leaf), file.leaf
    if found is None or found.mode != "r+" or found.path != place or found.offset or not leaf.is_contiguous():
        return False
    if found.size_bytes != file.size_bytes or not _link(place, path, copy=False):
        return False
    now = os.stat(path)
    if (now.st_dev, now.st_ino) == found.file_id and now.st_size == file.size_bytes:
        return True
    os.unlink(path)
    return False


def _link(source: str, path: str, *, copy: bool = True) -> bool:
    """Give a file a second name; where the file system has none, copy it."""
    try:
        os.link(source, path)
    except OSError:
        if copy:
            shutil.copyfile(source, path)
        return False
    return True


def is_memmap(tree: TensorCollection) -> bool:
    """Whether every leaf with elements is on a mapped file."""
    leaves = [leaf for _, leaf in iter_leaves(tree) if not isinstance(leaf, Tensor) or leaf.numel()]
    return bool(leaves) and all(mapped_file(leaf) is not None for leaf in leaves)
