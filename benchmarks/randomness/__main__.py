"""Runs dieharder on streams of random keys: `python -m benchmarks.randomness [STREAM ...]`.

Streams have the names of their functions in `streams.py`; without a name all of them run, each for five minutes of CPU.
The tests of a stream read successive parts of it. The results are kept in `results.json`;
`python -m benchmarks.trust --show random` prints them.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.randomness import streams

_RESULTS = Path(__file__).with_name("results.json")
_SEED = 0
STREAMS = {
    streams.one_key: "the draws of one key",
    streams.split_keys: "a draw of each key of a split, and of further splits of its last key",
    streams.folded_keys: "a draw of `fold_in(key, i)`, i = 0, 1, 2, ...",
    streams.weyl: "control: the counter of one key, without the hash",
}
# Numbers of tests and their size of tuples: all that dieharder calls good, except marsaglia_tsang_gcd and
# most sizes of the rgb tests, which take nine tenths of the time of `dieharder -a`.
_PLAIN = (0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 100, 101, 102, 204, 205, 206, 207, 208)
TESTS = (
    *((test, 0) for test in _PLAIN),
    *((200, size) for size in (1, 2, 4, 8)),
    (201, 2),
    *((202, size) for size in (2, 3, 4, 5)),
    *((203, lag) for lag in (0, 1, 3, 7)),
    (209, 12),
)


class Result(NamedTuple):
    """One p-value."""

    test: str
    size: int
    p: float
    assessment: str


def count(chunks: Iterator[np.ndarray], tests: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Run tests on successive parts of a stream; return what they printed, and how many bytes they were given."""
    lines: list[str] = []
    size_bytes = 0
    columns = [flag for name in ("test_name", "ntuple", "pvalues", "assessment") for flag in ("-D", name)]
    for test, size in tests:
        command = ["dieharder", "-g", "200", "-d", str(test), "-n", str(size), "-c", ",", *columns]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                for chunk in chunks:
                    process.stdin.write(chunk.data)
                    size_bytes += chunk.nbytes
            except BrokenPipeError:
                printed = process.stdout.read().decode()
                lines += [re.sub(r"\s", "", line) for line in printed.splitlines() if line.strip()]
    return {"bytes": size_bytes, "lines": lines}


def parse(line: str) -> Result:
    """Return the p-value of a line that dieharder printed."""
    name, size, p, assessment = line.split(",")
    return Result(name, int(size), float(p), assessment)


def version() -> str:
    """Return dieharder's version."""
    printed = subprocess.run(["dieharder", "-V"], stdout=subprocess.PIPE, check=False, text=True).stdout
    return printed.split()[0]


# -- tables -----------------------------------------------------------------------------------------------------


def _kept() -> dict[str, Any]:
    return json.loads(_RESULTS.read_text())


def summary() -> dict[str, int]:
    """Return the p-values of the streams of keys, by dieharder's word for them, and their number."""
    streams_of_keys = [stream for stream in STREAMS if stream is not streams.weyl]
    lines = [line for stream in streams_of_keys for line in _kept()["streams"][stream.__name__]["lines"]]
    found = Counter(parse(line).assessment for line in lines)
    return {"p-values": len(lines), **{word: found[word] for word in ("PASSED", "WEAK", "FAILED")}}


def tables() -> str:
    """Return the table of what was counted, and its weak p-values."""
    kept = _kept()
    lines = [
        "## Random numbers", "",
        "| stream | GB read | p-values | PASSED | WEAK | FAILED |", "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    weak: list[str] = []
    tests: set[str] = set()
    for stream, words in STREAMS.items():
        counted = kept["streams"][stream.__name__]
        results = [parse(line) for line in counted["lines"]]
        tests |= {result.test for result in results}
        found = Counter(result.assessment for result in results)
        numbers = [f"{counted['bytes'] / 1e9:.1f}", len(results), found["PASSED"], found["WEAK"], found["FAILED"]]
        lines.append(f"| {words} | {' | '.join(map(str, numbers))} |")
        if stream is not streams.weyl:
            weak += [f"{r.test} ({r.size}) of {words}, {r.p:.4f}" for r in results if r.assessment == "WEAK"]
    return "\n".join(
        [
            *lines,
            "",
            f"dieharder {kept['version']}, seed {_SEED}, {len(TESTS)} runs a stream: {', '.join(sorted(tests))}.",
            f"Weak: {'; '.join(weak) or 'none'}.",
        ]
    )


def main() -> None:
    """Count the streams that are named."""
    names = sys.argv[1:] or [stream.__name__ for stream in STREAMS]
    for stream in STREAMS:
        if stream.__name__ in names:
            kept = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {"streams": {}}
            kept["version"] = version()
            kept["streams"][stream.__name__] = count(stream(_SEED), TESTS)
            _RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
