"""The files of a checkpoint: one file, or the shards of an index; what else a folder is, if it has neither."""

import os
from contextlib import suppress
from typing import Any

from tdfunc.core.errors import ConcurrencyError, UnsupportedError, damaged, error
from tdfunc.storage.disk.commit import STEP_NAME
from tdfunc.storage.disk.remote import Files, LocalBytes, LocalFiles, MappedBytes, RemoteFiles, is_remote
from tdfunc.storage.safetensors.contents import Contents
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES
from tdfunc.storage.safetensors.index import (
    ADAPTER,
    INDEX,
    SINGLE,
    TORCH_NAMES,
    Index,
    is_index,
    is_variant,
    parse_index,
    torch_refusal,
)
from tdfunc.storage.safetensors.read import Source, naming, open_source, parsing, read_bytes

_META = "meta.json"
_TRIES = 10
# A checkpoint of more files keeps none of them open.
_MOST_OPEN = 16


def open_contents(path: str, files: Files, *, verify: bool) -> Contents:
    """Open a safetensors file, or the shards (else the one file) in a folder.

    Raises:
        FileNotFoundError: The path does not exist, or the folder is without a checkpoint; the message lists its files.
    """
    if is_index(_split_query(path)[0]):
        return _open_shards(path, files, verify=verify)
    if files.is_folder(path):
        return _open_folder(path, files, verify=verify)
    return _open_single(path, files, verify=verify)


def _open_folder(path: str, files: Files, *, verify: bool) -> Contents:
    # One file first, as in transformers. Again and again: shards and one file may take turns between two looks.
    layouts = ((SINGLE, _open_single), (INDEX, _open_shards), (ADAPTER, _open_single))
    for name, open_one in layouts * _TRIES:
        with suppress(FileNotFoundError, IsADirectoryError):
            return open_one(join(path, name), files, verify=verify)
    names = sorted(files.names(path))
    variants = [name for name in names if is_variant(name)]
    if len(variants) == 1:
        return open_contents(join(path, variants[0]), files, verify=verify)
    raise _no_checkpoint(path, names, variants)


def _no_checkpoint(path: str, names: list[str], variants: list[str]) -> FileNotFoundError | UnsupportedError:
    """Return the error for a folder without one checkpoint: the files in it tell what it is instead."""
    what = f"load {path}: the folder has no checkpoint."
    hint = "load(path) of a file takes any name."
    expected = f"{SINGLE}, {INDEX}, {ADAPTER} or {_META}"
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    if steps:
        what = f"load {path}: this is the folder of a CheckpointManager; it has steps, and no checkpoint of its own."
        hint = f"CheckpointManager(path).load() loads the latest step; load({join(path, steps[-1])!r}) loads one step."
    elif variants:
        what = f"load {path}: the folder has several variants."
        hint = f"load the path of one: {join(path, variants[0])}."
    elif any([name in TORCH_NAMES for name in names]):
        return torch_refusal(path)
    elif _META in names and is_remote(path):
        what = f"load {path}: this is a memmap folder, whose files are mapped on this machine."
        hint = "fsspec.filesystem(protocol).get(path, folder, recursive=True) fetches it; then load(folder)."
    elif _META in names:
        what = f"open {path}: this is a memmap folder."
        expected = f"{SINGLE} or {INDEX}: open reads safetensors"
        hint = "tdfunc.load(path) and tdfunc.load_memmap(path) map its leaves, and read none before."
    elif ".metadata" in names:
        hint = "torch.distributed.checkpoint.load reads its folders, and HuggingFaceStorageWriter consolidates them."
    return error(FileNotFoundError, what, expected=expected, got=", ".join(names[:10]) or "nothing", hint=hint)


def is_memmap(path: str, files: Files) -> bool:
    """Return whether a path is a memmap folder of this machine and not a folder of safetensors."""
    if not isinstance(files, LocalFiles) or not files.exists(join(path, _META)):
        return False
    # A sub-tree of such a name is a folder.
    return not any(os.path.isfile(join(path, name)) for name in (INDEX, SINGLE))


