"""The writer of docs/benchmarks.md, a page without a date that nobody edits by hand."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compiled, ensembles, memory, scaling, widths
from benchmarks.chart import draw, speedups
from benchmarks.compiled import Compiled
from benchmarks.ensembles import Cell
from benchmarks.memory import Peak
from benchmarks.results import Results, describe_machine, version_of
from benchmarks.rows import OURS, SLOW_S, Clock, Measured, Suite, judge_suite, shown, time_shown
from benchmarks.scaling import Depth, Growth

PICTURE, WIDTHS = "assets/benchmarks.svg", "assets/widths.svg"
# A wall-time ratio this far from that of CPU times gets a remark.
APART = 0.15
# Seconds of a first call that get a remark.
COMPILES_S = 1.0
_CLOCKS: dict[Clock, str] = {"cpu": "CPU", "wall": "wall"}
SCALING_SOURCES = (scaling.tree_ways, scaling.swap_way, scaling.growth, scaling.depth)
COMPILED_SOURCES = (compiled.step_functions, compiled.compile_counts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns after the first are aligned to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def anchor(text: str) -> str:
    """Return the anchor of a heading, as Markdown's toc makes it."""
    kept = "".join(c for c in text.lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def render(results: Results) -> str:
    """Return the page."""
    parts = [
        "# Benchmarks",
        _intro(),
        f"![Speed-ups of the main rows]({PICTURE}){{ .wide }}",
        _method(),
        _machines(results),
    ]
    for suite, measured in results.suites:
        parts += [f"## {suite.title}", f"{suite.intro}{_slow(suite)} Code: {_links(suite.sources)}."]
        if suite.name == "widths":
            parts.append(f"![Speed-up by the width of a member]({WIDTHS}){{ .wide }}")
        parts.append(_cases(measured, suite.clock, compiles=suite.compiles))
        if suite.name == "trees" and results.newer is not None:
            parts += _newer(*results.newer)
    parts += _gpus(results.gpus) + _memory(results.peaks)
    parts += _growth(results.growths, results.depths) + _ensembles(results.cells) + _compiled(results.compiled)
    parts += _summary(results) + _sources(results)
    return "\n\n".join(parts) + "\n"


def write(results: Results, path: Path) -> None:
    """Write the page and the picture at its head."""
    path.write_text(render(results))
    # The sources on the page get the width of its column.
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(path)], check=True)
    measured = {suite.name: (cases, suite.clock) for suite, cases in results.suites}
    if results.newer is not None:
        measured["newer"] = (results.newer[1], "cpu")
    picture = path.parent / PICTURE
    picture.parent.mkdir(exist_ok=True)
    draw(speedups(measured), picture)
    if "widths" in measured:
        widths.draw(measured["widths"][0], path.parent / WIDTHS)


def _intro() -> str:
    return _prose("""
        The picture shows how many times faster tdfunc does some common work than the way named beside each bar, on one
        core of a CPU; in orange rows it is slower. All rows, against all rivals, are in the tables below; the
        targets that the project has set itself, reached or not, are [at the end](#targets).
    """)


def _method() -> str:
    return _prose("""
        `make bench` measures and writes this page, `make bench PARTS="training nn"` parts of it. All ways to do
        one thing run in one process, one after another in rounds of a few milliseconds, on one torch thread
        with the garbage collector off. A time is the median over the rounds of this thread's CPU time, minus
        the cost of calling an empty function. The last column gives the speed-up by the other clock where the
        two differ. *2x* means that tdfunc takes half the time.
    """)


def _prose(text: str) -> str:
    return " ".join(text.split())


def _slow(suite: Suite) -> str:
    if not suite.compiles:
        return ""
    return " " + _prose(f"""
        A way whose call takes more than {SLOW_S:g} s is timed once, and left out of the rows for more members, which
        have a bound from the last one measured. Tracing and compiling are not part of the time: the last column has the
        seconds of the first two calls, ours and then theirs, where either takes more than {COMPILES_S:g} s.
    """)


def _machines(results: Results) -> str:
    """Return the table of the processors and the versions, a column for all parts that were measured alike."""
    found: dict[tuple[str, ...], list[str]] = {}
    for part, machine in (results.machines or {"": describe_machine()}).items():
        found.setdefault(tuple(machine.values()), []).append(part)
    labels = describe_machine().keys()
    heads = ["measured on"] if len(found) == 1 else [f"measured: {', '.join(parts)}" for parts in found.values()]
    return table(("", *heads), [[label, *values] for label, *values in zip(labels, *found, strict=True)])


# -- targets ----------------------------------------------------------------------------------------------------


