"""`tdfunc verify`: whether a checkpoint is what was saved, with every leaf that is not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from tdfunc.cli.leaves import stored_leaves
from tdfunc.cli.output import as_json, progress, safe, shown_lines
from tdfunc.cli.readers import MemmapLeaf
from tdfunc.cli.sources import Source, open_source, step_of, steps_in
from tdfunc.cli.streams import emit
from tdfunc.cli.torch_files import damaged_entries
from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.ops.display.text import bytes_text, count_text
from tdfunc.storage.disk.remote import local_path
from tdfunc.storage.manager.manager import check_tree, naming_step, read_about
from tdfunc.storage.manager.steps import StepRemovedError, StepReplacedError, reading

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
    verdicts: list[Verdict] = []
    for verdict in _verify_all(local_path(path)):
        verdicts.append(verdict)
        if not json:
            emit(_text(verdict))
    codes = {verdict.code for verdict in verdicts}
    code = DAMAGED if DAMAGED in codes else UNPROTECTED if UNPROTECTED in codes else OK
    if json:
        emit(as_json({"code": code, "checkpoints": [{**v._asdict(), "code": v.code} for v in verdicts]}))
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
        # A run that goes on may have removed it by now.
        with suppress(StepRemovedError):
            yield _verify_step(path, step)
    if not steps:
        yield _verify_one(path)


class _Damaged(CorruptCheckpointError):
    """Damage that was found in a step, if it is still the one that was read."""

    verdict: Verdict


def _verify_step(run: str, step: int) -> Verdict:
    """Verify one step; one that another save replaces while it is read is read again."""
    while True:
        try:
            with reading(run, step) as folder:
                verdict = _verify_one(folder)
                if verdict.damage:
                    found = _Damaged()
                    found.verdict = verdict
                    raise found
                return verdict
        except StepReplacedError:
            continue
        except _Damaged as found:
            return found.verdict


def _verify_one(path: str) -> Verdict:
    """Verify one tree; what keeps it from being opened at all is damage too."""
    with ExitStack() as stack:
        try:
            step = step_of(path)
            if step is not None:
                with naming_step(path, step):
                    check_tree(path, read_about(path, step))
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