def join(folder: str, name: str) -> str:
    """Return the path of a file in a folder, or its URL."""
    if "://" in folder:
        return f"{folder.rstrip('/')}/{name}"
    return os.path.join(folder, name)


def _split_query(path: str) -> tuple[str, str]:
    """Return a path, and the query of a URL of HTTP: a key or an option that the server wants for each file."""
    if not path.startswith(("http://", "https://")):
        return path, ""
    place, mark, query = path.partition("?")
    return place, mark + query


def read_index(path: str, files: Files, *, verify: bool) -> tuple[bytes, Index]:
    """Read an index; errors name it."""
    with naming(path):
        data = files.open(path)
        try:
            if data.size_bytes > MAX_HEADER_BYTES:
                raise damaged("the index is too long.", f"at most {MAX_HEADER_BYTES} bytes", f"{data.size_bytes} bytes")
            raw = read_bytes(data, 0, data.size_bytes)
        finally:
            data.close()
    with parsing(path):
        return raw, parse_index(raw, path, verify=verify)


def _open_shards(path: str, files: Files, *, verify: bool) -> Contents:
    raw, index = read_index(path, files, verify=verify)
    place, query = _split_query(path)
    folder = place[: max(place.rfind("/"), place.rfind(os.sep)) + 1]
    while True:
        try:
            names = [f"{folder}{name}{query}" for name in index.files]
            return _open_files(path, names, files, index, verify=verify)
        except FileNotFoundError as err:
            # Another save may have replaced the index, and deleted the shards of the old one.
            again, index = read_index(path, files, verify=verify)
            if again == raw:
                raise damaged(
                    f"load {path}: a shard that the index names is missing.", ", ".join(index.files[:10]), str(err)
                ) from err
            raw = again


def _open_single(path: str, files: Files, *, verify: bool) -> Contents:
    return _open_files(path, [path], files, None, verify=verify)


def _open_files(path: str, names: list[str], files: Files, index: Index | None, *, verify: bool) -> Contents:
    """Open all files of a checkpoint; if one of them fails, all are closed."""
    sources: list[Source] = []
    # Shards of ours have digests in their index.
    fetched: list[str] = []
    if index is not None and index.digests is None:
        fetched = names
    try:
        before = _marks(files, fetched)
        for number, name in enumerate(names):
            source = open_source(name, verify=verify, data=files.open(name))
            if len(names) > _MOST_OPEN and isinstance(source.data, LocalBytes):
                source = source._replace(data=MappedBytes(source.data))
            sources.append(source)
            if index is not None and verify:
                _check_shard(name, source, index, number)
        if _marks(files, fetched) != before:
            raise ConcurrencyError(
                f"load {path}: shards were replaced while they were fetched.",
                expected="all shards of one save",
                hint="load it again.",
            )
        if index is None:
            metadata = sources[0].header.metadata
            homes = None
        else:
            metadata = index.metadata
            homes = index.homes
        with parsing(path):
            return Contents(path, sources, metadata, homes, verify)
    except BaseException:
        for source in sources:
            source.data.close()
        raise


# Any: what a file system says.
def _marks(files: Files, names: list[str]) -> list[Any]:
    if isinstance(files, RemoteFiles):
        return files.marks(names)
    return []


def _check_shard(name: str, source: Source, index: Index, number: int) -> None:
    """Raise unless a shard has the digest that its index records."""
    found = source.header.digest
    recorded = None
    if index.digests is not None:
        recorded = index.digests[number]
    if recorded is None:
        # One damaged letter makes an index of ours look like one of another program.
        is_wrong = index.is_marked and found is not None
        expected = "an index with tdfunc's metadata"
    else:
        is_wrong = recorded != found
        expected = f"a header with the digest {recorded}"
    if is_wrong:
        raise damaged(
            f"load {name}: this shard is of another save than the index, or the index is damaged.",
            expected,
            str(found),
            hint="restore all files of the folder from one copy, or read them: load(path, verify=False).",
        )
