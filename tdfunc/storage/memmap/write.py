"""Trees onto mapped files: a folder written as a whole, files of zeros, and the writes that end in `_`.

The layout is tensordict's (`docs/formats.md`), so that each library opens the folders of the other.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import ConcurrencyError, LeafMismatchError, UnsupportedError, error, explain
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MappedFile, mapped_file
from tdfunc.core.system import platform
from tdfunc.core.types import Path
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.commit import Descriptor, Folder
from tdfunc.storage.disk.handlers import is_in_handler
from tdfunc.storage.disk.raw import outside_transforms, write_all
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.memmap.folder import FolderReader
from tdfunc.storage.memmap.layout import META, FileLeaf, FolderPlan, Owned, owned_names, plan_folder
from tdfunc.storage.memmap.leaf import LeafFile, map_leaf
from tdfunc.storage.memmap.read import map_each, read_folder, read_tree
from tdfunc.storage.safetensors.write import pieces
from tdfunc.storage.tree.decode import MALFORMED
from tdfunc.storage.tree.specs import parse_json

T = TypeVar("T")


def start(task: Callable[[], Any], call: str, num_threads: int, early: bool, share_non_tensor: bool) -> Any:
    """Run a write, or start it and return a future (like tensordict, only with threads)."""
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
    if is_in_handler():
        done: Future[Any] = Future()
        done.set_result(task())
        return done
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"tdfunc-{call}")
    future: Future[Any] = pool.submit(task)
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

    With `one_file`, a tensor under two keys gets one file with two names, like tied leaves.
    """
    target = check_prefix(prefix, call)
    plan = plan_folder(td, call)
    if one_file:
        plan = _unite_files(plan)
    if not copy_existing:
        for file in plan.files:
            _check_not_mapped(file, target, call)

    def fill(folder: str, file: FileLeaf) -> None:
        _write_leaf(os.path.join(folder, file.name), file, target)

    return _commit(target, plan, fill, call, threads, existsok, sync)


def _unite_files(plan: FolderPlan) -> FolderPlan:
    """Give a tensor under several keys one file; its other names become second names of that file."""
    # Leaves remember the name of a leaf, not the name of non-tensor data that are the same tensor.
    ranked = sorted(plan.files, key=attrgetter("is_value"))
    firsts: dict[int, FileLeaf] = {}
    for file in ranked:
        firsts.setdefault(id(file.leaf), file)
    same: list[tuple[str, str]] = []
    for file in plan.files:
        first = firsts[id(file.leaf)]
        if file is not first:
            same.append((file.name, first.name))
    return plan._replace(files=list(firsts.values()), same=same)


def _check_not_mapped(file: FileLeaf, target: str | None, call: str) -> None:
    """Raise if a leaf is on another file than its own: a write would copy a data set, which may be large."""
    found = mapped_file(file.leaf)
    if found is None:
        return
    expected = "a leaf in memory"
    if target is not None:
        own_place = os.path.join(target, file.name)
        if found.path == own_place:
            return
        expected += f", or on {own_place}"
    raise error(
        FileExistsError,
        f"{call}: leaf {dotted(file.path)!r} is on another file already; nothing was written.",
        expected=expected,
        got=str(found.path or "a file without a name (memmap without a prefix)"),
        hint="copy_existing=True copies it.",
    )


def make_room(
    td: TensorCollection, prefix: "str | os.PathLike[str] | None", threads: int, existsok: bool, sparse_ok: bool
) -> Any:
    """Make a file of zeros for every leaf; a file takes no space until it is written to."""
    call = "memmap_like"
    target = check_prefix(prefix, call)
    plan = plan_folder(td, call, values=False)
    for file in plan.files:
        if file.is_value and file.leaf.is_meta:
            raise UnsupportedError(
                f"memmap_like: the non-tensor data at {dotted(file.path)!r} have no values; nothing was written.",
                expected="values, which are kept",
                got="a tensor on the meta device",
            )
    if not sparse_ok:
        _check_space(target or tempfile.gettempdir(), plan.size_bytes)

    def fill(folder: str, file: FileLeaf) -> None:
        if file.is_value:
            _write_leaf(os.path.join(folder, file.name), file, None)
            return
        with create(os.path.join(folder, file.name)) as fd:
            os.ftruncate(fd, file.size_bytes)

    return _commit(target, plan, fill, call, threads, existsok, sync=False)


