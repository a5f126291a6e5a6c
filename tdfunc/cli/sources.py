"""Any checkpoint, leaf by leaf: its tree without values, and the values of a leaf in pieces.

Nothing is mapped and nothing is read twice, so that the memory that a command needs does not grow with the file.
"""

import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from tdfunc._collection import TensorCollection
from tdfunc._errors import CorruptCheckpointError, explain
from tdfunc._keys import Entry, Filter, FilterLike, dotted
from tdfunc._nontensor import NonTensorBase, NonTensorData
from tdfunc._ties import groups_by_path
from tdfunc._types import Kind, Path
from tdfunc.cli.torch_files import TorchLeaf, is_torch_file, read_torch
from tdfunc.storage.files import Files, LocalFiles, is_memmap, open_contents
from tdfunc.storage.folder_build import build_folder
from tdfunc.storage.folder_plan import LAZY_TYPE
from tdfunc.storage.folder_read import FolderReader, LeafFile
from tdfunc.storage.format import check_digest
from tdfunc.storage.index import INDEX, SINGLE
from tdfunc.storage.mapped import open_inside
from tdfunc.storage.memmap import _naming, _opened
from tdfunc.storage.names import META
from tdfunc.storage.read import Bytes, as_view, fill
from tdfunc.storage.remote import RemoteFiles, is_remote, local_path
from tdfunc.storage.select import Choice, outline_tree
from tdfunc.storage.steps import list_steps, step_name

# Elements of a piece: a few of them in float64 stay in the processor's cache.
COUNT = 1 << 18
_MAX_META_BYTES = 100_000_000
Tick = Callable[[int], object]


class Reader(Protocol):
    """Where the values of one leaf are."""

    @property
    def digest(self) -> str | None:
        """The recorded checksum, if there is one."""
        ...

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values in row-major order, `count` elements at a time."""
        ...


class FileLeaf(NamedTuple):
    """A leaf in a safetensors file."""

    data: Bytes
    begin: int
    dtype: torch.dtype
    elements: int
    name: str
    digest: str | None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values, and compare the checksum at their end."""
        state = xxhash.xxh3_64()
        for part, view in _filled(self.data, self.begin, self.dtype, self.elements, count):
            state.update(view)
            yield part
        if self.digest is not None:
            check_digest(f"leaf {self.name}", self.digest, state.hexdigest())


class MemmapLeaf(NamedTuple):
    """A leaf in a memmap folder: a file of its own, opened while it is read."""

    root: int
    file: LeafFile
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values."""
        file = self.file
        if file.size_bytes:
            with self._opened() as fd:
                elements = file.shape.numel()
                yield from (part for part, _ in _filled(_Descriptor(fd), 0, file.dtype, elements, count))

    def check(self) -> None:
        """Raise if the file has not the bytes that the leaf needs."""
        if self.file.size_bytes:
            with self._opened() as fd:
                found, needed = os.fstat(fd).st_size, self.file.size_bytes
                if found < needed or (self.file.exact and found > needed):
                    what = f"leaf {dotted(self.file.path)!r}: its file has another size."
                    raise CorruptCheckpointError(explain(what, expected=f"{needed} bytes", got=f"{found} bytes"))

    @contextmanager
    def _opened(self) -> Generator[int, None, None]:
        what = f"leaf {dotted(self.file.path)!r}"
        try:
            fd = open_inside(self.root, self.file.name, what)
        except FileNotFoundError as err:
            raise CorruptCheckpointError(explain(f"{what}: its file is missing.", expected=self.file.name)) from err
        try:
            yield fd
        finally:
            os.close(fd)


class _Descriptor:
    """The bytes of an open file that somebody else closes."""

    def __init__(self, fd: int) -> None:
        self.fd, self.size_bytes = fd, os.fstat(fd).st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read once."""
        return os.preadv(self.fd, [view], offset)

    def close(self) -> None:
        """Leave it open."""


def _filled(
    data: Bytes, begin: int, dtype: torch.dtype, elements: int, count: int
) -> Iterator[tuple[Tensor, memoryview]]:
    for at in range(0, elements, count):
        part = torch.empty(min(count, elements - at), dtype=dtype)
        view = as_view(part)
        fill(data, view, begin + at * dtype.itemsize)
        yield part, view


