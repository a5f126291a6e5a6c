"""`Server`: JSON requests to a server over HTTP, with retries, streams and a limit of concurrency.

httpx2 makes the connections and tenacity the retries. The caller interprets requests and answers.
"""

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from tdfunc.core.errors import RemoteError, UnsupportedError, as_count, as_number, error

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
R = TypeVar("R")

# The least value of each.
_COUNTS = {"max_retries": 0, "max_concurrency": 1}
# The longest time between two attempts, in seconds.
_LONGEST_WAIT_S = 60.0
# The largest answer: more than a prompt of a million tokens with its log-probs.
_MOST_BYTES = 1 << 30
# A server may send empty events, or some for its own ends, but not for ever.
_MOST_EVENTS = 1000
_EVENTS_PER_TOKEN = 4
# The errors of code that reads an answer of another form: numbers of any size and nesting of any depth are valid JSON.
_FORM_ERRORS = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a connection; `RemoteWrapper` describes them.

    Raises:
        TypeError: A count or a time is not a number.
        ValueError: A count or a time is out of range: without connections a request would wait for ever.
    """

    base_url: str
    api_key: str | None
    timeout_s: float
    max_retries: int
    backoff_s: float
    max_concurrency: int

    def __post_init__(self) -> None:
        """Check the counts and times, and keep plain counts."""
        for name, least in _COUNTS.items():
            object.__setattr__(self, name, as_count(f"RemoteWrapper: {name}", getattr(self, name), least))
        if not isinstance(self.timeout_s, Real) or not self.timeout_s > 0:
            raise error(
                ValueError,
                "RemoteWrapper: timeout_s must be above 0 seconds.",
                got=repr(self.timeout_s),
                hint="math.inf waits without a limit.",
            )
        if as_number("RemoteWrapper: backoff_s", self.backoff_s) < 0:
            raise error(ValueError, "RemoteWrapper: backoff_s must be 0 or more seconds.", got=self.backoff_s)

    def __repr__(self) -> str:
        return f"ServerOptions({self.base_url!r})"


class Server:
    """A server, and the connections to it, which are shared by threads; a copy or a fork opens its own."""

    def __init__(self, options: ServerOptions) -> None:
        missing = [name for name in ("httpx2", "tenacity") if find_spec(name) is None]
        if missing:
            raise UnsupportedError(
                f"RemoteWrapper: servers need {' and '.join(missing)}.", hint='pip install "tdfunc[remote]".'
            )
        self.options = options
        self._client: httpx2.Client | None = None
        self._connect()

    def _connect(self) -> "httpx2.Client":
        """Return the connections of this process."""
        import httpx2

        if self._client is None or self._pid != os.getpid():
            options = self.options
            headers: dict[str, str] = {}
            if options.api_key is not None:
                headers["Authorization"] = f"Bearer {options.api_key}"
            seconds = None if options.timeout_s == math.inf else options.timeout_s
            count = options.max_concurrency
            self._client = httpx2.Client(
                base_url=options.base_url.rstrip("/").removesuffix("/v1"),
                headers=headers,
                # Requests beyond the limit wait for a connection for as long as it takes.
                timeout=httpx2.Timeout(seconds, pool=None),
                limits=httpx2.Limits(max_connections=count, max_keepalive_connections=count),
            )
            self._pid = os.getpid()
            # At the end of a process its connections are closed anyway.
            weakref.finalize(self, self._client.close).atexit = False
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    # Any: JSON.
    def request(
        self,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[list[Any]], T],
        *,
        where: str,
        stream: bool = False,
        tokens: int = 0,
    ) -> T:
        """Return `read` of the answer to a POST, or without a body to a GET.

        Failed connections and the statuses 408, 429 and 5xx, except 501, are retried: after the time from the server,
        or after random times that grow. A server that asks for more than a minute is not asked again. A stream is
        read completely.

        Args:
            path: The path of the endpoint.
            body: The request.
            read: The function of the answer, a list with one object or with the objects of a stream. An error of
                Python in it means that the answer has the wrong form.
            where: The purpose of the request, for messages.
            stream: Receive the answer in parts.
            tokens: The number of tokens that the request asks for: a stream with many more objects has no end.

        Raises:
            RemoteError: The server could not be reached, refused the request, or returned an answer of another form.
        """
        import httpx2
        import tenacity

        backoff = tenacity.wait_random_exponential(self.options.backoff_s, max=_LONGEST_WAIT_S)

        def pause(state: tenacity.RetryCallState) -> float:
            failure = None
            if state.outcome is not None:
                failure = state.outcome.exception()
            if isinstance(failure, RemoteError) and failure.retry_after_s is not None:
                return failure.retry_after_s
            return backoff(state)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.options.max_retries + 1),
            wait=pause,
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            return read(retrying(self._send, path, body, where, stream, tokens))
        except (httpx2.HTTPError, httpx2.InvalidURL) as err:
            raise RemoteError(
                f"{where}: {self.options.base_url}{path} did not answer.", got=f"{type(err).__name__}: {err}"
            ) from err
        except _FORM_ERRORS as err:
            raise RemoteError(
                f"{where}: the answer of {path} does not have the form of its endpoint.",
                got=f"{type(err).__name__}: {err}",
            ) from err

    def _send(self, path: str, body: dict[str, Any] | None, where: str, stream: bool, tokens: int) -> list[Any]:
        """Return the objects of one attempt."""
        import httpx2

        watch = _Watch(where, self.options.timeout_s)
        method = "GET" if body is None else "POST"
        if body and stream:
            body = {**body, "stream": True}
        with self._connect().stream(method, path, json=body) as response:
            watch.hear()
            kind = {"Content-Type": response.headers.get("Content-Type", "")}
            watched = httpx2.Response(200, headers=kind, content=watch.parts(response), request=response.request)
            if not response.is_success:
                raise _refusal(response, watched.read(), where)
            if not stream:
                watched.read()
                return [watched.json()]
            events: list[str] = []
            for event in httpx2.EventSource(watched, max_event_size=None):
                watch.hear()
                events.append(event.data)
                watch.check_count(len(events), tokens)
        return _objects(events, where)

    def each(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results of calls that run at the same time; the first error cancels those that have not begun."""
        futures: list[Future[R]] = [Future() for _ in items]
        left = deque(zip(futures, items, strict=True))
        try:
            for _ in range(min(len(items), self.options.max_concurrency)):
                # A program that ends, after Ctrl-C for example, would wait for the threads of an executor, and they
                # for the server.
                threading.Thread(target=_work, args=(call, left), name="tdfunc-remote", daemon=True).start()
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future.done() and future.exception() is not None]
            return [future.result() for future in failed or futures]
        finally:
            for future in futures:
                future.cancel()


