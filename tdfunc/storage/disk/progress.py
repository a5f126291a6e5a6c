"""A progress bar in bytes, by the optional package tqdm."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tdfunc.core.errors import UnsupportedError


@contextmanager
def progress_bar(show: bool, size_bytes: int, what: str) -> Generator[Callable[[int], object] | None, None, None]:
    """Yield a function to call with each number of bytes done; None if no bar is shown."""
    if not show:
        yield None
        return
    try:
        from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]
    except ImportError as err:
        raise UnsupportedError("progress=True needs tqdm, which is not installed.", hint="pip install tqdm.") from err
    with tqdm(total=size_bytes, unit="B", unit_scale=True, unit_divisor=1000, desc=what) as bar:
        yield bar.update
