"""The benchmarks' arithmetic, words and page; no test looks at how long anything takes."""

import re
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from benchmarks import (
    __main__,
    chart,
    compiled,
    ensembles,
    families,
    gather,
    mapping,
    measure,
    memory,
    messages,
    modules,
    page,
    results,
    rows,
    scaling,
    storage,
    terminal,
    training,
    trees,
)
from benchmarks.measure import Effort, Fresh, Timing
from benchmarks.rows import Case, Measured, Row, Suite, judge

TINY = Effort(rounds=5, passes=1, round_s=1e-5, longest_s=0.01)
SUITES = __main__.ALL


def measured(what, per=1, **us):
    """A case whose ways took these microseconds."""
    return Measured(what, {name: Timing(value, value, 5) for name, value in us.items()}, per)


def verdict(cases, reach, sense="faster", **options):
    """What a row against `other` comes to."""
    row = Row("work", "other", reach, sense, tuple(c.what for c in cases), **options)
    return judge(row, cases)


def a_suite(cases, **options):
    """A suite of these cases without rows."""
    return Suite("name", "Title", "Intro.", cases, (), (), **options)


# -- arithmetic -------------------------------------------------------------------------------------------------


def test_geometric_mean():
    """Twice as fast and half as fast would not cancel out."""
    assert measure.geometric_mean([2.0, 0.5]) == pytest.approx(1)
    assert measure.geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10)


@pytest.mark.parametrize(("start", "leaf"), [(5.0, 0.25), (0.0, 3.0)])
def test_line_finds_what_costs_are_made_of(start, leaf):
    """The fixed cost of a call and the cost of a leaf would be mixed up."""
    leaves = [10, 100, 1000, 10_000]

    line = measure.fit_line(leaves, [start + leaf * n for n in leaves])

    assert (line.start_us, line.leaf_us) == (pytest.approx(start, abs=1e-6), pytest.approx(leaf))
    assert line.exponent == pytest.approx(1, abs=0.1)


def test_line_shows_quadratic_growth():
    """An operation whose cost grows with the square of the leaves would count as linear."""
    leaves = [100, 1000, 10_000]
    line = measure.fit_line(leaves, [0.01 * n**2 for n in leaves])

    assert line.exponent == pytest.approx(2)
    assert not scaling.Growth("work", {}, line).linear


def test_slow_rounds_do_not_show(monkeypatch):
    """One slow round would show in the result, or what other processes add to wall time."""
    rounds = iter([(1.0, 1.0), (9.0, 90.0), (2.0, 2.0), (3.0, 3.0), (1.5, 1.5)])
    monkeypatch.setattr(measure, "_calls_for", lambda way, seconds: 1)
    way = object()
    seen = []

    def fake_round(fn, calls):
        if fn is not way:
            return 0.5, 0.5
        seen.append(calls)
        # First calls, the one that may be slow, and the look at how long a round is are no measurements.
        return (0.0, 0.0) if len(seen) <= 4 else next(rounds)

    monkeypatch.setattr(measure, "_round", fake_round)
    found = measure.measure({"tdfunc": way}, Effort(rounds=5, passes=1))

    assert found == {"tdfunc": Timing(1.5, 0.75, 5)}


def test_ways_take_turns():
    """All rounds of one way would come before those of the next, so that a slow minute would fall on one of them."""
    order = []
    measure.measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, TINY)

    changes = sum(x != y for x, y in zip(order, order[1:], strict=False))

    assert changes >= 2 * TINY.rounds - 1


def test_fresh_arguments_are_made_outside_the_clock(monkeypatch):
    """Making the argument would be timed, or an argument used twice."""
    clock = [0]
    monkeypatch.setattr(measure.time, "thread_time_ns", lambda: clock[0])
    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: clock[0])
    seen = []

    def make():
        clock[0] += 1_000_000
        return object()

    def call(value):
        clock[0] += 2000
        seen.append(value)

    assert measure._round(Fresh(make, call), 3) == (2.0, 2.0)
    assert len({id(value) for value in seen}) == 3


def test_the_empty_call_is_taken_off(monkeypatch):
    """The harness's own time would make small ratios smaller."""
    monkeypatch.setattr(measure, "_calls_for", lambda way, seconds: 1)
    monkeypatch.setattr(measure, "_round", lambda way, calls: (0.5, 0.5) if way is measure._nothing else (2.0, 3.0))

    assert measure.measure({"tdfunc": lambda: None}, TINY)["tdfunc"][:2] == (1.5, 2.5)


