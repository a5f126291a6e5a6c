"""The streams that dieharder reads are the draws that they claim to be, and its counts are what the page promises."""

import itertools
import json
import shutil

import numpy as np
import pytest

from benchmarks.randomness import streams
from benchmarks.randomness.__main__ import _RESULTS, STREAMS, TESTS, count, parse, tables
from tdfunc import random

CHUNK = streams._CHUNK


def first(stream, chunks):
    """The first chunks of a stream."""
    return np.concatenate(list(itertools.islice(stream(3), chunks)))


def test_one_key_goes_on_with_its_draws():
    """Chunks of a key are one long draw."""
    assert np.array_equal(first(streams.one_key, 2), random.bits(random.key(3), 2 * CHUNK).numpy())


@pytest.mark.parametrize(
    ("stream", "key"),
    [
        (streams.folded_keys, lambda i: random.fold_in(random.key(3), i)),
        (streams.split_keys, lambda i: random.split(random.key(3), CHUNK + 1)[i]),
    ],
    ids=["folded", "split"],
)
def test_each_number_is_of_a_key_of_its_own(stream, key):
    """A number is the first draw of its key; the last key of a split is split again."""
    numbers = first(stream, 2)

    for i in (0, 1, CHUNK - 1):
        assert numbers[i] == random.bits(key(i)).item()
    after = key(CHUNK) if stream is not streams.split_keys else random.split(key(CHUNK), CHUNK + 1)[0]
    assert numbers[CHUNK] == random.bits(after).item()
    assert len(np.unique(numbers)) == len(numbers)


def test_the_counts_are_those_of_good_numbers():
    """No stream of keys has a failure, and no more weak p-values than chance gives; the control fails."""
    kept = json.loads(_RESULTS.read_text())["streams"]
    by_stream = {name: [parse(line).assessment for line in kept[name]["lines"]] for name in kept}
    weyl = by_stream.pop("weyl")

    assert set(by_stream) | {"weyl"} == {stream.__name__ for stream in STREAMS}
    assert all(len(found) >= len(TESTS) for found in by_stream.values())
    assert {name for name, found in by_stream.items() if "FAILED" in found} == set()
    # One p-value in 100 is below 0.005 or above 0.995; eight or more of 204 come once in 1000 times.
    assert sum(found.count("WEAK") for found in by_stream.values()) < 8
    assert weyl.count("FAILED") > len(weyl) / 2


def test_the_table_has_a_row_for_each_stream():
    """Each stream is in the table, with a number of p-values."""
    text = tables()

    for words in STREAMS.values():
        assert text.count(f"| {words} |") == 1


@pytest.mark.skipif(shutil.which("dieharder") is None, reason="dieharder is not installed")
@pytest.mark.parametrize(("stream", "good"), [(streams.one_key, True), (streams.weyl, False)], ids=["key", "control"])
def test_a_run_reads_its_stream_and_judges_it(stream, good):
    """A short run of two tests passes on a key's draws, and fails on its counters."""
    counted = count(stream(1), [(8, 0), (100, 0)])

    found = [parse(line) for line in counted["lines"]]
    assert [result.test for result in found] == ["diehard_count_1s_str", "sts_monobit"]
    assert counted["bytes"] > 60e6
    assert all(result.assessment == "PASSED" for result in found) == good
