"""The methods of a tree that write it to a folder of mapped files, and open one."""

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from tdfunc.core.collection import TensorCollection
from tdfunc.core.memory import MapMode
from tdfunc.core.types import Device
from tdfunc.ops.edits import storage_writes
from tdfunc.storage.api import load
from tdfunc.storage.memmap import read, write
from tdfunc.storage.tree.build import Classes

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Self

    PathLike: TypeAlias = str | os.PathLike[str]

_FOLDER_OPTIONS = frozenset({"out", "num_threads", "mode"})


class MemmapMethods(TensorCollection):
    """Trees in folders of mapped files."""

    __slots__ = ()

    def memmap(
        self, prefix: "PathLike | None" = None, copy_existing: bool = False, *, num_threads: int = 0,
        return_early: bool = False, share_non_tensor: bool = False, existsok: bool = True, sync: bool = False,
    ) -> Any:  # fmt: skip
        """Write every leaf to its own file in a folder, and return the tree on these files.

        The folder has tensordict's layout, and each library opens the folders of the other. tensordict ignores the
        fields that only tdfunc has (names, order, kinds, ties, classes, `requires_grad`). The folder is replaced as a
        whole: a process that is killed leaves the old folder, and trees that were loaded from it keep their values.
        In-place writes to the returned leaves reach the files.

        Args:
            prefix: The folder, created if it does not exist. Without it the files have no name and are deleted with
                the tree.
            copy_existing: Copy leaves that are on other files already, instead of refusing them.
            num_threads: The number of threads that write.
            return_early: With threads, return a `concurrent.futures.Future` of the tree at once.
            share_non_tensor: Must be False: a tree does not change, so there is nothing to share.
            existsok: Replace a folder that contains a memmapped tree.
            sync: Wait until everything is on the disk. Without it, a power failure can undo or damage the write; a
                crash of the program cannot.

        Raises:
            UnsupportedError: A folder cannot hold a leaf, value or key unchanged; nothing was written.
            FileExistsError: A leaf is on another file, or the folder contains other files, or (with `existsok=False`)
                any file.
            ValueError: The name ends in `.safetensors`, or `share_non_tensor` is True.
            OSError: Writing failed; an old folder is unchanged.

        Examples:
            >>> import tempfile
            >>> td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, [3])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     on_disk = td.memmap(folder)
            ...     on_disk["a"].add_(1)
            ...     TensorDict.load_memmap(folder)["a"]
            tensor([1., 1., 1.])
            tensor([1., 1., 1.])
        """
        task = partial(write.write_folder, "memmap", self, prefix, copy_existing, num_threads, existsok, sync)
        return write.start(task, "memmap", num_threads, return_early, share_non_tensor)

    def save(
        self, prefix: "PathLike | None" = None, copy_existing: bool = False, *, num_threads: int = 0,
        return_early: bool = False, share_non_tensor: bool = False, existsok: bool = True, sync: bool = False,
    ) -> Any:  # fmt: skip
        """Write the tree to a memmap folder, like `memmap`; `tdfunc.save` writes one safetensors file.

        The arguments are the arguments of `memmap`: without `prefix` the files have no name and are deleted with the
        tree.

        Examples:
            >>> TensorDict({"a": torch.zeros(3)}).save().is_memmap()
            True
        """
        return self.memmap(
            prefix, copy_existing, num_threads=num_threads, return_early=return_early,
            share_non_tensor=share_non_tensor, existsok=existsok, sync=sync,
        )  # fmt: skip

    def dumps(
        self, prefix: "PathLike | None" = None, copy_existing: bool = False, *, num_threads: int = 0,
        return_early: bool = False, share_non_tensor: bool = False, existsok: bool = True, sync: bool = False,
    ) -> Any:  # fmt: skip
        """Write the tree to a memmap folder, like `save`."""
        return self.save(
            prefix, copy_existing, num_threads=num_threads, return_early=return_early,
            share_non_tensor=share_non_tensor, existsok=existsok, sync=sync,
        )  # fmt: skip

    def memmap_like(
        self, prefix: "PathLike | None" = None, copy_existing: bool = False, *, existsok: bool = True,
        num_threads: int = 0, return_early: bool = False, share_non_tensor: bool = False, sparse_ok: bool = False,
    ) -> Any:  # fmt: skip
        """Make a memmap folder of zeros with the shapes of this tree, and return the tree on its files.

        Non-tensor data keep their values, also if they are tensors. Expanded dimensions become real dimensions. The
        files take no space before they are written to, so this is instant.

        Args:
            prefix: The folder, as for `memmap`.
            copy_existing: Not used: no leaf is copied.
            existsok: Replace a folder that contains a memmapped tree.
            num_threads: The number of threads that make files.
            return_early: With threads, return a `concurrent.futures.Future` of the tree at once.
            share_non_tensor: Must be False, as for `memmap`.
            sparse_ok: Make the files also without the free space that the tree requires. A write to a full disk then
                ends the process.

        Raises:
            OSError: There is not enough free space.
            UnsupportedError: A folder cannot hold a leaf, value or key; nothing was written.
            FileExistsError: The folder contains other files, or (with `existsok=False`) any file.

        Examples:
            >>> import tempfile
            >>> row = TensorDict({"image": torch.zeros(3, 4, dtype=torch.uint8), "label": torch.tensor(0)})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     data = row.expand(1000).memmap_like(folder)
            ...     data = data.at[7].set_(row.replace(label=torch.tensor(3)))
            ...     data["image"].shape, TensorDict.load_memmap(folder)[7]["label"]
            (torch.Size([1000, 3, 4]), tensor(3))
        """
        del copy_existing
        task = partial(write.make_room, self, prefix, num_threads, existsok, sparse_ok)
        return write.start(task, "memmap_like", num_threads, return_early, share_non_tensor)

    def memmap_(
        self, prefix: "PathLike | None" = None, copy_existing: bool = False, *, num_threads: int = 0,
        return_early: bool = False, share_non_tensor: bool = False, existsok: bool = True,
    ) -> Any:  # fmt: skip
        """Write the tree to a memmap folder, move the storage of every leaf onto its file, and return this tree.

        As with `Tensor.share_memory_`, the tensors stay the same objects, so all references to them use the files.
        Earlier views of a leaf keep the old memory. A tensor under two keys gets one file with two names.

        Args:
            prefix: The folder, as for `memmap`.
            copy_existing: Copy leaves that are on other files already, instead of refusing them.
            num_threads: The number of threads that write.
            return_early: With threads, return a `concurrent.futures.Future` at once.
            share_non_tensor: Must be False, as for `memmap`.
            existsok: Replace a folder that contains a memmapped tree.

        Raises:
            UnsupportedError: A leaf is not in the memory of the CPU, or cannot be stored unchanged.
            FileExistsError: A leaf or the folder is as described for `memmap`.
        """
        task = partial(write.move_onto_files, self, prefix, copy_existing, num_threads, existsok)
        return write.start(task, "memmap_", num_threads, return_early, share_non_tensor)

    def memmap_refresh_(self) -> "Self":
        """Map every leaf again by the name of its file, after another process has written a new folder.

        All leaves of one folder come from one save, also while another process replaces it. Writes to leaves that are
        mapped copy-on-write are lost.

        Raises:
            UnsupportedError: A leaf is not on a file with a name; nothing was changed.
            LeafMismatchError: A file is missing, or contains a leaf of another dtype or shape; nothing was changed.
            CorruptCheckpointError: The folder is damaged; nothing was changed.
        """
        return write.refresh_(self)

    def is_memmap(self) -> bool:
        """Return whether every leaf with elements is on a file."""
        return write.is_memmap(self)

    @classmethod
    def load_memmap(
        cls, prefix: "PathLike", device: "Device | None" = None, non_blocking: bool = False, *,
        out: TensorCollection | None = None, num_threads: int = 0, mode: MapMode = "c", classes: Classes = (),
    ) -> "Self":  # fmt: skip
        """Open a memmap folder, or one inside it, of tdfunc or tensordict; a leaf is read when it is first used.

        By default the leaves are mapped copy-on-write: they can be written to in place (a module that gets them
        trains), and the files do not change. Functions of tdfunc that end in `_` refuse such leaves.

        Args:
            prefix: The folder.
            device: The device to which the leaves are copied. `"meta"` and `FakeTensorMode` read no leaf.
            non_blocking: Copy to the device asynchronously.
            out: A tree whose leaves get the values; it is returned.
            num_threads: The number of threads that open files.
            mode: `"c"` for copy-on-write, `"r+"` for leaves whose in-place writes reach the files.
            classes: The classes of the tree's nodes, as for `tdfunc.load`. Tensordict's tensorclasses are loaded as
                `TensorDict`s unless a class of the same name is given.

        Raises:
            FileNotFoundError: The folder does not exist, or is not a memmap.
            CorruptCheckpointError: A file is missing, has the wrong size, is malformed, or is a link out of the folder.
            UnsupportedError: This machine does not have a class or dtype, or the folder contains pickled data, which
                are never read.
            MissingKeyError: `out` has other keys.
            ValueError: The mode is unknown.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}).memmap(folder)
            ...     TensorDict.load_memmap(folder + "/b")["c"], TensorDict.load_memmap(folder, "meta")["a"].device
            (tensor([0., 0.]), device(type='meta'))
        """
        known = _and_own(classes, cls)
        tree = read.load_memmap(
            prefix, device, non_blocking, out=out, num_threads=num_threads, mode=mode, classes=known
        )
        if out is not None:
            return tree
        return _as_own(tree, cls)

    @classmethod
    def load(
        cls, path: "PathLike", device: "Device | None" = None, non_blocking: bool = False, *, classes: Classes = (),
        **options: Any,
    ) -> "Self":  # fmt: skip
        """Load a tree from a file or folder of any kind, like `tdfunc.load` and `load_memmap`.

        Args:
            path: The file or folder.
            device: The device of the leaves.
            non_blocking: The option of `load_memmap`. With this option, `out=`, `num_threads=` or `mode=` the path must
                be a memmap folder.
            classes: The classes of the tree's nodes, as for `tdfunc.load`.
            **options: The other options of `tdfunc.load`, or of `load_memmap`.

        Raises:
            FileNotFoundError: The file does not exist, or an option of `load_memmap` was given for another folder.
            NotADirectoryError: Such an option was given for a file.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict({"a": torch.ones(2)}).save(folder)
            ...     TensorDict.load(folder)["a"], TensorDict.load(folder, out=TensorDict({"a": torch.zeros(2)}))["a"]
            (tensor([1., 1.]), tensor([1., 1.]))
        """
        if non_blocking or _FOLDER_OPTIONS & options.keys():
            return cls.load_memmap(path, device, non_blocking, classes=classes, **options)
        return _as_own(load(path, device=device, classes=_and_own(classes, cls), **options), cls)

    def load_memmap_(self, prefix: "PathLike", **options: Any) -> "Self":
        """Copy the values in a memmap folder into the leaves of this tree, and return it.

        Args:
            prefix: The folder.
            **options: The other options of `load_memmap`.

        Raises:
            MissingKeyError: The folder has other keys; nothing was written.
            LeafMismatchError: A leaf has another shape or dtype, or is mapped copy-on-write; nothing was written.
        """
        read.load_memmap(prefix, out=self, **options)
        return self

    def load_(self, path: "PathLike", **options: Any) -> "Self":
        """Copy the values in a file or folder of any kind into the leaves of this tree, and return it.

        Args:
            path: The file or folder, as for `tdfunc.load`.
            **options: The other options of `tdfunc.load`.

        Raises:
            MissingKeyError: The file has other keys; nothing was written.
            LeafMismatchError: A leaf has another shape or dtype, or is mapped copy-on-write; nothing was written.
        """
        # Only values are copied, so the classes of the nodes need not be here.
        tree = load(path, **{"classes": TensorCollection._open, **options})
        storage_writes.write_tree(self, tree, complete=True)
        return self


def _and_own(classes: Classes, cls: type[Any]) -> Classes:
    """Return the classes for a load: the given ones, the one whose `load` was called, and the classes of its fields."""
    if isinstance(classes, type) or cls is TensorCollection._open:
        return classes
    own: dict[str, type[Any]] = {}
    _add_annotated(cls, own)
    if isinstance(classes, Mapping):
        return {**own, **classes}
    return (*classes, *own.values())


def _add_annotated(cls: type[Any], known: dict[str, type[Any]]) -> None:
    """Add a class, and the classes in the annotations of its fields, under their recorded names."""
    known[f"{cls.__module__}:{cls.__qualname__}"] = cls
    for hint in getattr(cls, "_hints", {}).values():
        for each in (hint, *get_args(hint)):
            if isinstance(each, type) and getattr(each, "_fields", ()) and each not in known.values():
                _add_annotated(each, known)


def _as_own(tree: Any, cls: type[Any]) -> Any:
    """Return a tree as an instance of the class whose `load` was called; missing fields are None."""
    if cls is TensorCollection._open or isinstance(tree, cls) or not hasattr(cls, "from_tensordict"):
        return tree
    return cls.from_tensordict(tree, safe=False)
