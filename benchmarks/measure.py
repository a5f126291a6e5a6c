"""Timing: several ways to do one thing, side by side in one process.

Each round runs every way for a few milliseconds, one after another, so that a slow moment of the machine meets all of
them; the result is the median over many rounds. Time is this thread's CPU time, which other processes on the machine
do not add to; wall time is kept beside it. The garbage collector is off, and the cost of calling an empty function is
taken off.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from itertools import repeat
from statistics import median, quantiles
from typing import Any, NamedTuple


class Fresh(NamedTuple):
    """A way whose calls each take a new argument, made outside the timed part."""

    make: Callable[[], Any]
    call: Callable[[Any], Any]


class Remote(NamedTuple):
    """A way whose calls another process makes and times: of so many, CPU and wall nanoseconds."""

    run: Callable[[int], tuple[float, float]]


Way = Callable[[], Any] | Fresh | Remote


class Timing(NamedTuple):
    """Microseconds a call over the rounds: the median of CPU time, the lower quartile of wall time; and the rounds.

    Other processes only ever add to wall time, so on a busy machine its median is theirs. `first_s` is the wall time of
    the first two calls, which compile where a way does.
    """

    cpu_us: float
    wall_us: float
    rounds: int
    first_s: float = 0.0


class Effort(NamedTuple):
    """How long to measure: rounds in each pass over all cases, how many passes, and how long one way's round is.

    Passes come minutes or seconds apart, so that a bad moment of the machine, which may be longer than all the rounds
    of one case together, spoils one pass and not the median of all. A way is slow if a call takes more than `slow_s`
    of CPU time: one call after the first two is all of its rounds.
    """

    rounds: int = 15
    passes: int = 3
    round_s: float = 0.003
    longest_s: float = 2.0
    slow_s: float = math.inf

    def rounds_within(self, seconds_a_round: float) -> int:
        """Return the rounds of a pass that fit into the longest time; at least 3."""
        return max(3, min(self.rounds, int(self.longest_s / max(seconds_a_round, 1e-9))))


QUICK = Effort(rounds=5, passes=1, round_s=0.001, longest_s=1.0)


class Sampler:
    """Rounds of several ways to do one thing; what the ways return is thrown away."""

    def __init__(self, ways: dict[str, Way]) -> None:
        self._ways = ways
        self._first_s: dict[str, float] = {}
        self._cpu_us: dict[str, list[float]] = {name: [] for name in ways}
        self._wall_us: dict[str, list[float]] = {name: [] for name in ways}
        self.slow: set[str] = set()

    def run(self, effort: Effort) -> None:
        """Add the rounds of one pass."""
        with _no_garbage_collection():
            for name in self._ways.keys() - self._first_s.keys():
                self._begin(name, effort.slow_s)
            ways = {name: way for name, way in self._ways.items() if name not in self.slow}
            calls = {name: _calls_for(way, effort.round_s) for name, way in ways.items()}
            empty = median([_round(_nothing, 1000)[0] for _ in range(20)])
            seconds = sum(_round(way, calls[name])[1] * calls[name] for name, way in ways.items()) * 1e-6
            names = list(ways)
            for i in range(effort.rounds_within(seconds)):
                # Who goes first changes, so that nobody always runs on caches that the same neighbour left.
                start = i % max(len(names), 1)
                for name in [*names[start:], *names[:start]]:
                    cpu, wall = _round(ways[name], calls[name])
                    self._cpu_us[name].append(cpu - empty)
                    self._wall_us[name].append(wall - empty)
                gc.collect(0)

    def _begin(self, name: str, slow_s: float) -> None:
        """Make the first two calls of a way, the second perhaps with other kinds of arguments, and one more."""
        self._first_s[name] = sum(_round(self._ways[name], 1)[1] for _ in range(2)) * 1e-6
        cpu, wall = _round(self._ways[name], 1)
        if cpu > slow_s * 1e6:
            self.slow.add(name)
            self._cpu_us[name], self._wall_us[name] = [cpu], [wall]

    def timings(self) -> dict[str, Timing]:
        """Return what the rounds so far come to."""
        found: dict[str, Timing] = {}
        for name, cpu in self._cpu_us.items():
            wall = self._wall_us[name]
            lower = quantiles(wall)[0] if len(wall) > 1 else wall[0]
            found[name] = Timing(median(cpu), lower, len(cpu), self._first_s[name])
        return found


def measure(ways: dict[str, Way], effort: Effort | None = None) -> dict[str, Timing]:
    """Return the timing of each way of doing one thing, measured in one go."""
    sampler = Sampler(ways)
    effort = effort or Effort()
    for _ in range(effort.passes):
        sampler.run(effort)
    return sampler.timings()


def _nothing() -> None:
    return None


def _round(way: Way, calls: int) -> tuple[float, float]:
    """Return CPU and wall microseconds a call."""
    if isinstance(way, Remote):
        cpu, wall = way.run(calls)
        return cpu / calls / 1000, wall / calls / 1000
    if isinstance(way, Fresh):
        fn, arguments = way.call, [way.make() for _ in range(calls)]
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for argument in arguments:
            fn(argument)
    else:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for _ in repeat(None, calls):
            way()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    return cpu / calls / 1000, wall / calls / 1000


def _calls_for(way: Way, seconds: float) -> int:
    """Return how many calls fill a round; warms up on the way."""
    for _ in range(3):
        _round(way, 1)
    calls = 1
    while calls < 100_000:
        _, wall_us = _round(way, calls)
        if wall_us * calls * 1e-6 > seconds / 2:
            break
        calls *= 2
    return calls


@contextmanager
def _no_garbage_collection():
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def ratio(slow_us: float, fast_us: float) -> float:
    """Return how many times as long the first takes."""
    return slow_us / fast_us


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, the one that treats 2x and 0.5x alike."""
    values = list(values)
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


class Line(NamedTuple):
    """Cost as `start_us + leaf_us * leaves`, and the exponent of a power law through the same points."""

    start_us: float
    leaf_us: float
    exponent: float


def fit_line(leaves: Sequence[int], cost_us: Sequence[float]) -> Line:
    """Fit a line that is off by the same fraction everywhere, and a power law to the points from 100 leaves on.

    Below 100 leaves the fixed cost of a call hides how the cost grows.
    """
    # Least squares on cost / leaves = start / leaves + leaf: small and large trees weigh alike.
    xs, ys = [1 / n for n in leaves], [c / n for n, c in zip(leaves, cost_us, strict=True)]
    start, leaf = _least_squares(xs, ys, [1 / y**2 for y in ys])
    large = [(n, c) for n, c in zip(leaves, cost_us, strict=True) if n >= 100]
    exponent, _ = _least_squares(*_logs(large), [1.0] * len(large))
    return Line(start, leaf, exponent)


def _logs(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [math.log(x) for x, _ in points], [math.log(y) for _, y in points]


def _least_squares(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept."""
    total = sum(weights)
    x0 = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y0 = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - x0) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - x0) * (y - y0) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return slope, y0 - slope * x0
