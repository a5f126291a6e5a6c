"""The pickles of torch.save, read by torch's restricted reader: no class that they name is imported, no code runs.

A value of another class than torch's own becomes an `Unknown`, which has its name only. Arrays and numbers of numpy are
put together here, from their bytes.
"""

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError, damaged

# The protocol of torch.save, and the next one, of which the restricted reader knows most and warns.
_PROTOCOL = 2
_LAST_PROTOCOL = 3
# Numbers, bools and texts: everything whose bytes are the value. The unit of dates is elsewhere.
_NUMPY_KINDS = frozenset("biufcSU")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_MISTAKEN_DICT = re.compile(r"Can only SETITEMS? for dict.*<class '(?P<name>[^']+)'>", re.DOTALL)
_MISTAKEN_LIST = re.compile(r"Can only (?:append|extend).* lists?, but got <class '(?P<name>[^']+)'>", re.DOTALL)


class Unknown:
    """A value of a class that is not read; subclasses carry the names of the classes."""

    name = "an object"
    # What the file gives for it, in which there may be tensors.
    parts: Sequence[Any] = ()

    def __new__(cls, *parts: Any) -> Any:
        """Make a value, whatever the file gives for it."""
        made = object.__new__(cls)
        made.parts = parts
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the state beside what the value was made of."""
        self.parts = (*self.parts, state)

    def as_subclass(self, kind: type[Any]) -> "Unknown":
        """Become a value of another class, as torch asks of what rebuilds a subclass of Tensor."""
        if issubclass(kind, Unknown):
            return kind(*self.parts)
        return self

    def __repr__(self) -> str:
        return self.name


class _Dtype:
    """A dtype of numpy, as its pickle describes it."""

    def __init__(self, text: Any = "", *_: Any) -> None:
        self.text: Any = text
        self.order: Any = "|"

    def __setstate__(self, state: Any) -> None:
        """Take the byte order; the rest follows from the text."""
        self.order = state[1]

    def find(self) -> "np.dtype[Any] | None":
        """Return the dtype; None for one whose values are not their bytes."""
        text = self.text.decode() if isinstance(self.text, bytes) else self.text
        if not isinstance(text, str) or re.fullmatch(r"[a-zA-Z]\d*", text) is None or text[0] not in _NUMPY_KINDS:
            return None
        order = self.order if self.order in ("<", ">") else "="
        try:
            return np.dtype(text).newbyteorder(order)
        except TypeError:
            return None


class NumpyArray(Unknown):
    """An array of numpy; `array` is None if its dtype is not known."""

    name = "numpy.ndarray"
    array: "np.ndarray[Any, Any] | None" = None

    def __setstate__(self, state: Any) -> None:
        """Take shape, dtype and bytes."""
        _, shape, dtype, is_fortran, raw = state
        found = None
        if isinstance(dtype, _Dtype):
            found = dtype.find()
        if found is None or not isinstance(raw, bytes) or math.prod(shape) * found.itemsize != len(raw):
            self.parts: Sequence[Any] = (raw,)
            return
        flat = np.frombuffer(bytearray(raw), found)
        self.array = flat.reshape(shape, order="F" if is_fortran else "C")


class _Dict(Unknown):
    def __new__(cls, *_: Any) -> Any:
        return {}


class _List(Unknown):
    def __new__(cls, *_: Any) -> Any:
        return []


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    """Make a number of numpy from its bytes."""
    found = None
    if isinstance(dtype, _Dtype):
        found = dtype.find()
    if found is None or not isinstance(raw, bytes) or not found.itemsize or len(raw) != found.itemsize:
        return _stand_in("numpy.generic", Unknown)()
    return np.frombuffer(raw, found)[0]


def _make_array(*_: Any) -> Any:
    return NumpyArray()


def _no_bytes(*_: Any) -> bytes:
    """Make bytes of none, which is what pickle calls `bytes` for; with a number it would take memory."""
    return b""


def load_pickled(path: str, *, is_archive: bool) -> Any:
    """Read a file of torch.save; tensors of an archive are mapped, unless it is compressed.

    Raises:
        UnsupportedError: It has a function that may do harm, or is of a protocol that torch's reader does not know.
        CorruptCheckpointError: It is damaged.
    """
    protocol = _protocol_of(path, is_archive)
    if protocol > _LAST_PROTOCOL:
        raise _unknown_protocol(path, protocol)
    parts = _known_parts()
    own = {name for _, name in parts}
    # Replacements by the names of classes that are not imported.
    kinds: dict[str, type[Unknown]] = {}
    if is_archive:
        kinds = {name: Unknown for name in _names_of_classes(path) if name not in own}
    # Files of torch before 1.6 cannot be mapped.
    mmap = True if is_archive and _is_stored(path) else None
    while True:
        known: list[Any] = [*parts, *[(_stand_in(name, kind), name) for name, kind in kinds.items()]]
        try:
            with torch.serialization.safe_globals(known), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as err:
            text = str(err)
            found = _mistaken_class(text)
            if found is not None and kinds.get(found[0]) is Unknown:
                # Read the file again, with the items of the class.
                name, kind = found
                kinds[name] = kind
                continue
            if protocol == _PROTOCOL:
                raise _refusal(path, text) from err
            raise _unknown_protocol(path, protocol) from err
        # Damage raises errors of all kinds.
        except Exception as err:
            raise damaged(
                f"{path}: torch.load cannot read the file.", got=f"{type(err).__name__}: {err}"[:300]
            ) from err


def _is_stored(path: str) -> bool:
    """Return whether an archive has the bytes of tensors as they are: mapped, compressed ones would be other numbers.

    torch.save compresses nothing; a program that packs the archive anew may.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return all([entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()])
    # `torch.load` reports what is wrong.
    except (OSError, zipfile.BadZipFile):
        return True


