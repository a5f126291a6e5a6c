"""The header of a safetensors file: the places of the leaves, their digests, and the entries for other readers.

Pure functions on bytes. `docs/formats.md` is the specification; `tree/encode.py` writes the JSON of the tree inside.
"""

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from json.encoder import encode_basestring as quote
from typing import NamedTuple

import xxhash

from tdfunc.core.errors import CorruptCheckpointError, damaged
from tdfunc.storage.tree.foreign import Entries, check_text, parse_foreign
from tdfunc.storage.tree.specs import BITS, Spec, unique

# The second has leaves that several ranks wrote, block by block.
VERSION = "1"
BLOCKS_VERSION = "2"
ALGORITHM = "xxh3-64"
# safetensors 0.8 refuses longer headers.
MAX_HEADER_BYTES = 100_000_000
DIGITS = 16
_ALIGN = 64
_START = '{"__metadata__":{"tdfunc.header":"'
_OURS = re.compile(re.escape(_START.encode()) + rb'([^":]{1,40}):([0-9a-f]+)"')
_LEAVES = '","format":"pt","tdfunc.version":"%s","tdfunc.leaves":"'
_DIGEST_AT = 8 + len(_START) + len(ALGORITHM) + 1


class Layout(NamedTuple):
    """The place of each leaf: positions in file order, and first bytes, counted from the end of the header."""

    order: list[int]
    begins: list[int]
    size_bytes: int
    # The safetensors entries, with a comma before each.
    entries: str


def lay_out(names: Sequence[str], specs: Sequence[Spec]) -> Layout:
    """Place leaves (quoted names in tree order) by falling element size, then dtype, then tree order.

    This order aligns every leaf, and leaves of one dtype are neighbours.
    """
    codes = [spec.code for spec in specs]
    order = list(range(len(specs)))
    present = set(codes)
    if len(present) > 1:
        rank = {code: i for i, code in enumerate(sorted(present, key=lambda code: (-BITS[code], code)))}
        # Sorting keeps the order of equals.
        order.sort(key=[rank[code] for code in codes].__getitem__)
        names = [names[i] for i in order]
        specs = [specs[i] for i in order]
    ends = list(accumulate([spec.size_bytes for spec in specs], initial=0))
    # The end of one is the beginning of the next.
    texts = list(map(str, ends))
    leaves = zip(names, specs, texts, texts[1:], strict=False)
    parts = [f",{name}{spec.middle}{begin},{end}]}}" for name, spec, begin, end in leaves]
    begins = ends[:-1]
    if len(present) > 1:
        for i, begin in zip(order, ends, strict=False):
            begins[i] = begin
    return Layout(order, begins, ends[-1], "".join(parts))


def render(tree: str | None, layout: Layout, blocks: str = "") -> bytearray:
    """Return the bytes before the data (length, header, padding) with zeros for digests, which have a fixed width.

    A shard has no tree; that is in the index. `blocks` is the table of the leaves that were written block by block.
    """
    digests = "0" * (DIGITS * len(layout.order))
    described = ""
    if tree is not None:
        described = f',"tdfunc.tree":{quote(tree)}'
    version = VERSION
    if blocks:
        described += f',"tdfunc.blocks":{quote(blocks)}'
        version = BLOCKS_VERSION
    leaves = _LEAVES % version
    header = f'{_START}{ALGORITHM}:{"0" * DIGITS}{leaves}{digests}"{described}}}{layout.entries}}}'
    text = header.encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return bytearray(len(text).to_bytes(8, "little") + text)


def seal(head: bytearray, digests: Sequence[str]) -> str:
    """Enter the digests of the leaves (in file order), then the digest of the header, and return that."""
    begin = _DIGEST_AT + DIGITS + len(_LEAVES % VERSION)
    head[begin : begin + DIGITS * len(digests)] = "".join(digests).encode()
    own = digest(head)
    head[_DIGEST_AT : _DIGEST_AT + DIGITS] = own.encode()
    return own


