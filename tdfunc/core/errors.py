"""The exceptions of tdfunc, and the four parts of their messages: what must hold, expected, got and hint.

Each is a subclass of the builtin error that a caller would catch anyway; `error` builds plain builtin errors likewise.
"""

import math
import os
import reprlib
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from operator import index
from typing import Any, TypeVar, cast

import torch

E = TypeVar("E", bound=Exception)
_OWN_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
_MODULES_OF_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn", "modules") + os.sep
# They call the forwards of other modules.
_CALLERS = ("module.py", "container.py")

# Longer parts of a message are cut: they are texts of a file, or the names of all its leaves.
_MAX_PART = 2_000
_MAX_ITEMS = 10
_MAX_TEXT = 80
_MAX_DEPTH = 3
_MAX_BRIEF = 300
# Python refuses to write integers of more digits.
_MAX_BITS = 1_000


class _Brief(reprlib.Repr):
    """Shows ten items of a container, three containers deep, and 80 characters of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _MAX_DEPTH
        self.maxstring = self.maxlong = self.maxother = _MAX_TEXT
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = _MAX_ITEMS

    # Any: a value of a file.
    def repr1(self, x: Any, level: int) -> str:
        """Return the text of a value; reprlib's own would show a subclass of a container whole."""
        if isinstance(x, Mapping) and type(x) is not dict:
            return f"{type(x).__name__}({self.repr_dict({**x}, level)})"
        if isinstance(x, list | tuple) and type(x) not in (list, tuple):
            return f"{type(x).__name__}({self.repr_list([*x], level)})"
        return super().repr1(x, level)

    # Any: a tensor; `reprlib` finds the method by the name of the class.
    def repr_Tensor(self, x: Any, level: int) -> str:
        """Return the numbers of a small tensor on one line; the shape and dtype of a larger one."""
        text = f"{type(x).__name__} of shape {tuple(x.shape)}, {x.dtype}"
        if x.numel() <= _MAX_ITEMS:
            text = " ".join(repr(x).split())
        return _cut(text, _MAX_TEXT)

    repr_Parameter = repr_Tensor

    def repr_int(self, x: int, level: int) -> str:
        """Return a number in digits, or its size."""
        if x.bit_length() <= _MAX_BITS:
            return super().repr_int(x, level)
        return f"<integer of {x.bit_length()} bits>"


_brief = _Brief()


def brief(value: object) -> str:
    """Return the repr of foreign data, bounded in length and time: ten items, three levels, 80 characters of a text.

    Use it for values of a file in messages. A few bytes of YAML can be a list whose whole repr takes all memory.
    """
    return _cut(_brief.repr(value), _MAX_BRIEF)


def explain(what: object = "", *, expected: object = None, got: object = None, hint: str | None = None) -> str:
    """Return a message of one line for each part that is given."""
    parts = (("  expected: ", expected), ("  got:      ", got), ("  hint:     ", hint))
    return "\n".join([str(what), *[f"{name}{_cut(str(part), _MAX_PART)}" for name, part in parts if part is not None]])


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length]}... ({len(text):,} characters)"


def error(kind: type[E], what: object, *, expected: object = None, got: object = None, hint: str | None = None) -> E:
    """Return a builtin error with a message of four parts."""
    return kind(explain(what, expected=expected, got=got, hint=hint))


def check_choice(what: str, value: object, choices: Collection[object]) -> None:
    """Raise unless an option has one of its values."""
    if value not in choices:
        raise error(ValueError, f"{what} must be one of {', '.join(map(repr, choices))}.", got=repr(value))


def as_count(what: str, number: object, least: int = 1) -> int:
    """Return a count as a plain int: a whole number of Python, numpy or torch, and a float without a fraction.

    Raises:
        TypeError: It is not a whole number; a count with a fraction is never reached.
        ValueError: It is below `least`.
    """
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    try:
        # Any: whatever has `__index__`.
        count = index(cast(Any, number))
    except TypeError as err:
        raise error(TypeError, f"{what} must be a whole number.", got=repr(number)[:80]) from err
    check_least(what, count, least)
    return count


def as_flag(what: str, value: object) -> bool:
    """Return a yes or no as a plain bool: a bool of Python, numpy or torch, 0 or 1.

    Raises:
        TypeError: It is something else; every text but the empty one would be True.
    """
    if value is None or isinstance(value, str) or value not in (0, 1):
        raise error(TypeError, f"{what} must be True or False.", got=brief(value))
    return bool(value)


def as_number(what: str, number: object) -> float:
    """Return a finite number of Python, numpy or torch as one of Python.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite.
    """
    if isinstance(number, str) or not hasattr(number, "__float__"):
        raise error(TypeError, f"{what} is not a number.", got=brief(number))
    if type(number) in (int, float):
        plain = number
    else:
        plain = float(cast(Any, number))
    check_finite(what, cast(float, plain))
    return cast(float, plain)


def refuse_text(what: str, values: object) -> None:
    """Raise if one text is given for several: its characters would count as them."""
    if isinstance(values, str):
        raise error(TypeError, f"{what} must be several, not one text.", got=brief(values), hint=f"[{brief(values)}]")