def _names_of_classes(path: str) -> list[str]:
    """Return the names in an archive that torch's restricted reader does not know; none if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    # `torch.load` reports what is wrong.
    except Exception:
        return []


def _mistaken_class(text: str) -> tuple[str, type[Unknown]] | None:
    """Return the class that torch's reader takes for a dict or a list, and its replacement; None for another error."""
    kind = _Dict if "SETITEM" in text else _List
    found = _MISTAKEN_DICT.search(text) or _MISTAKEN_LIST.search(text)
    if found is None:
        return None
    return found["name"].removeprefix(f"{__name__}."), kind


def _known_parts() -> Sequence[tuple[Any, str]]:
    """Return what stands for parts of numpy and Python, with their names."""
    parts: list[tuple[Any, str]] = [(_Dtype, "numpy.dtype"), (NumpyArray, f"{__name__}.NumpyArray")]
    parts += [(_scalar, f"{module}.scalar") for module in _NUMPY]
    parts += [(_make_array, f"{module}._reconstruct") for module in _NUMPY]
    parts += [(_stand_in("numpy.ndarray", Unknown), "numpy.ndarray")]
    parts += [(_Dict, "collections.defaultdict"), (frozenset, "builtins.frozenset"), (_no_bytes, "builtins.bytes")]
    return parts


def _stand_in(name: str, kind: type[Unknown]) -> type[Unknown]:
    """Make the class of values of a class that is not imported."""
    return type(name, (kind,), {"name": name, "__module__": __name__, "__qualname__": name})


def _protocol_of(path: str, is_archive: bool) -> int:
    """Return the pickle protocol of a file; the usual one if it cannot be read."""
    head = b""
    try:
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(name) as file:
                    head = file.read(2)
        else:
            with open(path, "rb") as file:
                head = file.read(2)
    except (OSError, StopIteration, zipfile.BadZipFile):
        # The reader reports what is wrong.
        return _PROTOCOL
    is_named = len(head) == 2 and head[0] == pickle.PROTO[0]
    if is_named:
        return head[1]
    return _PROTOCOL


