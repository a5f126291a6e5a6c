"""What is measured, against what, what a run is expected to reach, and the verdict in words."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from benchmarks.measure import Effort, Sampler, Timing, Way, geometric_mean, ratio

OURS = "tdfunc"
Clock = Literal["cpu", "wall"]
# CPU seconds of a call above which a way is left out of the larger cases of its series.
SLOW_S = 0.5
# Rounds of training steps are so many times longer: a training loop runs nothing else between its steps, so what the
# other ways leave in the caches must not count.
STEP_ROUNDS = 16


class Case(NamedTuple):
    """One thing to do, in several ways; `per` divides the times shown (by leaves, say).

    Each case of a series does more than the one before: a way that was slow there is left out.
    """

    what: str
    ways: dict[str, Way]
    per: int = 1
    series: str = ""


class Measured(NamedTuple):
    """A case with its timings, and for each way that is left out the CPU microseconds that it takes more than."""

    what: str
    timings: dict[str, Timing]
    per: int = 1
    over_us: dict[str, float] = {}

    def time_us(self, way: str, clock: Clock = "cpu") -> float:
        """Return how long a way takes, each of what the case counts."""
        timing = self.timings[way]
        return (timing.wall_us if clock == "wall" else timing.cpu_us) / self.per

    def ratio_to(self, rival: str, clock: Clock = "cpu") -> float:
        """Return how many times faster than the rival we are."""
        return ratio(self.time_us(rival, clock), self.time_us(OURS, clock))


class Row(NamedTuple):
    """What some cases are expected to reach against one rival; `python -m benchmarks` prints what came of it.

    `faster`: reach times as fast as the rival; `at most`: at most reach times its time. `each` case has to reach it,
    or their geometric `mean`; `floor` is what each has to reach besides. Where a row is not reached, `why` is said, and
    what `bound` reaches: a way that does the bare work, with no library around it.
    """

    title: str
    rival: str
    reach: float
    sense: Literal["faster", "at most"]
    cases: tuple[str, ...]
    pooled: Literal["each", "mean"] = "each"
    floor: float | None = None
    why: str = ""
    bound: str = ""


class Verdict(NamedTuple):
    """What came of a row."""

    row: Row
    value: float
    reached: bool
    sentence: str


class Suite(NamedTuple):
    """Cases measured together, the rows that judge them, and the functions that define what runs.

    What waits for a disk or for other processes is judged by the clock on the wall. Where ways compile, a case is made,
    measured and dropped before the next one, and the page shows how long first calls take.
    """

    name: str
    title: str
    intro: str
    cases: Callable[[], Iterable[Case]]
    rows: tuple[Row, ...]
    sources: tuple[Callable[..., object], ...]
    clock: Clock = "cpu"
    compiles: bool = False


def measure_suite(suite: Suite, effort: Effort) -> Iterator[Measured]:
    """Yield cases as soon as they are measured."""
    if suite.compiles:
        yield from _measure_in_turn(suite.cases(), effort)
    else:
        yield from _measure_in_passes(list(suite.cases()), effort)


def _measure_in_turn(cases: Iterable[Case], effort: Effort) -> Iterator[Measured]:
    passes = effort.passes
    effort = Effort(effort.rounds * passes, 1, effort.round_s * STEP_ROUNDS, effort.longest_s * passes, SLOW_S)
    slow: dict[str, dict[str, float]] = {}
    for case in cases:
        over = dict(slow.setdefault(case.series, {}))
        # More of a series would only show how slow the others are.
        if OURS in over:
            continue
        sampler = Sampler({name: way for name, way in case.ways.items() if name not in over})
        sampler.run(effort)
        timings = sampler.timings()
        if case.series:
            slow[case.series] |= {name: timings[name].cpu_us for name in sampler.slow}
        yield Measured(case.what, timings, case.per, {name: us for name, us in over.items() if name in case.ways})


def _measure_in_passes(cases: Sequence[Case], effort: Effort) -> list[Measured]:
    samplers = [Sampler(case.ways) for case in cases]
    for _ in range(effort.passes):
        for sampler in samplers:
            sampler.run(effort)
    return [Measured(case.what, sampler.timings(), case.per) for case, sampler in zip(cases, samplers, strict=True)]


def judge_suite(suite: Suite, measured: Sequence[Measured]) -> list[Verdict]:
    """Return what the rows came to, without those against a rival that is not installed where this was measured."""
    ways = {way for m in measured for way in m.timings}
    return [judge(row, measured, suite.clock) for row in suite.rows if row.rival in ways]


def judge(row: Row, measured: Sequence[Measured], clock: Clock = "cpu") -> Verdict:
    """Return what a row came to, and why it falls short if it does."""
    chosen = [m for m in measured if m.what in row.cases and row.rival in m.timings]
    if not chosen:
        raise ValueError(f"{row.title}: no case of {row.cases} was measured against {row.rival}")
    speedups = {m.what: m.ratio_to(row.rival, clock) for m in chosen}
    values = speedups if row.sense == "faster" else {what: 1 / value for what, value in speedups.items()}
    worse = min if row.sense == "faster" else max
    value = geometric_mean(values.values()) if row.pooled == "mean" else worse(values.values())
    reached = _reaches(value, row.reach, row.sense)
    parts: list[str] = []
    if not reached:
        where = "" if row.pooled == "mean" or len(values) == 1 else f" at {_name_of(values, value)}"
        parts.append(f"the target is {row.reach:g}x, and the value is {shown(value)}{where}")
    slow = [what for what, v in values.items() if row.floor is not None and not _reaches(v, row.floor, row.sense)]
    if slow:
        parts.append(
            f"these cases are slower than {row.rival}: " + ", ".join(f"{what} ({shown(values[what])})" for what in slow)
        )
    if parts and row.bound:
        shortest = chosen if row.pooled == "mean" else [m for m in chosen if values[m.what] == value]
        bare = [m for m in shortest if row.bound in m.timings]
        parts += [_bound(row, bare, clock)] if bare else []
    if parts and row.why:
        parts.append(row.why)
    return Verdict(row, value, reached and not slow, "; ".join(parts) or "reached")


def _bound(row: Row, measured: Sequence[Measured], clock: Clock) -> str:
    reached = geometric_mean(ratio(m.time_us(row.rival, clock), m.time_us(row.bound, clock)) for m in measured)
    return f"the bare work ({row.bound}) reaches {shown(reached)}" + (" there" if row.pooled == "each" else "")


def _name_of(values: dict[str, float], value: float) -> str:
    return next(what for what, v in values.items() if v == value)


def _reaches(value: float, target: float, sense: str) -> bool:
    return value >= target if sense == "faster" else value <= target


def shown(value: float) -> str:
    """Return a ratio as the page shows it: two digits that mean something."""
    return f"{value:.0f}x" if value >= 20 else f"{value:.1f}x" if value >= 3 else f"{value:.2f}x"


def time_shown(us: float) -> str:
    """Return microseconds with three significant digits and a fitting unit."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 100_000:
        return f"{us / 1000:.0f} ms"
    if us >= 10_000:
        return f"{us / 1000:.1f} ms"
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return (
        f"{us:.0f} us" if us >= 100 else f"{us:.1f} us" if us >= 10 else f"{us:.2f} us" if us >= 1 else f"{us:.3f} us"
    )
