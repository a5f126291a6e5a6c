"""Output that may go nowhere: closed pipes, closed descriptors, full disks."""

import os
import sys
from contextlib import suppress
from errno import EBADF
from typing import TextIO, cast

# As the shell says it of a program that a closed pipe ended.
_BROKEN_PIPE = 141


def emit(text: str) -> None:
    """Print to stdout; where nobody reads any more, end quietly.

    Raises:
        OSError: It cannot be written, as on a full disk.
    """
    out = _stream("stdout")
    if out is None:
        raise OSError(EBADF, os.strerror(EBADF), "stdout")
    try:
        out.write(f"{text}\n" if text else "")
        out.flush()
    except OSError as err:
        # Else the interpreter complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        if isinstance(err, BrokenPipeError):
            raise SystemExit(_BROKEN_PIPE) from None
        raise OSError(err.errno, err.strerror, "stdout") from err


def note(text: str) -> None:
    """Print a line to stderr; what cannot be told is no reason to fail."""
    err = _stream("stderr")
    if err is not None:
        with suppress(OSError):
            print(f"tdfunc: {text}", file=err, flush=True)


def is_terminal(name: str) -> bool:
    """Whether `"stdout"` or `"stderr"` is one."""
    stream = _stream(name)
    return stream is not None and stream.isatty()


def takes_all_text() -> bool:
    """Whether stdout can show any character."""
    stream = _stream("stdout")
    return stream is not None and stream.encoding.lower().replace("-", "").startswith("utf")


def _stream(name: str) -> TextIO | None:
    # Python has None for a descriptor that was closed when it started.
    return cast("TextIO | None", getattr(sys, name))