def test_rounds_fit_the_time():
    """A slow case would run for minutes, or be judged by one round."""
    effort = Effort(rounds=40, longest_s=6.0)

    assert [effort.rounds_within(s) for s in (0.001, 0.5, 60.0)] == [40, 12, 3]


@pytest.mark.slow
def test_passes_are_apart():
    """All rounds of a case would fall into one bad moment of the machine."""
    order = []
    cases = [Case(name, {"tdfunc": lambda name=name: order.append(name)}) for name in "ab"]

    found = list(rows.measure_suite(a_suite(lambda: cases), TINY._replace(passes=3)))

    assert [x for i, x in enumerate(order) if i == 0 or order[i - 1] != x] == ["a", "b"] * 3
    assert [m.timings["tdfunc"].rounds for m in found] == [15, 15]


def test_cases_that_compile_are_measured_one_after_another():
    """A case would be made before the one before it was measured and dropped, or be shown only at the end."""
    events = []

    def cases():
        for name in "ab":
            events.append(f"make {name}")
            yield Case(name, {"tdfunc": lambda: None})

    for m in rows.measure_suite(a_suite(cases, compiles=True), TINY._replace(passes=3)):
        events.append(f"show {m.what}")
        assert m.timings["tdfunc"].rounds == 15

    assert events == ["make a", "show a", "make b", "show b"]


def test_slow_ways_are_left_out_of_larger_cases(monkeypatch):
    """One way that takes seconds would take all the time; its first calls, which compile, say nothing about that."""
    spent = {"tdfunc": 0, "other": 0, "compiled": 0}

    def way(name, seconds):
        def run(calls):
            spent[name] += calls
            taken = 9.0 if name == "compiled" and spent[name] <= 2 else seconds
            return taken * calls * 1e9, taken * calls * 1e9

        return measure.Remote(run)

    def cases():
        for i, seconds in enumerate((0.1, 0.6, 2.4, 9.6)):
            series = "large" if i < 3 else "another"
            ways = {"tdfunc": way("tdfunc", 2e-3), "other": way("other", seconds), "compiled": way("compiled", 2e-3)}
            yield Case(f"{i}", ways, series=series)

    found = list(rows.measure_suite(a_suite(cases, compiles=True), TINY))

    assert [m.timings["other"].rounds if "other" in m.timings else None for m in found] == [3, 1, None, 1]
    assert [m.over_us for m in found] == [{}, {}, {"other": pytest.approx(600_000)}, {}]
    assert found[0].timings["compiled"].first_s == pytest.approx(18)
    assert found[0].timings["compiled"].cpu_us == pytest.approx(2000, rel=0.01)
    text = page._cases(found[:3], "cpu", compiles=True)
    assert "| 0 | compiled | 2.00 ms | 2.00 ms | 1.00x | first calls 0.0 s, 18.0 s |" in text
    assert "| 2 | other | 2.00 ms | over 600 ms | over 300x |  |" in text


def test_a_series_ends_where_ours_is_slow():
    """Larger cases would show how slow others are, next to nothing of ours."""
    slow = measure.Remote(lambda calls: (calls * 1e9, calls * 1e9))
    cases = [Case(f"{i}", {"tdfunc": slow, "other": slow}, series="one") for i in range(2)]

    assert [m.what for m in rows.measure_suite(a_suite(lambda: cases, compiles=True), TINY)] == ["0"]


# -- verdicts ---------------------------------------------------------------------------------------------------


def test_each_case_has_to_reach():
    """The best case would stand for all of them."""
    cases = [measured("10 leaves", tdfunc=1.0, other=2.1), measured("100 leaves", tdfunc=1.0, other=9.0)]

    found = verdict(cases, 2.5, why="the floor is torch's own call")

    assert not found.reached
    assert found.sentence == "the target is 2.5x, and the value is 2.10x at 10 leaves; the floor is torch's own call"


def test_a_miss_names_what_the_bare_work_reaches():
    """A reader could not tell how far from the floor a row that falls short is."""
    cases = [measured("a", tdfunc=2.0, other=4.0, bare=1.0), measured("b", tdfunc=1.0, other=4.0, bare=1.0)]

    found = verdict(cases, 3, bound="bare", why="checks")

    assert (
        found.sentence
        == "the target is 3x, and the value is 2.00x at a; the bare work (bare) reaches 4.0x there; checks"
    )


