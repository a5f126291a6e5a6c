"""Runs the fast tests of changed lines, with each change made in the functions of a forked process.

`python -m benchmarks.mutants.swap CHANGES OUT --jobs 2` runs in a copy of the repository. CHANGES is a JSON list of
[path, *Change]. For each change, OUT gets a line: its place in CHANGES, and "noticed", "passed" or "not run". A change
is not run if its line is run at import, by another process, or by no fast test.

pytest collects the tests once, and each change costs a fork. At first, each test runs without a change, and coverage.py
records its lines. A test that fails after a fork without a change is left out, with the tests of its file.
"""

import argparse
import gc
import importlib
import inspect
import json
import os
import pkgutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

from benchmarks.mutants.changes import Change, apply

_OPTIONS = ("-q", "-p", "no:cacheprovider", "--tb=no", "-o", "filterwarnings=")
# For one run of a change: this time and a multiple of the tests' own.
_LEAST_S, _SLOWER = 5, 4

_Swaps = list[tuple[FunctionType, CodeType]]
_Functions = dict[tuple[str, str, int], list[FunctionType]]


class Loop:
    """A plugin of pytest that tries the changes in place of running the tests."""

    def __init__(self, drawn: list[tuple[str, Change]], out: Path, jobs: int, budget_s: float) -> None:
        self.drawn, self.out, self.jobs, self.budget_s = drawn, out, jobs, budget_s
        self.items: dict[str, pytest.Item] = {}
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, list[str]]] = {}
        self.left_out, self.sure = set[str](), set[str]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then try the changes, each in `jobs` processes."""
        self.items = {item.nodeid: item for item in session.items}
        for module in pkgutil.walk_packages(["tdfunc"], "tdfunc."):
            if not module.name.endswith(("__main__", ".demo")):
                importlib.import_module(module.name)
        functions = _functions()
        # A collection in each child would copy every page.
        gc.freeze()
        halves = [session.items[i :: self.jobs] for i in range(self.jobs)]
        for seconds, lines in _side_by_side([lambda some=some: self._measure(some) for some in halves]):
            self.seconds.update(seconds)
            for path, tests_of in lines.items():
                for line, tests in tests_of.items():
                    self.lines.setdefault(path, {}).setdefault(int(line), []).extend(tests)
        places = [range(i, len(self.drawn), self.jobs) for i in range(self.jobs)]
        _side_by_side([lambda some=some: self._try_all(some, functions) for some in places])
        return True

    def _measure(self, items: list[pytest.Item]) -> Any:
        """The seconds of the tests that pass, and for each changed line the tests that run it."""
        watch = coverage.Coverage(data_file=None, source=[os.path.abspath("tdfunc")], messages=False)
        seconds = dict[str, float]()
        watch.start()
        for item, following in zip(items, [*items[1:], None], strict=True):
            watch.switch_context(item.nodeid)
            begun = time.perf_counter()
            reports = runtestprotocol(item, log=False, nextitem=following)
            if not any(report.failed for report in reports):
                seconds[item.nodeid] = time.perf_counter() - begun
        watch.stop()
        wanted: dict[str, set[int]] = {}
        for path, change in self.drawn:
            wanted.setdefault(path, set()).update(_lines(change))
        lines = {}
        for path, numbers in wanted.items():
            found = watch.get_data().contexts_by_lineno(os.path.abspath(path))
            lines[path] = {n: [test for test in found.get(n, ()) if test in seconds] for n in numbers}
        return seconds, lines

    def _try_all(self, places: Iterable[int], functions: _Functions) -> None:
        for place in places:
            outcome = self._try(*self.drawn[place], functions)
            with self.out.open("a") as out:
                print(json.dumps([place, outcome]), file=out)

    def _try(self, path: str, change: Change, functions: _Functions) -> str:
        swaps = _swaps(path, change, functions)
        tests = self._tests(path, change) if swaps else []
        while tests:
            limit_s = _LEAST_S + _SLOWER * sum(self.seconds[test] for test in tests)
            outcome = _forked(lambda some=tests: self._run(some, swaps), limit_s)
            if outcome == "":
                return "passed"
            suspects = [outcome] if outcome else tests
            alone = "" if outcome in self.sure else _forked(lambda some=suspects: self._run(some, []), limit_s)
            if alone == "":
                self.sure.update(suspects[: len(suspects) == 1])
                return "noticed"
            self.left_out.update(test.partition("::")[0] for test in ([alone] if alone else suspects))
            tests = self._tests(path, change)
        return "not run"

    def _tests(self, path: str, change: Change) -> list[str]:
        """The tests that run the changed lines, up to the budget: quick ones of the file's own tests come first."""
        parts = [part.removeprefix("_") for part in Path(path).with_suffix("").parts[1:]]
        own = str(Path("tests", *parts[:-1], f"test_{parts[-1]}.py"))
        found = {test for line in _lines(change) for test in self.lines[path].get(line, ())}
        found = {test for test in found if test.partition("::")[0] not in self.left_out}
        chosen, spent_s = list[str](), 0.0
        for test in sorted(found, key=lambda test: (not test.startswith(own), self.seconds[test])):
            spent_s += self.seconds[test]
            if chosen and spent_s > self.budget_s:
                break
            chosen.append(test)
        return chosen

    def _run(self, tests: list[str], swaps: _Swaps) -> str:
        """The first test that fails, or an empty text."""
        for function, code in swaps:
            function.__code__ = code
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return item.nodeid
        return ""


