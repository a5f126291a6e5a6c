"""The writer of docs/benchmarks.md and of the pages of tables, without a date; nobody edits them by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import compiled, ensembles, memory, scaling, widths
from benchmarks.chart import draw, speedups
from benchmarks.compiled import Compiled
from benchmarks.ensembles import Cell
from benchmarks.measure import geometric_mean
from benchmarks.memory import Peak
from benchmarks.results import Results, describe_machine, version_of
from benchmarks.rows import OURS, SLOW_S, Clock, Measured, Suite, shown, time_shown
from benchmarks.scaling import Depth, Growth

# The pages of tables, none longer than ten screens: the subject and the parts of each.
PAGES = {
    "benchmarks_trees.md": ("trees", ("trees", "newer", "tensorclass", "modules", "nn", "scaling")),
    "benchmarks_families.md": ("families of operations", ("families",)),
    "benchmarks_training.md": ("training", ("training", "first_calls")),
    "benchmarks_ensembles.md": (
        "ensembles and language models",
        ("widths", "recurrent", "ensembles", "optimizers", "lora", "llm", "compiled", "gpus"),
    ),
    "benchmarks_files.md": ("files and processes", ("storage", "async", "gather", "map", "messages", "memory")),
    "benchmarks_slower.md": ("where tdfunc is slower", ("slower",)),
}
PAGE_OF = {part: name for name, (_, parts) in PAGES.items() for part in parts}
PICTURE, WIDTHS = "assets/benchmarks.svg", "assets/widths.svg"
# A wall-time ratio this far from that of CPU times gets a remark.
APART = 0.15
# Seconds of a first call that get a remark.
COMPILES_S = 1.0
_CLOCKS: dict[Clock, str] = {"cpu": "CPU", "wall": "wall"}
SCALING_SOURCES = (scaling.tree_ways, scaling.swap_way, scaling.growth, scaling.depth)
COMPILED_SOURCES = (compiled.step_functions, compiled.compile_counts)
# The tables have a row for each measurement, which search results would be full of.
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns after the first are aligned to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def anchor(text: str) -> str:
    """Return the anchor of a heading, as Markdown's toc makes it."""
    kept = "".join(c for c in text.lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def _address(suite: Suite) -> str:
    """Return the link to the table of a suite."""
    return f"{PAGE_OF[suite.name]}#{anchor(suite.title)}"


def render(results: Results) -> dict[str, str]:
    """Return the pages of tables by their names."""
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
    }
    texts: dict[str, str] = {}
    for name, (subject, parts) in PAGES.items():
        head = [_NOT_SEARCHED, f"# Tables of benchmarks: {subject}", _about_tables(), _machines(results)]
        texts[name] = "\n\n".join(head + [text for part in parts for text in found.get(part, [])]) + "\n"
    return texts


def render_summary(results: Results) -> str:
    """Return the page with the charts and a line for each part."""
    parts = ["# Benchmarks", _intro(), f"![Speed-ups of common work]({PICTURE}){{ .wide }}"]
    parts += _widths(results) + _overview(results) + _peaks(results.peaks) + _gpu_state(results.gpus)
    parts += _against(results) + ["## Method", _method(), _machines(results)]
    return "\n\n".join(parts) + "\n"


def write(results: Results, path: Path) -> None:
    """Write the summary to `path`, the tables beside it, and the charts."""
    path.write_text(render_summary(results))
    for name, text in render(results).items():
        path.with_name(name).write_text(text)
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
    *others, last = [f"[{subject}]({name})" for name, (subject, _) in PAGES.items()]
    return _prose(f"""
        The chart compares common work in tdfunc with the rival beside each bar, on one CPU core. Blue bars show how
        many times faster tdfunc is. In orange rows, tdfunc is slower. The tables list all comparisons, including all
        rows where tdfunc is slower: {", ".join(others)} and {last}.
    """)


