"""The command line `tdfunc`, which shows, compares, verifies, converts and averages checkpoints.

`app.py` has the commands, which require the packages of the extra `cli`.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

import torch

from tdfunc.core.system import platform
from tdfunc.ops.display.text import printable

_TROUBLE = 2
_INTERRUPTED = 130
# The characters of a line of a message.
_MAX_LINE = 1_000


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: with 2 for trouble, which is reported in a few lines; `--debug` shows the traceback.

    Args:
        args: The arguments. By default the arguments of the process.
    """
    if args is None:
        platform.end_with_reader()
    lacking = [name for name in ("rich", "typer") if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(f"tdfunc: the command line needs {' and '.join(lacking)}: pip install 'tdfunc[cli]'")
    given, debug = _without_debug(list(sys.argv[1:] if args is None else args))
    # Pieces are small and disks slow: threads would wait for each other more than they compute.
    torch.set_num_threads(1)
    try:
        try:
            # Not at the top: these packages are optional.
            importlib.import_module("tdfunc.cli.app").app(given, prog_name="tdfunc")
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as err:
        if isinstance(err, OSError) and err.errno is not None and err.filename is None:
            # Output that cannot be written: else the interpreter tries again when it ends.
            with open(os.devnull, "w", encoding="utf-8") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
        if debug:
            text = "".join(traceback.format_exception(err)).rstrip()
        else:
            text = _message(err)
        print(f"tdfunc: {text}", file=sys.stderr)
        sys.exit(_TROUBLE)


def _without_debug(args: list[str]) -> tuple[list[str], bool]:
    """Return arguments without `--debug`, which may be anywhere before `--`, and whether it was there."""
    if "--" in args:
        end = args.index("--")
    else:
        end = len(args)
    before = [arg for arg in args[:end] if arg != "--debug"]
    return [*before, *args[end:]], len(before) < end


def _message(err: Exception) -> str:
    """Return the message of an error in a few lines that are safe to print."""
    text = str(err)
    if isinstance(err, OSError) and err.filename is not None and err.strerror is not None:
        name = printable(os.fsdecode(err.filename), _MAX_LINE)
        text = f"{name or repr('')}: {err.strerror}"
    elif not type(err).__module__.startswith("tdfunc") and "\n  " not in text:
        # An error of another library may not be clear without its name.
        text = f"{type(err).__name__}: {text}"
    return "\n".join(printable(line, _MAX_LINE) for line in text.split("\n"))
