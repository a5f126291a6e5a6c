"""The writer of docs/benchmarks.md and of the tables of `--show`, without a date; nobody edits the page by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import compiled, ensembles, memory, scaling, widths
from benchmarks.causes import CAUSES, Cause, cause_of
from benchmarks.chart import draw, speedups
from benchmarks.compiled import Compiled
from benchmarks.ensembles import Cell
from benchmarks.measure import geometric_mean
from benchmarks.memory import Peak
from benchmarks.results import Results, describe_machine, version_of
from benchmarks.rows import OURS, SLOW_S, Clock, Measured, Suite, shown, time_shown
from benchmarks.scaling import Depth, Growth

PICTURE, WIDTHS = "assets/benchmarks.svg", "assets/widths.svg"
# A wall-time ratio this far from that of CPU times gets a remark.
APART = 0.15
# A speed-up over another version below this one is counted.
NOTICED = 0.95
# Seconds of a first call that get a remark.
COMPILES_S = 1.0
_CLOCKS: dict[Clock, str] = {"cpu": "CPU", "wall": "wall"}
SCALING_SOURCES = (scaling.tree_ways, scaling.swap_way, scaling.growth, scaling.depth)
COMPILED_SOURCES = (compiled.step_functions, compiled.compile_counts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns after the first are aligned to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def render(results: Results) -> dict[str, str]:
    """Return the tables of each part that was measured, and of `slower`, `gpus` and the `machines`."""
    found = {
        suite.name: [
            f"## {suite.title}",
            f"{suite.intro}{_slow(suite)} {_code(suite.sources)}",
            _cases(measured, suite.clock, compiles=suite.compiles),
        ]
        for suite, measured in results.suites
    } | {
        "newer": _newer(*results.newer) if results.newer is not None else [],
        "scaling": _growth(results.growths, results.depths),
        "ensembles": _ensembles(results.cells),
        "compiled": _compiled(results.compiled),
        "gpus": _gpus(results.gpus),
        "memory": _memory(results.peaks),
        "slower": _slower(results),
        "against": _against_rows(results),
        "machines": [_machines(results)],
    }
    return {part: "\n\n".join(texts) for part, texts in found.items() if texts}


def render_summary(results: Results) -> str:
    """Return the page: the charts, a line for each part, and the causes of what is slower."""
    parts = ["# Benchmarks", _intro(), f"![Speed-ups of common work]({PICTURE}){{ .wide }}"]
    parts += _widths(results) + _overview(results) + _causes(results) + _peaks(results.peaks)
    parts += _gpu_state(results.gpus) + _against(results) + ["## Method", _method(), _machines(results)]
    return "\n\n".join(parts) + "\n"


def write(results: Results, path: Path) -> None:
    """Write the page to `path`, and its charts beside it."""
    path.write_text(render_summary(results))
    measured = {suite.name: (cases, suite.clock) for suite, cases in results.suites}
    if results.newer is not None:
        measured["newer"] = (results.newer[1], "cpu")
    picture = path.parent / PICTURE
    picture.parent.mkdir(exist_ok=True)
    draw(speedups(measured), picture)
    if "widths" in measured:
        widths.draw(measured["widths"][0], path.parent / WIDTHS)


# -- the summary ------------------------------------------------------------------------------------------------


def _intro() -> str:
    return _prose("""
        This page shows how fast tdfunc is beside other libraries, and where it is slower. All numbers come from one
        CPU core. In a clone of the repository, `python -m benchmarks --show training` prints all rows of a part; it
        measures nothing. `--show` lists the parts. See also: [Train one model or many](training.md),
        [Trust](reliability.md), [Run on a GPU](gpu.md). In the chart, tdfunc is slower in the orange rows.
    """)


def _widths(results: Results) -> list[str]:
    found = [(suite, measured) for suite, measured in results.suites if suite.name == "widths"]
    if not found:
        return []
    ((suite, measured),) = found
    members = max(widths.MEMBERS)
    rows: list[list[str]] = []
    for model, lines in widths.speedups(measured).items():
        values = [f"{shown(value)} ({width})" for width, value in lines[members].items()]
        rows.append([model, ", ".join(values)])
    parts = [f"## {suite.title}", suite.intro, f"![Speed-up by the width of a member]({WIDTHS}){{ .wide }}"]
    text = f"These are the speed-ups with {members} members. `--show widths` also has other numbers of members. "
    text += "The table of the first page is from two other runs, on two machines."
    return [*parts, text, table(("model", "speed-up (width)"), rows)]


class _Comparison(NamedTuple):
    """One case against one rival."""

    ratio: float
    what: str
    rival: str


def _comparisons(suite: Suite, measured: Sequence[Measured]) -> list[_Comparison]:
    """Return the cases against each rival; a second way of ours, such as "tdfunc with ...", is not one."""
    found: list[_Comparison] = []
    for m in measured:
        rivals = [way for way in m.timings if not way.startswith(OURS)]
        found += [_Comparison(m.ratio_to(way, suite.clock), m.what, way) for way in rivals]
    return found


def _overview(results: Results) -> list[str]:
    if not results.suites:
        return []
    rows: list[list[str]] = []
    for suite, measured in results.suites:
        found = _comparisons(suite, measured)
        ratios = sorted(each.ratio for each in found)
        faster = sum(ratio >= 1 for ratio in ratios)
        part = f"{suite.title} (`{suite.name}`)"
        rows.append([part, f"{faster} of {len(found)}", shown(median(ratios)), _between(ratios)])
    text = _prose("""
        A part compares several cases with several rivals. Some rivals do less work: a raw dict checks nothing. *2x*
        means that tdfunc takes half the time. Names in brackets are names for `--show`, which also has `newer` (a
        newer tensordict), `scaling` (the cost by the number of leaves), `ensembles` (the ways to run one), `compiled`
        (graphs of `torch.compile`) and `memory`.
    """)
    return ["## All parts", text, table(("part", "tdfunc is faster", "median", "range"), rows)]


def _between(ratios: Sequence[float]) -> str:
    """Return the range of ratios in ascending order."""
    first, last = shown(ratios[0]), shown(ratios[-1])
    return first if first == last else f"{first} to {last}"


def _causes(results: Results) -> list[str]:
    """Return a row for each cause of slower comparisons: how many there are, and their range."""
    found = {cause: sorted(each.ratio for each in some) for cause, some in slower_by_cause(results).items()}
    rows = [
        [cause.words, cause.against, str(len(ratios)), _between(ratios)]
        for cause, ratios in found.items()
        if cause is not None
    ]
    if not rows:
        return []
    text = "`--show slower` prints each comparison, the slowest first."
    return ["## Where tdfunc is slower", text, table(("cause", "against", "rows", "speed-up"), rows)]


def slower_by_cause(results: Results) -> dict[Cause | None, list[_Comparison]]:
    """Return the comparisons below 1 by their causes; under None, the ones without a cause."""
    found: dict[Cause | None, list[_Comparison]] = {cause: [] for cause in CAUSES}
    for suite, measured in results.suites:
        for each in _comparisons(suite, measured):
            if each.ratio < 1:
                found.setdefault(cause_of(suite.name, each.rival, each.what), []).append(each)
    return {cause: some for cause, some in found.items() if some}


def _peaks(peaks: Sequence[Peak]) -> list[str]:
    shown_peaks = [peak for peak in peaks if peak.what.startswith(("save in the background, 200", "score"))]
    if not shown_peaks:
        return []
    text = "The peak is the largest resident memory beyond the tree or the model. `--show memory` has more rows."
    rows = [[f"{peak.what}: {peak.way}", _megabytes(peak.size_bytes)] for peak in shown_peaks]
    return ["## Memory", text, table(("work", "peak"), rows)]


def _gpu_state(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["## GPUs", "The benchmarks have not run on a GPU yet. `make gpu` runs the tests and the rows of a GPU."]
    names = ", ".join(device["device"] for device in found)
    return ["## GPUs", f"`--show gpus` has the rows of these devices: {names}."]


def _against(results: Results) -> list[str]:
    if results.against is None:
        return []
    commit, rows = results.against
    ratios = [before / now for _, before, now in rows]
    slower = sum(ratio < NOTICED for ratio in ratios)
    text = _prose(f"""
        `python -m benchmarks.against FOLDER trees training` runs two versions on the same core in alternating rounds.
        It tells a slower version from a slower machine. Against version {commit}, the {len(ratios)} cases of trees,
        modules and training steps are {shown(geometric_mean(ratios))} as fast in the mean, from {shown(min(ratios))}
        to {shown(max(ratios))}. {slower} are below {shown(NOTICED)} (`--show against`), and differ by run.
    """)
    return ["## Against another version", text]


def _against_rows(results: Results) -> list[str]:
    if results.against is None:
        return []
    commit, rows = results.against
    cells = [[what, time_shown(before), time_shown(now), shown(before / now)] for what, before, now in rows]
    return [f"## Against version {commit}", table(("work", "before", "now", "speed-up"), cells)]


def _method() -> str:
    return _prose("""
        `make bench` measures all parts and writes this page. `make bench PARTS="training nn"` measures two parts.
        All rivals of a case run in one process, in alternating rounds of a few milliseconds (of fifty for training
        steps), on one torch thread, without garbage collection. A time is the median CPU time of this thread over the
        rounds, minus the time of an empty call. Work that waits for a disk or another process is judged by wall time.
        If the other clock gives another ratio, the last column of the printed tables has it.
    """)


def _prose(text: str) -> str:
    return " ".join(text.split())


def _slow(suite: Suite) -> str:
    if not suite.compiles:
        return ""
    return " " + _prose(f"""
        If a call takes more than {SLOW_S:g} s, it is timed once, and the rows with more members have a bound
        instead of a time. The times do not include tracing and compilation. If one of the first two calls takes
        more than {COMPILES_S:g} s, the last column has the seconds of these calls, first for tdfunc and then for
        the rival.
    """)


def _machines(results: Results) -> str:
    """Return the table of the processors and the versions, a column for all parts that were measured alike."""
    found: dict[tuple[str, ...], list[str]] = {}
    for part, machine in (results.machines or {"": describe_machine()}).items():
        found.setdefault(tuple(machine.values()), []).append(part)
    # The column with the most parts is the last one and names none.
    *some, most = sorted(found, key=lambda values: len(found[values]))
    heads = [f"measured: {', '.join(found[values])}" for values in some]
    heads.append("measured: the other parts" if some else "measured on")
    rows = [list(row) for row in zip(describe_machine().keys(), *some, most, strict=True)]
    return table(("", *heads), rows)


# -- where tdfunc is slower ------------------------------------------------------------------------------------


def _slower(results: Results) -> list[str]:
    """Return the table of all comparisons below 1, the slowest first, with the reasons that are known."""
    found: list[tuple[_Comparison, Suite]] = []
    for suite, measured in results.suites:
        found += [(each, suite) for each in _comparisons(suite, measured) if each.ratio < 1]
    if not found:
        return []
    found.sort(key=lambda pair: pair[0].ratio)
    rows: list[list[str]] = []
    for each, suite in found:
        rows.append([f"{suite.title}: {each.what}", each.rival, shown(each.ratio), _reason(suite, each)])
    text = _prose("""
        These are all comparisons in which tdfunc takes more time, the slowest first. Some rivals do less work: a raw
        dict checks nothing.
    """)
    return ["## Where tdfunc is slower", text, table(("work", "against", "speed-up", "reason"), rows)]


def _reason(suite: Suite, comparison: _Comparison) -> str:
    """Return why a case is slower than a rival, or an empty text."""
    for row in suite.rows:
        if row.rival == comparison.rival and comparison.what in row.cases:
            return row.why
    return ""


def _code(functions: Sequence[Callable[..., Any]]) -> str:
    """Return a sentence with the files of functions and their names."""
    by_file: dict[str, list[str]] = {}
    for fn in dict.fromkeys(functions):
        by_file.setdefault(fn.__module__.replace(".", "/") + ".py", []).append(f"`{fn.__qualname__}`")
    return "Code: " + "; ".join(f"{', '.join(names)} in `{file}`" for file, names in by_file.items()) + "."


# -- tables -----------------------------------------------------------------------------------------------------


def _cases(measured: Sequence[Measured], clock: Clock, *, compiles: bool = False) -> str:
    """Return one line for each case and rival: both times, the ratio, remarks."""
    rows: list[list[str]] = []
    for m in measured:
        ours = m.time_us(OURS, clock)
        for rival in m.timings:
            if rival == OURS:
                continue
            remarks = _clocks(m, rival, clock) + (_first_calls(m, rival) if compiles else [])
            speedup, theirs = m.ratio_to(rival, clock), m.time_us(rival, clock)
            rows.append([m.what, rival, time_shown(ours), time_shown(theirs), shown(speedup), ", ".join(remarks)])
        for rival, over in m.over_us.items():
            bounds = [f"over {time_shown(over)}", f"over {shown(over / ours)}" if over > ours else ""]
            rows.append([m.what, rival, time_shown(ours), *bounds, ""])
    return table(("work", "against", "tdfunc", "theirs", "speed-up", ""), rows)


def _clocks(m: Measured, rival: str, clock: Clock) -> list[str]:
    """Return the speed-up by the other clock where it differs."""
    other: Clock = "cpu" if clock == "wall" else "wall"
    speedup, elsewhere = m.ratio_to(rival, clock), m.ratio_to(rival, other)
    return [f"{_CLOCKS[other]} {shown(elsewhere)}"] if abs(elsewhere / speedup - 1) > APART else []


def _first_calls(m: Measured, rival: str) -> list[str]:
    seconds = [m.timings[way].first_s for way in (OURS, rival)]
    return ["first calls {:.1f} s, {:.1f} s".format(*seconds)] if max(seconds) > COMPILES_S else []


def _newer(number: str, measured: list[Measured]) -> list[str]:
    text = _prose(f"""
        The tables above have the pinned tensordict, {version_of("tensordict")}. Version {number} has much less overhead
        in Python. These are the same rows against it, measured in a separate process.
    """)
    return [f"### Against tensordict {number}", text, _cases(_only_tensordict(measured), "cpu")]


def _only_tensordict(measured: list[Measured]) -> list[Measured]:
    kept = [(m, {k: v for k, v in m.timings.items() if k in (OURS, "tensordict")}) for m in measured]
    return [Measured(m.what, timings, m.per) for m, timings in kept]


def _growth(growths: Sequence[Growth], depths: Sequence[Depth]) -> list[str]:
    if not growths:
        return []
    leaves = list(growths[0].cost_us)
    rows = [
        [
            g.what, *[f"{time_shown(g.cost_us[n] / n)}" for n in leaves],
            f"{time_shown(max(g.line.start_us, 0))} + {time_shown(max(g.line.leaf_us, 0))} n", f"{g.line.exponent:.2f}",
        ]
        for g in growths
    ]  # fmt: skip
    bent = [g for g in growths if not g.linear]
    verdict = "All grow linearly" if not bent else "All but " + ", ".join(g.what for g in bent) + " grow linearly"
    text = _prose(f"""
        The times are per leaf, for flat trees of n leaves of shape (4, 2). {verdict}: the cost of 100 leaves and
        more fits a power of n of at most {scaling.LINEAR}. (`set` copies the dict of one node, which takes
        nanoseconds per leaf.) The column *line* is a fit of start + slope n. A *swap* reads and checks a new tree
        and puts it into the module. {_code(SCALING_SOURCES)}
    """)
    parts = ["## Cost against leaves", text]
    parts.append(table(("work", *[f"{n:,}" for n in leaves], "line", "power"), rows))
    if depths:
        parts.append(
            "The next table has 1024 leaves in one node, in 32 nodes side by side, and in a chain of 32 nodes."
        )
        rows = [
            [
                d.what,
                time_shown(d.flat_us),
                time_shown(d.wide_us),
                time_shown(d.deep_us),
                f"{d.deep_us / d.wide_us:.2f}",
            ]
            for d in depths
        ]
        parts.append(table(("work", "one node", "32 side by side", "32 deep", "deep / side by side"), rows))
    return parts


def _ensembles(cells: Sequence[Cell]) -> list[str]:
    if not cells:
        return []
    rows: list[list[str]] = []
    for c in cells:
        times = [time_shown(c.timings[way].cpu_us) for way in ensembles.WAYS]
        ratio = f"{c.ratio:.2f}" if c.reached else f"**{c.ratio:.2f}**"
        auto = time_shown(c.timings["auto"].cpu_us)
        rows.append([c.model, str(c.members), *times, c.chosen, auto, ratio, f"{c.gain:.1f}x"])
    over = [c for c in cells if not c.reached]
    words = "; ".join(
        f"{c.model}, {c.members} member{'s' * (c.members > 1)}: auto ({c.chosen}) takes {c.ratio:.2f} of {c.best}"
        for c in over
    )
    limit = f"{ensembles.WITHIN - 1:.0%}"
    verdict = f"It takes at most {limit} more than the better of the two in all cases."
    if over:
        verdict = (
            f"It takes over {limit} more than the better of the two in {len(over)} of {len(cells)} cases: {words}."
        )
    text = _prose(f"""
        `auto` is vmap, or the loop for one member and for models that vmap cannot run. {verdict} Only
        `how="traced"` replays a trace, and the last column is its gain over `auto`. All models run in evaluation mode,
        without gradients, after {ensembles.WARM_UP} calls. {_code((ensembles.prepare_cell,))}
    """)
    head = ("model", "members", *ensembles.WAYS, "auto chose", "auto", "auto / best", "traced, faster than auto")
    return ["## Ways to run an ensemble", text, table(head, rows)]


def _gpus(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return _gpu_state(found)
    text = _prose("""
        `make gpu` measures these rows. A time is the time between two events of the device, the median over
        alternating rounds. In training steps, *tdfunc* is `tdf.jit(backend="cudagraphs")` with `donate=True`. The
        compiled step is `vmap(grad(functional_call))` under `mode="reduce-overhead"`; the next step receives clones
        of its results.
    """)
    parts = ["## GPUs", text]
    for device in found:
        own = {row["what"]: row["us"] for row in device["rows"] if row["way"] == OURS and row["us"]}
        rows: list[list[str]] = []
        for row in device["rows"]:
            # An error of ours is a row, too.
            if row["way"] != OURS or row["error"]:
                mine, theirs = own.get(row["what"], 0.0), row["us"]
                times = [time_shown(us) if us else "" for us in (mine, theirs)]
                rows.append(
                    [row["what"], row["way"], *times, shown(theirs / mine) if mine and theirs else "", row["error"]]
                )
        parts += [f"{device['device']}; {device['versions']}."]
        parts += [table(("work", "against", "tdfunc", "theirs", "speed-up", ""), rows)]
    return parts


def _memory(peaks: Sequence[Peak]) -> list[str]:
    if not peaks:
        return []
    text = _prose(f"""
        The peak is the largest resident memory minus the memory before the work, with the tree or the model. Pages
        of mapped files count, although the system can reclaim them and several processes share them. The last
        column has the bytes on such pages at the end of the work. Loading includes one use of every value. Saving
        in the background ends when the file is complete. {_code(memory.SOURCES)}
    """)
    rows = [[f"{p.what}: {p.way}", _megabytes(p.size_bytes), _megabytes(p.mapped_bytes)] for p in peaks]
    return ["## Peak memory", text, table(("work", "peak", "of mapped files"), rows)]


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _compiled(found: Sequence[Compiled]) -> list[str]:
    if not found:
        return []
    bad = [c.what for c in found if not c.reached]
    verdict = "Each function is one graph, also later." if not bad else "More graphs: " + "; ".join(bad) + "."
    text = _prose(f"""
        The step functions of the demo run under `torch.compile(fullgraph=True, backend="aot_eager")`,
        {compiled.CALLS} times with new trees and data of the same shapes. {verdict} {_code(COMPILED_SOURCES)}
    """)
    rows = [[c.what, str(c.graphs), str(c.graphs_after), str(c.breaks)] for c in found]
    return [
        "## torch.compile",
        text,
        table(("function", "graphs", f"graphs after {compiled.CALLS} calls", "graph breaks"), rows),
    ]