def _check_space(place: str, size_bytes: int) -> None:
    """Raise unless the file system of a folder, which may not exist yet, has free space."""
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if free >= size_bytes:
        return
    message = explain(
        "memmap_like: the file system does not have the free space that the tree needs.",
        expected=f"{size_bytes} bytes",
        got=f"{free} bytes",
        hint="sparse_ok=True makes the files anyway; a write then ends the process when the disk is full.",
    )
    raise OSError(errno.ENOSPC, message, place)


def check_prefix(prefix: Any, call: str) -> str | None:
    """Return the name of a folder that a tree can be written to; None if no name is given."""
    if prefix is None:
        return None
    target = os.path.realpath(local_folder(prefix, call))
    if target.endswith(".safetensors"):
        raise error(
            ValueError,
            f"{call} {target}: this is the name of a safetensors file, not of a folder.",
            got=".safetensors",
            hint="tdfunc.save(tree, path) writes one safetensors file; a memmap is a folder of any other name.",
        )
    return target


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
            with Folder(folder) as root:
                return read_tree(root, target, "r+", threads, plan.classes)

    def write_alone(folder: str) -> os.stat_result:
        with outside_transforms():
            write_files(folder, plan, fill, threads)
            return os.stat(folder)

    if target is None:
        # The files have no name once they are mapped, and go with the last tensor on them.
        with (
            commit.naming(call, tempfile.gettempdir(), "nothing was written"),
            platform.passing_folder("tdfunc-memmap-") as folder,
        ):
            return write(folder)
    if platform.HOLDS_NAMES:
        # A folder with mapped files could not be moved to its place.
        made = replace_folder(target, write_alone, call=call, exist_ok=existsok, sync=sync)
        return _map_new(target, made, plan, call, threads)
    return replace_folder(target, write, call=call, exist_ok=existsok, sync=sync)


def _map_new(target: str, made: os.stat_result, plan: FolderPlan, call: str, threads: int) -> TensorCollection:
    """Map a folder after it has taken its place."""
    with Folder(target) as root, outside_transforms():
        if os.path.samestat(root.status(), made):
            return read_tree(root, target, "r+", threads, plan.classes)
    raise ConcurrencyError(
        f"{call} {target}: the folder was written, and another save replaced it before it was mapped.",
        hint="load_memmap opens what is there now.",
    )


def write_files(folder: str, plan: FolderPlan, fill: Callable[[str, FileLeaf], None], threads: int) -> None:
    """Write the files of a plan into an empty folder."""
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
                hint="td.tie(...) makes them one; or td.clone() first.",
            )


# -- the folder -------------------------------------------------------------------------------------------------


def replace_folder(path: str, write: Callable[[str], T], *, call: str, exist_ok: bool, sync: bool) -> T:
    """Give `path` the contents that `write` puts into an empty folder; return the result of `write`.

    Raises:
        FileExistsError: The folder may not be replaced, see `check_target`.
        OSError: Writing failed; the old folder is unchanged.
    """
    # A link stays, and the folder that it leads to is replaced.
    path = os.path.realpath(path)
    check = partial(check_target, path, call, exist_ok=exist_ok)
    check()
    with commit.naming(call, path, "the folder was not replaced"):
        os.makedirs(os.path.dirname(path), exist_ok=True)

    def fill(folder: str) -> T:
        result = write(folder)
        if sync:
            commit.sync_files(folder)
        return result

    # Checked again: another process may have put something there since.
    return commit.replace_folder(path, fill, call=call, check=check, fsync=sync)