def _work(call: Callable[[T], R], left: "deque[tuple[Future[R], T]]") -> None:
    """Make the calls that are left, one after the other."""
    while True:
        try:
            future, item = left.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = call(item)
        # Every error must reach the caller, who waits.
        except BaseException as err:
            future.set_exception(err)
        else:
            future.set_result(result)


# Any: JSON.
def _objects(events: list[str], where: str) -> list[Any]:
    """Return the objects of a stream.

    Raises:
        RemoteError: One of them reports a failure.
    """
    import httpx2

    # The last event of a stream is not JSON.
    objects = [httpx2.Response(200, text=event).json() for event in events if event != "[DONE]"]
    for each in objects:
        # The status was sent before the failure.
        if isinstance(each, dict) and each.get("error") is not None:
            raise _failure(each, where)
    return objects


class _Watch:
    """The time and the size of one answer, which a server may send for ever, byte by byte."""

    def __init__(self, where: str, patience_s: float) -> None:
        self._where = where
        self._patience_s = patience_s
        self._heard_s = time.monotonic()

    def hear(self) -> None:
        """Begin to wait for the next event, or for the complete answer."""
        self._heard_s = time.monotonic()

    def parts(self, response: "httpx2.Response") -> Iterator[bytes]:
        """Yield the bytes of an answer; raise if they take too long, or are too many.

        Raises:
            ReadTimeout: Bytes come, and no event or end.
            RemoteError: The answer is too large.
        """
        import httpx2

        size = 0
        for part in response.iter_bytes():
            size += len(part)
            if time.monotonic() - self._heard_s > self._patience_s:
                raise httpx2.ReadTimeout(f"bytes, but no complete answer or event within {self._patience_s:g} s")
            if size > _MOST_BYTES:
                raise self._endless(f"more than {_MOST_BYTES} bytes")
            yield part

    def check_count(self, events: int, tokens: int) -> None:
        """Raise if a stream has more events than the tokens that were asked for can need."""
        if events > _MOST_EVENTS + _EVENTS_PER_TOKEN * tokens:
            raise self._endless(f"more than {events - 1} events for {tokens} tokens")

    def _endless(self, got: str) -> RemoteError:
        return RemoteError(f"{self._where}: the answer does not end.", got=got)


def _may_pass(err: BaseException) -> bool:
    """Return True for errors that another attempt may not have."""
    import httpx2

    if isinstance(err, RemoteError):
        if (err.retry_after_s or 0) > _LONGEST_WAIT_S:
            return False
        status = err.status or 0
        # 501 means an endpoint that the server will not have a moment later.
        is_of_server = status >= 500 and status != 501
        return is_of_server or status in (408, 429)
    own = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.SSEError)
    return isinstance(err, httpx2.TransportError) and not isinstance(err, own)


def _refusal(response: "httpx2.Response", content: bytes, where: str) -> RemoteError:
    """Return the error of a response that is not a success."""
    retry_after_s = _retry_after_s(response)
    hint = None
    if retry_after_s is not None and retry_after_s > _LONGEST_WAIT_S:
        hint = f"the server asks to wait {retry_after_s:.0f} s; waits of more than {_LONGEST_WAIT_S:.0f} s are yours."
    text = content[:2000].decode(errors="replace")[:500]
    err = RemoteError(
        f"{where}: {response.request.url} did not accept the request.",
        got=f"{response.status_code} {response.reason_phrase}: {text}",
        hint=hint,
    )
    err.status = response.status_code
    err.retry_after_s = retry_after_s
    return err


def _retry_after_s(response: "httpx2.Response") -> float | None:
    """Return the seconds that the server asks to wait; None without a number."""
    seconds: str = response.headers.get("Retry-After", "")
    if seconds.isdecimal():
        return float(seconds)
    return None


# Any: JSON.
def _failure(event: dict[str, Any], where: str) -> RemoteError:
    """Return the error of a stream that reports one."""
    found = event["error"]
    if not isinstance(found, dict):
        found = {"message": found}
    err = RemoteError(f"{where}: the stream ended without a response.", got=found.get("message"))
    code = found.get("code")
    err.status = code if isinstance(code, int) else None
    return err