def test_mean_pools_and_the_floor_still_holds():
    """A row could hide one case that is slower than the rival behind the mean of the others."""
    cases = [measured("index", tdfunc=1.0, other=8.0), measured("mask", tdfunc=2.0, other=1.0)]

    found = verdict(cases, 1.8, pooled="mean", floor=1.0)

    assert found.value == pytest.approx(2)
    assert not found.reached
    assert found.sentence == "these cases are slower than other: mask (0.50x)"


@pytest.mark.parametrize(("ours", "reached"), [(1.2, True), (1.4, False)])
def test_at_most(ours, reached):
    """A row that may take 1.3 times the rival's time would be judged the wrong way round."""
    found = verdict([measured("call", tdfunc=ours, other=1.0)], 1.3, "at most", why="never said when it is reached")

    assert (found.value, found.reached) == (pytest.approx(ours), reached)
    assert ("the target is 1.3x, and the value is 1.40x" in found.sentence) is not reached


def test_reached_says_so():
    """A row that reaches its target would make excuses."""
    assert verdict([measured("call", tdfunc=1.0, other=3.0)], 2.5, why="excuse").sentence == "reached"


def test_a_row_without_cases_is_refused():
    """A row whose cases were renamed would count as reached."""
    row = Row("apply", "other", 2, "faster", ("gone",))

    with pytest.raises(ValueError, match=r"apply: no case of \('gone',\) was measured against other"):
        judge(row, [measured("call", tdfunc=1.0, other=1.0)])


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.1234, "0.123 us"),
        (1.234, "1.23 us"),
        (12.34, "12.3 us"),
        (123.4, "123 us"),
        (1234, "1.23 ms"),
        (123456, "123 ms"),
    ],
)
def test_times_are_readable(us, text):
    """A reader would meet five digits, or the wrong unit."""
    assert rows.time_shown(us) == text


@pytest.mark.parametrize(("value", "text"), [(1.234, "1.23x"), (9.04, "9.0x"), (41.3, "41x")])
def test_ratios_are_readable(value, text):
    """A ratio would show digits that mean nothing."""
    assert rows.shown(value) == text


# -- the page ---------------------------------------------------------------------------------------------------


def a_page(us=1.0):
    """A page of one suite with one case that takes us microseconds against 2."""
    suite = Suite(
        "trees",
        "Tree operations",
        "Flat trees.",
        lambda: [],
        (Row("get", "other", 1.8, "faster", ("get",), why="It checks."),),
        (a_page,),
    )
    found = [measured("get", tdfunc=us, other=2.0)]
    return "".join(page.render(results.Results([(suite, found)])).values())


def test_page_shows_every_row_and_its_source():
    """A reader could not tell what a row measured."""
    text = a_page()

    assert "| get | other | 1.00 us | 2.00 us | 2.00x |  |" in text
    assert "Code: `a_page` in `benchmarks/test_benchmarks.py`." in text


def test_page_lists_what_is_slower_with_its_reason():
    """A slower comparison would have to be found in the tables."""
    text = a_page(us=4.0)

    assert "| Tree operations: get | other | 0.50x | It checks. |" in text


def test_page_lists_nothing_that_is_faster():
    """A reader would take it for slower."""
    assert "| Tree operations: get" not in a_page()


def test_page_names_versions_and_no_date():
    """Two runs on one machine would differ in nothing but their date, or hide what was installed."""
    text = a_page()

    assert f"torch {torch.__version__}" in text
    assert f"Python {sys.version.split()[0]}" in text
    assert not re.search(r"\b20\d\d-\d\d", text)


def test_every_bar_of_the_picture_is_a_row_of_the_kept_results():
    """The tables have the case and rival of each bar, so that a renamed row cannot leave the picture."""
    text = "".join(page.render(results.load(SUITES)).values())

    assert [bar for bar in chart.BARS if f"| {bar.case} | {bar.rival} |" not in text] == []