def _summary(results: Results) -> list[str]:
    found = [(suite, judge_suite(suite, measured)) for suite, measured in results.suites]
    verdicts = [verdict for _, judged in found for verdict in judged]
    if not verdicts:
        return []
    rows: list[list[str]] = []
    for suite, judged in found:
        for verdict in judged:
            row = verdict.row
            aim = f"{row.reach:g}x faster" if row.sense == "faster" else f"at most {row.reach:g}x"
            title = f"[{row.title}](#{anchor(suite.title)})"
            rows.append([title, row.rival, aim, shown(verdict.value), "yes" if verdict.reached else "**no**"])
    short = [f"- **{v.row.title}**, against {v.row.rival}: {v.sentence}." for v in verdicts if not v.reached]
    count = len(verdicts) - len(short)
    head = (
        "One value stands for several cases: the least favourable of them, or the geometric mean in the middle rows of "
        "the tree operations and in those against a raw dict."
    )
    parts = ["## Targets", f"{count} of {len(verdicts)} rows reach their target. {head}"]
    parts.append(table(("work", "against", "reach", "measured", "reached"), rows))
    return [*parts, *(["Rows that fall short, with the reason:", "\n".join(short)] if short else [])]


def _links(functions: Sequence[Callable[..., Any]]) -> str:
    return ", ".join(f"[`{_name(fn)}`](#{anchor(_name(fn))})" for fn in functions)


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


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
        The targets are ratios to the pinned tensordict, {version_of("tensordict")}. Version {number} has much less
        overhead in Python; these are the same rows against it, measured in a process of their own, without targets.
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
        Time per leaf for flat trees of n leaves of shape (4, 2). {verdict}: the cost of 100 leaves and more fits a
        power of n of at most {scaling.LINEAR}. (`set` copies the dict of one node, which takes nanoseconds for each
        leaf.) The line is a fit of start + slope n. Swap: a new tree at each call is read, checked and put into the
        module. Code: {_links(SCALING_SOURCES)}.
    """)
    parts = ["## Cost against leaves", text]
    parts.append(table(("work", *[f"{n:,}" for n in leaves], "line", "power"), rows))
    if depths:
        parts.append("1024 leaves: in one node, in 32 nodes side by side, and in a chain of 32 nodes.")
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
    verdict = "All of them reach it." if not over else f"It falls short in {len(over)} of {len(cells)}: {words}."
    text = _prose(f"""
        `auto` is vmap, or the loop for one member and for what vmap cannot run; its target is
        {ensembles.WITHIN - 1:.0%} above the better of the two. {verdict} `how="traced"` replays a
        trace, and only on request; the last column is its gain over `auto`. All in evaluation mode, without gradients,
        after {ensembles.WARM_UP} calls. Code: {_links((ensembles.prepare_cell,))}.
    """)
    head = ("model", "members", *ensembles.WAYS, "auto chose", "auto", "auto / best", "traced, faster than auto")
    return ["## Ways to run an ensemble", text, table(head, rows)]


def _gpus(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["## GPUs", "Not run yet on a GPU: `make gpu` runs the tests and the rows of one."]
    text = _prose("""
        `make gpu` measures these rows: the time between two events of the device, the median over rounds that alternate
        between the ways. In training steps, *tdfunc* is `tdf.jit(backend="cudagraphs")` with `donate=True`. The
        compiled step is `vmap(grad(functional_call))` under `mode="reduce-overhead"`; the next one gets clones of its
        results.
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
        Resident memory at its peak, minus that of the process with the tree or model before the work. Pages of mapped
        files count, though they do not belong to the process: the system takes them back when it needs them, and
        several processes share them. The last column has the bytes on such pages at the end of the work. Loading
        includes one use of every value, saving in the background ends when the file is there. Code:
        {_links(memory.SOURCES)}.
    """)
    rows = [[f"{p.what}: {p.way}", _megabytes(p.size_bytes), _megabytes(p.mapped_bytes)] for p in peaks]
    return ["## Peak memory", text, table(("work", "peak", "of mapped files"), rows)]


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _compiled(found: Sequence[Compiled]) -> list[str]:
    if not found:
        return []
    bad = [c.what for c in found if not c.reached]
    verdict = "Each is one graph, and stays that one." if not bad else "Falls short: " + "; ".join(bad) + "."
    text = _prose(f"""
        The step functions of the demo under `torch.compile(fullgraph=True, backend="aot_eager")`, called
        {compiled.CALLS} times with new trees and data of the same shapes. {verdict}
        Code: {_links(COMPILED_SOURCES)}.
    """)
    rows = [[c.what, str(c.graphs), str(c.graphs_after), str(c.breaks)] for c in found]
    return [
        "## torch.compile",
        text,
        table(("function", "graphs", f"graphs after {compiled.CALLS} calls", "graph breaks"), rows),
    ]


def _sources(results: Results) -> list[str]:
    shown_sources: list[Callable[..., Any]] = [fn for suite, _ in results.suites for fn in suite.sources]
    if results.growths:
        shown_sources += SCALING_SOURCES
    if results.cells:
        shown_sources.append(ensembles.prepare_cell)
    if results.compiled:
        shown_sources += COMPILED_SOURCES
    if results.peaks:
        shown_sources += memory.SOURCES
    parts = ["## Sources", "The functions behind the rows, from `benchmarks/`."]
    for fn in shown_sources:
        # `py`, not `python`: these run as parts of their modules, the blocks of a page as pages.
        parts += [f"### {_name(fn)}", f"```py\n{inspect.getsource(fn).rstrip()}\n```"]
    return parts
