"""Which files make up a checkpoint: one file, or a folder with an index and its shards, here or on another machine."""

import os
from contextlib import suppress

from tdfunc.core.errors import CorruptCheckpointError, error
from tdfunc.storage.disk.remote import Files, LocalFiles
from tdfunc.storage.safetensors.contents import Contents
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES
from tdfunc.storage.safetensors.index import INDEX, SINGLE, Index, parse_index
from tdfunc.storage.safetensors.read import Source, naming, open_source, parsing, read_bytes

_META = "meta.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_TRIES = 10


def open_contents(path: str, files: Files, *, verify: bool) -> Contents:
    """Open a safetensors file, or the shards (else the one file) in a folder.

    Raises:
        FileNotFoundError: There is nothing, or nothing that is a checkpoint; the message lists what was found.
    """
    if path.endswith(_INDEX_SUFFIX):
        return _open_shards(path, files, verify=verify)
    if files.is_folder(path):
        return _open_folder(path, files, verify=verify)
    return _open_single(path, files, verify=verify)


def _open_folder(path: str, files: Files, *, verify: bool) -> Contents:
    # Again and again: shards and one file may take each other's place between two looks.
    for name, open_one in ((INDEX, _open_shards), (SINGLE, _open_single)) * _TRIES:
        with suppress(FileNotFoundError):
            return open_one(_join(path, name), files, verify=verify)
    found = sorted(files.names(path))
    shown = ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")
    what, hint = f"load {path}: there is no checkpoint in this folder.", "load(path) of a file takes any name."
    expected = f"{INDEX}, {SINGLE} or {_META}"
    if _META in found:
        what, expected = f"open {path}: this is a memmap folder.", f"{INDEX} or {SINGLE}: open reads safetensors"
        hint = "tdfunc.load(path) and tdfunc.load_memmap(path) map its leaves, and read none before."
    raise error(FileNotFoundError, what, expected=expected, got=shown or "nothing", hint=hint)


def _open_single(path: str, files: Files, *, verify: bool) -> Contents:
    source = open_source(path, verify=verify, data=files.open(path))
    return _contents(path, [source], source.header.metadata, None, verify)


def is_memmap(path: str, files: Files) -> bool:
    """Whether a path is a memmap folder of this machine, and no folder of safetensors."""
    if not isinstance(files, LocalFiles) or not files.exists(_join(path, _META)):
        return False
    return not files.exists(_join(path, INDEX)) and not files.exists(_join(path, SINGLE))


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if "://" in folder else os.path.join(folder, name)


def _contents(
    path: str, sources: list[Source], metadata: dict[str, str], homes: dict[str, int] | None, verify: bool
) -> Contents:
    try:
        with parsing(path):
            return Contents(path, sources, metadata, homes, verify)
    except BaseException:
        _close(sources)
        raise


def _close(sources: list[Source]) -> None:
    for source in sources:
        source.data.close()


def read_index(path: str, files: Files, *, verify: bool) -> tuple[bytes, Index]:
    """Read an index; errors name it."""
    with naming(path):
        data = files.open(path)
        try:
            if data.size_bytes > MAX_HEADER_BYTES:
                raise CorruptCheckpointError(
                    "the index is too long.",
                    expected=f"at most {MAX_HEADER_BYTES} bytes",
                    got=f"{data.size_bytes} bytes",
                )
            raw = read_bytes(data, 0, data.size_bytes)
        finally:
            data.close()
    with parsing(path):
        return raw, parse_index(raw, verify=verify)


def _open_shards(path: str, files: Files, *, verify: bool) -> Contents:
    raw, index = read_index(path, files, verify=verify)
    while True:
        try:
            sources = _open_all(path, index, files, verify=verify)
            return _contents(path, sources, index.metadata, index.homes, verify)
        except FileNotFoundError as err:
            # Another save may have replaced the index, and deleted the shards of the old one.
            again, index = read_index(path, files, verify=verify)
            if again == raw:
                raise CorruptCheckpointError(
                    f"load {path}: a shard that the index names is missing.",
                    expected=", ".join(index.files),
                    got=str(err),
                    hint="restore it from a copy.",
                ) from err
            raw = again


def _open_all(path: str, index: Index, files: Files, *, verify: bool) -> list[Source]:
    folder = path[: max(path.rfind("/"), path.rfind(os.sep)) + 1]
    sources: list[Source] = []
    try:
        for number, name in enumerate(index.files):
            sources.append(open_source(folder + name, verify=verify, data=files.open(folder + name)))
            if verify:
                with naming(folder + name):
                    _check_shard(sources[-1], index, number)
    except BaseException:
        _close(sources)
        raise
    return sources


def _check_shard(source: Source, index: Index, number: int) -> None:
    found = source.header.digest
    recorded = None if index.digests is None else index.digests[number]
    if recorded is None:
        # One damaged letter makes an index of ours look like one of another program.
        if found is not None and index.is_marked:
            raise CorruptCheckpointError(
                "this shard is of tdfunc, and the index is not.",
                expected="an index with tdfunc's metadata, or one without a trace of them",
                got="traces of them: the index is damaged",
                hint="restore the index from a copy, or read what is there: load(path, verify=False).",
            )
    elif found != recorded:
        raise CorruptCheckpointError(
            "this shard is of another save than the index.",
            expected=f"a header with the digest {recorded}",
            got=str(found),
            hint="restore all files of the folder from one copy.",
        )