def check_target(path: str, call: str, *, exist_ok: bool) -> None:
    """Raise unless a path is free, or has an empty folder or a memmap folder without other files.

    A folder is replaced as a whole, so other files in it would be deleted.
    """
    # A current folder that was deleted is not inside of this one.
    with suppress(FileNotFoundError):
        here = os.path.realpath(os.getcwd())
        if os.path.join(here, "").startswith(os.path.join(path, "")):
            raise error(
                FileExistsError,
                f"{call} {path}: the folder contains the current folder, and would be replaced.",
                expected="a folder without the current one",
                got=f"the current folder {here}",
                hint="name a folder in it, such as './tree', or call os.chdir() first.",
            )
    try:
        if not os.listdir(path):
            return
    except FileNotFoundError:
        return
    except NotADirectoryError as err:
        raise error(
            FileExistsError, f"{call} {path}: this is a file.", expected="the name of a folder", got="a file"
        ) from err
    if not exist_ok:
        raise error(
            FileExistsError,
            f"{call} {path}: the folder exists.",
            expected="a new or empty one",
            hint="existsok=True replaces it, as a whole.",
        )
    # Compared with one writing of the folder, while others may replace it.
    read_folder(path, call, lambda _: _check_owned(path, call))


def _check_owned(path: str, call: str) -> None:
    """Raise if a folder contains a file that its `meta.json` files do not name."""
    # Folders to check, and whether a `meta.json` around them names them.
    waiting: list[tuple[str, bool]] = [(path, True)]
    while waiting:
        folder, is_named = waiting.pop()
        owned = _read_owned(folder) if is_named else Owned(set(), set())
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    is_named = entry.name in owned.folders or (owned.numbered and entry.name.isdigit())
                    # Nothing is lost with a folder without files.
                    if is_named or not commit.LEFTOVER.fullmatch(entry.name):
                        waiting.append((entry.path, is_named))
                elif entry.name not in owned.files:
                    raise error(
                        FileExistsError,
                        f"{call} {path}: the folder has files that are not part of a memmapped tree.",
                        expected=f"a new or empty folder, or one that holds the files that its {META} names",
                        got=entry.path,
                        hint="choose another folder, or move the files to keep and delete this one.",
                    )


def _read_owned(folder: str) -> Owned:
    """Return the names that the `meta.json` in a folder describes: none if it is missing or malformed."""
    try:
        with open(os.path.join(folder, META), "rb") as file:
            return owned_names(parse_json(file.read()))
    except (FileNotFoundError, IsADirectoryError, *MALFORMED):
        return Owned(set(), set())


# -- files ------------------------------------------------------------------------------------------------------


def create(path: str) -> Descriptor:
    """Make a new file."""
    return Descriptor(path, platform.NEW_FILE, 0o666)


def _write_leaf(path: str, file: FileLeaf, target: str | None) -> None:
    if target is not None and _keep_file(path, file, os.path.join(target, file.name)):
        return
    with create(path) as fd, torch.no_grad():
        for piece in pieces(file.leaf):
            write_all(fd, piece)


def _keep_file(path: str, file: FileLeaf, place: str) -> bool:
    """Give a leaf that is mapped from the file in this place that file again, which other mappings share."""
    found = mapped_file(file.leaf)
    leaf = file.leaf
    if found is None or found.mode != "r+" or found.path != place:
        return False
    is_whole = not found.offset and leaf.is_contiguous()
    if not is_whole:
        return False
    if not _link(place, path, copy=False):
        return False
    now = os.stat(path)
    if (now.st_dev, now.st_ino) == found.file_id and now.st_size == file.size_bytes:
        return True
    platform.remove(path)
    return False


def _link(source: str, path: str, *, copy: bool = True) -> bool:
    """Give a file a second name; if the file system cannot, copy it."""
    try:
        os.link(source, path)
    except OSError:
        if copy:
            shutil.copyfile(source, path)
        return False
    return True


def is_memmap(tree: TensorCollection) -> bool:
    """Return whether every leaf with elements is on a mapped file."""
    leaves = [leaf for _, leaf in iter_leaves(tree) if not isinstance(leaf, Tensor) or leaf.numel()]
    return bool(leaves) and all(mapped_file(leaf) is not None for leaf in leaves)


# -- writes that end in `_` -------------------------------------------------------------------------------------