class Source:
    """An open checkpoint; `open_source` makes it.

    Args:
        path: As it was given.
        format: `"safetensors"`, `"shards"`, `"memmap"` or `"torch"`.
        tree: Everything but the values: the tree on the meta device.
        readers: Where the values are, by the id of the leaf in `tree`.
    """

    def __init__(self, path: str, format: str, tree: TensorCollection, readers: dict[int, Any]) -> None:
        self.path, self.format, self.tree, self._readers = path, format, tree, readers
        self.metadata: dict[str, str] = {}
        self.files: list[str] = []
        # Of the files.
        self.size_bytes = 0
        # Of a folder of steps: the one that was opened, and all.
        self.step: int | None = None
        self.steps: list[int] = []
        # The algorithm of the recorded checksums, which are compared when leaves are read.
        self.checksums: str | None = None
        # Whether it records kinds, batch sizes and all else that belongs to a tree.
        self.is_described = False
        self._close: Callable[[], object] = _nothing

    def reader(self, leaf: Tensor) -> Reader:
        """Return where the values of a leaf of the tree are."""
        return self._readers[id(leaf)]

    def pieces(self, leaf: Tensor, tick: Tick | None = None) -> Iterator[Tensor]:
        """Yield the values of a leaf in row-major order, in pieces of one dimension.

        Raises:
            CorruptCheckpointError: They are not what was saved, which shows at their end.
        """
        for part in self.reader(leaf).read(COUNT):
            yield part
            if tick is not None:
                tick(part.numel() * part.element_size())

    def close(self) -> None:
        """Close the files."""
        self._close()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    pass


def open_source(path: str, *, verify: bool = True) -> Source:
    """Open a checkpoint of any format by what it is, whatever its name; of a folder of steps the latest.

    Raises:
        FileNotFoundError: There is nothing, or nothing that is a checkpoint.
        CorruptCheckpointError: It is damaged.
        UnsupportedError: It holds what the format of the tree, or tdfunc, cannot express.
    """
    name = local_path(path)
    files: Files = RemoteFiles(name, fetch=False) if is_remote(name) else LocalFiles()
    steps = steps_in(name) if not is_remote(name) else []
    if steps:
        name = os.path.join(name, step_name(steps[-1]))
    if not is_remote(name) and is_torch_file(name):
        source = _open_torch(name)
    elif is_memmap(name, files):
        source = _open_memmap(name)
    else:
        source = _open_safetensors(name, files, verify=verify)
    source.path = path
    if steps:
        source.steps, source.step = steps, steps[-1]
    return source


def steps_in(name: str) -> list[int]:
    """Return the steps of a `CheckpointManager`'s folder; none for any other."""
    if not os.path.isdir(name) or any(os.path.exists(os.path.join(name, own)) for own in (INDEX, SINGLE, META)):
        return []
    return list_steps(name)


def _open_torch(name: str) -> Source:
    tree, readers = read_torch(name)
    source = Source(name, "torch", tree, dict[int, TorchLeaf](readers))
    source.files, source.size_bytes = [name], os.path.getsize(name)
    return source


def _open_safetensors(name: str, files: Files, *, verify: bool) -> Source:
    contents = open_contents(name, files, verify=verify)
    try:
        outline, numbers = outline_tree(contents, Choice(classes=_stand_ins(_classes_in(contents.doc))))
        places, plan = contents.places, contents.plan
        readers: dict[int, Reader] = {}
        for key, i in numbers.items():
            spec = plan.specs[i]
            data = contents.sources[places.homes[i]].data
            readers[key] = FileLeaf(
                data, places.begins[i], spec.dtype, spec.size.numel(), plan.names[i], places.digests[i]
            )
    except BaseException:
        contents.close()
        raise
    source = Source(name, "safetensors" if contents.homes is None else "shards", outline, readers)
    source.metadata = {key: text for key, text in contents.metadata.items() if not key.startswith("tdfunc")}
    source.files = [file.path for file in contents.sources]
    source.size_bytes = sum(file.size_bytes for file in contents.sources)
    source.checksums = contents.sources[0].header.algorithm if contents.is_ours and contents.sources else None
    source.is_described = contents.is_ours
    source._close = contents.close
    return source


def _open_memmap(name: str) -> Source:
    holder = _opened(name)
    root = holder.__enter__()
    try:
        with _naming(name):
            reader = FolderReader(root, _stand_ins(_classes_under(name)))
            tree = build_folder(
                reader, [torch.empty(f.shape, dtype=f.dtype, device="meta") for f in reader.leaves], None
            )
    except BaseException:
        holder.__exit__(None, None, None)
        raise
    readers: dict[int, Reader] = {}
    for file in reader.leaves:
        # The first of tied paths comes first.
        readers.setdefault(id(_leaf_at(tree, file.path)), MemmapLeaf(root, file))
    source = Source(name, "memmap", tree, readers)
    aliases = reader.aliases()
    own = [file for i, file in enumerate(reader.leaves) if i not in aliases and file.size_bytes]
    source.files = [os.path.join(name, file.name) for file in own]
    source.size_bytes = sum(file.size_bytes for file in own)
    source.is_described = reader.leaves == [] or reader.leaves[0].exact
    source._close = lambda: holder.__exit__(None, None, None)
    return source


