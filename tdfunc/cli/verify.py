"""`tdfunc verify`: whether a checkpoint is what was saved, with every leaf that is not."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from tdfunc._errors import CorruptCheckpointError
from tdfunc.cli.output import as_json, emit, progress, safe, shown_lines
from tdfunc.cli.sources import MemmapLeaf, Source, open_source, steps_in, stored_leaves
from tdfunc.cli.torch_files import damaged_entries
from tdfunc.ops.facts import bytes_text, count_text
from tdfunc.storage.manager import ABOUT_FILE, _check_tree, _naming, _read_about
from tdfunc.storage.steps import reading

OK, DAMAGED, UNPROTECTED = 0, 1, 3


class Verdict(NamedTuple):
    """What was found of one tree."""

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
    verdicts = list(_verify_all(path))
    codes = {verdict.code for verdict in verdicts}
    code = DAMAGED if DAMAGED in codes else UNPROTECTED if UNPROTECTED in codes else OK
    if json:
        emit(as_json({"code": code, "checkpoints": [{**v._asdict(), "code": v.code} for v in verdicts]}))
        return code
    for verdict in verdicts:
        emit(_text(verdict))
    return code


def _text(verdict: Verdict) -> str:
    size = f"{count_text(verdict.leaves, 'leaf')}, {bytes_text(verdict.size_bytes)}"
    name = safe(verdict.path)
    if verdict.damage:
        lines = [f"{name}: damaged", *(f"  {shown_lines(text)}" for text in verdict.damage)]
        return "\n".join(lines)
    if verdict.checksums is None:
        return f"{name}: no checksums to compare; the structure is whole ({size})"
    return f"{name}: whole ({size}, {verdict.checksums})"


def _verify_all(path: str) -> Iterator[Verdict]:
    steps = steps_in(path)
    for step in steps:
        with reading(path, step) as folder:
            yield _verify_one(folder)
    if not steps:
        yield _verify_one(path)


def _verify_one(path: str) -> Verdict:
    """Verify one tree; what keeps it from being opened at all is damage too."""
    name = os.path.basename(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            if os.path.isfile(os.path.join(path, ABOUT_FILE)) and name.startswith("step-") and name[5:].isdigit():
                with _naming(path, int(name[5:])):
                    _check_tree(path, _read_about(path, int(name[5:])))
            source = stack.enter_context(open_source(path))
        except CorruptCheckpointError as err:
            return Verdict(path, 0, 0, None, [str(err)])
        return _verify_leaves(path, source)


def _verify_leaves(path: str, source: Source) -> Verdict:
    leaves = stored_leaves(source.tree)
    size = sum(one.size_bytes for one in leaves)
    damage: list[str] = []
    checksums = source.checksums
    with progress("verify", size) as tick:
        if source.format == "torch":
            checksums = _verify_archive(path, damage, tick)
        elif checksums is not None or source.format == "memmap":
            for one in leaves:
                try:
                    _read(source, one.leaf, tick)
                except CorruptCheckpointError as err:
                    damage.append(str(err))
    return Verdict(path, len(leaves), size, checksums, damage)


# Any: a leaf of the tree.
def _read(source: Source, leaf: Any, tick: Callable[[int], object]) -> None:
    reader = source.reader(leaf)
    if isinstance(reader, MemmapLeaf):
        # There is nothing to compare the values with.
        reader.check()
        return
    for _ in source.pieces(leaf, tick):
        pass


def _verify_archive(path: str, damage: list[str], tick: Callable[[int], object]) -> str | None:
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"
    if not is_archive:
        return None
    damage += damaged_entries(path, tick)
    return "crc32"
