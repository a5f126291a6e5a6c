"""Progress bars, which need tqdm. None of them prints without a terminal or notebook, such as to the log of a job."""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from tdfunc.core.errors import needs

# A save or load from this size on takes seconds.
_SHOWN_BYTES = 1_000_000_000


@contextmanager
def progress_bar(call: str, *, show: bool, unit: str, total: int | None = None) -> Generator[Callable[[int], object]]:
    """Yield the function that reports finished units; without `show` or a terminal it does nothing.

    Raises:
        ImportError: tqdm is not installed; the message begins with `call`, which names the option.
    """
    if not show:
        yield lambda done: None
        return
    with needs(call, "tqdm", "tdfunc[cli]"):
        from tqdm.auto import tqdm
    with tqdm(total=total, unit=unit, disable=_is_off(tqdm)) as bar:
        yield bar.update


@contextmanager
def bytes_bar(name: str, size_bytes: int) -> Generator[Callable[[int], object]]:
    """Yield the function that reports bytes; it shows a bar for many bytes, if tqdm and a terminal are there.

    Only in the main thread: saves in the background would print into the output of the training.
    """
    tqdm: Any = None
    if size_bytes >= _SHOWN_BYTES and threading.current_thread() is threading.main_thread():
        with suppress(ImportError):
            from tqdm.auto import tqdm
    if tqdm is None or _is_off(tqdm):
        yield lambda done: None
        return
    # What is done within the delay is never shown, such as a file that is mapped and not read.
    with tqdm(desc=name, total=size_bytes, unit="B", unit_scale=True, delay=0.2, leave=False) as bar:
        yield bar.update


# Any: a class of tqdm, which has no stubs.
def _is_off(tqdm: Any) -> bool:
    """Return whether nobody would see a bar: it is not in a notebook, and the errors do not go to a terminal."""
    is_notebook = any([base.__module__ == "tqdm.notebook" for base in tqdm.__mro__])
    return not is_notebook and not sys.stderr.isatty()
