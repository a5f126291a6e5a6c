"""Any checkpoint, leaf by leaf: its tree without values, and the values of a leaf in pieces.

Nothing is mapped and nothing is read twice, so that the memory that a command needs does not grow with the file.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from tdfunc.cli.readers import FileLeaf, MemmapLeaf, Reader
from tdfunc.cli.torch_files import TorchLeaf, is_torch_file, read_torch
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Path
from tdfunc.storage.disk.remote import Files, LocalFiles, RemoteFiles, is_remote, local_path
from tdfunc.storage.manager.manager import ABOUT_FILE, read_about
from tdfunc.storage.manager.steps import StepRemovedError, StepReplacedError, list_steps, reading, step_name
from tdfunc.storage.memmap.layout import META
from tdfunc.storage.memmap.read import FolderReader, naming, opened
from tdfunc.storage.safetensors.contents import is_memmap, open_contents
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.select import Choice, outline_tree

# Elements of a piece: a few of them in float64 stay in the processor's cache.
COUNT = 1 << 18
# What safetensors' own writers put into every header.
_USUAL = ("format", "pt")
Tick = Callable[[int], object]


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
        # What was saved beside the tree: strings of the header, and the metadata of a step.
        self.metadata: dict[str, Any] = {}
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
        # What has to be closed.
        self.resources = ExitStack()

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
        self.resources.close()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(path: str) -> Source:
    """Open a checkpoint of any format by what it is, whatever its name; of a folder of steps the latest.

    Raises:
        FileNotFoundError: There is nothing, or nothing that is a checkpoint.
        CorruptCheckpointError: It is damaged.
        UnsupportedError: It holds what the format of the tree, or tdfunc, cannot express.
    """
    name = local_path(path)
    if is_remote(name):
        source = _open_safetensors(name, RemoteFiles(name, fetch=False))
    elif steps_in(name):
        source = _open_latest(name)
    else:
        source = _open_local(name)
    source.path = path
    return source


def _open_latest(name: str) -> Source:
    """Open the latest step of a run, which may go on: as long as it is open, nobody removes it."""
    while steps := steps_in(name):
        with suppress(StepRemovedError, StepReplacedError), ExitStack() as stack:
            source = _open_local(stack.enter_context(reading(name, steps[-1])))
            source.steps, source.step = steps, steps[-1]
            # Whatever it holds itself is closed first.
            stack.push(source.resources)
            source.resources = stack.pop_all()
            return source
    return _open_local(name)


def _open_local(name: str) -> Source:
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        raise UnsupportedError(f"{name}: this is no regular file.", expected="a file or a folder")
    if is_torch_file(name):
        return _open_torch(name)
    source = _open_memmap(name) if is_memmap(name, LocalFiles()) else _open_safetensors(name, LocalFiles())
    step = step_of(name)
    if step is not None:
        try:
            source.metadata |= read_about(name, step).metadata
        except BaseException:
            source.close()
            raise
    return source


def step_of(folder: str) -> int | None:
    """Return the number of the step that a `CheckpointManager` saved as this folder; None for any other."""
    where, name = os.path.split(os.path.realpath(folder))
    if not os.path.isfile(os.path.join(folder, ABOUT_FILE)):
        return None
    return next((step for step in list_steps(where) if step_name(step) == name), None)


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


def _open_safetensors(name: str, files: Files) -> Source:
    contents = open_contents(name, files, verify=True)
    try:
        outline, numbers = outline_tree(contents, Choice(classes=_stand_ins(_classes_in(contents.doc["nodes"]))))
        places, plan = contents.places, contents.plan
        readers: dict[int, Reader] = {}
        for key, i in numbers.items():
            spec = plan.specs[i]
            data = contents.sources[places.homes[i]].data
            readers[key] = FileLeaf(
                data, places.begins[i], spec.dtype, spec.size.numel(), contents.names[i], places.digests[i]
            )
    except BaseException:
        contents.close()
        raise
    source = Source(name, "safetensors" if contents.homes is None else "shards", outline, readers)
    source.metadata = {
        key: text for key, text in contents.metadata.items() if not key.startswith("tdfunc") and (key, text) != _USUAL
    }
    source.files = [file.path for file in contents.sources]
    source.size_bytes = sum(file.size_bytes for file in contents.sources)
    source.checksums = contents.sources[0].header.algorithm if contents.is_ours and contents.sources else None
    source.is_described = contents.is_ours
    source.resources.callback(contents.close)
    return source


def _open_memmap(name: str) -> Source:
    with ExitStack() as stack:
        root = stack.enter_context(opened(name, "load_memmap"))
        with naming(name, "load_memmap"):
            reader = FolderReader(root)
            reader.classes = _stand_ins(_classes_in(reader.plan.nodes))
            tree = reader.build([torch.empty(f.shape, dtype=f.dtype, device="meta") for f in reader.files], None)
        held = stack.pop_all()
    readers: dict[int, Reader] = {}
    for file in reader.files:
        # The first of tied paths comes first.
        readers.setdefault(id(_leaf_at(tree, file.path)), MemmapLeaf(root, file))
    source = Source(name, "memmap", tree, readers)
    own = [file for file in reader.files if file.size_bytes]
    source.files = [os.path.join(name, file.name) for file in own]
    source.size_bytes = sum(file.size_bytes for file in own)
    source.is_described = reader.files == [] or reader.files[0].exact
    source.resources = held
    return source


def _leaf_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree._data[key]
    return tree.data if isinstance(tree, NonTensorData) else tree


# -- classes ----------------------------------------------------------------------------------------------------


def _classes_in(nodes: Iterable[dict[str, Any]]) -> set[str]:
    return {node["class"] for node in nodes if type(node.get("class")) is str}


def _stand_ins(names: Iterable[str]) -> Sequence[type[TensorCollection]]:
    """Make an empty class for each recorded one: no code of it is needed to copy its leaves, and its name stays."""
    made: list[type[TensorCollection]] = []
    for name in sorted(names):
        module, _, path = name.partition(":")
        if re.fullmatch(r"tdfunc(\..*)?", module) is None:
            fields = {"__slots__": (), "__module__": module, "__qualname__": path}
            made.append(type(path.rpartition(".")[2] or "_", (TensorCollection,), fields))
    return made
