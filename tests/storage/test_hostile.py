"""Damaged, hostile and mutated inputs: an error of ours or the saved values, and nothing else happens."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability import damage, hostile, loads
from benchmarks.reliability.fuzz import mutate
from benchmarks.reliability.targets import CHECKS, SEEDS
from tdfunc import TensorDict
from tests.helpers import examples

HARMLESS = {"refused", "equal"}
# A memmap folder has no checksums: damage may leave other values, in files that they fit.
UNCHECKED = {*HARMLESS, "wrong"}


# -- damage -----------------------------------------------------------------------------------------------------


def some_flips(raw):
    """A bit of every byte."""
    for place in range(len(raw)):
        yield raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]


def damages(suffixes, every, slow_suffixes):
    """Files and their damage: parts of it; in slow tests all flips of a bit, and every third change of a byte."""
    some = [(suffix, how, n) for suffix in suffixes for how, n in ((damage.cuts, every), (some_flips, every))]
    some += [(suffix, damage.extensions, 1) for suffix in suffixes]
    every_one = [
        (suffix, how, n) for suffix in slow_suffixes for how, n in ((damage.flips, 1), (damage.bytes_changed, 3))
    ]
    return some + [pytest.param(*one, marks=pytest.mark.slow) for one in every_one]


@pytest.mark.parametrize(("suffix", "how", "every"), damages([".safetensors", ".json"], 17, [".safetensors", ".json"]))
def test_damaged_shards(suffix, how, every, tmp_path):
    """A shard or index that is cut, longer or altered is refused, or gives the saved values."""
    counts = damage.damaged_folder(damage.SHARDS, suffix, how, tmp_path, every=every)

    assert set(counts) <= HARMLESS
    assert counts["refused"] > 3


@pytest.mark.parametrize(("suffix", "how", "every"), damages([".memmap", ".json"], 11, [".json"]))
def test_damaged_memmap_folders(suffix, how, every, tmp_path):
    """Damage of a folder is an error of ours or other values, never a crash or a write."""
    counts = damage.damaged_folder(damage.FOLDERS["TensorDict.load_memmap"], suffix, how, tmp_path, every=every)

    assert set(counts) <= UNCHECKED


# -- hostile inputs ---------------------------------------------------------------------------------------------


# The fast way to read is the one that checks least.
@pytest.mark.parametrize(
    "way",
    [way if way == "load, verify=False" else pytest.param(way, marks=pytest.mark.slow) for way in hostile.READERS],
)
def test_hostile_files(way, tmp_path):
    """A hostile file is an error of ours that names it, or loads; nothing is written."""
    path, results = tmp_path / "f.safetensors", {}
    for name, raw in hostile.file_cases().items():
        path.write_bytes(raw)
        results[name] = loads.outcome(hostile.READERS[way], path)

    assert {name: each for name, each in results.items() if isinstance(each, str) and str(path) not in each} == {}
    assert os.listdir(tmp_path) == ["f.safetensors"]


def load_or_refuse(folder):
    """The tree in a folder, or a text."""
    try:
        return loads.outcome(TensorDict.load_memmap, folder)
    except FileNotFoundError:
        return "no meta.json"


def test_hostile_folders(tmp_path):
    """A hostile folder is an error of ours, or loads; nothing is written."""
    results, written = {}, []
    for number, (name, change) in enumerate(hostile.folder_cases().items()):
        made = hostile.make_folder(tmp_path / str(number))
        change(made)
        before = loads.snapshot(made)
        results[name] = load_or_refuse(made)
        written += [] if loads.snapshot(made) == before else [name]

    assert {name: each for name, each in results.items() if not isinstance(each, str | TensorDict)} == {}
    assert written == []


@pytest.mark.slow
def test_all_hostile_inputs_are_watched(tmp_path):
    """No hostile input runs code, leaves its folder, or takes memory out of proportion to its size."""
    for part in ("files", "folders"):
        (tmp_path / part).mkdir()
    reports = [(name, size, r) for name, _, size, r in hostile.check_files(hostile.file_cases(), tmp_path / "files")]
    reports += hostile.check_folders(hostile.folder_cases(), tmp_path / "folders")

    assert len(reports) > len(hostile.file_cases())
    assert [(name, r.result) for name, _, r in reports if r.result not in ("refused", "loaded")] == []
    assert [(name, r.tried) for name, _, r in reports if r.tried != []] == []
    # What Python takes for the JSON of a header; and what a forked process copies.
    limits = [(name, r.extra_bytes, 30_000_000 + 60 * min(size, 10**7)) for name, size, r in reports]
    assert [(name, size, limit) for name, size, limit in limits if size >= limit] == []


# -- mutations --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The folder in which inputs are loaded, and the good files that they are made of."""
    root = tmp_path_factory.mktemp("good")
    loads.prepare(root)
    return root, {target: make(root) for target, make in SEEDS.items()}


@pytest.mark.parametrize("target", CHECKS)
def test_good_inputs_load(target, good):
    """The inputs that are mutated below load."""
    root, seeds = good
    results = [CHECKS[target](root, raw) for raw in seeds[target]]

    # Another program's index of our shards only without verifying.
    assert all("loaded" in result for result in results)


@pytest.mark.parametrize("target", CHECKS)
@examples(0.8)
@given(data=st.data())
def test_mutations(target, good, data):
    """A mutated input is an error of ours or gives the values in its files; nothing is written."""
    root, seeds = good
    raw = data.draw(st.sampled_from(seeds[target]))
    for seed in data.draw(st.lists(st.integers(0, 2**32), max_size=3)):
        raw = mutate(target, raw, seed) or raw
    for place, new in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.binary(max_size=3)), max_size=2)):
        raw = raw[:place] + new + raw[place + data.draw(st.integers(0, 2)) :]

    result = CHECKS[target](root, raw)

    assert set(result.split()) <= {"loaded", "raised"}
