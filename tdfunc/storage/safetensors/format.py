"""The bytes of a checkpoint header: dtypes, layout of the leaves, digests, and the safetensors entries they imply.

No file is touched here. `docs/storage.md` is the specification; `encode.py` writes the JSON of the tree inside.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import xxhash
from torch import Size

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError

VERSION = "1"
ALGORITHM = "xxh3-64"
# safetensors refuses longer headers.
MAX_HEADER_BYTES = 100_000_000
_DIGITS = 16
_ALIGN = 64
_START = '{"__metadata__":{"tdfunc.header":"'
_OURS = re.compile(re.escape(_START.encode()) + rb'([^":]{1,40}):([0-9a-f]+)"')
_LEAVES = f'","format":"pt","tdfunc.version":"{VERSION}","tdfunc.leaves":"'
_DIGEST_AT = 8 + len(_START) + len(ALGORITHM) + 1

# Code in the file -> (torch's name, bits of an element). torch's float4 holds two elements in a byte.
_CODES = {
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64), "C64": ("complex64", 64),
    "F32": ("float32", 32), "I32": ("int32", 32), "U32": ("uint32", 32),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I16": ("int16", 16), "U16": ("uint16", 16),
    "I8": ("int8", 8), "U8": ("uint8", 8), "BOOL": ("bool", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "F4": ("float4_e2m1fn_x2", 4),
}  # fmt: skip
DTYPES = {code: getattr(torch, name) for code, (name, _) in _CODES.items() if hasattr(torch, name)}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in DTYPES.values()
    if hasattr(np, str(dtype).removeprefix("torch.").replace("bool", "bool_"))
}
_MAX_NUMPY_DIMS = 32
_TOO_LARGE = 2**63


class Spec(NamedTuple):
    """What several leaves of a file share: dtype and shape."""

    code: str
    # As the file states it: elements, also where torch counts pairs of them (float4).
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: Size
    size_bytes: int
    # The safetensors entry between the name and the first offset.
    middle: str
    # None where numpy has no such dtype or not so many dimensions, and for leaves without elements.
    numpy: np.dtype[Any] | None


class Layout(NamedTuple):
    """Where each leaf lies: positions in file order, and the first byte of each, counted from the end of the header."""

    order: list[int]
    begins: list[int]
    size_bytes: int
    # The safetensors entries, with a comma before each.
    entries: str


class Entry(NamedTuple):
    """One leaf as a safetensors header that is not ours states it."""

    name: str
    spec: Spec
    begin: int


def is_countable(sizes: Iterable[int], unit: int = 1) -> bool:
    """Whether the elements of a shape, in this unit, and its strides are numbers of 64 bits."""
    # Not the product of all: that of a list of a million sizes takes minutes.
    for size in sizes:
        unit *= max(size, 1)
        if unit >= _TOO_LARGE:
            return False
    return True


def first_twice(keys: Iterable[str]) -> str:
    """Return the first key that was there before; there must be one."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError


