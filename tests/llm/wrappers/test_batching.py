"""Each request has its own answer, whatever other threads submit, cancel, flush or poison."""

import contextlib
import copy
import gc
import math
import operator
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, as_completed, wait
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.llm import Batcher
from tdfunc.llm.wrappers.batching import _end
from tests.helpers import run_in_threads

SOON = 20


class Poison(Exception):
    """The error of a request that cannot be answered."""


class Engine:
    """A fake backend: it squares numbers, takes its time, fails for negative ones, and records its batches."""

    def __init__(self, delays=(0.0,)):
        self.batches, self.answered, self.delays = [], [], delays
        self.active = 0

    def __call__(self, requests):
        assert self.active == 0
        self.active += 1
        try:
            time.sleep(self.delays[len(self.batches) % len(self.delays)])
            self.batches.append(list(requests))
            for request in requests:
                if request < 0:
                    raise Poison(request)
            self.answered += requests
            return [request**2 for request in requests]
        finally:
            self.active -= 1


class Gate(Engine):
    """A fake backend that waits for `open` in each batch."""

    def __init__(self):
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, requests):
        self.entered.set()
        assert self.open.wait(SOON)
        return super().__call__(requests)


def outcome(future):
    """A future's result, or the class of its error."""
    try:
        return future.result(SOON)
    except (Poison, CancelledError) as err:
        return type(err)


ACTIONS = st.lists(
    st.sampled_from(["submit", "submit", "submit", "poison", "cancel", "sleep", "flush", "cleanup"]), max_size=12
)


def run_threads(batcher, scripts):
    """Act out a script in each thread; return the requests with their futures, which are all done."""
    numbers, lists = iter(range(1, 10**9)), [[] for _ in scripts]
    failures = []

    def act(script, made):
        for action in script:
            if action in ("submit", "poison"):
                number = next(numbers)
                request = -number if action == "poison" else number
                made.append((request, batcher.submit(request, group=number % 2)))
            elif action == "cancel" and made:
                made[-1][1].cancel()
            elif action == "sleep":
                time.sleep(0.001)
            elif action in ("flush", "cleanup"):
                try:
                    assert all(future.done() for future in batcher.cleanup(flush=action == "flush"))
                except AssertionError as err:
                    failures.append(err)

    run_in_threads(lambda i: act(scripts[i], lists[i]), range(len(scripts)))
    assert not failures
    return [pair for made in lists for pair in made]


def check_answers(engine, made):
    """Assert that requests have their own answers; none is answered twice, and none that was cancelled is run."""
    found = [(request, future, outcome(future)) for request, future in made]
    for request, future, result in found:
        assert result == (CancelledError if future.cancelled() else Poison if request < 0 else request**2)
    assert sorted(engine.answered) == sorted(request for request, _, result in found if isinstance(result, int))


def check_script(scripts, sizes, timeout_s, delays):
    """Assert that the requests of threads are answered, fail or are cancelled, each by itself and once."""
    engine = Engine(delays)
    low, more = sizes
    with Batcher(engine, min_batch_size=low, max_batch_size=low + more, timeout_s=timeout_s) as batcher:
        made = run_threads(batcher, scripts)

    check_answers(engine, made)
    if not any(action in ("cancel", "cleanup") for script in scripts for action in script):
        assert not any(future.cancelled() for _, future in made)
    for batch in engine.batches:
        assert len(batch) <= low + more
        assert len({abs(request) % 2 for request in batch}) == 1
    assert batcher.state()["pending_futures"] == 0


@given(
    st.lists(ACTIONS, min_size=1, max_size=4),
    st.tuples(st.integers(1, 4), st.integers(0, 4)),
    st.sampled_from([0.0, 0.002]),
    st.lists(st.sampled_from([0.0, 0.001]), min_size=1, max_size=4),
)
def test_each_request_has_its_own_answer(scripts, sizes, timeout_s, delays):
    """Threads submit, poison, cancel, flush and clean up: no answer is lost, doubled or mixed up."""
    check_script(scripts, sizes, timeout_s, delays)


@pytest.mark.slow
def test_many_requests_have_their_answers():
    """Of 100,000 from eight threads, some are poisoned and some cancelled."""
    draw = random.Random(0)
    scripts = [draw.choices(["submit", "poison", "cancel"], [9900, 10, 90], k=12_500) for _ in range(8)]
    check_script(scripts, (4, 60), 0.01, [0.0])


