"""Counts how many small changes the tests notice: `python -m benchmarks.mutants --seed 1 --files 20`.

Each change is made alone in a copy of the repository. The fast tests that run the changed lines run with it, in a
process that has imported all (`swap.py`). For code that runs at import or in another process, the test file of the
changed file runs, then the tests of its folder, then the tests of the files that import it. Changes that survive are
made all at once for the other tests of CI, the fast ones first, and each change runs the tests that failed. The results
go to `mutants.json` in benchmarks/reliability/results after each step; `python -m benchmarks.trust --show mutants`
prints them by folder.

A survivor gets a verdict by hand, in place of null: "equivalent" if it changes no result, "test" if a test that was
written since notices it, and "open" if no test notices it yet.
"""

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.mutants.changes import Change, apply, changes
from benchmarks.reliability.__main__ import commit_of_code, keep

_ROOT = Path(__file__).parents[2]
# Exit statuses of pytest for tests that pass, and for no test.
_PASSED = (0, 5)
# Of more tests that fail at once, the changes are made in two halves.
_MANY = 100
# The other tests of CI.
_STAGES = {
    "elsewhere": ("tests",),
    "slow": ("tests", "-m", "slow"),
    "conformance": ("benchmarks", "--ignore=benchmarks/pages", "-m", ""),
}


def targets(path: str) -> list[list[str]]:
    """The tests to run for a file of tdfunc, in turn: its own, those of its folder, those of files that import it."""
    own = _own_tests(path)
    parts = Path("tests", *[part.removeprefix("_") for part in Path(path).parts[1:-1]])
    folder = next(one for one in (parts, *parts.parents) if (_ROOT / one).is_dir())
    beside = [str(folder)] if folder != Path("tests") else ["tests/test_laws.py"]
    name = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    listed = subprocess.run(
        ["git", "-C", _ROOT, "grep", "-lw", f"from {name} import"], stdout=subprocess.PIPE, check=False, text=True
    )
    found = listed.stdout.splitlines()
    users = [one for one in found if one.startswith("tests/") and "/test_" in one]
    users += [test for one in found if one.startswith("tdfunc/") for test in _own_tests(one)]
    return [some for some in (own and [*own, path], [*beside, path], sorted({*users} - {*own})) if some]


def _own_tests(path: str) -> list[str]:
    """The mirrored test file of a file of tdfunc, if there is one."""
    parts = [part.removeprefix("_") for part in Path(path).with_suffix("").parts[1:]]
    own = Path("tests", *parts[:-1], f"test_{parts[-1]}.py")
    return [str(own)] if (_ROOT / own).exists() else []


def sample(seed: int, files: int, each: int) -> list[tuple[str, Change]]:
    """Changes of random files, drawn evenly from each kind."""
    draw = random.Random(seed)
    listed = subprocess.run(
        ["git", "-C", _ROOT, "ls-files", "tdfunc/**.py", "tdfunc/*.py"], stdout=subprocess.PIPE, check=True, text=True
    )
    sources = {path: changes((_ROOT / path).read_text()) for path in sorted(set(listed.stdout.split()))}
    # The demonstration's numbers are free.
    chosen = draw.sample([path for path, found in sources.items() if len(found) >= each and "demo" not in path], files)
    drawn: list[tuple[str, Change]] = []
    for path in chosen:
        kinds: dict[str, list[Change]] = {}
        for one in sources[path]:
            kinds.setdefault(one.kind, []).append(one)
        free = list(kinds)
        for _ in range(each):
            kind = draw.choice(free)
            one = kinds[kind].pop(draw.randrange(len(kinds[kind])))
            free = [name for name in free if kinds[name]]
            drawn.append((path, one))
    return drawn