def test_picture_draws_rows_where_we_are_slower(tmp_path):
    """Bars are found by part, case and rival; equal numbers give an equal file, and a slower row another colour."""
    cases = [measured("add, 100 leaves", tdfunc=2.0, tensordict=1.0), measured("another", tdfunc=1.0, tensordict=1.0)]
    found = chart.speedups({"newer": (cases, "cpu")})
    for name in ("a.svg", "b.svg"):
        chart.draw(found, tmp_path / name)

    assert [(bar.case, value) for bar, value in found] == [("add, 100 leaves", 0.5)]
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "#e0591b" in (tmp_path / "a.svg").read_text()


def test_page_and_picture_are_written(tmp_path):
    """The picture is at the place that the page names."""
    newer = ("9.9", [measured("add, 100 leaves", tdfunc=1.0, tensordict=2.0)])
    page.write(results.Results(newer=newer), tmp_path / "b.md")

    assert f"]({page.PICTURE})" in (tmp_path / "b.md").read_text()
    assert (tmp_path / page.PICTURE).exists()


def test_every_part_can_be_shown():
    """The rows of a part would be kept, and nobody could read them."""
    kept = set(results.load(SUITES).machines)

    assert page.render(results.load(SUITES)).keys() >= kept | set(__main__.SUITES)


def test_the_page_names_parts_that_can_be_shown():
    """The page would name a part that the program does not know."""
    text = __main__.PAGE.read_text()
    named = re.findall(r"--show (\w+)", text) + re.findall(r"\(`(\w+)`\)", text)

    assert len(named) > len(SUITES)
    assert set(named) <= page.render(results.load(SUITES)).keys()


@pytest.mark.parametrize("names", [["get"], ["trees", "get"]])
def test_an_unknown_part_lists_the_known_ones(names):
    """A user would have to guess."""
    with pytest.raises(SystemExit, match="bench: there is no part get; parts: trees nn"):
        terminal.show(names, {"trees": "", "nn": ""}, "bench")


