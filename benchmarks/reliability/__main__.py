"""Counts what kills, full disks and damage do to saved trees: `python -m benchmarks.reliability [PART ...]`.

The parts are `kills`, `ranks`, `faults`, `calls`, `damage`, `hostile`, `pushes` and `fuzz` (`fuzz:TARGET` is one target
of it); without a name all of them run, which takes more than an hour on two cores, and some need root. What was counted
is kept in `results/`, with the commit of the code that ran. `python -m benchmarks.trust --show kills` prints a table.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reliability.kills import KINDS

_ROOT = Path(__file__).parents[2]
_RESULTS = Path(__file__).parent / "results"
_TEXT = Path(__file__).parent / "tables.md"
_TARGETS = {
    "file": "a safetensors file: `load` and `open`, whole, by leaf and by slice",
    "tree": "the description of a tree with its non-tensor data, in a file that is otherwise good",
    "values": "non-tensor data, kinds, ties, names and classes, in a file and a memmap folder, otherwise good",
    "index": "the index of shards",
    "memmap": "each `meta.json` of a memmap folder",
}
_KILLS, _RANK_KILLS, _FUZZ_S = 300, 1000, 420
_RUNS = "runs"


# -- counting ---------------------------------------------------------------------------------------------------


def _run(module: str, *args: Any) -> Any:
    command = [sys.executable, "-m", f"benchmarks.reliability.{module}", *map(str, args)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def _by_kind(module: str, *args: Any) -> dict[str, Any]:
    results = {}
    # A background save makes its calls in another thread, after the disturbance.
    for kind in [kind for kind in KINDS if module != "calls" or not kind.endswith("async_save")]:
        with tempfile.TemporaryDirectory() as folder:
            # Another user tries to write to it.
            Path(folder).chmod(0o755)
            results[kind] = _run(module, kind, *args, Path(folder) / "x")
    return results


def _fuzz(target: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        limit = f"-max_total_time={_FUZZ_S}"
        command = [sys.executable, "-m", "benchmarks.reliability.fuzz", target, f"{folder}/corpus", limit]
        log = subprocess.run(command, stderr=subprocess.PIPE, check=False).stderr.decode(errors="replace")
    counts = fuzz_counts(log)
    if counts["findings"] or not counts["inputs"]:
        print(log[-4000:], file=sys.stderr)
    return counts


def fuzz_counts(log: str) -> dict[str, int]:
    """The counts that libFuzzer prints at its end."""
    done = re.search(r"Done (\d+) runs in (\d+) second", log)
    inputs, seconds = (int(done[1]), int(done[2])) if done is not None else (0, 0)
    return {"inputs": inputs, "seconds": seconds, "findings": log.count("Uncaught Python exception")}


PARTS = {
    "kills": lambda: _by_kind("kills", _KILLS),
    "ranks": lambda: _run("ranks", _RANK_KILLS),
    "faults": lambda: _by_kind("faults"),
    "calls": lambda: _by_kind("calls"),
    "damage": lambda: _run("damage"),
    "hostile": lambda: _run("hostile"),
    "pushes": lambda: _run("pushes"),
    **{f"fuzz:{target}": lambda target=target: _fuzz(target) for target in _TARGETS},
}


def commit_of_code() -> str:
    """The last commit that changed the code that runs, and its date."""
    code = "tdfunc"
    said = [
        subprocess.run(["git", "-C", _ROOT, *args, "--", code], stdout=subprocess.PIPE, check=True, text=True).stdout
        for args in (["log", "-1", "--format=%h of %cs"], ["status", "--porcelain"])
    ]
    return said[0].strip() + (", changed since" if said[1] else "")


def _count(part: str) -> None:
    """Count one part, and keep the result with the commit of the code."""
    commit, (name, _, target) = commit_of_code(), part.partition(":")
    found = PARTS[part]()
    keep(name, {**counted(name), target: found} if target else found)
    keep(_RUNS, {**counted(_RUNS), part: commit})


def keep(name: str, found: Any) -> None:
    (_RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


# -- tables -----------------------------------------------------------------------------------------------------


def parts() -> dict[str, str]:
    """Return the text of each part, with a table in each place that names one."""
    tables = {
        "kills": _kills, "ranks": _ranks, "full": _full, "disturbed": _disturbed, "shared": _shared, "damage": _damage,
        "hostile": _hostile, "fuzz": _fuzzed, "memory": _memory, "runs": _runs, "pushes": _pushes,
        "mutants": _mutants, "sample": _sample, "noticed": _noticed,
    }  # fmt: skip
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: tables[found[1]](), _TEXT.read_text())
    found = re.findall(r"<!-- (\w+) -->\n\n(.*?)(?=\n<!--|\Z)", text, re.DOTALL)
    return {name: section.rstrip() for name, section in found}


def counted(part: str) -> Any:
    """Return what was counted for a part."""
    path = _RESULTS / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _runs() -> str:
    """Which code the numbers are of."""
    by_commit: dict[str, list[str]] = {}
    for part, commit in counted(_RUNS).items():
        by_commit.setdefault(commit, []).append(part)
    if len(by_commit) == 1:
        return f"All numbers are of commit {next(iter(by_commit))}."
    return (
        "The numbers are of these commits: "
        + "; ".join(f"{', '.join(parts)} of {commit}" for commit, parts in by_commit.items())
        + "."
    )


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _kills() -> str:
    head = [
        "writer",
        "kills",
        "in the middle of a save",
        "old tree",
        "new tree",
        "lost or mixed",
        "cleaned by the next save",
    ]
    rows = [
        [kind, n["kills"], n["during a save"], n["old"], n["new"], n["lost"], f"{n['kills'] - n['not cleaned']}"]
        for kind, n in counted("kills").items()
    ]
    return _table(head, rows)


def _ranks() -> str:
    head = [
        "writer", "kills", "old tree", "new tree", "lost or mixed", "files of others lost", "cleaned by the next save",
        "other ranks", "raised `PeerError`",
    ]  # fmt: skip
    keys = ("kills", "old", "new", "lost", "foreign files lost")
    rows = [
        [kind, *(n[key] for key in keys), n["kills"] - n["not cleaned"], n["survivors"], n["raised"]]
        for kind, n in counted("ranks").items()
    ]
    return _table(head, rows)


def _full() -> str:
    head = ["writer", "saves", "`OSError`", "fitted", "killed by a signal", "old tree lost", "files left behind"]
    rows = []
    for kind, n in counted("faults").items():
        for name, what in (("limit", "file size limit"), ("full", "disk full")):
            keys = ("saves", "OSError", "saved", "killed by a signal", "old tree lost", "left behind")
            rows.append([f"{kind}: {what}", *(n[name][key] for key in keys)])
    return _table(head, rows)


def _disturbed() -> str:
    keys = ("calls", "saves", "killed", "failed", "saved", "lost", "not cleaned")
    head = ["writer", "calls of four saves", "saves", "killed", "raised", "returned", "a file lost", "left behind"]
    return _table(head, [[kind, *(n[key] for key in keys)] for kind, n in counted("calls").items()])


def _shared() -> str:
    head = ["place", "reads while two processes wrote", "trees seen", "not whole", "writers that failed", "left behind"]
    keys = ("reads", "trees seen", "not whole", "writers that failed", "left behind")
    return _table(head, [[kind, *(n["shared"][key] for key in keys)] for kind, n in counted("faults").items()])


def _damage() -> str:
    outcomes = ("refused", "equal", "wrong", "wrote", "crashed", "another error")
    rows = [
        [f"{what}: {name}", sum(counts.values()), *(counts.get(outcome, 0) for outcome in outcomes)]
        for what, libraries in counted("damage").items()
        for name, counts in libraries.items()
    ]
    head = ["input", "number", "refused", "saved values", "other values", "files changed", "crashed", "another error"]
    return _table(head, rows)


def _hostile() -> str:
    results = {name: counts for name, counts in counted("hostile").items() if name != "memory"}
    keys = list(dict.fromkeys(key for counts in results.values() for key in counts))
    return _table(
        ["reader", *keys], [[name, *(counts.get(key, 0) for key in keys)] for name, counts in results.items()]
    )


def _memory() -> str:
    extra, size, name = counted("hostile")["memory"]
    return f"{extra / 1e6:.0f} MB, for the file of {size / 1e6:.1f} MB called “{name.split(': ')[-1]}”"


def _fuzzed() -> str:
    found = counted("fuzz")
    rows = [
        [what, *(found[target][key] for key in ("seconds", "inputs", "findings"))] for target, what in _TARGETS.items()
    ]
    return _table(["what was changed", "seconds", "inputs", "findings"], rows)


def _pushes() -> str:
    rows = [
        [f"{kind}: {name}", of["trials"], f"{of['median']:g}", of["most"], of["never caught"]]
        for kind, proofs in counted("pushes").items()
        for name, of in (("one prompt", proofs["prompt"]), ("full", proofs["full"]))
    ]
    return _table(["fault: proof", "trials", "pushes until caught: median", "most", "never caught"], rows)


def _sample() -> str:
    found = counted("mutants")
    return f"seed {found['seed']}, commit {found['commit']}{', fast tests only' if found['alone'] else ''}"


def _noticed() -> str:
    """The share of the changes that make a difference which were noticed when they were made."""
    rows = [row for row in counted("mutants")["changes"] if row["verdict"] != "equivalent"]
    count = sum(row["noticed"] is not None for row in rows)
    return f"Of the {len(rows)} changes that make a difference, {count} were noticed ({count / len(rows):.1%})."


def _mutants() -> str:
    """A row for each folder: how many changes were noticed, and what came of the others."""
    folders: dict[str, list[str]] = {}
    for row in counted("mutants")["changes"]:
        folder = row["file"].removeprefix("tdfunc/").rpartition("/")[0].partition("/")[0] or "top"
        outcome = "noticed" if row["noticed"] is not None else row["verdict"] or "undecided"
        folders.setdefault(folder, []).append(outcome)
    head = ["folder", "changes", "noticed", "no difference", "noticed by a test written since", "open", "undecided"]
    all_of = {**dict(sorted(folders.items())), "all": [outcome for some in folders.values() for outcome in some]}
    keys = ("noticed", "equivalent", "test", "open", "undecided")
    return _table(head, [[name, len(some), *map(some.count, keys)] for name, some in all_of.items()])


def main() -> None:
    """Count the parts that are named."""
    _RESULTS.mkdir(exist_ok=True)
    named = sys.argv[1:]
    for part in PARTS:
        # A name stands for all parts that it begins; none, for all.
        if any(part == name or part.startswith(f"{name}:") for name in named) or not named:
            _count(part)


if __name__ == "__main__":
    main()
