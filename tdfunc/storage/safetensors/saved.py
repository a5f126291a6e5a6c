"""`open`: a checkpoint whose leaves are read one by one, when they are used."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from tdfunc.core.collection import leaf_paths
from tdfunc.core.context import is_fake
from tdfunc.core.errors import MissingKeyError, UnsupportedError, error
from tdfunc.core.keys import FilterLike, dotted, unravel
from tdfunc.core.types import Device, NestedKey, Path
from tdfunc.ops.base.reading import get_value, has
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import LocalBytes, LocalFiles, RemoteFiles, find, is_remote
from tdfunc.storage.safetensors.contents import Contents, Leaf, warn_unlisted
from tdfunc.storage.safetensors.folder import open_contents
from tdfunc.storage.safetensors.read import parsing, plan_rows, read_leaf, read_rows
from tdfunc.storage.safetensors.select import Choice, outline_tree, read_tree
from tdfunc.storage.tree.build import Classes, flag_leaf, move_leaf
from tdfunc.storage.tree.encode import IS_VALUE
from tdfunc.storage.tree.objects import OBJECT

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict


def open(
    path: str | os.PathLike[str],
    *,
    device: "Device | None" = None,
    classes: "Classes" = (),
    verify: bool = True,
) -> "SavedTree":
    """Open a safetensors file or a folder of shards without reading its leaves.

    Args:
        path: The file or folder. With fsspec also a URL, from which only the needed ranges are read.
        device: The device of the leaves. By default the device of the saved tree.
        classes: The classes of the tree's nodes, as in `load`.
        verify: Compare the checksum of the header now, and the checksum of each leaf when it is read.

    Returns:
        A handle that reads like a tree. It keeps the files open, so a save over them does not change the values that it
        reads; after a save over a URL its reads raise a `ConcurrencyError`. Close it, or use it in a `with` statement.

    Raises:
        CorruptCheckpointError: A header was damaged or altered.
        UnsupportedError: Another version of tdfunc wrote the file.
        FileNotFoundError: The file does not exist, or the folder does not contain a checkpoint.

    Examples:
        >>> import tempfile
        >>> td = TensorDict({"head": {"weight": torch.ones(2, 3)}, "body": {"weight": torch.zeros(1000, 3)}})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tdf.save(td, folder + "/tree.safetensors")
        ...     with tdf.open(folder + "/tree.safetensors") as f:
        ...         head, rows = f["head"].load(), f.slice(("body", "weight"), slice(0, 2))
        >>> head["weight"].shape, rows.shape
        (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    name = find(path)
    if is_remote(name):
        files = RemoteFiles(name, fetch=False)
    else:
        files = LocalFiles()
    place = None
    if device is not None:
        place = torch.device(device)
    contents = open_contents(name, files, verify=verify)
    warn_unlisted(contents)
    return SavedTree(contents, Choice(device=place, classes=classes))


# Any: an index of torch.
def _without_lists(index: Any) -> Any:
    """Return an index with a tensor for each list of numbers: a list has had several meanings in torch."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    if not isinstance(index, list):
        return index
    try:
        if index:
            return torch.tensor(index, device="cpu")
        return torch.empty(0, dtype=torch.int64, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        # torch reports the mistake.
        return index


@final
class SavedTree:
    """A tree (or a sub-tree) in an open checkpoint; `tdfunc.open` makes it.

    It reads like a tree: `f["head", "weight"]` is a leaf, `f["head"]` another handle, and `f["note"]` plain data.
    Each read of a leaf allocates new memory. Several threads may read; `close` waits for them.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> tdf.save(TensorDict({"a": {"x": torch.ones(3), "s": "text"}}), folder.name + "/t.safetensors")
        >>> f = tdf.open(folder.name + "/t.safetensors")
        >>> list(f.keys()), f.paths(), len(f["a"]), ("a", "x") in f, f["a", "s"]
        (['a'], [('a', 'x')], 2, True, 'text')
        >>> f.close()
        >>> folder.cleanup()
    """

    __slots__ = ("_at", "_choice", "_contents", "_outline", "_root")

    def __init__(self, contents: Contents, choice: Choice, at: Path = (), root: int = 0) -> None:
        self._contents = contents
        self._choice = choice
        self._at = at
        self._root = root
        self._outline: Any = None

    def __getitem__(self, key: NestedKey) -> Any:
        """Return a leaf (which is read now), a handle for a sub-tree, or plain data.

        Raises:
            MissingKeyError: The key does not exist.
            CorruptCheckpointError: The leaf is damaged.
        """
        path = (*self._at, *unravel(key))
        self._contents.check_open()
        leaf = self._contents.leaf_at(path)
        if leaf is not None:
            return self._read(leaf)
        with parsing(self._contents.path):
            root, depth, found = self._contents.find(path)
        if found is not None:
            # Plain data: the spec holds it.
            return get_value(self.spec(), path[len(self._at) :])
        node = SavedTree(self._contents, self._choice, path[:depth], root)
        if self._contents.plan.nodes[root].get("class") == OBJECT:
            # Any: not a tree, but non-tensor data.
            data: Any = node.load()
            return data.value
        if depth == len(path):
            return node
        return get_value(node.load(), path[depth:])

    def slice(self, key: NestedKey, index: Any, *, verify: bool = False) -> Tensor:
        """Return `leaf[index]` of a leaf; only the rows that the index names are read.

        Args:
            key: The path of a leaf.
            index: An index as for a tensor: ints, slices, masks, index tensors, or a tuple of them. The first of a
                tuple chooses the rows. If it is an ellipsis, None or a mask of several dimensions, the complete leaf
                is read.
            verify: Read the complete leaf and compare its checksum; single rows do not have one.

        Raises:
            MissingKeyError: The path does not exist.
            IndexError: The index does not fit the leaf.
            TypeError: The path leads to a sub-tree or plain data.
        """
        path = unravel(key)
        index = _without_lists(index)
        contents = self._contents
        leaf = contents.leaf_at((*self._at, *path))
        if leaf is None or IS_VALUE in leaf.flags:
            raise error(
                TypeError,
                f"slice {dotted(path)!r}: there is no leaf at this path.",
                expected="the path of a leaf",
                hint=f"f[{path!r}].",
            )
        target = self._choice.device or leaf.device
        if verify or is_fake(target):
            return self._read(leaf).detach()[index]
        with outside_transforms():
            plan = plan_rows(index, leaf.spec.size)
        # An index that does not fit is not damage of the file, so it is applied outside of `reading`.
        with contents.reading():
            if plan is None:
                rest = index
                values = read_leaf(leaf.source, leaf.spec, leaf.begin, leaf.name, None)
            else:
                runs, rest = plan
                values = read_rows(leaf.source, leaf.spec, leaf.begin, runs)
        rows = values[rest]
        if target is None or target.type == "cpu":
            return rows
        with outside_transforms():
            return move_leaf(rows, target)

    def load(
        self,
        *,
        like: Any = None,  # a tree or spec, as in `tdfunc.load`
        where: "FilterLike | None" = None,
        dtype: torch.dtype | None = None,
        device: "Device | None" = None,
        classes: "Classes | None" = None,
        dequantize: bool = False,
    ) -> "TensorDict":
        """Read the (sub-)tree, or the leaves that a filter chooses, with the options of `tdfunc.load`."""
        place = self._choice.device
        if device is not None:
            place = torch.device(device)
        if classes is None:
            classes = self._choice.classes
        sources = self._contents.sources
        # The whole file is mapped; of parts, no more than they are is read. A map that this handle reads is its own.
        mapped = not self._at and where is None and all(isinstance(source.data, LocalBytes) for source in sources)
        choice = Choice(where, like, dtype, place, classes, dequantize)
        # Any: the file decides the class of the tree.
        tree: Any = read_tree(self._contents, choice, root=self._root, mapped=mapped)
        return tree

    def spec(self) -> "TensorDict":
        """Return the (sub-)tree on the meta device: everything except the values."""
        self._contents.check_open()
        if self._outline is None:
            self._outline = outline_tree(self._contents, Choice(classes=self._choice.classes), self._root)[0]
        return self._outline

    def keys(self) -> list[str]:
        """Return the keys at this level."""
        return list(self.spec()._keys())

    def paths(self) -> list[Path]:
        """Return the paths of all leaves. A tied leaf has its first path only."""
        return leaf_paths(self.spec())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: NestedKey) -> bool:
        path = (*self._at, *unravel(key))
        self._contents.check_open()
        try:
            with parsing(self._contents.path):
                root, depth, _ = self._contents.find(path)
        except MissingKeyError:
            return False
        inner = SavedTree(self._contents, self._choice, path[:depth], root)
        return depth == len(path) or has(inner.spec(), path[depth:])

    @property
    def metadata(self) -> dict[str, str]:
        """The strings in the header (or the index), without the entries of tdfunc."""
        return {key: text for key, text in self._contents.metadata.items() if not key.startswith("tdfunc")}

    @property
    def closed(self) -> bool:
        """Return whether the files are closed."""
        return self._contents.closed

    def close(self) -> None:
        """Close the files, also for the handles of sub-trees."""
        self._contents.close()

    def __enter__(self) -> "SavedTree":
        self._contents.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles, which would give the files two owners.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"open {self._contents.path}: an open checkpoint cannot be copied or pickled.",
            expected="one handle in each process; its threads may share it",
            hint="open it in each process: tdfunc.open(path). f.load() is a tree, which can be copied and sent.",
        )

    def __repr__(self) -> str:
        where = ""
        if self._at:
            where = f" at {dotted(self._at)!r}"
        if self.closed:
            return f"SavedTree({self._contents.path!r}{where}, closed)"
        return f"SavedTree({self._contents.path!r}{where}, keys={self.keys()!r})"

    def _read(self, leaf: Leaf) -> Tensor:
        """Read a leaf, and check it if the checkpoint is verified."""
        target = self._choice.device or leaf.device
        flags = "" if IS_VALUE in leaf.flags else leaf.flags
        with self._contents.reading():
            if is_fake(target):
                empty = torch.empty(leaf.spec.size, dtype=leaf.spec.dtype, device=target or "cpu")
                return flag_leaf(empty, flags)
            values = read_leaf(leaf.source, leaf.spec, leaf.begin, leaf.name, leaf.digest)
            if target is not None and target.type != "cpu":
                values = move_leaf(values, target)
            return flag_leaf(values, flags)
