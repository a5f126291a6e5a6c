"""Output that may go nowhere: closed pipes, closed descriptors, full disks."""

import os
import sys
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
        _discard(out)
        if isinstance(err, BrokenPipeError):
            raise SystemExit(_BROKEN_PIPE) from None
        raise OSError(err.errno, err.strerror, "stdout") from err


def note(text: str) -> None:
    """Print a line to stderr; what cannot be told is no reason to fail."""
    err = _stream("stderr")
    if err is not None:
        try:
            print(f"tdfunc: {text}", file=err, flush=True)
        except OSError:
            _discard(err)


def is_terminal(name: str) -> bool:
    """Whether `"stdout"` or `"stderr"` is one."""
    stream = _stream(name)
    return stream is not None and stream.isatty()


def takes_all_text() -> bool:
    """Whether stdout can show any character."""
    # Of a stream that only collects text it is None.
    encoding: str | None = getattr(sys.stdout, "encoding", None)
    return encoding is None or encoding.lower().startswith("utf")


def _discard(stream: TextIO) -> None:
    """Send what is left nowhere: else the interpreter complains when it flushes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _stream(name: str) -> TextIO | None:
    # Python has None for a descriptor that was closed when it started.
    return cast("TextIO | None", getattr(sys, name))
