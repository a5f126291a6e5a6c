"""Leaves in a description: dtypes by their codes, shapes that can be counted, and JSON that has one meaning.

`docs/formats.md` is the specification.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Size

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, brief, damaged

# Code in the file -> (torch's name, bits of an element). torch's float4 holds two elements in a byte.
_CODES = {
    "F64": ("float64", 64), "I64": ("int64", 64), "U64": ("uint64", 64), "C64": ("complex64", 64),
    "F32": ("float32", 32), "I32": ("int32", 32), "U32": ("uint32", 32),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I16": ("int16", 16), "U16": ("uint16", 16),
    "I8": ("int8", 8), "U8": ("uint8", 8), "BOOL": ("bool", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "F4": ("float4_e2m1fn_x2", 4),
    "C128": ("complex128", 128), "C32": ("complex32", 32),
}  # fmt: skip
# Codes that safetensors does not have: only memmap folders hold such leaves.
_FOLDERS_ONLY = ("C128", "C32")
DTYPES = {code: getattr(torch, name) for code, (name, _) in _CODES.items() if hasattr(torch, name)}
FOLDER_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
FILE_CODES = {dtype: code for dtype, code in FOLDER_CODES.items() if code not in _FOLDERS_ONLY}
BITS = {code: bits for code, (_, bits) in _CODES.items()}
# The dtypes of safetensors. torch does not have all of them.
FILE_BITS = {code: bits for code, bits in BITS.items() if code not in _FOLDERS_ONLY} | {"F6_E2M3": 6, "F6_E3M2": 6}
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in DTYPES.values()
    if hasattr(np, str(dtype).removeprefix("torch.").replace("bool", "bool_"))
}
_MAX_NUMPY_DIMS = 32
_TOO_LARGE = 2**63


class Spec(NamedTuple):
    """The dtype and shape that several leaves share."""

    code: str
    # As in the file: in elements, also for float4, of which torch counts pairs.
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: Size
    size_bytes: int
    # The safetensors entry between the name and the first offset.
    middle: str
    # None if numpy does not have the dtype or so many dimensions, or if the leaf has no elements.
    numpy: np.dtype[Any] | None


def is_countable(sizes: Iterable[int], unit: int = 1) -> bool:
    """Return whether the number of elements of a shape, times a unit, and its strides fit in 64 bits."""
    # Not the product of all: for a list of a million sizes it would take minutes.
    for size in sizes:
        unit *= max(size, 1)
        if unit >= _TOO_LARGE:
            return False
    return True


def spec_of(code: str, shape: Sequence[int]) -> Spec:
    """Return the spec of a code and a shape in a file."""
    if code not in DTYPES:
        raise UnsupportedError(
            f"torch {torch.__version__} does not have the dtype {code!r}.",
            expected=f"one of {', '.join(DTYPES)}",
        )
    if any(type(dim) is not int or dim < 0 for dim in shape):
        raise damaged("a shape is not a list of sizes.", got=brief(shape))
    # Also strides of leaves without elements are numbers of 64 bits.
    if not is_countable(shape, BITS[code]):
        raise damaged("a shape is too large.", "elements that can be counted in 64 bits", brief(shape))
    size = tuple(shape)
    bits = math.prod(shape) * BITS[code]
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise damaged("a float4 leaf has half a pair of elements.", "an even last dimension", str(list(shape)))
        size = (*size[:-1], size[-1] // 2)
    dtype = DTYPES[code]
    text = ",".join(map(str, shape))
    middle = f':{{"dtype":"{code}","shape":[{text}],"data_offsets":['
    numpy = None
    if bits and len(shape) <= _MAX_NUMPY_DIMS:
        numpy = _NUMPY.get(dtype)
    return Spec(code, tuple(shape), dtype, Size(size), bits // 8, middle, numpy)


def spec_for(dtype: torch.dtype, size: Sequence[int], codes: Mapping[torch.dtype, str]) -> Spec | None:
    """Return the spec of a tensor, or None for a dtype that the format cannot hold."""
    code = codes.get(dtype)
    if code is None or (code == "F4" and not size):
        return None
    if code == "F4":
        # torch counts pairs.
        size = (*size[:-1], size[-1] * 2)
    return spec_of(code, size)


def malformed(expected: str, got: str) -> CorruptCheckpointError:
    """Build the error for JSON that does not describe a tree."""
    return damaged("the description of the tree is malformed.", expected[:400], got[:400])


def parse_json(raw: str | bytes) -> Any:
    """Parse JSON from a file; refuse an object with a key twice, and numbers that JSON does not have."""
    return json.loads(raw, object_pairs_hook=unique, parse_constant=no_constant)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; refuse two equal keys, of which readers use different ones."""
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter([key for key, _ in pairs])
        twice = next(key for key, count in counts.items() if count > 1)
        raise damaged("the header has a key twice.", got=brief(twice))
    return result


def no_constant(text: str) -> NoReturn:
    """Refuse NaN and infinities, which are not JSON, and (as `parse_float`) fractions in place of sizes."""
    raise damaged("the header has a number that JSON does not have.", "a whole number", text[:40])


def find_surrogate(texts: Iterable[str]) -> str | None:
    """Return the first string that UTF-8 cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            return text
    return None