def check_least(what: str, number: float, least: int = 1) -> None:
    """Raise unless a number has at least a value."""
    if not number >= least:
        raise error(ValueError, f"{what} must be at least {least}.", got=number)


@contextmanager
def needs(call: str, package: str, install: str) -> Generator[None, None, None]:
    """Name what to install if an import in the block fails: a package, or an extra as in `tdfunc[cli]`."""
    try:
        yield
    except ImportError as err:
        name = f'"{install}"' if "[" in install else install
        raise error(
            ImportError, f"{call} needs {package}, which cannot be imported.", got=str(err), hint=f"pip install {name}"
        ) from err


def check_finite(what: str, number: float) -> None:
    """Raise unless a number is finite: with a NaN as a margin, nothing is ever an improvement."""
    if not math.isfinite(number):
        raise error(ValueError, f"{what} must be finite.", got=number)


def user_line(err: BaseException | None = None) -> str:
    """Return the innermost line that is neither torch's nor ours, as `file:number: code`."""
    if err is not None:
        frames = traceback.extract_tb(err.__traceback__)
    else:
        frames = traceback.extract_stack()
    return _innermost(frames, _is_foreign) or "(no line found)"


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor ours."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def forward_line(err: BaseException) -> str | None:
    """Return the line of a forward at which an error or its cause was raised, as `file:number: code`.

    It is the innermost line that is neither torch's nor ours; if there is none, a line of a module of torch. The result
    is None if the error does not come from a forward.
    """
    frames: list[traceback.FrameSummary] = []
    at: BaseException | None = err
    while at is not None:
        frames += traceback.extract_tb(at.__traceback__)
        at = at.__cause__
    return _innermost(frames, _is_foreign) or _innermost(frames, _is_of_module)


def _innermost(frames: Sequence[traceback.FrameSummary], holds: Callable[[str], bool]) -> str | None:
    for frame in reversed(frames):
        if holds(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def _is_foreign(filename: str) -> bool:
    return not os.path.abspath(filename).startswith(_OWN_FOLDERS) and not filename.startswith("<")


def _is_of_module(filename: str) -> bool:
    return filename.startswith(_MODULES_OF_TORCH) and os.path.basename(filename) not in _CALLERS


class _Explained(Exception):
    """Takes the parts of a message; given one alone, as by pickle, it is the message."""

    def __init__(
        self, what: object = "", *, expected: object = None, got: object = None, hint: str | None = None
    ) -> None:
        # `BaseException.__new__` has set `args` to `what`; dynamo (2.13) cannot trace `super().__init__`.
        if expected is not None or got is not None or hint is not None:
            self.args: tuple[str, ...] = (explain(what, expected=expected, got=got, hint=hint),)


class ImmutableError(_Explained, TypeError, FrozenInstanceError):
    """An assignment to a tree; the message is the pure call to write instead."""


class MissingKeyError(_Explained, KeyError):
    """A key path that the tree does not have."""

    # KeyError prints the repr of its argument, which would show `\n` instead of lines.
    def __str__(self) -> str:
        return str(self.args[0])


class BatchSizeError(_Explained, ValueError):
    """A leaf or tree whose leading dimensions are not the batch size."""


class LeafMismatchError(_Explained, ValueError):
    """A leaf whose shape, dtype or kind does not fit the place it is put in."""


class TreeStructureError(_Explained, ValueError):
    """Trees (or a tree and a module) whose key paths differ."""


class TieError(_Explained, ValueError):
    """An edit that would give two paths of one tied tensor different values."""


class FilterError(_Explained, ValueError):
    """A filter that cannot be read, or a pattern that matches no leaf."""


class LeakError(_Explained, RuntimeError):
    """A forward that used an original weight instead of the one it was given."""


class ConcurrencyError(_Explained, RuntimeError):
    """Two threads, or two blocks out of order, inside one module; or a leaf that changed while it was saved."""


class UnsupportedError(_Explained, TypeError):
    """A module, tensor or call that tdfunc cannot treat as a pure function."""


class CaptureError(_Explained, RuntimeError):
    """A traced function that uses a tensor which is not one of its arguments."""


class CorruptCheckpointError(_Explained, ValueError):
    """A file that differs from the one that was saved, torn or altered, or that is not a checkpoint."""


def damaged(
    what: object, expected: object = None, got: object = None, *, hint: str = "restore it from a copy."
) -> CorruptCheckpointError:
    """Return the error of a file that is not as it was written."""
    return CorruptCheckpointError(what, expected=expected, got=got, hint=hint)


class WorkerError(_Explained, RuntimeError):
    """A worker process that died, could not start, or raised an error that cannot be sent back; a member that did."""


class RemoteError(_Explained, RuntimeError):
    """A server that could not be reached, refused a request, or cut or garbled its answer.

    Attributes:
        status: The HTTP status of the answer; None if it cannot be read.
        retry_after_s: The seconds after which the server takes another request, if the answer contains them.
    """

    status: "int | None" = None
    retry_after_s: "float | None" = None


class PeerError(_Explained, RuntimeError):
    """A process of a group that died, was cut off, or did not answer within the timeout; the message names its rank."""
