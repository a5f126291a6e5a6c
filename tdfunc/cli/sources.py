"""Any checkpoint, leaf by leaf: its tree without values, and the values of a leaf in pieces.

Only files of torch.save are mapped, and nothing is read twice, so the memory of a command does not grow with the file.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from tdfunc.cli.torch_files.files import LeftOut, TorchLeaf, find_torch, read_torch
from tdfunc.cli.values import read_object
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, damaged
from tdfunc.core.keys import Entry, Filter, FilterLike, dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.system import platform
from tdfunc.core.ties import groups_by_path
from tdfunc.core.types import Kind, Path
from tdfunc.storage.disk.commit import Folder, locate
from tdfunc.storage.disk.commit import naming as naming_system
from tdfunc.storage.disk.remote import Files, LocalFiles, RemoteBytes, RemoteFiles, find, is_remote
from tdfunc.storage.manager.steps import (
    ABOUT_FILE,
    StepRemovedError,
    StepReplacedError,
    list_steps,
    read_about,
    reading,
    step_name,
)
from tdfunc.storage.memmap.folder import FolderReader
from tdfunc.storage.memmap.layout import META
from tdfunc.storage.memmap.leaf import LeafFile, open_leaf
from tdfunc.storage.memmap.read import naming, opened
from tdfunc.storage.safetensors.blocks import BlockDigests, Blocks
from tdfunc.storage.safetensors.contents import Contents, Leaf
from tdfunc.storage.safetensors.folder import is_memmap, open_contents
from tdfunc.storage.safetensors.header import check_digest
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.read import as_view, fill
from tdfunc.storage.safetensors.read import naming as naming_errors
from tdfunc.storage.safetensors.select import Choice, outline_tree
from tdfunc.storage.tree.objects import OBJECT, PlainObject

# Elements of a piece: a few pieces in float64 fit in the processor's cache.
COUNT = 1 << 18
# The entry that safetensors' own writers put into every header.
_USUAL = ("format", "pt")
Tick = Callable[[int], object]


class FileLeaf(NamedTuple):
    """A leaf in a safetensors file."""

    leaf: Leaf

    @property
    def digest(self) -> str | None:
        """The digest of all bytes; None in a leaf that several ranks wrote, which has digests of blocks."""
        if isinstance(self.leaf.digest, Blocks):
            return None
        return self.leaf.digest

    def read(self, count: int) -> Iterator[Tensor]:
        """Yield the values, and compare the checksums after them."""
        source, begin, spec, name, *_, digest = self.leaf
        if isinstance(digest, Blocks):
            state = BlockDigests(name, digest)
        else:
            state = xxhash.xxh3_64()
        for at in range(0, spec.size.numel(), count):
            part = torch.empty(min(count, spec.size.numel() - at), dtype=spec.dtype)
            view = as_view(part)
            fill(source.data, view, begin + at * spec.dtype.itemsize)
            if isinstance(source.data, RemoteBytes):
                source.data.check_same()
            state.update(view)
            yield part
        if isinstance(state, BlockDigests):
            state.check()
        elif isinstance(digest, str):
            check_digest(f"leaf {name}", digest, state.hexdigest())


class MemmapLeaf(NamedTuple):
    """A leaf in a memmap folder: one file, which is opened while it is read."""

    root: Folder
    file: LeafFile
    digest: None = None

    def read(self, count: int) -> Iterator[Tensor]:
        """Check the size of the file, and yield the values."""
        file = self.file
        what = f"leaf {dotted(file.path)!r}"
        if not file.size_bytes:
            return
        try:
            leaf_file = open_leaf(self.root, file)
        except FileNotFoundError as err:
            raise damaged(f"{what}: its file is missing.", file.name) from err
        total = file.shape.numel()
        itemsize = file.dtype.itemsize
        with leaf_file as fd:
            for at in range(0, total, count):
                part = torch.empty(min(count, total - at), dtype=file.dtype)
                read_bytes = platform.read_at(fd, as_view(part), at * itemsize)
                if read_bytes < part.numel() * itemsize:
                    raise damaged(f"{what}: its file was cut short while it was read.")
                yield part


Reader = FileLeaf | MemmapLeaf | TorchLeaf


@dataclass
class Source:
    """An open checkpoint; `open_source` makes it."""

    path: str
    # "safetensors", "shards", "memmap" or "torch".
    format: str
    # The tree on the meta device.
    tree: TensorCollection
    # The readers of the values, by the id of the leaf in `tree`.
    readers: dict[int, Reader]
    files: list[str]
    # The size of the files.
    size_bytes: int
    # Saved beside the tree: strings of the header, and the metadata of a step.
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    # Facts of the file that a tree cannot hold.
    altered: Sequence[str] = ()
    # Values that a tree cannot contain, and leaves that an index does not name.
    left_out: Mapping[Path, LeftOut] = field(default_factory=dict[Path, LeftOut])
    # In a folder of steps: the opened step, and all steps.
    step: int | None = None
    steps: Sequence[int] = ()
    # The algorithm of the recorded checksums, which are compared when leaves are read.
    checksums: str | None = None
    # True if kinds, batch sizes and the other parts of a tree are recorded.
    is_described: bool = False
    # The open files.
    resources: ExitStack = field(default_factory=ExitStack)

    def pieces(self, leaf: Tensor, tick: Tick | None = None) -> Iterator[Tensor]:
        """Yield the values of a leaf in row-major order, in flat pieces; some damage is found only after the last."""
        parts = self.readers[id(leaf)].read(COUNT)
        while True:
            # With several sources, an error must name its source.
            with naming_errors(self.path), naming_system("read", self.path, "nothing was written"):
                part = next(parts, None)
            if part is None:
                return
            yield part
            if tick is not None:
                tick(part.numel() * part.element_size())

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.resources.close()


def open_source(path: str) -> Source:
    """Open a checkpoint of any format, found by its contents and not its name; in a folder of steps, the latest."""
    name = find(path)
    if is_remote(name):
        source = _open_safetensors(name, RemoteFiles(name, fetch=False))
    else:
        source = _open_latest(name) or _open_local(name)
    source.path = path
    return source


def _open_latest(folder: str) -> Source | None:
    """Open the latest step of a run, which may continue; None for another folder."""
    steps = steps_in(folder)
    while steps:
        # As long as the step is open, it is not removed. If it was removed by now, another one is the latest.
        with suppress(StepRemovedError, StepReplacedError), ExitStack() as stack:
            source = _open_local(stack.enter_context(reading(folder, steps[-1])))
            source.steps = steps
            source.step = steps[-1]
            # Its own files are closed first.
            stack.push(source.resources)
            source.resources = stack.pop_all()
            return source
        steps = steps_in(folder)
    return None


def _open_local(name: str) -> Source:
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        raise UnsupportedError(f"{name} is not a file or a folder.")
    torch_name = find_torch(name)
    if torch_name is not None:
        return _open_torch(torch_name)
    metadata = {}
    step = step_of(name)
    if step is not None:
        metadata = read_about(name, step).metadata
    if is_memmap(name, LocalFiles()):
        source = _open_memmap(name)
    else:
        source = _open_safetensors(name, LocalFiles())
    source.metadata |= metadata
    return source


def _open_torch(name: str) -> Source:
    found = read_torch(name)
    size_bytes = sum([os.path.getsize(file) for file in found.files])
    readers = dict[int, Reader](found.leaves)
    source = Source(name, "torch", found.tree, readers, found.files, size_bytes, altered=found.altered)
    source.left_out = found.left_out
    return source


def step_of(folder: str) -> int | None:
    """Return the number of the step that a `CheckpointManager` saved as this folder; None for other folders."""
    # The folder itself may be a link, with the name of the step.
    where, name = os.path.split(folder.rstrip(os.sep))
    if name in ("", ".", ".."):
        where, name = os.path.split(os.path.realpath(folder))
    where = os.path.realpath(where)
    if not os.path.isfile(os.path.join(folder, ABOUT_FILE)):
        return None
    own = os.path.join(where, name)
    for step in list_steps(where):
        if locate(os.path.join(where, step_name(step))) == own:
            return step
    return None


def steps_in(name: str) -> list[int]:
    """Return the steps of a `CheckpointManager`'s folder; an empty list for other folders."""
    if not os.path.isdir(name):
        return []
    # A folder that is a checkpoint itself.
    if any(os.path.exists(os.path.join(name, own)) for own in (INDEX, SINGLE, META)):
        return []
    return list_steps(name)