class Header(NamedTuple):
    """A header that was parsed into `entries`, or up to the `rest`, which the tree must imply."""

    metadata: dict[str, str]
    algorithm: str | None
    rest: str
    entries: Entries | None
    # The recorded digest of the header.
    digest: str | None = None


def parse(raw: bytes, size_bytes: int, *, verify: bool) -> Header:
    """Read the length and header of a file of `size_bytes`, and compare the digest of the header."""
    found = _OURS.match(raw, 8)
    if found is None:
        metadata, entries = parse_entries(raw, size_bytes)
        if verify and any(key.startswith("tdfunc") for key in metadata):
            raise altered("header", f"a header that starts with {_START}", repr(raw[8:60]))
        return Header(metadata, None, "", entries)
    algorithm = found[1].decode("latin-1")
    recorded = found[2].decode()
    if verify:
        check_own("header", raw, algorithm, recorded, _DIGEST_AT)
    text = raw[8:].decode()
    metadata, end = json.JSONDecoder(object_pairs_hook=unique).raw_decode(text, len('{"__metadata__":'))
    check_text(metadata)
    return Header(metadata, algorithm, text[end:], None, recorded)


def altered(what: str, expected: str, got: str) -> CorruptCheckpointError:
    """Return the error of a header or index that is not as it was written."""
    return damaged(
        f"the {what} is damaged, or another program wrote it again with the metadata of an older file.",
        expected,
        got,
        hint="restore it from a copy, or read it unchecked: load(path, verify=False).",
    )


def check_own(what: str, raw: bytes, algorithm: str, recorded: str, at: int) -> None:
    """Raise unless a header or index has the digest that it contains."""
    check_algorithm(algorithm)
    found = digest(raw, at)
    if recorded != found:
        raise altered(what, f"{ALGORITHM} {recorded}", f"{ALGORITHM} {found}")


def is_ours(raw: bytes) -> bool:
    """Return whether tdfunc wrote the file with this beginning."""
    return raw[8:].startswith(_START.encode())


def check_algorithm(algorithm: str | None) -> None:
    """Raise unless this version of tdfunc can compute the digests."""
    if algorithm != ALGORITHM:
        raise damaged(
            "the checksums are of an unknown algorithm.",
            ALGORITHM,
            repr(algorithm),
            hint="load(path, verify=False) reads the file unchecked.",
        )


def check_digest(what: str, recorded: str, computed: str) -> None:
    """Raise if bytes differ from the bytes that were written."""
    if recorded != computed:
        raise damaged(
            f"{what} is damaged: its checksum does not match.",
            f"{ALGORITHM} {recorded}",
            f"{ALGORITHM} {computed}",
            hint="restore the file from a copy; load(path, verify=False) reads the damaged values.",
        )


def digest(raw: bytes | bytearray, at: int = _DIGEST_AT) -> str:
    """Return the digest of a header (length included) or another text, with zeros in the field of the digest."""
    view = memoryview(raw)
    state = xxhash.xxh3_64(view[:at])
    state.update(b"0" * DIGITS)
    state.update(view[at + DIGITS :])
    return state.hexdigest()


def split_digests(text: str, count: int) -> list[str]:
    """Return the digest of each leaf, in file order."""
    width = len(text) // count if count else 0
    if width * count != len(text) or (count and not width):
        raise damaged("the leaf checksums do not fit the leaves.", f"{count} of one width", f"{len(text)} digits")
    return [text[i * width : (i + 1) * width] for i in range(count)]


def parse_entries(raw: bytes, size_bytes: int) -> tuple[dict[str, str], Entries]:
    """Parse any safetensors header: the metadata, and the leaves, which must cover the data exactly."""
    metadata, entries = parse_foreign(raw[8:])
    check_size(len(raw) + entries.check_cover(), size_bytes)
    return metadata, entries


def check_size(expected: int, size_bytes: int) -> None:
    """Raise if a file is shorter or longer than its header requires."""
    if expected != size_bytes:
        how = "cut short" if size_bytes < expected else "longer than its leaves"
        raise damaged(f"the file is {how}.", f"{expected} bytes", f"{size_bytes} bytes")
