"""Writes docs/reliability.md from what was counted: `python -m benchmarks.trust [collect]`.

Without a word, the counts of the tree are taken again, which takes seconds; `collect` also asks pytest for the numbers
of cases, which takes minutes. `--show` prints the tables behind the page from kept results: the laws, and the counts of
kills, damage, fuzzing, small changes to the code and random numbers.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.field.__main__ import addresses
from benchmarks.models import results as models
from benchmarks.pages import transform_table
from benchmarks.randomness import __main__ as randomness
from benchmarks.reliability import __main__ as reliability
from benchmarks.terminal import show
from benchmarks.trust.counts import COLLECTED, ORACLES, ROOT, claim, collected, of_the_tree

PAGE = ROOT / "docs" / "reliability.md"
LAWS = Path(__file__).with_name("laws.md")
COUNTS = Path(__file__).with_name("counts.json")
# Tests of the interface that were written before the code, kept beside the repository.
_ACCEPTANCE = ROOT.parent / "shared" / "acceptance"
_PLACE = re.compile(r"(<!-- counts -->\n\n).*?(\n*<!-- end of counts -->)", re.DOTALL)


def kept() -> dict[str, int]:
    """Return the counts of the tree and of pytest that were stored."""
    return json.loads(COUNTS.read_text())


def acceptance() -> dict[str, int]:
    """Return the number of acceptance tests, where they are."""
    names = (ROOT / ".ci/acceptance.txt").read_text().split()
    if not _ACCEPTANCE.is_dir():
        return {}
    texts = [(_ACCEPTANCE / name).read_text() for name in names]
    return {"acceptance tests": sum(len(re.findall(r"^ *def test_", text, re.MULTILINE)) for text in texts)}


# -- what was found -----------------------------------------------------------------------------------------------


def _total(part: str, *keys: str) -> int:
    """Return the sum of a count over the kinds of a part of the reliability runs."""
    total = 0
    for one in reliability.counted(part).values():
        for key in keys:
            one = one[key]
        total += one
    return total


def _damaged() -> tuple[int, int]:
    """Return the damaged inputs with checksums that tdfunc read, and how many gave other values or another error."""
    found = [
        counts
        for what, libraries in reliability.counted("damage").items()
        for name, counts in libraries.items()
        if what.startswith(("file", "shards")) and name.startswith("tdfunc")
    ]
    harm = sum(number for counts in found for outcome, number in counts.items() if outcome not in ("refused", "equal"))
    return sum(sum(counts.values()) for counts in found), harm


def _hostile() -> tuple[int, int]:
    """Return the hostile inputs of all readers of tdfunc, and how many did harm."""
    found = [
        counts for name, counts in reliability.counted("hostile").items() if "tdfunc" in name or "TensorDict" in name
    ]
    harm = ("another error", "hung", "crashed", "ran code", "left the folder", "wrote")
    return sum(one["inputs"] for one in found), sum(one[key] for one in found for key in harm)


def _mutants() -> str:
    rows = [row for row in reliability.counted("mutants")["changes"] if row["verdict"] != "equivalent"]
    noticed = sum(row["noticed"] is not None for row in rows)
    later = sum(row["verdict"] == "test" for row in rows)
    return (
        f"{noticed} of the {len(rows)} that make a difference were noticed ({noticed / len(rows):.1%}), {later} by new "
        f"tests; {len(rows) - noticed - later} open"
    )


def _cells() -> tuple[int, int]:
    return len(transform_table.ROWS) * len(transform_table.COLUMNS), len(transform_table.RAISES)


def rows() -> list[tuple[str, str, str]]:
    """Return the lines of the page: what was done, how often, and the result."""
    counts = kept()
    cells, raising = _cells()
    damaged, harmful = _damaged()
    inputs, harm = _hostile()
    entries = [entry for table in models.load().values() for entry in table.values()]
    right = sum(all(models.claims(entry.found).values()) for entry in entries)
    words = randomness.summary()
    fuzzed, findings = _total("fuzz", "inputs"), _total("fuzz", "findings")
    reads, broken = _total("faults", "shared", "reads"), _total("faults", "shared", "not whole")
    full = _total("faults", "limit", "saves") + _total("faults", "full", "saves")
    lost = _total("faults", "limit", "old tree lost") + _total("faults", "full", "old tree lost")
    pushes = _total("pushes", "prompt", "trials") + _total("pushes", "full", "trials")
    missed = _total("pushes", "prompt", "never caught") + _total("pushes", "full", "never caught")

    calls, files = _total("calls", "saves"), _total("calls", "lost")

    def more_than(name: str) -> str:
        return f"more than {claim(counts[name]):,}"

    return [
        ("fast tests, with all examples of docstrings", more_than("fast tests"), "run at each change"),
        ("slow tests", more_than("slow tests"), "run in CI"),
        ("tests against other programs", more_than("tests against other programs"), f"{len(ORACLES)} programs"),
        ("property tests with random inputs", more_than("property tests"), "run at each change"),
        ("laws: a property over a class of inputs", str(counts["laws"]), "`--show laws`"),
        ("acceptance tests, written before the code", str(counts["acceptance tests"]), "all pass"),
        ("operations under transformations", f"{cells:,}", f"{raising} raise [documented errors](transforms_table.md)"),
        ("models beside a loop over modules", str(len(entries)), f"{right} pass [all checks](models.md)"),
        ("bug reports of other projects", str(addresses()), "each has a test; `python -m benchmarks.field`"),
        ("files that other programs wrote", more_than("files of other programs"), "read, or refused by name"),
        ("saves killed by SIGKILL", f"{_total('kills', 'kills'):,}", f"{_total('kills', 'lost')} trees lost or mixed"),
        ("ranks killed during a save", f"{_total('ranks', 'kills'):,}", f"{_total('ranks', 'lost')} lost or mixed"),
        ("saves with a disturbed system call", f"{calls:,}", f"{files} files lost"),
        ("saves to a full disk", str(full), f"{lost} old trees lost"),
        ("reads while two processes write", f"{reads:,}", f"{broken} incomplete trees"),
        ("damaged files: each bit, each length", f"{damaged:,}", f"{harmful} wrong values"),
        ("hostile files and folders", str(inputs), f"{harm} ran code, hung, crashed or wrote"),
        ("fuzzed inputs", f"{fuzzed:,}", f"{findings} findings in the counted run"),
        ("faulty pushes of weights to an engine", str(pushes), f"{missed} never noticed"),
        ("small changes to the code", str(len(reliability.counted("mutants")["changes"])), _mutants()),
        ("p-values of dieharder", str(words["p-values"]), f"{words['FAILED']} failed, {words['WEAK']} weak"),
    ]  # fmt: skip


def table() -> str:
    """Return the table of the page."""
    lines = ["| what was run | number | result |", "| --- | --: | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def page() -> str:
    """Return docs/reliability.md with the table of the kept counts."""
    return _PLACE.sub(lambda place: f"{place[1]}{table()}\n\n<!-- end of counts -->", PAGE.read_text())


def parts() -> dict[str, str]:
    """Return the tables behind the page by their names."""
    return {"laws": LAWS.read_text(), "random": randomness.tables(), **reliability.parts()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__)
    parser.add_argument("collect", nargs="?", choices=["collect"], help="ask pytest for the numbers of cases as well")
    parser.add_argument("--show", nargs="*", metavar="PART", help="print these tables, or list them")
    options = parser.parse_args(arguments)
    if options.show is not None:
        show(options.show, parts(), parser.prog)
        return
    found: dict[str, Any] = {**kept(), **of_the_tree(), **acceptance()}
    if options.collect:
        found |= {name: collected(name) for name in COLLECTED}
    COUNTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