def _open_safetensors(name: str, files: Files) -> Source:
    contents = open_contents(name, files, verify=True)
    with ExitStack() as stack:
        stack.callback(contents.close)
        outline, numbers = outline_tree(contents, Choice(classes=_stand_ins(contents.doc["nodes"])))
        readers: dict[int, Reader] = {key: FileLeaf(contents.leaf(i)) for key, i in numbers.items()}
        resources = stack.pop_all()
    checksums = None
    if contents.is_ours and contents.sources:
        checksums = contents.sources[0].header.algorithm
    format = "safetensors" if contents.homes is None else "shards"
    return Source(
        name,
        format,
        outline,
        readers,
        [file.path for file in contents.sources],
        sum(file.size_bytes for file in contents.sources),
        metadata=_metadata_of(contents),
        left_out=_unlisted_leaves(contents),
        checksums=checksums,
        is_described=contents.is_ours,
        resources=resources,
    )


def _metadata_of(contents: Contents) -> dict[str, Any]:
    """Return the metadata of a header that its writer was given."""
    metadata: dict[str, Any] = {}
    for key, text in contents.metadata.items():
        if not key.startswith("tdfunc") and (key, text) != _USUAL:
            metadata[key] = text
    return metadata


def _unlisted_leaves(contents: Contents) -> dict[Path, LeftOut]:
    left_out: dict[Path, LeftOut] = {}
    for leaf in contents.unlisted():
        path = tuple(str(json.loads(leaf)).split("."))
        left_out[path] = LeftOut("a leaf that the index does not name", is_tensor=True)
    return left_out


