"""A progress bar over bytes, if it is asked for and tqdm is installed."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from tdfunc.core.errors import UnsupportedError


@contextmanager
def progress_bar(show: bool, size_bytes: int, what: str) -> Generator[Callable[[int], object] | None, None, None]:
    """Yield what is called with each number of bytes done; None where nothing is to be shown.

    Raises:
        UnsupportedError: tqdm is not installed.
    """
    if not show:
        yield None
        return
    with _bar(size_bytes, what) as bar:
        yield bar.update


# tqdm has no annotations.
def _bar(size_bytes: int, what: str) -> Any:
    try:
        from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]
    except ImportError as err:
        raise UnsupportedError(
            "progress=True needs tqdm, which is not installed.", hint='pip install "tdfunc[cli]", or pip install tqdm.'
        ) from err
    return tqdm(total=size_bytes, unit="B", unit_scale=True, unit_divisor=1000, desc=what)