def test_parts_are_printed(monkeypatch, capsys):
    """The rows would only be in JSON."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--show", "training"])
    __main__.main()

    assert re.search(r"^MLP 16-64-64-1, 64 members +jax.jit +[\d.]+ ms ", capsys.readouterr().out, re.M)


def test_parts_are_listed(capsys):
    """The names would be found only in the code."""
    terminal.show([], {"trees": "", "nn": ""}, "bench")

    assert capsys.readouterr().out == "parts: trees nn\n"


def test_tables_are_padded_for_a_terminal():
    """Columns would be hard to follow; a link would be longer than its text."""
    text = "[A](b.md)\n\n| what | n |\n| --- | --: |\n| long \\| name | 1 |\n| x | 10 |\n"

    assert terminal.plain(text) == "A\n\nwhat          n\n-----------  --\nlong | name   1\nx            10"


def test_every_slower_comparison_has_a_cause():
    """The page would leave out a comparison in which tdfunc is slower."""
    found = page.slower_by_cause(results.load(SUITES))

    assert len(found) > 10
    assert found.get(None, []) == []


def test_the_page_counts_comparisons_by_cause():
    """The page would hide the rows where tdfunc is slower."""
    suite = Suite("lora", "Adapters", "", lambda: [], (), (a_page,))
    found = [Measured("64", {"tdfunc": Timing(4.0, 4.0, 5), "one adapter": Timing(2.0, 2.0, 5)})]
    text = page.render_summary(results.Results([(suite, found)]))

    assert re.search(r"^\| Adapters\. .* \| one adapter, as many tokens \| 1 \| 0\.50x \|$", text, re.M)


def test_the_summary_has_the_median_and_the_range():
    """The summary would hide the rows where tdfunc is slower."""
    suite = Suite("trees", "Tree operations", "", lambda: [], (), (a_page,))
    found = [measured("get", tdfunc=4.0, other=2.0), measured("set", tdfunc=1.0, other=2.0)]
    text = page.render_summary(results.Results([(suite, found)]))

    assert "| Tree operations (`trees`) | 1 of 2 | 1.25x | 0.50x to 2.00x |" in text


def test_measurements_are_read_as_they_were_stored(tmp_path):
    """A part measured again would change the others, or their numbers."""
    suite = trees.SUITE
    cases = [Measured("get", {"tdfunc": Timing(1.5, 2.0, 5, 0.25)}, 2, {"other": 600.0})]
    costs = {100: 1.0, 1000: 10.0}
    growth = scaling.Growth("stack", costs, measure.fit_line(list(costs), list(costs.values())))
    depth, cell = scaling.Depth("stack", 1.0, 2.0, 3.0), a_cell(1.0, loop=2.0, vmap=1.0)
    compiles, peak = compiled.Compiled("step", 1, 1, 0), memory.Peak("save", "tdfunc", 10, 5)
    for part, found in {
        "trees": cases, "newer": ("9.9", cases), "scaling": ([growth], [depth]), "ensembles": [cell],
        "compiled": [compiles], "memory": [peak],
    }.items():  # fmt: skip
        results.store(part, found, tmp_path)
    parts = ("compiled", "ensembles", "memory", "newer", "scaling", "trees")
    machines = dict.fromkeys(parts, results.describe_machine())

    assert results.load(SUITES, tmp_path) == results.Results(
        [(suite, cases)], ("9.9", cases), [growth], [depth], [cell], [compiles], [peak], machines
    )


def test_parts_measured_elsewhere_are_told_apart():
    """Numbers of two machines would be compared with each other."""
    here = results.describe_machine()
    machines = {"trees": here, "nn": here, "map": {**here, "processor": "another"}}

    assert f"| processor | another | {here['processor']} |" in page._machines(results.Results(machines=machines))
    assert "|  | measured: map | measured: the other parts |" in page._machines(results.Results(machines=machines))


def test_the_page_is_made_of_the_measurements_that_are_kept():
    """The page would have been edited by hand."""
    kept = set(results.load(SUITES).machines)

    assert kept <= {suite.name for suite in SUITES} | {*__main__.OTHERS, "against"}
    assert page.render_summary(results.load(SUITES)) == __main__.PAGE.read_text()


def test_tables_escape_bars():
    """A bar in a cell would add a column."""
    assert page.table(("a", "b"), [["x|y", "z"]]).splitlines()[-1] == "| x\\|y | z |"


def a_cell(auto, **ways):
    """A model of 4 members whose ways took these microseconds."""
    return ensembles.Cell("MLP", 4, "vmap", {k: Timing(v, v, 5) for k, v in {"auto": auto, **ways}.items()})


def test_auto_is_compared_with_the_best():
    """`auto` would be compared with the way that it chose."""
    good, bad = a_cell(1.05, loop=2.0, vmap=1.0, traced=3.0), a_cell(1.2, loop=1.0, vmap=1.2, traced=3.0)

    assert (good.best, good.reached) == ("vmap", True)
    assert (bad.best, bad.reached) == ("loop", False)
    assert "in 1 of 2 cases: MLP, 4 members: auto (vmap) takes 1.20 of loop." in "".join(page._ensembles([good, bad]))


def test_growth_page_names_what_is_not_linear():
    """Quadratic growth would be reported as linear."""
    costs = {100: 1.0, 1000: 100.0, 10_000: 10_000.0}
    grown = scaling.Growth("stack", costs, measure.fit_line(list(costs), list(costs.values())))

    assert "All but stack grow linearly" in "".join(page._growth([grown], []))


def test_peak_is_what_was_taken():
    """A way that copies everything would look like one that copies nothing."""
    size_bytes = 40_000_000
    (taken, mapped), (nothing, _) = [
        memory.peak_of(work, lambda: None) for work in (lambda: torch.ones(size_bytes // 4), lambda: None)
    ]

    assert size_bytes <= taken < 1.2 * size_bytes
    assert mapped < 0.2 * size_bytes
    assert nothing < 0.2 * size_bytes


def test_peak_tells_files_apart(tmp_path):
    """Pages that belong to a file would count as memory of the process."""
    torch.zeros(10_000_000).numpy().tofile(tmp_path / "f")

    def read():
        leaf = torch.from_file(str(tmp_path / "f"), size=10_000_000)
        return leaf, leaf.sum()

    size_bytes, mapped = memory.peak_of(read, lambda: None)

    assert mapped == pytest.approx(40_000_000, rel=0.2)
    assert size_bytes >= mapped


def test_a_way_that_fails_has_no_peak(capfd):
    """A way that raises at once would have the smallest peak."""
    with pytest.raises(RuntimeError, match="a way failed"):
        memory.peak_of(lambda: 1 / 0, lambda: None)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_memory_ways_run(tmp_path):
    """The page would lack a way, or one would measure an error."""
    leaves = {f"layers.{i}.weight": torch.randn(3) for i in range(3)}
    for name, ways in memory.WORK.items():
        (tmp_path / name).mkdir()
        for way in ways(leaves, tmp_path / name).values():
            way()
    peaks = [memory.Peak("save 5 tensors", "tdfunc", 1_500_000, 250_000)]
    text = page.render(results.Results(peaks=peaks))["memory"]

    assert "| save 5 tensors: tdfunc | 1.5 MB | 0.2 MB |" in text
    assert "`benchmarks/memory.py`" in text


def test_newer_tensordict_is_shown_alone():
    """Rows of other rivals would be there twice."""
    found = [measured("get, 10 leaves", **{"tdfunc": 1.0, "tensordict": 2.0, "raw dict": 3.0})]
    text = "\n".join(page._newer("9.9", found))

    assert "### Against tensordict 9.9" in text
    assert "raw dict" not in text
    assert "reach" not in text


# -- the contract -----------------------------------------------------------------------------------------------

# What the rows are expected to reach. The rows of trees hold for TensorClass as well.
CONTRACT = [
    ("construct", "tensordict", 4), ("get", "tensordict", 6), ("set", "tensordict", 15), ("apply", "tensordict", 3),
    ("stack", "tensordict", 3.5), ("index (int, slice, tensor, mask), cat, reshape, add, tree_map", "tensordict", 1.8),
    ("all rows that call torch", "raw dict", 1.3), ("construct", "checked dict", 1.2),
    *[(f"{family} operations", "tensordict", 1.8) for family in families.FAMILIES],
    ("construct a TensorClass", "checked dataclass", 1.5), ("construct a TensorClass", "tensordict", 4),
    ("read a field", "tensordict", 6), ("read a field", "bare property", 1.4),
    ("read a field, tensor_only", "without tensor_only", 1),
    ("replace, index, stack of a TensorClass", "tensordict", 1.8),
    ("apply, swap alone, the same tree again", "functional_call", 25),
    ("apply, swap alone, the same tree again", "tensordict", 40),
    ("apply, swap alone, a new tree each call", "functional_call", 15),
    ("apply, swap alone, a new tree each call", "tensordict", 20),
    ("apply, whole call, eval", "module(x)", 1.1), ("apply, whole call, train mode with buffers", "module(x)", 1.15),
    ("torch.stack of 4 extracted trees", "stack_module_state", 2.5),
    ("torch.stack of 4 extracted trees", "TensorDict.from_modules", 7),
    ("stack_modules of 4 modules", "stack_module_state", 1.3),
    ("stack_modules of 4 modules", "TensorDict.from_modules", 4), ("init_ensemble, a member", "make()", 2),
    ("call a module on a tree", "tensordict", 1.6), ("call TensorDictModule(nn.Linear)", "tensordict", 1.6),
    ("log-probs of tokens", "model and log_softmax", 1), ("packed rows", "padded", 1.5),
    ("responses with log-probs", "model.generate and log_softmax", 1.05),
    ("text and history modes", "tokenizer, model.generate, batch_decode", 1.3),
    ("conversations as text", "tokenizer", 1.2), ("conversations as ids", "tokenizer", 1.2),
    ("conversations as ids with masks", "tokenizer", 2),
    ("dropout by keys under vmap", "torch.vmap(randomness='different')", 1.5),
    ("dropout by keys under vmap, compiled", "torch.vmap(randomness='different')", 3),
    ("Adam step of 16 to 64 small members", "loop of fused torch.optim", 10),
    ("Adam step of 16 to 64 small members", "torch.func, one fused torch.optim", 1.8),
    ("Adam step of 64 small members", "loop of fused torch.optim", 16),
    ("Adam step of 64 small members", "torch.compile", 1.2),
    ("Adam step of 64 small members", "equinox", 1.7), ("Adam step of 64 small members", "jax.jit", 1.3),
    *((f"training step, {model}", rival, 1)
      for rival in (
          "loop of fused torch.optim", "torch.func, one fused torch.optim", "torch.compile", "jax.jit", "equinox"
      )
      for model in ("MLP 16-64-64-1", "CNN with BatchNorm", "transformer")
      if (model, rival) != ("CNN with BatchNorm", "torch.compile")),
    ("step, MLP with dropout", "the same step without", 1.4), ("step, MLP with dropout", "the same step without", 1.25),
    ("step, MLP with a learning rate for each member", "the same step without", 1.2),
    ("jit(vmap(grad(loss))), 4 to 16 members", "not traced", 2.5),
    *((f"training step of any width, {model}", rival, 0.95)
      for rival in ("loop of fused torch.optim", "torch.func, one fused torch.optim")
      for model in ("MLP", "CNN", "transformer")),
    ("the step of the guide", "loop of fused torch.optim", 0.95),
    ("Adam step of LSTMs", "loop of fused torch.optim", 0.97),
    ("Adam step of 16 or more small LSTMs", "loop of fused torch.optim", 1.6),
    ("Adam step of GRUs", "loop of fused torch.optim", 2),
    ("Adam step of LSTMs", "equinox", 1), ("Adam step of GRUs", "equinox", 1),
    ("forward pass of GRUs", "loop of modules", 1.5),
    ("64 adapters in one step, equal total tokens, d = 256", "one adapter", 1.2),
    ("a step of any rule with a state, 16 members", "loop of torch.optim", 3),
    ("save 262 MB, checksums included, no fsync", "os.write", 1.25),
    ("save 262 MB, checksums included, fsync", "os.write", 1.05),
    ("save 3000 small tensors", "save_file", 3), ("save 3000 small tensors", "torch.save", 4),
    ("save 3000 small tensors", "tensordict", 20), ("load 3000 tensors", "load_file", 6),
    ("load 200 tensors", "load_file", 4), ("load 3000 tensors, verified", "load_file", 3),
    ("load 200 tensors, verified", "reading the bytes", 1.3),
    ("open and read 1 % of 3000 tensors, verified, cold", "safe_open", 2),
    ("open and read 1 % of 200 tensors, verified, cold", "safe_open", 1.2),
    ("async save of 262 MB, time the caller is blocked", "copying the tree first", 0.1),
    ("gather 256 random rows of a 1 GB memmap, warm", "rows in memory", 1.1),
    ("gather 256 random rows of a 1 GB memmap, cold", "tensordict", 30),
    ("map with 2 workers", "one chunk after another", 0.66),
    ("message of 1,000 leaves, from 4 MB on", "one tensor", 2),
    ("message of 1,000 leaves, below 4 MB", "one tensor, and 3 us for each leaf", 1),
    ("message of 1,000 leaves", "leaf by leaf", 5),
]  # fmt: skip


def test_every_row_of_the_contract_is_there():
    """A row that is hard to reach could be left out, or its target lowered."""
    assert [(row.title, row.rival, row.reach) for suite in SUITES for row in suite.rows] == CONTRACT
    middle = next(row for row in trees.SUITE.rows if row.floor is not None)
    assert (middle.pooled, middle.floor, len(middle.cases)) == ("mean", 1.0, 16)


def test_rows_cover_their_sizes():
    """A row could be measured at the one size where it is fast."""
    for row in trees.SUITE.rows:
        assert {case.rpartition(", ")[2] for case in row.cases} == {"10 leaves", "100 leaves"}


def test_resnet_has_122_leaves():
    """The row would be about another model than the contract's."""
    model = modules.ResNet()

    assert (len(list(model.parameters())), len(list(model.buffers()))) == (62, 60)
    assert modules.leaves_of(nn.ModuleList(nn.Linear(4, 4) for _ in range(61))) == 122