def _open_memmap(name: str) -> Source:
    with ExitStack() as stack:
        root = stack.enter_context(opened(name, "load_memmap"))
        with naming(name, "load_memmap"):
            reader = FolderReader(root)
            reader.classes = _stand_ins(reader.plan.nodes)
            leaves = [torch.empty(file.shape, dtype=file.dtype, device="meta") for file in reader.files]
            tree = reader.build(leaves, None)
        resources = stack.pop_all()
    readers: dict[int, Reader] = {}
    for file in reader.files:
        # The first of tied paths comes first.
        readers.setdefault(id(_leaf_at(tree, file.path)), MemmapLeaf(root, file))
    own = [file for file in reader.files if file.size_bytes]
    return Source(
        name,
        "memmap",
        tree,
        readers,
        [os.path.join(name, file.name) for file in own],
        sum(file.size_bytes for file in own),
        is_described=reader.files == [] or reader.files[0].exact,
        resources=resources,
    )


# Any: a tensor, or the value of non-tensor data.
def _leaf_at(tree: TensorCollection, path: Path) -> Any:
    leaf: Any = tree
    for key in path:
        leaf = leaf._data[key]
    if isinstance(leaf, NonTensorData):
        return leaf.data
    return leaf


class Stored(NamedTuple):
    """A leaf as a file stores it: once, with all its paths."""

    paths: tuple[Path, ...]
    leaf: Tensor
    kind: Kind | None
    # True for non-tensor data that happen to be a tensor.
    is_value: bool

    @property
    def path(self) -> Path:
        """The first path."""
        return self.paths[0]

    @property
    def dtype_name(self) -> str:
        """The dtype as torch names it."""
        return str(self.leaf.dtype).removeprefix("torch.")

    @property
    def spec(self) -> str:
        """The dtype and shape."""
        return f"{self.dtype_name} {list(self.leaf.shape)}"

    @property
    def name(self) -> str:
        """The first path with dots."""
        return dotted(self.paths[0])

    @property
    def size_bytes(self) -> int:
        """The bytes of its values."""
        return self.leaf.numel() * self.leaf.element_size()