def _widths(results: Results) -> list[str]:
    found = [(suite, measured) for suite, measured in results.suites if suite.name == "widths"]
    if not found:
        return []
    ((suite, measured),) = found
    members = max(widths.MEMBERS)
    rows = [
        [model, str(width), shown(value)]
        for model, lines in widths.speedups(measured).items()
        for width, value in lines[members].items()
    ]
    text = f"The table has the rows with {members} members. [All rows]({_address(suite)})"
    parts = [f"## {suite.title}", suite.intro, f"![Speed-up by the width of a member]({WIDTHS}){{ .wide }}"]
    return [*parts, f"{text} also have other numbers of members.", table(("model", "width", "speed-up"), rows)]


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
    parts: list[tuple[float, list[str]]] = []
    for suite, measured in results.suites:
        found = _comparisons(suite, measured)
        worst = min(found)
        faster = sum(each.ratio >= 1 for each in found)
        smallest = f"{shown(worst.ratio)}: {worst.what}, against {worst.rival}"
        parts.append((worst.ratio, [f"[{suite.title}]({_address(suite)})", f"{faster} of {len(found)}", smallest]))
    rows = [row for _, row in sorted(parts)]
    text = _prose("""
        Each part compares several cases with several rivals. Some rivals do less work: a raw dict checks nothing,
        and `os.write` writes bytes without names. The last column has the comparison with the smallest speed-up, and
        the parts are in its order.
    """)
    return ["## All parts", text, table(("part", "tdfunc is faster", "smallest speed-up"), rows)]


def _peaks(peaks: Sequence[Peak]) -> list[str]:
    shown_peaks = [peak for peak in peaks if peak.what.startswith(("save in the background, 200", "score"))]
    if not shown_peaks:
        return []
    text = _prose(f"""
        The peak is the largest resident memory beyond the tree or the model. [Peak
        memory]({PAGE_OF["memory"]}#peak-memory) has more rows.
    """)
    rows = [[f"{peak.what}: {peak.way}", _megabytes(peak.size_bytes)] for peak in shown_peaks]
    return ["## Memory", text, table(("work", "peak"), rows)]


def _gpu_state(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["## GPUs", "The benchmarks have not run on a GPU yet. `make gpu` runs the tests and the rows of a GPU."]
    names = ", ".join(device["device"] for device in found)
    return ["## GPUs", f"[GPUs]({PAGE_OF['gpus']}#gpus) has the rows of these devices: {names}."]


def _about_tables() -> str:
    return _prose(f"""
        [Benchmarks](benchmarks.md) describes the method. *2x* means that tdfunc takes half the time. [One
        page]({PAGE_OF["slower"]}) lists all comparisons in which tdfunc is slower.
    """)


def _against(results: Results) -> list[str]:
    if results.against is None:
        return []
    commit, rows = results.against
    ratios = {what: before / now for what, before, now in rows}
    slower = [f"{what} ({shown(ratio)})" for what, ratio in ratios.items() if ratio < 0.95]
    text = _prose(f"""
        `python -m benchmarks.against FOLDER trees training` runs two versions on the same core in alternating rounds.
        It tells a slower version from a slower machine. Against version {commit}, the {len(ratios)} cases of trees,
        modules and training steps are {shown(geometric_mean(ratios.values()))} as fast in the mean, from
        {shown(min(ratios.values()))} to {shown(max(ratios.values()))}.
    """)
    if slower:
        text += f" Below 0.95x: {', '.join(slower)}. These cases move megabytes, and their ratios differ by run."
    return ["## Against another version", text]


def _method() -> str:
    return _prose("""
        `make bench` measures all parts and writes these pages. `make bench PARTS="training nn"` measures two parts.
        All rivals of a case run in one process, in alternating rounds of a few milliseconds (of fifty for training
        steps), on one torch thread, without garbage collection. A time is the median CPU time of this thread over the
        rounds, minus the time of an empty call. If the wall time gives another ratio, the last column of the tables
        has it. *2x* means that tdfunc takes half the time.
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
    labels = describe_machine().keys()
    heads = ["measured on"] if len(found) == 1 else [f"measured: {', '.join(parts)}" for parts in found.values()]
    return table(("", *heads), [[label, *values] for label, *values in zip(labels, *found, strict=True)])


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
        title = f"[{suite.title}]({_address(suite)})"
        rows.append([f"{title}: {each.what}", each.rival, shown(each.ratio), _reason(suite, each)])
    text = _prose("""
        These are all comparisons in which tdfunc takes more time, the slowest first. Some rivals do less work: a raw
        dict checks nothing.
    """)
    return [text, table(("work", "against", "speed-up", "reason"), rows)]


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
