"""The last module that the fork server of `pool.py` imports: from here on it looks after Ctrl-C itself."""

import signal


def unblock_interrupts() -> None:
    """Forget a Ctrl-C that came while SIGINT was blocked, and let further ones in."""
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    while signal.SIGINT in signal.sigpending():
        signal.sigwait({signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


# Another process that imports this has SIGINT as it should be: only threads of the fork server's parent block it.
unblock_interrupts()