def _walk(tree: TensorCollection) -> Iterator[tuple[Path, TensorCollection, Any]]:
    """Yield every entry that is not a tree: its path, the node that it is in, and its value.

    A plain object is a tree of its tensors, and a value with the rest.
    """
    stack: list[tuple[Path, TensorCollection]] = [((), tree)]
    while stack:
        at, node = stack.pop()
        objects: list[tuple[Path, PlainObject]] = []
        trees: list[tuple[Path, TensorCollection]] = []
        for key, value in node._data.items():
            path = (*at, key)
            if not isinstance(value, TensorCollection):
                yield path, node, value
                continue
            trees.append((path, value))
            if isinstance(value, PlainObject):
                objects.append((path, value))
        for path, value in objects:
            yield path, node, read_object(value)
        stack += reversed(trees)


def stored_leaves(tree: TensorCollection) -> list[Stored]:
    """Return every stored tensor once, including non-tensor data that are tensors."""
    groups = groups_by_path(tree._ties)
    aliases = set[Path]()
    for _, *others in tree._ties:
        aliases.update(others)
    found: list[Stored] = []
    for path, node, value in _walk(tree):
        is_value = isinstance(value, NonTensorData)
        leaf = value.data if is_value else value
        if isinstance(leaf, Tensor) and path not in aliases:
            found.append(Stored(groups.get(path, (path,)), leaf, node._kinds.get(path[-1]), is_value))
    return found


def plain_values(tree: TensorCollection) -> dict[Path, NonTensorBase]:
    """Return the non-tensor data that are not tensors."""
    found: dict[Path, NonTensorBase] = {}
    for path, _, value in _walk(tree):
        if isinstance(value, NonTensorBase) and not isinstance(getattr(value, "data", None), Tensor):
            found[path] = value
    return found


def make_filter(include: Sequence[str], exclude: Sequence[str]) -> "FilterLike | None":
    """Return the filter that includes and excludes globs; None for everything."""
    chosen: Filter | None = None
    for pattern in include:
        if chosen is None:
            chosen = Filter(pattern)
        else:
            chosen = chosen | pattern
    for pattern in exclude:
        if chosen is None:
            chosen = ~Filter(pattern)
        else:
            chosen = chosen & ~Filter(pattern)
    return chosen


def choose(found: Sequence[Stored], where: "FilterLike | None") -> list[Stored]:
    """Return the leaves that a filter chooses; each pattern must match one."""
    if where is None:
        return list(found)
    mask = Filter(where).mask([Entry(one.paths, one.leaf, one.kind) for one in found])
    return [one for one, yes in zip(found, mask, strict=True) if yes]


def _stand_ins(nodes: Iterable[dict[str, Any]]) -> Sequence[type[TensorCollection]]:
    """Make an empty class for each recorded one: a copy of its leaves needs its name and no code."""
    made: list[type[TensorCollection]] = [PlainObject]
    for name in sorted({node["class"] for node in nodes if type(node.get("class")) is str}):
        module, _, path = name.partition(":")
        if name != OBJECT and re.fullmatch(r"tdfunc(\..*)?", module) is None:
            fields = {"__slots__": (), "__module__": module, "__qualname__": path}
            made.append(type(path.rpartition(".")[2] or "_", (TensorCollection,), fields))
    return made