class Copy:
    """A copy of the repository in which changes are made and taken back."""

    def __init__(self, folder: str, limit_s: float) -> None:
        self.root, self.limit_s, self._texts = Path(folder), limit_s, dict[str, str]()
        listed = subprocess.run(["git", "-C", _ROOT, "ls-files"], stdout=subprocess.PIPE, check=True, text=True)
        for name in listed.stdout.splitlines():
            if (_ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(_ROOT / name, self.root / name)
        env = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        # Any: its streams are there.
        self._server: Any = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mutants.server"], cwd=self.root, env=env, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def write(self, path: str, made: list[Change]) -> None:
        """Put a file there with changes (or as it is)."""
        text = self._texts.setdefault(path, (self.root / path).read_text())
        (self.root / path).write_text(apply(text, made))

    def run(self, tests: list[str], *options: str) -> tuple[str, list[str]]:
        """Run tests; return "passed", "failed" or "timeout", and the tests that failed."""
        arguments = ["-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *options, *tests]
        print(json.dumps(arguments), file=self._server.stdin)
        group = json.loads(self._server.stdout.readline())
        timer = threading.Timer(self.limit_s, os.killpg, (group, signal.SIGKILL))
        timer.start()
        status, failed = json.loads(self._server.stdout.readline())
        is_late = not timer.is_alive()
        timer.cancel()
        if is_late:
            return "timeout", []
        return "passed" if status in _PASSED else "failed", failed


def swap(root: Path, drawn: list[tuple[str, Change]], jobs: int) -> list[str]:
    """For each change "noticed", "passed" or "not run", by the fast tests that run its lines."""
    with tempfile.TemporaryDirectory() as folder:
        listed, out = Path(folder, "changes.json"), Path(folder, "out.jsonl")
        listed.write_text(json.dumps([[path, *change] for path, change in drawn]))
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "benchmarks.mutants.swap", listed, out, "--jobs", str(jobs)]
        subprocess.run(command, cwd=root, env=env, check=True)
        outcomes = dict(map(json.loads, out.read_text().splitlines()))
        return [outcomes[place] for place in range(len(drawn))]


def notice(copy: Copy, path: str, one: Change) -> str | None:
    """The tests that notice a change: "own", "folder", "users", or None."""
    copy.write(path, [one])
    tests = targets(path)
    try:
        for name, some in zip(("own", "folder", "users")[-len(tests) :], tests, strict=True):
            if copy.run(some, "-x")[0] != "passed":
                return name
    finally:
        copy.write(path, [])
    return None


def notice_together(copy: Copy, survivors: list[tuple[str, Change]], tests: tuple[str, ...]) -> list[bool]:
    """Whether one of these tests notices each survivor; all at once, then each by what failed."""
    apart: dict[str, list[Change]] = {}
    for path, one in survivors:
        others = apart.setdefault(path, [])
        if all(one.end <= other.begin or other.end <= one.begin for other in others):
            others.append(one)
    for path, made in apart.items():
        copy.write(path, made)
    limit_s, copy.limit_s = copy.limit_s, 3600
    outcome, failed = copy.run([*tests], "-n", "2")
    is_broken = outcome != "passed" and not failed
    for path in apart:
        copy.write(path, [])
    if len(survivors) > 1 and (is_broken or len(failed) > _MANY):
        # One of them may break every import.
        copy.limit_s, half = limit_s, len(survivors) // 2
        return [found for some in (survivors[:half], survivors[half:]) for found in notice_together(copy, some, tests)]
    # On a busy machine, or in a copy of the repository, a test may fail for another reason.
    failed = sorted({*failed} - {*copy.run(failed, "-m", "")[1]}) if failed else []
    found: list[bool] = []
    for path, one in survivors:
        copy.write(path, [one])
        found.append(is_broken or bool(failed) and copy.run(failed, "-x", "-m", "")[0] != "passed")
        copy.write(path, [])
    copy.limit_s = limit_s
    return found


def main() -> None:
    """Count, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--each", type=int, default=4, help="changes to a file")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one run of tests")
    parser.add_argument("--alone", action="store_true", help="do not run the other tests of CI with the survivors")
    parser.add_argument("--jobs", type=int, default=2, help="files at once")
    options = parser.parse_args()
    begun, found, broken = time.monotonic(), list[dict[str, Any]](), set[str]()
    survivors: list[tuple[dict[str, Any], tuple[str, Change]]] = []
    at_import: list[tuple[str, Change]] = []
    lock, free = threading.Lock(), queue.SimpleQueue[Copy]()

    def save() -> None:
        about = {"seed": options.seed, "commit": commit, "minutes": round((time.monotonic() - begun) / 60)}
        keep("mutants", {**about, "alone": options.alone, "not run": sorted(broken), "changes": found})

    def try_file(path: str) -> None:
        """Make the changes of a file."""
        copy = free.get()
        try:
            if any(copy.run(tests)[0] != "passed" for tests in targets(path)):
                broken.add(path)
            for one in [one for place, one in at_import if place == path and path not in broken]:
                keep_one(path, one, notice(copy, path, one))
        finally:
            free.put(copy)

    def keep_one(path: str, one: Change, noticed: str | None) -> None:
        about = {"kind": one.kind, "line": one.line, "old": one.old[:200], "new": one.new[:200]}
        with lock:
            found.append({"file": path, **about, "noticed": noticed, "verdict": None})
            survivors.extend([(found[-1], (path, one))] if noticed is None else [])
            print(f"{len(found)}/{len(drawn)}", *found[-1].values(), flush=True)

    commit, drawn = commit_of_code(), sample(options.seed, options.files, options.each)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = [Copy(f"{folder}/{i}", options.limit) for i in range(options.jobs)]
        for copy in copies:
            free.put(copy)
        for (path, one), outcome in zip(drawn, swap(copies[0].root, drawn, options.jobs), strict=True):
            if outcome == "not run":
                at_import.append((path, one))
            else:
                keep_one(path, one, "lines" if outcome == "noticed" else None)
        for _ in pool.map(try_file, dict.fromkeys(path for path, _ in at_import)):
            pass
        save()
        copy = copies[0]
        for name, tests in _STAGES.items() if not options.alone else ():
            found_by = notice_together(copy, [pair for _, pair in survivors], tests) if survivors else []
            for (row, _), noticed in zip(survivors, found_by, strict=True):
                row["noticed"] = name if noticed else None
            survivors = [pair for pair in survivors if pair[0]["noticed"] is None]
            save()


if __name__ == "__main__":
    main()
