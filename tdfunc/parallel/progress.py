"""Progress bars, which need tqdm."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tdfunc.core.errors import needs


@contextmanager
def progress_bar(call: str, *, show: bool, unit: str, total: int | None = None) -> Generator[Callable[[int], object]]:
    """Yield the function that reports finished units; without `show` it does nothing.

    Raises:
        ImportError: tqdm is not installed; the message begins with `call`, which names the option.
    """
    if not show:
        yield lambda done: None
        return
    with needs(call, "tqdm", "tdfunc[cli]"):
        from tqdm.auto import tqdm
    with tqdm(total=total, unit=unit) as bar:
        yield bar.update