def _unknown_protocol(path: str, protocol: int) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: torch's restricted reader does not know this pickle protocol.",
        expected=f"protocol {_PROTOCOL}, as torch.save writes it",
        got=f"protocol {protocol}",
        hint="in a program that trusts the file: torch.save(torch.load(path, weights_only=False), path).",
    )


def _refusal(path: str, text: str) -> UnsupportedError | CorruptCheckpointError:
    lines = [line.strip() for line in text.splitlines() if "nsupported" in line or "Can only" in line]
    return UnsupportedError(
        f"{path} has more than tensors and plain data; other objects run code when they are read.",
        got="".join(lines)[:300] or None,
        hint="in a program that trusts the file, save its state dict anew.",
    )


# -- the size of an object ------------------------------------------------------------------------------------------


class Extent(NamedTuple):
    """How much a value is if each part counts as often as it occurs: a pickle of a few bytes can be without end."""

    # Infinite for a container that contains itself.
    depth: float
    values: float
    has_tensors: bool


_ENDLESS = Extent(math.inf, math.inf, has_tensors=True)
_ONE = Extent(0, 1, has_tensors=False)
# A storage has the numbers of a tensor.
_TENSORS = (Tensor, torch.storage.TypedStorage, torch.UntypedStorage)


class Extents:
    """The extents of containers, each found once."""

    def __init__(self) -> None:
        self._known: dict[int, Extent] = {}
        # So that no other object gets the id of one of these.
        self._alive: list[Any] = []

    def of(self, value: Any) -> Extent:
        """Return the extent of a value."""
        # A container is begun, then its parts are found, then it is finished.
        begun: set[int] = set()
        waiting: list[Any] = [value]
        while waiting:
            current = waiting[-1]
            parts = _parts(current)
            if id(current) in self._known or parts is None:
                waiting.pop()
            elif id(current) in begun:
                waiting.pop()
                self._alive.append(current)
                self._known[id(current)] = self._sum(parts)
            else:
                begun.add(id(current))
                waiting += [part for part in parts if id(part) not in begun]
        return self._found(value)

    def _found(self, value: Any) -> Extent:
        if _parts(value) is None:
            return Extent(0, 1, isinstance(value, Tensor))
        # A container that is begun and not finished contains itself.
        return self._known.get(id(value), _ENDLESS)

    def _sum(self, parts: Sequence[Any]) -> Extent:
        found = [self._found(part) for part in parts] or [_ONE]
        depth = 1 + max(one.depth for one in found)
        values = sum(one.values for one in found)
        return Extent(depth, values, has_tensors=any(one.has_tensors for one in found))


class TensorSearch:
    """Finds tensors in values, also in sets and objects of unknown classes; no part is searched twice."""

    def __init__(self) -> None:
        # By id; the file's values are alive as long as they are searched.
        self._with: set[int] = set()
        self._without: set[int] = set()

    def finds(self, value: Any) -> bool:
        """Return whether there is a tensor anywhere in a value."""
        # Each part that is found, and the part that it is in.
        around: dict[int, int | None] = {id(value): None}
        waiting: list[Any] = [value]
        while waiting:
            current = waiting.pop()
            if isinstance(current, _TENSORS) or id(current) in self._with:
                self._mark(id(current), around)
                return True
            for part in _inner(current):
                if id(part) not in around and id(part) not in self._without:
                    around[id(part)] = id(current)
                    waiting.append(part)
        self._without.update(around)
        return False

    def _mark(self, found: int, around: Mapping[int, int | None]) -> None:
        """Record that a part has a tensor, and so has everything that it is in."""
        at: int | None = found
        while at is not None:
            self._with.add(at)
            at = around[at]


def _inner(value: Any) -> Sequence[Any]:
    """Return what is directly in a value that a file made."""
    if isinstance(value, Unknown):
        return value.parts
    if isinstance(value, set | frozenset):
        return list(value)
    return _parts(value) or ()


def _parts(value: Any) -> Sequence[Any] | None:
    """Return the parts of a container; None for another value."""
    if isinstance(value, Mapping):
        found: Mapping[Any, Any] = value
        return list(found.values())
    return value if isinstance(value, list | tuple) else None