def move_onto_files(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    threads: int,
    existsok: bool,
) -> Any:
    """Write a folder and move the storage of every leaf onto its file."""
    for path, leaf in _tensors(td):
        is_frozen = leaf.is_inference() and not torch.is_inference_mode_enabled()
        if not leaf.is_cpu or is_frozen:
            kind = ", an inference tensor" if leaf.is_inference() else ""
            raise UnsupportedError(
                f"memmap_: leaf {dotted(path)!r} cannot be moved onto a file.",
                expected="a tensor in the memory of the CPU, not made in inference mode",
                got=f"{leaf.device}{kind}",
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


class _MappedLeaf(NamedTuple):
    """A leaf that is on a file with a name."""

    path: Path
    leaf: Tensor
    file: MappedFile
    file_name: str


def refresh_(td: TensorCollection) -> Any:
    """Map every leaf again by the name of its file, which may be another file now."""
    folders: dict[str, list[_MappedLeaf]] = {}
    for path, leaf in _tensors(td):
        file = mapped_file(leaf)
        if file is not None and file.path is not None:
            top = file.root or os.path.dirname(file.path)
            folders.setdefault(top, []).append(_MappedLeaf(path, leaf, file, file.path))
        elif leaf.numel():
            raise UnsupportedError(
                f"memmap_refresh_: leaf {dotted(path)!r} is on no file; nothing was changed.",
                expected="a leaf of a memmap folder",
                got="a tensor in memory" if file is None else "a memmap without a folder",
                hint="td.memmap(prefix), or load_memmap.",
            )
    # All files must be found to fit before the first leaf changes.
    mapped = [_map_again(top, leaves) for top, leaves in folders.items()]
    for leaves, new_leaves in zip(folders.values(), mapped, strict=True):
        for old, new in zip(leaves, new_leaves, strict=True):
            old.leaf.data = new
    return td


def _map_again(top: str, leaves: list[_MappedLeaf]) -> list[Tensor]:
    """Map the leaves of one folder again, all from one save."""
    # The folder of these leaves is replaced with the larger one around it, which need not be read.
    folder = os.path.commonpath([os.path.dirname(leaf.file_name) for leaf in leaves])

    def read(root: Folder) -> list[Tensor]:
        files = {file.name: file for file in FolderReader(root, TensorCollection._open).files}
        return [_map_leaf_again(root, leaf, files, folder, top) for leaf in leaves]

    try:
        return read_folder(folder, "memmap_refresh_", read)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise LeafMismatchError(
            f"memmap_refresh_: leaf {dotted(leaves[0].path)!r} is not in its file any more; nothing was changed.",
            expected=leaves[0].file_name,
            got="no folder of this name",
        ) from err


def _map_leaf_again(root: Folder, mapped: _MappedLeaf, files: dict[str, LeafFile], folder: str, top: str) -> Tensor:
    """Map one leaf from its file among the files of a folder."""
    leaf = mapped.leaf
    name = os.path.relpath(mapped.file_name, folder).replace(os.sep, "/")
    now = files.get(name)
    if now is None or not _is_same_kind(mapped, now):
        size = f"{mapped.file.size_bytes} bytes in {mapped.file_name}"
        got = "no such leaf"
        if now is not None:
            got = f"{now.dtype}, {now.size_bytes} bytes, shape {list(now.shape)}"
        raise LeafMismatchError(
            f"memmap_refresh_: leaf {dotted(mapped.path)!r} is not in its file any more; nothing was changed.",
            expected=f"{leaf.dtype}, {size}, for shape {list(leaf.shape)}",
            got=got,
            hint="load_memmap opens the folder as it is now.",
        )
    whole = map_leaf(root, now, folder, mapped.file.mode, top)
    return whole.view(-1).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _is_same_kind(mapped: _MappedLeaf, now: LeafFile) -> bool:
    """Return whether a file has the dtype, size and (if it is known) shape of the leaf that was mapped from it."""
    leaf = mapped.leaf
    if now.dtype != leaf.dtype or now.size_bytes != mapped.file.size_bytes:
        return False
    # A view of some rows does not have the shape of the whole.
    is_whole = leaf.numel() * leaf.element_size() == mapped.file.size_bytes
    return not is_whole or now.shape == leaf.shape


def _tensors(td: TensorCollection) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in iter_leaves(td) if isinstance(leaf, Tensor)]