def _lines(change: Change) -> range:
    return range(change.line, change.line + change.old.count("\n") + 1)


def _functions() -> _Functions:
    """All functions of tdfunc by file, qualified name and first line."""
    gc.unfreeze()
    found: _Functions = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__module__ and one.__module__.partition(".")[0] == "tdfunc":
            code = one.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(one)
    return found


def _swaps(path: str, change: Change, functions: _Functions) -> _Swaps:
    """The functions that a change affects, with their new code; none for code that runs at import.

    There are none either for a change of the free variables: Python refuses code with another number of them.
    """
    file, source = os.path.abspath(path), Path(path).read_text()
    before, after = (compile(text, file, "exec") for text in (source, apply(source, [change])))
    differ = [(old, new) for old, new in _pairs(before, after) if old != new]
    if not differ or not differ[-1][0].co_flags & inspect.CO_OPTIMIZED:
        return []
    if any(len(old.co_freevars) != len(new.co_freevars) for old, new in differ):
        return []
    return [
        (function, new)
        for old, new in differ
        for function in functions.get((file, old.co_qualname, old.co_firstlineno), ())
    ]


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The two codes, and the codes inside them by their places."""
    yield old, new
    inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    if [one.co_name for one in inner[0]] == [one.co_name for one in inner[1]]:
        for pair in zip(*inner, strict=True):
            yield from _pairs(*pair)


def _side_by_side(works: list[Callable[[], Any]]) -> list[Any]:
    """What the functions return, each in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        children = list[int]()
        for i, work in enumerate(works):
            children.append(os.fork())
            if not children[-1]:
                with _ending():
                    Path(folder, str(i)).write_text(json.dumps(work()))
        for child in children:
            os.waitpid(child, 0)
        return [json.loads(Path(folder, str(i)).read_text()) for i in range(len(works))]


def _forked(work: Callable[[], str], limit_s: float) -> str | None:
    """What the function returns in a forked process, or None if it takes longer or dies."""
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if not child:
            with _ending():
                os.setsid()
                print(work(), file=out, flush=True)
        timer = threading.Timer(limit_s, os.killpg, (child, signal.SIGKILL))
        timer.start()
        os.waitpid(child, 0)
        timer.cancel()
        timer.join()
        out.seek(0)
        text = out.read()
        return text.rstrip("\n") if text else None


@contextmanager
def _ending() -> Iterator[None]:
    """End the forked process after this block."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main() -> None:
    """Try the changes of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants.swap")
    parser.add_argument("changes", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=10, help="seconds of tests for a change")
    options = parser.parse_args()
    drawn = [(path, Change(*change)) for path, *change in json.loads(options.changes.read_text())]
    pytest.main([*_OPTIONS, "tests"], plugins=[Loop(drawn, options.out, options.jobs, options.budget)])


if __name__ == "__main__":
    main()