def test_a_batch_starts_at_the_minimum_size_and_has_at_most_the_maximum():
    """Requests that come while a batch runs are the next ones, oldest first."""
    engine = Gate()
    with Batcher(engine, min_batch_size=2, max_batch_size=3, timeout_s=math.inf) as batcher:
        first = [batcher.submit(1), batcher.submit(2)]
        assert engine.entered.wait(SOON)
        rest = [batcher.submit(number) for number in range(3, 10)]
        engine.open.set()
        assert [future.result(SOON) for future in first + rest[:6]] == [number**2 for number in range(1, 9)]
        assert not wait(rest[6:], timeout=0.05).done

    assert rest[6].result(0) == 81
    assert engine.batches == [[1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_the_timeout_is_honoured_when_the_minimum_is_not_reached():
    """A request does not wait longer for others, in any group."""
    batcher = Batcher(Engine(), min_batch_size=8, timeout_s=0.05)
    start = time.monotonic()
    futures = [batcher.submit(2, group="a"), batcher.submit(3, group="b")]

    assert [future.result(SOON) for future in futures] == [4, 9]
    assert time.monotonic() - start >= 0.05


def test_the_oldest_request_is_not_starved_by_a_full_group():
    """A request whose time has passed comes before groups that have reached the minimum."""
    engine = Gate()
    with Batcher(engine, min_batch_size=2, max_batch_size=2, timeout_s=0.01) as batcher:
        futures = [batcher.submit(1)]
        assert engine.entered.wait(SOON)
        futures += [batcher.submit(2, group="rare"), *[batcher.submit(number) for number in range(3, 9)]]
        time.sleep(0.02)
        engine.open.set()
        wait(futures, SOON)

    assert engine.batches == [[1], [2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("poisoned", [{5}, {0, 15}, set(range(16))])
def test_a_bad_request_fails_alone(poisoned):
    """The others of its batch are answered once, after few more runs."""
    engine = Engine()
    with Batcher(engine, min_batch_size=16, timeout_s=math.inf) as batcher:
        futures = [batcher.submit(-number - 1 if number in poisoned else number + 1) for number in range(16)]
        found = [outcome(future) for future in futures]

    assert found == [Poison if number in poisoned else (number + 1) ** 2 for number in range(16)]
    assert sorted(engine.answered) == [number + 1 for number in range(16) if number not in poisoned]
    assert len(engine.batches) <= min(1 + 8 * len(poisoned), 31)


def test_the_thread_outlives_every_error():
    """SystemExit and a number of results other than that of requests fail their requests alone."""

    def run(requests):
        if requests == ["exit"]:
            sys.exit()
        return [] if requests == ["none"] else [*requests, "more"] if requests == ["more"] else requests

    with Batcher(run) as batcher:
        with pytest.raises(SystemExit):
            batcher.submit("exit").result(SOON)
        for request in ("none", "more"):
            with pytest.raises(ValueError, match="a result for each request"):
                batcher.submit(request).result(SOON)
        assert batcher.submit("good").result(SOON) == "good"


def test_a_cancelled_request_leaves_the_queue():
    """It does not count for the minimum, and those that wait for it see it; a running one cannot be cancelled."""
    engine = Gate()
    with Batcher(engine, min_batch_size=2, timeout_s=math.inf) as batcher:
        cancelled = batcher.submit(1)
        assert cancelled.cancel()
        assert next(as_completed([cancelled], timeout=SOON)) is cancelled
        futures = [batcher.submit(2)]
        assert batcher.state()["queue_size"] == 1
        futures.append(batcher.submit(3))
        assert engine.entered.wait(SOON)
        assert not futures[0].cancel()
        engine.open.set()
        wait(futures, SOON)

    assert engine.batches == [[2, 3]]


def test_cleanup_cancels_what_waits():
    """The futures are returned and done, and the batcher goes on."""
    batcher = Batcher(Engine(), min_batch_size=3, timeout_s=math.inf)
    futures = [batcher.submit(number, group=number) for number in range(2)]
    options = {"min_batch_size": 3, "max_batch_size": None, "timeout_s": math.inf}
    assert batcher.state() == {"queue_size": 2, "pending_futures": 2, "processing": False, **options}

    assert batcher.cleanup() == futures
    assert wait(futures, timeout=0).done == set(futures)
    assert all(future.cancelled() for future in futures)
    assert batcher.state()["queue_size"] == 0
    assert [batcher.submit(number) for number in range(2)] == batcher.cleanup(flush=True)


@pytest.fixture
def half_done():
    """A closed gate, a batcher that runs some of six requests and lets the others wait, and their futures."""
    engine = Gate()
    batcher = Batcher(engine, min_batch_size=3, timeout_s=math.inf)
    futures = [batcher.submit(number) for number in (1, 2, 3, 4, -5)]
    assert engine.entered.wait(SOON)
    futures.append(batcher.submit(6, group="other"))
    yield engine, batcher, futures
    engine.open.set()
    batcher.cleanup(flush=True)


def test_the_state_counts_what_runs_and_what_waits(half_done):
    """Both are pending."""
    _, batcher, _ = half_done
    state, running = batcher.state(), len(batcher._made.running)

    assert state["processing"]
    assert state["pending_futures"] == 6
    assert running + state["queue_size"] == 6
    assert min(running, state["queue_size"]) > 0


def test_flush_returns_the_results(half_done):
    """Those of the batch that runs come first; a bad request keeps its error."""
    engine, batcher, futures = half_done
    threading.Timer(0.01, engine.open.set).start()

    assert batcher.cleanup(flush=True) == futures
    assert [outcome(future) for future in futures if future.done()] == [1, 4, 9, 16, Poison, 36]
    assert batcher.cleanup(flush=True) == []


@pytest.mark.parametrize("name", ["cleanup", "close"])
def test_a_flush_in_its_own_thread_is_an_error(name):
    """`run` and callbacks would wait for themselves; the batcher goes on."""
    engine, found = Gate(), []

    def flush(_):
        try:
            getattr(batcher, name)(flush=True)
        except tdf.ConcurrencyError as err:
            found.append(str(err))

    def run(requests):
        flush(requests)
        return engine(requests)

    batcher = Batcher(run)
    future = batcher.submit(2)
    assert engine.entered.wait(SOON)
    # Not done yet, so that the batcher's thread runs it.
    future.add_done_callback(flush)
    engine.open.set()
    assert batcher.submit(3).result(SOON) == 9
    assert len(found) == 3
    assert all(
        f"Batcher.{name}: flush=True in the batcher's own thread would wait for itself" in each for each in found
    )


def test_a_closed_batcher_refuses_requests_and_ends_its_thread():
    """The block answers what waits; when it raises, what waits is cancelled."""
    with Batcher(Engine(), min_batch_size=2, timeout_s=math.inf) as batcher:
        answered = batcher.submit(3)
    assert answered.result(0) == 9
    batcher._made.thread.join(SOON)
    assert not batcher._made.thread.is_alive()

    other = Batcher(Engine(), min_batch_size=2, timeout_s=math.inf)
    with contextlib.suppress(KeyError), other:
        waiting = other.submit(3)
        raise KeyError
    assert waiting.cancelled()
    last = Batcher(Engine(), min_batch_size=2, timeout_s=math.inf)
    waiting = last.submit(3)
    # What the end of a program runs.
    _end(last._made)
    assert waiting.cancelled()
    assert other.close() == other.close(flush=True) == []


@pytest.mark.parametrize("duplicate", [lambda batcher: pickle.loads(pickle.dumps(batcher)), copy.copy, copy.deepcopy])
def test_a_copy_has_no_requests(duplicate):
    """It has the function and the options, and answers its own requests alone."""
    batcher = Batcher(operator.itemgetter(slice(None)), min_batch_size=2, timeout_s=math.inf)
    waiting = batcher.submit(1)
    other = duplicate(batcher)

    assert other.state() == {**batcher.state(), "queue_size": 0, "pending_futures": 0}
    answer = other.submit(5)
    assert other.cleanup(flush=True) == [answer]
    assert answer.result(0) == 5
    assert not waiting.done()
    assert batcher.cleanup() == [waiting]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_requests():
    """It answers its own, even when the parent held the lock at the fork; the parent's are answered by the parent."""
    batcher, idle = (Batcher(Engine(), min_batch_size=2, timeout_s=math.inf) for _ in range(2))
    waiting = batcher.submit(3)
    held, done = threading.Event(), threading.Event()

    def hold():
        with batcher._queue.changed, idle._queue.changed:
            held.set()
            done.wait(SOON)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(SOON)
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SOON)
        try:
            del idle
            mine = batcher.submit(5)
            code = 0 if batcher.cleanup(flush=True) == [mine] and mine.result(0) == 25 else 2
        finally:
            os._exit(code)
    done.set()

    assert os.waitpid(child, 0) == (child, 0)
    batcher.cleanup(flush=True)
    assert waiting.result(0) == 9


def test_requests_keep_a_batcher_alive_and_nothing_else_does():
    """The thread of one that nobody uses ends."""

    class Owner:
        def __init__(self):
            self.batcher = Batcher(self.run, timeout_s=0.01)

        def run(self, requests):
            return requests

    owner = Owner()
    future, thread, seen = owner.batcher.submit(7), owner.batcher._made.thread, weakref.ref(owner)
    del owner

    assert future.result(SOON) == 7
    end = time.monotonic() + SOON
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.02)
        gc.collect()
    assert not thread.is_alive()
    assert seen() is None


PROGRAM = """
import math, time, torch
from tdfunc.llm.wrappers.batching import Batcher
weight = torch.randn(300, 300)
started = []
def run(requests):
    started.append(True)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.linalg.svd(weight)
    return requests
running, idle = Batcher(run), Batcher(run, min_batch_size=2, timeout_s=math.inf)
future = running.submit(1)
waiting = idle.submit(2)
while not started:
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_program_ends_while_a_batch_runs():
    """Nothing keeps the interpreter alive, and torch does not abort it."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)

    assert found.returncode == 0
    assert found.stderr == ""


def test_the_check_of_a_script_can_fail(monkeypatch):
    """It finds answers in the wrong order."""
    ordered = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, requests: ordered(self, requests)[::-1])

    with pytest.raises(AssertionError):
        check_script([["submit", "sleep"] * 3], (6, 0), 1.0, [0.0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("can't start new thread")])
def test_a_thread_that_could_not_start_is_started_by_the_next_request(error, monkeypatch):
    """Later requests would wait for ever."""
    with Batcher(lambda rows: rows) as batcher:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", Mock(side_effect=error))
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                batcher.submit(1)
        assert batcher.submit(2).result(20) == 2
