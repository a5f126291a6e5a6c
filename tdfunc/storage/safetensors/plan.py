"""The files that a save writes: their names, headers and the order of their leaves, checked before the first byte."""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from torch import Tensor

from tdfunc.core.errors import UnsupportedError, as_count, brief, error
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES, lay_out, render
from tdfunc.storage.safetensors.index import render_index
from tdfunc.storage.tree.encode import Outline

# No allocator hands out addresses below this one; a storage that was freed has the address 0.
_LOW_ADDRESS = 1 << 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_UNITS = {
    **{unit: 1000**power for power, unit in enumerate([" ", "K", "M", "G", "T"])},
    **{unit: 1024**power for power, unit in enumerate([" I", "KI", "MI", "GI", "TI"])},
}
# Called with a leaf when its turn has come: its bytes.
Values: TypeAlias = Callable[[Tensor], Iterable[memoryview]]


class FilePlan(NamedTuple):
    """The contents of one file."""

    # Length and header, still without checksums.
    head: bytearray
    # In file order: the address of a leaf whose bytes can be copied from memory (else 0), and its size.
    work: list[tuple[int, int, Tensor]]
    size_bytes: int
    # In file order, by name: the digest that a leaf must have when it is written, or None.
    expected: list[tuple[str, str | None]]
    # Returns the bytes of a leaf without memory; called when its turn has come.
    values: Values | None = None
    # Called with the number of bytes that are written.
    tick: Callable[[int], object] = lambda done: None


class SavePlan(NamedTuple):
    """The files of one save: one of any name, or shards with their names and index."""

    files: list[FilePlan]
    names: list[str]
    # Returns the bytes of the index, given the digest of each shard's header.
    render: Callable[[Sequence[str]], bytes] | None = None


def plan_save(
    outline: Outline,
    max_bytes: int | None = None,
    digests: Mapping[str, str] | None = None,
    values: Values | None = None,
) -> SavePlan:
    """Place the leaves in files, and check that they can be read.

    Args:
        outline: The tree.
        max_bytes: The most bytes of leaves in one shard; None for one file.
        digests: By name, digests that leaves must have when they are written.
        values: A function that returns the bytes of a leaf, for leaves without memory.

    Raises:
        UnsupportedError: A leaf is without memory to read, or a header is too long; nothing was written.
    """
    if max_bytes is None:
        return SavePlan([_plan_file(outline, digests, values)], [])
    groups = _group_by_size(outline, max_bytes)
    # No other save has these names, so that the index decides which shards are read.
    generation = secrets.token_hex(4)
    count = len(groups)
    names = [f"model-{generation}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    homes: list[str] = []
    for name, group in zip(names, groups, strict=True):
        homes += [name] * len(group)
    size_bytes = sum([spec.size_bytes for spec in outline.specs])

    def index(headers: Sequence[str]) -> bytes:
        shards = dict(zip(names, headers, strict=True))
        assert outline.text is not None
        return render_index(outline.text, outline.names, homes, shards, size_bytes)

    _check_length("index", len(index(["0" * 16] * count)))
    files: list[FilePlan] = []
    for group in groups:
        leaves = slice(group.start, group.stop)
        part = Outline(None, outline.names[leaves], outline.specs[leaves], outline.leaves[leaves])
        files.append(_plan_file(part, digests, values))
    return SavePlan(files, names, index)


def _group_by_size(outline: Outline, max_bytes: int) -> list[range]:
    """Return the leaves of each shard, which are neighbours; a leaf that is larger than a shard gets its own."""
    groups: list[range] = []
    start = 0
    used = 0
    for i, spec in enumerate(outline.specs):
        if i > start and used + spec.size_bytes > max_bytes:
            groups.append(range(start, i))
            start = i
            used = 0
        used += spec.size_bytes
    groups.append(range(start, len(outline.specs)))
    return groups


def _plan_file(outline: Outline, digests: Mapping[str, str] | None, values: Values | None) -> FilePlan:
    layout = lay_out(outline.names, outline.specs)
    names = outline.names
    specs = outline.specs
    leaves = outline.leaves
    work: list[tuple[int, int, Tensor]] = []
    for i in layout.order:
        address = 0
        if values is None:
            address = address_of("save", names[i], leaves[i])
        work.append((address, specs[i].size_bytes, leaves[i]))
    head = render(outline.text, layout)
    _check_length("header", len(head) - 8)
    expected = []
    if digests:
        expected = [(names[i], digests.get(names[i])) for i in layout.order]
    return FilePlan(head, work, len(head) + layout.size_bytes, expected, values)


def _check_length(what: str, size_bytes: int) -> None:
    if size_bytes > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"save: the {what} would be too long; nothing was written.",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            got=f"{size_bytes} bytes",
            hint="save parts of the tree in several files.",
        )


def address_of(call: str, name: str, leaf: Tensor) -> int:
    """Return the address of the bytes of a leaf in row-major order on the CPU; 0 if it has to be copied for that."""
    try:
        address = leaf.data_ptr()
        got = f"{leaf.untyped_storage().nbytes()} bytes of storage"
    except RuntimeError:
        address = None
        got = f"a tensor inside a transformation ({type(leaf).__name__})"
    if address is None or (address < _LOW_ADDRESS and leaf.numel()):
        raise UnsupportedError(
            f"{call}: leaf {name} has no memory to read; nothing was written.",
            expected="a tensor with values",
            got=got,
            hint="save outside of torch.func transformations, and before a storage is freed.",
        )
    if not is_plain(leaf):
        return 0
    return address


def is_plain(leaf: Tensor) -> bool:
    """Return whether the bytes of a leaf are in memory as in a file."""
    return leaf.is_contiguous() and leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg()


def as_bytes(size: int | str) -> int:
    """Return the number of bytes in `5_000_000_000`, `"5000000000"`, `"5GB"` or `"4.7 GiB"`.

    Raises:
        ValueError: It is not a size of a byte or more.
    """
    if not isinstance(size, (str, bool)):
        with suppress(TypeError, ValueError):
            return as_count("save: max_shard_size", size)
    count = 0
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        if found is not None:
            unit = found[2] or " "
            count = int(float(found[1]) * _UNITS[unit.upper()])
    if count <= 0:
        raise error(
            ValueError,
            "save: max_shard_size is not a size.",
            expected='a number of bytes, or a text as "5GB" or "512MiB"',
            got=brief(size),
        )
    return count
