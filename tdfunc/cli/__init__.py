"""The command line `tdfunc`; `app.py` has the commands, which need the packages of the extra `cli`."""

import importlib
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Sequence

import torch

from tdfunc.cli.streams import note
from tdfunc.core.errors import explain
from tdfunc.ops.display.text import printable

_PACKAGES = ("rich", "typer")
_TROUBLE, _INTERRUPTED = 2, 130


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 2 for trouble, which is told in a few lines; `--debug` shows the traceback.

    Args:
        args: The arguments; without them those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        what, hint = (
            f"the command line needs {' and '.join(lacking)}, not installed here.",
            'pip install "tdfunc[cli]".',
        )
        note(explain(what, hint=hint))
        sys.exit(_TROUBLE)
    until = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:until]
    given = [arg for i, arg in enumerate(given) if arg != "--debug" or i > until]
    # A terminal in another encoding gets escapes, not an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Pieces are small and disks slow: threads would wait for each other more than they compute.
    torch.set_num_threads(1)
    try:
        # Not at the top: these packages are optional.
        importlib.import_module("tdfunc.cli.app").app(given, prog_name="tdfunc")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as err:
        # Also with its traceback an error exits with this code: that of Python means differences, or damage.
        note("".join(traceback.format_exception(err)).rstrip() if debug else _told(err))
        sys.exit(_TROUBLE)


def _told(err: Exception) -> str:
    """Return what an error says, safe to print."""
    text = str(err)
    if isinstance(err, OSError) and err.errno is not None and err.strerror is not None:
        # A name may be empty, or have more than one line.
        name = printable(os.fsdecode(err.filename), 1000) or "''" if isinstance(err.filename, (str, bytes)) else None
        text = f"{name}: {err.strerror}" if name is not None else err.strerror
    elif not type(err).__module__.startswith("tdfunc") and "\n  " not in text:
        # An error of another library may say nothing without its name.
        text = f"{type(err).__name__}: {text}"
    return "\n".join(printable(line, 1000) for line in text.split("\n"))