def test_families_are_the_same_work():
    """Ours would be faster at something else than tensordict's or the tensors' own operation."""
    for what, ways in families.family_ways(4).items():
        results = [way() for way in ways.values()]
        if what.partition(": ")[2] in families.FAMILIES["pieces"] and isinstance(results[0], tuple):
            results = [_first_pieces(result) for result in results]
        if not hasattr(results[0], "items") or what == "structure: keys":
            continue
        for result in results[1:]:
            assert set(result.keys()) == set(results[0].keys()), what
            assert all(torch.equal(result[key], leaf) for key, leaf in results[0].items()), what


def _first_pieces(pieces):
    return {key: parts[0] for key, parts in pieces.items()} if isinstance(pieces, dict) else dict(pieces[0].items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_way_runs_and_rows_find_their_cases(suite, monkeypatch):
    """A benchmark would fail, or a row judge nothing, only at the next long run."""
    monkeypatch.setattr(storage, "large_leaves", lambda: {f"a{i}": torch.randn(64, 300) for i in range(200)})
    monkeypatch.setattr(storage, "small_leaves", lambda: {f"a{i}": torch.randn(3, 3) for i in range(300)})
    monkeypatch.setattr(gather, "ROWS", 3000)
    monkeypatch.setattr(mapping, "map_ways", lambda rows: stand_ins(mapping.SUITE))
    monkeypatch.setattr(messages, "message_ways", lambda values: stand_ins(messages.SUITE))
    # Compiling takes half a minute each time; a case of many members takes seconds.
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    ways = {}
    for case in suite.cases():
        assert isinstance(case, Case)
        ways[case.what] = set(case.ways)
        if not case.series or case.what.endswith(", 1 member"):
            for way in case.ways.values():
                measure._round(way, 1)
    # An environment with JAX is not everywhere.
    missing = () if training.JAX_PYTHON.exists() else (training.JAX, training.EQUINOX)
    for row in suite.rows:
        assert all({"tdfunc", row.rival} <= {*ways[case], *missing} for case in row.cases)


def test_files_are_what_the_rows_say():
    """The rows would be about smaller files than the contract's."""
    for make, count, size_mb in ((storage.large_leaves, 200, 262), (storage.small_leaves, 3000, 20)):
        leaves = make().values()
        assert len(leaves) == count
        assert sum(leaf.nbytes for leaf in leaves) / 1e6 == pytest.approx(size_mb, rel=0.01)


@pytest.mark.parametrize("fsync", [False, True])
def test_saving_and_loading_ways_do_the_same(tmp_path, fsync):
    """Ours would be faster at storing something else."""
    leaves = {f"a{i}.b": torch.randn(3, 5) for i in range(7)}
    for way in storage.save_ways(leaves, tmp_path, fsync).values():
        way()
    loaded = [safetensors.torch.load_file(tmp_path / name) for name in ("ours.safetensors", "theirs.safetensors")]
    loaded += [torch.load(tmp_path / "zipped.pt"), *(way() for n, way in load_ways_of(leaves, tmp_path))]
    wanted = storage.partial_ways(leaves, tmp_path)
    ours, theirs = (way.call(way.make()) for way in wanted.values())

    assert (tmp_path / "bytes").read_bytes() == b"".join(leaf.numpy().tobytes() for leaf in leaves.values())
    for found in loaded:
        assert all(torch.equal(plain(found)[key], leaf) for key, leaf in leaves.items())
    assert [leaf.sum() for leaf in ours] == theirs


def test_gathering_ways_do_the_same(tmp_path):
    """Ours would be faster at reading other rows."""
    for ways in gather.gather_ways(tmp_path, 3000).values():
        found = []
        for way in ways.values():
            torch.manual_seed(0)
            found.append(way.call(way.make())["image"])
        assert all(torch.equal(rows, found[0]) for rows in found[1:])


def stand_ins(suite):
    """Ways of the same names that do nothing, where starting the real ones takes long."""
    return {way: lambda: None for row in suite.rows for way in ("tdfunc", row.rival)}


@pytest.mark.slow  # Workers of several kinds are started.
def test_mapping_ways_do_the_same():
    """Ours would be faster at another function."""
    found = [plain(way()) for way in mapping.map_ways(1200).values()]
    for result in found[1:]:
        assert all(torch.equal(result[key], leaf) for key, leaf in found[0].items())


@pytest.mark.slow  # Two processes are started.
def test_message_ways_run_in_two_processes():
    """A way that fails would leave the benchmark waiting; each is timed by the first process."""
    for way in messages.message_ways(10).values():
        cpu, wall = way.run(1)
        assert cpu > 0
        assert 0 < wall < 60e9


def load_ways_of(leaves, folder):
    """The ways that return tensors; a tree of ours by its dotted names."""
    ways = storage.load_ways(leaves, folder)
    return [("ours", lambda: ways["tdfunc"]().flatten_keys(".")), ("theirs", ways[storage.LOAD])]


def plain(x):
    """A tree or dict as a dict of tensors."""
    return dict(x.items())


@pytest.mark.parametrize(
    "what",
    [
        "construct",
        "apply",
        "stack",
        "index int",
        "index slice",
        "index tensor",
        "index mask",
        "cat",
        "reshape",
        "add",
        "tree_map",
    ],
)
def test_ways_do_the_same(what):
    """Ours would be faster at something else."""
    ways = trees.tree_ways(3)[what]
    results = [plain(way()) for way in ways.values()]

    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(result[key], leaf) for key, leaf in results[0].items())
