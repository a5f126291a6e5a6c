"""Trees onto mapped files: a folder written as a whole, files of zeros, and the writes that end in `_`.

The layout is tensordict's (`docs/memmap.md`), so that each library opens the folders of the other.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import is_fake
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error, explain
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MappedFile, mapped_file
from tdfunc.core.types import Path
from tdfunc.storage.disk.commit import Descriptor
from tdfunc.storage.disk.raw import outside_transforms, write_all
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.memmap.folder_owned import replace_owned as replace_folder
from tdfunc.storage.memmap.layout import FileLeaf, FolderPlan, plan_folder
from tdfunc.storage.memmap.read import FolderReader, LeafFile, map_each, map_leaf, read_folder, read_tree
from tdfunc.storage.safetensors.write import pieces


def start(task: Callable[[], Any], call: str, num_threads: int, early: bool, share_non_tensor: bool) -> Any:
    """Run a write, or (as tensordict: only with threads) start it and return a future."""
    if share_non_tensor:
        raise error(
            ValueError,
            f"{call}: non-tensor data cannot be shared.",
            expected="share_non_tensor=False",
            got="True",
            hint="a tree does not change, so neither do its non-tensor values: each process has them as written.",
        )
    if not (early and num_threads):
        return task()
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"tdfunc-{call}")
    future: Future[Any] = pool.submit(task)
    pool.shutdown(wait=False)
    return future


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
    target = check_prefix(td, prefix, call)
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


def make_room(
    td: TensorCollection, prefix: "str | os.PathLike[str] | None", threads: int, existsok: bool, sparse_ok: bool
) -> Any:
    """Make files of zeros for every leaf, which take no space until they are written to."""
    call = "memmap_like"
    target = check_prefix(td, prefix, call)
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
            os.ftruncate(fd, file.size_bytes)

    return _commit(target, plan, fill, call, threads, existsok, sync=False)


def check_prefix(td: Any, prefix: Any, call: str) -> str | None:
    """Return the name of a folder that a tree can be written to; None where none is given."""
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
    target = os.path.realpath(local_folder(prefix, call))
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

    def write(folder: str) -> TensorCollection:
        with outside_transforms():
            write_files(folder, plan, fill, threads)
            with Descriptor(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) as root:
                return read_tree(root, target, "r+", threads, plan.classes)

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
    map_each(partial(fill, folder), plan.files, threads)
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


# -- writes that end in `_` ---


def move_onto_files(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    threads: int,
    existsok: bool,
) -> Any:
    """Write a folder and move the storage of every leaf onto its file."""
    for path, leaf in _tensors(td):
        if not leaf.is_cpu or (leaf.is_inference() and not torch.is_inference_mode_enabled()):
            raise UnsupportedError(
                f"memmap_: leaf {dotted(path)!r} cannot be moved onto a file.",
                expected="a tensor in the memory of the CPU, not made in inference mode",
                got=f"{leaf.device}{', an inference tensor' if leaf.is_inference() else ''}",
                hint='td.to("cpu").memmap_(prefix), or td.memmap(prefix), which returns a tree on the files.',
            )
    written = write_folder("memmap_", td, prefix, copy_existing, threads, existsok, sync=False, one_file=True)
    mapped = dict(_tensors(written))
    # A tensor under two keys has one file with two names.
    first = {id(leaf): (path, leaf) for path, leaf in reversed(_tensors(td))}
    for path, leaf in first.values():
        # As `share_memory_` the tensor stays the same object; views that were taken of it before keep the old memory.
        leaf.data = mapped[path].data
    return td


class _Place(NamedTuple):
    """A leaf, and the file that it is mapped from."""

    path: Path
    leaf: Tensor
    file: MappedFile
    # Absolute, like the folder in which it was found.
    name: str
    top: str


def refresh_(td: TensorCollection) -> Any:
    """Map every leaf again from the name of its file, which may be another file by now."""
    folders: dict[str, list[_Place]] = {}
    for path, leaf in _tensors(td):
        file = mapped_file(leaf)
        if file is not None and file.path is not None:
            top = file.root or os.path.dirname(file.path)
            folders.setdefault(top, []).append(_Place(path, leaf, file, file.path, top))
        elif leaf.numel():
            raise UnsupportedError(
                f"memmap_refresh_: leaf {dotted(path)!r} is on no file; nothing was changed.",
                expected="a leaf of a memmap folder",
                got="a tensor in memory" if file is None else "a memmap without a folder",
                hint="td.memmap(prefix), or load_memmap.",
            )
    # All files were found to fit before the first leaf changes.
    for places, mapped in [(places, _mapped_now(places)) for places in folders.values()]:
        for place, new in zip(places, mapped, strict=True):
            place.leaf.data = new
    return td


def _mapped_now(places: list[_Place]) -> list[Tensor]:
    """Map the leaves of one folder again, all from one writing of it."""
    # What is in it is replaced with it; the rest of a large folder need not be looked at.
    folder = os.path.commonpath([os.path.dirname(place.name) for place in places])

    def read(root: int) -> list[Tensor]:
        files = {leaf.name: leaf for leaf in FolderReader(root, TensorCollection._open).files}
        return [_map_again(root, folder, place, files.get(os.path.relpath(place.name, folder))) for place in places]

    try:
        return read_folder(folder, "memmap_refresh_", read)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise _gone(places[0]) from err


def _gone(place: _Place) -> LeafMismatchError:
    return LeafMismatchError(
        f"memmap_refresh_: leaf {dotted(place.path)!r} has no file any more; nothing was changed.",
        expected=place.name,
        hint="load_memmap opens what the folder holds now.",
    )


def _map_again(root: int, folder: str, place: _Place, now: LeafFile | None) -> Tensor:
    path, leaf, file, _, top = place
    if now is None:
        raise _gone(place)
    # A view of some rows does not say what the whole has for a shape.
    is_whole = leaf.numel() * leaf.element_size() == file.size_bytes
    if (now.dtype, now.size_bytes) != (leaf.dtype, file.size_bytes) or (is_whole and now.shape != leaf.shape):
        raise LeafMismatchError(
            f"memmap_refresh_: leaf {dotted(path)!r}: its file holds another one by now; nothing was changed.",
            expected=f"{leaf.dtype}, {file.size_bytes} bytes" + (f", shape {list(leaf.shape)}" if is_whole else ""),
            got=f"{now.dtype}, {now.size_bytes} bytes, shape {list(now.shape)}",
            hint="load_memmap opens what the folder holds now.",
        )
    whole = map_leaf(root, now, folder, file.mode, top)
    return whole.view(-1).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _tensors(td: TensorCollection) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in iter_leaves(td) if isinstance(leaf, Tensor)]
