"""`tdfunc verify`: a check of every leaf of a checkpoint, and a list of the damaged ones."""

import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from json import loads as json_loads
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError, safe_open

from tdfunc.cli.output import print_json, progress, safe
from tdfunc.cli.sources import FileLeaf, Source, Stored, Tick, open_source, step_of, steps_in, stored_leaves
from tdfunc.cli.torch_files.files import damaged_entry
from tdfunc.core.errors import CorruptCheckpointError, damaged
from tdfunc.ops.display.text import bytes_text, count_text
from tdfunc.storage.disk.remote import LocalBytes, MappedBytes, local_path
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    check_tree,
    naming_step,
    read_about,
    reading,
)
from tdfunc.storage.safetensors.contents import Leaf
from tdfunc.storage.safetensors.read import as_view

OK = 0
DAMAGED = 1
UNPROTECTED = 3
# The bytes of a leaf that the second reader reads at a time.
_MOST_BYTES = 16 << 20


class Verdict(NamedTuple):
    """The findings about one tree."""

    path: str
    leaves: int
    size_bytes: int
    # The algorithm, or None without checksums.
    checksums: str | None
    damage: list[str]

    @property
    def code(self) -> int:
        """The exit code for this tree."""
        if self.damage:
            return DAMAGED
        return OK if self.checksums is not None else UNPROTECTED


def verify(path: str, *, json: bool) -> int:
    """Read everything and compare the checksums; return the exit code, the worst of all steps."""
    verdicts: list[Verdict] = []
    for verdict in _verify_all(local_path(path)):
        verdicts.append(verdict)
        if not json:
            print(_text(verdict))
    codes = {verdict.code for verdict in verdicts}
    code = next((code for code in (DAMAGED, UNPROTECTED) if code in codes), OK)
    if json:
        print_json({"code": code, "checkpoints": [{**v._asdict(), "code": v.code} for v in verdicts]})
    return code


def _text(verdict: Verdict) -> str:
    size = f"{count_text(verdict.leaves, 'leaf')}, {bytes_text(verdict.size_bytes)}"
    name = safe(verdict.path)
    if verdict.damage:
        lines = [f"{name}: damaged"]
        for text in verdict.damage:
            lines += [f"  {safe(line)}" for line in text.split("\n")]
        return "\n".join(lines)
    if verdict.checksums is None:
        return f"{name}: no checksums to compare; the structure is whole ({size})"
    return f"{name}: whole ({size}, {verdict.checksums})"


def _verify_all(path: str) -> Iterator[Verdict]:
    steps = steps_in(path)
    for step in steps:
        # A run that continues may have removed or replaced it by now.
        with suppress(StepRemovedError, StepReplacedError), reading(path, step) as folder:
            yield _verify_one(folder)
    if not steps:
        yield _verify_one(path)


def _verify_one(path: str) -> Verdict:
    """Verify one tree; an error that keeps it from being opened is also damage."""
    with ExitStack() as stack:
        try:
            step = step_of(path)
            if step is not None:
                with naming_step(path, step):
                    check_tree(path, read_about(path, step))
            source = stack.enter_context(open_source(path))
        except CorruptCheckpointError as err:
            return Verdict(path, 0, 0, None, [str(err)])
        leaves = stored_leaves(source.tree)
        size = sum(one.size_bytes for one in leaves)
        tick = stack.enter_context(progress("verify", size))
        if source.format == "torch":
            checksums, damage = _verify_archives(source)
        else:
            checksums = source.checksums
            damage = _verify_leaves(source, leaves, tick)
        return Verdict(path, len(leaves), size, checksums, damage)


def _verify_archives(source: Source) -> tuple[str | None, list[str]]:
    """Return the algorithm and the damage of files of torch.save; only archives have checksums."""
    if not all(zipfile.is_zipfile(file) for file in source.files):
        return source.checksums, []
    entries = [damaged_entry(file) for file in source.files]
    return "crc32", [entry for entry in entries if entry is not None]


def _verify_leaves(source: Source, leaves: Sequence[Stored], tick: Tick) -> list[str]:
    """Return the damage of all leaves."""
    damage: list[str] = []
    with _SecondReader() as second:
        for one in leaves:
            try:
                _compare_readers(source, one, second, tick)
            except CorruptCheckpointError as err:
                damage.append(str(err))
    return damage


def _compare_readers(source: Source, one: Stored, second: "_SecondReader", tick: Tick) -> None:
    """Read a leaf here, which compares its checksum, and with the safetensors package: both must find equal bytes."""
    reader = source.readers[id(one.leaf)]
    state = xxhash.xxh3_64()
    for part in source.pieces(one.leaf, tick):
        state.update(as_view(part))
    if isinstance(reader, FileLeaf) and isinstance(reader.leaf.source.data, LocalBytes | MappedBytes):
        try:
            found = second.digest(reader.leaf.source.data, reader.leaf)
        except SafetensorError as err:
            raise damaged(f"leaf {reader.leaf.name}: the safetensors package cannot read it: {err}") from err
        if found not in (None, state.digest()):
            raise damaged(f"leaf {reader.leaf.name}: the safetensors package reads other values.")


class _SecondReader(ExitStack):
    """The safetensors package. It maps files, whose pages count as memory, so a file is often opened again."""

    def __init__(self) -> None:
        super().__init__()
        self._file: LocalBytes | MappedBytes | None = None
        # Any: a class of the package's extension.
        self._handle: Any = None
        self._read_bytes = 0

    def _open(self, file: LocalBytes | MappedBytes, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        if self._file is not file or self._read_bytes > _MOST_BYTES:
            self.close()
            self._file = None
            self._read_bytes = size_bytes
            self._handle = self.enter_context(safe_open(file.path, "pt"))
            self._file = file

    def digest(self, file: LocalBytes | MappedBytes, leaf: Leaf) -> bytes | None:
        """Return the digest of a leaf's bytes; None if the file was replaced since it was opened here."""
        name = json_loads(leaf.name)
        state = xxhash.xxh3_64()
        at = 0
        size_bytes = leaf.spec.size_bytes
        while True:
            self._open(file, min(size_bytes, _MOST_BYTES))
            if not os.path.samestat(os.stat(file.path), file.stat):
                return None
            part = self._handle.get_slice(name)
            # A small leaf is read at once, and so is a number.
            rows = 0
            if size_bytes > _MOST_BYTES and part.get_shape():
                rows = part.get_shape()[0]
            if rows:
                end = at + max(1, _MOST_BYTES * rows // size_bytes)
                values = part[at:end]
            else:
                end = 0
                values = self._handle.get_tensor(name)
            if values.dtype != leaf.spec.dtype:
                return b""
            state.update(as_view(values.contiguous()))
            at = end
            if at >= rows:
                return state.digest()