def spec_of(code: str, shape: Sequence[int]) -> Spec:
    """Describe a leaf by what the file says of it."""
    if code not in DTYPES:
        raise UnsupportedError(
            f"dtype {code!r} has no counterpart in torch {torch.__version__}.",
            expected=f"one of {', '.join(DTYPES)}",
        )
    if any(type(dim) is not int or dim < 0 for dim in shape):
        raise CorruptCheckpointError("A shape is no list of sizes.", got=repr(shape)[:400])
    # Also strides of leaves without elements are numbers of 64 bits.
    if not is_countable(shape, _CODES[code][1]):
        raise CorruptCheckpointError(
            "A shape is too large.", expected="elements that can be counted in 64 bits", got=repr(shape)[:400]
        )
    size, bits = tuple(shape), math.prod(shape) * _CODES[code][1]
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise CorruptCheckpointError(
                "float4 leaves hold pairs of elements.", expected="an even last dimension", got=str(list(shape))
            )
        size = (*size[:-1], size[-1] // 2)
    dtype, text = DTYPES[code], ",".join(map(str, shape))
    middle = f':{{"dtype":"{code}","shape":[{text}],"data_offsets":['
    numpy = _NUMPY.get(dtype) if bits and len(shape) <= _MAX_NUMPY_DIMS else None
    return Spec(code, tuple(shape), dtype, Size(size), bits // 8, middle, numpy)


def spec_for(dtype: torch.dtype, size: Size) -> Spec | None:
    """Describe a tensor, or return None for a dtype that the file cannot hold."""
    code = CODES.get(dtype)
    if code is None or (code == "F4" and not size):
        return None
    return spec_of(code, (*size[:-1], size[-1] * 2) if code == "F4" else size)


def lay_out(names: Sequence[str], specs: Sequence[Spec]) -> Layout:
    """Place leaves (quoted names in tree order) by falling element size, then dtype, then tree order.

    So every leaf is aligned, and leaves of one dtype are neighbours.
    """
    codes = [spec.code for spec in specs]
    order = list(range(len(specs)))
    if len(present := set(codes)) > 1:
        rank = {code: i for i, code in enumerate(sorted(present, key=lambda code: (-_CODES[code][1], code)))}
        # Sorting keeps the order of equals.
        order.sort(key=[rank[code] for code in codes].__getitem__)
        names, specs = [names[i] for i in order], [specs[i] for i in order]
    ends = list(accumulate([spec.size_bytes for spec in specs], initial=0))
    # The end of one is the beginning of the next.
    texts = list(map(str, ends))
    parts = [
        f",{name}{spec.middle}{begin},{end}]}}"
        for name, spec, begin, end in zip(names, specs, texts, texts[1:], strict=False)
    ]
    begins = ends[:-1]
    if len(present) > 1:
        for i, begin in zip(order, ends, strict=False):
            begins[i] = begin
    return Layout(order, begins, ends[-1], "".join(parts))


# -- writing ----------------------------------------------------------------------------------------------------


def render(tree: str | None, layout: Layout) -> bytearray:
    """Return the bytes before the data (length, header, padding), still without digests, which have a fixed width.

    A shard has no tree; that is in the index.
    """
    digests = "0" * (_DIGITS * len(layout.order))
    described = "" if tree is None else f',"tdfunc.tree":{quote(tree)}'
    header = f'{_START}{ALGORITHM}:{"0" * _DIGITS}{_LEAVES}{digests}"{described}}}{layout.entries}}}'
    text = header.encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return bytearray(len(text).to_bytes(8, "little") + text)


def seal(head: bytearray, digests: Sequence[str]) -> str:
    """Enter the digests of the leaves (in file order) and then that of the header itself, which is returned."""
    begin = _DIGEST_AT + _DIGITS + len(_LEAVES)
    head[begin : begin + _DIGITS * len(digests)] = "".join(digests).encode()
    own = digest(head)
    head[_DIGEST_AT : _DIGEST_AT + _DIGITS] = own.encode()
    return own


# -- reading ----------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """A header that was parsed: in `entries`, or up to the `rest`, which must be what the tree implies."""

    metadata: dict[str, str]
    algorithm: str | None
    rest: str
    entries: list[Entry] | None
    # The digest that the header states of itself.
    digest: str | None = None


def parse(raw: bytes, size_bytes: int, *, verify: bool) -> Header:
    """Read the length and header of a file of `size_bytes`, its own digest included."""
    found = _OURS.match(raw, 8)
    if found is None:
        metadata, entries = parse_entries(raw, size_bytes)
        if verify and any(key.startswith("tdfunc") for key in metadata):
            raise _altered(f"a header that starts with {_START}", repr(raw[8:60]))
        return Header(metadata, None, "", entries)
    algorithm, recorded = found[1].decode("latin-1"), found[2].decode()
    if verify:
        check_algorithm(algorithm)
        if recorded != digest(raw):
            raise _altered(f"{ALGORITHM} {recorded}", f"{ALGORITHM} {digest(raw)}")
    text = raw[8:].decode()
    metadata, end = json.JSONDecoder(object_pairs_hook=unique).raw_decode(text, len('{"__metadata__":'))
    _check_text(metadata)
    return Header(metadata, algorithm, text[end:], None, recorded)


def _altered(expected: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "the header is damaged, or another program wrote it again with the metadata of an older file.",
        expected=expected,
        got=got,
        hint="restore the file from a copy, or read what is there: load(path, verify=False).",
    )


def check_version(metadata: dict[str, str]) -> None:
    """Raise for a format that this version of tdfunc does not read."""
    version = metadata.get("tdfunc.version")
    if version != VERSION:
        raise UnsupportedError(
            "the file has another format version.",
            expected=VERSION,
            got=repr(version),
            hint="install the tdfunc that wrote it, or a newer one.",
        )


def check_algorithm(algorithm: str | None) -> None:
    """Raise for digests that this version of tdfunc cannot compute."""
    if algorithm != ALGORITHM:
        raise CorruptCheckpointError(
            "the checksums are of an unknown algorithm.",
            expected=ALGORITHM,
            got=repr(algorithm),
            hint="load(path, verify=False) reads the file unchecked.",
        )


def check_digest(what: str, recorded: str, computed: str) -> None:
    """Raise where bytes are not those that were written."""
    if recorded != computed:
        raise CorruptCheckpointError(
            f"{what} is damaged: its checksum does not match.",
            expected=f"{ALGORITHM} {recorded}",
            got=f"{ALGORITHM} {computed}",
            hint="restore the file from a copy; load(path, verify=False) reads the damaged values.",
        )


def digest(raw: bytes | bytearray) -> str:
    """Return the digest of a header (length included) with its own field zeroed."""
    view = memoryview(raw)
    state = xxhash.xxh3_64(view[:_DIGEST_AT])
    state.update(b"0" * _DIGITS)
    state.update(view[_DIGEST_AT + _DIGITS :])
    return state.hexdigest()


def split_digests(text: str, count: int) -> list[str]:
    """Return the digest of each leaf, in file order."""
    width = len(text) // count if count else 0
    if width * count != len(text) or (count and not width):
        raise CorruptCheckpointError(
            "the leaf checksums do not fit the leaves.", expected=f"{count} of one width", got=f"{len(text)} digits"
        )
    return [text[i : i + width] for i in range(0, len(text), width)] if count else []


def parse_entries(raw: bytes, size_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    """Parse any safetensors header: metadata, and the leaves, which must cover the data exactly."""
    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_constant=no_constant, parse_float=no_constant)
    header = decoder.decode(raw[8:].decode())
    if not isinstance(header, dict):
        raise CorruptCheckpointError("the header is no JSON object.", got=repr(header)[:200])
    metadata = header.pop("__metadata__", {})
    _check_text(metadata)
    entries = [as_entry(name, fields) for name, fields in header.items()]
    end = 0
    for name, spec, begin in sorted(entries, key=lambda e: (e.begin, e.spec.size_bytes)):
        if begin != end:
            raise CorruptCheckpointError(
                f"leaf {name!r} overlaps its neighbour or leaves a hole.",
                expected=f"first byte {end}",
                got=str(begin),
            )
        end += spec.size_bytes
    check_size(len(raw) + end, size_bytes)
    return metadata, entries


def as_entry(name: str, fields: Any) -> Entry:
    """Check one entry of a header."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpointError(
            f"leaf {name!r} is malformed.", expected="dtype, shape and data_offsets", got=repr(fields)[:200]
        )
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    typed = isinstance(code, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not typed or any(type(offset) is not int or offset < 0 for offset in offsets):
        raise CorruptCheckpointError(
            f"leaf {name!r} is malformed.", expected="a dtype, sizes and two offsets", got=repr(fields)[:200]
        )
    try:
        spec = spec_of(code, shape)
    except (CorruptCheckpointError, UnsupportedError) as err:
        raise type(err)(f"leaf {name!r}: {err}") from err
    if offsets[1] - offsets[0] != spec.size_bytes:
        raise CorruptCheckpointError(
            f"leaf {name!r} has not the bytes that its shape needs.",
            expected=f"{spec.size_bytes} for {code} {shape}",
            got=f"data_offsets {offsets}",
        )
    return Entry(name, spec, offsets[0])


def check_size(expected: int, size_bytes: int) -> None:
    """Raise for a file that is shorter or longer than its header says."""
    if expected != size_bytes:
        how = "cut short" if size_bytes < expected else "longer than its leaves"
        raise CorruptCheckpointError(
            f"the file is {how}.",
            expected=f"{expected} bytes",
            got=f"{size_bytes} bytes",
            hint="restore it from a copy.",
        )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; readers disagree on which of two equal keys counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CorruptCheckpointError("the header has a key twice.", got=repr(first_twice([key for key, _ in pairs])))
    return result


def no_constant(text: str) -> NoReturn:
    """Refuse NaN and infinities, which are no JSON, and (as `parse_float`) fractions where sizes belong."""
    raise CorruptCheckpointError("the header has a number that is none.", expected="a whole number", got=text[:40])


def _check_text(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError("the metadata is no map of strings.", got=repr(metadata)[:200])


def find_surrogate(texts: Iterable[str]) -> str | None:
    """Return the first text that UTF-8 cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            return text
    return None