def _leaf_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree._data[key]
    return tree.data if isinstance(tree, NonTensorData) else tree


# -- classes ----------------------------------------------------------------------------------------------------


def _classes_in(doc: dict[str, Any]) -> set[str]:
    return {node["class"] for node in doc["nodes"] if type(node.get("class")) is str}


def _classes_under(folder: str) -> set[str]:
    """Return the names of classes in a memmap folder; what is malformed there is found when it is read."""
    found: set[str] = set()
    for place, _, names in os.walk(folder):
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            path = os.path.join(place, META)
            if META in names and os.path.getsize(path) <= _MAX_META_BYTES:
                with open(path, "rb") as file:
                    meta = json.load(file)
                name = meta.get("", {}).get("class") if meta.get("_type") != LAZY_TYPE else None
                if type(name) is str:
                    found.add(name)
    return found


def _stand_ins(names: Iterable[str]) -> Sequence[type[TensorCollection]]:
    """Make an empty class for each recorded one: no code of it is needed to copy its leaves, and its name stays."""
    made: list[type[TensorCollection]] = []
    for name in sorted(names):
        module, _, path = name.partition(":")
        if re.fullmatch(r"tdfunc(\..*)?", module) is None:
            fields = {"__slots__": (), "__module__": module, "__qualname__": path}
            made.append(type(path.rpartition(".")[2] or "_", (TensorCollection,), fields))
    return made


# -- leaves -----------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A leaf as a file stores it: once, with all its paths."""

    paths: tuple[Path, ...]
    leaf: Tensor
    kind: Kind | None
    # Whether it is non-tensor data that happens to be a tensor.
    is_value: bool

    @property
    def path(self) -> Path:
        """The first path."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The first path with dots."""
        return dotted(self.paths[0])

    @property
    def size_bytes(self) -> int:
        """What its values take."""
        return self.leaf.numel() * self.leaf.element_size()


def walk_nodes(tree: TensorCollection) -> Iterator[tuple[Path, TensorCollection, str, Any]]:
    """Yield every entry that is no tree: its path, the node it is in, its key and its value; then empty nodes."""
    stack: list[tuple[Path, TensorCollection]] = [((), tree)]
    while stack:
        at, node = stack.pop()
        inner: list[tuple[Path, TensorCollection]] = []
        for key, value in node._data.items():
            if isinstance(value, TensorCollection):
                inner.append(((*at, key), value))
            else:
                yield (*at, key), node, key, value
        stack.extend(reversed(inner))


def stored_leaves(tree: TensorCollection) -> list[Stored]:
    """Return every stored tensor once, non-tensor data that are tensors included."""
    groups = groups_by_path(tree._ties)
    aliases = {path for group in tree._ties for path in group[1:]}
    found: list[Stored] = []
    for path, node, key, value in walk_nodes(tree):
        is_value = isinstance(value, NonTensorData) and isinstance(value.data, Tensor)
        leaf = value.data if is_value else value
        if isinstance(leaf, Tensor) and path not in aliases:
            found.append(Stored(groups.get(path, (path,)), leaf, node._kinds.get(key), is_value))
    return found


def plain_values(tree: TensorCollection) -> dict[Path, NonTensorBase]:
    """Return the non-tensor data that are no tensors."""
    return {
        path: value
        for path, _, _, value in walk_nodes(tree)
        if isinstance(value, NonTensorBase)
        and not (isinstance(value, NonTensorData) and isinstance(value.data, Tensor))
    }


def make_filter(include: Sequence[str], exclude: Sequence[str]) -> "FilterLike | None":
    """Return what matches any of some globs and none of others; None for everything."""
    chosen: Filter | None = None
    for pattern in include:
        chosen = Filter(pattern) if chosen is None else chosen | pattern
    for pattern in exclude:
        chosen = ~Filter(pattern) if chosen is None else chosen & ~Filter(pattern)
    return chosen


def choose(found: Sequence[Stored], where: "FilterLike | None") -> list[Stored]:
    """Return the leaves that a filter chooses.

    Raises:
        FilterError: A pattern matches no leaf.
    """
    if where is None:
        return list(found)
    mask = Filter(where).mask([Entry(one.paths, one.leaf, one.kind) for one in found])
    return [one for one, yes in zip(found, mask, strict=True) if yes]
