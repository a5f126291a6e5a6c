"""`tdfunc verify`: a check of every leaf of a checkpoint, and a list of the damaged ones."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from json import loads as json_loads
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError, safe_open

from tdfunc.cli.output import print_json, progress, safe
from tdfunc.cli.sources import FileLeaf, Source, Stored, Tick, open_source, step_of, steps_in, stored_leaves
from tdfunc.cli.torch_files import damaged_entry
from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.ops.display.text import bytes_text, count_text
from tdfunc.storage.disk.remote import Bytes, LocalBytes, local_path
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    check_tree,
    naming_step,
    read_about,
    reading,
)
from tdfunc.storage.safetensors.read import as_view

OK, DAMAGED, UNPROTECTED = 0, 1, 3


class Verdict(NamedTuple):
    """The findings about one tree."""

    path: str
    leaves: int
    size_bytes: int
    # The algorithm, or None where there are no checksums.
    checksums: str | None
    damage: list[str]

    @property
    def code(self) -> int:
        """The exit code of this tree alone."""
        return DAMAGED if self.damage else OK if self.checksums is not None else UNPROTECTED


def verify(path: str, *, json: bool) -> int:
    """Read everything and compare the checksums; return the exit code, the worst of all steps."""
    verdicts: list[Verdict] = []
    for verdict in _verify_all(local_path(path)):
        verdicts.append(verdict)
        if not json:
            print(_text(verdict))
    codes = {verdict.code for verdict in verdicts}
    code = DAMAGED if DAMAGED in codes else UNPROTECTED if UNPROTECTED in codes else OK
    if json:
        print_json({"code": code, "checkpoints": [{**v._asdict(), "code": v.code} for v in verdicts]})
    return code


def _text(verdict: Verdict) -> str:
    size = f"{count_text(verdict.leaves, 'leaf')}, {bytes_text(verdict.size_bytes)}"
    name = safe(verdict.path)
    if verdict.damage:
        lines = [f"{name}: damaged", *(f"  {line}" for text in verdict.damage for line in map(safe, text.split("\n")))]
        return "\n".join(lines)
    if verdict.checksums is None:
        return f"{name}: no checksums to compare; the structure is whole ({size})"
    return f"{name}: whole ({size}, {verdict.checksums})"


def _verify_all(path: str) -> Iterator[Verdict]:
    steps = steps_in(path)
    for step in steps:
        # A run that goes on may have removed or replaced it by now.
        with suppress(StepRemovedError, StepReplacedError), reading(path, step) as folder:
            yield _verify_one(folder)
    if not steps:
        yield _verify_one(path)


def _verify_one(path: str) -> Verdict:
    """Verify one tree; an error that keeps it from being opened is damage too."""
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
        damage: list[str] = []
        checksums = source.checksums
        tick = stack.enter_context(progress("verify", size))
        if source.format == "torch":
            if zipfile.is_zipfile(path):
                checksums, found = "crc32", damaged_entry(path)
                damage += [] if found is None else [found]
            return Verdict(path, len(leaves), size, checksums, damage)
        try:
            second = _second_reader(source, stack)
        except SafetensorError as err:
            damage.append(f"the safetensors package cannot read it: {err}")
            second = {}
        for one in leaves:
            try:
                _compare_readers(source, one, second, tick)
            except CorruptCheckpointError as err:
                damage.append(str(err))
        return Verdict(path, len(leaves), size, checksums, damage)


# Any: a handle of the safetensors package, which is a class of its extension.
def _second_reader(source: Source, stack: ExitStack) -> dict[Bytes, Any]:
    """Open the local files of a source with the safetensors package, too: a handle for each."""
    files = {reader.data for reader in source.readers.values() if isinstance(reader, FileLeaf)}
    handles = {file: stack.enter_context(safe_open(file.path, "pt")) for file in files if isinstance(file, LocalBytes)}
    # Another program may have replaced a file since it was opened here.
    return {f: handle for f, handle in handles.items() if os.path.samestat(os.stat(f.path), os.fstat(f.fd))}


def _compare_readers(source: Source, one: Stored, second: dict[Bytes, Any], tick: Tick) -> None:
    """Read a leaf here, which compares its checksum, and by the second reader: both must find the same bytes."""
    reader, state = source.readers[id(one.leaf)], xxhash.xxh3_64()
    for part in source.pieces(one.leaf, tick):
        state.update(as_view(part))
    if isinstance(reader, FileLeaf) and reader.data in second:
        try:
            other = second[reader.data].get_tensor(json_loads(reader.name))
        except SafetensorError as err:
            raise CorruptCheckpointError(f"leaf {reader.name}: the safetensors package cannot read it: {err}") from err
        if other.dtype != reader.dtype or xxhash.xxh3_64_digest(as_view(other)) != state.digest():
            raise CorruptCheckpointError(f"leaf {reader.name}: the safetensors package reads other values.")
