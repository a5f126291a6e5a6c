"""Work in a forked process, which may not live through it."""

import os
from collections.abc import Callable


def forked(work: Callable[[int], object]) -> tuple[int, str]:
    """Run work in a child process, which gets a pipe to write to; return how it ended (0 for well) and what it wrote.

    Raises:
        AssertionError: The work raised: what it expects to be raised it must catch.
    """
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(out)
            work(into)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(into)
    said = b""
    while part := os.read(out, 1 << 16):
        said += part
    os.close(out)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), said.decode()


def in_child(call: Callable[[], object]) -> tuple[int, str]:
    """Run a call in a child process; return the signal that ended it (0 for none) and what it returned, as text."""
    return forked(lambda into: os.write(into, str(call()).encode()))
